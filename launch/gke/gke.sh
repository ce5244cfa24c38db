#!/usr/bin/env bash
# Trains on GPU nodes or a TPU slice of GKE, as a JobSet.
#
#   launch/gke/gke.sh [options] -- --config=FILE --workdir=/workdir/DIR [flags of structinit_jax.main]
#
#   --name=NAME        name of the JobSet (default: structinit-jax)
#   --image=IMAGE      container image with '.[train,cuda12]' or '.[train,tpu]' of this package; its
#                      working directory has configs/
#   --claim=CLAIM      ReadWriteMany volume claim for /workdir, such as Filestore (default: workdir)
#   --nodes=N          number of nodes (default: 1)
#   --gpus=N           GPUs per node (default: 8)
#   --accelerator=A    node label (default: nvidia-h100-80gb)
#   --tpu=TYPE:AxB     a TPU slice instead: v4, v5e, v5p or v6e and its topology, such as v5e:4x4
#   --logs             follow the first pod's output
#   --delete           stop the run, which can be resumed, and delete the JobSet
#   --dry_run          print the commands without running them
#   --help             print this text
#
# Repeating the command does nothing while a run with the same settings is in progress. After the run has
# ended, or to change its settings, pass --delete first.

set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=launch/common.sh
source launch/common.sh

name=structinit-jax image='' claim=workdir nodes=1 gpus=8 accelerator=nvidia-h100-80gb tpu='' action=apply
while (($#)); do
  case $1 in
    --name=*) name=$(value_of "$1") ;;
    --image=*) image=$(value_of "$1") ;;
    --claim=*) claim=$(value_of "$1") ;;
    --nodes=*) nodes=$(value_of "$1") ;;
    --gpus=*) gpus=$(value_of "$1") ;;
    --accelerator=*) accelerator=$(value_of "$1") ;;
    --tpu=*) tpu=$(value_of "$1") ;;
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
    if [[ -n $tpu ]]; then
      [[ $tpu =~ ^(v4|v5e|v5p|v6e):[0-9]+(x[0-9]+){1,2}$ ]] ||
        fail "--tpu=$tpu must be v4, v5e, v5p or v6e and a topology, such as v5e:4x4"
      topology=${tpu#*:}
      case ${tpu%%:*} in
        v4) accelerator='tpu-v4-podslice' ;;
        v5e) accelerator='tpu-v5-lite-podslice' ;;
        v5p) accelerator='tpu-v5p-slice' ;;
        v6e) accelerator='tpu-v6e-slice' ;;
      esac
      chips=$((${topology//x/*}))
      # Hosts have four chips; small v5e and v6e slices are a single host with up to eight.
      if ((chips <= 4)) || { ((chips == 8)) && [[ $tpu == v[56]e:* ]]; }; then
        nodes=1
      else
        nodes=$((chips / 4)) chips=4
      fi
      manifest=$(< launch/gke/jobset-tpu.yaml)
      manifest=${manifest//@TOPOLOGY@/"$topology"}
      manifest=${manifest//@CHIPS@/"$chips"}
    else
      # A single process need not wait until its host name is known.
      join=--num_processes=1
      if ((nodes > 1)); then
        join="--coordinator_address=$name-workers-0-0.$name:8476 --num_processes=$nodes"
        # shellcheck disable=SC2016 # expands in the pod
        join+=' --process_id="$JOB_COMPLETION_INDEX"'
      fi
      manifest=$(< launch/gke/jobset.yaml)
      manifest=${manifest//@JOIN@/"$join"}
    fi
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
