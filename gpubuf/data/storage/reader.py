"""Batches made of stored rows by a recipe, in the launch that copies them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from gpubuf.data.storage.fields import field_table
from gpubuf.data.storage.layout import Data, RowLayout, as_written, layout_of
from gpubuf.data.storage.recipe import STEPS_KEY, Recipe
from gpubuf.data.storage.ring import Ring
from gpubuf.data.storage.row_memory import NOT_INITIALIZED
from gpubuf.data.storage.schema import NEXT_KEY, Form
from gpubuf.data.storage.tensor_storage import TensorStorage
from gpubuf.kernels import rows
from gpubuf.kernels._registry import in_memory, lazy, past_dispatcher, without_dispatch
from gpubuf.kernels.rows import DOUBLED, LAST, NEXT, OFF, STEPS, SUM, Field, Reading, dtype_code

_gather = without_dispatch(rows.gather, given=("index",))
_sample = without_dispatch(rows.sample)
# The CPU's forms of two operations that no schema can describe: they write into tensors of the caller's.
_gather_into = lazy("gpubuf.kernels.rows._cpu:gather_into")
_sample_into = lazy("gpubuf.kernels.rows._cpu:sample_into")


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
        self._form: Form | None = None
        self._layout: RowLayout | None = None
        self._fields: Tensor | None = None
        self._ring: Ring | None = None
        self._capacity = 0
        self._reading = Reading()
        # How often a drawn row comes in the batch.
        self._copies = 1

    @property
    def needs_ends(self) -> bool:
        """Whether batches depend on where trajectories end."""
        return self.recipe.n_steps > 1

    def check_rows(self, form: Form) -> None:
        """Raise if rows of ``form`` lack what the recipe needs. See :meth:`Recipe.check_rows`."""
        self.recipe.check_rows(form)
        late = [as_written(key) for key in form.written.host if key[:1] == (NEXT_KEY,)]
        if late and self.recipe.n_steps > 1:
            raise ValueError(f"{late} are not tensors, and can't be those of a later row: n-step batches lack them")

    def follow(self) -> None:
        """Read the rows where the storage has them now."""
        storage = self.storage
        if not storage.initialized or storage.form is not self._form:
            # Allocated anew: captured graphs are refused then.
            self._forget()
        if not storage.initialized:
            return
        recipe, ends = self.recipe, storage.end_bits
        fields, per_step = self._chosen(storage.form, storage.fields), math.prod(storage.shape[1:])
        mirror, draws, noise, processing = OFF, 0, None, recipe.processing
        if processing is not None:
            leaves = storage.batch_layout.leaves
            processing.bind(leaves, per_step, storage.device)
            for position, leaf in enumerate(leaves):
                fields[position] = dataclasses.replace(fields[position], **processing.options(leaf.key))
            mirror, draws, noise = processing.mirror, processing.draws, processing.noise
        if self._layout is None:
            self._form = storage.form
            self._layout = _batch_layout(storage.batch_layout, recipe.n_steps > 1)
        self._ring = storage.counters
        words = ends.words if ends is not None and recipe.n_steps > 1 else None
        links = None if storage.sharing is None else storage.sharing.links
        self._capacity = storage.max_size
        self._reading = Reading(words, links, noise, per_step, recipe.n_steps, recipe.gamma, mirror, draws)
        self._copies = 2 if mirror == DOUBLED else 1
        # Last: with it the reader is ready. An interrupt may come at any call.
        table = field_table(fields, storage.device)
        if self._fields is not None and self._fields.device == storage.device:
            self._fields.copy_(table)
        else:
            self._fields = table

    def _chosen(self, form: Form, fields: list[Field]) -> list[Field]:
        """The fields, each with the row that it reads, and one for the number of steps."""
        if self.recipe.n_steps == 1:
            return fields
        rewards = self.recipe.rewards(form)
        chosen = []
        for position, (leaf, field) in enumerate(zip(form.batch.leaves, fields, strict=True)):
            if position in rewards:
                field = dataclasses.replace(field, row=SUM)
            elif leaf.key[0] == NEXT_KEY and field.row != NEXT:
                field = dataclasses.replace(field, row=LAST)
            chosen.append(field)
        return [*chosen, _STEPS_FIELD]

    def _followed(self) -> Tensor:
        """The table of fields, where an interrupt has kept the storage from telling that there is one."""
        self.follow()
        if self._fields is None:
            raise RuntimeError(NOT_INITIALIZED)
        return self._fields

    # Reading: see the methods of TensorStorage

    @property
    def batch_layout(self) -> RowLayout:
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
            One tensor ``[n, ...]`` for each leaf of :attr:`batch_layout`, and the generations of the drawn rows, int64
            ``[n]``; ``[2 * n]`` each if batches are doubled.
        """
        fields, n = self._fields, index.numel() * self._copies
        if fields is None:
            fields = self._followed()
        layout, ring, capacity = self.batch_layout, self._ring.counters, self._capacity  # type: ignore[union-attr]
        if past_dispatcher(fields):
            tensors = layout.allocate(n)
            return tensors, _gather_into(fields, ring, in_memory(index), capacity, tensors, *self._reading)
        n_bytes = layout.arena(n).n_bytes
        arena, generation = _gather(fields, ring, index, capacity, n_bytes, *self._reading)
        return layout.cut(arena, n), generation

    def sample_uniform(self, rng: Tensor, n: int) -> tuple[list[Tensor], Tensor, Tensor]:
        """The batch of ``n`` rows drawn uniformly with replacement. One launch, no host sync.

        Args:
            rng: random state as in :mod:`gpubuf.kernels.philox`, on the storage's device.
            n: number of rows.

        Returns:
            One tensor ``[n, ...]`` for each leaf of :attr:`batch_layout`, and of the drawn rows the flat positions and
            the generations, int64 ``[n]`` each; ``[2 * n]`` if batches are doubled.
        """
        fields = self._fields
        if fields is None:
            fields = self._followed()
        layout, ring, capacity = self.batch_layout, self._ring.counters, self._capacity  # type: ignore[union-attr]
        if past_dispatcher(fields):
            tensors = layout.allocate(n * self._copies)
            return tensors, *_sample_into(fields, ring, rng, n, capacity, tensors, *self._reading)
        rows = n * self._copies
        n_bytes = layout.arena(rows).n_bytes
        arena, index, generation = _sample(fields, ring, rng, n, capacity, n_bytes, *self._reading)
        return layout.cut(arena, rows), index, generation

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
