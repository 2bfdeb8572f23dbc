"""What adapters share: steps of environments become columns, without rows that only reset; single keys are read."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from gpubuf.data.buffer import ReplayBuffer
from gpubuf.data.storage.layout import Key
from gpubuf.data.storage.schema import stored_as

AUTORESETS = ("same_step", "next_step", "disabled")
"""When environments reset: in the step that ends an episode, in the one after it, or where the program calls reset."""


def autoreset_of(given: Any) -> str:
    """One of :data:`AUTORESETS`: its name, Gymnasium's ``AutoresetMode``, or what the metadata of environments say.

    Raises:
        ValueError: it is none of these, or the environments don't say.
    """
    mode = getattr(given, "metadata", {}).get("autoreset_mode", given)
    if mode is given and hasattr(given, "num_envs") and version("gymnasium").startswith("0."):
        # Vector environments of that time know no other.
        return "same_step"
    name = str(getattr(mode, "name", mode)).lower()
    if name not in AUTORESETS:
        raise ValueError(
            f"autoreset must be one of {AUTORESETS}, Gymnasium's AutoresetMode, or environments whose metadata has "
            f"one, got {given!r}"
        )
    return name


class Column(NamedTuple):
    """One key of a step.

    Attributes:
        path: where the step of a program has it.
        key: where the buffer stores it.
        dtype: in batches.
        shape: of one row.
    """

    path: Key
    key: Key
    dtype: torch.dtype
    shape: tuple[int, ...]


class NextStepResets:
    """Steps of environments that reset on the step after an end, without the rows that only reset.

    Such a row leads from the last observation of an episode to the first one of the next, whatever the action. The row
    before it, which ended the episode, is written once more in its place. All memory is made at the first step, and
    then written in place, for a captured graph reads it where it is. No host sync.
    """

    def __init__(self) -> None:
        self._ended: Tensor | None = None
        self._before: list[Tensor] = []

    def of(self, columns: list[Tensor], flags: Sequence[int]) -> list[Tensor]:
        """The columns ``[E, ...]`` of a step, of which those at ``flags`` say where episodes end."""
        ended = torch.stack([columns[flag].reshape(len(columns[flag]), -1).ne(0).any(1) for flag in flags]).any(0)
        if self._ended is None:
            self._ended, self._before = ended, [column.clone() for column in columns]
            return columns
        for before, column in zip(self._before, columns, strict=True):
            resets = self._ended.view(-1, *[1] * (column.ndim - 1))
            before.copy_(torch.where(resets, before, column))
        self._ended.copy_(ended & ~self._ended)
        return self._before


class StepWriter:
    """Writes steps of all environments to a buffer.

    Args:
        buffer: where they go: with rows of one dimension, or of two, the second of which is that of the environments.
        columns: of a step. The last two are the flags that end episodes.
        autoreset: when the environments reset: see :func:`autoreset_of`.
        n_envs: number of environments; None: that of the first step.

    Raises:
        ValueError: ``autoreset`` says nothing of that.
    """

    def __init__(
        self, buffer: ReplayBuffer, columns: Sequence[Column], autoreset: Any, n_envs: int | None = None
    ) -> None:
        self._buffer, self._columns, self._n_envs = buffer, list(columns), n_envs
        self._resets = NextStepResets() if autoreset_of(autoreset) == "next_step" else None
        # Each part of a step is looked up once.
        self._parts = list(dict.fromkeys(column.path[:-1] for column in columns))
        self._sources = [
            (self._parts.index(column.path[:-1]), column.path[-1], column.dtype, repr(".".join(column.path)))
            for column in columns
        ]
        self._one_by_one = buffer.storage.ndim == 1

    def begin_anew(self) -> None:
        """The next step does not follow the one before."""
        if self._resets is not None:
            self._resets = NextStepResets()

    def write(self, step: Any) -> None:
        """Write one step, of arrays or tensors ``[E, ...]``, which are read before this returns. No host sync.

        Raises:
            KeyError: a key is missing.
            ValueError: an array has another shape, or (on the CPU) numbers that its key can't hold; nothing is written.
        """
        whole = _entries(step)
        parts = [functools.reduce(_below, path, whole) if path else whole for path in self._parts]
        values: list[Tensor] = []
        for part, name, dtype, label in self._sources:
            value: Any = parts[part][name]
            values.append(
                stored_as(value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu"), dtype, label)
            )
        if self._resets is not None:
            with torch.no_grad():
                values = self._resets.of(values, (-2, -1))
        write = self._buffer.extend_columns if self._one_by_one else self._buffer.add_columns
        write(values if self._buffer.initialized else self._first(values))

    def _first(self, values: list[Tensor]) -> dict[Any, Tensor]:
        """The first step by its keys, which settles shapes and the order of the columns."""
        lead = values[0].shape[:1] if self._n_envs is None else (self._n_envs,)
        for column, value, (_, _, _, label) in zip(self._columns, values, self._sources, strict=True):
            if value.shape != (*lead, *column.shape):
                raise ValueError(f"{label} has shape {tuple(value.shape)}, expected {(*lead, *column.shape)}")
        return {column.key: value for column, value in zip(self._columns, values, strict=True)}


def rows_at(buffer: ReplayBuffer, positions: Tensor) -> tuple[Any, Tensor]:
    """Rows at flat positions, int64 ``[n]``, as a draw makes a batch of them, and their generations."""
    reader = buffer.parts.reader
    tensors, generation = buffer.operation.run(reader.gather, positions.to(buffer.storage.device))
    return reader.layout.assemble(tensors, generation.shape, generation.device), generation


def _below(part: Any, name: str) -> Any:
    return _entries(part[name])


def _entries(data: Any) -> Any:
    """What a plain TensorDict holds: looked up in a tenth of the time that its own method takes."""
    return data._tensordict if type(data) is TensorDict else data


def stored_values(buffer: ReplayBuffer, key: Key, index: Tensor | None = None) -> Tensor:
    """A copy of one key of rows ``[n, ...]``, as in batches: of those at the flat positions ``index``, or of all."""
    storage = buffer.storage
    number = storage.schema.batch.position(key)
    assert number is not None
    if index is None:
        index = torch.arange(len(buffer), device=storage.device)
    return buffer.operation.run(storage.plans.batch.gather_key, number, index)
