"""What a training run is: one frozen dataclass, checked when it is made, stored beside the run as JSON.

Nothing here imports PyTorch, so that ``gpubuf train --help`` and a mistyped option answer at once.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIG_FILE = "config.json"

#: Options that a resumed run may change: they touch how long and where it runs, never what it has already learnt.
CHANGEABLE_ON_RESUME = frozenset(
    {"total_steps", "device", "threads", "eval_episodes", "checkpoint_every"},
)

_DEFAULT_CAPACITY = 1_000_000


class UsageError(ValueError):
    """What was asked for can't be done, and the message says why: the command line shows it and exits with 2."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The settings of one run of SAC on one environment.

    Attributes:
        env: Gymnasium id of an environment with a bounded continuous action space; ``module:id`` imports the
            module first.
        prioritized: Draw by priority (Schaul et al. 2016) or uniformly.
        device: ``"auto"`` (CUDA if there is one), ``"cpu"``, ``"cuda"`` or ``"cuda:N"``. Networks, buffer and
            update live there; the environments run on the CPU.
        seed: Seeds PyTorch's global generator and the environments.
        total_steps: Transitions to collect, over all environments.
        num_envs: Environments stepped together.
        batch_size: Transitions an update draws.
        buffer_size: Capacity in transitions; ``None`` means ``total_steps``, at most one million.
        learning_starts: Transitions collected with random actions before the first update.
        update_ratio: Updates a transition, 1 in the SAC paper; 0.5 updates at every second one.
        learning_rate: Of Adam, for actor, critics and temperature.
        gamma: Discount.
        tau: Share of the online critics that enters the target critics at each update.
        hidden: Width of each hidden layer.
        critics: Q functions in the ensemble.
        priority_alpha: Exponent of the priorities; prioritized only.
        priority_beta: Exponent of the importance weights at the first update, annealed linearly to 1 at
            ``total_steps``; prioritized only.
        eval_every: Transitions between two short evaluations for the curve; 0 for none.
        eval_episodes: Episodes of the evaluation that ends the run.
        log_every: Transitions between two records of the losses.
        checkpoint_every: Transitions between two checkpoints on the way; 0 for one at the end only.
        threads: CPU threads of PyTorch; ``None`` chooses by the size of the networks.
    """

    env: str = "Pendulum-v1"
    prioritized: bool = True
    device: str = "auto"
    seed: int = 0
    total_steps: int = 10_000
    num_envs: int = 1
    batch_size: int = 256
    buffer_size: int | None = None
    learning_starts: int = 1_000
    update_ratio: float = 1.0
    learning_rate: float = 1e-3
    gamma: float = 0.99
    tau: float = 0.005
    hidden: tuple[int, ...] = (256, 256)
    critics: int = 2
    priority_alpha: float = 0.6
    priority_beta: float = 0.4
    eval_every: int = 1_000
    eval_episodes: int = 20
    log_every: int = 500
    checkpoint_every: int = 0
    threads: int | None = None

    def __post_init__(self) -> None:
        if not self.env:
            raise UsageError("env must name a Gymnasium environment, got an empty string")
        for name in ("total_steps", "num_envs", "batch_size", "critics", "log_every", "eval_episodes"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("learning_starts", "eval_every", "checkpoint_every", "seed"):
            self._require(name, getattr(self, name) >= 0, "at least 0")
        for name in ("buffer_size", "threads"):
            self._require(name, getattr(self, name) is None or getattr(self, name) >= 1, "at least 1")
        for name in ("update_ratio", "learning_rate"):
            self._require(name, math.isfinite(getattr(self, name)) and getattr(self, name) > 0, "above 0 and finite")
        self._require(
            "learning_starts", self.learning_starts < self.total_steps, f"below total_steps ({self.total_steps})"
        )
        self._require("gamma", 0 <= self.gamma < 1, "in [0, 1)")
        self._require("tau", 0 < self.tau <= 1, "in (0, 1]")
        self._require("priority_alpha", 0 <= self.priority_alpha <= 1, "in [0, 1]")
        self._require("priority_beta", 0 <= self.priority_beta <= 1, "in [0, 1]")
        self._require(
            "hidden", len(self.hidden) > 0 and all(width >= 1 for width in self.hidden), "one or more widths above 0"
        )

    def _require(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise UsageError(f"{name} must be {expected}, got {getattr(self, name)}")

    @property
    def capacity(self) -> int:
        """Transitions that the buffer holds."""
        return self.buffer_size if self.buffer_size is not None else min(self.total_steps, _DEFAULT_CAPACITY)

    def to_json(self) -> str:
        """The settings as JSON text, in the order of the attributes."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> TrainConfig:
        """Build a configuration from plain values, as `json.loads` returns them.

        Raises:
            UsageError: A name is not a setting, or a value is of the wrong type or out of range.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - set(fields))
        if unknown:
            raise UsageError(f"unknown settings {unknown}; known are {sorted(fields)}")
        return cls(**{name: _typed(name, value, fields[name].default) for name, value in values.items()})

    @classmethod
    def read(cls, folder: Path) -> TrainConfig:
        """Read the configuration of the run in ``folder``.

        Raises:
            UsageError: There is none, or it is not one of ours.
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
        """The configuration of a run that goes on, with the settings in ``given`` that the user stated again.

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


def _typed(name: str, value: Any, default: Any) -> Any:
    """``value`` in the type that the setting has, with JSON's lists and whole-number floats put right."""
    if name == "hidden":
        if isinstance(value, (list, tuple)) and all(type(width) is int for width in value):
            return tuple(value)
        raise UsageError(f"hidden must be a list of integers, got {value!r}")
    if name in ("buffer_size", "threads"):
        if value is None or type(value) is int:
            return value
        raise UsageError(f"{name} must be an integer or null, got {value!r}")
    if isinstance(default, float) and type(value) is int:
        return float(value)
    if type(value) is not type(default):
        raise UsageError(f"{name} must be of type {type(default).__name__}, got {value!r}")
    return value
