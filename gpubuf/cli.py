"""The ``gpubuf`` command.

Exit codes: 0 done; 1 training failed, or a planned buffer fits nowhere; 2 what was asked for can't be done (the message
says why); 130 and 143 interrupted by Ctrl-C or SIGTERM, with everything saved.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gpubuf
from gpubuf.train.config import CHANGEABLE_ON_RESUME, TrainConfig, UsageError

if TYPE_CHECKING:
    from gpubuf.planning import Plan

_NEEDED = ("gymnasium", "rich", "matplotlib")
#: Samplers by the name of their option, and what each becomes with --slices.
_SLICED = {
    "uniform": "slices",
    "without-replacement": "slices-without-replacement",
    "prioritized": "prioritized-slices",
}
_SIGNAL_EXIT = 128
_SIGINT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line ``arguments`` (by default those of the process) and return the exit code."""
    parser = _parser()
    options = vars(parser.parse_args(arguments))
    command = options.pop("command")
    try:
        return {"train": _train, "plan": _plan}[command](options)
    except UsageError as error:
        print(f"gpubuf {command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"gpubuf {command}: stopped at once; what was saved before is still there", file=sys.stderr)
        return _SIGNAL_EXIT + _SIGINT


def _train(options: dict[str, Any]) -> int:
    out: Path | None = options.pop("out", None)
    resumed = options.pop("resume", None)
    overwrite = options.pop("overwrite", False)
    quiet = options.pop("quiet", False)
    # Options that make no sense are refused before PyTorch is imported, which takes seconds.
    config = TrainConfig.from_mapping(options) if resumed is None else None
    if resumed is not None and overwrite:
        raise UsageError("--resume and --overwrite contradict each other")
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f'training needs {", ".join(missing)}; pip install "gpubuf[train]"')

    from gpubuf.train.progress import choose_reporter
    from gpubuf.train.run import free_folder, resume, train
    from gpubuf.train.trainer import DivergedError

    reporter = choose_reporter(quiet)
    try:
        if config is None:
            result = resume(_resume_folder(resumed, out), options, reporter=reporter)
        else:
            folder = out or free_folder(config)
            result = train(config, folder, overwrite=overwrite, reporter=reporter)
    except DivergedError as error:
        print(f"gpubuf train: {error}", file=sys.stderr)
        return 1
    return 0 if result.signal is None else _SIGNAL_EXIT + result.signal


def _plan(options: dict[str, Any]) -> int:
    sampler = _SLICED[options["sampler"]] if options["slices"] else options["sampler"]

    from gpubuf.planning import parse_entry, plan

    try:
        entries = [parse_entry(text) for text in options["spec"]]
        spec = {key: (shape, dtype) for key, dtype, shape in entries}
        if len(spec) < len(entries):
            raise ValueError("a key is given twice")
        made = plan(spec, options["capacity"], sampler=sampler, budget=options["budget"], envs=options["envs"])
    except ValueError as error:
        raise UsageError(str(error)) from error
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        _print_tables(made)
    else:
        print(made)
    return 0 if made.auto else 1


def _print_tables(made: Plan) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    for heading, *lines in (made.key_table(), made.fit_table()):
        table = Table(*heading)
        for line in lines:
            table.add_row(*line)
        console.print(table)
    console.print(made.summary, markup=False, soft_wrap=True)


def _resume_folder(resumed: Path | bool, out: Path | None) -> Path:
    """The folder that ``--resume [FOLDER]`` and ``--out FOLDER`` mean together."""
    if isinstance(resumed, Path):
        if out is not None and out.resolve() != resumed.resolve():
            raise UsageError(f"a run goes on in its own folder: --resume {resumed} contradicts --out {out}")
        return resumed
    if out is None:
        raise UsageError("--resume needs the folder of the run, after it or in --out")
    return out


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpubuf", description=gpubuf.__doc__)
    parser.add_argument("--version", action="version", version=f"gpubuf {gpubuf.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_train(commands)
    _add_plan(commands)
    return parser


def _add_plan(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="say how much memory a buffer takes, and where it fits",
        description="Say how much memory a buffer takes, key by key, and where it fits on this machine.",
        epilog="Exit codes: 0 it fits, 1 it fits nowhere, 2 what was asked for makes no sense.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--spec",
        action="append",
        required=True,
        metavar="KEY=SHAPE:DTYPE",
        help="a key of a row, such as pixels=3x84x84:uint8 or next.reward=1:float32; once for each key",
    )
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--capacity", type=int, metavar="N", help="transitions")
    size.add_argument("--budget", metavar="BYTES", help="plan for as many transitions as fit, such as into 24GiB")
    parser.add_argument(
        "--sampler", choices=_SLICED, default="uniform", help="how batches are drawn (default: uniform)"
    )
    parser.add_argument("--slices", action="store_true", help="draw slices of trajectories")
    parser.add_argument("--envs", type=int, default=1, metavar="N", help="environments side by side (default: 1)")


def _add_train(commands: Any) -> None:
    # An option that is not given is absent, so that --resume can tell what was stated from what is default.
    parser = commands.add_parser(
        "train",
        help="train soft actor-critic on a Gymnasium environment",
        description="Train soft actor-critic on a Gymnasium environment with continuous actions, and evaluate it.",
        epilog="Exit codes: 0 done, 1 training diverged, 2 what was asked for can't be done, 130 interrupted by Ctrl-C "
        f"and saved. With --resume, only {', '.join(_option(name) for name in sorted(CHANGEABLE_ON_RESUME))} may be "
        "changed.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    run = parser.add_argument_group("the run")
    _setting(run, "env", "NAME", "Gymnasium id; module:id imports the module first")
    mode = run.add_mutually_exclusive_group()
    mode.add_argument("--prioritized", action="store_true", help="draw batches by priority (the default)")
    mode.add_argument("--uniform", dest="prioritized", action="store_false", help="draw batches uniformly")
    _setting(run, "device", "NAME", "auto (CUDA if there is one), cpu, cuda or cuda:N")
    _setting(run, "seed", "N", "of everything random")
    _setting(run, "total_steps", "N", "transitions to collect")
    _setting(run, "num_envs", "N", "environments stepped together")
    _setting(run, "threads", "N", "CPU threads of PyTorch (default: 1 for small networks)")
    run.add_argument("--out", type=Path, metavar="FOLDER", help="where to (default: a new folder under runs/)")
    run.add_argument(
        "--resume",
        type=Path,
        nargs="?",
        const=True,
        metavar="FOLDER",
        help="go on with the run in FOLDER (default: that of --out)",
    )
    run.add_argument("--overwrite", action="store_true", help="replace the run that is in --out")
    run.add_argument("--quiet", action="store_true", help="no progress, only the result")

    learning = parser.add_argument_group("learning")
    _setting(learning, "batch_size", "N", "transitions an update draws")
    _setting(learning, "buffer_size", "N", "capacity in transitions (default: --total-steps, at most 1,000,000)")
    _setting(learning, "learning_starts", "N", "transitions collected at random before the first update")
    _setting(learning, "update_ratio", "X", "updates a transition")
    _setting(learning, "learning_rate", "X", "of Adam, for actor, critics and temperature")
    _setting(learning, "gamma", "X", "discount")
    _setting(learning, "tau", "X", "share of the critics that enters their targets at each update")
    _setting(learning, "critics", "N", "Q functions in the ensemble")
    learning.add_argument(
        "--hidden",
        type=_widths,
        metavar="N,N",
        help=f"widths of the hidden layers (default: {','.join(map(str, TrainConfig.hidden))})",
    )
    _setting(learning, "priority_alpha", "X", "exponent of the priorities")
    _setting(learning, "priority_beta", "X", "exponent of the importance weights at the start; 1 at the end")

    records = parser.add_argument_group("records")
    _setting(records, "eval_episodes", "N", "episodes of the final evaluation")
    _setting(records, "eval_every", "N", "transitions between evaluations for the curve; 0 for none")
    _setting(records, "log_every", "N", "transitions between records of the losses")
    _setting(records, "checkpoint_every", "N", "transitions between checkpoints; 0 for one at the end only")


def _setting(group: Any, name: str, metavar: str, text: str) -> None:
    """The option for the setting ``name``, whose type and default `TrainConfig` knows."""
    default = getattr(TrainConfig, name)
    kind = int if default is None else type(default)
    if default is not None:
        text = f"{text} (default: {default})"
    group.add_argument(_option(name), type=kind, metavar=metavar, help=text)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _widths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(width) for width in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected widths such as 256,256, got {text!r}") from None
