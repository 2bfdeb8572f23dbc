"""The layout of a row: its keys and containers, and the way between batches of users and flat lists of tensors.

A :class:`RowLayout` is derived once from the first batch. It checks every later batch against itself, hands the
kernels a flat list of tensors, and cuts the arena that a gather returns into a TensorDict. Rows that are dicts, tuples
and lists are TensorDicts inside (:class:`TreeLayout`): kernels and checkpoints know tensors by their keys.
"""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_non_tensor, is_tensorclass
from torch import Tensor

from gpubuf import serialization
from gpubuf.kernels.rows import ALIGNMENT, arena_offsets

Key = tuple[str, ...]


def as_key(key: Any) -> Key:
    """A key as its user writes it (``"reward"``, ``("next", "reward")``, nested further) as a flat tuple of names."""
    return (key,) if isinstance(key, str) else tuple(name for part in key for name in as_key(part))


def as_written(key: Key) -> str | Key:
    """The shortest way to write a key: the name alone where there is only one."""
    return key[0] if len(key) == 1 else key


FIRST_KEYS = "; all rows have the keys of the first write"
"""Of an error about keys: why they can't be taken."""


def priority_mask_key(key: Any) -> Any:
    """Where a batch says which rows have a priority at ``key``: ``"td_error_mask"``. A row of which it says no keeps
    its old one."""
    return f"{key}_mask" if isinstance(key, str) else (*key[:-1], priority_mask_key(key[-1]))


MASK_KEY: Key = ("collector", "mask")
"""Where a batch says which rows are steps of a trajectory: the others fill up its end."""


@dataclass(frozen=True)
class Leaf:
    """One key of a row. ``shape`` is that of a single row, contiguous."""

    key: Key
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] = field(init=False)
    n_elements: int = field(init=False)
    row_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        strides, n_elements = [], 1
        for length in reversed(self.shape):
            strides.append(n_elements)
            n_elements *= length
        object.__setattr__(self, "strides", tuple(reversed(strides)))
        object.__setattr__(self, "n_elements", n_elements)
        object.__setattr__(self, "row_bytes", n_elements * self.dtype.itemsize)

    @property
    def name(self) -> str:
        """The key as its user writes it: ``'reward'`` or ``('next', 'reward')``."""
        return repr(as_written(self.key))


@dataclass(frozen=True)
class Node:
    """One level of a nested row: children by name, each a position in ``RowLayout.leaves`` or another node."""

    children: dict[str, int | Node]
    batch_suffix: tuple[int, ...]  # batch dimensions beyond the storage's, as in ("agents",) of shape [B, n_agents]
    tensorclass: type | None


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


def of_array(value: Any) -> Tensor:
    """A NumPy array or number as a tensor: of its memory, or of a copy if PyTorch can't have that, or would warn."""
    array = np.asarray(value)
    taken = array.flags.carray or (array.flags.writeable and all(stride >= 0 for stride in array.strides))
    return torch.from_numpy(array if taken else array.copy())


def tensors_of(data: Any) -> Any:
    """NumPy arrays and numbers, and those in dicts, lists and tuples, as tensors; a list of numbers is one tensor.

    Arrays keep their dtype. Numbers of Python get PyTorch's, and so do those of float64, which are floats of Python.
    """
    if isinstance(data, dict):
        return {key: tensors_of(value) for key, value in data.items()}
    if type(data) is list and data and all(isinstance(value, bool | int | float) for value in data):
        return torch.tensor([value.item() if isinstance(value, np.generic) else value for value in data], device="cpu")
    if type(data) in (list, tuple):
        return type(data)(map(tensors_of, data))
    if isinstance(data, bool | int | float):
        return torch.tensor(data.item() if isinstance(data, np.generic) else data, device="cpu")
    return of_array(data) if isinstance(data, np.ndarray | np.generic) else data


def _place(path: Names) -> str:
    return f"at {path!r}" if path else "at the root"


# A Tensor, a TensorDictBase or a tensorclass, or containers of these: there is no common type.
Data = Any


def check_dense(name: str, tensor: Tensor) -> None:
    """Raise TypeError for a tensor that has no memory of its own to be read: sparse, or on the device "meta"."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        what = "no data" if tensor.is_meta else f"the layout {tensor.layout}"
        raise TypeError(f"{name} has {what}: only dense tensors can be used")


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
        one = "; add() writes a single row" if len(shape) == ndim - 1 else ""
        raise ValueError(f"the storage has {ndim} batch dimension(s), the batch has shape {tuple(shape)}{one}")
    return tuple(shape[:ndim])


def device_of(data: Data) -> torch.device:
    """The device of a batch: the one that it claims, or that of its first tensor.

    Raises:
        ValueError: it has no tensors.
    """
    device: torch.device
    data = first_of(data)
    if isinstance(data, Tensor) or data.device is not None:
        device = data.device
        return device
    for value in data.values(True, True):
        device = value.device
        return device
    raise ValueError("the data has no keys: there is nothing to store")


#: Bytes of a batch from which on it is one allocation on the CPU too.
_LARGE_BATCH = 1 << 20


class ArenaPlan(NamedTuple):
    """The arena of a batch: its size, and dtype, offset (in elements), size and stride of every key's view."""

    n_bytes: int
    views: list[tuple[torch.dtype, int, tuple[int, ...], tuple[int, ...]]]


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


def _by_level(entries: Mapping[Any, Tensor]) -> tuple[dict[str, Tensor], dict[str, dict[Key, Tensor]]]:
    """Entries under names or tuples of names: those of this level, and those below it by the name of their node."""
    own: dict[str, Tensor] = {}
    nested: dict[str, dict[Key, Tensor]] = {}
    for key, value in entries.items():
        if type(key) is str:
            own[key] = value
        elif len(key) == 1:
            own[key[0]] = value
        else:
            nested.setdefault(key[0], {})[key[1:]] = value
    return own, nested


def _find_entries(node: Node, data: Any, found: list[Any]) -> bool:
    """Append what ``data`` has for each leaf of ``node``. Returns whether it is a plain TensorDict with these keys."""
    if type(data) is not TensorDict:
        return False
    # The TensorDict's own entries, which are only read here.
    entries: dict[str, Any] = data._tensordict
    if len(entries) != len(node.children):
        return False
    for name, child in node.children.items():
        value = entries.get(name)
        if isinstance(child, int):
            found.append(value)
        elif not _find_entries(child, value, found):
            return False
    return True


def _entries(data: Data, path: Key) -> dict[str, Any]:
    """The entries of a TensorDict or a tensorclass, by name.

    Raises:
        ValueError: it is a lazy stack, and some of its TensorDicts have keys that others lack.
    """
    own = data._tensordict if is_tensorclass(data) else data
    if isinstance(own, LazyStackedTensorDict):
        several = {name for td in own.tensordicts for name in td.keys()} - set(own.keys())
        if several:
            keys = sorted(str((*path, name)) for name in several)
            raise ValueError(f"some rows of the batch have keys that others lack: {', '.join(keys)}")
    return dict(own.items())


class RowLayout:
    """Keys, shapes and dtypes of a row, fixed for the life of a storage.

    Args:
        example: data whose leading ``batch_dims`` dimensions are batch dimensions.
        batch_dims: number of leading dimensions that are not part of a row.
        ignored: root keys that are not stored, whether a batch has them or not.

    Raises:
        TypeError: the data is neither a tensor nor made of tensors.
    """

    def __init__(self, example: Data, batch_dims: int, ignored: frozenset[str] = frozenset()) -> None:
        self.ignored = ignored
        self.leaves: list[Leaf] = []
        #: The keys of data that are not tensors, and the batch dimensions that a row of each has.
        self.host: dict[Key, tuple[int, ...]] = {}
        self.root = self._describe(example, (), batch_dims)
        self._look_up()
        self._keys: list[Any] | None = None
        self._arenas: dict[int, ArenaPlan] = {}
        self._models: dict[int, list[Tensor]] = {}
        self._device: torch.device | None = None
        #: For each batch size on that device: an empty tensor, offset (in elements), size and stride of every view.
        self._cuts: dict[int, list[tuple[Tensor, int, tuple[int, ...], tuple[int, ...]]]] = {}

    def _look_up(self) -> None:
        """Note what is asked of root and leaves over and over."""
        #: Whether a batch is a plain TensorDict, rather than a tensor or a tensorclass.
        self.is_tensordict = isinstance(self.root, Node) and self.root.tensorclass is None
        #: Whether info about rows can be an entry of a batch as it is: rows have no batch dimensions of their own.
        self.takes_info = self.is_tensordict and not self.nested_batch
        self._positions = {leaf.key: position for position, leaf in enumerate(self.leaves)}

    def __getstate__(self) -> dict[str, Any]:
        """Without what is kept to save time: models of batches have shapes, but no memory that could be copied."""
        return self.__dict__ | {"_keys": None, "_arenas": {}, "_models": {}, "_device": None, "_cuts": {}}

    def _describe(self, data: Data, path: tuple[str, ...], batch_dims: int) -> int | Node:
        if isinstance(data, Tensor):
            check_dense(f"key {path or 'root'}", data)
            if data.dtype not in serialization.NAMES:
                raise TypeError(f"key {path or 'root'} has the dtype {data.dtype}, which can't be saved: convert it")
            self.leaves.append(Leaf(path, data.dtype, tuple(data.shape[batch_dims:])))
            return len(self.leaves) - 1
        if is_non_tensor(data) or not (isinstance(data, TensorDictBase) or is_tensorclass(data)):
            where = f"key {path!r} holds" if path else "the data is"
            raise TypeError(
                f"only tensors, TensorDicts and tensorclasses can be stored; {where} a {type(data).__name__}. "
                "Only a storage of objects takes them"
            )
        children: dict[str, int | Node] = {}
        for name, value in _entries(data, path).items():
            if not path and name in self.ignored:
                continue
            if is_non_tensor(value):
                other: Any = value
                self.host[*path, name] = tuple(other.batch_size[batch_dims:])
            else:
                children[name] = self._describe(value, (*path, name), batch_dims)
        return Node(children, tuple(data.batch_size[batch_dims:]), type(data) if is_tensorclass(data) else None)

    def with_leaves(self, leaves: Sequence[Leaf]) -> RowLayout:
        """The same structure with other leaves, in the order in which a batch is walked through.

        A TensorDict that has all keys of a tensorclass here, and no others, is one of that class again.
        """
        other = object.__new__(type(self))
        vars(other).update(self.__getstate__())
        other.leaves = list(leaves)
        other.root = _tree(list(enumerate(leaves)), (), self.root)
        other._look_up()
        return other

    @property
    def plain(self) -> RowLayout:
        """The layout inside: of tensors and TensorDicts."""
        return self

    @property
    def nested_batch(self) -> tuple[int, ...]:
        """Batch dimensions of the rows themselves: those of the data beyond the storage's."""
        return () if isinstance(self.root, int) else self.root.batch_suffix

    @property
    def keys(self) -> list[Any]:
        """The keys of ``leaves``, as a user writes them."""
        if self._keys is None:
            self._keys = [as_written(leaf.key) for leaf in self.leaves]
        return self._keys

    def position(self, key: Key) -> int | None:
        """The position of a key in ``leaves``; None if it is not stored."""
        return self._positions.get(key)

    # From a batch to tensors

    def is_one_row(self, data: Data) -> bool:
        """Whether a batch is one row, without a batch dimension."""
        if isinstance(data, Tensor):
            return isinstance(self.root, int) and data.ndim == len(self.leaves[self.root].shape)
        return is_data(data) and len(data.batch_size) == len(self.nested_batch)

    def entries_of(self, data: TensorDict) -> list[Any] | None:
        """What a plain TensorDict has for each of ``leaves``, unchecked; None if it has other keys."""
        found: list[Any] = []
        return found if isinstance(self.root, Node) and _find_entries(self.root, data, found) else None

    def collect(self, data: Data, batch_dims: int) -> list[Tensor]:
        """The batch's tensors in the order of ``leaves``, checked. ``batch_dims`` leading dimensions are free.

        Raises:
            ValueError: a key is missing or unknown, or has another shape or dtype; the text states both sides.
        """
        out: list[Tensor] = []
        if isinstance(self.root, int):
            out.append(self._checked(self.leaves[self.root], data, batch_dims))
        else:
            self._collect(self.root, data, (), batch_dims, out)
        return out

    def _collect(self, node: Node, data: Data, path: tuple[str, ...], batch_dims: int, out: list[Tensor]) -> None:
        if type(data) is not TensorDict and not isinstance(data, TensorDictBase) and not is_tensorclass(data):
            raise ValueError(f"key {path or 'root'}: the storage holds a TensorDict, the batch a {type(data).__name__}")
        # A plain TensorDict's own entries, which are only read here: a copy takes as long as the check of a key.
        found: dict[str, Any] = data._tensordict if type(data) is TensorDict else _entries(data, path)
        if not path and not self.ignored.isdisjoint(found):
            found = {name: value for name, value in found.items() if name not in self.ignored}
        if found.keys() != node.children.keys() and self.host:
            # :class:`~gpubuf.data.storage.host_rows.HostRows` looks after these.
            found = {name: value for name, value in found.items() if (*path, name) not in self.host}
        if found.keys() != node.children.keys():
            missing = [(*path, name) for name in node.children if name not in found]
            extra = [(*path, name) for name in found if name not in node.children]
            stored, given = sorted(node.children), sorted(found)
            raise ValueError(
                f"the batch's keys differ from the storage's: missing {missing}, extra {extra} "
                f"(storage: {stored}, batch: {given}{f', under {path}' if path else ''}){FIRST_KEYS}"
            )
        for name, child in node.children.items():
            if isinstance(child, int):
                leaf, tensor = self.leaves[child], found[name]
                # `_checked` spelled out, for it is asked of every key of every write.
                same = type(tensor) is Tensor and tensor.dtype is leaf.dtype and tensor.shape[batch_dims:] == leaf.shape
                if same and tensor.layout is torch.strided and not tensor.is_meta:
                    out.append(tensor)
                else:
                    out.append(self._checked(leaf, tensor, batch_dims))
            else:
                self._collect(child, found[name], (*path, name), batch_dims, out)

    @staticmethod
    def _checked(leaf: Leaf, data: Data, batch_dims: int) -> Tensor:
        if not isinstance(data, Tensor):
            raise ValueError(f"key {leaf.name}: the storage holds a tensor, the batch a {type(data).__name__}")
        if data.dtype is not leaf.dtype or data.shape[batch_dims:] != leaf.shape:
            raise ValueError(
                f"key {leaf.name}: the storage holds rows of shape {leaf.shape} and {leaf.dtype}, "
                f"the batch rows of shape {tuple(data.shape[batch_dims:])} and {data.dtype}"
            )
        check_dense(f"key {leaf.name}", data)
        return data

    # From tensors to a batch

    def assemble(
        self,
        tensors: list[Tensor],
        batch_size: tuple[int, ...],
        device: torch.device | None,
        extra: Mapping[Any, Tensor] | None = None,
    ) -> Data:
        """Tensors in the order of ``leaves``, put together as the data that this layout describes.

        ``extra`` entries, under names or tuples of names, are added, or replace what is there. The root must then be a
        TensorDict.
        """
        if isinstance(self.root, int):
            return tensors[self.root]
        return self._assemble(self.root, tensors, torch.Size(batch_size), device, extra)

    def _assemble(
        self,
        node: Node,
        tensors: list[Tensor],
        batch_size: torch.Size,
        device: torch.device | None,
        extra: Mapping[Any, Tensor] | None = None,
    ) -> Data:
        own, nested = _by_level(extra) if extra else ({}, {})
        source: dict[Any, Any] = {}
        for name, child in node.children.items():
            if isinstance(child, int):
                source[name] = tensors[child]
            else:
                source[name] = self._assemble(child, tensors, batch_size, device, nested.pop(name, None))
        if extra:
            source.update(own)
            for name, entries in nested.items():
                source[name] = self._assemble(Node({}, (), None), tensors, batch_size, device, entries)
        if node.batch_suffix:
            batch_size = torch.Size((*batch_size, *node.batch_suffix))
        # The public constructor checks every shape again, which takes several times as long for a nested batch.
        td = TensorDict._new_unsafe(source, batch_size, device, nested=False)
        return td if node.tensorclass is None else node.tensorclass._from_tensordict(td)  # type: ignore[attr-defined]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of all keys."""
        return sum(leaf.row_bytes for leaf in self.leaves)

    def arena(self, n: int) -> ArenaPlan:
        """How a batch of ``n`` rows lies in its arena."""
        plan = self._arenas.get(n)
        if plan is None:
            # Users ask for a few batch sizes over and over; the bound serves those who ask for thousands.
            if len(self._arenas) >= 64:
                self._arenas.clear()
            plan = self._arenas[n] = self._plan(n)
        return plan

    def _plan(self, n: int) -> ArenaPlan:
        offsets, n_bytes = arena_offsets([leaf.row_bytes for leaf in self.leaves], n)
        views = [
            (leaf.dtype, offset // leaf.dtype.itemsize, (n, *leaf.shape), (leaf.n_elements, *leaf.strides))
            for leaf, offset in zip(self.leaves, offsets, strict=True)
        ]
        return ArenaPlan(n_bytes, views)

    def allocate(self, n: int) -> list[Tensor]:
        """Uninitialised memory on the CPU for a batch of ``n`` rows, contiguous: a tensor per leaf.

        Large batches are views of one allocation (:meth:`cut`). The C library gives memory of that size back to the
        system and asks for it anew, page by page, unless it comes and goes in one piece.
        """
        models = self._models.get(n)
        if models is None:
            n_bytes = self.arena(n).n_bytes
            if n_bytes >= _LARGE_BATCH:
                return self.cut(torch.empty(n_bytes, dtype=torch.uint8, device="cpu"), n)
            if len(self._models) >= 64:
                self._models.clear()
            models = self._models[n] = [
                torch.empty((n, *leaf.shape), dtype=leaf.dtype, device="cpu") for leaf in self.leaves
            ]
            for model in models:
                # Only their shapes are used.
                model.untyped_storage().resize_(0)
        # Half the time of torch.empty, which has to find out what a shape and a dtype are.
        return list(map(torch.empty_like, models))

    def cut(self, arena: Tensor, n: int) -> list[Tensor]:
        """Views of an arena of ``n`` rows, one per leaf, each contiguous and aligned to ``ALIGNMENT`` bytes.

        In eager mode every view has a version counter of its own, so that changing one key in place does not
        break a backward pass through another.
        """
        if type(arena) is not Tensor:
            # Fake tensors have no set_().
            return [_traced_view(arena, *view) for view in self.arena(n).views]
        if arena.device != self._device:
            self._device, self._cuts = arena.device, {}
        cuts = self._cuts.get(n)
        if cuts is None:
            cuts = self._remember_cuts(n, arena.device)
        memory = arena.untyped_storage()
        # `.data` makes a tensor with a version counter of its own, at less cost than any factory function. set_() takes
        # most of the time, and is no slower than as_strided() or than split, which would need a view for each shape.
        return [empty.data.set_(memory, offset, size, stride) for empty, offset, size, stride in cuts]

    def _remember_cuts(
        self, n: int, device: torch.device
    ) -> list[tuple[Tensor, int, tuple[int, ...], tuple[int, ...]]]:
        if len(self._cuts) >= 64:
            self._cuts.clear()
        empties = {leaf.dtype: torch.empty(0, dtype=leaf.dtype, device=device) for leaf in self.leaves}
        self._cuts[n] = [(empties[dtype], offset, size, stride) for dtype, offset, size, stride in self.arena(n).views]
        return self._cuts[n]


def _tree(leaves: Sequence[tuple[int, Leaf]], path: Key, like: int | Node | None) -> int | Node:
    """The node at ``path`` of leaves that are given with their positions, with all that ``like`` says beside keys."""
    if len(leaves) == 1 and leaves[0][1].key == path:
        return leaves[0][0]
    below: dict[str, list[tuple[int, Leaf]]] = {}
    for position, leaf in leaves:
        below.setdefault(leaf.key[len(path)], []).append((position, leaf))
    old = like if isinstance(like, Node) else Node({}, (), None)
    children = {name: _tree(own, (*path, name), old.children.get(name)) for name, own in below.items()}
    children |= {name: child for name, child in old.children.items() if name not in below and _is_empty(child)}
    return Node(children, old.batch_suffix, old.tensorclass if children.keys() == old.children.keys() else None)


def _is_empty(node: int | Node) -> bool:
    return isinstance(node, Node) and all(map(_is_empty, node.children.values()))


def rows_in(arena: Tensor, leaf: Leaf, n: int) -> Tensor:
    """``n`` rows of the only key of an arena."""
    return _traced_view(arena, leaf.dtype, 0, (n, *leaf.shape), (leaf.n_elements, *leaf.strides))


def _traced_view(
    arena: Tensor, dtype: torch.dtype, offset: int, size: tuple[int, ...], stride: tuple[int, ...]
) -> Tensor:
    """A piece of an arena, in the traceable operations that Inductor of all supported versions takes."""
    if dtype is torch.bool:
        # Inductor of PyTorch 2.11 refuses a view of bytes as bool. The bytes are 0 and 1.
        return arena.as_strided(size, stride, offset).ne(0)
    return arena.view(dtype).as_strided(size, stride, offset)


def address(tensor: Tensor) -> int:
    """The address of a tensor; a fake one has a shape and a device but no memory, and its kernels never run."""
    return tensor.data_ptr() if type(tensor) is Tensor else 0


assert ALIGNMENT % 16 == 0, "every dtype's size must divide the alignment of an arena's views"


class TreeLayout(RowLayout):
    """A :class:`RowLayout` of rows that are containers. It takes batches in their own structure, and gives such.

    Args:
        example, batch_dims, ignored: as for :class:`RowLayout`; ``example`` is a dict, a tuple or a list.
        tree: the structure; None: that of ``example``. ``example`` may then be the TensorDict that it is inside.

    Raises:
        TypeError, ValueError: as :func:`~gpubuf.data.storage.layout.structure_of`.
    """

    def __init__(
        self, example: Data, batch_dims: int, ignored: frozenset[str] = frozenset(), tree: Container | None = None
    ) -> None:
        found = structure_of(example) if tree is None else tree
        assert found is not None
        self.tree: Container = found
        inside = example if is_data(example) else _inside(found, example, batch_dims)
        super().__init__(inside, batch_dims, ignored)

    def _look_up(self) -> None:
        """Find the leaf, or the node, of each value in the containers, too."""
        super()._look_up()
        if self.host:
            raise TypeError(f"{list(self.host)} are not tensors: a TensorDict holds such data")
        self.is_tensordict = self.takes_info = False
        self._names = self.tree.names
        self._slots: list[int | Node] = []
        for names in self._names:
            at: Any = self.root
            for name in names:
                at = at.children.get(name) if isinstance(at, Node) else None
            if at is None:
                raise ValueError(f"the structure of the rows names {names!r}, which is not stored")
            self._slots.append(at)

    @property
    def plain(self) -> RowLayout:
        other = object.__new__(RowLayout)
        inside = {
            name: value for name, value in self.__getstate__().items() if name not in ("tree", "_names", "_slots")
        }
        vars(other).update(inside)
        other._look_up()
        return other

    def collect(self, data: Data, batch_dims: int) -> list[Tensor]:
        if isinstance(data, TensorDictBase):
            return super().collect(data, batch_dims)
        out: list[Tensor] = []
        shape = batch_shape(data, batch_dims)
        for value, at, names in zip(self.tree.values(data), self._slots, self._names, strict=True):
            if isinstance(at, int):
                out.append(self._checked(self.leaves[at], value, batch_dims))
            else:
                self._collect(at, value, names, batch_dims, out)
            if tuple(value.shape[:batch_dims]) != shape:
                raise ValueError(f"entry {names!r} has {tuple(value.shape[:batch_dims])} rows, the first one {shape}")
        return out

    def is_one_row(self, data: Data) -> bool:
        if is_data(data):
            return super().is_one_row(data)
        value, at = self.tree.values(data)[0], self._slots[0]
        dims, own = (value.ndim, self.leaves[at].shape) if isinstance(at, int) else (len(value.shape), at.batch_suffix)
        return dims == len(own)

    def assemble(
        self,
        tensors: list[Tensor],
        batch_size: tuple[int, ...],
        device: torch.device | None,
        extra: Mapping[Any, Any] | None = None,
    ) -> Data:
        size = torch.Size(batch_size)
        values = [
            tensors[at] if isinstance(at, int) else self._assemble(at, tensors, size, device) for at in self._slots
        ]
        data = self.tree.built(iter(values))
        if extra:
            if not isinstance(data, dict):
                raise ValueError(f"a batch that is a {type(data).__name__} has no place for {sorted(map(str, extra))}")
            data.update({as_written(as_key(key)): value for key, value in extra.items()})
        return data


def layout_of(example: Data, batch_dims: int, ignored: frozenset[str] = frozenset()) -> RowLayout:
    """The layout of rows like those of ``example``. Raises as :class:`RowLayout` and :class:`TreeLayout`."""
    return (TreeLayout if is_container(example) else RowLayout)(example, batch_dims, ignored)


def saved_tree(layout: RowLayout) -> dict[str, Any]:
    """What a state says about the containers of rows: an entry, or nothing where they are TensorDicts."""
    return {"tree": layout.tree.described()} if isinstance(layout, TreeLayout) else {}


def with_tree(layout: RowLayout, saved: Any) -> RowLayout:
    """A layout with the containers of :func:`saved_tree`'s entry; None: none.

    Raises:
        ValueError: they are not those of these rows.
    """
    tree = read_structure(saved)
    if tree is None:
        return layout
    if layout.host:
        raise ValueError(f"the state has rows in containers, and {list(layout.host)}, which are not tensors")
    other = object.__new__(TreeLayout)
    vars(other).update({**layout.__getstate__(), "tree": tree})
    other._look_up()
    return other


def inside(layout: RowLayout, data: Data, batch_dims: int) -> Data:
    """A batch as the TensorDict that it is inside: one of containers is brought into that form."""
    return _inside(layout.tree, data, batch_dims) if isinstance(layout, TreeLayout) and not is_data(data) else data


def _inside(tree: Container, data: Any, batch_dims: int) -> TensorDict:
    size = torch.Size(batch_shape(data, batch_dims))
    root: dict[str, Any] = {}
    for names, value in zip(tree.names, tree.values(data), strict=True):
        at = root
        for name in names[:-1]:
            at = at.setdefault(name, {})
        at[names[-1]] = value
    return _level(root, size)


def _level(entries: dict[str, Any], size: torch.Size) -> TensorDict:
    source: Any = {name: _level(value, size) if type(value) is dict else value for name, value in entries.items()}
    return TensorDict._new_unsafe(source, size, None, nested=False)


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


def shallow(data: Data) -> Data:
    """A copy of a batch that shares its tensors, for transforms that set keys in place."""
    return (
        data
        if isinstance(data, Tensor)
        else mapped(data, lambda value: value if isinstance(value, Tensor) else value.copy())
    )
