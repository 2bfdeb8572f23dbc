"""The plans of a storage, how its rows are written and read where they are, and readers with plans of their own."""

from __future__ import annotations

import math
from typing import Any
from weakref import WeakSet

import torch

from gpubuf.data.storage import host_memory
from gpubuf.data.storage.column import address_table
from gpubuf.data.storage.end_bits import EndBits, Marks, Signal, bitmap_bytes
from gpubuf.data.storage.follower import Followers, Reader
from gpubuf.data.storage.layout import address
from gpubuf.data.storage.placement import IndexBytes, depends_on_room
from gpubuf.data.storage.plan import Recipe, RowPlan, as_stored, field_table
from gpubuf.data.storage.returns import Returns, ReturnsToGo
from gpubuf.data.storage.ring import Ring
from gpubuf.data.storage.rows import NO_ROWS, Rows
from gpubuf.data.storage.schema import Options, Schema
from gpubuf.kernels.rows import Reading


class Plans:
    """How a storage writes and reads its rows. The plans stay the same, so that captured graphs find their tables.

    Args:
        options: of the storage. Without any one plan does all.

    Attributes:
        stored: of rows as they are stored.
        written: of rows as they are written.
        batch: of rows as batches have them.
    """

    def __init__(self, options: Options) -> None:
        self._computed = bool(options)
        self.stored = RowPlan()
        self.batch = RowPlan() if options else self.stored
        self.written = RowPlan() if options.batch_dtypes else self.batch

    @property
    def nbytes(self) -> int:
        """Bytes of the tables that the storage itself has."""
        tables = [plan.table for plan in {self.stored, self.written, self.batch}]
        return sum(table.nbytes for table in tables if table is not None)

    def place(self, rows: Rows) -> None:
        """Write and read rows where they are now. Tables stay where they are, as long as the device does."""
        schema, sharing = rows.schema, rows.sharing
        rows.way = sharing or self.written
        row_bytes = [leaf.row_bytes for leaf in schema.stored.leaves]
        table = address_table(rows.columns, row_bytes, rows.envs, rows.device)
        on_host = rows.placement.on_host(rows.shape[0])
        how = Reading(on_host=on_host) if on_host else None
        # Without options it makes batches, too, which have the containers that were written.
        layout = schema.stored if self._computed else schema.batch
        self.stored.set(layout, table, rows.ring, rows.capacity, reading=how)
        if not self._computed:
            return
        links = () if sharing is None else sharing.of_plans
        reading = Reading(links=None if sharing is None else sharing.links, envs=rows.envs, on_host=on_host)
        for plan, layout in {self.written: schema.written, self.batch: schema.batch}.items():
            plan.set(layout, field_table(rows.fields(layout), rows.device), rows.ring, rows.capacity, links, reading)
        if sharing is not None:
            sharing.stored, sharing.plan = self.stored, self.written
            fields = field_table(as_stored(rows.fields(schema.written)), rows.device)
            sharing.raw.set(schema.full, fields, rows.ring, rows.capacity, links, reading)

    def forget(self) -> None:
        """The rows are gone."""
        for plan in (self.stored, self.written, self.batch):
            plan.forget()


class Readers:
    """What reads the rows of a storage in ways of its own, and where trajectories end for those who have to know.

    It knows a reader for as long as that exists, for readers refer to the storage.

    Args:
        batch: makes the batches of those that read rows as they are.
        followers: of the storage.
        marks: of the storage, which end trajectories too.

    Attributes:
        ends_by: which keys tell the ends of trajectories; None: nobody asks.
        end_bits: where they end, if somebody asks. None: nobody does, or nothing is allocated.
        returns_by: how returns to go add up; None: nobody asks.
        returns: the returns to go, likewise.
    """

    def __init__(self, batch: RowPlan, followers: Followers, marks: Marks) -> None:
        self._batch, self._followers, self._marks = batch, followers, marks
        self._readers = WeakSet[Reader]()
        self._rows = NO_ROWS
        self.ends_by: Recipe | None = None
        self.end_bits: EndBits | None = None
        self.returns_by: ReturnsToGo | None = None
        self.returns: Returns | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without readers: those of a copy come anew."""
        return {**vars(self), "_readers": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _readers=WeakSet())

    def of(self, recipe: Recipe) -> RowPlan:
        """Reads rows as a recipe says. It follows the storage, which may be allocated later, moved and freed.

        Raises:
            KeyError: the stored rows lack a key that the recipe needs.
            ValueError: the rows can't be summed, or another reader tells ends by other keys.
        """
        if recipe.is_plain:
            return self._batch
        plan = next((known for known in self._readers if isinstance(known, RowPlan) and known.recipe == recipe), None)
        if plan is None:
            plan = RowPlan(recipe)
            self.serve(plan)
        # Also one that an interrupt kept from it.
        if plan.table is None and self._rows is not NO_ROWS:
            self._set(plan, self._rows)
        return plan

    def serve(self, reader: Reader) -> None:
        """Serve ``reader`` for as long as it exists: rows that lack what it needs are refused.

        Raises:
            ValueError: another one knows the ends of trajectories by other keys, or has other returns to go.
            KeyError: the rows lack what it needs.
        """
        if self._rows is not NO_ROWS:
            reader.check_rows(self._rows.schema)
        known, recipe = self.ends_by, reader.recipe
        if reader.needs_ends and (known is None or not recipe.same_ends(known)):
            if any(other.needs_ends for other in self._readers):
                raise ValueError("another buffer with the same storage tells the ends of trajectories by other keys")
            # Known once they are up to date: an interrupt may come at any call.
            self.ends_by = None
            if self._rows is not NO_ROWS:
                self._keep_ends(self._rows, recipe)
                self._followers.rebuild_own()
            self.ends_by = recipe
        if recipe.returns is not None and recipe.returns != self.returns_by:
            if any(other.recipe.returns is not None for other in self._readers):
                raise ValueError(f"another buffer with the same storage has other returns to go: {self.returns_by}")
            self.returns_by = None
            if self._rows is not NO_ROWS:
                self._keep_returns(self._rows, recipe.returns)
                self._followers.rebuild_own()
            self.returns_by = recipe.returns
        self._readers.add(reader)

    @property
    def _kept(self) -> list[EndBits | Returns]:
        """What is known of trajectories: the ends before what reads them."""
        return [each for each in (self.end_bits, self.returns) if each is not None]

    def depends_on(self, columns: set[int]) -> bool:
        """Whether one of these stored keys tells where trajectories end, or is added up, for who has to know."""
        return any(each.depends_on(columns) for each in self._kept)

    def end(self, ring: Ring, env: int | None) -> None:
        """End the trajectories of the newest rows, of one environment or of all. There is memory for marks."""
        self._marks.end(ring.counters, env)
        for each in self._kept:
            each.write(1)
        self._followers.on_end()

    def check_rows(self, schema: Schema, ndim: int) -> None:
        """Raise if rows of ``schema`` in ``ndim`` dimensions lack what a reader or a sampler needs.

        Raises:
            KeyError, RuntimeError, ValueError: they do.
        """
        for sampler in self._followers.samplers:
            sampler.check_rows(schema.written, ndim)
        for reader in self._readers:
            reader.check_rows(schema)

    def derived_bytes(self, requested: torch.device | str, shape: tuple[int, ...]) -> IndexBytes:
        """Bytes that are kept beside the rows of a storage of ``shape``; zero for placements that ignore free memory.

        The machine is then not asked for its GPU: a process that CUDA woke up in can't be forked to use it.
        """
        if not depends_on_room(requested):
            return IndexBytes()
        device_type = "cuda" if host_memory.cuda_present() else "cpu"
        index = math.prod(shape) * self._marks.by_writers
        if self.ends_by is not None:
            index += bitmap_bytes(shape, device_type)
        if self.returns_by is not None:
            # Of rewards of one element: there is no schema yet.
            index += 4 * math.prod(shape)
        if self._rows.sharing is not None:
            index += self._rows.sharing.nbytes
        samplers = self._followers.samplers
        return sum((each.index_bytes(shape, device_type) for each in samplers), IndexBytes(index=index))

    def place(self, rows: Rows, *, anew: bool) -> None:
        """Read rows where they are now. ``anew``: it is to be found out where trajectories end."""
        self._rows = rows
        if anew and self.ends_by is not None:
            self._keep_ends(rows, self.ends_by)
        for each in self._kept:
            each.readdress(rows.table)
        self._followers.keep(ends=self.end_bits, returns=self.returns)
        for reader in self._readers:
            if isinstance(reader, RowPlan):
                self._set(reader, rows)

    def _keep_ends(self, rows: Rows, recipe: Recipe) -> None:
        positions, by_id = recipe.ends(rows.schema)
        signal = Signal(tuple(rows.schema.columns[position] for position in positions), by_id)
        self.end_bits = EndBits(signal, rows.ring, rows.shape, rows.table, self._marks)
        self._followers.keep(ends=self.end_bits)
        if self.returns_by is not None:
            self._keep_returns(rows, self.returns_by)

    def _keep_returns(self, rows: Rows, options: ReturnsToGo) -> None:
        assert self.end_bits is not None
        self.returns = Returns(options, rows.schema, self.end_bits, rows.table)
        self._followers.keep(returns=self.returns)

    def _set(self, plan: RowPlan, rows: Rows) -> None:
        """Read rows by the recipe of ``plan`` where they are now, and where trajectories end, if that is known."""
        recipe, processing = plan.recipe, plan.recipe.processing
        draws, noise = 0, None
        if processing is not None:
            processing.bind(rows.schema.batch.leaves, rows.envs, rows.device)
            draws, noise = processing.draws, processing.noise
        returns_at = 0 if self.returns is None else address(self.returns.column)
        bits = self.end_bits.ends if self.end_bits is not None and recipe.needs_ends else None
        links = None if rows.sharing is None else rows.sharing.links
        plan.set(
            recipe.layout(rows.schema),
            field_table(recipe.fields(rows.schema, rows.fields(rows.schema.batch), returns_at), rows.device),
            rows.ring,
            rows.capacity,
            reading=Reading(
                *(bits, links, noise, rows.envs, recipe.n_steps, recipe.gamma, draws),
                on_host=rows.placement.on_host(rows.shape[0]),
                past=recipe.past,
                windows=bool(recipe.windows),
            ),
        )

    def forget(self) -> None:
        """The rows are gone."""
        self._rows, self.end_bits, self.returns = NO_ROWS, None, None
        for reader in self._readers:
            if isinstance(reader, RowPlan):
                reader.forget()
