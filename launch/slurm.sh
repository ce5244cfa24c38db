#!/usr/bin/env bash
# Submits a training run to SLURM, with one process per GPU.
#
#   launch/slurm.sh [options] -- --config=FILE --workdir=DIR [flags of structinit_jax.main]
#
# Relative paths are relative to the root of this repository.
#
#   --name=NAME        job name (default: structinit_jax); the output goes to NAME-JOB.log
#   --nodes=N          number of nodes (default: 1)
#   --gpus=[TYPE:]N    GPUs per node, such as 4 or h100:8 (default: 8)
#   --cpus=N           CPU cores per GPU, for reading images (default: 8)
#   --container=IMAGE  run in this container image (needs Pyxis); the repository is mounted in it
#   --mounts=A:B,...   more directories to mount in the container, such as the workdir
#   --dry_run          print the commands without running them
#   --help             print this text
#
# Other options are passed to sbatch unchanged: --time=12:00:00 --partition=P --account=A --qos=Q
# --constraint=C --reservation=R. --gres=gpu:h100:4 replaces --gpus-per-node; pass --gpus=4, too.
# At the time limit, the run saves a checkpoint, requeues itself and resumes. The workdir must be on a
# file system that all nodes share. PYTHON=FILE selects the interpreter.

set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=launch/common.sh
source launch/common.sh

name=structinit_jax nodes=1 gpus=8 cpus=8 container='' mounts='' extra=()
while (($#)); do
  case $1 in
    --name=*) name=$(value_of "$1") ;;
    --nodes=*) nodes=$(value_of "$1") ;;
    --gpus=*) gpus=$(value_of "$1") ;;
    --cpus=*) cpus=$(value_of "$1") ;;
    --container=*) container=$(value_of "$1") ;;
    --mounts=*) mounts=$(value_of "$1") ;;
    --dry_run) dry_run=true ;;
    --help) show_help; exit ;;
    --) shift; break ;;
    --config* | --workdir* | [!-]*) unknown_option "$1" ;;
    *) extra+=("$1") ;;
  esac
  shift
done
[[ $gpus =~ ^([A-Za-z][A-Za-z0-9_.-]*:)?[1-9][0-9]*$ ]] || fail "--gpus=$gpus must be N or TYPE:N"
[[ -z $mounts || -n $container ]] || fail "--mounts=$mounts needs --container=IMAGE"
[[ " ${extra[*]}" == *" --gres="* ]] || extra+=("--gpus-per-node=$gpus")
need sbatch "run this on a login node of the cluster"
need_flags "$@"

if [[ -n $container ]]; then # options of srun, for slurm.sbatch
  set -- "--container-image=$container" "--container-workdir=$PWD" \
    "--container-mounts=$PWD:$PWD${mounts:+,$mounts}" "$@"
fi
run sbatch --job-name="$name" --output="%x-%j.log" --nodes="$nodes" \
  --ntasks-per-node="${gpus##*:}" --cpus-per-task="$cpus" "${extra[@]}" launch/slurm.sbatch "$@"
