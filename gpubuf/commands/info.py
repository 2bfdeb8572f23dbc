"""Say what gpubuf finds on this machine.

Devices, versions, tuned files, whether CUDA graphs and gathers from pinned memory work (both are tried), whether a C
compiler and Python.h are there for the first launch, and where compiled kernels are kept. Exit code: 0.
"""

from __future__ import annotations

import argparse
from typing import Any


def run(options: dict[str, Any]) -> int:
    import json

    from gpubuf.info import info
    from gpubuf.terminal import show

    found = info()
    if options["json"]:
        print(json.dumps(found.as_json(), indent=1))
        return 0
    for lines in found.tables():
        show(lines)
    return 0


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON, bytes as numbers")
