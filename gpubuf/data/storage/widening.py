"""Columns for keys that come after the first write, as values that a program begins to compute later."""

from __future__ import annotations

import copy

from gpubuf.data.recording import runs_now
from gpubuf.data.storage.column import Columns, Record
from gpubuf.data.storage.containers import Data
from gpubuf.data.storage.layout import OF_A_DRAW, RowLayout
from gpubuf.data.storage.placement import check_host_room
from gpubuf.data.storage.storage import TensorStorage
from gpubuf.data.storage.tree_layout import layout_of


def widen(storage: TensorStorage, data: Data) -> bool:
    """Have a column for each key that a batch has beside those stored. The rows stored have zeros there.

    A storage can have more if its rows are TensorDicts that are stored as they are written, on the CPU or a GPU, and no
    other process writes. The keys have to be at the root, or below a new one, and trajectories have to end by the keys
    of before. What was captured is to be captured anew. No host sync.

    Returns:
        Whether there are such columns now. False: nothing has changed.

    Raises:
        NothingFitsError, torch.OutOfMemoryError: there is no room for them.
        ValueError: a reader of the rows can't have such a key.
    """
    rows = storage.rows
    written, allocation = rows.schema.written, storage.allocation
    if not allocation.relocatable or storage.computed or storage.marks.by_writers or storage.owner is not None:
        return False
    if rows.placement.kind not in ("cpu", "cuda"):
        return False
    if not runs_now():
        return False
    layout = layout_of(data, storage.ndim, allocation.ignored_keys)
    more = [leaf for leaf in layout.leaves if written.position(leaf.key) is None]
    # Behind the others, where they are as a batch is walked through: who knows columns by their numbers finds them.
    last = not {leaf.key[:1] for leaf in more} & {*OF_A_DRAW, *(leaf.key[:1] for leaf in written.leaves)}
    alike = type(layout) is type(written) is RowLayout and {*written.leaves} <= {*layout.leaves}
    if not (more and last and alike) or written.host or layout.host:
        return False
    schema = allocation.schema_like(layout.with_leaves([*written.leaves, *more]))
    storage.readers.check_rows(schema, storage.ndim)
    ends = storage.readers.ends_by
    if ends is not None and ends.ends(schema) != ends.ends(rows.schema):
        return False
    if rows.device.type == "cpu":
        check_host_room(rows.capacity * sum(leaf.row_bytes for leaf in more), "room for more keys")
    memory = Columns.new(more, tuple(rows.shape), rows.placement)
    for part in memory.memory:
        # Of replays of a graph that somebody else has captured, the host does not know.
        (part if part.is_cuda else part[: rows.steps_stored]).zero_()
    behind = [Record(tuple(len(written.leaves) + key for key in keys), column) for keys, column in memory.records]
    wider = copy.copy(rows)
    wider.schema, wider.columns = schema, Columns([*rows.columns.records, *behind], schema.stored.leaves)
    storage.rewire(wider)
    return True
