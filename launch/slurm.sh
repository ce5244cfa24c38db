#!/usr/bin/env bash
# Submits a training run to SLURM, with one process for each GPU.
#
#   launch/slurm.sh [options] -- --config=FILE --workdir=DIR [flags of structinit_jax.main]
#
#   --name=NAME      of the job (structinit_jax); one that is queued or runs is not submitted again
#   --nodes=N        (1)
#   --gpus=N         of each node (8)
#   --cpus=N         of each GPU, for reading images (8)
#   --time=LIMIT     such as 12:00:00; at the limit the run saves, is queued again and goes on
#   --partition=P, --account=A, --mem=M   as for sbatch
#   --logs           follow the job's output
#   --cancel         end the job; its run can be continued
#   --dry_run        print what would be done
#   --help           this text
#
# The workdir must be on a file system that all nodes share. PYTHON=... names another interpreter.

set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=launch/common.sh
source launch/common.sh

name=structinit_jax nodes=1 gpus=8 cpus=8 action=submit extra=()
while (($#)); do
  case $1 in
    --name=*) name=$(value_of "$1") ;;
    --nodes=*) nodes=$(value_of "$1") ;;
    --gpus=*) gpus=$(value_of "$1") ;;
    --cpus=*) cpus=$(value_of "$1") ;;
    --time=* | --partition=* | --account=* | --mem=*)
      value_of "$1" > /dev/null
      extra+=("$1")
      ;;
    --logs) action=logs ;;
    --cancel) action=cancel ;;
    --dry_run) dry_run=true ;;
    --help) show_help; exit ;;
    --) shift; break ;;
    *) fail "unknown option $1; flags of structinit_jax.main come behind --" ;;
  esac
  shift
done
need sbatch "run this on a login node of the cluster"

case $action in
  logs) run tail -n 50 -F "$name.log" ;;
  cancel) run scancel --name="$name" --me ;;
  submit)
    (($#)) || fail "nothing to train: give the flags of structinit_jax.main behind --"
    if ! $dry_run && [[ -n $(squeue --me --noheader --name="$name") ]]; then
      echo "job $name is queued or runs already; --logs follows it, --cancel ends it"
      exit
    fi
    run sbatch --job-name="$name" --output="$name.log" --nodes="$nodes" \
      --ntasks-per-node="$gpus" --gpus-per-node="$gpus" --cpus-per-task="$cpus" \
      "${extra[@]}" launch/slurm.sbatch "$@"
    ;;
esac
