"""A storage of objects of any kind, in a list on the host."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_tensorclass
from torch import Tensor

from gpubuf.data.storage.allocation import Allocation
from gpubuf.data.storage.column import Columns
from gpubuf.data.storage.containers import Data, is_container, is_data, mapped, stacked
from gpubuf.data.storage.host_rows import HostRows
from gpubuf.data.storage.layout import RowLayout
from gpubuf.data.storage.placement import Placement
from gpubuf.data.storage.plan import RowPlan
from gpubuf.integrations.torchrl.storages import TensorStorage, is_int

UNLIMITED = 1 << 40
"""The capacity of a storage without one: more objects than any list can hold."""

_OBJECTS = ()


class Objects(HostRows):
    """The objects of a :class:`ListStorage`, by position."""

    @property
    def items(self) -> list[Any]:
        """The objects."""
        return self.columns[_OBJECTS]

    def assembled(
        self, reader: RowPlan, tensors: list[Tensor], index: Tensor, shape: tuple[int, ...], info: dict[Any, Any]
    ) -> Data:
        """The objects at ``index``: a list.

        Raises:
            ValueError: several batches are asked for at once.
        """
        if len(shape) > 1:
            raise ValueError("a ListStorage gives one batch at a time, and no slices: call sample() for each")
        items = self.items
        return [items[position] for position in index.tolist()]

    def load(self, state: dict[str, Any], order: Tensor | None) -> None:
        """Restore a state, by copies: the caller may change its objects."""
        super().load({"host": copy.deepcopy(state["host"])}, order)


class _ObjectAllocation(Allocation):
    relocatable = False
    host_rows = Objects


class ListStorage(TensorStorage):
    """Objects of any kind, one a row, in a list on the host.

    It is slow: each row is an object of Python, and a batch is put together one object after the other. Rows of the
    same shape belong into a :class:`LazyTensorStorage`, which also takes dicts and tuples of tensors, and text beside
    them. Uniform samplers, :class:`SamplerWithoutReplacement` and :class:`PrioritizedSampler` work, with all that goes
    by the index of a row: priorities, prefetch, checkpoints.

    :meth:`~gpubuf.ReplayBuffer.extend` takes a list, a tuple, a range, a set or a NumPy array of objects, or a tensor
    or a TensorDict, whose rows become the objects (copies). Objects are kept as they are, and not copied. Batches are
    collated: tensors, TensorDicts, and containers of such are stacked; of anything else, or of different shapes, a
    batch is a list. ``collate_fn=`` of the buffer gets the list.

    Args:
        max_size: capacity in objects. Default: no bound. A :class:`PrioritizedSampler` needs one.
        compilable: accepted for compatibility.
        device: where tensors in the objects are moved to when they are written. Default: they stay where they are.

    Checkpoints take objects that are tensors, TensorDicts, tensorclasses (which come back as TensorDicts), plain
    values, and containers of these.
    """

    takes_objects = True
    supports_conditional_update = False

    def __init__(
        self, max_size: int | None = None, *, compilable: bool = False, device: torch.device | str | int | None = None
    ) -> None:
        self._begin(_ObjectAllocation(UNLIMITED if max_size is None else max_size, "cpu", 1))
        self.object_device = None if device is None else torch.device(device)
        layout = RowLayout(TensorDict({}, [0]), 1)
        layout.host = {_OBJECTS: ()}
        placement = Placement("cpu", torch.device("cpu"))
        self._adopt(
            self.allocation.rows_in(Columns(), self.allocation.schema_like(layout), (self.max_size,), placement)
        )

    @property
    def objects(self) -> Objects:
        """The objects."""
        assert isinstance(self.host, Objects)
        return self.host

    @property
    def _storage(self) -> list[Any]:
        """The objects, as programs for TorchRL read them."""
        return self.objects.items

    # Writing

    def _given_rows(self, data: Any, one: bool) -> list[Any]:
        return [data] if one else self.as_items(data)

    def as_batch(self, row: Any, dim: int) -> list[Any]:
        return [row]

    def append(self, data: Any) -> Tensor:
        """Write objects at the cursor, over the oldest ones. Returns their positions, int64 ``[n]``.

        Raises:
            TypeError: ``data`` is a dict, or nothing that can be gone through.
        """
        items = self.as_items(data)
        if not items:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        self.objects.expect({_OBJECTS: items})
        return self._append([], len(items))

    def as_items(self, data: Any) -> list[Any]:
        """The objects of a batch, as they are to be stored."""
        if is_data(data):
            # The caller may change its batch as soon as this returns.
            items = list(data.clone().unbind(0))
        elif isinstance(data, (list, tuple, range, set, frozenset, np.ndarray)):
            items = list(data)
        else:
            raise TypeError(
                f"a ListStorage is extended by a list, a tuple, a range, a set, an array, a tensor or a TensorDict of "
                f"objects, got a {type(data).__name__}; add() writes one object"
            )
        return items if self.object_device is None else [self._moved(item) for item in items]

    def _moved(self, item: Any) -> Any:
        if hasattr(item, "to"):
            return item.to(self.object_device)
        try:
            return mapped(item, lambda value: value.to(self.object_device)) if is_container(item) else item
        except TypeError:
            return item

    def write(self, index: Tensor, data: Any) -> None:
        """Overwrite objects in place.

        Raises:
            ValueError: there are more or fewer objects than positions.
        """
        items, positions = self.as_items(data), index.tolist()
        if len(items) != len(positions):
            raise ValueError(f"{len(positions)} rows are addressed, {len(items)} objects given")
        self.objects.put(positions, {_OBJECTS: items})

    def place(self, positions: list[int], items: list[Any]) -> None:
        """Put objects where a writer says, which counts them: nowhere, for -1."""
        stored = self.objects.items
        stored += [None] * (max(positions, default=-1) + 1 - len(stored))
        for position, item in zip(positions, items, strict=True):
            if position >= 0:
                stored[position] = item

    def __setitem__(self, index: Any, data: Any) -> None:
        self.check_owned()
        if is_int(index):
            data, index = [data], [int(index)]
        self.write(self.rows.positions(index), data)

    # Reading

    def get(self, index: Any) -> Any:
        """The object at an int, or a list of those at a slice, a sequence or a tensor of positions.

        Raises:
            IndexError: an index is beyond the objects stored.
        """
        if is_int(index):
            return self._object(int(self.rows.positions([int(index)])))
        return [self._object(position) for position in self.rows.positions(index).tolist()]

    def _object(self, position: int) -> Any:
        item = self.objects.items[position]
        if not isinstance(item, TensorDictBase) and not is_tensorclass(item):
            return item
        # Keys that are set in it later are not those of the stored one.
        item = item.copy()
        if "index" in self.allocation.ignored_keys and isinstance(item, TensorDictBase):
            item.set("index", torch.tensor(position, device="cpu").expand(item.batch_size))
        return item

    @staticmethod
    def default_collate(items: list[Any]) -> Any:
        """Objects as a batch: stacked where they allow it, else the list."""
        if not items or not (is_data(items[0]) or is_container(items[0])):
            return items
        try:
            return stacked(items)
        except (RuntimeError, TypeError, ValueError):
            # Other shapes, other keys, or no tensors.
            return items

    def __repr__(self) -> str:
        size = "" if self.max_size == UNLIMITED else f"/{self.max_size}"
        return f"{type(self).__name__}({len(self)}{size} objects)"
