"""What a write to mapped files is about to replace, so that whoever opens them after a kill can take the write back.

A process that is killed leaves in the files what it has stored until then, in the order in which it stored it. Before
rows change, their old bytes and the counters go into one more file, and then a word that says so. It is taken back when
the write is done. If it is still there when the folder is opened, the old bytes are put back: the write never happened.
This is about processes; after a crash of the machine the disk may hold later bytes without earlier ones.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from gpubuf.data.storage import memmap_files as files
from gpubuf.kernels import rows
from gpubuf.kernels._registry import lazy
from gpubuf.kernels.rows import JOURNAL_CHECK, JOURNAL_KEYS, JOURNAL_ROWS, JOURNAL_STATE, JOURNAL_WORDS

_keep = lazy("gpubuf.kernels.rows._cpu:keep")

logger = logging.getLogger("gpubuf")

#: Values of the first word: nothing is being written; old rows are kept here; all rows are being replaced.
_IDLE, _KEPT, _GONE = range(3)
_LEAST_BYTES, _MOST_BYTES = 1 << 16, 1 << 26
_PATIENCE = 1.0


class Journal:
    """The journal of a storage in mapped files.

    Args:
        root: the folder of the storage.
        row_bytes: of each key, in the order of the storage's table.
        capacity: rows.
    """

    def __init__(self, root: Path, row_bytes: Sequence[int], capacity: int) -> None:
        self._path, self._capacity = root / files.JOURNAL_FILE, capacity
        self._row_bytes, self._all = list(row_bytes), array("q", range(len(row_bytes)))
        self._bytes_each = 8 + sum(row_bytes)
        # The table and the ring of the last write, and what the kernel is told of them.
        self._of: tuple[Any, Any, Any] = (None, None, None)
        # Older storages have none.
        self._descriptor = files.open_file(self._path, os.O_RDWR | os.O_CREAT)
        self._alone = self._lock()
        self._map(max(os.fstat(self._descriptor).st_size, _LEAST_BYTES))

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def _lock(self) -> bool:
        """Hold the file for as long as this object is there; False: another one holds it."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _map(self, n_bytes: int) -> None:
        # Not sparse: who runs out of disk in a mapping is killed, and here it is an OSError.
        os.posix_fallocate(self._descriptor, 0, n_bytes)
        memory, self._room = mmap.mmap(self._descriptor, n_bytes), n_bytes
        self._bytes = torch.from_numpy(np.frombuffer(memory, np.uint8))
        self._words, self._address = memoryview(memory).cast("q"), self._bytes.data_ptr()

    # Writing

    def keep(
        self, table: Tensor, ring: Tensor, n: int, index: Tensor | None = None, keys: Sequence[int] | None = None
    ) -> Self:
        """Keep rows and counters that are about to change, until :meth:`settle`, or the end of a ``with``.

        Args:
            table, ring: of the storage.
            n: number of rows. Without ``index`` they are those from the cursor on.
            index: int64 ``[n]``, positions, contiguous and in memory.
            keys: which of the storage's keys will change; None: all.

        Raises:
            IndexError: an index is out of range.
            OSError: there is no room on the disk.
        """
        self._words[JOURNAL_STATE] = _IDLE
        # Of all keys, with as much for each as rounding up can take.
        need = 8 * (JOURNAL_WORDS + 2 * len(self._all)) + n * self._bytes_each
        if need > self._room:
            self._map(1 << (need - 1).bit_length())
        if table is not self._of[0] or ring is not self._of[1]:
            self._of = table, ring, (table.data_ptr(), self._all.buffer_info()[0], len(self._all), ring.data_ptr())
        place = self._of[2]
        if keys is not None:
            chosen = array("q", keys)
            place = place[0], chosen.buffer_info()[0], len(chosen), place[3]
        _keep(place, index, n, self._capacity, self._address)
        self._words[JOURNAL_STATE] = _KEPT
        return self

    def __enter__(self) -> None:
        """Rows were kept."""

    def __exit__(self, *error: object) -> None:
        self.settle()

    def void(self) -> None:
        """All rows are about to be replaced: until :meth:`settle` none of them counts."""
        self._words[JOURNAL_STATE] = _GONE

    def settle(self) -> None:
        """The write is done."""
        self._words[JOURNAL_STATE] = _IDLE
        if self._room > _MOST_BYTES:
            self._map(_LEAST_BYTES)
            os.truncate(self._descriptor, _LEAST_BYTES)

    def flush(self) -> None:
        """Wait until the disk knows that nothing is being written."""
        self.settle()
        os.fsync(self._descriptor)

    # After a kill

    def recover(self, columns: Sequence[Tensor], ring: Tensor) -> None:
        """Take back the write that a killed process has left unfinished, if there is one.

        Args:
            columns: the rows, ``[capacity, ...]`` for each key.
            ring: the counters.

        Raises:
            RuntimeError: the process is still there.
        """
        deadline = time.monotonic() + _PATIENCE
        while self._words[JOURNAL_STATE] != _IDLE and not (self._alone or self._lock()):
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{self._path.parent}: a write is unfinished, and another process, or another storage of this one, "
                    "has the files open: end it, or open the folder when the write is done"
                )
            time.sleep(1e-3)
        state = self._words[JOURNAL_STATE]
        if state == _KEPT and self._put_back(columns, ring):
            logger.warning("%s: a process was killed while it wrote: its last write is undone", self._path.parent)
        elif state == _GONE:
            laps = -(-int(ring[rows.WRITTEN]) // self._capacity)
            ring[: rows.SIZE + 1] = torch.tensor([laps * self._capacity, 0])
            logger.warning("%s: a process was killed while it replaced all rows: they are gone", self._path.parent)
        self._words[JOURNAL_STATE] = _IDLE

    def _put_back(self, columns: Sequence[Tensor], ring: Tensor) -> bool:
        """Put the kept rows back; False: they are not whole, as after a crash of the machine."""
        words = self._bytes.view(torch.int64)
        n, n_keys = int(words[JOURNAL_ROWS]), int(words[JOURNAL_KEYS])
        first = JOURNAL_WORDS + n_keys + n
        if min(n, n_keys) < 0 or n_keys > len(columns) or first > len(words):
            return False
        keys, index = words[JOURNAL_WORDS : first - n].tolist(), words[first - n : first]
        if not all(0 <= key < len(columns) for key in keys):
            return False
        starts = [first]
        for key in keys:
            starts.append(starts[-1] + -(-n * self._row_bytes[key] // 8))
        whole = starts[-1] <= len(words) and bool(((index >= -self._capacity) & (index < self._capacity)).all())
        if not whole or int(words[JOURNAL_CHECK + 1 : starts[-1]].sum()) != int(words[JOURNAL_CHECK]):
            return False
        for key, start in zip(keys, starts, strict=False):
            column = columns[key]
            kept = words[start:].view(torch.uint8)[: n * self._row_bytes[key]]
            column[index] = kept.view(column.dtype).view(n, *column.shape[1:])
        ring[: rows.SIZE + 1] = words[JOURNAL_CHECK + 1 : JOURNAL_ROWS]
        return True
