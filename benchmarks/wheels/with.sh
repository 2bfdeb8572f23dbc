#!/usr/bin/env bash
# On the GPU machine: install .whl/ into a scratch folder beside the interpreter's own packages, and run a command there.
# Usage: with.sh COMMAND ...
set -euo pipefail
cd "$(dirname "$0")/../.."
site=${SITE:-$PWD/.site}
if [ ! -d "$site" ]; then
  compgen -G '.whl/*.whl' >/dev/null || {
    echo "there are no wheels in $PWD/.whl: run benchmarks/wheels/fetch.sh where there is an index, and bring .whl" >&2
    exit 2
  }
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" .whl/*.whl
fi
export PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec "$@"
