"""What the next operation does about one that was interrupted. An exception can come between any two steps of it."""

from __future__ import annotations

import torch

from gpubuf.data.storage.storage import TensorStorage
from gpubuf.data.writers import Writer


def mend(storage: TensorStorage, writer: Writer) -> None:
    """Finish what was interrupted.

    The device's counters say whether the rows of a write have been written. If so, the write is completed;
    otherwise there was none. Data derived from rows and priorities is computed anew: O(capacity). Synchronises
    after a write.
    """
    left = storage.unfinished
    if left is not None and left.frees:
        storage.release()
    elif left is not None and left.empties:
        forget(storage, writer, left.recounts)
    elif left is not None and storage.initialized:
        storage.rows.again.redo()
        if left.written is None or _completed(storage, left.written) or not writer.in_order:
            if not left.counted:
                storage.refresh()
            storage.followers.mend()
            writer.mend()
    storage.unfinished = storage.followers.priority = None


def _completed(storage: TensorStorage, written: int) -> bool:
    """Whether an interrupted write has written rows after ``written`` ones; all who follow them know them then."""
    storage.refresh()
    n = min(storage.written - written, storage.max_size)
    if n > 0:
        first = storage.written - n
        storage.followers.on_write((first + torch.arange(n, device=storage.device)) % storage.max_size)
    return n > 0


def forget(storage: TensorStorage, writer: Writer, recount: bool = False) -> None:
    """Forget every row and priority. ``recount``: the number of rows written begins again at 0."""
    storage.empty(recount)
    writer.empty(recount)
