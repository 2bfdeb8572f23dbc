"""``gpubuf train``: the options, which are the settings of `TrainConfig`, and what they start."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

from gpubuf.commands import find_modules_here, whole_number
from gpubuf.train.config import (
    ALGORITHM_DEFAULTS,
    CHANGEABLE_ON_RESUME,
    TORCH_PREFIX,
    UPDATES,
    TrainConfig,
    UsageError,
    defaults,
    setting_types,
)

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
    needed = _NEEDED if config is None or config.env.startswith(TORCH_PREFIX) else ("gymnasium", *_NEEDED)
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f'training needs {", ".join(missing)}; pip install "gpubuf[train]"')

    find_modules_here()

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


def add(commands: Any) -> None:
    # An option that is not given is absent, so that --resume can tell given options from defaults.
    parser = commands.add_parser(
        "train",
        help="train an agent on an environment",
        description="Train soft actor-critic, one of its descendants or TD3 on an environment, Gymnasium's or one made "
        "of tensor operations, and evaluate it.",
        epilog="Exit codes: 0 done, 1 training diverged, 2 the request can't be met, 130 "
        "interrupted by Ctrl-C and saved. With --resume, only "
        f"{', '.join(_option(name) for name in sorted(CHANGEABLE_ON_RESUME))} may be changed.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    run = parser.add_argument_group("the run")
    _setting(run, "env", "NAME", "Gymnasium id (module:id imports the module first), or torch/Pendulum on the device")
    run.add_argument("--algo", choices=list(ALGORITHM_DEFAULTS), help="the algorithm (default: sac)")
    mode = run.add_mutually_exclusive_group()
    mode.add_argument("--prioritized", action="store_true", help="draw batches by priority")
    mode.add_argument("--uniform", dest="prioritized", action="store_false", help="draw them uniformly (the default)")
    _setting(run, "device", "NAME", "auto (CUDA if there is one), cpu, cuda or cuda:N")
    _setting(run, "seed", "N", "of everything random")
    _setting(run, "total_steps", "N", "transitions to collect")
    _setting(run, "num_envs", "N", "environments stepped together")
    _setting(run, "threads", "N", "CPU threads of PyTorch (default: 1 for small networks)")
    _switch(run, "cuda_graph", "capture updates, and steps on the device, into CUDA graphs (default: on CUDA)")
    _switch(run, "compile", "compile losses and gradients with torch.compile (default: off)")
    _switch(run, "bfloat16", "compute layers in bfloat16 in updates")
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
    run.add_argument(
        "--track",
        action="append",
        choices=("tensorboard", "wandb"),
        help="also send all records to TensorBoard or Weights & Biases; with --resume again",
    )
    run.add_argument("--quiet", action="store_true", help="no progress, only the result")

    learning = parser.add_argument_group("learning")
    _setting(learning, "batch_size", "N", "transitions an update draws")
    _setting(learning, "buffer_size", "N", "capacity in transitions (default: --total-steps, at most 1,000,000)")
    _setting(learning, "learning_starts", "N", "transitions collected at random before the first update")
    _setting(learning, "update_ratio", "X", f"updates per transition{_more_updates()}")
    _setting(learning, "learning_rate", "X", "of Adam or AdamW, for actor, critics and temperature")
    _setting(learning, "policy_every", "N", "updates for each that also trains policy and temperature")
    _setting(learning, "gamma", "X", "discount")
    _setting(learning, "n_steps", "N", "steps of a transition, whose rewards are summed")
    _switch(learning, "share_next", "store observations once, in half the memory (default: twice)")
    _setting(learning, "tau", "X", "share of the critics that enters their targets at each update")
    _setting(learning, "critics", "N", "Q functions in the ensemble")
    learning.add_argument(
        "--hidden",
        type=_widths,
        metavar="N,N",
        help="widths of the hidden layers" + _by_algorithm("hidden"),
    )
    _setting(learning, "atoms", "N", "values in the support of a critic's distribution")
    _setting(learning, "v_min", "X", "lowest value of that support")
    _setting(learning, "v_max", "X", "highest value of that support")
    _switch(learning, "scale_rewards", "divide rewards by the spread of the returns" + _by_algorithm("scale_rewards"))
    text = "give observations mean 0 and variance 1" + _by_algorithm("normalize_observations")
    _switch(learning, "normalize_observations", text)
    _setting(learning, "noise_hold", "N", "most steps for which exploration holds the same noise")
    _setting(learning, "priority_alpha", "X", "exponent of the priorities")
    _setting(learning, "priority_beta", "X", "exponent of the importance weights at the start; 1 at the end")

    records = parser.add_argument_group("records")
    _setting(records, "eval_episodes", "N", "episodes of the final evaluation")
    _setting(records, "eval_every", "N", "transitions between evaluations for the curve; 0 for none")
    _setting(records, "log_every", "N", "transitions between records of the losses")
    _setting(records, "checkpoint_every", "N", "transitions between checkpoints; 0 for one at the end only")


#: How the default of a setting follows from the number of environments on a device, in words.
ON_DEVICE = {
    "num_envs": "64",
    "total_steps": "500 an environment if that is more",
    "learning_starts": "10 an environment if that is more",
    "update_ratio": "16 updates whenever all have stepped",
    "eval_every": "50 an environment if that is more",
    "eval_episodes": "256",
    "log_every": "25 an environment if that is more",
}


def _setting(group: Any, name: str, metavar: str, text: str) -> None:
    """The option for the setting ``name``, whose type and default `TrainConfig` and the algorithms know."""
    default = ALGORITHM_DEFAULTS[TrainConfig.algo].get(name, getattr(TrainConfig, name))
    if name in ON_DEVICE:
        default = defaults(TrainConfig.env)[name]
        text = f"{text} (default: {default}; with torch/ environments {ON_DEVICE[name]})"
    elif name in ALGORITHM_DEFAULTS[TrainConfig.algo]:
        text += _by_algorithm(name)
    elif default is not None:
        text = f"{text} (default: {default})"
    kind = setting_types()[name][0]
    group.add_argument(_option(name), type=whole_number if kind is int else kind, metavar=metavar, help=text)


def _by_algorithm(name: str) -> str:
    """The defaults of a setting that depends on the algorithm: sac's, and those that differ from it."""
    of_each = {algo: settings[name] for algo, settings in ALGORITHM_DEFAULTS.items()}
    usual = of_each[TrainConfig.algo]
    shown = [] if usual is None else [_written(usual)]
    shown += [f"{algo} {_written(value)}" for algo, value in of_each.items() if value not in (usual, None)]
    return f" (default: {'; '.join(shown)})" if shown else ""


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _more_updates() -> str:
    return "".join(f", {times} times as many with {algo}" for algo, times in UPDATES.items())


def _switch(group: Any, name: str, text: str) -> None:
    """The pair of options ``--name`` and ``--no-name``."""
    group.add_argument(_option(name), action=argparse.BooleanOptionalAction, help=text)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _widths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(width) for width in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected widths such as 256,256, got {text!r}") from None
