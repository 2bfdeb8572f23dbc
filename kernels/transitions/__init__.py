"""Transitions: batches that are computed from rows while they are copied, in one launch for all keys.

:mod:`gpubuf.kernels.rows` copies bytes. Here each key of a batch, a *field*, says how it is made of rows:

* **Which row.** For a drawn row the *window* is it and up to ``n_steps - 1`` rows behind it, of the same environment.
  The window stops with the first row that ends a trajectory, and with the newest row. A field reads the drawn row
  (``DRAWN``), the last row of the window (``LAST``), the observation that follows the last row (``NEXT``), or sums over
  the window with discounts (``SUM``); ``STEPS`` is the length of the window.
* **Codec.** A stored element becomes a number (``stored * scale + offset``) and an element of the batch; a written one
  becomes a stored one (``(written - offset) / scale``, rounded to the nearest, half to even, if stored as an integer).
* **Processing.** A number is mirrored, normalised and clipped, in this order, and images are shifted.

Rows form a ring of ``steps = capacity // envs`` steps of ``envs`` environments. Row ``t * envs + e`` is step ``t`` of
environment ``e``, and its *successor* is row ``((t + 1) % steps) * envs + e``. The newest step is ``(written // envs -
1) % steps``. Tensors:

* ``fields``: int64 ``[F, FIELD]``, an entry for each field, see :class:`Field`, on the device that does the work;
* ``ring``: int64 ``[4]``, as in :mod:`gpubuf.kernels.rows`. ``written`` is a multiple of ``envs``;
* ``ends``: None, or the bitmap of :mod:`gpubuf.kernels.trajectories`, of which level 0 alone is read: bit ``t % 64`` of
  word ``(t // 64) * envs + e`` is set if row ``t * envs + e`` ends a trajectory. None: no row does;
* ``links``: None, or int32 ``[capacity]``: where the next observation of a row is. See *Observations stored once*;
* ``noise``: None, or a random state as in :mod:`gpubuf.kernels.philox`: of the random numbers of the processing. Row b
  of a batch uses uniforms ``offset + b * draws ..`` of it: the first one mirrors the row (if below one half), the
  others come in pairs, by which images are shifted down and to the right. A call moves it by ``rows * draws``.

**Observations stored once.** A key that exists at the root and under "next" may share one column, that of the root. A
row's next observation is then one of three:

* the successor's observation: ``links[row]`` is 0 (``IN_SUCCESSOR``), and the row is not of the newest step;
* *pending*, for rows of the newest step, which have no successor yet: row e of the field's pending memory, ``[envs]``
  rows, whatever ``links[row]`` is;
* *aside*: ``links[row]`` is s > 0, and the observation is entry s - 1 of the field's entries, ``[slots]`` rows.

The entries form a ring too: ``owners``, int64 ``[slots + 1]``, has in place s the number of the row that entry s was
last taken for (counted from the first row ever written; -1: none), and last the turn t, which starts at 0. A row takes
the first free entry from ``t % slots`` on, the ring around, and t moves behind it: an entry ``s >= t`` was never taken.
An entry is *taken* as long as its owner is stored: as long as ``owner >= max(written - size, written' - capacity)``,
with the counters before a write, and ``written'`` behind it. Rows that are only appended leave in the order in which
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
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from gpubuf.kernels._registry import define

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

DRAWN, LAST, NEXT, SUM, STEPS = range(5)
"""Which row a field reads: values of :attr:`Field.row`."""

OFF, BY_CHANCE, DOUBLED = range(3)
"""Mirroring of a batch. ``BY_CHANCE`` decides for each row. ``DOUBLED`` gives 2n rows for n drawn ones: as they are,
and then all of them mirrored."""

IN_SUCCESSOR, LOST = 0, -1
"""Values of ``links`` that are no entry."""

MAX_STEPS = 64
"""Most steps of a window: it lies in two words of the bitmap."""

MAX_PAD = 2**14 - 1
"""Largest shift of an image: a GPU keeps both shifts of a row, up to twice as large, in one int32."""


class NoRoomError(RuntimeError):
    """There is no room aside for the next observations of a write. The message says of how many of how many rows."""


@dataclass(frozen=True)
class Field:
    """How one key of a batch is made of rows. An entry of ``fields`` has these in this order, floats by their bits.

    Attributes:
        device_rows, row_bytes, split, host_rows, row_stride: the column, as in a table of :mod:`gpubuf.kernels.rows`.
            ``row_bytes`` may be less than a row of the column, for a field that is a prefix of it.
        row: which row is read.
        stored, written, batch: codes of the dtypes: of the column, of written data, and of the batch.
        elements: of a row of this field. ``row_bytes`` is so many times the size of the stored dtype.
        scale, offset: of the codec; 1 and 0 change nothing.
        mean, factor: addresses of float32 ``[elements]``: a number becomes ``(number - mean) * factor``; 0: none.
        low, high: bounds of the numbers after that; -inf and inf: none. NaN stays NaN.
        permutation, sign: addresses of int32 and float32 ``[elements]``: mirrored, element i of a row is ``sign[i] *
            row[permutation[i]]``; 0: this field is not mirrored.
        pad: images ``[..., height, width]`` are shifted by up to so many pixels in both directions: pixel (y, x) is
            that at ``(y + dy, x + dx)``, each cut to the image, with ``dy = floor(u * (2 * pad + 1)) - pad`` of the
            first uniform of the field's pair, and dx of the second; 0: none. At most ``MAX_PAD``. Elements have up to 8
            bytes.
        height, width: of the images.
        pair: number of the field's pair of uniforms, among those of a row.
        entries, pending: addresses of the memory of next observations, for ``NEXT``.
        side_stride: bytes from row to row there.
        writes: 0 for fields that writes leave out: they read a column that another one writes.
    """

    device_rows: int
    row_bytes: int
    split: int
    host_rows: int
    row_stride: int
    row: int
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
    permutation: int = 0
    sign: int = 0
    pad: int = 0
    height: int = 0
    width: int = 0
    pair: int = 0
    entries: int = 0
    pending: int = 0
    side_stride: int = 0
    writes: int = 1

    def encoded(self) -> list[int]:
        """The entry: ``FIELD`` integers. Those behind the attributes follow from them, and save a GPU work."""
        values = [float_bits(value) if isinstance(value, float) else value for value in astuple(self)]
        if self._is_moved_unknown():
            # A GPU learns from the code how large an element is. Integers of that size are moved bit for bit.
            values[STORED] = values[WRITTEN] = values[BATCH] = _INTEGER_OF[self.row_bytes // self.elements]
        aligned = self.device_rows | self.row_bytes | self.host_rows | self.row_stride
        if self.row == NEXT:
            aligned |= self.entries | self.pending | self.side_stride
        batch_bytes = self.row_bytes if self.batch == OPAQUE else self.elements * DTYPES[self.batch].itemsize
        values += [self._copied(), aligned, batch_bytes, int(self.stored == self.written and not self._has_codec)]
        return values + [0] * (FIELD - len(values))

    @property
    def _has_codec(self) -> bool:
        return self.scale != 1 or self.offset != 0

    @property
    def _is_computed(self) -> bool:
        """Whether elements of batches are computed even where they are neither mirrored nor shifted."""
        bounded = self.low != float("-inf") or self.high != float("inf")
        changed = self.row in (SUM, STEPS) or self.stored != self.batch or self._has_codec
        return bool(changed or self.mean or self.factor or bounded)

    def _is_moved_unknown(self) -> bool:
        """Whether elements of an unknown dtype are shifted, and no more."""
        unknown = self.stored == self.written == self.batch == OPAQUE and self.elements > 0
        return unknown and self.pad > 0 and not (self.permutation or self.sign or self._is_computed)

    def _copied(self) -> int:
        """``COPIED`` of the entry: 0 if batches are computed, 1 if mirrored ones are, 2 if all are copied as bytes."""
        if self._is_computed or self.pad:
            return 0
        return 1 if self.permutation or self.sign else 2


FIELD = 32
"""Length of an entry of ``fields``."""

# Places in an entry.
DEVICE_ROWS, ROW_BYTES, SPLIT, HOST_ROWS, ROW_STRIDE, ROW, STORED, WRITTEN, BATCH, ELEMENTS = range(10)
SCALE, OFFSET, MEAN, FACTOR, LOW, HIGH, PERMUTATION, SIGN, PAD, HEIGHT, WIDTH, PAIR = range(10, 22)
ENTRIES, PENDING, SIDE_STRIDE, WRITES = range(22, 26)

# Places of what follows from these: how far batches are copied, see :meth:`Field.encoded`; all addresses and sizes that
# must be aligned for wide copies, in one number; bytes of a row of the batch; and whether writes are copied as bytes.
COPIED, ALIGNED, BATCH_BYTES, WRITTEN_AS_STORED = range(26, 30)


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


def _rows_out(n: int, mirror: int) -> int:
    return 2 * n if mirror == DOUBLED else n


gather = define(
    "transitions_gather(Tensor fields, Tensor(a!) ring, Tensor? ends, Tensor? links, Tensor(b!)? noise, Tensor index,"
    " int capacity, int envs, int n_steps, float gamma, int mirror, int draws, int arena_bytes) -> (Tensor, Tensor)",
    cpu="gpubuf.kernels.transitions._cpu:gather",
    cuda="gpubuf.kernels.transitions._launch:gather",
    fake=lambda fields, ring, ends, links, noise, index, capacity, envs, n_steps, gamma, mirror, draws, arena_bytes: (
        fields.new_empty(arena_bytes, dtype=torch.uint8),
        index.new_empty(_rows_out(index.numel(), mirror)),
    ),
)
"""``gather(fields, ring, ends, links, noise, index, capacity, envs, n_steps, gamma, mirror, draws, arena_bytes) ->
(arena, generation)``: the batch of rows ``index``.

``index`` is int64 ``[n]``, contiguous, in ``[-capacity, capacity)``. The batch has n rows, or 2n if ``mirror`` is
``DOUBLED``. ``arena`` is uint8, laid out as :func:`gpubuf.kernels.rows.arena_offsets` says for rows of ``elements *
size of the batch's dtype`` bytes. ``generation`` is int64, that of the drawn rows. Sums are made in float64, the drawn
row first. The codec, mirroring, normalising and clipping compute in float32, or in float64 if stored or batch are
float64, or if integers are summed; between integers nothing is computed without a codec or processing. A number becomes
an integer of the batch rounded to the nearest, half to even, and cut to the range (NaN: 0), and a bool if it is not
zero. No host sync.

Raises:
    IndexError, ValueError: as :data:`gpubuf.kernels.rows.gather`, and ValueError for ``n_steps`` outside 1 .. 64. A row
        whose next observation is lost raises IndexError (CPU), or reads as zeros with generation -1 and counts as a
        fault (GPU).
"""

sample = define(
    "transitions_sample(Tensor fields, Tensor(a!) ring, Tensor? ends, Tensor? links, Tensor(b!)? noise, Tensor(c!) rng,"
    " int n, int capacity, int envs, int n_steps, float gamma, int mirror, int draws, int arena_bytes)"
    " -> (Tensor, Tensor, Tensor)",
    cpu="gpubuf.kernels.transitions._cpu:sample",
    cuda="gpubuf.kernels.transitions._launch:sample",
    fake=lambda fields, ring, ends, links, noise, rng, n, capacity, envs, n_steps, gamma, mirror, draws, arena_bytes: (
        fields.new_empty(arena_bytes, dtype=torch.uint8),
        ring.new_empty(_rows_out(n, mirror)),
        ring.new_empty(_rows_out(n, mirror)),
    ),
)
"""``sample(fields, ring, ends, links, noise, rng, n, capacity, envs, n_steps, gamma, mirror, draws, arena_bytes) ->
(arena, index, generation)``: the batch of ``n`` rows drawn as by :data:`gpubuf.kernels.rows.sample`, in the launch that
copies them. Index and generation have an entry for each row of the batch. No host sync.
"""

extend = define(
    "transitions_extend(Tensor fields, Tensor[] sources, Tensor(a!) ring, Tensor(b!)? links, Tensor(c!)? owners,"
    " int n, int capacity, int envs) -> Tensor",
    cpu="gpubuf.kernels.transitions._cpu:extend",
    cuda="gpubuf.kernels.transitions._launch:extend",
    fake=lambda fields, sources, ring, links, owners, n, capacity, envs: ring.new_empty(n),
)
"""``extend(fields, sources, ring, links, owners, n, capacity, envs) -> index``: write ``n`` rows at the cursor.

``sources[f]`` holds field f of the rows in its written dtype, as for :data:`gpubuf.kernels.rows.extend`, whose index
and rules for more rows than the capacity are the same. ``SUM`` and ``LAST`` fields are stored like ``DRAWN`` ones;
those with ``writes`` 0, and ``STEPS``, are skipped: their sources are empty. With shared fields ``n`` is a multiple of
``envs``. Then:

1. The next observations that were pending are compared with the observations that now follow them: those that differ
   move aside.
2. So do those of the batch, but for its last step, which become pending.

Entries are taken in the order of rows: the step that was the newest first. On a GPU this is one launch without shared
fields and four with them. No host sync.

Raises:
    ValueError: as :data:`gpubuf.kernels.rows.extend`; or a number does not fit its integer dtype, or is NaN there
        (CPU). On a GPU it is cut to the range (NaN: 0) and counts as a fault.
    NoRoomError: there is not room enough aside (CPU); nothing is written.
"""

write = define(
    "transitions_write(Tensor fields, Tensor[] sources, Tensor(a!) ring, Tensor index, int capacity,"
    " Tensor? generation=None) -> ()",
    cpu="gpubuf.kernels.transitions._cpu:write",
    cuda="gpubuf.kernels.transitions._launch:write",
    fake=lambda fields, sources, ring, index, capacity, generation=None: None,
)
"""``write(fields, sources, ring, index, capacity, generation=None)``: overwrite rows in place; of duplicates the last
one wins.

As :data:`gpubuf.kernels.rows.write`, generations included, with codecs. ``NEXT`` fields are skipped: see
:data:`relink`.
"""

relink = define(
    "transitions_relink(Tensor fields, Tensor[] sources, Tensor(a!) ring, Tensor(b!) links, Tensor(c!) owners,"
    " Tensor index, int capacity, int envs) -> ()",
    cpu="gpubuf.kernels.transitions._cpu:relink",
    cuda="gpubuf.kernels.transitions._launch:relink",
    fake=lambda fields, sources, ring, links, owners, index, capacity, envs: None,
)
"""``relink(fields, sources, ring, links, owners, index, capacity, envs)``: give stored rows their next observations.

``sources`` as for :data:`extend`, of which the ``NEXT`` fields alone are read; ``index`` int64 ``[n]``, of duplicates
the last one wins. A row of the newest step gets it as pending. Another is compared with its successor, as that is
stored now, and gets an entry if they differ; an entry that it had before becomes free. First all entries become free
that the rows had, and then entries are taken in the order of ``index``. For rows written in place: give the rows before
them their old next observations back, and then the rows their own.

Raises:
    IndexError: a row is not stored (CPU). On a GPU it is skipped, and counts as a fault.
    NoRoomError: there is not room enough aside (CPU); nothing changes.
"""
