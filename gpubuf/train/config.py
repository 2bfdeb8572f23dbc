"""The settings of a training run: one frozen dataclass, checked when it is made, stored beside the run as JSON.

Nothing here imports PyTorch, so that ``gpubuf train --help`` and a mistyped option answer at once."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Optional, TypeVar, Union, get_args, get_origin, get_type_hints

_SAC: dict[str, Any] = {
    "batch_size": 256,
    "learning_rate": 1e-3,
    "gamma": 0.99,
    "n_steps": 1,
    "tau": 0.005,
    "hidden": (256, 256),
    "critics": 2,
    "policy_every": 1,
    "atoms": None,
    "v_min": None,
    "v_max": None,
    "scale_rewards": False,
    "normalize_observations": False,
    "noise_hold": 1,
    "epsilon": None,
    "exploration": None,
    "frames": None,
}

#: By the name that ``--algo`` takes. A setting that is None has no meaning for the algorithm, and can't be given.
ALGORITHM_DEFAULTS: dict[str, dict[str, Any]] = {
    "sac": _SAC,
    "fastsac": {
        **_SAC,
        **{"learning_rate": 3e-4, "tau": 0.05, "hidden": (256, 128, 64), "policy_every": 2},
        **{"atoms": 101, "v_min": -10.0, "v_max": 10.0, "scale_rewards": True, "normalize_observations": True},
    },
    # FlashSAC's program has tau 0.01 and makes a million updates; docs/training.md says why a short run needs more.
    "flashsac": {
        **_SAC,
        **{"tau": 0.05, "hidden": (128,), "policy_every": 2},
        **{"atoms": 101, "v_min": -5.0, "v_max": 5.0, "scale_rewards": True, "noise_hold": 16},
    },
    "redq": {**_SAC, "learning_rate": 3e-4, "critics": 10, "policy_every": 5},
    "crossq": {**_SAC, "tau": None, "policy_every": 3},
    "td3": {**_SAC, "policy_every": 2},
    "discrete-sac": {**_SAC, "noise_hold": None},
    "dqn": {
        **_SAC,
        **{"batch_size": 128, "learning_rate": 5e-4, "hidden": (256,), "critics": None, "policy_every": None},
        **{"noise_hold": None, "epsilon": 0.05, "exploration": 0.5, "frames": 1},
    },
}

#: Updates for each update of ``sac``, where ``--update-ratio`` is not given.
UPDATES: dict[str, int] = {"redq": 5}

CONFIG_FILE = "config.json"

#: Options that a resumed run may change: they decide how long and where it runs, not what it has already learnt.
CHANGEABLE_ON_RESUME = frozenset(
    {"total_steps", "device", "threads", "cuda_graph", "compile", "eval_episodes", "checkpoint_every"},
)

#: Names of environments that are made of tensor operations on the device begin with it.
TORCH_PREFIX = "torch/"

#: Defaults in transitions: with Gymnasium, and for each environment on the device if that is more.
TRANSITIONS = {
    "total_steps": (10_000, 500),
    "learning_starts": (1_000, 10),
    "eval_every": (1_000, 50),
    "log_every": (500, 25),
}

_DEFAULT_CAPACITY = 1_000_000

#: Defaults of what only prioritized runs have.
_PRIORITIES = {"priority_alpha": 0.6, "priority_beta": 0.4}

#: Of algorithms whose priorities are squares of errors.
_PRIORITIES_OF = {"dqn": {"priority_alpha": 0.3}}

# The settings with a bound on their values, and whether a value is within it.
_BOUNDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "at least 1": (
        "total_steps num_envs threads batch_size buffer_size policy_every critics noise_hold eval_episodes log_every",
        lambda value: value >= 1,
    ),
    "at least 0": ("learning_starts eval_every checkpoint_every", lambda value: value >= 0),
    "at least 2": ("atoms", lambda value: value >= 2),
    # As many as a window of the buffer can have.
    "in 1 .. 64": ("n_steps frames", lambda value: 1 <= value <= 64),
    # PyTorch's generators take no more.
    "at least 0 and below 2**64": ("seed", lambda value: 0 <= value < 2**64),
    "in [0, 1]": ("gamma epsilon priority_alpha priority_beta", lambda value: 0 <= value <= 1),
    "in (0, 1]": ("tau exploration", lambda value: 0 < value <= 1),
    "above 0 and finite": ("update_ratio learning_rate", lambda value: 0 < value < math.inf),
    "finite": ("v_min v_max", math.isfinite),
    "one or more widths above 0": ("hidden", lambda value: len(value) > 0 and min(value) > 0),
}

_T = TypeVar("_T")
#: The type of a setting whose default the environment or the algorithm gives. None is allowed as an argument only; as
#: libraries that read the annotations must know (OmegaConf's ``structured``).
if TYPE_CHECKING:
    Filled = Annotated[_T, "filled by __post_init__"]
else:
    Filled = Optional
# None: the default comes from `defaults`, or from `ALGORITHM_DEFAULTS`.
_FILLED: Any = None


def defaults(env: str, num_envs: int | None = None) -> dict[str, int | float]:
    """The defaults of the settings that depend on the kind and the number of environments.

    Gymnasium's environments are slow, and every transition is worth an update. Thousands of environments on a device
    make more transitions than there is time to learn from. Their updates and intervals are therefore counted per step
    of all environments.
    """
    if not env.startswith(TORCH_PREFIX):
        least = {name: transitions for name, (transitions, _) in TRANSITIONS.items()}
        return {"num_envs": num_envs or 1, "update_ratio": 1.0, "eval_episodes": 20, **least}
    n = num_envs or 64
    grown = {name: max(least, each * n) for name, (least, each) in TRANSITIONS.items()}
    return {"num_envs": n, "update_ratio": min(1.0, 16 / n), "eval_episodes": 256, **grown}


class UsageError(ValueError):
    """A request that can't be met. The message says why; the command line shows it and exits with 2."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The settings of one run on one environment.

    Settings that depend on the environment or the algorithm, and are None, get their value from `defaults` or
    `ALGORITHM_DEFAULTS`. ``gpubuf train --help`` shows the texts below.

    Attributes:
        env: Gymnasium id of an environment with bounded continuous actions, or with one of several (module:id imports
            the module first); or torch/Pendulum or torch/Catch, whose copies live on the device.
        algo: The algorithm.
        prioritized: Draw batches by priority (Schaul et al. 2016), not uniformly.
        device: Of networks, buffer and updates: auto (CUDA if there is one), cpu, cuda or cuda:N. Gymnasium's
            environments run on the CPU.
        seed: Of everything random: PyTorch's global generator and the environments.
        total_steps: Transitions to collect, over all environments.
        num_envs: Environments stepped together.
        threads: CPU threads of PyTorch; by default as many as the size of the networks is worth.
        cuda_graph: Capture the update into a CUDA graph, and the step of environments on the device too; by default on
            a CUDA device.
        compile: Compile the losses and their gradients with torch.compile, which takes a minute or more.
        tf32: Let a GPU multiply float32 matrices with 10 bits of mantissa (TF32), during the run. On a CPU it changes
            nothing.
        bfloat16: Compute the networks' layers in bfloat16 in updates (torch.autocast). Weights, their moments, losses
            and the policy that acts stay float32.
        batch_size: Transitions an update draws.
        buffer_size: Capacity in transitions; by default all that are collected, at most one million.
        learning_starts: Transitions collected with random actions before the first update.
        update_ratio: Updates per transition, 1 in the SAC paper, five times as many with redq; 0.5 updates at every
            second transition.
        policy_every: Updates for each that also trains policy and temperature; the others train the critics alone.
        learning_rate: Of Adam or AdamW, for actor, critics and temperature.
        gamma: Discount.
        n_steps: Steps of a transition: rewards of so many steps are summed before the critics bootstrap.
        share_next: Store observations once: the next one of a transition is read from the next row.
        tau: Share of the target critics that each update replaces by the online critics, for algorithms with targets.
        hidden: Width of each hidden layer; with flashsac, of each residual block, and all the same.
        critics: Q functions in the ensemble.
        atoms: Values in the support of a critic that gives a distribution.
        v_min: Lowest value of that support.
        v_max: Highest value of that support, above the lowest.
        scale_rewards: Divide rewards by the spread of the returns so far, so that no return is above the highest value
            of the support (5 if there is none).
        normalize_observations: Give observations mean 0 and variance 1, by the running statistics of all that were
            stored; policy and critics see no others.
        noise_hold: Most steps for which exploration holds the same noise; 1 to draw it at every step.
        epsilon: Share of random actions at the end of exploration, from 1 at the first step; dqn only.
        exploration: Share of the run in which epsilon falls linearly; dqn only.
        frames: Observations of the last steps that the network sees together, each stored once; dqn only.
        priority_alpha: Exponent of the priorities, by default 0.6, of dqn's, which are squares, 0.3; prioritized only.
        priority_beta: Exponent of the importance weights at the first update, by default 0.4, annealed linearly to 1
            at the last step; prioritized only.
        eval_every: Transitions between two short evaluations for the curve; 0 for none.
        eval_episodes: Episodes of the evaluation that ends the run.
        log_every: Transitions between two records of the losses.
        checkpoint_every: Transitions between two checkpoints; 0 for one at the end only.
    """

    env: str = "Pendulum-v1"
    algo: str = "sac"
    prioritized: bool = False
    device: str = "auto"
    seed: int = 0
    total_steps: Filled[int] = _FILLED
    num_envs: Filled[int] = _FILLED
    threads: int | None = None
    cuda_graph: bool | None = None
    compile: bool = False
    tf32: bool = False
    bfloat16: bool = False
    batch_size: Filled[int] = _FILLED
    buffer_size: int | None = None
    learning_starts: Filled[int] = _FILLED
    update_ratio: Filled[float] = _FILLED
    policy_every: Filled[int] = _FILLED
    learning_rate: Filled[float] = _FILLED
    gamma: Filled[float] = _FILLED
    n_steps: Filled[int] = _FILLED
    share_next: bool = False
    tau: float | None = None
    hidden: Filled[tuple[int, ...]] = _FILLED
    critics: Filled[int] = _FILLED
    atoms: int | None = None
    v_min: float | None = None
    v_max: float | None = None
    scale_rewards: Filled[bool] = _FILLED
    normalize_observations: Filled[bool] = _FILLED
    noise_hold: int | None = None
    epsilon: float | None = None
    exploration: float | None = None
    frames: int | None = None
    priority_alpha: float | None = None
    priority_beta: float | None = None
    eval_every: Filled[int] = _FILLED
    eval_episodes: Filled[int] = _FILLED
    log_every: Filled[int] = _FILLED
    checkpoint_every: int = 0

    def __post_init__(self) -> None:
        if not self.env:
            raise UsageError("env must name an environment, got an empty string")
        self._fill_defaults()
        # A list where a library made the object (OmegaConf's to_object).
        object.__setattr__(self, "hidden", tuple(self.hidden))
        for bound, (names, holds) in _BOUNDS.items():
            for name in names.split():
                value = getattr(self, name)
                self._require(name, value is None or holds(value), bound)
        below = f"below total_steps ({self.total_steps})"
        self._require("learning_starts", self.learning_starts < self.total_steps, below)
        same = self.algo != "flashsac" or len(set(self.hidden)) == 1
        self._require("hidden", same, "the same width for every residual block")
        if self.v_min is not None and self.v_max is not None:
            self._require("v_max", self.v_min < self.v_max, f"above v_min ({self.v_min})")

    def _fill_defaults(self) -> None:
        """Give each setting that is None its default, and refuse those that mean nothing to the run."""
        self._require("algo", self.algo in ALGORITHM_DEFAULTS, f"one of {', '.join(ALGORITHM_DEFAULTS)}")
        of_environment = defaults(self.env, self.num_envs)
        of_environment["update_ratio"] *= UPDATES.get(self.algo, 1)
        of_mode: dict[str, Any] = {**_PRIORITIES, **_PRIORITIES_OF.get(self.algo, {})}
        of_mode = of_mode if self.prioritized else dict.fromkeys(_PRIORITIES)
        for name, value in {**of_environment, **ALGORITHM_DEFAULTS[self.algo], **of_mode}.items():
            given = getattr(self, name)
            if given is None:
                object.__setattr__(self, name, value)
            elif value is None and name in of_mode:
                raise UsageError(f"{name} means nothing to a run that is not prioritized, got {given}")
            elif value is None:
                raise UsageError(f"{self.algo} has no {name}, got {given}")

    def _require(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise UsageError(f"{name} must be {expected}, got {getattr(self, name)}")

    @property
    def capacity(self) -> int:
        """Transitions that the buffer holds."""
        return self.buffer_size if self.buffer_size is not None else min(self.total_steps, _DEFAULT_CAPACITY)

    @property
    def seen(self) -> int:
        """Observations that the network sees together."""
        return self.frames or 1

    def to_json(self) -> str:
        """The settings as JSON text, in the order of the attributes."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> TrainConfig:
        """Build a configuration from plain values, as `json.loads` returns them.

        Raises:
            UsageError: A name is not a setting, or a value is of the wrong type or out of range.
        """
        known = setting_types()
        if unknown := sorted(set(values) - set(known)):
            raise UsageError(f"unknown settings {unknown}; known are {sorted(known)}")
        return cls(**{name: _typed(name, value, known[name]) for name, value in values.items()})

    @classmethod
    def read(cls, folder: Path) -> TrainConfig:
        """Read the configuration of the run in ``folder``.

        Raises:
            UsageError: There is none, or it can't be read.
        """
        path = folder / CONFIG_FILE
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UsageError(f"{folder} holds no run: there is no {CONFIG_FILE}") from None
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise UsageError(f"{path} cannot be read as JSON: {error}") from None
        if not isinstance(values, dict):
            raise UsageError(f"{path} must hold a JSON object, got {type(values).__name__}")
        try:
            return cls.from_mapping(values)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None

    def resumed_with(self, given: Mapping[str, Any]) -> TrainConfig:
        """The configuration of a resumed run, with the settings in ``given`` that the user stated again.

        Raises:
            UsageError: A stated setting contradicts the run and is not one that may change
                (`CHANGEABLE_ON_RESUME`).
        """
        contradictions = [
            f"{name} is {getattr(self, name)!r} in the run, {value!r} was asked for"
            for name, value in given.items()
            if name not in CHANGEABLE_ON_RESUME and getattr(self, name) != value
        ]
        if contradictions:
            raise UsageError("the run cannot be resumed with other settings: " + "; ".join(contradictions))
        # The buffer keeps its size when more steps are asked for.
        return dataclasses.replace(self, **{**given, "buffer_size": self.capacity})


def groups() -> dict[str, list[str]]:
    """The names of the settings under the headings of ``gpubuf train --help``."""
    names = [field.name for field in dataclasses.fields(TrainConfig)]
    learning, records = names.index("batch_size"), names.index("eval_every")
    return {"the run": names[:learning], "learning": names[learning:records], "records": names[records:]}


def setting_texts() -> dict[str, str]:
    """What the docstring of `TrainConfig` says of each setting; nothing where Python strips docstrings."""
    found = re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", TrainConfig.__doc__ or "", re.MULTILINE)
    return {name: " ".join(text.split()).rstrip(".") for name, text in found}


def setting_types() -> dict[str, tuple[type, ...]]:
    """The types that a value of each setting may have, that of None among them."""
    hints = get_type_hints(TrainConfig)
    return {name: get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,) for name, hint in hints.items()}


def _typed(name: str, value: Any, kinds: tuple[type, ...]) -> Any:
    """``value`` as one of ``kinds``; JSON's lists and whole-number floats are converted."""
    if name == "hidden" and value is not None:
        if isinstance(value, (list, tuple)) and all(type(width) is int for width in value):
            return tuple(value)
        raise UsageError(f"hidden must be a list of integers, got {value!r}")
    if float in kinds and type(value) is int:
        return float(value)
    if type(value) not in kinds:
        words = " or ".join("null" if kind is NoneType else kind.__name__ for kind in kinds)
        raise UsageError(f"{name} must be of type {words}, got {value!r}")
    return value
