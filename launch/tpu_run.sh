#!/usr/bin/env bash
# Starts training on one TPU worker in the background. 'launch/tpu_pod.sh run' does so on all workers.
#
#   tpu_run.sh --config=FILE --workdir=DIR [flags of structinit_jax.main]
#
# Prints the start of the log, until the devices are found. If the program ends before that, for
# example because of an unknown flag, this script exits with the same status.

set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=launch/common.sh
source launch/common.sh
if [[ ${1:-} == --help ]]; then
  show_help
  exit
fi

# The program inherits the lock and releases it when it ends.
exec 9> ~/run.lock
flock --nonblock 9 || { echo "a run is in progress on $(hostname)"; exit; }
touch ~/run.log
before=$(stat --format=%s ~/run.log)
nohup env JAX_PLATFORMS=tpu,cpu ~/venv/bin/python -m structinit_jax.main "$@" \
  >> ~/run.log 2>&1 < /dev/null &
exec 9>&-

new='' # new lines of the log
for ((i = 0; i < 600; i++)); do
  running=true
  kill -0 $! 2> /dev/null || running=false
  new=$(tail --bytes="+$((before + 1))" ~/run.log)
  if ! $running || [[ $new =~ devices:|joined ]]; then break; fi
  sleep 0.2
done
if $running; then
  head -n 30 <<< "$new"
else
  tail -n 30 <<< "$new"
  wait $!
fi
