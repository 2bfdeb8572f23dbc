"""Train an agent on an environment.

Soft actor-critic, one of its descendants, TD3 or DQN, on an environment of Gymnasium or one made of tensor operations;
and evaluate it. Exit codes: 0 done, 1 training diverged, 2 the request can't be met, 130 interrupted by Ctrl-C and
saved.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

from gpubuf.commands import whole_number
from gpubuf.train import config as settings
from gpubuf.train.config import TrainConfig, UsageError

SIGNAL_EXIT = 128
"""Added to a signal's number, it gives the exit code of a process that the signal ended."""

_NEEDED = ("matplotlib",)


def run(options: dict[str, Any]) -> int:
    out: Path | None = options.pop("out", None)
    resumed = options.pop("resume", None)
    overwrite = options.pop("overwrite", False)
    quiet = options.pop("quiet", False)
    tracked = options.pop("track", [])
    # Options that make no sense are refused before PyTorch is imported, which takes seconds.
    config = TrainConfig.from_mapping(options) if resumed is None else None
    if resumed is not None and overwrite:
        raise UsageError("--resume and --overwrite contradict each other")
    # A run that goes on has its environment in its folder: it is looked at there.
    needed = _NEEDED if config is None or config.env.startswith(settings.TORCH_PREFIX) else ("gymnasium", *_NEEDED)
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f'training needs {", ".join(missing)}; pip install "gpubuf[train]"')

    # ``module:id`` is found in the working directory too, as by ``python -m gpubuf``.
    if "" not in sys.path:
        sys.path.append("")

    from gpubuf.train.environments import NotFiniteError
    from gpubuf.train.progress import LineReporter, Reporter
    from gpubuf.train.run import free_folder, resume, train
    from gpubuf.train.tracking import TRACKERS

    folder = _resume_folder(resumed, out) if config is None else out or free_folder(config)
    reporters = [Reporter() if quiet else LineReporter(), *(TRACKERS[name](folder) for name in dict.fromkeys(tracked))]
    try:
        if config is None:
            result = resume(folder, options, reporter=reporters)
        else:
            result = train(config, folder, overwrite=overwrite, reporter=reporters)
    except NotFiniteError as error:
        print(f"gpubuf train: {error}", file=sys.stderr)
        return 1
    return 0 if result.signal is None else SIGNAL_EXIT + result.signal


def _resume_folder(resumed: Path | bool, out: Path | None) -> Path:
    """The folder that ``--resume [FOLDER]`` and ``--out FOLDER`` mean together."""
    if isinstance(resumed, Path):
        if out is not None and out.resolve() != resumed.resolve():
            raise UsageError(f"a run goes on in its own folder: --resume {resumed} contradicts --out {out}")
        return resumed
    if out is None:
        raise UsageError("--resume needs the folder of the run, after it or in --out")
    return out


def add(parser: argparse.ArgumentParser) -> None:
    # An option that is not given is absent, so that --resume can tell given options from defaults.
    parser.argument_default = argparse.SUPPRESS
    changeable = ", ".join(map(_option, sorted(settings.CHANGEABLE_ON_RESUME)))
    parser.epilog = f"With --resume, only {changeable} may be changed."
    texts = settings.setting_texts()
    for heading, names in settings.groups().items():
        group = parser.add_argument_group(heading)
        for name in names:
            _add_setting(group, name, texts.get(name, "") + _default(name))
    files = parser.add_argument_group("files")
    files.add_argument("--out", type=Path, metavar="FOLDER", help="where to (default: a new folder under runs/)")
    resume = "go on with the run in FOLDER (default: that of --out)"
    files.add_argument("--resume", type=Path, nargs="?", const=True, metavar="FOLDER", help=resume)
    files.add_argument("--overwrite", action="store_true", help="replace the run that is in --out")
    track = "also send all records to TensorBoard or Weights & Biases; with --resume again"
    files.add_argument("--track", action="append", choices=("tensorboard", "wandb"), help=track)
    files.add_argument("--quiet", action="store_true", help="no progress, only the result")


def _add_setting(group: Any, name: str, text: str) -> None:
    """The option for the setting ``name``; a bool has two, ``--name`` and ``--no-name``."""
    kind = settings.setting_types()[name][0]
    if name == "prioritized":
        mode = group.add_mutually_exclusive_group()
        mode.add_argument("--prioritized", action="store_true", help=text)
        mode.add_argument("--uniform", dest=name, action="store_false", help="Draw them uniformly")
    elif name == "algo":
        names = list(settings.ALGORITHM_DEFAULTS)
        group.add_argument("--algo", choices=names, metavar="NAME", help=f"{text}: {', '.join(names)}")
    elif kind is bool:
        group.add_argument(_option(name), action=argparse.BooleanOptionalAction, help=text)
    else:
        read, metavar = _READ.get(kind, (_widths, "N,N"))
        group.add_argument(_option(name), type=read, metavar=metavar, help=text)


def _default(name: str) -> str:
    """The default of a setting; sac's and those that differ from it where it depends on the algorithm."""
    usual, default = settings.ALGORITHM_DEFAULTS[TrainConfig.algo], getattr(TrainConfig, name)
    shown = [] if default is None else [_written(default)]
    if name in ON_DEVICE:
        shown = [f"{settings.defaults(TrainConfig.env)[name]}", f"with torch/ environments {ON_DEVICE[name]}"]
    elif name in usual:
        of_each = {algo: each[name] for algo, each in settings.ALGORITHM_DEFAULTS.items()}
        shown = [] if usual[name] is None else [_written(usual[name])]
        shown += [f"{algo} {_written(value)}" for algo, value in of_each.items() if value not in (usual[name], None)]
    return f" (default: {'; '.join(shown)})" if shown else ""


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _widths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(width) for width in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected widths such as 256,256, got {text!r}") from None


#: How the text of an option is read, and what stands for it, by the type of a setting; widths are all else.
_READ: dict[type, tuple[Any, str]] = {str: (str, "NAME"), int: (whole_number, "N"), float: (float, "X")}

#: How the default of a setting follows from the number of environments on a device, in words.
ON_DEVICE = {
    "num_envs": "64",
    "update_ratio": "16 updates whenever all have stepped",
    "eval_episodes": "256",
    **{name: f"{each} an environment if that is more" for name, (_, each) in settings.TRANSITIONS.items()},
}
