# shellcheck shell=bash
# Sourced by measure.sh and train.sh: installs what pack.sh packed, and defines `part` and `finish`.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
export OUT=${OUT:-out} PYTHONPATH=$PWD PYTHON=${PYTHON:-python3} QUICK=${QUICK:-}
mkdir -p "$OUT" .gpu/data
"$PYTHON" -m pip install --quiet --no-index --no-deps .gpu/wheels/*.whl
[ -d .gpu/data/train ] || tar -xzf .gpu/cifar10.tar.gz -C .gpu/data
failed=

# part NAME COMMAND...: runs a command, with its output in OUT/NAME.log.
part() {
  local name=$1
  shift
  echo "== $name"
  local start=$SECONDS
  "$@" >"$OUT/$name.log" 2>&1 || failed="$failed $name"
  tail -n 5 "$OUT/$name.log"
  echo "   $((SECONDS - start)) s"
}

# finish: names the parts that failed, and exits with 1 if there are any.
finish() {
  [ -z "$failed" ] && exit 0
  echo "failed:$failed"
  exit 1
}
