"""``gpubuf bench``, which is now ``python -m benchmarks`` in a clone of the repository."""

from __future__ import annotations

import argparse
from typing import Any

from gpubuf.train.config import UsageError


def run(options: dict[str, Any]) -> int:
    raise UsageError("the benchmarks are not part of the package: run `python -m benchmarks` in a clone of gpubuf")


def add(commands: Any) -> None:
    # No character starts an option here, so that any arguments of the old command get the same answer.
    parser = commands.add_parser("bench", help="moved: python -m benchmarks", prefix_chars="\0", add_help=False)
    parser.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
