"""Routes of rows into a storage, past the general one: columns as tensors, and launches prepared on the CPU.

From one write of a prepared launch to the next, only addresses change.
"""

from __future__ import annotations

import ctypes
import functools
import math
from array import array as words
from collections.abc import Callable, Mapping, Sequence
from operator import add
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpubuf.data.recording import runs_now
from gpubuf.data.storage.containers import is_array, numpy_dtype, of_array
from gpubuf.data.storage.host_memory import to_device
from gpubuf.data.storage.layout import Leaf, as_key, as_written
from gpubuf.data.storage.schema import as_numbers, stored_as
from gpubuf.data.storage.storage import TensorStorage
from gpubuf.kernels._registry import runs_at_once

#: An array per key, by key (``"reward"``, ``("next", "reward")``) or in the order of the storage's keys.
Arrays = Mapping[Any, Any] | Sequence[Any]

PREPARED_BYTES = 1 << 20
"""Writes of up to so many bytes are prepared: in larger ones the checks take no time beside the copy."""

READ_IN_PLACE = 1 << 12
"""An array of so many bytes is read where it is. To find out where it is takes longer than to copy smaller ones."""

LOW = 1 << 40
"""Few tensors, and no large ones, have an address below this: of these it is asked whether they have memory."""

# Numbers of rows, other than one step, for which launches are kept.
_SIZES = 8

LARGEST = 1e18
"""Numbers of Python below this are in the range of all dtypes that they are written as."""

# The dtypes that PyTorch gives numbers of Python, but for floats, whose one can be set.
_NUMBERS: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64}

_array, _number = np.ndarray, np.generic
_address_of: Callable[[Tensor], int] = Tensor.data_ptr
_first_byte: Callable[[Any], Any] = ctypes.c_char.from_buffer


class PreparedRows:
    """The launch of writes of ``n`` rows on the CPU, which reads columns at addresses that it knows.

    Small arrays are copied into memory of its own. Tensors and large arrays are read where they are: they must not
    change before the launch.

    Args:
        storage: where rows are written to. Its memory stays where it is as long as this is used.
        lead: batch dimensions of a column.
        keeps_index: whether somebody needs the positions of the rows after the next write.

    Attributes:
        n: number of rows.
        launch: writes the rows, and returns their index, or None if they are refused.
    """

    def __init__(self, storage: TensorStorage, lead: tuple[int, ...], *, keeps_index: bool) -> None:
        layout = storage.written_layout
        self.n = math.prod(lead)
        self._storage = storage
        memory = layout.cut(torch.zeros(layout.arena(self.n).n_bytes, dtype=torch.uint8, device="cpu"), self.n)
        self.launch: Any = storage.plans.written.prepared_extend(memory, self.n, keeps_index)
        shaped = [source.view((*lead, *leaf.shape)) for leaf, source in zip(layout.leaves, memory, strict=True)]
        self._are_alike = _test_of(shaped)
        # Where its address is kept; dtype of a column as a tensor, None if its numbers may differ from what is in
        # memory; its shape; the memory as NumPy sees it, None of dtypes that it lacks; its dtype; its bytes; and the
        # memory's address.
        self._columns: list[tuple[int, torch.dtype | None, tuple[int, ...], Any, Any, int, int]] = []
        for leaf, source in zip(layout.leaves, memory, strict=True):
            shape = (*lead, *leaf.shape)
            try:
                array = source.numpy().reshape(shape)
            except TypeError:
                array = None
            dtype, tensor_dtype = getattr(array, "dtype", None), None if leaf.dtype.is_complex else leaf.dtype
            place = 3 * len(self._columns)
            self._columns.append((place, tensor_dtype, shape, array, dtype, source.nbytes, source.data_ptr()))
        self._sizes = [source.nbytes for source in memory]
        # Where the tensors of the last write were.
        self._found: list[int] = []

    def fill(self, values: Sequence[Any]) -> bool:
        """Set all columns, in the order of the keys; False if some are anything but arrays, tensors and numbers of the
        right shape and dtype, or are views of the rows.
        """
        described, addresses = self.launch.described, self._storage.rows.addresses
        if self._are_alike(*values):
            found = [*map(_address_of, values)]
            # Rows stay where they are as long as the route fits: what was read before is still no view of them.
            if found != self._found:
                if 0 in found or any(map(addresses.meet, found, map(add, found, self._sizes))):
                    return False
                described[::3], self._found = words("q", found), found
            return True
        self._found = []
        for value, (place, tensor_dtype, shape, array, dtype, n_bytes, own) in zip(values, self._columns, strict=True):
            if type(value) is Tensor:
                # Tensors of zeros may have no memory: the address of a view is then its offset.
                if (
                    value.dtype is not tensor_dtype
                    or value.shape != shape
                    or not value.is_cpu
                    or not value.is_contiguous()
                    or value.is_neg()
                    or ((address := value.data_ptr()) < LOW and (not address or value._is_zerotensor()))
                ):
                    return False
            else:
                if type(value) is _array or isinstance(value, _number):
                    fits = value.dtype == dtype and value.shape == shape
                else:
                    of_numbers = torch.get_default_dtype() if type(value) is float else _NUMBERS.get(type(value), False)
                    fits = not shape and of_numbers is tensor_dtype and -LARGEST < value < LARGEST
                if not fits or array is None:
                    return False
                address = (_address(value) if n_bytes >= READ_IN_PLACE else 0) or own
                if address == own:
                    array[...] = value
            if address != described[place]:
                if addresses.meet(address, address + n_bytes):
                    return False
                described[place] = address
        return True


def _test_of(tensors: list[Tensor]) -> Callable[..., bool]:
    """Whether tensors have the type, dtype, shape, strides, device and laziness of these, in a tenth of the time in
    which Python asks each. Of a PyTorch with other insides: no.
    """
    sizes: list[Any] = [list(tensor.shape) for tensor in tensors]
    strides: list[Any] = [list(tensor.stride()) for tensor in tensors]
    try:
        from torch._C._dynamo.guards import TensorGuards

        return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    except (ImportError, AttributeError, TypeError):
        return lambda *_: False


class LaunchedRows:
    """The launch of writes of ``n`` rows on a GPU, of tensors there, or of what the host has, by one copy.

    Args:
        storage, lead: as for :class:`PreparedRows`.

    Attributes:
        n, launch: as of :class:`PreparedRows`.
    """

    def __init__(self, storage: TensorStorage, lead: tuple[int, ...]) -> None:
        layout, self._device = storage.written_layout, storage.device
        self.n = math.prod(lead)
        self._storage = storage
        self._forms = [((*lead, *leaf.shape), leaf.dtype) for leaf in layout.leaves]
        self._dtypes = [numpy_dtype(leaf.dtype) for leaf in layout.leaves]
        self._sources = [
            torch.empty((self.n, *leaf.shape), dtype=leaf.dtype, device=self._device) for leaf in layout.leaves
        ]
        self.launch: Any = storage.plans.written.prepared_extend(self._sources, self.n, True)

    def fill(self, values: Sequence[Any]) -> bool:
        """Bring all columns, in the order of the keys, to the GPU; False if some are anything but contiguous tensors
        and arrays of the right shape and dtype, or are views of the rows, or if a graph is captured.
        """
        if not runs_now():
            return False
        tensors = [
            torch.from_numpy(value) if type(value) is _array and _is_plain(value, dtype) else value
            for value, dtype in zip(values, self._dtypes, strict=True)
        ]
        for tensor, (shape, dtype) in zip(tensors, self._forms, strict=True):
            if type(tensor) is not Tensor or tensor.dtype is not dtype or tensor.shape != shape:
                return False
            if tensor.is_conj() or not tensor.is_contiguous() or tensor.is_neg() or tensor._is_zerotensor():
                return False
        sources, rows = to_device(tensors, self._device), self._storage.rows.addresses
        addresses = [tensor.data_ptr() for tensor in sources]
        for start, tensor in zip(addresses, sources, strict=True):
            # Past a call: most are not near the rows.
            if rows.low - tensor.nbytes < start < rows.high and rows.meet(start, start + tensor.nbytes):
                return False
        # What is read when the launch runs is kept until the next.
        self._sources, self.launch.addresses = sources, addresses
        return True


def _is_plain(array: np.ndarray, dtype: Any) -> bool:
    """Whether PyTorch can have the array as it is."""
    return array.dtype == dtype and array.flags.carray and min(array.strides, default=0) >= 0


def _address(array: np.ndarray) -> int:
    """Where an array is; 0 if it is not contiguous, or can't be written to.

    In a tenth of the time of ``array.ctypes.data``.
    """
    try:
        return ctypes.addressof(_first_byte(array))
    except (TypeError, ValueError):
        return 0


class Route:
    """How columns are written to a storage, as long as its form stays.

    Attributes:
        direct: whether columns can be written at all; if not, they become a TensorDict.
        table, ring: addresses and counters of the rows for which the route was made: others have others.
        layout: of the rows as they are written.
        write_listeners: those that hear of writes.
        step: batch dimensions of one step.
    """

    def __init__(self, storage: TensorStorage, *, direct: bool) -> None:
        self.direct = direct
        self.table, self.ring = storage.plans.written.table, storage.ring.counters
        self.write_listeners = storage.followers.write_listeners
        self.step = tuple(storage.shape[1:])
        self.layout = storage.written_layout
        self._storage = storage
        self._keys = self.layout.keys
        self._of_size: dict[tuple[int, bool], PreparedRows | LaunchedRows | None] = {}

    @functools.cached_property
    def one_step(self) -> PreparedRows | LaunchedRows | None:
        """The write of one step, ready to launch; None if it takes the general way."""
        return self._prepared(self.step, keeps_index=bool(self.write_listeners))

    def _prepared(self, lead: tuple[int, ...], *, keeps_index: bool) -> PreparedRows | LaunchedRows | None:
        """For columns with these batch dimensions; None where they are written in another way."""
        storage, plan = self._storage, self._storage.plans.written
        n_bytes = math.prod(lead) * self.layout.row_bytes
        # Fake tensors, and modes that change what a function does, take the general way. Prefixes are compared.
        if not plan.prepares or not runs_at_once(self.ring) or not 0 < n_bytes <= PREPARED_BYTES:
            return None
        return LaunchedRows(storage, lead) if plan.launches else PreparedRows(storage, lead, keeps_index=keeps_index)

    def fits(self, storage: TensorStorage) -> bool:
        """Whether the storage is still as the route has found it."""
        # Past properties: every write comes here.
        same = storage.plans.written.table is self.table and storage.ring.counters is self.ring
        return same and storage.followers.write_listeners is self.write_listeners

    def in_order(self, columns: Arrays) -> Sequence[Any] | None:
        """One for each key, in their order; None: there are more or fewer, or they are in another container."""
        if len(columns) != len(self._keys):
            return None
        if type(columns) is dict:
            return [columns.get(key) for key in self._keys]
        return columns if type(columns) is list or type(columns) is tuple else None

    def sized(self, columns: Arrays) -> PreparedRows | LaunchedRows | None:
        """:meth:`of_size` for as many rows as the first of ``columns`` has."""
        first: Any = next(iter(columns.values() if isinstance(columns, Mapping) else columns), None)
        if not isinstance(first, (_array, Tensor)) or first.ndim == 0:
            return None
        return self.of_size(first.shape[0], keeps_index=bool(self.write_listeners))

    def of_size(self, n: int, *, keeps_index: bool) -> PreparedRows | LaunchedRows | None:
        """The write of ``n`` rows to a storage of one dimension, ready to launch.

        None if it takes the general way, and at the first write of ``n`` rows: to prepare it takes longer.
        """
        if self.step:
            return None
        size = n, keeps_index
        if size not in self._of_size:
            if len(self._of_size) >= _SIZES:
                self._of_size.clear()
            self._of_size[size] = None
            return None
        ready = self._of_size[size]
        if ready is None:
            ready = self._of_size[size] = self._prepared((n,), keeps_index=keeps_index)
        return ready

    def sources(self, columns: Arrays, one_step: bool, dim_extend: int) -> tuple[list[Tensor], int]:
        """Columns as tensors ``[n, ...]``, and the number of rows.

        Raises:
            ValueError: a key is missing or unknown, or has another shape or dtype.
        """
        ndim = self._storage.ndim
        lead, dims = (self.step, ndim - 1) if one_step else (None, ndim)
        sources: list[Tensor] = []
        for leaf, value in zip(self.layout.leaves, self._values(columns), strict=True):
            tensor = value if isinstance(value, Tensor) else _as_tensor(value, leaf)
            if lead is None:
                lead = tuple(tensor.shape[:ndim])
            if tensor.dtype is not leaf.dtype or tensor.shape != (*lead, *leaf.shape) or len(lead) < dims:
                raise ValueError(
                    f"key {leaf.name}: the storage holds rows of shape {leaf.shape} and {leaf.dtype}, so that a column "
                    f"of this write has shape {(*lead, *leaf.shape)}; it has {tuple(tensor.shape)} and {tensor.dtype}"
                )
            sources.append(tensor)
        assert lead is not None
        n = math.prod(lead)
        if one_step:
            return ([t.unsqueeze(0) for t in sources] if ndim == 1 else _flat(sources, ndim - 1)), n
        if ndim == 1 or n == 0:
            return sources, n
        if dim_extend != 0:
            sources = [t.transpose(0, dim_extend) for t in sources]
            lead = (lead[dim_extend], *lead[1:dim_extend], lead[0], *lead[dim_extend + 1 :])
        if lead[1:] != self.step:
            raise ValueError(
                f"the storage's shape is {tuple(self._storage.shape)}, the batch's {lead}: all but the first must agree"
            )
        return _flat(sources, ndim), n

    def _values(self, columns: Arrays) -> list[Any]:
        if isinstance(columns, Mapping):
            if columns.keys() == set(self._keys):
                return [columns[key] for key in self._keys]
            ignored = self.layout.ignored
            by_key = {as_key(key): value for key, value in columns.items()}
            given = {key: value for key, value in by_key.items() if not (len(key) == 1 and key[0] in ignored)}
            stored = [leaf.key for leaf in self.layout.leaves]
            if given.keys() != set(stored):
                missing = [as_written(key) for key in stored if key not in given]
                extra = [as_written(key) for key in given if key not in stored]
                raise ValueError(f"the columns differ from the storage's keys: missing {missing}, extra {extra}")
            return [given[key] for key in stored]
        if not isinstance(columns, (list, tuple)):
            raise TypeError(f"expected a dict, list or tuple of arrays, got a {type(columns).__name__}")
        if len(columns) != len(self._keys):
            raise ValueError(f"the storage has the {len(self._keys)} columns {self._keys}, got {len(columns)}")
        return list(columns)


def _as_tensor(value: Any, leaf: Leaf) -> Tensor:
    if is_array(value):
        try:
            return of_array(value)
        except TypeError as error:
            raise ValueError(
                f"key {leaf.name}: the storage holds {leaf.dtype}, the column can't be read: {error}"
            ) from None
    return numbers_as(value, leaf.dtype, leaf.name)


def numbers_as(value: Any, dtype: torch.dtype | None, name: str) -> Tensor:
    """Lists and numbers in the dtype of their key, or without one in that of PyTorch."""
    return torch.as_tensor(value, device="cpu") if dtype is None else stored_as(as_numbers(value), dtype, name)


def _flat(sources: list[Tensor], dims: int) -> list[Tensor]:
    return sources if dims == 1 else [t.flatten(0, dims - 1) for t in sources]
