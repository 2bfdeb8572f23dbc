"""The layout of a row: its keys, and the way between batches of users and flat lists of tensors.

A :class:`RowLayout` is derived once from the first batch. It checks every later batch against itself, hands the
kernels a flat list of tensors, and cuts the arena that a gather returns into a TensorDict.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_non_tensor, is_tensorclass
from torch import Tensor

from gpubuf import serialization
from gpubuf.data.storage.containers import FIRST_KEYS, Data, is_data, without_wrapper
from gpubuf.kernels.rows import ALIGNMENT, arena_offsets

Key = tuple[str, ...]


def as_key(key: Any) -> Key:
    """A key as its user writes it (``"reward"``, ``("next", "reward")``, nested further) as a flat tuple of names."""
    return (key,) if isinstance(key, str) else tuple(name for part in key for name in as_key(part))


def as_written(key: Key) -> str | Key:
    """The shortest way to write a key: the name alone where there is only one."""
    return key[0] if len(key) == 1 else key


def priority_mask_key(key: Any) -> Any:
    """Where a batch says which rows have a priority at ``key``: ``"td_error_mask"``. A row of which it says no keeps
    its old one."""
    return f"{key}_mask" if isinstance(key, str) else (*key[:-1], priority_mask_key(key[-1]))


MASK_KEY: Key = ("collector", "mask")
"""Where a batch says which rows are steps of a trajectory: the others fill up its end."""

_OF_A_DRAW = ("index", "index_generation", "priority_weight", "relabelled", "online")
OF_A_DRAW: frozenset[Key] = frozenset((name,) for name in _OF_A_DRAW)
"""Root keys of a batch that say which rows it is made of."""


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


def check_dense(name: str, tensor: Tensor) -> None:
    """Raise TypeError for a tensor that has no memory of its own to be read: sparse, or on the device "meta"."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        what = "no data" if tensor.is_meta else f"the layout {tensor.layout}"
        raise TypeError(f"{name} has {what}: only dense tensors can be used")


#: Bytes of a batch from which on it is one allocation on the CPU too.
_LARGE_BATCH = 1 << 20


class ArenaPlan(NamedTuple):
    """The arena of a batch: its size, and dtype, offset (in elements), size and stride of every key's view."""

    n_bytes: int
    views: list[tuple[torch.dtype, int, tuple[int, ...], tuple[int, ...]]]


def _find_entries(node: Node, data: Any, found: list[Any]) -> bool:
    """Append what ``data`` has for each leaf of ``node``; returns whether it is a TensorDict or dict of these keys."""
    # A plain TensorDict's own entries, which are only read here.
    entries: Any = data._tensordict if type(data) is TensorDict else data
    if type(entries) is not dict or len(entries) != len(node.children):
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
        #: The root with the entries of batches that are not stored, by their keys.
        self._extended: dict[tuple[Any, ...], Node] = {}
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
        kept = self.__dict__ | {"_extended": {}, "_arenas": {}, "_models": {}, "_device": None, "_cuts": {}}
        kept.pop("keys", None)
        return kept

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
            other: Any = without_wrapper(value) if is_non_tensor(value) else value
            if is_non_tensor(other):
                self.host[*path, name] = tuple(other.batch_size[batch_dims:])
            else:
                children[name] = self._describe(other, (*path, name), batch_dims)
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

    @functools.cached_property
    def keys(self) -> list[Any]:
        """The keys of ``leaves``, as a user writes them."""
        return [as_written(leaf.key) for leaf in self.leaves]

    def position(self, key: Key) -> int | None:
        """The position of a key in ``leaves``; None if it is not stored."""
        return self._positions.get(key)

    # From a batch to tensors

    def is_one_row(self, data: Data) -> bool:
        """Whether a batch is one row, without a batch dimension."""
        if isinstance(data, Tensor):
            return isinstance(self.root, int) and data.ndim == len(self.leaves[self.root].shape)
        return is_data(data) and len(data.batch_size) == len(self.nested_batch)

    def entries_of(self, data: TensorDict | dict[str, Any]) -> list[Any] | None:
        """What a plain TensorDict or a dict has for each of ``leaves``, unchecked; None if it has other keys."""
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
        data = without_wrapper(data)
        if not isinstance(data, Tensor):
            raise ValueError(f"key {leaf.name}: the storage holds a tensor, the batch a {type(data).__name__}")
        if data.dtype is not leaf.dtype or data.shape[batch_dims:] != leaf.shape:
            raise ValueError(
                f"key {leaf.name}: the storage holds rows of shape {leaf.shape} and {leaf.dtype}, "
                f"the batch rows of shape {tuple(data.shape[batch_dims:])} and {data.dtype}"
                + _other_dims(data, leaf, batch_dims)
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
        root, size = self.root, torch.Size(batch_size)
        if isinstance(root, int):
            return tensors[root]
        if not extra:
            return self._assemble(root, tensors, size, device)
        keys = (*extra,)
        if keys not in self._extended:
            if len(self._extended) >= 64:
                self._extended.clear()
            self._extended[keys] = self._with(root, keys)
        return self._assemble(self._extended[keys], [*tensors, *extra.values()], size, device)

    def _with(self, root: Node, keys: tuple[Any, ...]) -> Node:
        """``root`` with further entries, whose tensors come after those of the leaves."""
        root = replace(root, children=dict(root.children))
        for position, key in enumerate(keys, len(self.leaves)):
            node, (*above, name) = root, as_key(key)
            for outer in above:
                inner = node.children.get(outer, 0)
                below = Node({}, (), None) if isinstance(inner, int) else replace(inner, children=dict(inner.children))
                node.children[outer] = node = below
            node.children[name] = position
        return root

    def _assemble(
        self, node: Node, tensors: Sequence[Any], batch_size: torch.Size, device: torch.device | None
    ) -> Data:
        source: Any = {}
        # No comprehension, which is a call: every sample comes here.
        for name, child in node.children.items():
            if isinstance(child, int):
                source[name] = tensors[child]
            else:
                source[name] = self._assemble(child, tensors, batch_size, device)
        if node.batch_suffix:
            batch_size = torch.Size((*batch_size, *node.batch_suffix))
        # The public constructor checks every shape again, which takes several times as long for a nested batch.
        td = TensorDict._new_unsafe(source, batch_size, device, nested=False)
        return td if node.tensorclass is None else node.tensorclass._from_tensordict(td)  # type: ignore[attr-defined]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of all keys."""
        return sum(map(attrgetter("row_bytes"), self.leaves))

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


def _other_dims(data: Tensor, leaf: Leaf, batch_dims: int) -> str:
    """What to do where rows come in a batch of other dimensions than those of the storage."""
    dims = data.ndim - len(leaf.shape)
    if dims < 1 or dims == batch_dims or data.shape[dims:] != leaf.shape:
        return ""
    shape = list(data.shape[:dims])
    return f": reshape the batch, of shape {shape}, to {batch_dims} dimension(s), or give the storage ndim={dims}"


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
