"""Saving buffers: the files of a checkpoint that changed since the last one are written again, the others stay.

:mod:`gpubuf.data.checkpoints.files` says what a checkpoint consists of, and what makes it survive a crash.
"""

from __future__ import annotations

import _thread
import itertools
import math
import os
import secrets
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gpubuf import serialization
from gpubuf.data.batches import Batches
from gpubuf.data.checkpoints import custom_rows, files
from gpubuf.data.checkpoints.files import DamagedError, File, Kind, LeafSpec, Manifest, RowFiles, TensorFiles
from gpubuf.data.lock import BufferLock, holding, under
from gpubuf.data.pinning import copied
from gpubuf.data.processing.pipeline import Pipeline
from gpubuf.data.samplers.base import Sampler
from gpubuf.data.storage.column import Column
from gpubuf.data.storage.layout import Key, Node
from gpubuf.data.storage.storage import TensorStorage
from gpubuf.data.transforms import Compose
from gpubuf.data.writers import Writer
from gpubuf.terminal import BYTES, Advance, progress_bar

#: Up to so much is copied, so that the buffer can be used while it is written.
_COPY_BYTES = 1 << 28
BAR_BYTES = 1 << 30
"""From this size on there is a progress bar, on a terminal."""
#: The size of a file, if nobody says it: so many of them, within these bounds.
_FILES, _LEAST_BYTES, _MOST_BYTES = 128, 1 << 20, 1 << 26
_FINGERPRINTS = 8
_FLUSHING = 4

_M = TypeVar("_M", Manifest, files.MixManifest, files.ShardManifest)


class Checkpointed(Protocol):
    """What checkpoints use of a buffer: its lock, its parts as they are while that is held, and its state.

    The state is made and taken by the buffer's own methods, for a subclass may add to it.
    """

    _lock: BufferLock
    _storage: TensorStorage
    _sampler: Sampler
    _writer: Writer
    _transform: Compose
    _batches: Batches
    _pipeline: Pipeline | None
    _batch_size: int | None

    def state_dict(self) -> dict[str, Any]:
        """Everything that it needs to go on with the same batches."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore that: see :func:`gpubuf.data.checkpoints.restore.load_state`."""

    def _assemble(self) -> None:
        """Make batches of the parts that it has now."""


@dataclass(frozen=True)
class Saved:
    """The result of a save: bytes and files that it wrote, and those that make up the checkpoint."""

    bytes_written: int
    files_written: int
    bytes: int
    files: int


def save(
    buffer: Checkpointed,
    path: str | os.PathLike[str],
    *,
    incremental: bool = True,
    progress: bool | None = None,
    file_bytes: int | None = None,
) -> Saved:
    """Save everything that a buffer needs to go on with the same batches.

    The checkpoint at ``path`` is replaced in one step, when the new one is on the disk: a save that is killed leaves
    the previous one whole. Rows that are still as in the checkpoint of this buffer at ``path`` are not written again.
    Other threads that use the buffer wait while what has to be written is copied. Above 256 MiB nothing is copied, and
    they wait until all of it is on the disk.

    Args:
        buffer: the buffer.
        path: a folder, created where it doesn't exist. Other files in it are left alone.
        incremental: False writes everything. It is needed after rows were changed in a way that nothing can notice:
            through NumPy, or by the replay of a captured graph that overwrites rows in place.
        progress: show a bar (needs ``rich``); default: on a terminal, for 1 GiB and more.
        file_bytes: size of a file of rows, or of another large tensor; default: a 128th of it, between 1 and 64 MiB.

    Returns:
        How much was written.

    Raises:
        TypeError: something in the state is neither a tensor nor a plain value; the text names it.
        ValueError: the folder holds a ``manifest.json`` of another program, or ``file_bytes`` is below 1.
        OSError: the files can't be written. In all of these cases the previous checkpoint is whole. Synchronises.
    """
    (saved,) = save_parts(
        [buffer], [Path(path)], None, incremental=incremental, progress=progress, file_bytes=file_bytes
    )
    return saved


def part_folder(folder: Path, number: int) -> Path:
    """The folder of one of several buffers in the folder of all."""
    return folder / f"buffer_{number}"


def save_mix(
    buffers: Sequence[Checkpointed],
    state_now: Callable[[], dict[str, Any]],
    path: str | os.PathLike[str],
    **options: Any,
) -> list[Saved]:
    """:func:`save` of several buffers, each to a folder of its own in ``path``, as of one moment.

    One manifest in the folder of all says what each of them holds. It is replaced in one step, when everything is on
    the disk: a save that is killed leaves the previous checkpoint of all the buffers whole.

    Args:
        buffers: the buffers.
        state_now: gives what they share; called while all locks are held.
        path: the folder of all.
        options: ``incremental``, ``progress`` and ``file_bytes``, as for :func:`save`.

    Raises as :func:`save`.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    with files.FolderLock(folder, exclusive=True):
        earlier(folder, files.MixManifest)
        folders = [part_folder(folder, number) for number in range(len(buffers))]

        def commit(parts: list[Manifest], shared: dict[str, Any]) -> None:
            writer = FileWriter(folder)
            state = writer.write("state", [0], shared, 0, 0)
            writer.finish()
            mix = files.MixManifest(writer.id, tuple(parts), state)
            files.write_manifest(folder, mix)
            files.remove_others(folder, mix)

        return save_parts(buffers, folders, commit, state_now, **options)


def save_parts(
    buffers: Sequence[Checkpointed],
    folders: Sequence[Path],
    commit: Callable[[list[Manifest], dict[str, Any]], None] | None,
    shared_now: Callable[[], dict[str, Any]] = dict,
    *,
    incremental: bool = True,
    progress: bool | None = None,
    file_bytes: int | None = None,
) -> list[Saved]:
    """Save buffers as of one moment, each to its folder.

    Args:
        buffers, folders: the buffers, and the folder of each.
        commit: called with what each folder holds, and the state that goes with all of them, when the files are on the
            disk and before the manifests of the folders name them. What it raises leaves those as they are.
        shared_now: gives that state; called while all locks are held.
        incremental, progress, file_bytes: as for :func:`save`.

    Raises as :func:`save`.
    """
    if file_bytes is not None and file_bytes < 1:
        raise ValueError(f"file_bytes must be at least 1, got {file_bytes}")
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)

    def begun() -> tuple[list[_Save], dict[str, Any], bool]:
        saves = [
            _Save(buffer, folder, incremental, file_bytes) for buffer, folder in zip(buffers, folders, strict=True)
        ]
        shared = copied(shared_now(), torch.device("cpu"))
        copies = sum(one.n_bytes_read for one in saves) <= _COPY_BYTES
        for one in saves:
            if copies:
                one.copy()
            else:
                one.write(progress)
        return saves, shared, copies

    def all_of_it() -> list[Saved]:
        saves, shared, copies = under([buffer._lock for buffer in buffers], begun)
        if copies:
            for one in saves:
                one.write(progress)
        if commit is not None:
            for folder in folders:
                serialization.sync_folder(folder)
            commit([one.manifest for one in saves], shared)
        return [one.settle() for one in saves]

    return holding([files.FolderLock(folder, exclusive=True) for folder in folders], all_of_it)


def earlier(folder: Path, kind: type[_M]) -> _M | None:
    """The checkpoint that is there, if it can be built upon.

    Raises:
        ValueError: there is a manifest of another program.
    """
    try:
        return files.read_manifest(folder, kind)
    except FileNotFoundError:
        return None
    except files.ForeignError as error:
        raise ValueError(f"{error}; it would be overwritten") from None
    except DamagedError:
        return None


# What has changed


@dataclass(frozen=True)
class _Fingerprint:
    """When a storage's rows were what a checkpoint holds."""

    written: int
    overwrites: tuple[int, int]
    addresses: tuple[int, ...]
    #: PyTorch counts what it writes in place, also through views; None where it doesn't (tensors of inference mode).
    versions: tuple[int, ...] | None

    @classmethod
    def of(cls, storage: TensorStorage) -> _Fingerprint:
        """That of a storage as it is now."""
        tensors = storage.row_tensors
        versions = None if any(t.is_inference() for t in tensors) else tuple(t._version for t in tensors)
        overwrites = storage.overwrites, 0 if storage._ring is None else storage._ring.updates
        return cls(storage.written, overwrites, tuple(t.data_ptr() for t in tensors), versions)

    def still_holds(self, now: _Fingerprint, capacity: int, start: int, stop: int) -> bool:
        """Whether the rows at positions ``start .. stop`` are certainly still those of then."""
        if now.versions is None or now.written < self.written or replace(now, written=self.written) != self:
            return False
        n_new = now.written - self.written
        first = self.written % capacity
        # The rows written since lie from `first` on, and beyond the seam from 0 on.
        return not any(max(start, first - turn) < min(stop, first - turn + n_new) for turn in (0, capacity))


#: The checkpoints that hold what a storage held at some time, by their random ids.
_fingerprints: WeakKeyDictionary[TensorStorage, dict[str, _Fingerprint]] = WeakKeyDictionary()


def remember(storage: TensorStorage, checkpoint: str, now: _Fingerprint | None = None) -> None:
    """The checkpoint of this id holds what the storage held at ``now``; None: at this moment."""
    known = _fingerprints.setdefault(storage, {})
    known[checkpoint] = _Fingerprint.of(storage) if now is None else now
    while len(known) > _FINGERPRINTS:
        del known[next(iter(known))]


# The save of one buffer


@dataclass
class _Piece:
    """The plan of one file: ``start .. stop`` of some tensors.

    Attributes:
        kind, numbers: of the file.
        span: ``(start, stop)``.
        parts: the tensors; none of them where ``certain``.
        n_bytes: how much they are.
        earlier: a file of the previous checkpoint that may hold the same.
        certain: whether it does.
    """

    kind: Kind
    numbers: list[int]
    span: tuple[int, int]
    parts: list[Tensor]
    n_bytes: int
    earlier: File | None
    certain: bool


class _Save:
    """The save of one buffer: begun with its lock held, copied or written, then settled.

    Attributes:
        manifest: of what was written; it is in place once the save is settled.
    """

    manifest: Manifest

    def __init__(self, buffer: Checkpointed, folder: Path, incremental: bool, file_bytes: int | None) -> None:
        self._folder, self._lock, self._storage = folder, buffer._lock, buffer._storage
        self._id, self._file_bytes = secrets.token_hex(8), file_bytes
        storage = self._storage
        if storage.initialized:
            # A stream that is seeded only later would not be the same in the restored buffer.
            buffer._sampler.random_state(storage.device)
        #: What goes into the file of the state: all but the rows and large tensors.
        self._state = state = buffer.state_dict()
        custom_rows.save(folder, self._id, storage, state)
        known, previous = _fingerprints.get(storage, {}), earlier(folder, Manifest)
        if not incremental or (previous is not None and previous.id not in known):
            previous = None
        self._now = _Fingerprint.of(storage)
        self._counters = (storage.written, len(storage), storage.max_size)
        self._rows: tuple[RowFiles, list[_Piece]] | None = None
        if "rows" in state["_storage"]:
            self._rows = self._pieces_of_rows(previous, None if previous is None else known[previous.id])
            state["_storage"] = {key: value for key, value in state["_storage"].items() if key != "rows"}
        large: list[tuple[Key, Tensor]] = []
        for key, value in list(state.items()):
            state[key] = _without(value, (key,), _LEAST_BYTES if file_bytes is None else file_bytes, large)
        before = {} if previous is None else {tensor.path: tensor for tensor in previous.tensors}
        self._tensors = [self._pieces_of(n, path, tensor, before.get(path)) for n, (path, tensor) in enumerate(large)]

    def _pieces_of_rows(self, previous: Manifest | None, since: _Fingerprint | None) -> tuple[RowFiles, list[_Piece]]:
        storage = self._storage
        layout, shape = storage.layout, storage.shape
        per_step = math.prod(shape[1:])
        steps, step_bytes = len(storage) // per_step, per_step * layout.row_bytes
        leaves = tuple(LeafSpec(leaf.key, _name(leaf.dtype, leaf.name), leaf.shape) for leaf in layout.leaves)
        form = RowFiles(leaves, tuple(_nested_batch(layout.root, ())), (steps, *shape[1:]), ())
        before = None if previous is None else previous.rows
        earlier = before.files if before is not None and before.leaves == leaves else ()

        def certain(start: int, stop: int) -> bool:
            rows = (start * per_step, stop * per_step)
            return since is not None and since.still_holds(self._now, storage.max_size, *rows)

        cuts = spans(steps, shape[0], step_bytes, self._file_bytes)
        return form, self._pieces("rows", [], storage.columns, cuts, step_bytes, earlier, certain)

    def _pieces_of(
        self, number: int, path: Key, tensor: Tensor, before: TensorFiles | None
    ) -> tuple[TensorFiles, list[_Piece]]:
        form = TensorFiles(path, _name(tensor.dtype, ".".join(path)), tuple(tensor.shape), ())
        same = before is not None and (before.dtype, before.shape[1:]) == (form.dtype, form.shape[1:])
        earlier = before.files if before is not None and same else ()
        item_bytes = tensor.nbytes // len(tensor)
        cuts = spans(len(tensor), len(tensor), item_bytes, self._file_bytes)
        return form, self._pieces("tensor", [number], [tensor], cuts, item_bytes, earlier, lambda *_: False)

    def _pieces(
        self,
        kind: Kind,
        numbers: list[int],
        tensors: Sequence[Tensor | Column],
        cuts: list[tuple[int, int]],
        item_bytes: int,
        earlier: Sequence[File],
        certain: Callable[[int, int], bool],
    ) -> list[_Piece]:
        known, pieces = {(file.start, file.stop): file for file in earlier}, []
        for number, (start, stop) in enumerate(cuts):
            file = known.get((start, stop))
            path = None if file is None else self._folder / file.name
            # Somebody may have removed it since.
            if file is not None and path is not None and not (path.is_file() and path.stat().st_size == file.size):
                file = None
            same = file is not None and certain(start, stop)
            parts = [] if same else [tensor[start:stop] for tensor in tensors]
            n_bytes = (stop - start) * item_bytes
            pieces.append(_Piece(kind, [*numbers, number], (start, stop), parts, n_bytes, file, same))
        return pieces

    @property
    def _all_pieces(self) -> Iterator[_Piece]:
        planned = [] if self._rows is None else [self._rows[1]]
        return itertools.chain(*planned, *(pieces for _, pieces in self._tensors))

    @property
    def n_bytes_read(self) -> int:
        """Bytes that have to be looked at: written, or compared with a file."""
        return sum(piece.n_bytes for piece in self._all_pieces if not piece.certain)

    def copy(self) -> None:
        """Take copies of what has to be looked at, on the host: from then on the buffer may change. Synchronises."""
        for piece in self._all_pieces:
            piece.parts = copied(piece.parts, torch.device("cpu"))
        self._state = copied(self._state, torch.device("cpu"))

    def write(self, progress: bool | None) -> None:
        """Bring all of it to the disk."""
        total = sum(piece.n_bytes for piece in self._all_pieces)
        with progress_bar("saving", total, progress, columns=BYTES, least=BAR_BYTES) as advance:
            self._written = writer = FileWriter(self._folder, advance, self._id)
            rows = None
            if self._rows is not None:
                rows = replace(self._rows[0], files=tuple(map(writer.put, self._rows[1])))
            tensors = tuple(replace(form, files=tuple(map(writer.put, pieces))) for form, pieces in self._tensors)
            state = writer.write("state", [0], self._state, 0, 0)
            self.manifest = Manifest(self._id, *self._counters, rows, tensors, state)
            writer.finish()

    def settle(self) -> Saved:
        """Let the folder's manifest name it, and remove what no checkpoint names any more."""
        manifest_bytes = files.write_manifest(self._folder, self.manifest)
        files.remove_others(self._folder, self.manifest)
        custom_rows.settle(self._folder, self._state)
        with self._lock:
            remember(self._storage, self._id, self._now)
        return Saved(
            bytes_written=self._written.bytes + manifest_bytes,
            files_written=self._written.files + 1,
            bytes=sum(file.size for file in self.manifest.files) + manifest_bytes,
            files=len(self.manifest.files) + 1,
        )


def spans(length: int, capacity: int, item_bytes: int, file_bytes: int | None) -> list[tuple[int, int]]:
    """``0 .. length`` in pieces. The cuts depend on the capacity alone, not on the number of rows stored."""
    if file_bytes is None:
        file_bytes = min(max(capacity * item_bytes // _FILES, _LEAST_BYTES), _MOST_BYTES)
    step = max(1, file_bytes // max(1, item_bytes))
    return [(start, min(start + step, length)) for start in range(0, length, step)]


def _name(dtype: torch.dtype, key: str) -> str:
    name = serialization.NAMES.get(dtype)
    if name is None:
        raise TypeError(f"cannot save {key}: it has the dtype {dtype}")
    return name


def _without(value: Any, path: Key, at_least: int, large: list[tuple[Key, Tensor]]) -> Any:
    """``value`` without its large tensors, for which None stands. They go into ``large``, with their paths."""
    if isinstance(value, Tensor) and value.dim() > 0 and value.nbytes >= max(1, at_least):
        large.append((path, value.detach()))
        return None
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        return value
    return {key: _without(item, (*path, key), at_least, large) for key, item in value.items()}


def _nested_batch(node: int | Node, path: Key) -> Iterator[tuple[Key, tuple[int, ...]]]:
    if isinstance(node, int):
        return
    if node.batch_suffix:
        yield path, node.batch_suffix
    for name, child in node.children.items():
        yield from _nested_batch(child, (*path, name))


# Writing


def _flush(paths: SimpleQueue[Path | None], flushed: SimpleQueue[BaseException | None]) -> None:
    """Bring files to the disk, and tell of each. None ends this thread and all others."""
    while (path := paths.get()) is not None:
        error: BaseException | None = None
        try:
            serialization.sync(path)
        except BaseException as failure:
            error = failure
        flushed.put(error)
        del error
    paths.put(None)


class FileWriter:
    """Writes the files of one save, except for those that are there already.

    An interrupt may strike anywhere: no thread pool, which would keep a lock that whoever comes next waits for.
    """

    def __init__(self, folder: Path, advance: Advance = lambda _: None, save_id: str | None = None) -> None:
        self._folder, self._advance = folder, advance
        self.id = secrets.token_hex(8) if save_id is None else save_id
        self.bytes = self.files = 0
        # A file system that waits for one file at a time would take twice as long.
        self._paths, self._flushed = SimpleQueue[Path | None](), SimpleQueue[BaseException | None]()
        weakref.finalize(self, self._paths.put, None).atexit = False

    def finish(self) -> None:
        """Wait until all that was written is on the disk."""
        for _ in range(self.files):
            if (error := self._flushed.get()) is not None:
                raise error

    def write(self, kind: Kind, numbers: list[int], state: Mapping[str, Any], start: int, stop: int) -> File:
        """A new file."""
        name = files.file_name(kind, numbers, self.id)
        path = self._folder / name
        size, checksum = serialization.write(path, serialization.contents(state))
        if self.files < _FLUSHING:
            _thread.start_new_thread(_flush, (self._paths, self._flushed))
        self._paths.put(path)
        self.bytes, self.files = self.bytes + size, self.files + 1
        return File(name, size, checksum, start, stop)

    def put(self, piece: _Piece) -> File:
        """The file of a piece: the earlier one, if it holds the same, or a new one."""
        file, state = piece.earlier, {"parts": piece.parts}
        held = file is not None and (
            piece.certain or serialization.holds(self._folder / file.name, serialization.contents(state))
        )
        if file is None or not held:
            file = self.write(piece.kind, piece.numbers, state, *piece.span)
        piece.parts = []
        self._advance(piece.n_bytes)
        return file
