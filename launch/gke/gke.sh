#!/usr/bin/env bash
# Trains on GPU nodes of GKE, as a JobSet.
#
#   launch/gke/gke.sh [options] -- --config=FILE --workdir=/workdir/DIR [flags of structinit_jax.main]
#
#   --name=NAME        name of the JobSet (default: structinit-jax)
#   --image=IMAGE      container image with this package; its working directory has configs/
#   --claim=CLAIM      ReadWriteMany volume claim for /workdir, such as Filestore (default: workdir)
#   --nodes=N          number of nodes (default: 1)
#   --gpus=N           GPUs per node (default: 8)
#   --accelerator=A    node label (default: nvidia-h100-80gb)
#   --logs             follow the first pod's output
#   --delete           stop the run, which can be resumed, and delete the JobSet
#   --dry_run          print the commands without running them
#   --help             print this text
#
# Repeating the command does nothing while a run with the same settings is in progress.

set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=launch/common.sh
source launch/common.sh

name=structinit-jax image='' claim=workdir nodes=1 gpus=8 accelerator=nvidia-h100-80gb action=apply
while (($#)); do
  case $1 in
    --name=*) name=$(value_of "$1") ;;
    --image=*) image=$(value_of "$1") ;;
    --claim=*) claim=$(value_of "$1") ;;
    --nodes=*) nodes=$(value_of "$1") ;;
    --gpus=*) gpus=$(value_of "$1") ;;
    --accelerator=*) accelerator=$(value_of "$1") ;;
    --logs) action=logs ;;
    --delete) action=delete ;;
    --dry_run) dry_run=true ;;
    --help) show_help; exit ;;
    --) shift; break ;;
    *) unknown_option "$1" ;;
  esac
  shift
done
need kubectl "see https://kubernetes.io/docs/tasks/tools"

case $action in
  logs)
    run kubectl logs --follow --selector="jobset.sigs.k8s.io/jobset-name=$name,batch.kubernetes.io/job-completion-index=0"
    ;;
  delete) run kubectl delete jobset "$name" --ignore-not-found ;;
  apply)
    [[ -n $image ]] || fail "--image=IMAGE is required: a container image with structinit_jax installed"
    need_flags "$@"
    arguments=''
    for argument in "$@"; do # as single-quoted YAML strings
      arguments+="                    - '${argument//\'/\'\'}'"$'\n'
    done
    manifest=$(< launch/gke/jobset.yaml)
    manifest=${manifest//@NAME@/"$name"}
    manifest=${manifest//@IMAGE@/"$image"}
    manifest=${manifest//@CLAIM@/"$claim"}
    manifest=${manifest//@NODES@/"$nodes"}
    manifest=${manifest//@GPUS@/"$gpus"}
    manifest=${manifest//@ACCELERATOR@/"$accelerator"}
    manifest=${manifest//@ARGUMENTS@/"${arguments%$'\n'}"}
    run kubectl apply --filename=- <<< "$manifest"
    if $dry_run; then
      printf '%s\n' "$manifest"
    fi
    ;;
esac
