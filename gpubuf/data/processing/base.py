"""The contract of processing: what each object tells the launch that makes a batch, and when it learns of rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from gpubuf.data.operation import ALONE, Alone, Operation
from gpubuf.data.storage.containers import Data
from gpubuf.data.storage.end_bits import OWN, Streams
from gpubuf.data.storage.layout import Key, Leaf, as_key, as_written
from gpubuf.data.storage.schema import NEXT_KEY
from gpubuf.kernels.rows import DTYPES


def as_keys(keys: Any) -> tuple[Key, ...]:
    """Keys as a user writes them: one (``"reward"``, ``("next", "reward")``) or a list of them.

    Raises:
        ValueError: there is none, or one comes twice.
    """
    found = tuple(as_key(key) for key in keys) if isinstance(keys, list) else (as_key(keys),)
    if not found or () in found:
        raise ValueError(f"expected a key or a list of keys, got {keys!r}")
    if len(set(found)) < len(found):
        raise ValueError(f"a key comes twice in {keys!r}")
    return found


def with_twins(keys: Iterable[Key]) -> dict[Key, Key]:
    """Every key of a batch that ``keys`` stand for, and which of them does: a root key also for its twin below next."""
    served = {key: key for key in keys}
    for key in list(served):
        if key[0] != NEXT_KEY:
            served.setdefault((NEXT_KEY, *key), key)
    return served


def tensor_at(data: Data, key: Key) -> Tensor:
    """The tensor of a batch under ``key``.

    Raises:
        KeyError: there is none.
    """
    value = None if isinstance(data, Tensor) else data.get(as_written(key), None)
    if not isinstance(value, Tensor):
        raise KeyError(f"the data has no tensor under {as_written(key)!r}")
    return value


def replaced(
    data: TensorDictBase, served: Mapping[Key, Key], change: Callable[[Tensor, Key], Tensor], needed: Iterable[Key] = ()
) -> TensorDictBase:
    """A shallow copy of a batch with other tensors under keys that are there.

    Args:
        data: the batch.
        served: the keys, and which key stands for each.
        change: makes the other tensor, of a tensor and the key that stands for it.
        needed: keys that must be there.

    Raises:
        KeyError: one of these is not.
    """
    for key in needed:
        tensor_at(data, key)
    out: TensorDictBase = data.copy()
    for key, origin in served.items():
        value = data.get(as_written(key), None)
        if value is not None:
            out.set(as_written(key), change(value, origin))
    return out


class Process:
    """Base class of what the launch of a batch does to it, and of what learns from written rows.

    A buffer calls :meth:`check` before its first rows are written, :meth:`bind` once they are, and :meth:`on_write`
    after every write, the first one included. Memory whose address :meth:`options_of` has given stays where it is until
    the next :meth:`bind`.

    Attributes:
        keys: the keys that it was given.
        operation: that of its buffer, for methods that users call on the object itself.
        streams: of the batch that is being written: from which step on it is whose, see
            :data:`gpubuf.data.storage.end_bits.Streams`.
    """

    keys: tuple[Key, ...]
    operation: Operation | Alone = ALONE
    streams: Streams = OWN

    def __getstate__(self) -> dict[str, Any]:
        """All but the operation of the buffer, which gives a copy its own."""
        return {name: value for name, value in vars(self).items() if name != "operation"}

    def serves(self) -> dict[Key, Key]:
        """The keys of batches that it changes, and by which of :attr:`keys`. Of twins below next not all are there."""
        return with_twins(self.keys)

    def found(self, leaves: Sequence[Leaf]) -> dict[Key, Leaf]:
        """The leaves of :attr:`keys`.

        Raises:
            ValueError: one is not stored.
        """
        stored = {leaf.key: leaf for leaf in leaves}
        for key in self.keys:
            if key not in stored:
                names = ", ".join(leaf.name for leaf in leaves)
                raise ValueError(f"{type(self).__name__} is for {as_written(key)!r}, the rows have the keys {names}")
        return {key: stored[key] for key in self.keys}

    def served_leaves(self, leaves: Sequence[Leaf]) -> list[tuple[Leaf, Leaf]]:
        """Each leaf of a batch that it changes, and the leaf of the key that stands for it.

        Raises:
            ValueError: a key is not stored, or its twin has rows of another shape.
        """
        own, served, pairs = self.found(leaves), self.serves(), list[tuple[Leaf, Leaf]]()
        for leaf in leaves:
            if leaf.key in served:
                origin = own[served[leaf.key]]
                if leaf.shape != origin.shape:
                    raise ValueError(
                        f"{type(self).__name__} treats {leaf.name} as {origin.name}, but their rows have the shapes "
                        f"{leaf.shape} and {origin.shape}"
                    )
                pairs.append((leaf, origin))
        return pairs

    def check(self, leaves: Sequence[Leaf]) -> None:
        """Raise a ValueError unless it can serve batches of these leaves, whose dtypes are those of the batch."""
        for leaf, origin in self.served_leaves(leaves):
            self.check_leaf(leaf, origin.key)

    def check_leaf(self, leaf: Leaf, origin: Key) -> None:
        """Raise a ValueError unless it can serve this leaf of the batch, for which the key ``origin`` stands."""

    def bind(self, leaves: Sequence[Leaf], envs: int, device: torch.device) -> None:
        """Have all state for rows of these leaves, of ``envs`` environments, on ``device``. State that is there stays.

        Called again after the rows have moved to another device. May synchronise.
        """

    def options_of(self, leaf: Leaf, origin: Key) -> dict[str, Any]:
        """Attributes of :class:`gpubuf.kernels.rows.Field` for a leaf of the batch that it serves, after :meth:`bind`.

        ``origin`` is the key that stands for it.
        """
        return {}

    def check_write(self, data: Data, ndim: int) -> None:
        """Raise a ValueError if a batch that is to be written can't be learnt from."""

    def on_write(self, data: Data, ndim: int, stored: Tensor | None = None) -> None:
        """A batch has been written: ``[n]`` rows, or ``[T, E]`` for storages of two dimensions. No host sync.

        Args:
            data: the batch.
            ndim: number of its dimensions that index rows.
            stored: bool ``[n]`` on the storage's device, which of the rows the writer kept; None: all of them.
        """

    def tensors(self) -> list[Tensor]:
        """The tensors that its state is in, on the device."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """What has to be saved: tensors, plain values, dicts of them."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`, into the memory that is there."""

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise a ValueError unless ``state``, which was read from files, can be loaded."""


def require_floating(what: str, leaf: Leaf) -> None:
    """Raise unless the batch has floating-point numbers in this leaf, with which the kernels can compute.

    Raises:
        ValueError: it has not.
    """
    if leaf.dtype not in DTYPES or not leaf.dtype.is_floating_point:
        raise ValueError(
            f"{what} makes fractions of 16, 32 or 64 bits, but {leaf.name} is {leaf.dtype} in the batch: give the "
            "storage batch_dtypes={key: torch.float32}"
        )


def check_bounds(low: float, high: float) -> tuple[float, float]:
    """Bounds as floats.

    Raises:
        ValueError: one is NaN, or none is below the other.
    """
    low, high = float(low), float(high)
    if math.isnan(low) or math.isnan(high) or low > high:
        raise ValueError(f"nothing lies between {low} and {high}")
    return low, high
