#!/usr/bin/env bash
# Make the virtual environment, or say what is missing.
# usage: venv.sh PYTHON FOLDER
set -euo pipefail
python=$1 folder=$2

fail() {
  printf 'kvcore: %s\n' "$@" >&2
  exit 1
}

command -v "$python" >/dev/null || fail "no $python found: install Python 3.10 or newer, or give one: make PYTHON=/path/to/python3"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
  fail "Python 3.10 or newer is needed, $python is $("$python" -V 2>&1): give a newer one: make PYTHON=python3.12"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
  fail "$python cannot make virtual environments: on Debian and Ubuntu, apt-get install python3-venv"
command -v cargo >/dev/null || fail "no cargo found: a Rust toolchain (1.89 or newer) is needed, see https://rustup.rs"

"$python" -m venv --clear "$folder"
