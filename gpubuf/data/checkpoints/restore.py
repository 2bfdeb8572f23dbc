"""Putting a state into a buffer: everything is checked, then copied.

Checksums say that a file is as it was written; the checks here say that what was written fits this buffer, and that no
number in it leads outside of anything. All of that comes before anything changes. What strikes while the contents are
replaced (an interrupt, a transform or sampler of the user's own that raises, memory that runs out) leaves an empty
buffer.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpubuf import system
from gpubuf.data.checkpoints import files
from gpubuf.data.checkpoints.files import need
from gpubuf.data.checkpoints.save import Checkpointed
from gpubuf.data.parts import Assembled, Parts
from gpubuf.data.pinning import tensors_of
from gpubuf.data.recording import emptied_unless_done
from gpubuf.data.samplers.base import is_count, is_tensor
from gpubuf.data.storage.containers import Pieces, batch_shape
from gpubuf.data.storage.layout import Leaf, RowLayout
from gpubuf.data.storage.schema import NEXT_KEY, Schema, written_leaves
from gpubuf.data.storage.share_next import SharedState
from gpubuf.data.storage.storage import TensorStorage
from gpubuf.kernels.rows import LOST

#: What loads the folders of several ranks and of other programs: whether one is such, and what reads it into a buffer.
readers: list[tuple[Callable[[Path], bool], Callable[[Checkpointed, Path, bool], None]]] = []


def load(
    buffer: Checkpointed,
    path: str | os.PathLike[str],
    *,
    progress: bool | None = None,
    end_trajectories: bool = True,
) -> None:
    """Restore what :func:`gpubuf.data.checkpoints.save.save` wrote, into the memory that the buffer has.

    Everything is read and verified before anything changes. The buffer may be on another device than the saved one was,
    and may have more room; with the same capacity it goes on with the same batches. No code is run, and no file outside
    of ``path`` is read. A folder of another program that is known (:data:`readers`) is read as that program would.

    Args:
        buffer: the buffer. Its sampler must be of the same class, and its transforms must have the same entries.
        path: the folder.
        progress: as for ``save``.
        end_trajectories: as for :meth:`gpubuf.ReplayBuffer.load_state_dict`.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: the checkpoint is damaged, incomplete, foreign, or of another version, or doesn't fit the buffer.
            The buffer is as it was. Synchronises.
    """
    folder = existing(path)
    for recognises, read_into in readers:
        if recognises(folder):
            read_into(buffer, folder, end_trajectories)
            return
    buffer.load_state_dict(read(folder, files.BUFFER, progress=progress), end_trajectories=end_trajectories)


def read(path: str | os.PathLike[str], of: str, *, progress: bool | None = None) -> dict[str, Any]:
    """The state that :func:`gpubuf.data.checkpoints.save.save_state` wrote. Raises as :func:`load` for the files."""
    folder = existing(path)
    with system.locked(folder, exclusive=False):
        return files.read(folder, files.read_manifest(folder, of).files[0], progress)


def existing(path: str | os.PathLike[str]) -> Path:
    """The folder of a checkpoint.

    Raises:
        FileNotFoundError: there is no folder.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no checkpoint at {folder}")
    return folder


def load_state_dict(buffer: Assembled, state: dict[str, Any], *, end_trajectories: bool = True) -> None:
    """Restore the ``state_dict()`` of a buffer into this buffer's own memory. Synchronises.

    A program that goes on after a restart begins new episodes. So the next write begins a trajectory: slices,
    windows of several steps and hindsight don't lead from the rows of before into those after it. What is drawn
    before that write is as it was. A buffer in which nothing asks where trajectories end has no marks to set.

    Args:
        buffer: the buffer.
        state: of this buffer, or one like it.
        end_trajectories: False for a program that restores its environments too, and goes on in the middle of
            their episodes.

    If it is interrupted, or a custom transform, sampler or writer raises, the buffer is empty: a note in the error
    says so.

    Raises:
        ValueError: the state is that of another sampler, or its rows don't fit; the buffer is left as it was.
    """
    buffer.operation.run(_load_state, buffer.parts, state, end_trajectories)


def _load_state(parts: Parts, state: dict[str, Any], end_trajectories: bool) -> None:
    check(parts, state)
    with replacing(parts):
        parts.load_state_dict(state)
        if end_trajectories:
            parts.storage.end_if_asked()


@contextlib.contextmanager
def replacing(*buffers: Parts) -> Iterator[None]:
    """Around the replacement of all that buffers hold, within operations of theirs: unless it finishes, all are empty.

    It may be nested: the contents of the buffers count when the outermost block has finished.
    """
    try:
        with emptied_unless_done([parts.storage for parts in buffers]):
            for parts in buffers:
                parts.batches.discard()
            yield
    except BaseException as error:
        error.add_note("the contents were being replaced: the buffer is empty now")
        raise


# What is checked


def check(buffer: Parts, state: dict[str, Any]) -> None:
    """Raise unless a buffer can take a state, as far as that shows before it is tried.

    Raises:
        ValueError: it can't; the text states both sides. The buffer is as it was.
    """
    try:
        for name in ("_storage", "_sampler", "_writer", "_transforms"):
            need(isinstance(state[name], dict), f"the checkpoint's {name} is a {type(state[name]).__name__}")
        rows = state["_storage"]
        _check_rows(buffer.storage, rows)
        capacity, size = rows["max_size"], rows.get("size", 0)
        buffer.sampler.check_state(state["_sampler"], capacity, size)
        buffer.writer.check_state(state["_writer"], capacity, size)
        check_transforms(buffer.transform, state["_transforms"])
        _check_settings(buffer, state)
        if rows["initialized"]:
            schema = buffer.storage.check_state(rows)
            if not buffer.storage.initialized:
                expect_rows(buffer.storage, schema, "state")
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        # Of another type than all that a save writes.
        raise ValueError(f"the checkpoint's state can't be used: {error!r}") from None


def expect_rows(storage: TensorStorage, schema: Schema, of: str) -> None:
    """Raise unless a buffer without rows could have some of this form.

    Raises:
        ValueError: it can't serve them.
    """
    try:
        storage.readers.check_rows(schema, storage.ndim)
    except (LookupError, RuntimeError, TypeError) as error:
        raise ValueError(f"the buffer can't serve the rows of the {of}: {error}") from error


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


def _check_settings(buffer: Parts, state: dict[str, Any]) -> None:
    """Raise unless a buffer could have been made with the batch size of ``state``, and processes batches as it does."""
    size: Any = state["_batch_size"]
    saved: Any = state.get("_processing")
    need(size is None or (is_count(size, 1) and size < 2**31), f"the checkpoint's batch size is {size!r}")
    if not buffer.pipeline:
        need(
            saved is None,
            "the state has the processing of batches, and this buffer has none: give it `process` and `transform`",
        )
    else:
        need(saved is not None, "this buffer processes its batches, and the state has nothing of that")
        buffer.pipeline.check_state(saved)


def _check_rows(storage: TensorStorage, state: dict[str, Any]) -> None:
    """Raise unless counters and rows of a storage's state agree."""
    need(is_count(state["max_size"], 1), f"the checkpoint's capacity is {state['max_size']!r}")
    need(type(state["initialized"]) is bool, "the checkpoint doesn't say whether rows were written")
    if not state["initialized"]:
        return
    form = state.get("form")
    need(not any(True for _ in tensors_of(form)), "the checkpoint has tensors where it describes the rows")
    if "form" in state or state.get("sharing") is not None:
        written_leaves(form)
    written, size, capacity, shape = state["written"], state["size"], state["max_size"], tuple(state["shape"])
    need(all(is_count(n) for n in (written, size, *shape)), f"the checkpoint's counters are {written!r} and {size!r}")
    skipped = state.get("skipped", 0)
    need(is_count(skipped) and skipped <= written, f"the checkpoint counts {written} rows written, {skipped!r} skipped")
    need(type(state.get("past_lost", False)) is bool, "the checkpoint doesn't say whether rows are without their past")
    for name, dtype, length in (("rewritten", torch.int64, capacity), ("marks", torch.uint8, size)):
        if state.get(name) is not None:
            need(is_tensor(state[name], dtype, (length,)), f"the checkpoint's {name} are not {length} numbers")
    per_step = math.prod(shape[1:])
    need(
        per_step > 0 and math.prod(shape) == capacity and size <= min(capacity, written) and written % per_step == 0,
        f"{size} rows of {written} written in a ring of shape {shape} are impossible",
    )
    need(
        len(shape) == storage.ndim,
        f"the checkpoint's rows have shape {shape}, the storage has {storage.ndim} dimension(s)",
    )
    rows = state["rows"]
    layout = RowLayout(Pieces.of(rows, storage.ndim).example, storage.ndim)
    if not isinstance(rows, Pieces):
        steps = 0
        for part in rows if isinstance(rows, list) else [rows]:
            layout.collect(part, storage.ndim)
            held = batch_shape(part, storage.ndim)
            need(tuple(held[1:]) == shape[1:], f"the checkpoint's rows of shape {shape} have parts of shape {held}")
            steps += held[0]
        need(steps * per_step == size, f"the checkpoint says that it holds {size} rows of shape {shape}, not {steps}")
    if state.get("sharing") is not None:
        _check_sharing(state, {leaf.key: leaf for leaf in layout.leaves})


def _check_sharing(state: dict[str, Any], leaves: dict[Any, Leaf]) -> None:
    """Check what a state says about observations stored once: no link may lead anywhere but to an entry of its row."""
    written, size, (steps, *rest) = state["written"], state["size"], state["shape"]
    capacity, envs, slots = state["max_size"], math.prod(rest), state["sharing"]["slots"]
    need(is_count(slots, 1) and slots <= capacity, f"the checkpoint has room for {slots!r} next observations")
    shared = SharedState.of(state)
    assert shared is not None
    known = {key[:n] for key in leaves for n in range(1, len(key) + 1)}
    for key in shared.keys:
        own = all(isinstance(name, str) for name in key) and key in leaves
        need(own and (NEXT_KEY, *key) not in known and (NEXT_KEY,) not in leaves, f"the checkpoint can't share {key!r}")
    need(0 < len(set(shared.keys)) == len(shared.keys), "the checkpoint shares a key twice, or none")
    links, owners = shared.links, shared.owners
    need(is_tensor(links, torch.int32, (capacity,)), f"the checkpoint's links are not {capacity} numbers")
    need(is_tensor(owners, torch.int64, (slots + 1,)), f"the checkpoint's owners are not {slots + 1} numbers")
    taken = int(owners[-1])
    used = min(taken, slots)
    for key, entries, pending in zip(shared.keys, shared.entries, shared.pending, strict=True):
        for found, n in ((entries, used), (pending, envs)):
            leaf = leaves[key]
            fits = is_tensor(found, leaf.dtype, (n, *leaf.shape))
            need(fits, f"the checkpoint's next observations of {leaf.name} are not {n} of its form")
    need(taken >= 0 and int(links.min()) >= LOST and int(links.max()) <= used, "the checkpoint's links lead nowhere")
    need(int(owners[:-1].min()) >= -1 and int(owners[:-1].max()) < written, "the checkpoint's owners are no rows")
    position = torch.arange(size, device=links.device)
    if size:
        # A link counts only where a row has one after it.
        position = position[position // envs != (written // envs - 1) % steps]
    entry = links[position].long()
    position, entry = position[entry > 0], entry[entry > 0]
    number = written - 1 - (written - 1 - position) % capacity
    need(torch.equal(owners[entry - 1], number), "the checkpoint's links and owners contradict each other")
