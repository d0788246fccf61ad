#!/usr/bin/env bash
# Try the built wheel as a user has it: a fresh virtual environment with nothing but the wheel and its dependencies.
# usage: smoke.sh PYTHON
set -euo pipefail
python=$1
root=$(cd "$(dirname "$0")/.." && pwd)

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --constraint "$root/requirements/dev.txt" "$root"/dist/*.whl

# From another folder, so that the source tree is not what gets imported.
cd "$folder"
venv/bin/python "$root/scripts/import_time.py"
venv/bin/kvcore --help >/dev/null
venv/bin/python "$root/tests/smoke.py"
