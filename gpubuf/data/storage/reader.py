"""Batches made of stored rows by a recipe, in the launch that copies them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from gpubuf.data.storage.layout import Data, RowLayout, as_written, layout_of
from gpubuf.data.storage.plan import NOT_INITIALIZED, STEPS_KEY, Recipe, RowPlan, field_table
from gpubuf.data.storage.schema import NEXT_KEY, Schema
from gpubuf.data.storage.storage import TensorStorage
from gpubuf.kernels.rows import LAST, NEXT, OFF, STEPS, SUM, Field, Reading, dtype_code


class Reader(RowPlan):
    """Reads a storage as a recipe says. Samplers and batches use it in place of the storage.

    It follows the storage, which may be allocated later, moved and freed.

    Args:
        storage: holds the rows.
        recipe: says how batches are made of them.

    Raises:
        KeyError: the stored rows lack a key that the recipe needs.
        ValueError: the rows can't be summed, or another reader tells ends by other keys.
    """

    def __init__(self, storage: TensorStorage, recipe: Recipe) -> None:
        super().__init__()
        self.storage = storage
        self.recipe = recipe
        self._schema: Schema | None = None
        storage.followed_by(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.storage, self.recipe)

    # Following the storage

    @property
    def needs_ends(self) -> bool:
        """Whether batches depend on where trajectories end."""
        return self.recipe.n_steps > 1

    def check_rows(self, schema: Schema) -> None:
        """Raise if rows of ``schema`` lack what the recipe needs. See :meth:`Recipe.check_rows`."""
        self.recipe.check_rows(schema)
        late = [as_written(key) for key in schema.written.host if key[:1] == (NEXT_KEY,)]
        if late and self.recipe.n_steps > 1:
            raise ValueError(f"{late} are not tensors, and can't be those of a later row: n-step batches lack them")

    def follow(self) -> None:
        """Read the rows where the storage has them now."""
        storage = self.storage
        if not storage.initialized or storage.schema is not self._schema:
            # Allocated anew: captured graphs are refused then.
            self.forget()
            self._schema = None
        if not storage.initialized:
            return
        recipe, sharing, per_step = self.recipe, storage.sharing, math.prod(storage.shape[1:])
        fields = self._chosen(storage.schema, storage.fields)
        mirror, draws, noise, processing = OFF, 0, None, recipe.processing
        if processing is not None:
            leaves = storage.batch_layout.leaves
            processing.bind(leaves, per_step, storage.device)
            for position, leaf in enumerate(leaves):
                fields[position] = dataclasses.replace(fields[position], **processing.options(leaf.key))
            mirror, draws, noise = processing.mirror, processing.draws, processing.noise
        self._schema = storage.schema
        ends = storage.end_bits.words if storage.end_bits is not None and recipe.n_steps > 1 else None
        links = None if sharing is None else sharing.links
        self.set(
            self._layout or _batch_layout(storage.batch_layout, recipe.n_steps > 1),
            field_table(fields, storage.device),
            storage.counters,
            storage.max_size,
            reading=Reading(ends, links, noise, per_step, recipe.n_steps, recipe.gamma, mirror, draws),
        )

    def _chosen(self, schema: Schema, fields: list[Field]) -> list[Field]:
        """The fields, each with the row that it reads, and one for the number of steps."""
        if self.recipe.n_steps == 1:
            return fields
        rewards = self.recipe.rewards(schema)
        chosen = []
        for position, (leaf, field) in enumerate(zip(schema.batch.leaves, fields, strict=True)):
            if position in rewards:
                field = dataclasses.replace(field, row=SUM)
            elif leaf.key[0] == NEXT_KEY and field.row != NEXT:
                field = dataclasses.replace(field, row=LAST)
            chosen.append(field)
        return [*chosen, _STEPS_FIELD]

    def _ready(self) -> Tensor:
        """The table, where an interrupt has kept the storage from telling that there is one."""
        self.follow()
        if self.table is None:
            raise RuntimeError(NOT_INITIALIZED)
        return self.table

    # See the methods of TensorStorage

    @property
    def batch_layout(self) -> RowLayout:
        """The keys, shapes and dtypes of a batch. Raises as :attr:`layout`."""
        return self.layout

    @property
    def device(self) -> torch.device:
        """The device that batches come out on."""
        return self.storage.device

    def assemble(
        self, tensors: list[Tensor], extra: dict[Any, Tensor] | None = None, batch_size: tuple[int, ...] | None = None
    ) -> Data:
        """A batch from the result of :meth:`gather`, with ``extra`` entries.

        ``batch_size`` is the shape of the batch dimensions of ``tensors``; None: the length of the first dimension.

        Raises:
            RuntimeError: the tensors are not those of this reader.
        """
        layout = self.batch_layout
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


def _batch_layout(layout: RowLayout, with_steps: bool) -> RowLayout:
    """The layout of a batch: that of single rows, and the number of steps."""
    if not with_steps:
        return layout
    # One element each, whatever the shape.
    example = [torch.empty((), dtype=leaf.dtype).expand(1, *leaf.shape) for leaf in layout.leaves]
    steps = {STEPS_KEY: torch.empty((1, 1), dtype=torch.int64)}
    return layout_of(layout.assemble(example, (1,), None, steps), 1)
