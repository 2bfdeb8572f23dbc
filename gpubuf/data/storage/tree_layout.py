"""The layout of rows that are dicts, tuples and lists: inside they are TensorDicts.

Kernels and checkpoints know tensors by their keys, whatever a row is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from gpubuf.data.storage.containers import (
    Container,
    Data,
    batch_shape,
    is_container,
    is_data,
    read_structure,
    structure_of,
)
from gpubuf.data.storage.layout import Node, RowLayout, as_key, as_written


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
