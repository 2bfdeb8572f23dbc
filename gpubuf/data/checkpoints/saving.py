"""Checkpoints of a buffer: saved in files of which only those that changed are written again, restored exactly.

See :mod:`gpubuf.data.checkpoints.snapshot` for what is written, :mod:`gpubuf.data.checkpoints.manifest` for the files,
and :mod:`gpubuf.data.checkpoints.validate` for what is verified.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from gpubuf import serialization
from gpubuf.data.checkpoints import apart
from gpubuf.data.checkpoints import manifest as files
from gpubuf.data.checkpoints.manifest import DamagedError, File, Manifest
from gpubuf.data.checkpoints.parts import Parts
from gpubuf.data.checkpoints.reading import pieces, read
from gpubuf.data.checkpoints.snapshot import Piece, Snapshot
from gpubuf.data.checkpoints.validate import check
from gpubuf.data.concurrency.locking import BufferLock
from gpubuf.data.storages.tensor_storage import TensorStorage
from gpubuf.progress import BYTES, Advance, progress_bar

#: Up to so much is copied, so that the buffer can be used while it is written.
_COPY_BYTES = 1 << 28
_BAR_BYTES = 1 << 30
_FINGERPRINTS = 8
_FLUSHING = 4


@dataclass(frozen=True)
class Saved:
    """The result of a save: bytes and files that it wrote, and those that make up the checkpoint."""

    bytes_written: int
    files_written: int
    bytes: int
    files: int


@dataclass(frozen=True)
class _Fingerprint:
    """When a storage's rows were what a checkpoint holds."""

    written: int
    overwrites: tuple[int, int]
    addresses: tuple[int, ...]
    #: PyTorch counts what it writes in place, also through views; None where it doesn't (tensors of inference mode).
    versions: tuple[int, ...] | None


#: The checkpoints that hold what a storage held at some time, by their random ids.
_fingerprints: WeakKeyDictionary[TensorStorage, dict[str, _Fingerprint]] = WeakKeyDictionary()


def save(
    lock: BufferLock,
    parts_now: Callable[[], Parts],
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
        lock: of the buffer.
        parts_now: gives the buffer's parts; called while the lock is held.
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
    if file_bytes is not None and file_bytes < 1:
        raise ValueError(f"file_bytes must be at least 1, got {file_bytes}")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    with files.locked(folder, exclusive=True), contextlib.ExitStack() as locked:
        locked.enter_context(lock.taken())
        parts = parts_now()
        storage = parts.storage
        if storage.initialized:
            # A stream that is seeded only later would not be the same in the restored buffer.
            parts.sampler.random_state(storage.device)
        state, save_id = parts.state_dict(), secrets.token_hex(8)
        apart.put(folder, save_id, storage, state)
        known = _fingerprints.setdefault(storage, {})
        previous = _previous(folder)
        if not incremental or (previous is not None and previous.id not in known):
            previous = None
        now = _fingerprint(storage)
        since = None if previous is None else known[previous.id]
        same = functools.partial(_unchanged, since, now, storage.max_size)
        snapshot = Snapshot(folder, storage, state, previous, same, file_bytes)
        if snapshot.n_bytes_read <= _COPY_BYTES:
            snapshot.copy()
            locked.close()
        with (
            progress_bar("saving", snapshot.n_bytes, progress, columns=BYTES, least=_BAR_BYTES) as advance,
            _Writer(folder, save_id, advance) as writer,
        ):
            manifest = snapshot.manifest(save_id, writer.put, lambda: writer.write("state", [0], snapshot.state, 0, 0))
            writer.finish()
        manifest_bytes = files.write_manifest(folder, manifest)
        files.remove_others(folder, manifest)
        apart.settle(folder, state)
        with lock:
            _remember(known, save_id, now)
    return Saved(
        bytes_written=writer.bytes + manifest_bytes,
        files_written=writer.files + 1,
        bytes=sum(file.size for file in manifest.files) + manifest_bytes,
        files=len(manifest.files) + 1,
    )


def load(
    lock: BufferLock, parts_now: Callable[[], Parts], path: str | os.PathLike[str], *, progress: bool | None = None
) -> None:
    """Restore what :func:`save` wrote, into the memory that the buffer has.

    Everything is read and verified before anything changes. The buffer may be on another device than the saved one was,
    and may have more room; with the same capacity it goes on with the same batches. No code is run, and no file outside
    of ``path`` is read.

    Args:
        lock: of the buffer.
        parts_now: gives the buffer's parts; called while the lock is held. The sampler must be of the same class, and
            the transforms must have the same entries.
        path: the folder.
        progress: as for :func:`save`.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: the checkpoint is damaged, incomplete, foreign, or of a newer version, or doesn't fit the buffer.
            The buffer is as it was. Synchronises.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no checkpoint at {folder}")
    with files.locked(folder, exclusive=False):
        manifest = files.read_manifest(folder)
        # Every file is read, and its rows are copied.
        total = 2 * sum(file.size for file in manifest.files)
        with progress_bar("loading", total, progress, columns=BYTES, least=_BAR_BYTES) as advance:
            state, row_parts = read(folder, manifest, advance)
            with lock:
                parts = parts_now()
                storage = parts.storage
                read_apart = apart.take(folder, manifest, storage, state)
                check(parts, read_apart, state)
                if manifest.rows is not None:
                    state["_storage"]["rows"] = pieces(storage, manifest.rows, row_parts, advance)
                parts.load_state_dict(state)
                if storage.max_size == manifest.capacity and manifest.rows is not None:
                    _remember(_fingerprints.setdefault(storage, {}), manifest.id, _fingerprint(storage))


# Search for changes


def _previous(folder: Path) -> Manifest | None:
    """The checkpoint that is there, if it can be built upon."""
    try:
        return files.read_manifest(folder)
    except FileNotFoundError:
        return None
    except DamagedError as error:
        if "is not the manifest of a gpubuf checkpoint" in str(error):
            raise ValueError(f"{error}; it would be overwritten") from None
        return None


def _fingerprint(storage: TensorStorage) -> _Fingerprint:
    tensors = storage.row_tensors
    versions = None if any(t.is_inference() for t in tensors) else tuple(t._version for t in tensors)
    overwrites = storage.overwrites, 0 if storage._ring is None else storage._ring.updates
    return _Fingerprint(storage.written, overwrites, tuple(t.data_ptr() for t in tensors), versions)


def _remember(known: dict[str, _Fingerprint], checkpoint: str, now: _Fingerprint) -> None:
    known[checkpoint] = now
    while len(known) > _FINGERPRINTS:
        del known[next(iter(known))]


def _unchanged(since: _Fingerprint | None, now: _Fingerprint, capacity: int, start: int, stop: int) -> bool:
    """Whether the rows at positions ``start .. stop`` are certainly those of then."""
    if since is None or now.versions is None or now.written < since.written:
        return False
    if replace(now, written=since.written) != since:
        return False
    n_new = now.written - since.written
    first = since.written % capacity
    # The rows written since lie from `first` on, and beyond the seam from 0 on.
    return not any(max(start, first - turn) < min(stop, first - turn + n_new) for turn in (0, capacity))


# Writing


class _Writer:
    """Writes the files of one save, except for those that are there already."""

    def __init__(self, folder: Path, save_id: str, advance: Advance) -> None:
        self._folder, self._id, self._advance = folder, save_id, advance
        self.bytes = self.files = 0
        # A file system that waits for one file at a time would take twice as long.
        self._disk = ThreadPoolExecutor(_FLUSHING)
        self._flushes: list[Future[None]] = []

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._disk.shutdown()

    def finish(self) -> None:
        """Wait until all that was written is on the disk."""
        for flush in self._flushes:
            flush.result()

    def write(self, kind: files.Kind, numbers: list[int], state: Mapping[str, Any], start: int, stop: int) -> File:
        name = files.file_name(kind, numbers, self._id)
        path = self._folder / name
        size, checksum = serialization.write(path, serialization.contents(state))
        self._flushes.append(self._disk.submit(serialization.sync, path))
        self.bytes, self.files = self.bytes + size, self.files + 1
        return File(name, size, checksum, start, stop)

    def put(self, piece: Piece) -> File:
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
