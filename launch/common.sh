# shellcheck shell=bash
# Shared by the scripts in this folder, which source it.

dry_run=false

fail() {
  echo "error: $*" >&2
  exit 1
}

# Prints the comment at the head of the script: its manual.
show_help() {
  sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
}

# Runs a command that changes something, or prints it in a dry run.
run() {
  if $dry_run; then
    printf '+ %s\n' "$(printf '%q ' "$@")"
  else
    "$@"
  fi
}

# For the value of an option such as --name=x.
value_of() {
  [[ -n "${1#*=}" ]] || fail "${1%%=*} needs a value, such as ${1%%=*}=VALUE"
  printf '%s' "${1#*=}"
}

need() {
  $dry_run || command -v "$1" > /dev/null || fail "$1 is not installed: $2"
}
