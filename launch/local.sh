#!/usr/bin/env bash
# Trains with several processes on this machine, one for each GPU, or as one machine of several.
#
#   launch/local.sh [options] -- --config=FILE --workdir=DIR [flags of structinit_jax.main]
#
# Relative paths are relative to the root of this repository.
#
#   --processes=N    number of processes (default: 2)
#   --cpu_devices=N  use N virtual CPU devices per process instead of GPUs
#   --port=PORT      port of the coordinator on 127.0.0.1 (default: 8476)
#   --machines=N     number of machines that run this script together (default: 1)
#   --machine=I      index of this machine, from 0 (default: 0)
#   --coordinator=A  address and port of the coordinator on machine 0, such as 10.0.0.1:8476
#   --dry_run        print the commands without running them
#   --help           print this text
#
# Without --cpu_devices, process i uses GPU i, or the i-th of CUDA_VISIBLE_DEVICES. When this script
# receives a signal (Ctrl-C included) in training, all processes save a checkpoint after the same step
# and exit with status 75. Run the same command again to resume. A second run in the same workdir is refused.

set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=launch/common.sh
source launch/common.sh

processes=2 cpu_devices='' port=8476 machines=1 machine=0 coordinator=''
while (($#)); do
  case $1 in
    --processes=*) processes=$(value_of "$1") ;;
    --cpu_devices=*) cpu_devices=$(value_of "$1") ;;
    --port=*) port=$(value_of "$1") ;;
    --machines=*) machines=$(value_of "$1") ;;
    --machine=*) machine=$(value_of "$1") ;;
    --coordinator=*) coordinator=$(value_of "$1") ;;
    --dry_run) dry_run=true ;;
    --help) show_help; exit ;;
    --) shift; break ;;
    *) unknown_option "$1" ;;
  esac
  shift
done
need_flags "$@"
[[ $processes =~ ^[1-9][0-9]*$ ]] || fail "--processes=$processes must be a positive number"
[[ $machines == 1 || -n $coordinator ]] || fail "--machines=$machines needs --coordinator=HOST:PORT"
# Two coordinators can listen on the same port, but the processes of both runs would fail.
if [[ -z $coordinator ]] && ! $dry_run && (: 3<> "/dev/tcp/127.0.0.1/$port") 2> /dev/null; then
  fail "--port=$port is in use, perhaps by another run: choose another port"
fi

gpus=()
if [[ -n ${CUDA_VISIBLE_DEVICES:-} && -z $cpu_devices ]]; then
  IFS=, read -ra gpus <<< "$CUDA_VISIBLE_DEVICES"
  ((processes <= ${#gpus[@]})) ||
    fail "--processes=$processes, but CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES lists only ${#gpus[@]}"
fi

# Set before the first process starts, so that a signal never leaves processes behind.
pids=() stopped=0 signaled=0
trap 'stopped=1 signaled=1; kill -TERM "${pids[@]}" 2> /dev/null || true' INT TERM
for ((i = 0; i < processes && !stopped; i++)); do
  if [[ -n $cpu_devices ]]; then
    virtual=--xla_force_host_platform_device_count=$cpu_devices
    devices=(JAX_PLATFORMS=cpu "XLA_FLAGS=${XLA_FLAGS:-} $virtual")
  else
    devices=("CUDA_VISIBLE_DEVICES=${gpus[i]:-$i}")
  fi
  command=(env "${devices[@]}" "${PYTHON:-python}" -m structinit_jax.main "$@"
    "--coordinator_address=${coordinator:-127.0.0.1:$port}"
    "--num_processes=$((machines * processes))" "--process_id=$((machine * processes + i))")
  if $dry_run; then
    run "${command[@]}"
  else
    "${command[@]}" &
    pids+=($!)
  fi
done
$dry_run && exit

# The first failure ends all processes: the others would wait for the failed one forever. There is
# no process substitution above, because `wait -n` of bash 5.3 would return for it too.
status=0
for ((left = ${#pids[@]}; left > 0; left--)); do
  code=0
  wait -n 2> /dev/null || code=$? # bash would report processes that are killed below
  while ((code > 128 && signaled)); do # a signal to this script ended the wait
    signaled=0
    code=0
    wait -n 2> /dev/null || code=$?
  done
  if ((code != 0 && status == 0)); then
    status=$code
    # Not TERM: the others would wait to agree on a step with the process that has exited.
    ((code == 75)) || kill -KILL "${pids[@]}" 2> /dev/null || true
  fi
done
exit "$status"
