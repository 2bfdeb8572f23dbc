"""The parts of a buffer that a checkpoint may touch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from gpubuf.data.prefetch import Prefetcher
from gpubuf.data.processing.pipeline import Pipeline
from gpubuf.data.samplers.base import Sampler
from gpubuf.data.storage.tensor_storage import TensorStorage


class Stateful(Protocol):
    """A writer: see :class:`gpubuf.data.writers.Writer`."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that it needs to go on."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore that."""

    def check_state(self, state: dict[str, Any], capacity: int, size: int) -> None:
        """Raise unless ``state``, which was read from files, can be loaded."""


@dataclass(frozen=True)
class Parts:
    """The parts of a buffer that are saved and restored, as of one moment: setters may replace them later.

    Attributes:
        storage: holds the rows.
        sampler: chooses among them.
        writer: says where the next ones go.
        transform: the transforms.
        prefetcher: the queue of batches in preparation.
        pin_memory: whether batches are put into pinned memory.
        state_dict: the buffer's method. The state is made by the buffer, for a subclass may add to it.
        load_state_dict: the buffer's method.
        batch_size: that of the constructor, or of the state that was loaded last.
        adopt: gives the buffer another one.
        processing: what happens to batches; None: nothing.
    """

    storage: TensorStorage
    sampler: Sampler
    writer: Stateful
    transform: nn.Module
    prefetcher: Prefetcher
    pin_memory: bool
    state_dict: Callable[[], dict[str, Any]]
    load_state_dict: Callable[[dict[str, Any]], None]
    batch_size: int | None
    adopt: Callable[[int | None], None]
    processing: Pipeline | None = None
