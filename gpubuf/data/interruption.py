"""The mark of an unfinished operation: what is in doubt while it runs, and after it was interrupted."""

from __future__ import annotations

from typing import NamedTuple


class Unfinished(NamedTuple):
    """A mark that an operation sets before it changes anything, and takes away when all is done.

    An exception can come between any two steps of the host: from Ctrl-C, a timer, another thread. The next operation
    finds the mark and finishes the work; see :class:`gpubuf.data.mending.Mending`.

    Attributes:
        written: how many rows had ever been written when a write began; the sampler may not know of those after them.
        counted: whether the host's mirror of the counters is right.
        empties: whether everything is being forgotten.
    """

    written: int | None = None
    counted: bool = True
    empties: bool = False


#: Data derived from rows or priorities is being changed.
DERIVED = Unfinished()

#: A captured graph is being replayed, which counts rows on the device.
REPLAY = Unfinished(counted=False)
