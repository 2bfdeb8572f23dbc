"""The state of a storage: as ``state_dict()`` gives it, and as another storage takes it over."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gpubuf.data.storage import host_memory
from gpubuf.data.storage.containers import Data, Pieces, batch_shape, device_of
from gpubuf.data.storage.host_rows import saved_host
from gpubuf.data.storage.layout import RowLayout
from gpubuf.data.storage.schema import Options, Schema, check_same, described, written_leaves
from gpubuf.data.storage.share_next import CHUNK_BYTES, SharedState, entries_of, full_state, oldest_first, oldest_of
from gpubuf.data.storage.tree_layout import saved_tree, with_tree
from gpubuf.kernels.rows import NoRoomError, has_lost

#: A :class:`gpubuf.data.storage.storage.TensorStorage`, which imports this.
TensorStorage = Any


def rows_state(rows: Data, ndim: int, size: int, written: int | None = None) -> dict[str, Any]:
    """The state of a storage of ``ndim`` dimensions that consists of ``rows``, ``size`` of which were written.

    ``written`` is the number of rows ever written; None: ``size``.
    """
    shape = tuple(batch_shape(rows, ndim))
    return {
        "initialized": True,
        "max_size": math.prod(shape),
        "shape": list(shape),
        "written": size if written is None else written,
        "size": size,
        "rows": rows[: size // max(math.prod(shape[1:]), 1)],
    }


def state_of(storage: TensorStorage) -> dict[str, Any]:
    """See :meth:`TensorStorage.state_dict`."""
    if not storage.initialized:
        return {"initialized": False, "max_size": storage.max_size}
    storage.refresh()
    parts = [_filled_part(storage, part) for part in range(len(storage.columns[0].parts) if storage.columns else 1)]
    state = {
        "initialized": True,
        "max_size": storage.max_size,
        "shape": list(storage.shape),
        "written": storage.written,
        "skipped": storage.written - storage.rows_written,
        "size": len(storage),
        "rewritten": storage.ring.rewritten,
        "rows": parts[0] if len(parts) == 1 else parts,
    }
    state |= saved_tree(storage.written_layout)
    if storage.computed:
        state["form"] = described(storage.schema)
    for follower in storage.followers.own:
        state |= follower.state(len(storage))
    return state


def _filled_part(storage: TensorStorage, part: int) -> Data:
    """The rows stored in one of the places that the storage is in: views."""
    tensors = [column.parts[part] for column in storage.columns]
    before = sum(len(other) for other in storage.columns[0].parts[:part]) if storage.columns else 0
    filled = max(storage.steps_stored - before, 0)
    if tensors:
        filled = min(filled, len(tensors[0]))
    device = storage.rows_device if part == 0 else torch.device("cpu")
    return storage.layout.assemble([t[:filled] for t in tensors], (filled, *storage.shape[1:]), device)


def load(storage: TensorStorage, state: dict[str, Any]) -> Tensor | None:
    """See :meth:`TensorStorage.load_state_dict`."""
    if state.get("initialized") is not False and "rows" not in state:
        raise ValueError(
            f"{sorted(map(str, state))} are no state of a storage: one of TorchRL's comes with that of its buffer, "
            "which buffers of gpubuf.integrations.torchrl take"
        )
    if not state["initialized"]:
        storage.empty(recount=True)
        return None
    state, schema, layout = incoming(storage, state)
    anew = layout is not schema.stored
    pieces = Pieces.of(state["rows"], storage.ndim)
    size, old_max, shape = state["size"], state["max_size"], tuple(state["shape"])
    per_step = math.prod(shape[1:])
    if not storage.initialized:
        storage.establish(schema, shape, device_of(pieces.example))
    order, first = None, 0
    if storage.max_size != old_max:
        first = oldest_of(state)
        order = (torch.arange(size, device="cpu") + first) % old_max
    if storage.placement is not None and storage.placement.rows_on_host:
        # The host is about to write where the GPU may still be reading.
        host_memory.synchronize(storage.device)
    # Rows that were lost there are lost here, too: they count as a round.
    before = state["written"] - size if order is None else storage.max_size * lacks_past(state)
    if anew:
        _write_anew(storage, {**state, "rows": pieces}, layout, before)
    for start, part in () if anew else pieces.parts():
        # The oldest step comes to lie first: all others turn with it.
        at = (start - first // per_step) % (old_max // per_step)
        for column, source in zip(storage.columns, layout.collect(part, storage.ndim), strict=True):
            before_seam = min(source.shape[0], old_max // per_step - at)
            column.write(at, source[:before_seam])
            column.write(0, source[before_seam:])
    storage.ring.set_counters(before + size, size)
    storage.ring.skipped = before if order is not None else state.get("skipped", 0)
    if order is None:
        rewritten = state.get("rewritten")
        storage.ring.rewritten = None if rewritten is None else rewritten.to(storage.device, copy=True)
    if "marks" in state:
        storage.keep_marks()
    for follower in storage.followers.own:
        follower.load(state, order)
    for sampler in storage.followers.samplers:
        sampler.empty()
        if size:
            sampler.on_write(torch.arange(size, device=storage.device), None)
    return order


def incoming(storage: TensorStorage, state: dict[str, Any]) -> tuple[dict[str, Any], Schema, RowLayout]:
    """A state with rows that are written as they are or anew, their schema, and their layout."""
    if state.get("past_lost"):
        # Of a version that did not count the rows that a smaller ring had lost.
        counted = {
            "written": state["written"] + state["max_size"],
            "skipped": state.get("skipped", 0) + state["max_size"],
        }
        state = {**full_state(state, storage.ndim), **counted}
    schema = _schema_for(storage, state)
    layout = schema.stored
    if not _continues(storage, state, schema):
        state = full_state(state, storage.ndim)
        layout = schema.full if schema.shared else layout
    if state.get("as_written") and storage.computed:
        layout = schema.written
    layout.collect(Pieces.of(state["rows"], storage.ndim).example, storage.ndim)
    size, shape = state["size"], tuple(state["shape"])
    if storage.initialized and storage.shape[1:] != shape[1:]:
        raise ValueError(f"the checkpoint's rows have shape {shape}, the storage's {storage.shape}")
    per_step = math.prod(shape[1:])
    room = -(-storage.max_size // per_step) * per_step
    if size > room:
        raise ValueError(f"the checkpoint holds {size} rows, the storage has room for {room}")
    return state, schema, layout


def lacks_past(state: dict[str, Any]) -> bool:
    """Whether the steps before the oldest one of a state were overwritten."""
    return bool(has_lost(state["written"], state["size"], state["max_size"]) or state.get("past_lost", False))


def _write_anew(storage: TensorStorage, state: dict[str, Any], layout: RowLayout, written: int) -> None:
    """Write the rows of a state, the oldest ones first: those that are not continued keep what comes next.

    Args:
        state: of rows with all their next observations.
        layout: of these rows.
        written: how many rows were ever written before them.

    Raises:
        ValueError: there is no room for so many next observations. The storage is empty then.
    """
    sharing, ndim, begun = storage.sharing, storage.ndim, False
    chunk = max(1, CHUNK_BYTES // max(1, layout.row_bytes * storage.rows.envs))
    try:
        for rows in oldest_first(state, ndim, chunk):
            if not begun:
                if sharing is not None:
                    sharing.forget()
                storage.ring.set_counters(written, 0)
                begun = True
            if state.get("as_written"):
                storage.append(rows)
            else:
                assert sharing is not None
                sharing.raw.extend(storage.rows.local(layout.collect(rows, ndim), ndim), math.prod(rows.shape[:ndim]))
        # A GPU has counted what it found no room for.
        storage.refresh()
    except (NoRoomError, IndexError) as error:
        storage.empty()
        raise ValueError(f"{error} (next_capacity={storage.allocation.options.next_capacity})") from None


def _schema_for(storage: TensorStorage, state: dict[str, Any]) -> Schema:
    """The schema of the rows of a state: that of this storage.

    Args:
        state: what says in ``"form"`` what was written, if that is not what is stored, in ``"tree"`` in which
            containers, and in ``"host"`` what is not in tensors. A storage that has rows keeps its own containers.

    Raises:
        ValueError: this storage has, or would have, another one.
    """
    saved, host = state.get("form"), saved_host(state)
    schema: Schema | None = storage.schema if storage.initialized else None
    if schema is not None and schema.written.host != host:
        own = list(schema.written.host)
        raise ValueError(f"the state has the keys {list(host)} that are not tensors, the storage has {own}")
    if schema is not None and (state.get("as_written") or (not storage.computed and saved is None)):
        return schema
    stored = RowLayout(Pieces.of(state["rows"], storage.ndim).example, storage.ndim, storage.allocation.ignored_keys)
    if schema is None:
        written = stored if saved is None else stored.with_leaves(written_leaves(saved))
        written.host = host
        schema = storage.allocation.schema_like(with_tree(written, state.get("tree")))
    if not state.get("as_written") and (storage.computed or saved is not None):
        check_same(schema, described(Schema.of(stored, Options())) if saved is None else saved)
    return schema


def _continues(storage: TensorStorage, state: dict[str, Any], schema: Schema) -> bool:
    """Whether links and entries of a state can be taken over as they are."""
    shared = SharedState.of(state)
    if shared is None or tuple(leaf.key for leaf in schema.shared.values()) != shared.keys:
        return False
    shape = tuple(storage.shape) if storage.initialized else storage.allocation.full_shape(tuple(state["shape"]))
    slots = entries_of(math.prod(shape), math.prod(shape[1:]), storage.allocation.options.next_capacity)
    return (shape, slots) == (tuple(state["shape"]), shared.slots)
