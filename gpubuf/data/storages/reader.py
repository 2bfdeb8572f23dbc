"""Batches made of stored rows by a recipe, in the launch that copies them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from gpubuf.data.storages.layout import Data, Leaf, RowLayout
from gpubuf.data.storages.recipe import NEXT_ROOT, STEPS_KEY, Recipe
from gpubuf.data.storages.ring import Ring
from gpubuf.data.storages.row_memory import NOT_INITIALIZED
from gpubuf.data.storages.tensor_storage import TensorStorage
from gpubuf.kernels import transitions
from gpubuf.kernels._registry import in_memory, lazy, past_dispatcher, without_dispatch
from gpubuf.kernels.transitions import DTYPES, LAST, NEXT, OFF, OPAQUE, STEPS, SUM, Field, dtype_code

_gather = without_dispatch(transitions.gather, given=("index",))
_sample = without_dispatch(transitions.sample)
# The CPU's forms of two operations that no schema can describe: they write into tensors of the caller's.
_gather_into = lazy("gpubuf.kernels.transitions._cpu:gather_into")
_sample_into = lazy("gpubuf.kernels.transitions._cpu:sample_into")


def fields_of(storage: TensorStorage) -> list[Field]:
    """How a batch of plain rows is made, and written: a field for each leaf of the storage's layout."""
    per_step = math.prod(storage.shape[1:])
    fields = []
    for leaf, column in zip(storage.layout.leaves, storage.columns, strict=True):
        code = dtype_code(leaf.dtype)
        fields.append(
            Field(*column.entry(leaf.row_bytes, per_step), transitions.DRAWN, code, code, code, leaf.n_elements)
        )
    return fields


class Reader:
    """Reads a storage as a recipe says. Samplers and batches use it in place of the storage.

    It follows the storage, which may be allocated later, moved and freed. The table of fields is changed in place
    where captured graphs read it.

    Args:
        storage: holds the rows.
        recipe: says how batches are made of them.

    Raises:
        KeyError: the stored rows lack a key that the recipe needs.
        ValueError: the rows can't be summed, or another reader tells ends by other keys.
    """

    def __init__(self, storage: TensorStorage, recipe: Recipe) -> None:
        self.storage = storage
        self.recipe = recipe
        self._forget()
        storage.followed_by(self)

    def __getstate__(self) -> dict[str, Any]:
        """Without addresses."""
        return {"storage": self.storage, "recipe": self.recipe}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    # Following the storage

    def _forget(self) -> None:
        self._layout: RowLayout | None = None
        self._fields: Tensor | None = None
        self._ring: Ring | None = None
        self._ends: Tensor | None = None
        self._links: Tensor | None = None
        self._noise: Tensor | None = None
        self._arguments: tuple[Any, ...] = ()

    def check_rows(self, layout: RowLayout) -> None:
        """Raise if rows of ``layout`` lack what the recipe needs.

        Raises:
            KeyError, ValueError: they do.
        """
        if self.recipe.n_steps == 1:
            return
        if layout.nested_batch:
            raise ValueError(
                f"n_steps={self.recipe.n_steps} needs the steps of each environment in order, but the rows have batch "
                f"dimensions of their own, {list(layout.nested_batch)}: give the storage "
                f"ndim={self.storage.ndim + len(layout.nested_batch)}"
            )
        for key in self.recipe.rewards(layout):
            leaf = layout.leaves[layout.position(key) or 0]
            if not leaf.dtype.is_floating_point:
                raise ValueError(
                    f"n_steps={self.recipe.n_steps} sums the reward {leaf.name} with discounts, but it is {leaf.dtype}: "
                    "write it as a floating-point tensor"
                )
        self.recipe.ends(layout)

    def follow(self) -> None:
        """Read the rows where the storage has them now."""
        storage = self.storage
        if not storage.initialized:
            self._forget()
            return
        recipe, ends = self.recipe, storage.end_bits
        fields = self._chosen(storage.layout, fields_of(storage))
        if self._layout is None:
            self._layout = _batch_layout(storage.layout, fields)
        if recipe.n_steps > 1:
            fields.append(_STEPS_FIELD)
        table = torch.tensor([field.encoded() for field in fields], dtype=torch.int64)
        if self._fields is not None and self._fields.device == storage.device:
            self._fields.copy_(table)
        else:
            # Not waited for: CUDA has read memory that is not pinned when the call returns.
            self._fields = table.to(storage.device, non_blocking=True)
        self._ring = storage.counters
        self._ends = ends.words if ends is not None and recipe.n_steps > 1 else None
        self._arguments = (storage.max_size, math.prod(storage.shape[1:]), recipe.n_steps, recipe.gamma, OFF, 0)

    def _chosen(self, layout: RowLayout, fields: list[Field]) -> list[Field]:
        """The fields, each with the row that it reads."""
        if self.recipe.n_steps == 1:
            return fields
        rewards = self.recipe.rewards(layout)
        chosen = []
        for leaf, field in zip(layout.leaves, fields, strict=True):
            if leaf.key in rewards:
                field = dataclasses.replace(field, row=SUM)
            elif leaf.key[0] == NEXT_ROOT and field.row != NEXT:
                field = dataclasses.replace(field, row=LAST)
            chosen.append(field)
        return chosen

    # Reading: see the methods of TensorStorage

    @property
    def layout(self) -> RowLayout:
        """The keys, shapes and dtypes of a batch.

        Raises:
            RuntimeError: nothing has been written yet.
        """
        if self._layout is None:
            raise RuntimeError(NOT_INITIALIZED)
        return self._layout

    @property
    def device(self) -> torch.device:
        """The device that batches come out on."""
        return self.storage.device

    def gather(self, index: Tensor) -> tuple[list[Tensor], Tensor]:
        """The batch of rows, and their write generations. One launch, no host sync.

        Args:
            index: int64 ``[n]`` flat positions on the storage's device, contiguous.

        Returns:
            One tensor ``[n, ...]`` for each leaf of :attr:`layout`, and the generations of the drawn rows, int64
            ``[n]``.
        """
        layout, fields, n = self._layout, self._fields, index.numel()
        if layout is None or fields is None:
            raise RuntimeError(NOT_INITIALIZED)
        ring, given = self._ring.counters, self._arguments  # type: ignore[union-attr]
        if past_dispatcher(fields):
            tensors = layout.allocate(n)
            index = in_memory(index)
            return tensors, _gather_into(fields, ring, self._ends, self._links, self._noise, index, *given, tensors)
        n_bytes = layout.arena(n).n_bytes
        arena, generation = _gather(fields, ring, self._ends, self._links, self._noise, index, *given, n_bytes)
        return layout.cut(arena, n), generation

    def sample_uniform(self, rng: Tensor, n: int) -> tuple[list[Tensor], Tensor, Tensor]:
        """The batch of ``n`` rows drawn uniformly with replacement. One launch, no host sync.

        Args:
            rng: random state as in :mod:`gpubuf.kernels.philox`, on the storage's device.
            n: number of rows.

        Returns:
            One tensor ``[n, ...]`` for each leaf of :attr:`layout`, the flat positions of the drawn rows and their
            generations, int64 ``[n]`` each.
        """
        layout, fields = self._layout, self._fields
        if layout is None or fields is None:
            raise RuntimeError(NOT_INITIALIZED)
        ring, given = self._ring.counters, self._arguments  # type: ignore[union-attr]
        if past_dispatcher(fields):
            tensors = layout.allocate(n)
            return tensors, *_sample_into(fields, ring, self._ends, self._links, self._noise, rng, n, *given, tensors)
        n_bytes = layout.arena(n).n_bytes
        arena, index, generation = _sample(fields, ring, self._ends, self._links, self._noise, rng, n, *given, n_bytes)
        return layout.cut(arena, n), index, generation

    def assemble(
        self, tensors: list[Tensor], extra: dict[Any, Tensor] | None = None, batch_size: tuple[int, ...] | None = None
    ) -> Data:
        """A batch from the result of :meth:`gather`, with ``extra`` entries.

        ``batch_size`` is the shape of the batch dimensions of ``tensors``; None: the length of the first dimension.

        Raises:
            RuntimeError: the tensors are not those of this reader.
        """
        layout = self.layout
        if len(tensors) != len(layout.leaves):
            raise RuntimeError("the sampler's draw() reads rows from its storage: let it read them from its reader")
        if batch_size is None:
            batch_size = (tensors[0].shape[0] if tensors else 0,)
        return layout.assemble(tensors, batch_size, self.storage.device, extra)

    def unravel(self, flat: Tensor) -> Tensor:
        """``[n]`` flat positions as ``[n, ndim]`` coordinates; ``[n]`` itself for ``ndim=1``."""
        return self.storage.unravel(flat)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.recipe})"


_INT64 = dtype_code(torch.int64)
_STEPS_FIELD = Field(0, 8, 0, 0, 8, STEPS, _INT64, _INT64, _INT64, 1, writes=0)


def _batch_dtype(leaf: Leaf, field: Field) -> torch.dtype:
    return leaf.dtype if field.batch == OPAQUE else DTYPES[field.batch]


def _batch_layout(layout: RowLayout, fields: list[Field]) -> RowLayout:
    """The layout of a batch: that of the rows, with the dtypes of ``fields`` and the number of steps."""
    example = [
        torch.empty((1, *leaf.shape), dtype=_batch_dtype(leaf, field), device="meta")
        for leaf, field in zip(layout.leaves, fields, strict=True)
    ]
    extra: dict[Any, Tensor] = {}
    if any(field.row == SUM for field in fields):
        extra[STEPS_KEY] = torch.empty((1, 1), dtype=torch.int64, device="meta")
    return RowLayout(layout.assemble(example, (1,), None, extra), 1)
