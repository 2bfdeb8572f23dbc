"""Say how much memory a buffer takes, and where it fits.

Key by key, on this machine, as `gpubuf.plan` does. Exit codes: 0 it fits, 1 it fits nowhere, 2 the request makes no
sense.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from gpubuf.commands import whole_number
from gpubuf.terminal import show, wrapped
from gpubuf.train.config import UsageError

#: Samplers by the name of their option, and what each becomes with --slices.
_SLICED = {
    "uniform": "slices",
    "without-replacement": "slices-without-replacement",
    "prioritized": "prioritized-slices",
}


def run(options: dict[str, Any]) -> int:
    sampler = _SLICED[options["sampler"]] if options["slices"] else options["sampler"]

    from gpubuf.planning import parse_dtype, parse_entry, plan

    try:
        spec = {key: (shape, dtype) for key, dtype, shape in map(parse_entry, options["spec"])}
        if len(spec) < len(options["spec"]):
            raise ValueError("a key is given twice")
        stored = dict(_pair(text, "KEY=DTYPE") for text in options["stored_as"])
        same = ("budget", "envs", "share_next", "next_capacity", "n_steps", "writers")
        made = plan(
            spec,
            options["capacity"],
            sampler=sampler,
            dtypes={key: parse_dtype(name) for key, name in stored.items()},
            **{name: options[name] for name in same},
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    show(made.key_table())
    show(made.fit_table())
    print(wrapped(made.summary, sys.stdout))
    return 0 if made.auto else 1


def _pair(text: str, form: str) -> tuple[tuple[str, ...], str]:
    key, equals, value = text.partition("=")
    if not (key and equals and value):
        raise ValueError(f"expected {form}, got {text!r}")
    return tuple(key.split(".")), value


def add(parser: argparse.ArgumentParser) -> None:
    entry = "a key of a row, such as pixels=3x84x84:uint8 or next.reward=1:float32; once for each key"
    parser.add_argument("--spec", action="append", required=True, metavar="KEY=SHAPE:DTYPE", help=entry)
    stored = "the dtype in which a key, and the same key under next, is stored, such as observation=bfloat16"
    parser.add_argument("--stored-as", action="append", default=[], metavar="KEY=DTYPE", help=stored)
    once = "store observations once, and read the next ones from the next row"
    parser.add_argument("--share-next", action="store_true", help=once)
    room = "room for next observations that are not in the next row (default: an eighth of the rows)"
    parser.add_argument("--next-capacity", type=whole_number, metavar="N", help=room)
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--capacity", type=whole_number, metavar="N", help="transitions")
    size.add_argument("--budget", metavar="BYTES", help="plan for as many transitions as fit, such as into 24GiB")
    drawn = "how batches are drawn (default: uniform)"
    parser.add_argument("--sampler", choices=_SLICED, default="uniform", help=drawn)
    parser.add_argument("--slices", action="store_true", help="draw slices of trajectories")
    for name, default, text in (
        ("--n-steps", 1, "steps of a transition"),
        ("--envs", 1, "environments side by side"),
        ("--writers", 0, "writers in other processes"),
    ):
        text += f" (default: {default})"
        parser.add_argument(name, type=whole_number, default=default, metavar="N", help=text)
