#!/usr/bin/env bash
# Download what a GPU machine without a package index lacks (CPython 3.12, x86-64), as wheels, into .whl/ at the root of
# the project, which is emptied first. That machine brings torch, triton and NumPy.
# Usage: fetch.sh [REQUIREMENT ...]   more packages than these, each without its dependencies
set -euo pipefail
cd "$(dirname "$0")/../.."
rm -rf .whl && mkdir .whl
platforms=()
for version in 2_28 2_27 2_17; do platforms+=(--platform "manylinux_${version}_x86_64"); done
for version in 2014 1; do platforms+=(--platform "manylinux${version}_x86_64"); done
for requirement in $(grep -v '^#' benchmarks/wheels/packages.txt) "$@"; do
  PIP_CONSTRAINT='' python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    "${platforms[@]}" -d .whl "$requirement"
done
# What travels is limited: large wheels are packed again with LZMA, which pip reads.
python3 - <<'PYTHON'
import pathlib, zipfile

for wheel in pathlib.Path(".whl").glob("*.whl"):
    if wheel.stat().st_size < 2**21:
        continue
    packed = wheel.with_suffix(".lzma")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_LZMA) as new:
        for item in old.infolist():
            new.writestr(item, old.read(item), compress_type=zipfile.ZIP_LZMA)
    packed.replace(wheel)
PYTHON
du -sh .whl
