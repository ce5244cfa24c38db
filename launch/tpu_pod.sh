#!/usr/bin/env bash
# Trains on a Cloud TPU slice, from one host to a pod, using gcloud.
#
#   launch/tpu_pod.sh create  --name=NAME --zone=ZONE --type=TYPE [options]
#   launch/tpu_pod.sh install --name=NAME --zone=ZONE
#   launch/tpu_pod.sh run     --name=NAME --zone=ZONE -- --config=FILE --workdir=DIR [flags]
#   launch/tpu_pod.sh logs    --name=NAME --zone=ZONE
#   launch/tpu_pod.sh stop    --name=NAME --zone=ZONE    save a checkpoint and stop the run
#   launch/tpu_pod.sh delete  --name=NAME --zone=ZONE    delete the slice, which costs money until then
#
#   --type=TYPE      accelerator type: v4-N, v5litepod-N (v5e), v5p-N or v6e-N (default: v5litepod-8)
#   --version=V      runtime version (default: the one for the accelerator type)
#   --bucket=BUCKET  install mounts gs://BUCKET at ~/bucket on every worker, for data
#   --spot           use a spot slice: cheaper, but may be preempted at any time
#   --reserved       use a reservation
#   --network=N, --subnetwork=N, --service-account=A, --project=P   passed to gcloud
#   --dry_run        print the commands without running them
#   --help           print this text
#
# Every action can be repeated: create waits for a slice that was already requested, and while a run is
# in progress, run does nothing and install is refused. All workers start the same command at the same
# time, because each waits for the others; run shows the first lines of their logs. The workdir must be
# in a bucket (--workdir=gs://BUCKET/RUN) or on a file system that all hosts share, such as Filestore.
# install copies the last commit of this repository and installs its own Python.

set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=launch/common.sh
source launch/common.sh

[[ ${1:-} != --help ]] || { show_help; exit; }
action=${1:-}
shift || true
name='' zone='' type=v5litepod-8 version='' bucket='' project=() options=()
while (($#)); do
  case $1 in
    --name=*) name=$(value_of "$1") ;;
    --zone=*) zone=$(value_of "$1") ;;
    --type=*) type=$(value_of "$1") ;;
    --version=*) version=$(value_of "$1") ;;
    --bucket=*) bucket=$(value_of "$1") bucket=${bucket#gs://} ;;
    --project=*) project=("--project=$(value_of "$1")") ;;
    --network=* | --subnetwork=* | --service-account=*)
      value_of "$1" > /dev/null
      options+=("$1")
      ;;
    --spot | --reserved) options+=("$1") ;;
    --dry_run) dry_run=true ;;
    --help) show_help; exit ;;
    --) shift; break ;;
    *) unknown_option "$1" ;;
  esac
  shift
done
[[ -n $name ]] || fail "--name=NAME is required: the name of the slice"
[[ -n $zone ]] || fail "--zone=ZONE is required, such as us-west4-a"
if [[ -z $version ]]; then
  case $type in
    v4-*) version=tpu-ubuntu2204-base ;;
    v5litepod-*) version=v2-alpha-tpuv5-lite ;;
    v5p-*) version=v2-alpha-tpuv5 ;;
    v6e-*) version=v2-alpha-tpuv6e ;;
    *) fail "--type=$type: use v4-N, v5litepod-N, v5p-N or v6e-N, or pass --version too" ;;
  esac
fi
need gcloud "see https://cloud.google.com/sdk/docs/install"
where=("--zone=$zone" "${project[@]}")

on_workers() { # arguments: workers, command
  run gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" --worker="$1" --command="$2"
}

# Prints the state of the slice and, if creating it failed, the reason. Shows errors of gcloud.
state() {
  gcloud compute tpus queued-resources describe "$name" "${where[@]}" \
    --format='value(state.state,state.failedData.error.message)'
}

case $action in
  create)
    if $dry_run || ! state > /dev/null 2>&1; then
      run gcloud compute tpus queued-resources create "$name" --node-id="$name" "${where[@]}" \
        --accelerator-type="$type" --runtime-version="$version" "${options[@]}"
    fi
    $dry_run && exit
    while now=$(state) || true; [[ $now != ACTIVE* ]]; do
      [[ $now != FAILED* && $now != SUSPENDED* ]] ||
        fail "the slice is $now: delete it, then create it again"
      echo "waiting for $name: ${now:-unknown}"
      sleep "${POLL_SECONDS:-20}"
    done
    ;;
  install)
    archive=$(mktemp -d)
    trap 'rm -rf "$archive"' EXIT
    [[ -z $(git status --porcelain) ]] ||
      echo "warning: uncommitted changes are not copied to the workers" >&2
    run git archive --output="$archive/structinit_jax.tar.gz" --prefix=structinit_jax/ HEAD
    run gcloud compute tpus tpu-vm scp "$archive/structinit_jax.tar.gz" "$name": "${where[@]}" \
      --worker=all
    # shellcheck disable=SC2016 # expands on the worker
    check='flock --nonblock ~/run.lock true || { echo "error: in use on $(hostname): stop the run first" >&2; exit 1; }'
    on_workers all "$check; rm -rf structinit_jax && tar xzf structinit_jax.tar.gz && \
bash structinit_jax/launch/tpu_install.sh $bucket"
    ;;
  run)
    need_flags "$@"
    arguments=$(printf '%q ' "$@")
    # shellcheck disable=SC2016 # expands on the worker
    check='[ -e ~/installed ] || { echo "error: not installed on $(hostname): run install" >&2; exit 1; }'
    on_workers all "$check; bash structinit_jax/launch/tpu_run.sh $arguments"
    ;;
  logs) on_workers 0 'tail -n 50 -F ~/run.log' ;;
  stop) # and wait for the lock of tpu_run.sh
    on_workers all "pkill -TERM -f '[s]tructinit_jax.main' || true; flock ~/run.lock true"
    ;;
  delete)
    run gcloud compute tpus queued-resources delete "$name" "${where[@]}" --force --quiet
    ;;
  *) fail "unknown action '$action': use create, install, run, logs, stop or delete; see --help" ;;
esac
