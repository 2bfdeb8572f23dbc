"""Prints the conda recipe of what is in dist/, for rattler-build and conda-forge: ``python release/recipe.py``.

Versions and dependencies are those of pyproject.toml. conda-forge's names differ: PyTorch is ``pytorch`` there, and the
Triton of its builds for GPUs comes with it, so that it is only held to the same versions. One package serves all
systems; Numba compiles its CPU kernels.
"""

import hashlib
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEMPLATE = """\
schema_version: 1

context:
  version: "{version}"
  python_min: "{python_min}"

package:
  name: gpubuf
  version: ${{{{ version }}}}

source:
  url: https://pypi.org/packages/source/g/gpubuf/gpubuf-${{{{ version }}}}.tar.gz
  sha256: {sha256}

build:
  number: 0
  noarch: python
  script: ${{{{ PYTHON }}}} -m pip install . -vv --no-deps --no-build-isolation
  python:
    entry_points:
      - gpubuf = {command}

requirements:
  host:
    - python ${{{{ python_min }}}}.*
    - pip
    - {setuptools}
  run:
    - python >=${{{{ python_min }}}}
{run}
  run_constraints:
    - {triton}

tests:
  - python:
      imports:
        - gpubuf
        - gpubuf.data
        - gpubuf.objectives
      python_version: ${{{{ python_min }}}}.*
      # The metadata names Triton on Linux, which a PyTorch for the CPU alone does without.
      pip_check: false
  - script:
      - gpubuf info

about:
  homepage: {homepage}
  summary: {summary}
  license: {license}
  license_file: LICENSE
"""


def matched(requirement: str) -> str:
    """A requirement in conda's form: the name, a blank, the versions; markers are left out."""
    name, versions = re.fullmatch(r"([\w-]+)([^;]*).*", requirement).groups()
    return f"{name} {versions}".strip()


def recipe(sdist: Path) -> str:
    """The recipe of a source distribution, which need not be on PyPI yet."""
    file = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = file["project"]
    numba = project["optional-dependencies"]["numba"]
    needed = {line.partition(" ")[0]: line for line in map(matched, [*project["dependencies"], *numba])}
    triton = needed.pop("triton")
    needed["torch"] = f"py{needed['torch']}"
    return TEMPLATE.format(
        version=project["version"],
        python_min=project["requires-python"].removeprefix(">="),
        sha256=hashlib.sha256(sdist.read_bytes()).hexdigest(),
        command=project["scripts"]["gpubuf"],
        setuptools=matched(file["build-system"]["requires"][0]),
        run="\n".join(f"    - {line}" for line in needed.values()),
        triton=triton,
        homepage=project["urls"]["Repository"],
        summary=project["description"],
        license=project["license"],
    )


if __name__ == "__main__":
    (built,) = (ROOT / "dist").glob("*.tar.gz")
    print(recipe(built), end="")
