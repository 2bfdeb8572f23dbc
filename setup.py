"""What pyproject.toml can't say: how a checkout is laid out, links of the README, and whether to compile kernels."""

import os
import re
import sys
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
# An editable install puts the package on the path, and nothing that lies beside it: this folder holds a link to gpubuf/
# and nothing else. In an sdist there is none, and setuptools makes an import hook, which type checkers do not run.
LINKS = ROOT / ".editable"


def description() -> str:
    """README.md with links that lead somewhere from another page: PyPI's."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    text = (ROOT / "README.md").read_text()
    text = re.sub(r"(?<=\]\()(?!https?:|#)", f"{urls['Repository']}/blob/main/", text)
    text = re.sub(r"(?<=src=\")(?!https?:)", f"{urls['Repository']}/raw/main/", text)
    return text.replace("REPOSITORY", urls["Repository"])


options = {}
if os.environ.get("GPUBUF_MACHINE_CODE"):
    # A wheel for Linux on x86-64, with Numba and what gpubuf needs in the environment that builds it.
    sys.path.insert(0, str(ROOT))
    from release import machine_code

    tag = "cp{}{}".format(*machine_code.PYTHON)
    options = {
        "ext_modules": [machine_code.extension()],
        "cmdclass": {"build_ext": machine_code.Build},
        "options": {"bdist_wheel": {"py_limited_api": tag}},
    }

setup(
    package_dir={"": LINKS.name} if "editable_wheel" in sys.argv and LINKS.exists() else {},
    long_description=description(),
    long_description_content_type="text/markdown",
    **options,
)
