"""Checkpoints of a buffer: saved in files of which only those that changed are written again, restored exactly.

See :mod:`gpubuf.data.checkpoints.snapshot` for what is written, :mod:`gpubuf.data.checkpoints.manifest` for the files,
and :mod:`gpubuf.data.checkpoints.validate` for what is verified.
"""

from __future__ import annotations

import _thread
import functools
import itertools
import os
import secrets
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from weakref import WeakKeyDictionary

import torch

from gpubuf import serialization
from gpubuf.data.checkpoints import apart
from gpubuf.data.checkpoints import manifest as files
from gpubuf.data.checkpoints.manifest import DamagedError, File, Manifest
from gpubuf.data.checkpoints.parts import Parts
from gpubuf.data.checkpoints.reading import pieces, read
from gpubuf.data.checkpoints.snapshot import Piece, Snapshot
from gpubuf.data.checkpoints.validate import check
from gpubuf.data.lock import BufferLock, holding, under
from gpubuf.data.prefetch import copied
from gpubuf.data.storage.tensor_storage import TensorStorage
from gpubuf.terminal import BYTES, Advance, progress_bar

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
    (saved,) = _save([Member(lock, parts_now, Path(path))], None, incremental, progress, file_bytes)
    return saved


@dataclass(frozen=True)
class Member:
    """A buffer that is saved or loaded: its lock, its parts (called while the lock is held), and its folder."""

    lock: BufferLock
    parts_now: Callable[[], Parts]
    folder: Path


def save_mix(
    members: Sequence[Member],
    state_now: Callable[[], dict[str, Any]],
    path: str | os.PathLike[str],
    *,
    incremental: bool = True,
    progress: bool | None = None,
    file_bytes: int | None = None,
) -> list[Saved]:
    """:func:`save` of several buffers, each to its own folder, as of one moment.

    One manifest in the folder of all says what each of them holds. It is replaced in one step, when everything is on
    the disk: a save that is killed leaves the previous checkpoint of all the buffers whole.

    Args:
        members: the buffers.
        state_now: gives what they share; called while all locks are held.
        path: the folder of all.
        incremental, progress, file_bytes: as for :func:`save`.

    Raises as :func:`save`.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    with files.FolderLock(folder, exclusive=True):
        try:
            files.read_mix(folder)
        except files.ForeignError as error:
            raise ValueError(f"{error}; it would be overwritten") from None
        except (FileNotFoundError, DamagedError):
            pass
        return _save(members, (folder, state_now), incremental, progress, file_bytes)


def _save(
    members: Sequence[Member],
    whole: tuple[Path, Callable[[], dict[str, Any]]] | None,
    incremental: bool,
    progress: bool | None,
    file_bytes: int | None,
) -> list[Saved]:
    if file_bytes is not None and file_bytes < 1:
        raise ValueError(f"file_bytes must be at least 1, got {file_bytes}")
    for member in members:
        member.folder.mkdir(parents=True, exist_ok=True)

    def save_all() -> list[Saved]:
        def snapshots() -> tuple[list[_Save], dict[str, Any], bool]:
            saves = [_Save(member, incremental, file_bytes) for member in members]
            shared = {} if whole is None else copied(whole[1](), torch.device("cpu"))
            copies = sum(one.snapshot.n_bytes_read for one in saves) <= _COPY_BYTES
            for one in saves:
                if copies:
                    one.snapshot.copy()
                else:
                    one.write(progress)
            return saves, shared, copies

        saves, shared, copies = under([member.lock for member in members], snapshots)
        if copies:
            for one in saves:
                one.write(progress)
        if whole is not None:
            folder, save_id = whole[0], secrets.token_hex(8)
            writer = _Writer(folder, save_id, lambda _: None)
            state = writer.write("state", [0], shared, 0, 0)
            writer.finish()
            for member in members:
                serialization.sync_folder(member.folder)
            mix = files.MixManifest(save_id, tuple(one.manifest for one in saves), state)
            files.write_manifest(folder, mix)
            files.remove_others(folder, mix)
        return [one.settle() for one in saves]

    return holding([files.FolderLock(member.folder, exclusive=True) for member in members], save_all)


class _Save:
    """The save of one buffer: begun with its lock held, then written, then settled.

    Attributes:
        snapshot: what is to be written.
        manifest: of what was written; it is in place once the save is settled.
    """

    manifest: Manifest

    def __init__(self, member: Member, incremental: bool, file_bytes: int | None) -> None:
        self._folder, self._lock = member.folder, member.lock
        parts = member.parts_now()
        storage = parts.storage
        if storage.initialized:
            # A stream that is seeded only later would not be the same in the restored buffer.
            parts.sampler.random_state(storage.device)
        self._state, self._id = parts.state_dict(), secrets.token_hex(8)
        apart.put(self._folder, self._id, storage, self._state)
        self._known = _fingerprints.setdefault(storage, {})
        previous = _previous(self._folder)
        if not incremental or (previous is not None and previous.id not in self._known):
            previous = None
        self._now = _fingerprint(storage)
        since = None if previous is None else self._known[previous.id]
        same = functools.partial(_unchanged, since, self._now, storage.max_size)
        self.snapshot = Snapshot(self._folder, storage, self._state, previous, same, file_bytes)

    def write(self, progress: bool | None) -> None:
        """Bring all of it to the disk."""
        snapshot = self.snapshot
        with progress_bar("saving", snapshot.n_bytes, progress, columns=BYTES, least=_BAR_BYTES) as advance:
            writer = _Writer(self._folder, self._id, advance)
            state = functools.partial(writer.write, "state", [0], snapshot.state, 0, 0)
            self.manifest = snapshot.manifest(self._id, writer.put, state)
            writer.finish()
        self._written = writer

    def settle(self) -> Saved:
        """Let the folder's manifest name it, and remove what no checkpoint names any more."""
        manifest_bytes = files.write_manifest(self._folder, self.manifest)
        files.remove_others(self._folder, self.manifest)
        apart.settle(self._folder, self._state)
        with self._lock:
            _remember(self._known, self._id, self._now)
        return Saved(
            bytes_written=self._written.bytes + manifest_bytes,
            files_written=self._written.files + 1,
            bytes=sum(file.size for file in self.manifest.files) + manifest_bytes,
            files=len(self.manifest.files) + 1,
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
    folder = _existing(path)
    with files.FolderLock(folder, exclusive=False):
        member = Member(lock, parts_now, folder)
        _load([member], [files.read_manifest(folder)], None, progress)


def load_mix(
    members: Sequence[Member],
    path: str | os.PathLike[str],
    restore: Callable[[list[dict[str, Any]], dict[str, Any] | None], None],
    *,
    progress: bool | None = None,
) -> None:
    """Restore what :func:`save_mix` wrote: all of the buffers, or none.

    Args:
        members: the buffers.
        path: the folder of all.
        restore: restores the states of the buffers, and what they share. Called with all locks held, after everything
            was verified that can be. What they share is None for a checkpoint of an earlier release, which has none,
            and no manifest of all.
        progress: as for :func:`load`.

    Raises as :func:`load`; ValueError also for a checkpoint of another number of buffers.
    """
    folder = _existing(path)
    with files.FolderLock(folder, exclusive=False):
        shared: dict[str, Any] | None = None
        if (folder / files.MANIFEST).exists() or not (members[0].folder / files.MANIFEST).exists():
            mix = files.read_mix(folder)
            manifests, shared = list(mix.parts), files.open_file(folder, mix.state)
            files.need(
                isinstance(shared.get("_transforms"), dict), f"{folder} has no state of the transforms of the mix"
            )
        else:
            # Of an earlier release.
            n = sum(1 for _ in itertools.takewhile(lambda k: (folder / f"buffer_{k}").is_dir(), itertools.count()))
            manifests = [files.read_manifest(folder / f"buffer_{k}") for k in range(n)]
        if len(manifests) != len(members):
            raise ValueError(f"the checkpoint at {folder} is of {len(manifests)} buffers, here are {len(members)}")
        holding(
            [files.FolderLock(_existing(member.folder), exclusive=False) for member in members],
            lambda: _load(members, manifests, lambda states: restore(states, shared), progress),
        )


def _existing(path: str | os.PathLike[str]) -> Path:
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no checkpoint at {folder}")
    return folder


def _load(
    members: Sequence[Member],
    manifests: Sequence[Manifest],
    restore: Callable[[list[dict[str, Any]]], None] | None,
    progress: bool | None,
) -> None:
    # Every file is read, and its rows are copied.
    total = 2 * sum(file.size for manifest in manifests for file in manifest.files)
    with progress_bar("loading", total, progress, columns=BYTES, least=_BAR_BYTES) as advance:
        found = [read(one.folder, manifest, advance) for one, manifest in zip(members, manifests, strict=True)]

        def replace_all() -> None:
            loaded = []
            for member, manifest, (state, row_parts) in zip(members, manifests, found, strict=True):
                parts = member.parts_now()
                check(parts, apart.take(member.folder, manifest, parts.storage, state), state)
                if manifest.rows is not None:
                    state["_storage"]["rows"] = pieces(parts.storage, manifest.rows, row_parts, advance)
                loaded.append((parts, manifest, state))
            if restore is None:
                for parts, _, state in loaded:
                    parts.load_state_dict(state)
            else:
                restore([state for _, _, state in loaded])
            for parts, manifest, _ in loaded:
                storage = parts.storage
                if storage.max_size == manifest.capacity and manifest.rows is not None:
                    _remember(_fingerprints.setdefault(storage, {}), manifest.id, _fingerprint(storage))

        under([member.lock for member in members], replace_all)


# Search for changes


def _previous(folder: Path) -> Manifest | None:
    """The checkpoint that is there, if it can be built upon."""
    try:
        return files.read_manifest(folder)
    except FileNotFoundError:
        return None
    except files.ForeignError as error:
        raise ValueError(f"{error}; it would be overwritten") from None
    except DamagedError:
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


class _Writer:
    """Writes the files of one save, except for those that are there already.

    An interrupt may strike anywhere: no thread pool, which would keep a lock that whoever comes next waits for.
    """

    def __init__(self, folder: Path, save_id: str, advance: Advance) -> None:
        self._folder, self._id, self._advance = folder, save_id, advance
        self.bytes = self.files = 0
        # A file system that waits for one file at a time would take twice as long.
        self._paths, self._flushed = SimpleQueue[Path | None](), SimpleQueue[BaseException | None]()
        weakref.finalize(self, self._paths.put, None).atexit = False

    def finish(self) -> None:
        """Wait until all that was written is on the disk."""
        for _ in range(self.files):
            if (error := self._flushed.get()) is not None:
                raise error

    def write(self, kind: files.Kind, numbers: list[int], state: Mapping[str, Any], start: int, stop: int) -> File:
        name = files.file_name(kind, numbers, self._id)
        path = self._folder / name
        size, checksum = serialization.write(path, serialization.contents(state))
        if self.files < _FLUSHING:
            _thread.start_new_thread(_flush, (self._paths, self._flushed))
        self._paths.put(path)
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
