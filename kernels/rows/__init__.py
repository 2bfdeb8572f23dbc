"""Rows: gather, draw, append or overwrite a batch of all keys in one launch, copied byte by byte or computed.

A storage keeps one tensor per key, ``[capacity, ...]``, each row contiguous. All operations read a table and a ring:

* ``table``: int64 ``[K, 5]`` or ``[F, 40]``, on the device that does the work. An entry of 5 words is a *column*, whose
  rows are copied as bytes, see :func:`table_entry`. An entry of 40 words is a :class:`Field`, which says how one key of
  a batch is made of the rows of a column, and begins with the words of that column. Addresses point to the device's
  memory or to pinned host memory. The first rows of a key may lie in one and the others in the other. From row to row
  the address grows by the row stride, so that rows may lie inside wider records;
* ``ring``: int64 ``[4]`` = (written, size, ticket, faults). ``written`` counts all rows ever written and never wraps.
  The cursor is ``written % capacity``. ``size`` rows are valid, at positions ``0 .. size - 1``. ``ticket`` is scratch,
  zero between calls. ``faults`` counts rows that a GPU has refused, where an exception would have to wait for the GPU.

The kernels reach storage tensors by address, so that a schema cannot name them. ``ring`` stands for them: every
operation, even a read, is annotated as mutating it. That keeps reads and writes in order, also under ``torch.compile``.

A ring has *lost* rows if steps before its oldest one were overwritten: see :func:`has_lost`.

The *generation* of a row is the number of times that its position has been written,
``(written - position + capacity - 1) // capacity``: derived, never stored.

A row of all keys together may take up to 1 GiB. Addresses need no alignment, but a GPU copies aligned ones faster. The
rows of a write must not overlap the storage.

A gathered batch is one uint8 allocation, the *arena*: key ``k`` occupies ``n * row_bytes[k]`` bytes from
the ``k``-th offset, the running sum of the sizes before it, each rounded up to ``ALIGNMENT``.

**Fields.** Each key of a computed batch says how it is made of rows:

* **Which row.** A drawn row stands for a *transition* of several steps: it and up to ``n_steps - 1`` next rows of the
  same environment. The transition stops with the first row that ends a trajectory, and with the newest row. A field
  reads the drawn row (``DRAWN``), the last row of the transition (``LAST``), the observation that follows the last row
  (``NEXT``), or sums over the transition with discounts (``SUM``); ``STEPS`` is the length of the transition.
* **Which rows around it.** A field whose ``window`` is W has a row of W *slots*: slot w is the row ``first + w * step``
  steps after the one that is read, of the same environment (before it, if that is negative). The trajectory of the row
  and the stored rows bound it: slots outside repeat the row at the bound (``REPEAT``) or are zeros (``ZERO``). With
  ``CROSS`` the stored rows alone are bounds. Next observations (``NEXT``) go back one step further than rows: before
  the next observation of a trajectory's first row comes that row's own. ``PADDED`` says of each slot, read from the
  drawn row, whether it is outside, and ``IS_FIRST`` whether its row begins a trajectory: it is the oldest row of a ring
  that has lost none, or the row before it ends one. ``POSITION`` is that of its row, and ``GENERATION`` its
  generation; both are -1 outside.
* **Codec.** A stored element becomes a number (``stored * scale + offset``) and an element of the batch; a written one
  becomes a stored one (``(written - offset) / scale``, rounded to the nearest, half to even, if stored as an integer).
* **Processing.** A number is normalised and cut to bounds, and images are shifted.

Rows form a ring of ``steps = capacity // envs`` steps of ``envs`` environments. Row ``t * envs + e`` is step ``t`` of
environment ``e``, and its *successor* is row ``((t + 1) % steps) * envs + e``. The newest step is ``(written // envs -
1) % steps``, and ``written`` is a multiple of ``envs``. :class:`Reading` has what fields need besides.

**Observations stored once.** A key that exists at the root and under "next" may share one column, that of the root. A
row's next observation is then one of three, by ``links``, int32 ``[capacity]``:

* the successor's observation: ``links[row]`` is 0 (``IN_SUCCESSOR``), and the row is not of the newest step;
* *pending*, for rows of the newest step, which have no successor yet: row e of the field's pending memory, ``[envs]``
  rows, whatever ``links[row]`` is;
* *aside*: ``links[row]`` is s > 0, and the observation is entry s - 1 of the field's entries, ``[slots]`` rows.

The entries form a ring too: ``owners``, int64 ``[slots + 1]``, has in place s the number of the row that entry s was
last taken for (counted from the first row ever written; -1: none), and last the turn t, which starts at 0. A row takes
the first free entry from ``t % slots`` on, the ring around, and t moves past it: an entry ``s >= t`` was never taken.
An entry is *taken* as long as its owner is stored: as long as ``owner >= max(written - size, written' - capacity)``,
with the counters before a write, and ``written'`` after it. Rows that are only appended leave in the order in which
they came, so that the next entry is free if any is. Rows that are written in place leave taken entries in the way, and
a search passes them once a round. All shared fields of a row lie aside together, or none. Rows are told apart by the
bytes that are stored, so that any data comes back.

When no entry is free, ``links[row]`` becomes ``LOST``. The CPU refuses such a write before it changes anything. A GPU
can't say so without a sync: it counts each such row in ``ring[FAULTS]``; the row reads as any row out of range does.

Formulas: the window and the discounts follow the n-step return, Sutton and Barto, "Reinforcement Learning", 2nd
edition, section 7.1.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpubuf.kernels._registry import define

WRITTEN, SIZE, TICKET, FAULTS = range(4)
"""Places in a ring."""

DEVICE_ROWS, ROW_BYTES, SPLIT, HOST_ROWS, ROW_STRIDE = range(5)
"""Columns of a table: the bytes of row ``p`` are at ``(device_rows if p < split else host_rows) + p * row_stride``.

The first ``split`` rows are called device rows and the others host rows, after the placement that puts them there. If
all rows lie in one memory, both addresses are the same.
"""
ENTRY = 5

_WHOLE = 2**63 - 1

ALIGNMENT = 64
"""Bytes to which every key's offset in an arena is rounded up."""


def arena_offsets(row_bytes: Sequence[int], n: int) -> tuple[list[int], int]:
    """Offset of every key in an arena of ``n`` rows, and the arena's size, in bytes."""
    offsets, end = [], 0
    for width in row_bytes:
        offsets.append(end)
        end += -(-n * width // ALIGNMENT) * ALIGNMENT
    return offsets, end


def table_entry(
    address: int, row_bytes: int, split: int | None = None, beyond: int = 0, *, stride: int | None = None
) -> list[int]:
    """The entry of a key in a table.

    Args:
        address: of row 0.
        row_bytes: bytes of one row.
        split: rows that lie there; None: all of them.
        beyond: address of row ``split``.
        stride: bytes from a row to the next, in both memories; None: ``row_bytes``, no gaps.
    """
    step = row_bytes if stride is None else stride
    if split is None:
        return [address, row_bytes, _WHOLE, address, step]
    # Shifted as if all rows lay there, so that a kernel only chooses between two addresses.
    return [address, row_bytes, split, beyond - split * step, step]


def has_lost(written: Any, size: Any, capacity: int) -> Any:
    """Whether rows before the oldest stored one were overwritten: of counters that are numbers or tensors.

    ``written`` may be ahead of the rows that were ever stored, so that generations go on where rows are forgotten: by
    ``2 * capacity`` a time. It is ahead by an odd number of capacities where rows were lost elsewhere.
    """
    ahead = written - size
    return (ahead > 0) & ((size == capacity) | (ahead % (2 * capacity) != 0))


def new_ring(device: torch.device | str) -> Tensor:
    """The counters of an empty ring: int64 ``[4]`` of zeros on ``device``."""
    return torch.zeros(4, dtype=torch.int64, device=device)


DTYPES: tuple[torch.dtype, ...] = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.bool,
)
"""Dtypes that can be converted, in the order of their codes. Fields whose three dtypes agree may have any."""

OPAQUE = len(DTYPES)
"""Code of a dtype that is not in :data:`DTYPES`: its elements are copied as bytes."""

_INTEGER_OF = {dtype.itemsize: DTYPES.index(dtype) for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64)}

DRAWN, LAST, NEXT, SUM, STEPS, PADDED, IS_FIRST, POSITION, GENERATION = range(9)
"""Which row a field reads, or what it says of the rows: values of :attr:`Field.kind`."""

REPEAT, ZERO, CROSS = range(3)
"""What stands in slots outside of a trajectory: values of :attr:`Field.outside`."""

UNIFORM, GEOMETRIC, LINEAR, RECENT, BALANCED = range(5)
"""By which law :data:`sample` draws: values of :attr:`Reading.law`."""

IN_SUCCESSOR, LOST = 0, -1
"""Values of ``links`` that are no entry."""

MAX_STEPS = 64
"""Most steps of a transition: it lies in two words of the bitmap."""

MAX_REACH = 4096
"""Most steps between a row and a slot of its window."""

MAX_PAD = 2**14 - 1
"""Largest shift of an image: a GPU keeps both shifts of a row, up to twice as large, in one int32."""


class NoRoomError(RuntimeError):
    """There is no room aside for the next observations of a write. The message says of how many of how many rows."""


class CodecNumbers(NamedTuple):
    """The numbers of a codec. Each is an attribute of a :class:`Field` too. The defaults change nothing."""

    scale: float = 1.0
    offset: float = 0.0


@dataclass(frozen=True)
class Field:
    """How one key of a batch is made of rows. An entry of ``fields`` has these in this order, floats by their bits.

    Attributes:
        device_rows, row_bytes, split, host_rows, row_stride: the column, as in :func:`table_entry`.
            ``row_bytes`` may be less than a row of the column, for a field that is a prefix of it.
        kind: which row is read.
        stored, written, batch: codes of the dtypes: of the column, of written data, and of the batch.
        elements: of a row of this field. ``row_bytes`` is so many times the size of the stored dtype.
        scale, offset: of the codec, see :class:`CodecNumbers`.
        mean, factor: addresses of float32 ``[elements]``: a number becomes ``(number - mean) * factor``; 0: none.
        low, high: bounds of the normalised numbers; -inf and inf: none. NaN stays NaN.
        pad: images ``[..., height, width]`` are shifted by up to so many pixels in both directions: pixel (y, x) is
            that at ``(y + dy, x + dx)``, each cut to the image, with ``dy = floor(u * (2 * pad + 1)) - pad`` of the
            first uniform of the field's pair, and dx of the second; 0: none. At most ``MAX_PAD``. Elements have up to 8
            bytes.
        height, width: of the images.
        pair: number of the field's pair of uniforms, among those of a row.
        entries, pending: addresses of the memory of next observations, for ``NEXT``.
        side_stride: bytes from row to row there.
        writes: 0 for fields that writes leave out: they read a column that another one writes.
        window: slots of a row, W. ``elements`` and ``row_bytes`` are those of a slot. ``SUM`` and ``STEPS`` have one.
            All slots of a row are shifted alike.
        first, step: offset of the first slot, and from each slot to the next, in steps; no further than ``MAX_REACH``.
        outside: what stands in slots outside.
    """

    device_rows: int
    row_bytes: int
    split: int
    host_rows: int
    row_stride: int
    kind: int
    stored: int
    written: int
    batch: int
    elements: int
    scale: float = 1.0
    offset: float = 0.0
    mean: int = 0
    factor: int = 0
    low: float = float("-inf")
    high: float = float("inf")
    pad: int = 0
    height: int = 0
    width: int = 0
    pair: int = 0
    entries: int = 0
    pending: int = 0
    side_stride: int = 0
    writes: int = 1
    window: int = 1
    first: int = 0
    step: int = 1
    outside: int = REPEAT

    def encoded(self) -> list[int]:
        """The entry: ``FIELD`` integers. Those after the attributes follow from them, and save a GPU work."""
        values = [float_bits(value) if isinstance(value, float) else value for value in astuple(self)]
        if self._is_moved_unknown():
            # A GPU learns from the code how large an element is. Integers of that size are moved bit for bit.
            values[STORED] = values[WRITTEN_AS] = values[BATCH] = _INTEGER_OF[self.row_bytes // self.elements]
        aligned = self.device_rows | self.row_bytes | self.host_rows | self.row_stride
        if self.kind == NEXT:
            aligned |= self.entries | self.pending | self.side_stride
        item = self.row_bytes // max(self.elements, 1) if self.batch == OPAQUE else DTYPES[self.batch].itemsize
        slot = self.row_bytes if self.batch == OPAQUE else self.elements * item
        unit = min((aligned | 16) & -(aligned | 16), 16).bit_length() - 1
        copied = not (self._is_computed or self.pad)
        lane = unit if copied else max(item, 1).bit_length() - 1
        values += [copied, unit, slot * self.window, self.stored == self.written and not self.has_codec]
        values += [self._is_simple, lane, slot >> lane]
        return [*map(int, values), *[0] * (FIELD - len(values))]

    @property
    def has_codec(self) -> bool:
        """Whether the codec changes numbers."""
        return (self.scale, self.offset) != CodecNumbers()

    @property
    def _is_computed(self) -> bool:
        """Whether elements of batches are computed even where they are not shifted."""
        return bool(self.kind >= SUM or self.stored != self.batch or self.has_codec or self.mean)

    @property
    def has_window(self) -> bool:
        """Whether other rows are read than those that the kind says, or their places are told."""
        return (self.window, self.first) != (1, 0) or self.kind >= PADDED

    @property
    def _is_simple(self) -> bool:
        """Whether elements of batches are those of rows, moved perhaps, or float32 sums of them, or numbers of steps as
        int64, or what is said of slots as bools and int64.
        """
        if self.kind >= PADDED:
            return self.batch == (_INTEGER_OF[8] if self.kind >= POSITION else DTYPES.index(torch.bool))
        if self.kind == STEPS:
            return self.batch == _INTEGER_OF[8] and not self.mean
        summed = self.kind == SUM
        same = self.stored == self.batch and not (self.has_codec or self.mean or (summed and self.pad))
        return same and (not summed or self.stored == DTYPES.index(torch.float32))

    def _is_moved_unknown(self) -> bool:
        """Whether elements of an unknown dtype are shifted, and no more."""
        unknown = self.stored == self.written == self.batch == OPAQUE and self.elements > 0
        return unknown and self.pad > 0 and not self._is_computed


FIELD = 40
"""Length of an entry of ``fields``."""

# Places in an entry, after those of its column.
KIND, STORED, WRITTEN_AS, BATCH, ELEMENTS = range(5, 10)
SCALE, CODEC_OFFSET, MEAN, FACTOR, LOW, HIGH, PAD, HEIGHT, WIDTH, PAIR = range(10, 20)
ENTRIES, PENDING, SIDE_STRIDE, WRITES = range(20, 24)
WINDOW, FIRST, STEP, OUTSIDE = range(24, 28)

# Places of what follows from these: whether batches are copied as bytes; the widest element that divides all addresses
# and sizes of the column, as the binary logarithm of its bytes; bytes of a row of the batch; whether writes are copied
# as bytes; whether batches are made by the CPU's compiled kernels; and the elements that a GPU makes a slot of, their
# bytes as a logarithm too, and their number.
COPIED, UNIT, BATCH_BYTES, WRITTEN_AS_STORED, SIMPLE, LANE, WORDS = range(28, 35)


def float_bits(value: float) -> int:
    """The bits of a float64, as int64."""
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits


def dtype_code(dtype: torch.dtype) -> int:
    """The code of a dtype."""
    return DTYPES.index(dtype) if dtype in DTYPES else OPAQUE


def new_links(capacity: int, slots: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """``(links, owners)`` of an empty ring."""
    owners = torch.full((slots + 1,), -1, dtype=torch.int64, device=device)
    owners[-1:].zero_()
    return torch.zeros(capacity, dtype=torch.int32, device=device), owners


class Reading(NamedTuple):
    """What computed batches need besides fields: the last arguments of :data:`gather` and :data:`sample`, in order.

    Attributes:
        ends: None, or the bitmap of :mod:`gpubuf.kernels.trajectories`, of which level 0 alone is read: bit ``t % 64``
            of word ``(t // 64) * envs + e`` is set if row ``t * envs + e`` ends a trajectory. None: no row does.
        links: int32 ``[capacity]``, where next observations are; None: no field is ``NEXT``.
        noise: None, or a random state as in :mod:`gpubuf.kernels.philox`: of the random numbers of the processing. Row
            b of a batch uses uniforms ``offset + b * draws ..`` of it, in pairs by which images are shifted down and to
            the right. A call moves it by ``n * draws``.
        envs: environments of a step.
        n_steps: most rows of a transition, 1 to ``MAX_STEPS``.
        gamma: discount of a step in sums.
        draws: random numbers of a row.
        on_host: share of the rows that lie in the host's memory, from which a GPU reads them with few programs. No
            batch is another one for it.
        past: steps before a drawn row that must be there, or never have been: where the ring has lost rows
            (:func:`has_lost`), :data:`sample` does not draw the oldest ``past`` steps (but the newest step always).
        windows: whether a field has a window (:attr:`Field.has_window`). A GPU's launch can't see it in the fields, and
            takes another kernel then, or if there is a ``past``; a CPU does not look at it.
        law: the probabilities of rows that :data:`sample` draws; see there.
        numbers: of the law, float64: ``[2]``, a and b; or of ``BALANCED``. None: it needs none.
    """

    ends: Tensor | None = None
    links: Tensor | None = None
    noise: Tensor | None = None
    envs: int = 1
    n_steps: int = 1
    gamma: float = 1.0
    draws: int = 0
    on_host: float = 0.0
    past: int = 0
    windows: bool = False
    law: int = UNIFORM
    numbers: Tensor | None = None


_READING = (
    "Tensor? ends=None, Tensor? links=None, Tensor(b!)? noise=None, int envs=1, int n_steps=1, float gamma=1.0,"
    " int draws=0, float on_host=0.0, int past=0, bool windows=False, int law=0, Tensor? numbers=None"
)


gather = define(
    f"rows_gather(Tensor table, Tensor(a!) ring, Tensor index, int capacity, int arena_bytes, {_READING})"
    " -> (Tensor, Tensor)",
    __name__,
    fake=lambda table, ring, index, capacity, arena_bytes, *_: (
        table.new_empty(arena_bytes, dtype=torch.uint8),
        index.new_empty(index.numel()),
    ),
)
"""``gather(table, ring, index, capacity, arena_bytes, *reading) -> (arena, generation)``: the batch of rows ``index``.

``index`` is int64 ``[n]``, contiguous, with values in ``[-capacity, capacity)``; negative ones count from the
end of the storage. ``generation`` is int64 ``[n]``. ``arena_bytes`` is what :func:`arena_offsets` says. No host sync.

``reading`` is a :class:`Reading`, of which a table of columns takes ``on_host`` alone. Of a table of fields a row of
the arena has ``window * elements * size of the batch's dtype`` bytes. Sums are made in float64, the drawn row first.
The codec and normalising compute in float32, or in float64 if stored or batch are float64, or if integers are summed;
between integers nothing is computed without a codec or processing. A number becomes an integer of the batch rounded to
the nearest, half to even, and cut to the range (NaN: 0), and a bool if it is not zero.

Raises:
    IndexError: an index is out of range, or the next observation of a row is lost (CPU). On a GPU such a row reads as
        zeros, has generation -1, which no row has, and counts in ``ring[FAULTS]``. If only that of a slot is lost, the
        slot reads as zeros, and nothing counts: the write that lost it did.
    ValueError: ``arena_bytes`` does not fit the table (CPU; on a GPU the sizes are not known to the host); or
        ``n_steps`` is outside 1 .. 64, ``past`` outside 0 .. ``MAX_REACH``.
"""


sample = define(
    "rows_sample(Tensor table, Tensor(a!) ring, Tensor(c!) rng, int n, int capacity, int arena_bytes,"
    f" {_READING}) -> (Tensor, Tensor, Tensor)",
    __name__,
    fake=lambda table, ring, rng, n, capacity, arena_bytes, *_: (
        table.new_empty(arena_bytes, dtype=torch.uint8),
        ring.new_empty(n),
        ring.new_empty(n),
    ),
)
"""``sample(table, ring, rng, n, capacity, arena_bytes, *reading) -> (arena, index, generation)``: ``n`` rows uniformly.

Drawn with replacement from the valid rows in the same launch that copies them: draw ``i`` is
``min(floor(u_i * size), size - 1)`` with the ``i``-th Philox uniform. The ring must not be empty (on an empty
ring the CPU raises RuntimeError; a GPU counts a fault per row, reads zeros, and says -1 for index and generation).
No draw is made for ``n`` = 0. ``reading`` as for :data:`gather`. No host sync.

Where rows are left out for their ``past``, m are left and o is the oldest of them: draw ``i`` is
``(o + min(floor(u_i * m), m - 1)) % capacity``. A law takes m - 1 - r in place of the minimum, of a rank r that counts
from the newest row:

* ``GEOMETRIC``: r with probability in proportion to ``exp(a * r)``, of a < 0:
  ``floor(log(1 - u * (1 - exp(a * m))) / a)``, at most m - 1;
* ``LINEAR``: to m - r. It has ``t = min(floor(u * T), T - 1)`` of ``T = m * (m + 1) / 2`` units below it, of which the
  k-th oldest row has k: p is the largest number with ``p * (p + 1) / 2 <= t``, and ``r = m - 1 - p``;
* ``RECENT``: uniform among the newest ``c = min(max(floor(max(exp(a) * m, b)), 1), m)``: ``min(floor(u * c), c - 1)``;
* ``BALANCED``: a task uniformly, then one of its environments, and then a step, of E rows. ``numbers`` are ``(K, b_0 ..
  b_K, e_0 .. e_(E-1))``: of K tasks task k has the environments ``e_i`` from ``i = b_k`` to ``b_(k+1) - 1``. A choice
  among c is ``min(floor(u * c), c - 1)``, and leaves ``u * c`` minus that to the next one.

Logarithms and exponentials are those of the device: where they are rounded in another way, a draw in some billions is a
neighbour.
"""

extend = define(
    "rows_extend(Tensor table, Tensor[] sources, Tensor(a!) ring, int n, int capacity, int envs=1,"
    " Tensor(b!)? links=None, Tensor(c!)? owners=None) -> Tensor",
    __name__,
    fake=lambda table, sources, ring, n, capacity, envs=1, links=None, owners=None: ring.new_empty(n),
)
"""``extend(table, sources, ring, n, capacity, envs=1, links=None, owners=None) -> index``: write ``n`` rows at the
cursor, and move it.

``sources[k]`` holds the rows of key ``k`` on the ring's device: any dtype (of a field: its written dtype), ``[n,
...]``, each row contiguous (the rows themselves may be strided; others are copied first). Row ``i`` goes to position
``(written + i) % capacity``; of more rows than the capacity only the newest are written. ``index`` is int64
``[n]``, the position of every row given, also of those that did not survive. On a GPU there is one launch for
every 128 keys. No host sync.

``SUM`` and ``LAST`` fields are stored like ``DRAWN`` ones; those with ``writes`` 0 are skipped (so have ``STEPS``,
``PADDED`` and the kinds after it): their sources are empty. With shared fields ``n`` is a multiple of
``envs``. Then:

1. The next observations that were pending are compared with the observations that now follow them: those that differ
   move aside.
2. So do those of the batch, but for its last step, which become pending.

Entries are taken in the order of rows: the step that was the newest first. On a GPU these are three more launches.

Raises:
    ValueError: there are not as many sources as keys, or one does not hold ``n`` rows of its key's size. A CPU compares
        the bytes of all rows, a GPU the number of rows: sizes are not known to the host. Or a number does not fit its
        integer dtype, or is NaN there (CPU); on a GPU it is cut to the range (NaN: 0) and counts as a fault. Nothing is
        written.
    NoRoomError: there is not room enough aside (CPU); nothing is written.
"""

write = define(
    "rows_write(Tensor table, Tensor[] sources, Tensor(a!) ring, Tensor index, int capacity,"
    " Tensor? generation=None) -> ()",
    __name__,
)
"""``write(table, sources, ring, index, capacity, generation=None)``: overwrite the rows at ``index`` in place.

No counter moves. ``NEXT`` fields are skipped: see :data:`relink`. ``index`` as in :data:`gather`; where it names a row
twice the last one wins, on both backends. A source of stride 0 along its first dimension (an expanded row) is fine.
Given ``generation``, int64 ``[n]``, entries are skipped where the row's generation is another by now (overwritten since
it was drawn), before it is asked which one is the last.

Raises:
    IndexError: as :data:`gather`; nothing is written (CPU). On a GPU the row is skipped and counted.
    ValueError: as :data:`extend`.
"""

relink = define(
    "rows_relink(Tensor table, Tensor[] sources, Tensor(a!) ring, Tensor index, int capacity, int envs,"
    " Tensor(b!) links, Tensor(c!) owners) -> ()",
    __name__,
)
"""``relink(table, sources, ring, index, capacity, envs, links, owners)``: give stored rows their next observations.

``sources`` as for :data:`extend`, of which the ``NEXT`` fields alone are read; ``index`` int64 ``[n]``, of duplicates
the last one wins. A row of the newest step gets it as pending. Another is compared with its successor, as that is
stored now, and gets an entry if they differ; an entry that it had before becomes free. First all entries become free
that the rows had, and then entries are taken in the order of ``index``. For rows written in place: give the rows before
them their old next observations back, and then the rows their own.

Raises:
    IndexError: a row is not stored (CPU). On a GPU it is skipped, and counts as a fault.
    NoRoomError: there is not room enough aside (CPU); nothing changes.
"""
