"""Putting a state into a buffer: all of it, or nothing.

What can be verified is verified before anything changes. Checksums say that a file is as it was written; the checks
here say that what was written fits this buffer, and that no number in it leads outside of anything. For what only shows
when it is tried (transforms and samplers of the user's own, memory that runs out, an interrupt) the buffer remembers
what it was, and is put back.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, FunctionType, MethodType, ModuleType, TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from gpubuf import serialization
from gpubuf.data.checkpoints import custom_rows, files
from gpubuf.data.checkpoints.files import Manifest, RowFiles, need, need_form
from gpubuf.data.checkpoints.save import BAR_BYTES, Checkpointed, part_folder, remember
from gpubuf.data.lock import BufferLock, holding, under
from gpubuf.data.prefetch import copied, tensors_of
from gpubuf.data.samplers.base import is_count
from gpubuf.data.storage import host_memory
from gpubuf.data.storage.layout import Data, Pieces, RowLayout
from gpubuf.data.storage.schema import NEXT_KEY, Schema, written_leaves
from gpubuf.data.storage.share_next import SharedState
from gpubuf.data.storage.storage import Storage, TensorStorage
from gpubuf.kernels.rows import LOST
from gpubuf.terminal import BYTES, progress_bar

logger = logging.getLogger("gpubuf")

#: Where the state of a buffer says that it is one of several.
TOGETHER = "_together"
#: What loads the folders of other programs: whether one is theirs, and what reads it into a buffer.
readers: list[tuple[Callable[[Path], bool], Callable[[Checkpointed, Path], None]]] = []


# From files


def load(buffer: Checkpointed, path: str | os.PathLike[str], *, progress: bool | None = None) -> None:
    """Restore what :func:`gpubuf.data.checkpoints.save.save` wrote, into the memory that the buffer has.

    Everything is read and verified before anything changes. The buffer may be on another device than the saved one was,
    and may have more room; with the same capacity it goes on with the same batches. No code is run, and no file outside
    of ``path`` is read. A folder of another program that is known (:data:`readers`) is read as that program would.

    Args:
        buffer: the buffer. Its sampler must be of the same class, and its transforms must have the same entries.
        path: the folder.
        progress: as for ``save``.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: the checkpoint is damaged, incomplete, foreign, or of a newer version, or doesn't fit the buffer.
            The buffer is as it was. Synchronises.
    """
    folder = existing(path)
    for recognises, read in readers:
        if recognises(folder):
            read(buffer, folder)
            return
    with files.FolderLock(folder, exclusive=False):
        load_parts([buffer], [folder], [files.read_manifest(folder, Manifest)], None, progress)


def load_mix(
    buffers: Sequence[Checkpointed],
    path: str | os.PathLike[str],
    restore: Callable[[list[dict[str, Any]], dict[str, Any]], None],
    *,
    progress: bool | None = None,
) -> None:
    """Restore what :func:`gpubuf.data.checkpoints.save.save_mix` wrote: all of the buffers, or none.

    Args:
        buffers: the buffers.
        path: the folder of all.
        restore: restores the states of the buffers, and what they share. Called with all locks held, after everything
            was verified that can be.
        progress: as for :func:`load`.

    Raises as :func:`load`; ValueError also for a checkpoint of another number of buffers.
    """
    folder = existing(path)
    with files.FolderLock(folder, exclusive=False):
        mix = files.read_manifest(folder, files.MixManifest)
        manifests, shared = mix.parts, files.open_file(folder, mix.state)
        for name in ("_transforms", "_rounding"):
            need(isinstance(shared.get(name), dict), f"{folder} has no {name} of the mix")
        if len(manifests) != len(buffers):
            raise ValueError(f"the checkpoint at {folder} is of {len(manifests)} buffers, here are {len(buffers)}")
        parts = [existing(part_folder(folder, number)) for number in range(len(buffers))]
        holding(
            [files.FolderLock(part, exclusive=False) for part in parts],
            lambda: load_parts(buffers, parts, manifests, lambda states: restore(states, shared), progress),
        )


def existing(path: str | os.PathLike[str]) -> Path:
    """The folder of a checkpoint.

    Raises:
        FileNotFoundError: there is no folder.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no checkpoint at {folder}")
    return folder


def load_parts(
    buffers: Sequence[Checkpointed],
    folders: Sequence[Path],
    manifests: Sequence[Manifest],
    restore: Callable[[list[dict[str, Any]]], None] | None,
    progress: bool | None,
) -> None:
    """Read and verify checkpoints, and restore them. Their folders are locked by the caller.

    Args:
        buffers: for each checkpoint the buffer that takes it; one buffer may take several, which ``restore`` puts
            together.
        folders, manifests: of each checkpoint.
        restore: called with the states, and with the locks of the buffers held; None: the one buffer takes its own.
        progress: as for :func:`load`.

    Raises as :func:`load`.
    """
    # Every file is read, and its rows are copied.
    total = 2 * sum(file.size for manifest in manifests for file in manifest.files)
    with progress_bar("loading", total, progress, columns=BYTES, least=BAR_BYTES) as advance:
        found = [files.read(folder, manifest, advance) for folder, manifest in zip(folders, manifests, strict=True)]

        def replace_all() -> None:
            for buffer, folder, manifest, (state, parts) in zip(buffers, folders, manifests, found, strict=True):
                storage = buffer._storage
                _check_read(buffer, custom_rows.load(folder, manifest, storage, state), state)
                if manifest.rows is not None:
                    state["_storage"]["rows"] = files.pieces(storage, manifest.rows, parts, advance)
            states = [state for state, _ in found]
            if restore is not None:
                restore(states)
            else:
                buffers[0].load_state_dict(states[0])
            for buffer, manifest in zip(buffers, manifests, strict=True):
                if (
                    buffers.count(buffer) == 1
                    and buffer._storage.max_size == manifest.capacity
                    and manifest.rows is not None
                ):
                    remember(buffer._storage, manifest.id)

        under(list(dict.fromkeys(buffer._lock for buffer in buffers)), replace_all)


# What is verified


def _check_settings(buffer: Checkpointed, state: dict[str, Any]) -> None:
    """Raise unless a buffer could have been made with the batch size of ``state``, and processes batches as it does."""
    size: Any = state["_batch_size"]
    saved: Any = state.get("_processing")
    need(size is None or (is_count(size, 1) and size < 2**31), f"the checkpoint's batch size is {size!r}")
    if buffer._pipeline is None:
        need(saved is None, "the state has the processing of batches, and this buffer has none: give it `process`")
    else:
        need(saved is not None, "this buffer processes its batches, and the state has nothing of that")
        buffer._pipeline.check_state(saved)


def check(buffer: Checkpointed, state: dict[str, Any]) -> dict[str, Any]:
    """The storage's state in ``state``, which a buffer can take, as far as that shows before it is tried.

    Raises:
        ValueError: it can't; the buffer is as it was.
    """
    storage, sampler = buffer._storage, buffer._sampler
    kind = state["_sampler"]["type"]
    if kind != type(sampler).__name__:
        raise ValueError(f"the state is that of a {kind}, this buffer has a {type(sampler).__name__}")
    buffer._prefetcher.check(state.get("_prefetch", []))
    _check_settings(buffer, state)
    rows = dict(state["_storage"])
    if rows["initialized"]:
        rows["rows"] = Pieces.of(rows["rows"], storage.ndim)
        schema = storage.schema_for(rows)
        if not storage.initialized:
            expect_rows(buffer, schema, tuple(rows["shape"]), "state")
    return rows


def expect_rows(buffer: Checkpointed, schema: Schema, shape: tuple[int, ...], of: str) -> None:
    """Let a buffer without rows expect some of this form, those of a storage of ``shape``.

    Raises:
        ValueError: it can't serve them.
    """
    storage, sampler = buffer._storage, buffer._sampler
    try:
        sampler.check_rows(schema.written, storage.ndim)
        storage.check_rows(schema)
    except (LookupError, RuntimeError, TypeError) as error:
        raise ValueError(f"the buffer can't serve the rows of the {of}: {error}") from error
    storage.beside = sampler.index_beside(storage.requested_device, storage.full_shape(shape))


def _check_read(buffer: Checkpointed, manifest: Manifest, state: dict[str, Any]) -> None:
    """Raise unless a buffer can take ``state``, which was read from files.

    The rows' keys, shapes and dtypes are checked by the storage.

    Raises:
        ValueError: it can't; the text states both sides.
    """
    try:
        for name in ("_storage", "_sampler", "_writer", "_transforms"):
            need(isinstance(state[name], dict), f"the checkpoint's {name} is a {type(state[name]).__name__}")
        _check_storage(buffer._storage, manifest, state["_storage"])
        capacity, size = state["_storage"]["max_size"], state["_storage"].get("size", 0)
        buffer._sampler.check_state(state["_sampler"], capacity, size)
        buffer._writer.check_state(state["_writer"], capacity, size)
        check_transforms(buffer._transform, state["_transforms"])
        _check_settings(buffer, state)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        # Of another type than all that a save writes.
        raise ValueError(f"the checkpoint's state can't be used: {error!r}") from None


def _check_storage(storage: TensorStorage, manifest: Manifest, state: dict[str, Any]) -> None:
    need(is_count(state["max_size"], 1), f"the checkpoint's capacity is {state['max_size']!r}")
    need(type(state["initialized"]) is bool, "the checkpoint doesn't say whether rows were written")
    rows = manifest.rows
    need(state["initialized"] == (rows is not None), "the checkpoint's state and its rows contradict each other")
    if rows is None:
        return
    need(not any(True for _ in tensors_of(state.get("form"))), "the checkpoint has tensors where it describes the rows")
    if "form" in state or state.get("sharing") is not None:
        written_leaves(state.get("form"))
    written, size, capacity, shape = state["written"], state["size"], state["max_size"], tuple(state["shape"])
    need(all(is_count(n) for n in (written, size, *shape)), f"the checkpoint's counters are {written!r} and {size!r}")
    need(
        (written, size, capacity) == (manifest.written, manifest.size, manifest.capacity),
        "the checkpoint's state and its manifest contradict each other",
    )
    skipped = state.get("skipped", 0)
    need(is_count(skipped) and skipped <= written, f"the checkpoint counts {written} rows written, {skipped!r} skipped")
    for name, dtype, length in (("rewritten", torch.int64, capacity), ("marks", torch.uint8, size)):
        if state.get(name) is not None:
            need_form(f"the checkpoint's {name} are", state[name], dtype, (length,))
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
    need_form("the checkpoint's links are", links, torch.int32, (capacity,))
    need_form("the checkpoint's owners are", owners, torch.int64, (slots + 1,))
    taken = int(owners[-1])
    used = min(taken, slots)
    for key, entries, pending in zip(shared.keys, shared.entries, shared.pending, strict=True):
        dtype = serialization.DTYPES[leaves[key].dtype]
        need_form("the checkpoint's entries are", entries, dtype, (used, *leaves[key].shape))
        need_form("the checkpoint's pending are", pending, dtype, (envs, *leaves[key].shape))
    need(taken >= 0 and int(links.min()) >= LOST and int(links.max()) <= used, "the checkpoint's links lead nowhere")
    need(int(owners[:-1].min()) >= -1 and int(owners[:-1].max()) < written, "the checkpoint's owners are no rows")
    position = torch.arange(size, device="cpu")
    if size:
        # A link counts only where a row has one after it.
        position = position[position // envs != (written // envs - 1) % steps]
    entry = links[position].long()
    position, entry = position[entry > 0], entry[entry > 0]
    number = written - 1 - (written - 1 - position) % capacity
    need(torch.equal(owners[entry - 1], number), "the checkpoint's links and owners contradict each other")


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


# All or nothing


class Together:
    """Buffers that all take their states, or none: what has to be put back is put back for all of them.

    What the program does at a signal, such as Ctrl-C, it does later while :attr:`wait` says so. The first signal of a
    kind waits until all is done; a second one does not. An exception that a signal raises makes all later ones wait:
    what it interrupts is put back.

    Attributes:
        stack: puts things back.
        last: what is done once all have their states.
        finished: whether all of it is done, and nothing is put back any more.
        wait: whether signals wait.
    """

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.stack = stack
        self.last: list[Callable[[], None]] = []
        self.finished = self.wait = self._ended = False
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._waiting: dict[int, FrameType | None] = {}

    def begin(self) -> None:
        """Take the place of the program's handlers. They are called in the main thread alone; elsewhere none wait."""
        if threading.current_thread() is threading.main_thread():
            for number in signal.valid_signals():
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.wait and not self._ended and number not in self._waiting:
            self._waiting[number] = frame
            logger.warning(
                "signal %d (%s) waits until the buffer is whole; another one does not, and can leave the buffer empty",
                number,
                signal.strsignal(number),
            )
            return
        self._waiting.pop(number, None)
        try:
            self._handlers[number](number, frame)
        except BaseException:
            self.wait = True
            raise

    def finish(self) -> None:
        """All have their states."""
        self.wait = True
        for action in self.last:
            action()
        self.finished = True

    def end(self) -> None:
        """Give the handlers their places back, and call those of the signals that wait."""
        self._ended = True
        with contextlib.ExitStack() as stack:
            for number, handler in self._handlers.items():
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, handler)
                if number in self._waiting:
                    stack.callback(handler, number, self._waiting[number])


@contextmanager
def together(*transforms: nn.Module) -> Iterator[Together]:
    """Around the restoration of buffers whose locks are held, and of transforms that they have in common."""
    before = Before(*transforms)
    with contextlib.ExitStack() as stack:
        group = Together(stack)
        # After all has been put back.
        stack.callback(group.end)
        try:
            group.begin()
            yield group
            group.finish()
        except BaseException:
            group.wait = True
            if not group.finished:
                before.put_back()
            raise


def load_state(buffer: Checkpointed, state: dict[str, Any]) -> None:
    """Restore a state into a buffer's own memory. See :meth:`gpubuf.ReplayBuffer.load_state_dict`."""
    with buffer._lock:
        storage, sampler, ahead = buffer._storage, buffer._sampler, buffer._prefetcher
        group: Together | None = state.get(TOGETHER)
        rows, queue = check(buffer, state), state.get("_prefetch", [])
        with ahead.quiet(), together() if group is None else contextlib.nullcontext(group) as whole:
            replacement = whole.stack.enter_context(Replacement(buffer, whole))
            buffer._transform.load_state_dict(state["_transforms"])
            if buffer._pipeline is not None:
                buffer._pipeline.load_state_dict(state["_processing"])
            slots = ahead.prepared(queue, buffer._pin_memory) if storage.initialized else None
            order = storage.load_state_dict(replacement.watched(rows))
            replacement.begun = True
            sampler.load_state_dict(state["_sampler"], order)
            buffer._writer.load_state_dict(state["_writer"])
            if slots is None:
                slots = ahead.prepared(queue, buffer._pin_memory)
            whole.last.append(functools.partial(replacement.take, slots, state["_batch_size"]))


# The rows


class Replacement:
    """Puts a buffer back as it was where the ``with`` block that replaces its contents does not finish.

    Rows that are to be replaced are copied to the host first, if there is room. Otherwise signals wait until all is
    replaced, and an error then leaves an empty buffer behind, never a mixture.

    Attributes:
        begun: whether rows may have been replaced.
    """

    def __init__(self, buffer: Checkpointed, whole: Together) -> None:
        self._buffer, self._whole, self._batch_size = buffer, whole, buffer._batch_size
        self._storage, self._sampler, self._prefetcher = buffer._storage, buffer._sampler, buffer._prefetcher
        self._fresh = not self._storage.initialized
        self._kept = None if self._fresh else _kept(self._storage)
        self._laps, self._unfinished = self._storage._laps, self._storage.unfinished
        self._queue = list(self._prefetcher.queue)
        self._around = Before(*(part for part in (buffer._transform, buffer._pipeline) if part is not None))
        ring = [] if self._fresh else [self._storage.counters]
        self._before = Before(self._sampler, buffer._writer, *ring)
        self.begun = False

    def take(self, slots: list[Any], batch_size: int | None) -> None:
        """All is replaced: give the buffer the queue and the batch size of the state too."""
        self._prefetcher.replace(slots)
        self._buffer._batch_size = batch_size
        self._buffer._assemble()

    def watched(self, state: dict[str, Any]) -> dict[str, Any]:
        """The storage's state; :attr:`begun` is set when the first of its rows are asked for."""
        if not state["initialized"]:
            return state
        rows = state["rows"]

        def parts() -> Iterator[tuple[int, Data]]:
            self.begin()
            yield from rows.parts()

        return {**state, "rows": Pieces(rows.example, parts)}

    def begin(self) -> None:
        """Rows are replaced from here on."""
        self._whole.wait |= self._kept is None and not self._fresh
        self.begun = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        # What is done last refers to this object.
        self._whole.last.clear()
        if self._whole.finished or error is None:
            return
        storage = self._storage
        if self._fresh:
            if storage.relocatable:
                storage.free()
                storage._laps = self._laps
            else:
                storage.empty()
        elif self.begun and self._kept is not None:
            try:
                storage.load_state_dict(self._kept)
            except BaseException as another:
                self._forget(another)
                raise
        elif self.begun:
            self._forget(error)
        if self._fresh or not self.begun or self._kept is not None:
            self._before.put_back()
        self._around.put_back()
        storage.unfinished = self._unfinished
        self.take(self._queue, self._batch_size)

    def _forget(self, error: BaseException) -> None:
        self._storage.empty()
        self._sampler.empty()
        error.add_note("the rows were being replaced: the buffer is empty now")


def _kept(storage: TensorStorage) -> dict[str, Any] | None:
    """A copy of a storage's state on the host; None where that would take more than half of the free memory."""
    state = storage.state_dict()
    if 2 * sum(tensor.nbytes for tensor in tensors_of(state)) > host_memory.free().host:
        return None
    views = {name: state[name] for name in ("rows", "sharing") if name in state}
    return state | {name: copied(value, torch.device("cpu")) for name, value in views.items()}


# Objects

# The models of batches in a layout have no memory that could be copied.
_NO_PARTS = (Storage, BufferLock, RowLayout, type, ModuleType, FunctionType, MethodType)


class Before:
    """Remembers objects with all their parts: attributes, containers and tensors.

    Tensors are put back into the memory that they had, so that captured graphs and views see it. Looked into is what is
    gpubuf's own, a module of PyTorch, or of the same Python module as what refers to it.
    """

    def __init__(self, *objects: object) -> None:
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[Tensor, Tensor]] = []
        self._seen: dict[int, object] = {}
        for thing in objects:
            self._note(vars(thing), type(thing).__module__)

    def _note(self, value: Any, home: str) -> None:
        if id(value) in self._seen or isinstance(value, _NO_PARTS):
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            self._tensors.append((value, value.detach().clone()))
        elif isinstance(value, (dict, list, set, deque, tuple)):
            if not isinstance(value, tuple):
                self._containers.append((value, value.copy()))
            for item in list(value.values()) if isinstance(value, dict) else value:
                self._note(item, home)
        elif hasattr(value, "__dict__"):
            module = type(value).__module__
            if isinstance(value, nn.Module) or module == home or module.startswith("gpubuf."):
                self._note(vars(value), module)

    def put_back(self) -> None:
        """Make all of it what it was."""
        for container, before in self._containers:
            container.clear()
            (container.extend if isinstance(container, (list, deque)) else container.update)(before)
        with torch.no_grad():
            for tensor, before in self._tensors:
                tensor.copy_(before)
