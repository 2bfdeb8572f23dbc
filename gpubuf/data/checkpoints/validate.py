"""Whether a buffer can take a state that was read from files: all of it is checked before any of it is used.

Checksums say that a file is as it was written; these checks say that what was written fits this buffer, and that no
number in it leads outside of anything.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from gpubuf import serialization
from gpubuf.data.checkpoints.manifest import Manifest, RowFiles, need
from gpubuf.data.checkpoints.parts import Parts
from gpubuf.data.processing.pipeline import Pipeline
from gpubuf.data.samplers.base import is_count
from gpubuf.data.storage.linking import SharedState
from gpubuf.data.storage.schema import NEXT_KEY
from gpubuf.data.storage.tensor_storage import TensorStorage
from gpubuf.kernels.transitions import LOST


def check(parts: Parts, manifest: Manifest, state: dict[str, Any]) -> None:
    """Raise unless a buffer of these parts can take ``state``.

    The rows' keys, shapes and dtypes are checked by the storage.

    Raises:
        ValueError: it can't; the text states both sides.
    """
    try:
        for name in ("_storage", "_sampler", "_writer", "_transforms"):
            need(isinstance(state[name], dict), f"the checkpoint's {name} is a {type(state[name]).__name__}")
        _check_storage(parts.storage, manifest, state["_storage"])
        capacity, size = state["_storage"]["max_size"], state["_storage"].get("size", 0)
        parts.sampler.check_state(state["_sampler"], capacity, size)
        parts.writer.check_state(state["_writer"], capacity, size)
        check_transforms(parts.transform, state["_transforms"])
        check_processing(parts.processing, state)
        check_batch_size(state["_batch_size"])
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        # Of another type than all that a save writes.
        raise ValueError(f"the checkpoint's state can't be used: {error!r}") from None


def check_batch_size(size: Any) -> None:
    """Raise unless a buffer could have been made with this batch size, or None."""
    need(size is None or (is_count(size, 1) and size < 2**31), f"the checkpoint's batch size is {size!r}")


def _check_storage(storage: TensorStorage, manifest: Manifest, state: dict[str, Any]) -> None:
    need(is_count(state["max_size"], 1), f"the checkpoint's capacity is {state['max_size']!r}")
    need(type(state["initialized"]) is bool, "the checkpoint doesn't say whether rows were written")
    rows = manifest.rows
    need(state["initialized"] == (rows is not None), "the checkpoint's state and its rows contradict each other")
    if rows is None:
        return
    written, size, capacity, shape = state["written"], state["size"], state["max_size"], tuple(state["shape"])
    need(all(is_count(n) for n in (written, size, *shape)), f"the checkpoint's counters are {written!r} and {size!r}")
    need(
        (written, size, capacity) == (manifest.written, manifest.size, manifest.capacity),
        "the checkpoint's state and its manifest contradict each other",
    )
    skipped = state.get("skipped", 0)
    need(is_count(skipped) and skipped <= written, f"the checkpoint counts {written} rows written, {skipped!r} skipped")
    rewritten = state.get("rewritten")
    if rewritten is not None:
        need_form("rewritten", rewritten, torch.int64, (capacity,))
    per_step = math.prod(shape[1:])
    need(
        per_step > 0 and math.prod(shape) == capacity and size <= min(capacity, written) and written % per_step == 0,
        f"{size} rows of {written} written in a ring of shape {shape} are impossible",
    )
    need(
        rows.batch_shape == (size // per_step, *shape[1:]) and size % per_step == 0,
        f"the checkpoint says that it holds {size} rows of shape {shape}, its files are of {rows.batch_shape}",
    )
    need(
        len(shape) == storage.ndim,
        f"the checkpoint's rows have shape {shape}, the storage has {storage.ndim} dimension(s)",
    )
    if state.get("sharing") is not None:
        _check_sharing(state, rows)


def _check_sharing(state: dict[str, Any], rows: RowFiles) -> None:
    """Check what a state says about observations stored once: no link may lead anywhere but to an entry of its row."""
    written, size, (steps, *rest) = state["written"], state["size"], state["shape"]
    capacity, envs, slots = state["max_size"], math.prod(rest), state["sharing"]["slots"]
    need(is_count(slots, 1) and slots <= capacity, f"the checkpoint has room for {slots!r} next observations")
    shared = SharedState.of(state)
    assert shared is not None
    leaves = {leaf.key: leaf for leaf in rows.leaves}
    known = {key[:n] for key in leaves for n in range(1, len(key) + 1)}
    for key in shared.keys:
        own = all(isinstance(name, str) for name in key) and key in leaves
        need(own and (NEXT_KEY, *key) not in known and (NEXT_KEY,) not in leaves, f"the checkpoint can't share {key!r}")
    need(0 < len(set(shared.keys)) == len(shared.keys), "the checkpoint shares a key twice, or none")
    links, owners = shared.links, shared.owners
    need_form("links", links, torch.int32, (capacity,))
    need_form("owners", owners, torch.int64, (slots + 1,))
    taken = int(owners[-1])
    used = min(taken, slots)
    for key, entries, pending in zip(shared.keys, shared.entries, shared.pending, strict=True):
        dtype = serialization.DTYPES[leaves[key].dtype]
        need_form("entries", entries, dtype, (used, *leaves[key].shape))
        need_form("pending", pending, dtype, (envs, *leaves[key].shape))
    need(taken >= 0 and int(links.min()) >= LOST and int(links.max()) <= used, "the checkpoint's links lead nowhere")
    need(int(owners[:-1].min()) >= -1 and int(owners[:-1].max()) < written, "the checkpoint's owners are no rows")
    position = torch.arange(size)
    if size:
        # A link counts only where a row has one behind it.
        position = position[position // envs != (written // envs - 1) % steps]
    entry = links[position].long()
    position, entry = position[entry > 0], entry[entry > 0]
    number = written - 1 - (written - 1 - position) % capacity
    need(torch.equal(owners[entry - 1], number), "the checkpoint's links and owners contradict each other")


def need_form(name: str, tensor: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raise unless ``tensor`` is one of this dtype and shape."""
    found = (tensor.dtype, tuple(tensor.shape)) if isinstance(tensor, Tensor) else type(tensor).__name__
    need(found == (dtype, shape), f"the checkpoint's {name} are {found}, expected {(dtype, shape)}")


def check_transforms(transform: nn.Module, state: dict[str, Any]) -> None:
    """Raise unless transforms have the entries of ``state``, of the same shapes."""
    own = transform.state_dict()
    need(
        set(own) == set(state),
        f"the checkpoint's transforms have the entries {sorted(state)}, the buffer's have {sorted(own)}",
    )
    for name, value in own.items():
        if isinstance(value, Tensor):
            other = state[name]
            found = tuple(other.shape) if isinstance(other, Tensor) else type(other).__name__
            due = tuple(value.shape)
            need(found == due, f"transform entry {name}: the buffer has {due}, the checkpoint {found}")


def check_processing(processing: Pipeline | None, state: dict[str, Any]) -> None:
    """Raise unless a buffer with this processing can take ``state``.

    Raises:
        ValueError: it is that of another one.
    """
    saved: Any = state.get("_processing")
    if processing is None:
        need(saved is None, "the state has the processing of batches, and this buffer has none: give it `process`")
    else:
        need(saved is not None, "this buffer processes its batches, and the state has nothing of that")
        processing.check_state(saved)
