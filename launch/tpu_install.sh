#!/usr/bin/env bash
# Installs the package on one TPU worker. 'launch/tpu_pod.sh install' does so on all workers.
#
#   tpu_install.sh [BUCKET]    BUCKET is mounted at ~/bucket
#
# The file ~/installed marks the worker as ready. Failures are reported on the caller's terminal.

set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=launch/common.sh
source launch/common.sh
if [[ ${1:-} == --help ]]; then
  show_help
  exit
fi
rm -f ~/installed
exec 3>&2 > ~/install.log 2>&1
finish() {
  [[ -e ~/installed ]] && return
  echo "error: install failed on $(hostname):" >&3
  tail -n 20 ~/install.log >&3
}
trap finish EXIT

# The image may not have the Python that the package needs, and uv would pick the newest.
export PATH="$HOME/.local/bin:$PATH"
command -v uv > /dev/null || curl -LsSf https://astral.sh/uv/install.sh | sh
uv venv --clear --python 3.13 ~/venv
uv pip install --python ~/venv/bin/python '.[train,tpu,gcs]'

if (($#)); then
  if ! command -v gcsfuse > /dev/null; then
    key=/usr/share/keyrings/cloud.google.asc
    sudo curl -LsSf -o "$key" https://packages.cloud.google.com/apt/doc/apt-key.gpg
    echo "deb [signed-by=$key] https://packages.cloud.google.com/apt gcsfuse-$(lsb_release -cs) main" |
      sudo tee /etc/apt/sources.list.d/gcsfuse.list
    sudo apt-get update
    sudo apt-get install --yes -o DPkg::Lock::Timeout=300 gcsfuse # Ubuntu updates itself at boot
  fi
  mkdir -p ~/bucket
  ! mountpoint ~/bucket || fusermount -u ~/bucket # perhaps another bucket
  gcsfuse --implicit-dirs "$1" ~/bucket
fi
touch ~/installed
