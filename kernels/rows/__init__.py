"""Rows: gather a batch of all keys in one launch, write a batch into ring positions in one launch.

A storage keeps one tensor per key, ``[capacity, ...]``, each row contiguous. The kernels see bytes. They get two
tensors:

* ``table``: int64 ``[K, 5]``, a :func:`table_entry` per key, on the device that does the work. Addresses point to that
  device's memory or to pinned host memory. The first rows of a key may lie in one and the others in the other. From row
  to row the address grows by the row stride, so that rows may lie inside wider records;
* ``ring``: int64 ``[4]`` = (written, size, ticket, faults). ``written`` counts all rows ever written and never wraps.
  The cursor is ``written % capacity``. ``size`` rows are valid, at positions ``0 .. size - 1``. ``ticket`` is scratch,
  zero between calls. ``faults`` counts rows that a GPU has refused, where an exception would have to wait for the GPU.

The kernels reach storage tensors by address, so that a schema cannot name them. ``ring`` stands for them: every
operation, even a read, is annotated as mutating it. That keeps reads and writes in order, also under ``torch.compile``.

The *generation* of a row is the number of times that its position has been written,
``(written - position + capacity - 1) // capacity``: derived, never stored.

A row of all keys together may take up to 1 GiB. Addresses need no alignment, but a GPU copies aligned ones faster. The
rows of a write must not overlap the storage.

A gathered batch is one uint8 allocation, the *arena*: key ``k`` occupies ``n * row_bytes[k]`` bytes from
the ``k``-th offset, the running sum of the sizes before it, each rounded up to ``ALIGNMENT``.
"""

from __future__ import annotations

from collections.abc import Sequence

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

JOURNAL_STATE, JOURNAL_CHECK, JOURNAL_WRITTEN, JOURNAL_SIZE, JOURNAL_ROWS, JOURNAL_KEYS, JOURNAL_WORDS = range(7)
"""Words of a journal, which ``keep`` of the CPU fills: state, sum of all later words, the ring's ``written`` and
``size``, and how many rows and keys there are. Then come the numbers of the keys, the positions of the rows, and of
each key their bytes, from a multiple of 8 on."""

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


def new_ring(device: torch.device | str) -> Tensor:
    """The counters of an empty ring: int64 ``[4]`` of zeros on ``device``."""
    return torch.zeros(4, dtype=torch.int64, device=device)


def _gather_fake(table: Tensor, ring: Tensor, index: Tensor, capacity: int, arena_bytes: int) -> tuple[Tensor, Tensor]:
    return table.new_empty(arena_bytes, dtype=torch.uint8), torch.empty_like(index)


gather = define(
    "rows_gather(Tensor table, Tensor(a!) ring, Tensor index, int capacity, int arena_bytes) -> (Tensor, Tensor)",
    cpu="gpubuf.kernels.rows._cpu:gather",
    cuda="gpubuf.kernels.rows._launch:gather",
    fake=_gather_fake,
)
"""``gather(table, ring, index, capacity, arena_bytes) -> (arena, generation)``: copy rows ``index`` of every key.

``index`` is int64 ``[n]``, contiguous, with values in ``[-capacity, capacity)``; negative ones count from the
end of the storage. ``generation`` is int64 ``[n]``. ``arena_bytes`` is what :func:`arena_offsets` says. No host sync.

Raises:
    IndexError: an index is out of range (CPU). On a GPU such a row reads as zeros, has generation -1, which no
        row has, and counts in ``ring[FAULTS]``.
    ValueError: ``arena_bytes`` does not fit the table (CPU; on a GPU the sizes are not known to the host).
"""


def _sample_fake(
    table: Tensor, ring: Tensor, rng: Tensor, n: int, capacity: int, arena_bytes: int
) -> tuple[Tensor, Tensor, Tensor]:
    arena = table.new_empty(arena_bytes, dtype=torch.uint8)
    return arena, ring.new_empty(n), ring.new_empty(n)


sample = define(
    "rows_sample(Tensor table, Tensor(a!) ring, Tensor(b!) rng, int n, int capacity, int arena_bytes)"
    " -> (Tensor, Tensor, Tensor)",
    cpu="gpubuf.kernels.rows._cpu:sample",
    cuda="gpubuf.kernels.rows._launch:sample",
    fake=_sample_fake,
)
"""``sample(table, ring, rng, n, capacity, arena_bytes) -> (arena, index, generation)``: ``n`` rows uniformly.

Drawn with replacement from the valid rows in the same launch that copies them: draw ``i`` is
``min(floor(u_i * size), size - 1)`` with the ``i``-th Philox uniform. The ring must not be empty (on an empty
ring the CPU raises RuntimeError; a GPU counts a fault per row, reads zeros, and says -1 for index and generation).
No draw is made for ``n`` = 0. No host sync.
"""


def _extend_fake(table: Tensor, sources: list[Tensor], ring: Tensor, n: int, capacity: int) -> Tensor:
    return ring.new_empty(n)


extend = define(
    "rows_extend(Tensor table, Tensor[] sources, Tensor(a!) ring, int n, int capacity) -> Tensor",
    cpu="gpubuf.kernels.rows._cpu:extend",
    cuda="gpubuf.kernels.rows._launch:extend",
    fake=_extend_fake,
)
"""``extend(table, sources, ring, n, capacity) -> index``: write ``n`` rows at the cursor, and move it.

``sources[k]`` holds the rows of key ``k`` on the ring's device: any dtype, ``[n, ...]``, each row contiguous
(the rows themselves may be strided; others are copied first). Row ``i`` goes to position
``(written + i) % capacity``; of more rows than the capacity only the newest are written. ``index`` is int64
``[n]``, the position of every row given, also of those that did not survive. On a GPU there is one launch for
every 128 keys. No host sync.

Raises:
    ValueError: there are not as many sources as keys, or one does not hold ``n`` rows of its key's size. A CPU compares
        the bytes of all rows, a GPU the number of rows: sizes are not known to the host. Nothing is written.
"""


def _write_fake(
    table: Tensor,
    sources: list[Tensor],
    ring: Tensor,
    index: Tensor,
    capacity: int,
    generation: Tensor | None = None,
) -> None:
    return None


write = define(
    "rows_write(Tensor table, Tensor[] sources, Tensor(a!) ring, Tensor index, int capacity,"
    " Tensor? generation=None) -> ()",
    cpu="gpubuf.kernels.rows._cpu:write",
    cuda="gpubuf.kernels.rows._launch:write",
    fake=_write_fake,
)
"""``write(table, sources, ring, index, capacity, generation=None)``: overwrite the rows at ``index`` in place.

No counter moves. ``index`` as in :data:`gather`; where it names a row twice the last one wins, on both backends. A
source of stride 0 along its first dimension (an expanded row) is fine. Given ``generation``, int64 ``[n]``, entries are
skipped where the row's generation is another by now (overwritten since it was drawn), before it is asked which one is
the last.

Raises:
    IndexError: as :data:`gather`; nothing is written (CPU). On a GPU the row is skipped and counted.
    ValueError: as :data:`extend`.
"""
