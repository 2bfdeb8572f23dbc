"""Plans: how rows go between the columns of a storage and batches, in one launch per operation.

They alone call the kernels of :mod:`gpubuf.kernels.rows`.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from gpubuf.data.arguments import Missing
from gpubuf.data.storage.column import Column
from gpubuf.data.storage.layout import OF_A_DRAW, Key, Leaf, Node, RowLayout, as_key, as_written, rows_in
from gpubuf.data.storage.returns import ReturnsToGo
from gpubuf.data.storage.ring import Ring
from gpubuf.data.storage.schema import END_NAMES, NEXT_KEY, Schema, check_tells_ends, default_ends
from gpubuf.data.storage.tree_layout import layout_of
from gpubuf.data.storage.windows import Window, as_windows
from gpubuf.kernels import rows
from gpubuf.kernels._registry import Backend, in_memory, launches_kernels, past_dispatcher, without_dispatch
from gpubuf.kernels.rows._cpu import kept_rows

NOT_INITIALIZED = "the storage is not initialized: write a batch first"
_NO_LAYOUT = cast("RowLayout", Missing(NOT_INITIALIZED))

_extend = without_dispatch(rows.extend, trusted=True, given=("sources",))
_gather = without_dispatch(rows.gather, trusted=True, given=("index",))
_sample = without_dispatch(rows.sample, trusted=True)
_write = without_dispatch(rows.write, given=("sources", "index"))
_update = without_dispatch(rows.write, given=("sources", "index", "generation"))
_relink = without_dispatch(rows.relink, given=("sources", "index"))
_cpu, _launch = Backend("gpubuf.kernels.rows._cpu"), Backend("gpubuf.kernels.rows._launch")


class RowPlan:
    """Writes and reads rows by a table of addresses. Empty until :meth:`set`.

    Rows are copied as they are stored, or computed on the way: other dtypes, codecs, observations that are stored once,
    transitions of several steps, processing.

    Args:
        recipe: says how batches are made of rows; None: they are copies. A storage sets the table, and sets it anew
            when it is allocated, moved or freed.

    Attributes:
        recipe: as given.
        layout: the keys, shapes and dtypes of a row of a batch. RuntimeError if one asks before there are any.
        table: int64, an entry for each key: ``[K, 5]`` of columns that are copied, or ``[F, FIELD]`` of fields; see
            :mod:`gpubuf.kernels.rows`. None: nothing is allocated. Captured graphs read it: as long as it stays on one
            device, it changes in place.
        placed: another object whenever the rows are somewhere else, or are read in another way.
        launches: whether reading and writing are launches of kernels.
        prepares: whether writes can be prepared.
    """

    def __init__(self, recipe: Recipe | None = None) -> None:
        self.recipe = Recipe() if recipe is None else recipe
        self.forget()

    def __reduce__(self) -> tuple[Any, ...]:
        """Without addresses."""
        return type(self), (self.recipe,)

    @property
    def needs_ends(self) -> bool:
        """Whether batches depend on where trajectories end."""
        return self.recipe.needs_ends

    def check_rows(self, schema: Schema) -> None:
        """Raise if rows of ``schema`` lack what the recipe needs. See :meth:`Recipe.check_rows`."""
        self.recipe.check_rows(schema)

    def forget(self) -> None:
        """The rows are gone."""
        self.table: Tensor | None = None
        self.layout = _NO_LAYOUT
        # A Ring, as soon as there is a table.
        self._ring: Any = None
        self._capacity = 0
        self._links: tuple[Any, ...] = ()
        self._reading: tuple[Any, ...] = ()
        self.placed, self.launches = object(), False

    def set(
        self,
        layout: RowLayout,
        table: Tensor,
        ring: Ring,
        capacity: int,
        links: tuple[Any, ...] = (),
        reading: rows.Reading | None = None,
    ) -> None:
        """Read and write rows where they are now.

        Args:
            layout: the keys of a row.
            table: see above, on the device that does the work.
            ring: counts the rows.
            capacity: number of rows that the table describes.
            links: rows per step, links and owners of next observations that are stored once; empty: none are.
            reading: what fields need besides; None: rows are copied.
        """
        self.layout, self._ring, self._capacity, self._links = layout, ring, capacity, links
        self._reading = () if reading is None else tuple(reading)
        self.placed, self.launches = object(), launches_kernels(table)
        # Next observations that are stored once are found by several launches, and very many keys are written by some.
        self.prepares = not (self.launches and (links or len(layout.leaves) > _launch.MAX_SOURCES))
        # Last: with it the plan is ready. An interrupt may come at any call.
        if self.table is not None and (self.table.device, self.table.shape) == (table.device, table.shape):
            self.table.copy_(table)
        else:
            self.table = table

    @property
    def device(self) -> torch.device:
        """The device that batches come out on.

        Raises:
            RuntimeError: nothing has been written yet.
        """
        if self.table is None:
            raise RuntimeError(NOT_INITIALIZED)
        return self.table.device

    # Reading

    def gather(self, index: Tensor) -> tuple[list[Tensor], Tensor]:
        """Copies of rows, and their write generations. One launch, no host sync.

        Args:
            index: int64 ``[n]`` flat positions on the device of the table, contiguous.

        Returns:
            One tensor ``[n, ...]`` for each key of ``layout``, and the generations, int64 ``[n]``.
        """
        table, n = self.table, index.numel()
        if table is None:
            raise RuntimeError(NOT_INITIALIZED)
        layout, ring = self.layout, self._ring.counters
        if past_dispatcher(table):
            tensors = layout.allocate(n)
            found = _cpu.read(table, ring, None, in_memory(index), n, self._capacity, tensors, self._reading)
            return tensors, found[1]
        n_bytes = layout.arena(n).n_bytes
        arena, generation = _gather(table, ring, index, self._capacity, n_bytes, *self._reading)
        return layout.cut(arena, n), generation

    def gather_key(self, key: int, index: Tensor) -> Tensor:
        """Copies of one key of rows, ``[n, ...]``; ``key`` is its position in ``layout``. One launch, no host sync."""
        leaf, n = self.layout.leaves[key], index.numel()
        assert self.table is not None
        table, ring = self.table[key : key + 1], self._ring.counters
        if past_dispatcher(table):
            found = torch.empty((n, *leaf.shape), dtype=leaf.dtype, device="cpu")
            _cpu.read(table, ring, None, in_memory(index), n, self._capacity, [found], self._reading)
            return found
        n_bytes = rows.arena_offsets([leaf.row_bytes], n)[1]
        return rows_in(_gather(table, ring, index, self._capacity, n_bytes, *self._reading)[0], leaf, n)

    def prepared_gather(self, key: int, n: int) -> tuple[Callable[[], object], Tensor, Tensor]:
        """What makes :meth:`gather_key` of ``n`` rows on the CPU, while they are placed as now; their positions, int64
        ``[n]``, which are to be set before; and what it fills.
        """
        assert self.table is not None
        index = torch.zeros(n, dtype=torch.int64, device="cpu")
        found = torch.empty((n, *self.layout.leaves[key].shape), dtype=self.layout.leaves[key].dtype, device="cpu")
        given = (self.table[key : key + 1], self._ring.counters, None, index, n, self._capacity, [found], self._reading)
        return functools.partial(_cpu.read, *given), index, found

    def count_drawn(self) -> Tensor:
        """From how many rows :meth:`sample_uniform` draws: int64, 0-dim. No host sync."""
        return kept_rows(self._ring.counters, self._capacity, rows.Reading(*self._reading))

    def draw(self, rng: Tensor, n: int, law: Law | None = None) -> Tensor:
        """The positions of the rows that :meth:`sample_uniform` draws. One launch, no host sync."""
        assert self.table is not None
        reading = self._reading if law is None else law.reading(self._reading, self.device)
        # A batch of no keys: what moves images does not move on, and lost observations count where they are read.
        how = rows.Reading(*reading)._replace(links=None, noise=None, draws=0)
        index: Tensor = _sample(self.table[:0], self._ring.counters, rng, n, self._capacity, 0, *how)[1]
        return index

    def sample_uniform(self, rng: Tensor, n: int, law: Law | None = None) -> tuple[list[Tensor], Tensor, Tensor]:
        """``n`` rows drawn with replacement. One launch, no host sync.

        Args:
            rng: random state as in :mod:`gpubuf.kernels.philox`, on the device of the table.
            n: number of rows.
            law: of their probabilities; None: all are the same.

        Returns:
            One tensor ``[n, ...]`` for each key, and of the drawn rows the flat positions and the write generations,
            int64 ``[n]`` each.
        """
        table = self.table
        if table is None:
            raise RuntimeError(NOT_INITIALIZED)
        layout, ring = self.layout, self._ring.counters
        reading = self._reading if law is None else law.reading(self._reading, table.device)
        if past_dispatcher(table):
            tensors = layout.allocate(n)
            return tensors, *_cpu.read(table, ring, rng, None, n, self._capacity, tensors, reading)
        n_bytes = layout.arena(n).n_bytes
        arena, index, generation = _sample(table, ring, rng, n, self._capacity, n_bytes, *reading)
        return layout.cut(arena, n), index, generation

    # Writing: sources are tensors ``[n, ...]`` for each key of the layout, on the device of the table

    def extend(self, sources: list[Tensor], n: int) -> Tensor:
        """Write ``n`` rows at the cursor. Returns their flat positions, int64 ``[n]``. No host sync.

        Raises:
            ValueError: a number does not fit its dtype; not on a GPU.
            NoRoomError: there is no room for next observations; not on a GPU.
        """
        try:
            index: Tensor = _extend(self.table, sources, self._ring.counters, n, self._capacity, *self._links)
        except ValueError as error:
            raise self._by_name(error) from None
        return index

    def prepared_extend(self, sources: list[Tensor], n: int, keeps_index: bool) -> Any:
        """A launch that writes ``n`` rows of ``sources`` each time."""
        table = self.table
        assert table is not None
        if self.launches:
            return _launch.PreparedExtend(table, sources, self._ring.counters, n, self._capacity)
        return _cpu.PreparedExtend(table, sources, self._ring.counters, n, self._capacity, keeps_index, *self._links)

    def write(self, sources: list[Tensor], index: Tensor) -> None:
        """Overwrite the rows at ``index``, int64 ``[n]``; of duplicates the last one wins. No host sync.

        Raises:
            IndexError: an index is out of range; not on a GPU.
            ValueError: as :meth:`extend`.
        """
        try:
            _write(self.table, sources, self._ring.counters, index, self._capacity)
        except ValueError as error:
            raise self._by_name(error) from None

    def update(self, sources: list[Tensor], keys: Sequence[int], index: Tensor, generation: Tensor) -> None:
        """Overwrite single keys of those rows at ``index`` that have ``generation`` still. No host sync.

        Args:
            sources: for each of ``keys`` only.
            keys: positions in the layout.
            index, generation: int64 ``[n]``.

        Raises:
            IndexError, ValueError: as :meth:`write`.
        """
        assert self.table is not None
        # Read when the operation runs: a captured graph finds the rows where they are by then.
        table = torch.stack([self.table[key] for key in keys])
        try:
            _update(table, sources, self._ring.counters, index, self._capacity, generation)
        except ValueError as error:
            raise self._by_name(error, keys) from None

    def relink(self, sources: list[Tensor], index: Tensor) -> None:
        """Keep next observations of the rows at ``index`` where they differ from the observations of the next rows.

        Raises:
            NoRoomError: as :meth:`extend`.
        """
        _relink(self.table, sources, self._ring.counters, index, self._capacity, *self._links)

    def _by_name(self, error: ValueError, keys: Sequence[int] | None = None) -> ValueError:
        """An error of the kernels, which know fields by their numbers."""
        leaves = self.layout.leaves
        chosen = leaves if keys is None else [leaves[key] for key in keys]
        return ValueError(re.sub(r"^field (\d+)", lambda found: f"key {chosen[int(found[1])].name}", str(error)))


def fields_of(
    schema: Schema,
    columns: Sequence[Column],
    rows_per_step: int,
    batch: RowLayout,
    aside: Mapping[int, tuple[int, int, int]],
) -> list[rows.Field]:
    """A field for each leaf of a batch, with the addresses of now.

    Args:
        schema: of the storage.
        columns: of the storage, in the order of ``schema.stored.leaves``.
        rows_per_step: number of environments.
        batch: the layout of the batch: that of ``schema.batch``, or of ``schema.written``.
        aside: for each column that next observations share: the addresses of entries and of pending rows, and the bytes
            from row to row.
    """
    found = []
    of_schema = zip(schema.written.leaves, schema.sources, schema.columns, strict=True)
    for leaf, (written, source, number) in zip(batch.leaves, of_schema, strict=True):
        stored = schema.stored.leaves[number]
        device_rows, _, split, host_rows, row_stride = columns[number].entry(stored.row_bytes, rows_per_step)
        # A codec lies between floating-point numbers and what is stored: integers are taken as they are.
        codec = source.codec if leaf.dtype.is_floating_point else rows.CodecNumbers()
        entries, pending, side_stride = aside.get(number, (0, 0, 0)) if source.follows else (0, 0, 0)
        found.append(
            rows.Field(
                device_rows=device_rows,
                row_bytes=leaf.n_elements * stored.dtype.itemsize,
                split=split,
                host_rows=host_rows,
                row_stride=row_stride,
                kind=rows.NEXT if source.follows else rows.DRAWN,
                stored=rows.dtype_code(stored.dtype),
                written=rows.dtype_code(written.dtype),
                batch=rows.dtype_code(leaf.dtype),
                elements=leaf.n_elements,
                entries=entries,
                pending=pending,
                side_stride=side_stride,
                writes=1,
                **codec._asdict(),
            )
        )
    return found


def as_stored(fields: Sequence[rows.Field]) -> list[rows.Field]:
    """The fields of keys that have memory, or share that of others, which read and write them as they are stored."""
    return [
        replace(field, written=field.stored, batch=field.stored, **rows.CodecNumbers()._asdict())
        for field in fields
        if field.writes
    ]


def field_table(fields: Sequence[rows.Field], device: torch.device) -> Tensor:
    """The kernels' table of fields, int64 ``[F, FIELD]`` on ``device``."""
    table = torch.tensor([field.encoded() for field in fields], dtype=torch.int64, device="cpu").reshape(-1, rows.FIELD)
    # Not waited for: CUDA has read memory that is not pinned when the call returns.
    return table.to(device, non_blocking=True)


# What a buffer asks for beside single rows

REWARD_KEYS: tuple[Key, ...] = (("next", "reward"),)
STEPS_KEY: Key = ("steps_to_next_obs",)


def _told(kind: int, dtype: torch.dtype, elements: int = 1, at: int = 0) -> rows.Field:
    """A field of what is told of the rows: it is stored nowhere, or in a column of its own ``at`` an address."""
    code = rows.dtype_code(dtype)
    of_dtypes = {"stored": code, "written": code, "batch": code}
    here, row_bytes, split, beyond, stride = rows.table_entry(at, elements * dtype.itemsize)
    return rows.Field(here, row_bytes, split, beyond, stride, kind, **of_dtypes, elements=elements, writes=0)


class Law(Protocol):
    """How often rows are drawn: see :mod:`gpubuf.data.samplers.laws`."""

    def reading(self, reading: tuple[Any, ...], device: torch.device) -> tuple[Any, ...]:
        """A :class:`gpubuf.kernels.rows.Reading`, or its first entries, with this law."""


class Processing(Protocol):
    """What happens to the keys of a batch: see :class:`gpubuf.data.processing.pipeline.Pipeline`."""

    @property
    def draws(self) -> int:
        """Uniforms of a row of the batch."""

    @property
    def noise(self) -> Tensor | None:
        """The random state of the processing."""

    def check(self, leaves: Sequence[Leaf]) -> None:
        """Raise unless batches of these leaves can be processed."""

    def bind(self, leaves: Sequence[Leaf], envs: int, device: torch.device) -> None:
        """Have all state on ``device``."""

    def options(self, key: Key) -> dict[str, Any]:
        """Attributes of the field of a key, until the next :meth:`bind`."""


@dataclass(frozen=True)
class Recipe:
    """How the batches of a buffer are made of stored rows. It is no property of the rows: it may change at any time.

    Attributes:
        n_steps: steps of a transition in a batch, at most. Fewer are taken where a trajectory ends before, and where
            the newest row is reached.
        gamma: discount of the rewards of one transition.
        reward_keys: keys that are summed. None: :data:`REWARD_KEYS`.
        end_keys: flags that end a trajectory, any of which suffices. None: those of ``"done"``, ``"terminated"`` and
            ``"truncated"`` that are stored under ``"next"``, or else at the root.
        traj_key: identifiers of trajectories, which tell the ends instead of flags.
        processing: what happens to the keys of a batch; None: nothing.
        windows: the steps around a drawn row that keys have: one :class:`Window` for all, or one for each key that has
            several, which stands for all keys below it. From ``n_steps`` 2 on a key under ``"next"`` has those around
            the last row.
        returns: the returns to go that batches have; None: none.

    Keys may be given as users write them; the attributes are tuples of names.

    Raises:
        TypeError: ``n_steps`` is no whole number, or keys are given as one string.
        ValueError: ``n_steps`` is not in 1 .. 64, ``gamma`` not in [0, 1], a list of keys is empty, or there are both
            ``end_keys`` and a ``traj_key``.
    """

    n_steps: int = 1
    gamma: float = 0.99
    reward_keys: Sequence[Any] | None = None
    end_keys: Sequence[Any] | None = None
    traj_key: Any = None
    processing: Processing | None = None
    windows: Any = ()
    returns: ReturnsToGo | None = None

    def __post_init__(self) -> None:
        if isinstance(self.n_steps, bool) or not isinstance(self.n_steps, int):
            raise TypeError(f"n_steps must be a whole number, got {self.n_steps!r}")
        if not 1 <= self.n_steps <= rows.MAX_STEPS:
            raise ValueError(f"n_steps must be in 1 .. {rows.MAX_STEPS}, got {self.n_steps}")
        gamma = float(self.gamma)
        if not (math.isfinite(gamma) and 0 <= gamma <= 1):
            raise ValueError(f"gamma must be in [0, 1], got {gamma}")
        if self.end_keys is not None and self.traj_key is not None:
            raise ValueError("end_keys and traj_key exclude each other")
        object.__setattr__(self, "gamma", gamma)
        object.__setattr__(self, "reward_keys", _keys("reward_keys", self.reward_keys))
        object.__setattr__(self, "end_keys", _keys("end_keys", self.end_keys))
        object.__setattr__(self, "traj_key", None if self.traj_key is None else as_key(self.traj_key))
        object.__setattr__(self, "windows", as_windows(self.windows))

    @property
    def is_plain(self) -> bool:
        """Whether a batch is a copy of rows, so that storages are read as they are."""
        return self.takes_single_rows and self.processing is None

    @property
    def takes_single_rows(self) -> bool:
        """Whether a row of a batch is made of one row."""
        return self.n_steps == 1 and not self.windows and self.returns is None

    @property
    def needs_ends(self) -> bool:
        """Whether batches depend on where trajectories end."""
        told = self.n_steps > 1 or self.returns is not None
        return told or any(window.needs_ends for _, window in self.windows)

    @property
    def past(self) -> int:
        """Steps before a drawn row that must not have been overwritten."""
        before: list[int] = [-window.first for _, window in self.windows]
        return max(0, *before) if before else 0

    @property
    def whole(self) -> tuple[int, int] | None:
        """How many steps before and after a drawn row must be stored, and in its trajectory. None: any row is drawn."""
        skipping = [(key, window) for key, window in self.windows if window.outside == "skip"]
        if not skipping:
            return None
        # Windows of keys under "next" are around the last row.
        after = [window.last + (self.n_steps - 1 if key[:1] == (NEXT_KEY,) else 0) for key, window in skipping]
        return max(0, *(-window.first for _, window in skipping)), max(0, *after)

    @functools.cached_property
    def offsets(self) -> tuple[int, ...]:
        """Offsets of the rows that a batch has of each drawn one, where no trajectory ends."""
        found = {0, self.n_steps - 1}
        for key, window in self.windows:
            base = self.n_steps - 1 if key[:1] == (NEXT_KEY,) else 0
            found.update(range(base + window.first, base + window.last + 1, window.step))
        return tuple(sorted(found))

    @functools.cached_property
    def masks(self) -> list[Any]:
        """Keys of batches that say which slots of windows are outside."""
        return [as_written(window.mask) for _, window in self.windows if window.mask]

    @functools.cached_property
    def positions(self) -> list[Key]:
        """Keys of batches that have the positions of the rows of windows."""
        return [(*window.rows, "index") for _, window in self.windows if window.rows]

    def window_of(self, key: Key) -> Window | None:
        """The window of a key: its own, or that of the nearest key above it."""
        above = [(len(other), window) for other, window in self.windows if key[: len(other)] == other]
        return max(above, key=itemgetter(0))[1] if above else None

    def same_ends(self, other: Recipe) -> bool:
        """Whether the same keys tell where trajectories end."""
        return (self.end_keys, self.traj_key) == (other.end_keys, other.traj_key)

    def check_rows(self, schema: Schema) -> None:
        """Raise if rows of ``schema`` lack what this needs.

        Raises:
            KeyError: a key is not stored.
            ValueError: the rows are batches themselves, or n-step transitions already; a reward is no float; or the
                last row of a transition would lack data that are not tensors.
        """
        if self.processing is not None:
            self.processing.check(schema.batch.leaves)
        if self.takes_single_rows:
            return
        layout = schema.written
        late = [as_written(key) for key in layout.host if self._takes_other_row(key)]
        if late:
            raise ValueError(f"{late} are not tensors, and can't be those of other rows: batches of {self} lack them")
        if layout.nested_batch:
            raise ValueError(
                f"batches of {self} need the steps of each environment in order, but the rows have batch dimensions of "
                f"their own, {list(layout.nested_batch)}: give the storage so many more, as ndim="
                f"{1 + len(layout.nested_batch)} in place of 1"
            )
        told = set(self._told(schema))
        stored = {leaf.key for leaf in layout.leaves if leaf.key}.union(layout.host)
        for key in sorted(told):
            for whose, others in (("draws", OF_A_DRAW), ("the rows", stored), ("they", told - {key})):
                # One is the other, or leads to it.
                if any(key[: len(other)] == other[: len(key)] for other in others):
                    raise ValueError(f"batches of {self} get a key {as_written(key)!r}, which {whose} have already")
        rewards = self.rewards(schema)
        for position in rewards:
            leaf = schema.batch.leaves[position]
            if not leaf.dtype.is_floating_point or leaf.dtype not in rows.DTYPES:
                raise ValueError(
                    f"n_steps={self.n_steps} sums the reward {leaf.name} with discounts, but it is {leaf.dtype}: write "
                    "floating-point numbers of 16, 32 or 64 bits, or give the storage batch_dtypes"
                )
        for key, window in self.windows:
            self._check_window(key, window, schema, rewards)
        if self.needs_ends:
            self.ends(schema)
        self.layout(schema)

    def _takes_other_row(self, key: Key) -> bool:
        """Whether batches have a key of another row than the drawn one."""
        return self.window_of(key) is not None or (self.n_steps > 1 and key[0] == NEXT_KEY)

    def _check_window(self, key: Key, window: Window, schema: Schema, rewards: frozenset[int]) -> None:
        """Raise a KeyError or a ValueError if rows of ``schema`` can't be given in a window."""
        layout, name, looks_back = schema.written, as_written(key), window.first < 0
        found = [position for position, leaf in enumerate(layout.leaves) if leaf.key[: len(key)] == key]
        if not found and not (self.returns is not None and self.returns.key == key):
            raise KeyError(f"there is a window of {name!r}, which is not stored; the keys are {layout.keys}")
        told = window.mask or window.is_first or window.rows
        if isinstance(layout.root, int) and told:
            raise ValueError(f"a batch that is a single tensor has no place for {told}: rows of a TensorDict have")
        for position in found:
            leaf, node = layout.leaves[position], layout.root
            if position in rewards:
                raise ValueError(f"n_steps={self.n_steps} sums {leaf.name}: there is no window of it")
            for part in leaf.key:
                if isinstance(node, Node):
                    if node.batch_suffix:
                        raise ValueError(
                            f"{leaf.name} has batch dimensions of its own, {node.batch_suffix}, and there is no window "
                            "of such a key: write it in a TensorDict without them"
                        )
                    node = node.children[part]
            follows = schema.sources[position].follows
            if key[:1] != (NEXT_KEY,):
                continue
            if told and (self.n_steps > 1 or (follows and looks_back)):
                raise ValueError(
                    f"mask, is_first and rows tell of windows of root keys: {leaf.name} is that of other rows"
                )
            twin = leaf.key[1:]
            if (
                looks_back
                and not follows
                and window.outside in ("repeat", "zero")
                and layout.position(twin) is not None
            ):
                # Before the first row's next observation comes its own, which is not in the memory of this key.
                raise ValueError(
                    f"a window of {leaf.name} goes back from {as_written(twin)!r} on only if both are stored once: "
                    f"give the storage share_next=[{as_written(twin)!r}]"
                )

    def _told(self, schema: Schema, returns_at: int = 0) -> dict[Key, rows.Field]:
        """The fields of what batches tell of their rows, by key."""
        found = {} if self.n_steps == 1 else {STEPS_KEY: _told(rows.STEPS, torch.int64)}
        for _, window in self.windows:
            for key, kind, dtype in (
                (window.mask, rows.PADDED, torch.bool),
                (window.is_first, rows.IS_FIRST, torch.bool),
                (window.rows and (*window.rows, "index"), rows.POSITION, torch.int64),
                (window.rows and (*window.rows, "index_generation"), rows.GENERATION, torch.int64),
            ):
                if key is not None:
                    field = replace(_told(kind, dtype), **window.options)
                    if found.setdefault(key, field) != field:
                        raise ValueError(f"{as_written(key)!r} can't tell of two windows that differ")
        if self.returns is not None:
            leaf = self.returns.leaf(schema)
            field, of_leaf = _told(rows.DRAWN, leaf.dtype, leaf.n_elements, returns_at), self.window_of(leaf.key)
            field = field if of_leaf is None else replace(field, **of_leaf.options)
            if found.setdefault(leaf.key, field) != field:
                raise ValueError(f"{leaf.name} can't be both the return to go and what is told of a window")
        return found

    def rewards(self, schema: Schema) -> frozenset[int]:
        """The keys that are summed: their positions in batches of ``schema``.

        Raises:
            KeyError: one is not stored.
        """
        if self.n_steps == 1:
            return frozenset()
        keys = REWARD_KEYS if self.reward_keys is None else self.reward_keys
        return frozenset(position_of(schema.written, key, f"n_steps={self.n_steps} sums the reward") for key in keys)

    def fields(self, schema: Schema, fields: list[rows.Field], returns_at: int = 0) -> list[rows.Field]:
        """The fields of a batch, from those of single rows: each with the row that it reads, and what happens to it.

        ``returns_at`` is the address of the returns to go.
        """
        if self.processing is not None:
            leaves = schema.batch.leaves
            options = [self.processing.options(leaf.key) for leaf in leaves]
            fields = [replace(field, **own) for field, own in zip(fields, options, strict=True)]
        if self.takes_single_rows:
            return fields
        rewards, chosen = self.rewards(schema), self._told(schema, returns_at)
        for position, (leaf, field) in enumerate(zip(schema.batch.leaves, fields, strict=True)):
            if position in rewards:
                field = replace(field, kind=rows.SUM)
            elif self.n_steps > 1 and leaf.key[0] == NEXT_KEY and field.kind != rows.NEXT:
                field = replace(field, kind=rows.LAST)
            window = self.window_of(leaf.key)
            chosen[leaf.key] = field if window is None else replace(field, **window.options)
        return [chosen[leaf.key] for leaf in self.layout(schema).leaves]

    def layout(self, schema: Schema) -> RowLayout:
        """The layout of a batch: that of single rows with windows, and with what is told of the rows."""
        layout = schema.batch
        if self.takes_single_rows:
            return layout
        told = {
            key: torch.empty((1, field.window), dtype=rows.DTYPES[field.batch], device="cpu")
            for key, field in self._told(schema).items()
        }
        if self.returns is not None:
            told[self.returns.key] = self._example(self.returns.leaf(schema))
        return layout_of(layout.assemble(list(map(self._example, layout.leaves)), (1,), None, told), 1)

    def _example(self, leaf: Leaf) -> Tensor:
        window = self.window_of(leaf.key)
        shape = leaf.shape if window is None else window.shape_of(leaf)
        # One element each, whatever the shape.
        return torch.empty((), dtype=leaf.dtype, device="cpu").expand(1, *shape)

    def __str__(self) -> str:
        """What batches are of, for messages."""
        steps = f"n_steps={self.n_steps}" if self.n_steps > 1 else ""
        windows, returns = "windows" if self.windows else "", "" if self.returns is None else "returns"
        return " and ".join(filter(None, (steps, windows, returns)))

    def ends(self, schema: Schema) -> tuple[tuple[int, ...], bool]:
        """Which keys tell the ends of trajectories: their positions in ``schema``, and whether they are identifiers.

        Raises:
            KeyError: a key is not stored, or none of the default ones is.
            ValueError: a key has no memory of its own, or is stored in a way that does not tell.
        """
        keys = self.end_keys or (None if self.traj_key is None else (self.traj_key,)) or self._default_ends(schema)
        positions = tuple(position_of(schema.written, key, "the ends of trajectories are told by") for key in keys)
        for key, position in zip(keys, positions, strict=True):
            if schema.sources[position].follows:
                raise ValueError(f"{as_written(key)!r} marks trajectory ends; exclude it from the keys of share_next")
        by_id = self.traj_key is not None
        check_tells_ends(schema, [schema.columns[position] for position in positions], by_id)
        return positions, by_id

    def _default_ends(self, schema: Schema) -> list[Key]:
        layout = schema.written
        found = default_ends(lambda key: layout.position(key) is not None)
        if not found:
            raise KeyError(
                f"batches of {self} need the ends of trajectories, and none of "
                f"{[(NEXT_KEY, name) for name in END_NAMES]} is stored: give end_keys; the keys are {layout.keys}"
            )
        return found


def position_of(layout: RowLayout, key: Key, what: str) -> int:
    """The position of a key in a layout. KeyError if it is not stored: ``what`` is the beginning of its text."""
    position = layout.position(key)
    if position is None:
        raise KeyError(f"{what} {as_written(key)!r}, which is not stored; the keys are {layout.keys}")
    return position


def _keys(name: str, keys: Sequence[Any] | None) -> tuple[Key, ...] | None:
    if keys is None:
        return None
    if isinstance(keys, str):
        raise TypeError(f"{name} is a list of keys, got the string {keys!r}")
    if not keys:
        raise ValueError(f"{name} is empty")
    return tuple(as_key(key) for key in keys)
