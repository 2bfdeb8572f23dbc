"""``gpubuf plan``: the tables of `gpubuf.plan`."""

from __future__ import annotations

from typing import Any

from gpubuf.commands import whole_number
from gpubuf.terminal import show
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
        entries = [parse_entry(text) for text in options["spec"]]
        spec = {key: (shape, dtype) for key, dtype, shape in entries}
        if len(spec) < len(entries):
            raise ValueError("a key is given twice")
        stored = dict(_pair(text, "KEY=DTYPE") for text in options["stored_as"])
        made = plan(
            spec,
            options["capacity"],
            sampler=sampler,
            budget=options["budget"],
            envs=options["envs"],
            dtypes={key: parse_dtype(name) for key, name in stored.items()},
            share_next=options["share_next"],
            next_capacity=options["next_capacity"],
            n_steps=options["n_steps"],
            writers=options["writers"],
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    show(made.key_table())
    show(made.fit_table())
    print(made.summary)
    return 0 if made.auto else 1


def _pair(text: str, form: str) -> tuple[tuple[str, ...], str]:
    key, equals, value = text.partition("=")
    if not (key and equals and value):
        raise ValueError(f"expected {form}, got {text!r}")
    return tuple(key.split(".")), value


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="say how much memory a buffer takes, and where it fits",
        description="Say how much memory a buffer takes, key by key, and where it fits on this machine.",
        epilog="Exit codes: 0 it fits, 1 it fits nowhere, 2 the request makes no sense.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--spec",
        action="append",
        required=True,
        metavar="KEY=SHAPE:DTYPE",
        help="a key of a row, such as pixels=3x84x84:uint8 or next.reward=1:float32; once for each key",
    )
    parser.add_argument(
        "--stored-as",
        action="append",
        default=[],
        metavar="KEY=DTYPE",
        help="the dtype in which a key, and the same key under next, is stored, such as observation=bfloat16",
    )
    parser.add_argument(
        "--share-next",
        action="store_true",
        help="store observations once, and read the next ones from the next row",
    )
    parser.add_argument(
        "--next-capacity",
        type=whole_number,
        metavar="N",
        help="room for next observations that are not in the next row (default: an eighth of the rows)",
    )
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--capacity", type=whole_number, metavar="N", help="transitions")
    size.add_argument("--budget", metavar="BYTES", help="plan for as many transitions as fit, such as into 24GiB")
    parser.add_argument(
        "--sampler", choices=_SLICED, default="uniform", help="how batches are drawn (default: uniform)"
    )
    parser.add_argument("--slices", action="store_true", help="draw slices of trajectories")
    parser.add_argument(
        "--n-steps", type=whole_number, default=1, metavar="N", help="steps of a transition (default: 1)"
    )
    parser.add_argument(
        "--envs", type=whole_number, default=1, metavar="N", help="environments side by side (default: 1)"
    )
    parser.add_argument(
        "--writers", type=whole_number, default=0, metavar="N", help="writers in other processes (default: 0)"
    )
