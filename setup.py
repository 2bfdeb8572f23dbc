"""What pyproject.toml can't say: an editable install puts the package on the path, and nothing that lies beside it."""

import sys
from pathlib import Path

from setuptools import setup

# This folder holds a link to gpubuf/ and nothing else. In an sdist there is none, and setuptools makes an import hook,
# which type checkers do not run.
LINKS = Path(__file__).with_name(".editable")

setup(package_dir={"": LINKS.name} if "editable_wheel" in sys.argv and LINKS.exists() else {})
