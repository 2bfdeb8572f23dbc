"""Lets an environment see the packages of the one that runs this: ``python benchmarks/peers/share.py ENVIRONMENT``.

Its own packages come first. Packages that both need are then the same, and installed once.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path


def share(environment: Path) -> Path:
    """Write the file that Python reads when it starts in that environment; returns it."""
    own = sysconfig.get_path("purelib", vars={"base": str(environment.absolute())})
    path = Path(own, "_shared.pth")
    path.write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    return path


if __name__ == "__main__":
    share(Path(sys.argv[1]))
