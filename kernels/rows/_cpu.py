"""Rows in plain PyTorch: batches, writes, and the next observations that lie aside."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpubuf.kernels._registry import length_of
from gpubuf.kernels.philox import OFFSET, check_state
from gpubuf.kernels.philox._cpu import uniforms_at
from gpubuf.kernels.rows import (
    BALANCED,
    BATCH_BYTES,
    CROSS,
    DRAWN,
    DTYPES,
    ENTRY,
    GEOMETRIC,
    IN_SUCCESSOR,
    IS_FIRST,
    LAST,
    LINEAR,
    NEXT,
    OPAQUE,
    PADDED,
    POSITION,
    ROW_BYTES,
    SIZE,
    STEPS,
    SUM,
    UNIFORM,
    WRITTEN,
    ZERO,
    Field,
    NoRoomError,
    Reading,
    arena_offsets,
    has_lost,
)
from gpubuf.kernels.rows._check import (
    CONTIGUOUS,
    EVERY,
    NEXT_ALONE,
    NOT_NEXT,
    check_count,
    check_extend,
    check_reading,
    check_relink,
    check_storage,
    check_write,
    describe_sources,
    lost,
    misfit,
    no_room,
    not_stored,
    out_of_range,
    unfit,
    unlinked,
    unreadable,
)

_BYTE = torch.uint8


@dataclass(frozen=True)
class _Field(Field):
    """An entry of a table by name: of a column the first five words, of a field all, and what follows from them."""

    kind: int = DRAWN
    stored: int = OPAQUE
    written: int = OPAQUE
    batch: int = OPAQUE
    elements: int = 0
    copied: int = 1
    unit: int = 0
    batch_bytes: int = 0
    written_as_stored: int = 1
    simple: int = 1

    @property
    def is_wide(self) -> bool:
        summed = self.kind == SUM and _is_integer(self.stored)
        return torch.float64 in (_dtype(self.stored), _dtype(self.batch)) or summed

    def numbers(self, address: int, dtype: torch.dtype) -> Tensor:
        """``[elements]`` at an address."""
        return _at(address, self.elements * dtype.itemsize).view(dtype)


_KINDS = "".join("d" if field.type == "float" else "q" for field in dataclasses.fields(_Field))


def fields_of(table: Tensor) -> Sequence[_Field]:
    """The entries of a table."""
    return _fields_of(table.numpy().tobytes(), table.shape[1])


@functools.lru_cache(maxsize=64)
def _fields_of(words: bytes, width: int) -> Sequence[_Field]:
    places = range(0, len(words), 8 * width)
    return tuple(_Field(*struct.unpack_from(f"<{_KINDS[:width]}", words, place)) for place in places)


def _dtype(code: int) -> torch.dtype:
    return DTYPES[code] if code < OPAQUE else _BYTE


def _is_integer(code: int) -> bool:
    return code < OPAQUE and not DTYPES[code].is_floating_point


# Memory


def _at(address: int, n_bytes: int) -> Tensor:
    """The bytes at an address: uint8 ``[n_bytes]``."""
    if not n_bytes:
        return torch.empty(0, dtype=_BYTE, device="cpu")
    return torch.frombuffer((ctypes.c_uint8 * n_bytes).from_address(address), dtype=_BYTE)


def _strided(address: int, n: int, stride: int, row_bytes: int) -> Tensor:
    """``n`` rows at an address: uint8 ``[n, row_bytes]``."""
    if not n * row_bytes:
        return torch.empty(n, row_bytes, dtype=_BYTE, device="cpu")
    return _at(address, (n - 1) * stride + row_bytes).as_strided((n, row_bytes), (stride, 1))


def _column(field: _Field, beyond: bool, last: int) -> Tensor:
    """The rows of a column up to one: the device rows, or from ``split`` on."""
    if beyond:
        first = field.host_rows + field.split * field.row_stride
        return _strided(first, last + 1 - field.split, field.row_stride, field.row_bytes)
    return _strided(field.device_rows, last + 1, field.row_stride, field.row_bytes)


def load(field: _Field, rows: Tensor) -> Tensor:
    """The bytes of rows: uint8 ``[n, row_bytes]``, in memory of their own."""
    last = int(rows.max()) if len(rows) else -1
    if last < field.split:
        return _column(field, False, last).index_select(0, rows)
    out, beyond = torch.empty(len(rows), field.row_bytes, dtype=_BYTE, device="cpu"), rows >= field.split
    out[~beyond] = _column(field, False, field.split - 1)[rows[~beyond]]
    out[beyond] = _column(field, True, last)[rows[beyond] - field.split]
    return out


def _store(field: _Field, rows: Tensor, data: Tensor) -> None:
    """Write the bytes of rows, which are all different."""
    last = int(rows.max()) if len(rows) else -1
    if last < field.split:
        _column(field, False, last).index_copy_(0, rows, data)
        return
    here = rows < field.split
    _column(field, False, field.split - 1)[rows[here]] = data[here]
    _column(field, True, last)[rows[~here] - field.split] = data[~here]


# Elements


def _elements(data: Tensor, code: int) -> Tensor:
    """Bytes of rows as elements."""
    return data.contiguous().view(_dtype(code))


def _cut(numbers: Tensor, code: int) -> Tensor:
    """Numbers as elements. Those of integers are rounded, half to even, and cut to the range; NaN becomes 0."""
    dtype = _dtype(code)
    if dtype is torch.bool:
        return numbers != 0
    if dtype.is_floating_point or numbers.dtype is dtype:
        return numbers.to(dtype)
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    if not numbers.dtype.is_floating_point:
        return numbers.long().clamp(low, high).to(dtype)
    rounded = numbers.double().round()
    # The greatest int64 is no float, and the next float does not fit.
    out = rounded.nan_to_num(0).clamp(low, high).where(rounded < high, 0).to(dtype)
    return out.where(~(rounded >= high), high)


def _fits(numbers: Tensor, code: int) -> bool:
    """Whether all numbers are in the range of an integer dtype."""
    if not _is_integer(code) or _dtype(code) is torch.bool:
        return True
    low, high = torch.iinfo(_dtype(code)).min, torch.iinfo(_dtype(code)).max
    if not numbers.dtype.is_floating_point:
        return bool(((numbers.long() >= low) & (numbers.long() <= high)).all())
    rounded = numbers.double().round()
    return bool(((rounded >= low) & (rounded < float(high) + 1 if high < 2**53 else rounded < float(high))).all())


def _decoded(field: _Field, elements: Tensor) -> Tensor:
    """The numbers that stored elements stand for."""
    numbers = elements.to(torch.float64 if field.is_wide else torch.float32)
    return numbers * numbers.new_tensor(field.scale) + numbers.new_tensor(field.offset) if field.has_codec else numbers


def _encoded(field: _Field, elements: Tensor, number: int) -> Tensor:
    """Written elements as they are stored."""
    if field.written_as_stored:
        return elements
    numbers = elements
    if field.has_codec or not (_is_integer(field.written) and _is_integer(field.stored)):
        wide = torch.float64 in (_dtype(field.written), _dtype(field.stored))
        numbers = elements.to(torch.float64 if wide else torch.float32)
    if field.has_codec:
        numbers = (numbers - numbers.new_tensor(field.offset)) / numbers.new_tensor(field.scale)
    if not _fits(numbers, field.stored):
        raise unfit(number, field.stored)
    return _cut(numbers, field.stored)


# Reading


class _Transitions:
    """The transitions of drawn rows: ``rows[k]`` has the row after k steps of each, as far as it goes; ``length``."""

    def __init__(self, drawn: Tensor, ring: Tensor, capacity: int, how: Reading) -> None:
        self.steps, self.envs, self.ends = capacity // how.envs, how.envs, how.ends
        self.written, size = int(ring[WRITTEN]), int(ring[SIZE])
        self.newest, self.stored = (self.written // how.envs + self.steps - 1) % self.steps, size // how.envs
        self.has_lost = has_lost(self.written, size, capacity)
        self.rows, self.length = [drawn], torch.ones_like(drawn)
        goes_on = torch.ones_like(drawn, dtype=torch.bool)
        for _ in range(how.n_steps - 1):
            row = self.rows[-1]
            goes_on = goes_on & (row // self.envs != self.newest) & ~self.ends_at(row)
            self.length += goes_on
            self.rows.append(torch.where(goes_on, self.after(row, 1), row))
        self.last = self.rows[-1]

    def after(self, row: Tensor, by: Tensor | int) -> Tensor:
        """The rows so many steps after others; before them, if that is negative."""
        return (row + by * self.envs) % (self.steps * self.envs)

    def ends_at(self, row: Tensor) -> Tensor:
        """Whether rows end trajectories."""
        if self.ends is None:
            return torch.zeros_like(row, dtype=torch.bool)
        step, env = row // self.envs, row % self.envs
        return (self.ends.view(-1)[step // 64 * self.envs + env] >> step % 64) & 1 == 1

    def room(self, row: Tensor, reach: int, crosses: bool) -> tuple[Tensor, Tensor]:
        """Steps before and after rows until a bound, looked for as far as ``reach``."""
        ahead = (self.newest - row // self.envs) % self.steps
        behind = (self.stored - 1 - ahead).clamp(min=0)
        for k in range(0 if crosses else reach, 0, -1):
            behind = torch.where(self.ends_at(self.after(row, -k)), behind.clamp(max=k - 1), behind)
            ahead = torch.where(self.ends_at(self.after(row, k - 1)), ahead.clamp(max=k - 1), ahead)
        return behind, ahead


def _slots(field: _Field, row: Tensor, around: _Transitions) -> tuple[Tensor, Tensor, Tensor]:
    """``(offset, begins, outside)``, ``[n, W]`` each: slots cut to the bounds, as steps after ``row``; those of a NEXT
    that are the own observation of a trajectory's first row; and those outside."""
    offset = torch.arange(field.window, device="cpu") * field.step + field.first
    behind, ahead = around.room(row, int(offset.abs().max()) + 1, field.outside == CROSS)
    behind, ahead = behind[:, None], ahead[:, None]
    before = int(field.kind == NEXT)
    outside = (offset < -behind - before) | (offset > ahead)
    cut = torch.maximum(torch.minimum(offset, ahead), -behind)
    return cut, (offset < -behind) & (field.kind == NEXT), outside


def _next_of(field: _Field, last: Tensor, around: _Transitions, capacity: int, how: Reading) -> Tensor:
    """The bytes of the observations after rows."""
    assert how.links is not None
    envs, links = how.envs, how.links[last]
    out = load(field, around.after(last, 1))
    pending = last // envs == around.newest
    if pending.any():
        found = _strided(field.pending, envs, field.side_stride, field.row_bytes)
        out[pending] = found[last[pending] % envs]
    aside = ~pending & (links > 0)
    if aside.any():
        entry = links[aside].long() - 1
        found = _strided(field.entries, int(entry.max()) + 1, field.side_stride, field.row_bytes)
        out[aside] = found[entry]
    return out


def _computed(field: _Field, drawn: Tensor, around: _Transitions, capacity: int, how: Reading, at: Tensor) -> Tensor:
    """Rows of the batch. ``at`` has the positions of their random numbers."""
    real = torch.float64 if field.is_wide else torch.float32
    if field.kind == STEPS:
        numbers = around.length.to(real)[:, None].repeat(1, field.elements)
    elif field.kind == SUM:
        total, discount = torch.zeros(len(drawn), field.elements, dtype=torch.float64, device="cpu"), 1.0
        for k, row in enumerate(around.rows):
            term = _decoded(field, _elements(load(field, row), field.stored)).double()
            total = torch.where((around.length > k)[:, None], total + discount * term if k else term, total)
            discount *= how.gamma
        numbers = total.to(real)
    else:
        row = around.last if field.kind in (LAST, NEXT) else drawn
        if field.has_window:
            return _windows(field, row, around, capacity, how, at)
        data = _next_of(field, row, around, capacity, how) if field.kind == NEXT else load(field, row)
        return finished(field, data, how, at)
    return _processed(field, numbers, how, at)


def _windows(field: _Field, row: Tensor, around: _Transitions, capacity: int, how: Reading, at: Tensor) -> Tensor:
    """Windows around rows: ``[n * W, ...]``, slot after slot."""
    offset, begins, outside = (each.reshape(-1) for each in _slots(field, row, around))
    slots = around.after(row.repeat_interleave(field.window), offset)
    if field.kind == PADDED:
        return outside[:, None]
    if field.kind >= POSITION:
        told = slots if field.kind == POSITION else (around.written - slots + capacity - 1) // capacity
        return told.masked_fill(outside, -1)[:, None]
    if field.kind == IS_FIRST:
        oldest = (around.newest - slots // how.envs) % around.steps == around.stored - 1
        return torch.where(oldest, not around.has_lost, around.ends_at(around.after(slots, -1)))[:, None]
    if field.kind == NEXT:
        _check_links(how.links, slots[~begins], around)
        data = torch.where(begins[:, None], load(field, slots), _next_of(field, slots, around, capacity, how))
    else:
        data = load(field, slots)
    found = finished(field, data, how, at.repeat_interleave(field.window))
    if field.outside == ZERO:
        found = found.masked_fill(outside.view(-1, *[1] * (found.dim() - 1)), 0)
    return found


def _check_links(links: Tensor | None, row: Tensor, around: _Transitions, given: Tensor | None = None) -> None:
    """Raise an IndexError if the next observation of a row is lost."""
    assert links is not None
    gone = (links[row] < 0) & (row // around.envs != around.newest)
    if gone.any():
        raise lost(given, int(gone.nonzero()[0]))


def finished(field: _Field, data: Tensor, how: Reading, at: Tensor) -> Tensor:
    """Rows of the batch, for :func:`fill`, of the bytes of the rows that a field reads; ``at`` as in `_computed`."""
    stored = data if field.batch == OPAQUE and not field.pad else _elements(data, field.stored)
    integers = _is_integer(field.stored) and _is_integer(field.batch)
    if (field.stored == field.batch or integers) and not (field.has_codec or field.mean):
        return _shifted(field, stored if field.stored == field.batch else _cut(stored, field.batch), how, at)
    if not (field.has_codec or field.mean or field.pad) and _dtype(field.batch).is_floating_point:
        # Converted where they are copied to.
        return stored
    return _processed(field, _decoded(field, stored), how, at)


def _processed(field: _Field, numbers: Tensor, how: Reading, at: Tensor) -> Tensor:
    if field.mean:
        mean, factor = (field.numbers(each, torch.float32).to(numbers.dtype) for each in (field.mean, field.factor))
        # A NaN stays one.
        numbers = (numbers - mean).mul_(factor).clamp_(field.low, field.high)
    return _shifted(field, _cut(numbers, field.batch), how, at)


def _shifted(field: _Field, elements: Tensor, how: Reading, at: Tensor) -> Tensor:
    if not field.pad or not len(elements):
        return elements
    assert how.noise is not None
    first = at + 2 * field.pair
    moves = (uniforms_at(int(how.noise[0]), torch.stack((first, first + 1))) * (2 * field.pad + 1)).long() - field.pad
    y, x = (
        (torch.arange(size, device="cpu") + by[:, None]).clamp_(0, size - 1)
        for size, by in ((field.height, moves[0]), (field.width, moves[1]))
    )
    images = elements.view(len(elements), -1, field.height, field.width)
    batch = torch.arange(len(elements), device="cpu")[:, None, None, None]
    channel = torch.arange(images.shape[1], device="cpu")[:, None, None]
    return images[batch, channel, y[:, None, :, None], x[:, None, None, :]].reshape(elements.shape)


def read(
    table: Tensor, ring: Tensor, rng: Tensor | None, given: Tensor | None, n: int, capacity: int,
    targets: list[Tensor], reading: tuple[Any, ...],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Fill ``targets``, contiguous ``[n, ...]``, one per key, with rows. Returns their index and generations.

    For storages, which vouch for dtypes, shapes and strides: they are not looked at.

    Args:
        table, ring, capacity: as for :data:`gpubuf.kernels.rows.gather`.
        rng: the random state by which ``n`` rows are drawn; None: ``given`` has their index.
        given: int64 ``[n]``, or None.
        n: how many.
        targets: the tensors.
        reading: a :class:`Reading`, or nothing for a table of columns.
    """
    fields, how = fields_of(table), Reading(*reading)
    written, size, *_ = ring.tolist()
    if n == 0:
        nothing = torch.empty(0, dtype=torch.int64, device="cpu")
        return nothing if given is None else given, nothing
    if rng is not None:
        if not size:
            raise RuntimeError("can't sample from an empty storage")
        uniforms = uniforms_at(int(rng[0]), torch.arange(n, device="cpu") + rng[OFFSET])
        drawn = index = drawn_rows(uniforms, ring, capacity, how)
    else:
        assert given is not None
        index = given
        drawn = _found(index, capacity)
    _check_readable(table, fields, how)
    first = 0 if how.noise is None else int(how.noise[OFFSET])
    compute(fields, targets, given, drawn, ring, capacity, how, first)
    if rng is not None:
        rng[OFFSET] += n
    if how.noise is not None:
        how.noise[OFFSET] += n * how.draws
    return index, (written - drawn + capacity - 1) // capacity


def kept_rows(ring: Tensor, capacity: int, how: Reading) -> Tensor:
    """How many rows :data:`gpubuf.kernels.rows.sample` draws from: int64, 0-dim, on any device. No host sync."""
    written, size = ring[WRITTEN], ring[SIZE]
    left_out: Tensor = (size - how.envs).clamp(0, how.past * how.envs) * has_lost(written, size, capacity)
    return size - left_out


def drawn_rows(uniforms: Tensor, ring: Tensor, capacity: int, how: Reading) -> Tensor:
    """The rows that :data:`gpubuf.kernels.rows.sample` draws by uniforms, float64 ``[n]``, on any device. No sync."""
    written, kept = ring[WRITTEN], kept_rows(ring, capacity, how)
    if how.law != UNIFORM:
        return (written - 1 - _ranks(uniforms, kept, how)).remainder_(capacity)
    oldest = torch.where(kept < ring[SIZE], written - kept, 0)
    return ((uniforms * kept).long().minimum(kept - 1) + oldest).remainder_(capacity)


def geometric_ranks(uniforms: Tensor, count: Tensor, a: Tensor | float) -> Tensor:
    """Of ``count`` ranks from 0 on one for each uniform, with probabilities in proportion to ``exp(a * rank)``."""
    return ((1 - uniforms * (1 - (a * count.double()).exp())).log() / a).long().minimum(count - 1)


def _balanced(uniforms: Tensor, kept: Tensor, numbers: Tensor) -> Tensor:
    """Rows by tasks that are equally likely: among so many, counted from the oldest."""

    def split(uniforms: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        product = uniforms * count
        chosen = product.floor().minimum(count - 1)
        return chosen.long(), product - chosen

    task, rest = split(uniforms, numbers[0])
    first = numbers[0].long() + 2
    begin, envs = numbers[1 + task], numbers[first - 1].long()
    one, rest = split(rest, numbers[2 + task] - begin)
    return split(rest, kept // envs)[0] * envs + numbers[first + begin.long() + one].long()


def _ranks(uniforms: Tensor, kept: Tensor, how: Reading) -> Tensor:
    """Ranks by a law, among so many rows: 0 is the newest."""
    rank: Tensor
    if how.law == LINEAR:
        total = kept * (kept + 1) // 2
        unit = (uniforms * total).long().minimum(total - 1)
        row = (((8 * unit.double() + 1).sqrt() - 1) / 2).long()
        # The root may be rounded to a neighbour.
        row -= (row * (row + 1) // 2 > unit).long()
        row += ((row + 1) * (row + 2) // 2 <= unit).long()
        return kept - 1 - row
    assert how.numbers is not None
    if how.law == BALANCED:
        return kept - 1 - _balanced(uniforms, kept, how.numbers)
    a, b = how.numbers
    if how.law == GEOMETRIC:
        return geometric_ranks(uniforms, kept, a)
    among = (a.exp() * kept).maximum(b).minimum(kept.double()).long().clamp(min=1)
    rank = (uniforms * among).long().minimum(among - 1)
    return rank


def compute(
    fields: Sequence[_Field], targets: list[Tensor], given: Tensor | None, drawn: Tensor, ring: Tensor, capacity: int,
    how: Reading, first: int,
) -> None:  # fmt: skip
    """Fill ``targets``, contiguous ``[n, ...]``, with the rows ``drawn``, of which ``given`` is the index.

    ``first`` is the position of their first random number.
    """
    if all(field.kind == DRAWN for field in fields):
        how = how._replace(n_steps=1)
    around = _Transitions(drawn, ring, capacity, how)
    if how.links is not None and any(field.kind == NEXT for field in fields):
        _check_links(how.links, around.last, around, given)
    at = torch.arange(len(drawn), device="cpu") * how.draws + first
    for field, target in zip(fields, targets, strict=True):
        fill(field, target, _computed(field, drawn, around, capacity, how, at))


def fill(field: _Field, target: Tensor, rows: Tensor) -> None:
    """Copy rows of a field to a contiguous tensor, which has the bytes of as many in the dtype of the batch."""
    flat, dtype = target.view(-1), _dtype(field.batch)
    (flat if flat.dtype is dtype else flat.view(_BYTE).view(dtype)).copy_(rows.reshape(-1))


def _check_readable(table: Tensor, fields: Sequence[_Field], how: Reading) -> None:
    for number, field in enumerate(fields):
        plain = field.kind < SUM and field.stored == field.batch and not (field.has_codec or field.mean)
        opaque = OPAQUE in (field.stored, field.batch) and table.shape[1] != ENTRY
        if (field.kind == NEXT and how.links is None) or (opaque and not plain):
            raise unreadable(table, number)


def _pieces(
    table: Tensor, ring: Tensor, capacity: int, reading: tuple[Any, ...], n: int, arena_bytes: int
) -> tuple[Tensor, list[Tensor]]:
    """An arena for a batch of ``n`` rows, and each key's piece of it, ``[n, width]``. It checks arguments."""
    check_storage(table, ring, capacity)
    check_reading(Reading(*reading), capacity)
    widths = table[:, ROW_BYTES if table.shape[1] == ENTRY else BATCH_BYTES].tolist()
    offsets, size = arena_offsets(widths, n)
    if size != arena_bytes:
        raise ValueError(f"an arena of {arena_bytes} bytes does not fit {n} rows of {widths} bytes")
    arena = torch.empty(arena_bytes, dtype=_BYTE, device="cpu")
    return arena, [arena[at : at + n * w].view(n, w) for at, w in zip(offsets, widths, strict=True)]


def reading(fill_batch: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Callable[..., Any], ...]:
    """``(gather, sample)`` by what fills tensors, a function like :func:`read`."""

    def gather(
        table: Tensor, ring: Tensor, index: Tensor, capacity: int, arena_bytes: int, *how: Any
    ) -> tuple[Tensor, Tensor]:
        """See :data:`gpubuf.kernels.rows.gather`."""
        n = length_of("index", index)
        arena, pieces = _pieces(table, ring, capacity, how, n, arena_bytes)
        return arena, fill_batch(table, ring, None, index, n, capacity, pieces, how)[1]

    def sample(
        table: Tensor, ring: Tensor, rng: Tensor, n: int, capacity: int, arena_bytes: int, *how: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :data:`gpubuf.kernels.rows.sample`."""
        check_count(n)
        check_state(rng)
        arena, pieces = _pieces(table, ring, capacity, how, n, arena_bytes)
        return arena, *fill_batch(table, ring, rng, None, n, capacity, pieces, how)

    return gather, sample


gather, sample = reading(read)


# Writing


def takes(field: _Field, which: int) -> bool:
    """Whether a write takes rows of a field from its source: of every field, of all but NEXT, or of NEXT alone."""
    taken = bool(field.writes) and field.kind != STEPS
    return taken and (which == EVERY or (field.kind == NEXT) == (which == NEXT_ALONE))


def stored_rows(
    table: Tensor, number: int, field: _Field, described: Sequence[int], n: int, sources: Any
) -> tuple[int, int, Tensor | None]:
    """(address, bytes from row to row, what keeps them) of the ``n`` rows of a source as they are stored.

    ``described`` is as :func:`describe_sources` has all of them. None: the rows are the source's own.

    Raises:
        ValueError: a source has rows of another size, or a number does not fit.
    """
    address, stride, n_bytes = described[3 * number : 3 * number + 3]
    width = field.row_bytes if field.written_as_stored else field.elements * _dtype(field.written).itemsize
    if n_bytes != n * width:
        raise misfit(table, sources[number], number, n)
    stride = width if stride == CONTIGUOUS else stride
    if field.written_as_stored:
        return address, stride, None
    data = _strided(address, n, stride, width)
    elements = _encoded(field, _elements(data, field.written), number).contiguous()
    return elements.data_ptr(), field.row_bytes, elements


def _stored(
    table: Tensor, fields: Sequence[_Field], described: Sequence[int], n: int, which: int, sources: Any
) -> list[Tensor]:
    """The rows of sources as they are stored, bytes ``[n, row_bytes]``; empty where a field is not taken."""
    found = []
    for number, field in enumerate(fields):
        if takes(field, which):
            address, stride, made = stored_rows(table, number, field, described, n, sources)
            rows = _strided(address, n, stride, field.row_bytes)
            found.append(rows if made is None else made.view(_BYTE).view(n, field.row_bytes))
        else:
            found.append(torch.empty(n, 0, dtype=_BYTE, device="cpu"))
    return found


def _links_of(fields: Sequence[_Field], stored: list[Tensor]) -> list[tuple[_Field, Tensor, _Field, Tensor]]:
    """For every NEXT field that is written: it, its rows, and those of the column that has the observations."""
    found = []
    for number, field in enumerate(fields):
        if takes(field, NEXT_ALONE):
            for other, rows in zip(fields, stored, strict=True):
                same = (other.device_rows, other.row_bytes) == (field.device_rows, field.row_bytes)
                if other.kind != NEXT and takes(other, EVERY) and same:
                    found.append((field, stored[number], other, rows))
                    break
            else:
                raise unlinked(number)
    return found


class _Aside:
    """The entries aside: which are free, and who takes them."""

    def __init__(self, owners: Tensor, bound: int) -> None:
        self.owners, self._bound = owners, bound

    def has_room(self, need: int) -> bool:
        return need <= int((self.owners[:-1] < self._bound).sum())

    def take(self, number: int) -> int:
        slots, turn = len(self.owners) - 1, int(self.owners[-1])
        while int(self.owners[turn % slots]) >= self._bound:
            turn += 1
        self.owners[turn % slots], self.owners[-1] = number, turn + 1
        return turn % slots


def _side(field: _Field, address: int, number: int) -> Tensor:
    return _at(address + number * field.side_stride, field.row_bytes)


def extend(
    table: Tensor, sources: list[Tensor], ring: Tensor, n: int, capacity: int, envs: int = 1,
    links: Tensor | None = None, owners: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See :data:`gpubuf.kernels.rows.extend`."""
    check_extend(table, sources, ring, n, capacity, envs, links, owners)
    if n == 0:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    described, _alive = describe_sources(sources, n)
    return _extend(table, described, ring, n, capacity, envs, links, owners, sources)


def _extend(
    table: Tensor, described: array[int], ring: Tensor, n: int, capacity: int, envs: int, links: Tensor | None,
    owners: Tensor | None, sources: Any,
) -> Tensor:  # fmt: skip
    fields, written, size = fields_of(table), int(ring[WRITTEN]), int(ring[SIZE])
    kept = min(n, capacity)
    stored = [rows[n - kept :] for rows in _stored(table, fields, described, n, EVERY, sources)]
    if links is not None and owners is not None:
        _link(fields, stored, written, size, n, kept, capacity, envs, links, owners)
    else:
        for number, field in enumerate(fields):
            if takes(field, NEXT_ALONE):
                raise unlinked(number)
    rows = (torch.arange(n - kept, n, device="cpu") + written) % capacity
    for field, data in zip(fields, stored, strict=True):
        if takes(field, NOT_NEXT):
            _store(field, rows, data)
    ring[WRITTEN], ring[SIZE] = written + n, min(size + n, capacity)
    return (torch.arange(n, device="cpu") + written) % capacity


def _link(
    fields: Sequence[_Field], stored: list[Tensor], written: int, size: int, n: int, kept: int, capacity: int,
    envs: int, links: Tensor, owners: Tensor,
) -> None:  # fmt: skip
    """Move next observations aside, the old pending ones first; those of the last step become pending."""
    shared, had_pending = _links_of(fields, stored), size > 0 and n < capacity
    before, aside = torch.zeros(envs, dtype=torch.bool, device="cpu"), torch.zeros(kept, dtype=torch.bool, device="cpu")
    for field, rows, _, after in shared:
        if had_pending:
            old = _strided(field.pending, envs, field.side_stride, field.row_bytes)
            before |= (old != after[:envs]).any(-1)
        aside[: kept - envs] |= (rows[: kept - envs] != after[envs:]).any(-1)
    free = _Aside(owners, max(written - size, written + n - capacity))
    need = int(before.sum()) + int(aside.sum())
    if not free.has_room(need):
        raise no_room(need, n)
    if had_pending:
        first = (written - envs) % capacity
        for e in range(envs):
            entry = free.take(written - envs + e) if before[e] else -1
            links[first + e] = entry + 1
            for field, *_ in shared:
                if entry >= 0:
                    _side(field, field.entries, entry).copy_(_side(field, field.pending, e))
    number = written + n - kept
    places = (torch.arange(kept, device="cpu") + number) % capacity
    links[places] = IN_SUCCESSOR
    for i in aside.nonzero()[:, 0].tolist():
        entry = free.take(number + i)
        links[places[i]] = entry + 1
        for field, rows, *_ in shared:
            _side(field, field.entries, entry).copy_(rows[i])
    for field, rows, *_ in shared:
        _strided(field.pending, envs, field.side_stride, field.row_bytes).copy_(rows[kept - envs :])


class PreparedExtend:
    """:func:`extend` with ``n >= 1`` rows of contiguous sources at known addresses. Arguments are checked here.

    Attributes:
        described: address, ``CONTIGUOUS`` and bytes of each source, one after the other. An address may be changed
            before a call to that of other memory of this size; whoever does so keeps it alive.
    """

    def __init__(
        self, table: Tensor, sources: list[Tensor], ring: Tensor, n: int, capacity: int, keeps_index: bool,
        envs: int = 1, links: Tensor | None = None, owners: Tensor | None = None,
    ) -> None:  # fmt: skip
        check_extend(table, sources, ring, n, capacity, envs, links, owners)
        self.described, self._alive = describe_sources(sources, n)
        self._arguments = table, self.described, ring, n, capacity, envs, links, owners, sources
        self._index = None if keeps_index else ring.new_empty(n)

    def __call__(self) -> Tensor | None:
        """Write what is in the memory now. Returns the index: without ``keeps_index`` maybe the same tensor each time.

        None: the rows were refused, and nothing is written. The operation itself says why.
        """
        try:
            return _extend(*self._arguments)
        except (ValueError, NoRoomError):
            return None


def _last_of_each(rows: Tensor) -> Tensor:
    """The places of the last entries of every row, rising."""
    ordered, order = rows.sort(stable=True)
    last = torch.ones(len(rows), dtype=torch.bool, device="cpu")
    last[:-1] = ordered[1:] != ordered[:-1]
    return order[last].sort().values


def _found(index: Tensor, capacity: int) -> Tensor:
    """Rows by their index, which may count from the end; IndexError if one is out of range."""
    wrong = (index < -capacity) | (index >= capacity)
    if wrong.any():
        raise out_of_range(index, int(wrong.nonzero()[0]), capacity)
    return torch.where(index < 0, index + capacity, index)


def write(
    table: Tensor, sources: list[Tensor], ring: Tensor, index: Tensor, capacity: int, generation: Tensor | None = None
) -> None:
    """See :data:`gpubuf.kernels.rows.write`."""
    n = check_write(table, sources, ring, index, capacity, generation)
    if n == 0:
        return
    fields, rows = fields_of(table), _found(index, capacity)
    described, _alive = describe_sources(sources, n)
    stored = _stored(table, fields, described, n, NOT_NEXT, sources)
    places = torch.arange(n, device="cpu")
    if generation is not None:
        places = places[generation == (int(ring[WRITTEN]) - rows + capacity - 1) // capacity]
    places = places[_last_of_each(rows[places])]
    for field, data in zip(fields, stored, strict=True):
        if takes(field, NOT_NEXT):
            _store(field, rows[places], data[places])


def relink(
    table: Tensor, sources: list[Tensor], ring: Tensor, index: Tensor, capacity: int, envs: int, links: Tensor,
    owners: Tensor,
) -> None:  # fmt: skip
    """See :data:`gpubuf.kernels.rows.relink`."""
    n = check_relink(table, sources, ring, index, capacity, envs, links, owners)
    if n == 0:
        return
    fields, rows, (written, size, *_) = fields_of(table), _found(index, capacity), ring.tolist()
    if (rows >= size).any():
        raise not_stored(index, int((rows >= size).nonzero()[0]), capacity)
    described, _alive = describe_sources(sources, n)
    stored = _stored(table, fields, described, n, NEXT_ALONE, sources)
    shared = [(field, data) for field, data in zip(fields, stored, strict=True) if takes(field, NEXT_ALONE)]
    newest = (written - envs) % capacity
    places = _last_of_each(rows)
    others = places[(rows[places] < newest) | (rows[places] >= newest + envs)]
    differs = torch.zeros(len(others), dtype=torch.bool, device="cpu")
    for field, data in shared:
        differs |= (data[others] != load(field, (rows[others] + envs) % capacity)).any(-1)
    old = links[rows[others]].long()
    before = owners.clone()
    owners[old[old > 0] - 1] = -1
    free = _Aside(owners, written - size)
    if not free.has_room(int(differs.sum())):
        owners.copy_(before)
        raise no_room(int(differs.sum()), n)
    aside = dict(zip(others.tolist(), differs.tolist(), strict=True))
    for i in places.tolist():
        row = int(rows[i])
        if i not in aside:
            for field, data in shared:
                _side(field, field.pending, row - newest).copy_(data[i])
            continue
        entry = free.take(written - 1 - (written - 1 - row) % capacity) if aside[i] else -1
        links[row] = entry + 1
        for field, data in shared:
            if entry >= 0:
                _side(field, field.entries, entry).copy_(data[i])
