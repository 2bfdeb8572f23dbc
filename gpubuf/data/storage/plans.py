"""The plans of a storage: how its rows are written and read where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

import torch

from gpubuf.data.storage.column import Column, address_table
from gpubuf.data.storage.end_bits import EndBits
from gpubuf.data.storage.follower import Reader
from gpubuf.data.storage.layout import RowLayout
from gpubuf.data.storage.plan import Recipe, RowPlan, as_stored, field_table, fields_of
from gpubuf.data.storage.ring import Ring
from gpubuf.data.storage.schema import Options, Schema
from gpubuf.data.storage.share_next import Sharing
from gpubuf.kernels.rows import Field, Reading


class Rows(NamedTuple):
    """The rows of a storage, where they are.

    Attributes:
        schema: what they are.
        columns: their memory, in the order of ``schema.stored``.
        ring: counts them.
        capacity: how many there is room for.
        envs: rows per step.
        device: does the work.
        sharing: next observations that are stored once; None: all have memory of their own.
    """

    schema: Schema
    columns: Sequence[Column]
    ring: Ring
    capacity: int
    envs: int
    device: torch.device
    sharing: Sharing | None

    def fields(self, layout: RowLayout) -> list[Field]:
        """The fields of batches of ``layout``."""
        aside = {} if self.sharing is None else self.sharing.aside
        return fields_of(self.schema, self.columns, self.envs, layout, aside)


class Plans:
    """How a storage writes and reads its rows. The plans stay the same, so that captured graphs find their tables.

    Args:
        options: of the storage. Without any one plan does all.

    Attributes:
        stored: of rows as they are stored.
        written: of rows as they are written.
        batch: of rows as batches have them.
        readers: what reads rows in ways of its own, as long as it exists: it refers to the storage.
        ends_by: which keys tell the ends of trajectories; None: nobody asks.
    """

    def __init__(self, options: Options) -> None:
        self._computed = bool(options)
        self.stored = RowPlan()
        self.batch = RowPlan() if options else self.stored
        self.written = RowPlan() if options.batch_dtypes else self.batch
        self.ends_by: Recipe | None = None
        self.readers = WeakSet[Reader]()

    def __getstate__(self) -> dict[str, Any]:
        """Without readers: those of a copy come anew."""
        return {**vars(self), "readers": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.readers = WeakSet()

    def reader(self, recipe: Recipe) -> RowPlan | None:
        """What reads rows as a recipe says; None: nothing does."""
        if recipe.is_plain:
            return self.batch
        same = (each for each in self.readers if isinstance(each, RowPlan) and each.recipe == recipe)
        return next(same, None)

    def tell_ends(self, reader: Reader) -> bool:
        """Let ends of trajectories be told as a reader needs it. Returns whether that is by other keys than before.

        Raises:
            ValueError: another one knows the ends of trajectories by other keys.
        """
        known, recipe = self.ends_by, reader.recipe
        changes = reader.needs_ends and (known is None or not recipe.same_ends(known))
        if changes:
            if any(other.needs_ends for other in self.readers):
                raise ValueError("another buffer with the same storage tells the ends of trajectories by other keys")
            self.ends_by = recipe
        return changes

    def check_rows(self, schema: Schema) -> None:
        """Raise if rows of ``schema`` lack what a reader needs."""
        for reader in self.readers:
            reader.check_rows(schema)

    @property
    def nbytes(self) -> int:
        """Bytes of the tables that the storage itself has."""
        tables = [plan.table for plan in {self.stored, self.written, self.batch}]
        return sum(table.nbytes for table in tables if table is not None)

    def set(self, at: Rows) -> None:
        """Write and read rows where they are now. Tables stay where they are, as long as the device does."""
        schema, sharing = at.schema, at.sharing
        row_bytes = [leaf.row_bytes for leaf in schema.stored.leaves]
        table = address_table(at.columns, row_bytes, at.envs, at.device)
        # Without options it makes batches, too, which have the containers that were written.
        self.stored.set(schema.stored if self._computed else schema.batch, table, at.ring, at.capacity)
        if not self._computed:
            return
        links = () if sharing is None else sharing.of_plans
        reading = Reading(links=None if sharing is None else sharing.links, envs=at.envs)
        for plan, layout in {self.written: schema.written, self.batch: schema.batch}.items():
            plan.set(layout, field_table(at.fields(layout), at.device), at.ring, at.capacity, links, reading)
        if sharing is not None:
            sharing.plan = self.written
            fields = field_table(as_stored(at.fields(schema.written)), at.device)
            sharing.raw.set(schema.full, fields, at.ring, at.capacity, links, reading)

    def set_readers(self, at: Rows, ends: EndBits | None) -> None:
        """Read rows where they are now, and where trajectories end, if that is known."""
        for reader in self.readers:
            if isinstance(reader, RowPlan):
                set_reader(reader, at, ends)

    def forget(self) -> None:
        """The rows are gone."""
        for plan in (self.stored, self.written, self.batch, *self.readers):
            if isinstance(plan, RowPlan):
                plan.forget()


def set_reader(plan: RowPlan, at: Rows, ends: EndBits | None) -> None:
    """Read rows by the recipe of ``plan`` where they are now, and where trajectories end, if that is known."""
    recipe, processing = plan.recipe, plan.recipe.processing
    draws, noise = 0, None
    if processing is not None:
        processing.bind(at.schema.batch.leaves, at.envs, at.device)
        draws, noise = processing.draws, processing.noise
    bits = ends.ends if ends is not None and recipe.n_steps > 1 else None
    links = None if at.sharing is None else at.sharing.links
    plan.set(
        recipe.layout(at.schema.batch),
        field_table(recipe.fields(at.schema, at.fields(at.schema.batch)), at.device),
        at.ring,
        at.capacity,
        reading=Reading(bits, links, noise, at.envs, recipe.n_steps, recipe.gamma, draws),
    )
