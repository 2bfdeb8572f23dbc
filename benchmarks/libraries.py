"""One adapter per library: the same five operations, each in the words that a user of that library writes.

An adapter does nothing that is timed: what a benchmark times are the functions that it returns.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

ALPHA, BETA, EPS = 0.6, 0.4, 1e-8
CHUNK = 100_000


class UnavailableError(Exception):
    """The library is not installed, or cannot do this; the message says why."""


class Library(ABC):
    """A replay buffer of some library, filled with the given transitions.

    Args:
        source: the transitions, ``[capacity]``, on the CPU. The buffer is exactly full of them afterwards.
        prioritized: proportional prioritization, with exponents :data:`ALPHA` and :data:`BETA`.
        device: where the buffer keeps its rows.

    Raises:
        UnavailableError: the library is missing, or has no such buffer here.
    """

    name: ClassVar[str]

    def __init__(self, source: TensorDict, prioritized: bool, device: str) -> None:
        self.prioritized = prioritized
        self.device = device
        self.open(len(source))
        for start in range(0, len(source), CHUNK):
            self.extend(self.rows(source[start : start + CHUNK]))

    @abstractmethod
    def open(self, capacity: int) -> None:
        """Create the buffer."""

    @abstractmethod
    def rows(self, source: TensorDict) -> Any:
        """Transitions in the form that :attr:`extend` takes, made before anything is timed."""

    @abstractmethod
    def priorities(self, index: Tensor, priority: Tensor) -> tuple[Any, Any]:
        """An index and its priorities in the form that :attr:`update` takes."""

    @abstractmethod
    def columns(self, batch: Any) -> dict[str, np.ndarray]:
        """A sampled batch as arrays by flat name; importance weights are called ``weight``."""

    #: write rows at the cursor
    extend: Callable[[Any], Any]
    #: a batch of ``n`` transitions
    sample: Callable[[int], Any]
    #: set priorities
    update: Callable[[Any, Any], Any]
    #: one step of prioritized training: draw ``n``, give the drawn rows these priorities, return the batch
    step: Callable[[int, Any], Any]


class TorchRLInterface(Library):
    """The interface of TorchRL, which is gpubuf's as well."""

    buffer: Any

    def classes(self) -> tuple[Any, Any, Any]:
        """The uniform buffer, the prioritized buffer and the storage."""
        raise NotImplementedError

    def open(self, capacity: int) -> None:
        uniform, prioritized, storage = self.classes()
        rows = storage(capacity, device=self.device)
        if self.prioritized:
            self.buffer = prioritized(alpha=ALPHA, beta=BETA, eps=EPS, storage=rows)
        else:
            self.buffer = uniform(storage=rows)
        self.extend = self.buffer.extend
        self.sample = self.buffer.sample
        self.update = self.buffer.update_priority
        self.step = self.take_step

    def take_step(self, n: int, priority: Tensor) -> TensorDictBase:
        batch = self.buffer.sample(n)
        batch["td_error"] = priority
        self.buffer.update_tensordict_priority(batch)
        return batch

    def rows(self, source: TensorDict) -> TensorDictBase:
        return source.to(self.device)

    def priorities(self, index: Tensor, priority: Tensor) -> tuple[Tensor, Tensor]:
        return index.to(self.device), priority.to(self.device)

    def columns(self, batch: TensorDictBase) -> dict[str, np.ndarray]:
        flat = {name: column.cpu().numpy() for name, column in batch.flatten_keys(".").items()}
        if "priority_weight" in flat:
            flat["weight"] = flat.pop("priority_weight")
        return flat


class Gpubuf(TorchRLInterface):
    """This library."""

    name = "gpubuf"

    def classes(self) -> tuple[Any, Any, Any]:
        from gpubuf import LazyTensorStorage, TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer

        return TensorDictReplayBuffer, TensorDictPrioritizedReplayBuffer, LazyTensorStorage


class TorchRL(TorchRLInterface):
    """TorchRL from PyPI. Its trees are compiled for one version of torch, and are missing under any other."""

    name = "torchrl"

    def classes(self) -> tuple[Any, Any, Any]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer
        except ImportError as error:
            raise UnavailableError(f"TorchRL is not installed here: {error}") from error
        return TensorDictReplayBuffer, TensorDictPrioritizedReplayBuffer, LazyTensorStorage

    def open(self, capacity: int) -> None:
        try:
            super().open(capacity)
        except RuntimeError as error:
            if "SegmentTree" not in str(error):
                raise
            raise UnavailableError(f"TorchRL's prioritized sampler does not load here: {error}") from error


class Cpprb(Library):
    """cpprb: NumPy arrays on the CPU, sum tree in C++."""

    name = "cpprb"

    def open(self, capacity: int) -> None:
        if self.device != "cpu":
            raise UnavailableError(f"cpprb has no buffer on {self.device}")
        try:
            import cpprb
        except ImportError as error:
            raise UnavailableError(f"cpprb is not installed here: {error}") from error
        columns = {
            "observation": {"shape": 17},
            "action": {"shape": 6},
            "next.observation": {"shape": 17},
            "next.reward": {"shape": 1},
            "next.done": {"shape": 1, "dtype": np.bool_},
            "next.terminated": {"shape": 1, "dtype": np.bool_},
        }
        if self.prioritized:
            buffer = cpprb.PrioritizedReplayBuffer(capacity, columns, alpha=ALPHA, eps=EPS)
            self.sample = lambda n: buffer.sample(n, beta=BETA)
            self.update = buffer.update_priorities
        else:
            buffer = cpprb.ReplayBuffer(capacity, columns)
            self.sample = buffer.sample
        self.buffer = buffer
        self.extend = lambda rows: buffer.add(**rows)
        self.step = self.take_step

    def take_step(self, n: int, priority: np.ndarray) -> dict[str, np.ndarray]:
        batch = self.buffer.sample(n, beta=BETA)
        self.buffer.update_priorities(batch["indexes"], priority)
        return batch

    def rows(self, source: TensorDict) -> dict[str, np.ndarray]:
        return {name: column.numpy() for name, column in source.flatten_keys(".").items()}

    def priorities(self, index: Tensor, priority: Tensor) -> tuple[np.ndarray, np.ndarray]:
        return index.numpy().astype(np.uint64), priority.numpy()

    def columns(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        flat = dict(batch)
        if "weights" in flat:
            flat["weight"] = flat.pop("weights")
            flat["index"] = flat.pop("indexes").astype(np.int64)
        return flat


LIBRARIES: dict[str, type[Library]] = {library.name: library for library in (Gpubuf, TorchRL, Cpprb)}
