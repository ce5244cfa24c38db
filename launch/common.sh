# shellcheck shell=bash
# Functions shared by the scripts in this directory, which source this file.

dry_run=false

fail() {
  echo "error: $*" >&2
  exit 1
}

# macOS has bash 3.2, which treats an empty array as an unset variable.
((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) ||
  fail "bash $BASH_VERSION is too old: install 4.4 or newer, on macOS with 'brew install bash'"

# Prints the comment at the top of the script as its help text. $0 may be relative to the directory
# that the script was called from, which is no longer the current one.
show_help() {
  (cd "$OLDPWD" && sed -n '2,/^$/s/^# \{0,1\}//p' "$0")
}

# Runs a command with side effects, or prints it in a dry run.
run() {
  if $dry_run; then
    printf '+ %s\n' "$(printf '%q ' "$@")"
  else
    "$@"
  fi
}

# Prints the value of an option such as --name=x.
value_of() {
  [[ -n "${1#*=}" ]] || fail "${1%%=*} needs a value, such as ${1%%=*}=VALUE"
  printf '%s' "${1#*=}"
}

need() {
  $dry_run || command -v "$1" > /dev/null || fail "$1 is not installed: $2"
}

# Fails unless flags of structinit_jax.main were given, including --workdir.
need_flags() {
  (($#)) || fail "nothing to train: pass the flags of structinit_jax.main after --"
  [[ " $*" =~ \ --?(workdir|flagfile) ]] || fail "--workdir=DIR is required after --"
}

unknown_option() {
  fail "unknown option $1; pass the flags of structinit_jax.main after --"
}
