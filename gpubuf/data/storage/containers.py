"""Batches of any kind: tensors, TensorDicts, tensorclasses, and dicts, tuples and lists of them.

A :class:`Container` says how such a batch is made of its tensors and TensorDicts.
"""

from __future__ import annotations

import functools
import itertools
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, is_tensorclass
from torch import Tensor
from torch.utils.dlpack import from_dlpack

FIRST_KEYS = (
    "; all rows have the keys of the first write: give that a placeholder for what comes later, or empty() the buffer"
)
"""Of an error about keys: why they can't be taken."""


Names = tuple[str, ...]


def is_data(value: Any) -> bool:
    """Whether ``value`` is a tensor, a TensorDict or a tensorclass."""
    return isinstance(value, (Tensor, TensorDictBase)) or is_tensorclass(value)


def is_container(value: Any) -> bool:
    """Whether ``value`` is a dict, a tuple or a list."""
    return isinstance(value, (dict, tuple, list)) and not is_data(value)


@dataclass(frozen=True)
class Container:
    """A container, and what it is made of.

    Attributes:
        kind: dict, OrderedDict, tuple, list, or the class of a named tuple.
        keys: of a dict: its keys; else the numbers of the entries.
        parts: what lies there: another container, or None for a tensor, a TensorDict or a tensorclass.
    """

    kind: type
    keys: tuple[Any, ...]
    parts: tuple[Container | None, ...]

    @property
    def is_dict(self) -> bool:
        """Whether entries are found by key."""
        return issubclass(self.kind, dict)

    @property
    def names(self) -> list[Names]:
        """Where each entry lies, as a key of nested TensorDicts: keys and fields as text, numbers in sequences."""
        own = getattr(self.kind, "_fields", None) or tuple(map(str, self.keys))
        found: list[Names] = []
        for name, part in zip(own, self.parts, strict=True):
            found += [(name,)] if part is None else [(name, *below) for below in part.names]
        return found

    def values(self, data: Any) -> list[Any]:
        """The tensors, TensorDicts and tensorclasses of a batch, in the order of :attr:`names`.

        Raises:
            ValueError: the batch has another structure; the text states both.
        """
        found: list[Any] = []
        self._walk(data, (), found)
        return found

    def _walk(self, data: Any, path: Names, found: list[Any]) -> None:
        if type(data) is not self.kind and not self._is_alike(type(data)):
            raise ValueError(
                f"the storage holds a {self.kind.__name__} {_place(path)}, the batch has a {type(data).__name__} there"
            )
        if self.is_dict and data.keys() != set(self.keys):
            missing, extra = [k for k in self.keys if k not in data], [k for k in data if k not in self.keys]
            raise ValueError(
                f"the batch's keys differ from the storage's: missing {missing}, extra {extra}{FIRST_KEYS}"
            )
        if len(data) != len(self.keys):
            raise ValueError(f"the storage holds {len(self.keys)} entries {_place(path)}, the batch has {len(data)}")
        for key, part in zip(self.keys, self.parts, strict=True):
            if part is None:
                found.append(data[key])
            else:
                part._walk(data[key], (*path, str(key)), found)

    def _is_alike(self, kind: type) -> bool:
        """Whether ``kind`` is a named tuple of the same name and fields: a loaded one has a class of its own."""
        fields = getattr(self.kind, "_fields", None)
        return fields is not None and (kind.__name__, getattr(kind, "_fields", ())) == (self.kind.__name__, fields)

    def built(self, values: Iterator[Any]) -> Any:
        """The container, filled with ``values`` in the order of :attr:`names`."""
        parts = [next(values) if part is None else part.built(values) for part in self.parts]
        if self.is_dict:
            return self.kind(zip(self.keys, parts, strict=True))
        return self.kind(*parts) if hasattr(self.kind, "_fields") else self.kind(parts)

    # In a state

    def described(self) -> dict[str, Any]:
        """The container as plain values, for files."""
        fields = getattr(self.kind, "_fields", None)
        return {
            "kind": "namedtuple" if fields is not None else self.kind.__name__,
            "name": self.kind.__name__,
            "keys": list(self.keys if fields is None else fields),
            "parts": [None if part is None else part.described() for part in self.parts],
        }


_KINDS: dict[str, type] = {kind.__name__: kind for kind in (dict, OrderedDict, tuple, list)}


def structure_of(data: Any, path: Names = ()) -> Container | None:
    """The containers of a batch; None for what is none.

    Raises:
        TypeError: a container, a key or a value has a type that can't be stored.
        ValueError: two keys of a dict have the same text.
    """
    if is_data(data):
        return None
    kind = type(data)
    named = issubclass(kind, tuple) and hasattr(kind, "_fields")
    if kind not in _KINDS.values() and not named:
        raise TypeError(
            f"only tensors, TensorDicts and tensorclasses can be stored, and dicts, tuples and lists of them; "
            f"{_place(path)} is a {kind.__name__}. Only a storage of objects takes it"
        )
    keys = tuple(data) if isinstance(data, dict) else tuple(range(len(data)))
    for key in keys:
        if type(key) not in (str, int):
            raise TypeError(f"the keys of a dict are text or integers, got {key!r} {_place(path)}")
    if len(set(map(str, keys))) < len(keys):
        raise ValueError(f"two keys {_place(path)} have the same text: {list(keys)}")
    return Container(kind, keys, tuple(structure_of(data[key], (*path, str(key))) for key in keys))


def read_structure(saved: Any) -> Container | None:
    """The inverse of :meth:`Container.described`. A named tuple gets a class of its own.

    Raises:
        ValueError: ``saved`` is something else.
    """
    if saved is None:
        return None
    try:
        kind, name, keys, parts = (saved[entry] for entry in ("kind", "name", "keys", "parts"))
        if len(keys) != len(parts) or len(set(map(str, keys))) < len(keys) or {*map(type, keys)} - {str, int}:
            raise ValueError(f"{keys!r} are no keys")
        made = namedtuple(str(name), keys) if kind == "namedtuple" else _KINDS[kind]
        if not issubclass(made, dict):
            keys = range(len(parts))
        return Container(made, tuple(keys), tuple(read_structure(part) for part in parts))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the state does not say how the rows are structured: {error!r}") from None


def first_of(data: Any) -> Any:
    """The first tensor, TensorDict or tensorclass in ``data``; ``data`` itself where there is none."""
    if is_data(data) or not is_container(data):
        return data
    for value in data.values() if isinstance(data, dict) else data:
        found = first_of(value)
        if is_data(found):
            return found
    return data


@functools.cache
def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any] | None:
    """NumPy's dtype of the same numbers; None: it has none."""
    try:
        return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    except TypeError:
        return None


def of_array(value: Any) -> Tensor:
    """A NumPy array or number, or what makes one of itself, as a tensor: of its memory, or of a copy if PyTorch can't
    have that, or would warn. What speaks DLPack stays on its device.

    Raises:
        TypeError: PyTorch has no such dtype.
    """
    if not isinstance(value, np.ndarray | np.generic) and hasattr(value, "__dlpack__"):
        try:
            return from_dlpack(value)
        except (AttributeError, BufferError, RuntimeError):
            # Of a dtype, or in a place, that only the other protocol can pass on.
            if not hasattr(value, "__array__"):
                raise
    array = np.asarray(value)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    try:
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except ValueError:
        # Of strides that PyTorch can't have.
        return torch.from_numpy(array.copy())


def is_array(value: Any) -> bool:
    """Whether ``value`` is an array of any library but PyTorch's: it speaks DLPack or NumPy's protocol."""
    return not is_data(value) and (hasattr(value, "__dlpack__") or hasattr(value, "__array__"))


def without_wrapper(value: Any) -> Any:
    """An entry of a TensorDict; an array that it keeps as an object, as those of other libraries, as the tensor it is.

    So are arrays of one form, an object per row, as of rows that were stacked.

    Raises:
        ValueError: the array has not the TensorDict's number of rows.
    """
    if isinstance(value, NonTensorStack) and all(map(is_array, rows := value.tolist())):
        tensors = list(map(without_wrapper, value.unbind(0)))
        alike = {(row.shape, row.dtype) if isinstance(row, Tensor) else None for row in tensors}
        return torch.stack(tensors) if rows and len(alike) == 1 and None not in alike else value
    if not (isinstance(value, NonTensorData) and is_array(value.data)):
        return value
    try:
        tensor = of_array(value.data)
    except TypeError:
        # Text, for instance.
        return value
    if tensor.shape[: len(value.batch_size)] != value.batch_size:
        raise ValueError(f"an array of shape {tuple(tensor.shape)} lies in a TensorDict of {list(value.batch_size)}")
    return tensor


def tensors_of(data: Any) -> Any:
    """Arrays (of NumPy, of JAX, of any library) and numbers, and those in dicts, lists and tuples, as tensors; a list
    of numbers is one tensor.

    Arrays keep their dtype. Numbers of Python get PyTorch's, and so do those of float64, which are floats of Python.

    Raises:
        TypeError: PyTorch has no dtype for an array; the text names its key.
    """
    if isinstance(data, Tensor):
        return data
    if isinstance(data, dict):
        return {key: _entry(key, value) for key, value in data.items()}
    if type(data) is list and data and all(isinstance(value, bool | int | float) for value in data):
        return torch.tensor([value.item() if isinstance(value, np.generic) else value for value in data], device="cpu")
    if type(data) in (list, tuple):
        return type(data)(map(tensors_of, data))
    if isinstance(data, bool | int | float):
        return torch.tensor(data.item() if isinstance(data, np.generic) else data, device="cpu")
    return of_array(data) if is_array(data) else data


def _entry(key: Any, value: Any) -> Any:
    try:
        return tensors_of(value)
    except TypeError as error:
        raise TypeError(f"key {key!r}: {error}") from None


def check_entries(value: Any, path: tuple[Any, ...] = ()) -> None:
    """Raise unless the entries of a dict, after :func:`tensors_of`, can be those of a TensorDict of rows: tensors,
    text, None, and lists of these that are alike. Other objects are given as a NonTensorStack.

    Raises:
        TypeError: one can't; the text names its key.
    """
    if isinstance(value, dict):
        for key, entry in value.items():
            check_entries(entry, (*path, key))
    elif isinstance(value, (list, tuple)):
        shapes = {getattr(entry, "shape", len(entry) if isinstance(entry, list | tuple) else None) for entry in value}
        if len(shapes) > 1:
            raise TypeError(f"key {path!r} has rows of different shapes, {shapes}: pad them, and store a mask")
        for entry in value:
            check_entries(entry, path)
    elif not (is_data(value) or value is None or isinstance(value, str | bytes)):
        raise TypeError(
            f"key {path!r} holds a {type(value).__name__}, which is no array: NonTensorStack(*rows) stores any objects"
        )


def _place(path: Names) -> str:
    return f"at {path!r}" if path else "at the root"


# A Tensor, a TensorDictBase or a tensorclass, or containers of these: there is no common type.
Data = Any


def batch_shape(data: Data, ndim: int) -> tuple[int, ...]:
    """The leading ``ndim`` dimensions of a batch: of containers those of the first tensor in them.

    Raises:
        TypeError: ``data`` has no batch dimensions.
        ValueError: it has fewer than ``ndim``.
    """
    if type(data) is TensorDict:
        shape = data.batch_size
    elif isinstance(data, Tensor):
        shape = data.shape
    elif isinstance(data, TensorDictBase) or is_tensorclass(data):
        shape = data.batch_size
    else:
        first = first_of(data)
        if first is data:
            empty = " without tensors (extend_columns takes NumPy arrays)" if isinstance(data, (Mapping, tuple)) else ""
            raise TypeError(
                "expected a TensorDict, a tensorclass, a tensor or containers of tensors, got "
                f"{type(data).__name__}{empty}"
            )
        return batch_shape(first, ndim)
    if len(shape) < ndim:
        expected, one = ("[n]", "a single row") if ndim == 1 else ("[E, T]", "one step of all environments")
        hint = f"; add() writes {one}" if len(shape) == ndim - 1 else ""
        raise ValueError(f"a storage with ndim={ndim} takes {expected}, the batch has shape {tuple(shape)}{hint}")
    return tuple(shape[:ndim])


def device_of(data: Data) -> torch.device:
    """The device of a batch: the one that it claims, or that of its first tensor.

    Raises:
        ValueError: it has no tensors.
    """
    data = first_of(data)
    if isinstance(data, Tensor) or data.device is not None:
        device: torch.device = data.device
        return device
    for value in itertools.chain(data.values(True, True), map(without_wrapper, data.values())):
        if isinstance(value, Tensor):
            return value.device
    raise ValueError("the data has no keys: there is nothing to store")


class Pieces(NamedTuple):
    """Rows that come a piece at a time, as from the files of a checkpoint.

    Attributes:
        example: what all pieces look like; it may have no rows.
        parts: gives the first step of every piece, and the piece, from the beginning at each call.
    """

    example: Data
    parts: Callable[[], Iterator[tuple[int, Data]]]

    @classmethod
    def of(cls, rows: Any, ndim: int) -> Pieces:
        """Rows as a state has them: one batch, a list of batches that follow each other, or pieces already."""
        if isinstance(rows, Pieces):
            return rows
        parts, start = [], 0
        for batch in rows if isinstance(rows, list) else [rows]:
            parts.append((start, batch))
            start += batch_shape(batch, ndim)[0]
        return cls(parts[0][1], parts.__iter__)


def mapped(data: Data, function: Callable[[Any], Any]) -> Data:
    """A batch with ``function`` applied to every tensor, TensorDict and tensorclass in its containers."""
    tree = None if is_data(data) else structure_of(data)
    return function(data) if tree is None else tree.built(map(function, tree.values(data)))


def stacked(rows: Sequence[Data]) -> Data:
    """Rows as a batch: tensors and TensorDicts are stacked, and the same entries of containers.

    Raises:
        ValueError: their structures differ.
    """
    tree = None if is_data(rows[0]) else structure_of(rows[0])
    if tree is None:
        return torch.stack(list(rows), 0)
    columns = zip(*(tree.values(row) for row in rows), strict=True)
    return tree.built(torch.stack(column, 0) for column in columns)


def batch_of(rows: Sequence[Data]) -> Data:
    """A list of rows of a user's as a batch.

    Raises:
        RuntimeError: they have different shapes.
        ValueError: they have different structures.
    """
    try:
        return stacked(rows)
    except RuntimeError as error:
        raise RuntimeError(f"Stacking the elements of the list resulted in an error: {error}") from None


def shallow(data: Data) -> Data:
    """A copy of a batch that shares its tensors, for transforms that set keys in place."""
    return (
        data
        if isinstance(data, Tensor)
        else mapped(data, lambda value: value if isinstance(value, Tensor) else value.copy())
    )
