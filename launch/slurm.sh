#!/usr/bin/env bash
# Submits a training run to SLURM, with one process per GPU.
#
#   launch/slurm.sh [options] -- --config=FILE --workdir=DIR [flags of structinit_jax.main]
#
# Relative paths are relative to the root of this repository.
#
#   --name=NAME      job name (default: structinit_jax); a queued or running job is not submitted twice
#   --nodes=N        number of nodes (default: 1)
#   --gpus=N         GPUs per node (default: 8)
#   --cpus=N         CPU cores per GPU, for reading images (default: 8)
#   --time=LIMIT     time limit such as 12:00:00; at the limit the run saves, requeues and resumes
#   --partition=P, --account=A, --mem=M   passed to sbatch
#   --logs           follow the job's output
#   --cancel         cancel the job; its run can be resumed
#   --dry_run        print the commands without running them
#   --help           print this text
#
# The workdir must be on a file system that all nodes share. PYTHON=... selects the interpreter.

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
    *) unknown_option "$1" ;;
  esac
  shift
done
need sbatch "run this on a login node of the cluster"

case $action in
  logs) run tail -n 50 -F "$name.log" ;;
  cancel) run scancel --name="$name" --me ;;
  submit)
    need_flags "$@"
    if ! $dry_run && [[ -n $(squeue --me --noheader --name="$name") ]]; then
      echo "job $name is already queued or running; --logs follows it, --cancel cancels it"
      exit
    fi
    run sbatch --job-name="$name" --output="$name.log" --nodes="$nodes" \
      --ntasks-per-node="$gpus" --gpus-per-node="$gpus" --cpus-per-task="$cpus" \
      "${extra[@]}" launch/slurm.sbatch "$@"
    ;;
esac
