"""How much memory a buffer takes, before it exists, and where it fits."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_tensorclass
from torch import Tensor

from gpubuf.data.arguments import check_count
from gpubuf.data.ingress.options import Writers
from gpubuf.data.samplers.base import Sampler
from gpubuf.data.samplers.prioritized import PrioritizedSampler
from gpubuf.data.samplers.prioritized_slices import PrioritizedSliceSampler
from gpubuf.data.samplers.slices import SliceSampler, SliceSamplerWithoutReplacement
from gpubuf.data.samplers.uniform import RandomSampler, SamplerWithoutReplacement
from gpubuf.data.storage import host_memory
from gpubuf.data.storage.containers import batch_shape
from gpubuf.data.storage.end_bits import bitmap_bytes
from gpubuf.data.storage.host_memory import Free
from gpubuf.data.storage.layout import Key, Leaf, RowLayout, as_key
from gpubuf.data.storage.placement import PINNED, SPLIT, IndexBytes, NothingFitsError, choose, near_steps, readable
from gpubuf.data.storage.placement import parse_bytes as parse_bytes
from gpubuf.data.storage.plan import Recipe, RowPlan
from gpubuf.data.storage.schema import Codec, Options, Schema, continued_keys
from gpubuf.data.storage.share_next import entries_of, side_bytes
from gpubuf.data.storage.windows import Window
from gpubuf.data.writers import DRAWN_KEYS
from gpubuf.kernels.rows import ENTRY, FIELD
from gpubuf.terminal import aligned

#: Samplers by name. Their memory depends on no other argument.
SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "uniform": RandomSampler,
    "without-replacement": SamplerWithoutReplacement,
    "prioritized": lambda: PrioritizedSampler(1, 1.0, 1.0),
    "slices": lambda: SliceSampler(slice_len=1),
    "slices-without-replacement": lambda: SliceSamplerWithoutReplacement(slice_len=1),
    "prioritized-slices": lambda: PrioritizedSliceSampler(1, 1.0, 1.0, slice_len=1),
}

_COUNTERS = 32 + 24  # the ring's counters and the random state; each key has entries in tables


@dataclass(frozen=True)
class KeyPlan:
    """The memory of one key.

    Attributes:
        name: the key, nested ones with dots.
        dtype: of its elements, as they are stored.
        shape: of one row.
        row_bytes: bytes of one row; 0 for a next observation that is read from the next row.
        n_bytes: bytes of all rows, or of the next observations that are not in the next row.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    row_bytes: int
    n_bytes: int


@dataclass(frozen=True)
class Fit:
    """Whether a buffer fits at a placement, on this machine, now.

    Attributes:
        placement: ``"cuda"``, ``"pinned"``, ``"split"`` or ``"cpu"``. A split is that of this machine now: as many
            rows as there is room for on the GPU.
        device_bytes: bytes on the GPU.
        host_bytes: bytes on the host.
        index: bytes of tree and index there; the shape of a tree depends on the device.
        fits: whether there is room.
    """

    placement: str
    device_bytes: int
    host_bytes: int
    index: IndexBytes
    fits: bool


@dataclass(frozen=True)
class Plan:
    """The memory of a buffer, and where it fits; ``str()`` gives a table.

    Attributes:
        capacity: transitions; with several environments rounded up to whole steps, as storages do.
        keys: what every key takes.
        row_bytes: bytes of one row of all keys.
        rows: bytes of all rows.
        counters: bytes of the ring's counters, the kernels' tables and the random state.
        free: what this machine has free, a reserve for others already subtracted.
        fits: one entry per placement.
        auto: what ``device="auto"`` would choose here now; None where nothing fits.
        why: the reason for that, or the way out.
        budget: the budget that the capacity was made for, if it was.
        queues: bytes of shared memory for writers in other processes, on the host, beside what is said by placement.
        shareable: keys that are planned twice, and that ``share_next=True`` would store once.
    """

    capacity: int
    keys: tuple[KeyPlan, ...]
    row_bytes: int
    rows: int
    counters: int
    free: Free
    fits: tuple[Fit, ...]
    auto: str | None
    why: str
    budget: int | None = None
    queues: int = 0
    shareable: tuple[str, ...] = ()

    def fit(self, placement: str) -> Fit:
        """The entry of a placement.

        Raises:
            KeyError: there is no such placement.
        """
        for fit in self.fits:
            if fit.placement == placement:
                return fit
        raise KeyError(f"no placement {placement!r}: there are {[fit.placement for fit in self.fits]}")

    def key_table(self) -> list[tuple[str, str, str, str, str]]:
        """Rows of a table, under a heading: what each key takes."""
        lines = [("key", "shape", "dtype", "bytes per row", f"{self.capacity:,} rows")]
        for key in self.keys:
            shape = "x".join(map(str, key.shape)) or "-"
            dtype = str(key.dtype).removeprefix("torch.")
            lines.append((key.name, shape, dtype, f"{key.row_bytes:,}", readable(key.n_bytes)))
        lines.append(("all rows", "", "", f"{self.row_bytes:,}", readable(self.rows)))
        return lines

    def fit_table(self) -> list[tuple[str, ...]]:
        """Rows of a table, under a heading: the bytes in each memory at each placement, and whether they fit."""
        lines: list[tuple[str, ...]] = [("placement", "tree", "index", "on the GPU", "on the host", "fits")]
        for fit in self.fits:
            fits = "yes" if fit.fits else "no"
            if self.free.device is None and fit.placement != "cpu":
                fits = "no GPU"
            n_bytes = fit.index.tree, fit.index.index, fit.device_bytes, fit.host_bytes
            lines.append((fit.placement, *map(readable, n_bytes), fits))
        return lines

    @property
    def summary(self) -> str:
        """The free memory, and the choice of ``device="auto"``, in a few words."""
        device = "no GPU" if self.free.device is None else f"{readable(self.free.device)} on the GPU"
        chosen = f'device="auto" would choose "{self.auto}"' if self.auto else self.why
        text = f"Free here, without the tenth that is left to others: {device}, {readable(self.free.host)} on the host."
        shared = f"\nWriters in other processes take {readable(self.queues)} of shared memory." if self.queues else ""
        once = f"\nshare_next=True would store once: {', '.join(self.shareable)}." if self.shareable else ""
        return f"{text}{shared}\n{chosen}.{once}"

    def __str__(self) -> str:
        return "\n\n".join((aligned(self.key_table()), aligned(self.fit_table()), self.summary))


def plan(
    spec: Any,
    capacity: int | None = None,
    *,
    sampler: str | Sampler | Callable[[], Sampler] = "uniform",
    budget: int | str | None = None,
    envs: int = 1,
    dtypes: Mapping[Any, torch.dtype | Codec] | None = None,
    batch_dtypes: Mapping[Any, torch.dtype] | None = None,
    share_next: bool | Sequence[Any] = False,
    next_capacity: int | None = None,
    n_steps: int = 1,
    windows: Window | Mapping[Any, Window] | None = None,
    writers: int | Writers = 0,
) -> Plan:
    """The memory that a buffer takes, and where it fits on this machine now. Nothing is allocated. No host sync.

    Args:
        spec: the keys of a row, as they are written: an example batch (a TensorDict, tensorclass or tensor of shape
            ``[n, ...]``), or a mapping from keys to ``"3x84x84:uint8"`` or ``((3, 84, 84), torch.uint8)``.
        capacity: number of transitions.
        sampler: a sampler, a function that returns one, or a name out of :data:`SAMPLERS`.
        budget: bytes, or text such as ``"24GiB"``, for rows, index and counters together, instead of ``capacity``: the
            plan is for as many transitions as fit, and for no more than one would if it were added.
        envs: environments, for storages with ``ndim=2``.
        dtypes, batch_dtypes, share_next, next_capacity: as for :class:`gpubuf.LazyTensorStorage`.
        n_steps, windows: as for :class:`gpubuf.ReplayBuffer`. More than one step takes a few bits per row.
        writers: as for :class:`gpubuf.ReplayBuffer`; 0: none. They take a byte per row, and queues on the host.

    Returns:
        The plan. Its bytes of tree and index are exact; samplers without replacement of slices take 8 bytes a
        trajectory more.

    Raises:
        TypeError: neither or both of ``capacity`` and ``budget`` are given, or the spec is of another type.
        ValueError: an argument makes no sense, or not one transition fits into the budget.
    """
    if (capacity is None) == (budget is None):
        raise TypeError(f"give either capacity or budget, got capacity={capacity} and budget={budget!r}")
    check_count(envs, "envs")
    if capacity is not None:
        check_count(capacity, "capacity")
    options = Options.of(dtypes, batch_dtypes, share_next, next_capacity)
    schema = Schema.of(_layout(spec), options)
    queues = 0
    if writers:
        places = Writers.of(writers)
        step_bytes = envs * schema.written.row_bytes
        queues = places.count * places.steps_for(step_bytes) * step_bytes
    recipe = Recipe(n_steps, windows=windows)
    row = _Row(schema, options, recipe.needs_ends, bool(writers))
    chosen = copy.copy(_sampler(sampler))
    chosen.reader = RowPlan(recipe)
    free = host_memory.free()
    device_type = "cpu" if free.device is None else "cuda"
    limit = None
    if budget is not None:
        limit = parse_bytes(budget)
        capacity = _largest(row, chosen, limit, envs, device_type)
    assert capacity is not None
    steps = -(-capacity // envs)
    twice = () if share_next else tuple(".".join(key) for key in continued_keys(schema.written.leaves))
    return replace(_plan(row, chosen, steps, envs, free, limit), queues=queues, shareable=twice)


@dataclass(frozen=True)
class _Row:
    """What a row takes.

    Attributes:
        schema: of the rows.
        options: of the storage.
        has_ends: whether the storage keeps the ends of trajectories, for transitions of several steps.
        marked: whether a byte of a row says that another writer's follows.
    """

    schema: Schema
    options: Options
    has_ends: bool
    marked: bool

    @property
    def counters(self) -> int:
        """Bytes of the counters and tables."""
        schema = self.schema
        tables = ENTRY * len(schema.stored.leaves)
        if schema.shared:
            tables += FIELD * len(schema.full.leaves)
        if self.options:
            dtypes = ([leaf.dtype for leaf in layout.leaves] for layout in (schema.written, schema.batch))
            tables += FIELD * len(schema.written.leaves) * len(set(map(tuple, dtypes)))
        return _COUNTERS + 8 * tables

    def beside(self, steps: int, envs: int) -> tuple[int, IndexBytes]:
        """Bytes of next observations that are not in the next row, and of the links to them."""
        if not self.schema.shared:
            return 0, IndexBytes()
        entries, links = side_bytes(self.schema, steps * envs, envs, self.options.next_capacity)
        return entries, IndexBytes(index=links)

    def index(self, sampler: Sampler, steps: int, envs: int, device_type: str) -> IndexBytes:
        """Bytes of tree and index."""
        shape = (steps,) if envs == 1 else (steps, envs)
        ends = bitmap_bytes(shape, device_type) if self.has_ends else 0
        ends += steps * envs * self.marked
        return sampler.index_bytes(shape, device_type) + IndexBytes(index=ends) + self.beside(steps, envs)[1]

    def plans(self, steps: int, envs: int) -> tuple[KeyPlan, ...]:
        """What every key takes."""
        capacity, found = steps * envs, []
        entries = entries_of(capacity, envs, self.options.next_capacity) + envs  # the last ones are pending
        for position, (leaf, source) in enumerate(zip(self.schema.written.leaves, self.schema.sources, strict=True)):
            row_bytes = leaf.n_elements * source.stored.itemsize
            width = row_bytes if source.owner == position else 0
            n_bytes = width * capacity
            if source.follows:
                n_bytes += row_bytes * entries
            found.append(KeyPlan(".".join(leaf.key) or "(tensor)", source.stored, leaf.shape, width, n_bytes))
        return tuple(found)


def _plan(row: _Row, sampler: Sampler, steps: int, envs: int, free: Free, budget: int | None) -> Plan:
    capacity = steps * envs
    row_bytes, counters = row.schema.stored.row_bytes, row.counters
    columns = row_bytes * capacity
    # Next observations are with the rows, but for a split.
    aside, _ = row.beside(steps, envs)
    rows = columns + aside
    on_host, on_device = (row.index(sampler, steps, envs, device_type) for device_type in ("cpu", "cuda"))
    beside = on_device.total + counters
    room = -1 if free.device is None else free.device
    near = near_steps(SPLIT, columns, steps, room - on_device.total - aside) * columns // steps
    far, room_for_index = columns - near, on_device.total <= room
    fits = (
        Fit("cuda", rows + beside, 0, on_device, rows + on_device.total <= room),
        Fit(PINNED, beside, rows, on_device, room_for_index and rows <= free.host),
        Fit(SPLIT, near + aside + beside, far, on_device, on_device.total + aside <= room and far <= free.host),
        Fit("cpu", 0, rows + on_host.total + counters, on_host, rows + on_host.total <= free.host),
    )
    auto: str | None = None
    try:
        auto, why = choose(rows, (on_host if free.device is None else on_device).total, capacity, free)
    except NothingFitsError as error:
        why = str(error)
    return Plan(capacity, row.plans(steps, envs), row_bytes, rows, counters, free, fits, auto, why, budget)


def _largest(row: _Row, sampler: Sampler, budget: int, envs: int, device_type: str) -> int:
    """The largest number of whole steps of ``envs`` rows that fits."""
    row_bytes, fixed = row.schema.stored.row_bytes, row.counters
    if row_bytes == 0:
        raise ValueError("rows of no bytes fit without end")

    def fits(steps: int) -> bool:
        index, (aside, _) = row.index(sampler, steps, envs, device_type), row.beside(steps, envs)
        return steps * envs * row_bytes + aside + index.total + fixed <= budget

    if not fits(1):
        raise ValueError(f"not one step of {envs} row(s) of {row_bytes} bytes fits into {readable(budget)}")
    low, high = 1, budget // (row_bytes * envs) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * envs


def _sampler(given: str | Sampler | Callable[[], Sampler]) -> Sampler:
    if isinstance(given, str):
        if given not in SAMPLERS:
            raise ValueError(f"sampler must be one of {sorted(SAMPLERS)}, got {given!r}")
        return SAMPLERS[given]()
    sampler = given if isinstance(given, Sampler) else given()
    if not isinstance(sampler, Sampler):
        raise TypeError(f"expected a sampler, its name or a function that returns one, got {type(sampler).__name__}")
    return sampler


def _layout(spec: Any) -> RowLayout:
    if isinstance(spec, (Tensor, TensorDictBase)) or is_tensorclass(spec):
        batch_shape(spec, 1)
        return RowLayout(spec, 1, DRAWN_KEYS)
    if not isinstance(spec, Mapping):
        raise TypeError(f"expected an example batch or a mapping from keys to shapes, got {type(spec).__name__}")
    if not spec:
        raise ValueError("the spec has no keys")
    leaves = [Leaf(as_key(key), *_shape_and_dtype(key, value)) for key, value in spec.items()]
    keys = {leaf.key for leaf in leaves}
    for key in keys:
        inner = next((key[:n] for n in range(1, len(key)) if key[:n] in keys), None)
        if inner is not None:
            raise ValueError(f"{'.'.join(inner)} can't be a tensor of its own and hold {'.'.join(key)}, too")
    return RowLayout(TensorDict({}, [0]), 1).with_leaves(leaves)


def _shape_and_dtype(key: Any, value: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    if isinstance(value, str):
        return parse_entry(f"{key}={value}")[1:]
    try:
        shape, dtype = value
        lengths = tuple(map(int, shape))
    except (TypeError, ValueError):
        raise ValueError(f"key {key!r}: expected 'SHAPE:DTYPE' or (shape, dtype), got {value!r}") from None
    if not isinstance(dtype, torch.dtype) or min(lengths, default=0) < 0:
        raise ValueError(f"key {key!r}: expected lengths of at least 0 and a torch.dtype, got {value!r}")
    return dtype, lengths


def parse_entry(text: str) -> tuple[Key, torch.dtype, tuple[int, ...]]:
    """``KEY=SHAPE:DTYPE``, as in ``next.pixels=3x84x84:uint8``; ``reward=:float32`` is one number per row.

    Raises:
        ValueError: the text is of another form, or there is no such dtype.
    """
    match = re.fullmatch(r"([^=]+)=((?:\d+(?:x\d+)*)?):(\w+)", text)
    if match is None:
        raise ValueError(f"expected KEY=SHAPE:DTYPE, such as pixels=3x84x84:uint8, got {text!r}")
    key, shape, name = match.groups()
    try:
        dtype = parse_dtype(name)
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None
    return tuple(key.split(".")), dtype, tuple(int(length) for length in shape.split("x") if length)


def parse_dtype(name: str) -> torch.dtype:
    """A dtype by its name.

    Raises:
        ValueError: there is no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"there is no dtype {name!r}")
    return dtype
