"""Rows in files: one memory-mapped file per key, the ring's counters, JSON that says what is there, temporary folders.

The layout of a folder is that of a memory-mapped TensorDict inside TorchRL's ``storage/``, so that either side opens
what the other has written: ``meta.json`` lists the entries of one level with shape and dtype, a tensor lies in
``<key>.memmap``, a nested TensorDict in the folder ``<key>/``, and ``storage_metadata.json`` says how much is valid.
Everything read is checked before a byte is mapped; nothing is unpickled, and no class is looked up by name.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import mmap
import os
import stat
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from gpubuf import serialization
from gpubuf.data.arguments import warn
from gpubuf.data.storage.containers import Data
from gpubuf.data.storage.layout import Key, Node, RowLayout
from gpubuf.kernels import rows
from gpubuf.system import OPENING, lock

logger = logging.getLogger("gpubuf")

META_FILE = "meta.json"
STORAGE_FILE = "storage_metadata.json"
GPUBUF_FILE = "gpubuf.json"
COUNTERS_FILE = "gpubuf.counters"
MARKS_FILE = "gpubuf.marks"
LOCK_FILE = "gpubuf.lock"  # in temporary folders
TEMPORARY = "gpubuf-"
"""How the name of a temporary folder begins."""
TENSOR_NAME = "_-single-tensor-_"  # of the only file of a storage that holds a plain tensor

_TENSORCLASS_FOLDER = "_tensordict"
_FORMAT_VERSION = 1
_MAX_DEPTH = 32
_MAX_ELEMENTS = 1 << 60
_DTYPES = {str(dtype): dtype for dtype in serialization.NAMES}
# Characters that a file name can't hold on some system; tensordict writes the same characters in the same way.
_UNSAFE = {ord(c): f"%{ord(c):02X}" for c in '%/\\:*?"<>| ' + "".join(map(chr, (*range(32), 127)))}
# Entries of meta.json that are not keys.
_RESERVED = frozenset({"shape", "device", "_type", "_format_version", "_class"})
#: What is being written: nothing, rows at the cursor, rows by index, all rows.
IDLE, APPENDING, OVERWRITING, REPLACING = range(4)
#: Words of the file of counters, after the ring's: that; the ring's counters before it; how many rows; which ones.
_STATE, _WRITTEN, _SIZE, _ROWS, _NAMED, COUNTER_WORDS = 4, 5, 6, 7, 8, 64
_CHUNK_BYTES = 1 << 26
_PATIENCE = 1.0


def encoded(name: str) -> str:
    """The part of a path that stands for one name of a key."""
    if name in ("", ".", ".."):
        return "%2E" * len(name) or "%"
    return name.translate(_UNSAFE)


def tensor_file(folder: Path, key: Key) -> Path:
    """The file of a key; the empty key is that of a plain tensor."""
    names = [encoded(name) for name in key] or [TENSOR_NAME]
    return folder.joinpath(*names[:-1], f"{names[-1]}.memmap")


def is_own(name: str) -> bool:
    """Whether a file of this name may be one of a storage."""
    known = (META_FILE, STORAGE_FILE, GPUBUF_FILE, COUNTERS_FILE, MARKS_FILE)
    return name.endswith(".memmap") or name.removesuffix(".tmp") in known


# Opening


def open_file(path: Path, flags: int, root: Path | None = None) -> int:
    """A descriptor of a regular file. Links on the way from ``root`` to it are refused.

    Args:
        path: the file.
        flags: as for ``os.open``. With ``os.O_CREAT`` missing folders are made.
        root: a folder above the file; it may be reached through links. None: the one that the file is in.

    Raises:
        FileExistsError: with ``os.O_EXCL``: there is something at ``path``.
        ValueError: the file is missing, is a link or something else than a file, or lies in a folder that is a link.
    """
    refuse_links(path, path.parent if root is None else root)
    if flags & os.O_CREAT:
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        # Not blocking: to open a pipe does not wait for its other end.
        descriptor = os.open(path, flags | OPENING | os.O_NONBLOCK, 0o666)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO):
            raise
        raise ValueError(f"{path} is not a regular file") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path} is not a regular file")
    return descriptor


def refuse_links(path: Path, root: Path) -> None:
    """Raise a ValueError if a folder between ``root`` and ``path`` is a link, or ``path`` itself."""
    for part in (path, *path.parents):
        if part == root:
            return
        if part.is_symlink():
            raise ValueError(f"{part} is a link: links are refused")


# Mapping


def map_file(
    path: Path, dtype: torch.dtype, shape: tuple[int, ...], *, writable: bool, root: Path | None = None
) -> Tensor:
    """A tensor on the bytes of a file, which must be exactly as long as the tensor.

    Args:
        path: the file.
        dtype: of the tensor.
        shape: of the tensor.
        writable: changes go to the file. Otherwise the tensor must not be written to: its memory is protected.
        root: as for :func:`open_file`.

    Raises:
        ValueError: as :func:`open_file`; the file has another size.
    """
    n_bytes = math.prod(shape) * dtype.itemsize
    if n_bytes == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")  # an empty file can't be mapped, and TorchRL writes none
    with os.fdopen(open_file(path, os.O_RDWR if writable else os.O_RDONLY, root), "r+b" if writable else "rb") as file:
        found = os.fstat(file.fileno()).st_size
        if found != n_bytes:
            raise ValueError(f"{path} has {found} bytes, but {list(shape)} of {dtype} take {n_bytes}")
        memory = mmap.mmap(file.fileno(), n_bytes, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
    return torch.from_numpy(np.asarray(_Mapping(memory))).view(dtype).view(shape)


class _Mapping:
    """A mapping in the form that NumPy accepts.

    A private mapping could be written to, but Linux refuses one that is larger than memory; and PyTorch warns of arrays
    that say that they are read-only.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        address = np.frombuffer(memory, np.uint8).ctypes.data
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (len(memory),), "data": (address, False)}


def create_file(path: Path, dtype: torch.dtype, shape: tuple[int, ...], root: Path | None = None) -> Tensor:
    """A new file of zeros, and a writable tensor on it. The file is sparse: it takes space as it is written to.

    Raises as :func:`open_file` for a new file.
    """
    n_bytes = math.prod(shape) * dtype.itemsize
    if n_bytes:
        with os.fdopen(open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, root), "r+b") as file:
            file.truncate(n_bytes)
    return map_file(path, dtype, shape, writable=True, root=root)


def sync_file(path: Path, root: Path | None = None) -> None:
    """Wait until everything written to a file, through a mapping too, is on the disk."""
    if path.exists():
        with os.fdopen(open_file(path, os.O_RDONLY, root), "rb") as file:
            os.fsync(file.fileno())


# Metadata


def write_json(path: Path, content: Any) -> None:
    """Write a small JSON file. Only the complete new file replaces an old one."""
    serialization.replace(path, [json.dumps(content).encode()])


def read_json(path: Path, root: Path | None = None) -> dict[str, Any]:
    """Read a small JSON file that holds an object.

    Raises:
        ValueError: as :func:`open_file`; it holds something else.
    """
    with os.fdopen(open_file(path, os.O_RDONLY, root), encoding="utf-8") as file:
        try:
            content = json.loads(file.read())
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{path} can't be read: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not an object")
    return content


def is_count(value: Any) -> bool:
    """Whether a value read from JSON is an integer of at least 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def read_count(content: dict[str, Any], name: str, path: Path) -> int:
    """An integer of at least 0 from the result of :func:`read_json`."""
    value: Any = content.get(name)
    if not is_count(value):
        raise ValueError(f"{path}: {name!r} must be an integer of at least 0, not {value!r}")
    return int(value)


def write_metadata(folder: Path, layout: RowLayout, shape: tuple[int, ...], size: int) -> None:
    """Describe the rows of a folder whose files are there: ``meta.json`` of every level, and the number of rows.

    Args:
        folder: where the rows are.
        layout: what a row looks like. Tensorclasses are written as the TensorDicts that they are made of.
        shape: of the full storage.
        size: number of valid rows, counted as TorchRL does, along all dimensions that index rows.
    """
    plain: dict[str, Any] = {}
    if isinstance(layout.root, int):
        leaf = layout.leaves[layout.root]
        plain[TENSOR_NAME] = {"dtype": str(leaf.dtype), "shape": [*shape, *leaf.shape]}
    else:
        _write_level(folder, folder, layout, layout.root, shape)
    write_json(folder / STORAGE_FILE, {"metadata": plain, "is_pytree": bool(plain), "len": size})


def _write_level(root: Path, folder: Path, layout: RowLayout, node: Node, shape: tuple[int, ...]) -> None:
    refuse_links(folder, root)
    folder.mkdir(parents=True, exist_ok=True)
    entries: dict[str, Any] = {}
    for name, child in node.children.items():
        if isinstance(child, int):
            leaf = layout.leaves[child]
            full = [*shape, *leaf.shape]
            entries[name] = {"device": "cpu", "shape": full, "dtype": str(leaf.dtype), "is_nested": False}
        else:
            entries[name] = {"type": "TensorDict"}
            _write_level(root, folder / encoded(name), layout, child, shape)
    write_json(
        folder / META_FILE,
        {
            **entries,
            "shape": [*shape, *node.batch_suffix],
            "device": "cpu",
            "_type": "<class 'tensordict._td.TensorDict'>",
            "_format_version": _FORMAT_VERSION,
            "_class": "tensordict:TensorDict",
        },
    )


def check_names(layout: RowLayout) -> None:
    """Refuse keys that can't be told apart from metadata.

    Raises:
        ValueError: there are any.
    """
    for leaf in layout.leaves:
        for name in leaf.key:
            if name in _RESERVED:
                raise ValueError(f"key {leaf.name}: the name {name!r} is taken by the metadata of memory-mapped files")


def read_rows(folder: Path, *, writable: bool, root: Path | None = None) -> tuple[Data, int]:
    """Map the rows of a folder, without reading them.

    Args:
        folder: where the rows are.
        writable: changes go to the files.
        root: links are refused below it; None: below ``folder``.

    Returns:
        A TensorDict or a tensor on the files, as long as the full storage, and the number of valid rows.

    Raises:
        ValueError: a file is missing, damaged, of another size than the metadata says, or of a kind that is not
            supported (non-tensor data, nested tensors, several tensors in a list).
    """
    root = folder if root is None else root
    path = folder / STORAGE_FILE
    if not os.path.lexists(path):
        raise ValueError(f"{folder} holds no memory-mapped storage: there is no {STORAGE_FILE}")
    content = read_json(path, root)
    size = read_count(content, "len", path)
    if not content.get("is_pytree"):
        return _read_level(root, folder, (), writable, 0), size
    entries = content.get("metadata")
    if not isinstance(entries, dict) or list(entries) != [TENSOR_NAME]:
        raise ValueError(f"{path}: only single tensors and TensorDicts can be read, this is a tree of {entries!r}")
    dtype, shape = _described(entries[TENSOR_NAME], (), path, TENSOR_NAME)
    return map_file(tensor_file(folder, ()), dtype, shape, writable=writable, root=root), size


def _read_level(root: Path, folder: Path, batch: tuple[int, ...], writable: bool, depth: int) -> TensorDict:
    if depth > _MAX_DEPTH:
        raise ValueError(f"{folder}: nested more than {_MAX_DEPTH} levels deep")
    path = folder / META_FILE
    content = read_json(path, root)
    if "shape" not in content and (folder / _TENSORCLASS_FOLDER).is_dir():
        return _read_level(root, folder / _TENSORCLASS_FOLDER, batch, writable, depth + 1)
    version = content.get("_format_version", 0)
    if not isinstance(version, int) or version > _FORMAT_VERSION:
        raise ValueError(f"{path} has the format version {version!r}, this reads up to {_FORMAT_VERSION}")
    shape = _shape(content.get("shape"), batch, path, "shape")
    source: dict[str, Any] = {}
    for name, entry in content.items():
        if name in _RESERVED:
            continue
        if isinstance(entry, dict) and "type" in entry:
            if "NonTensor" in str(entry["type"]):
                raise ValueError(f"{path}: {name!r} holds non-tensor data, which can't be stored")
            source[name] = _read_level(root, folder / encoded(name), shape, writable, depth + 1)
        else:
            dtype, size = _described(entry, shape, path, name)
            source[name] = map_file(tensor_file(folder, (name,)), dtype, size, writable=writable, root=root)
    return TensorDict(source, shape, device="cpu")


def _described(entry: Any, batch: tuple[int, ...], path: Path, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
    if not isinstance(entry, dict) or entry.get("is_nested"):
        raise ValueError(f"{path}: {name!r} is not a tensor: {entry!r}")
    dtype = _DTYPES.get(str(entry.get("dtype")))
    if dtype is None:
        raise ValueError(f"{path}: {name!r} has the unknown dtype {entry.get('dtype')!r}")
    return dtype, _shape(entry.get("shape"), batch, path, name)


def _shape(value: Any, batch: tuple[int, ...], path: Path, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in value):
        raise ValueError(f"{path}: the shape of {name!r} must be a list of integers, not {value!r}")
    if math.prod(max(n, 1) for n in value) >= _MAX_ELEMENTS:
        raise ValueError(f"{path}: the shape {value} of {name!r} is larger than any tensor can be")
    if tuple(value[: len(batch)]) != batch:
        raise ValueError(f"{path}: {name!r} has shape {value}, but belongs to rows of shape {list(batch)}")
    return tuple(value)


# What a write is about to do


class Counters:
    """The file of a ring's counters, which also says what is being written.

    A process that is killed leaves in the files what it has stored until then, in the order in which it stored it. So a
    write first notes which rows it is about to write, and takes the note back at its end. Who opens the folder next
    finds it: rows that a write at the cursor may have left in pieces are dropped, those given by index are named. This
    is about processes; after a crash of the machine the disk may hold later bytes without earlier ones.

    Args:
        path: the file.

    Attributes:
        ring: the counters, int64 ``[4]``.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = open_file(path, os.O_RDWR)
        found = os.fstat(self._descriptor).st_size
        if found != 8 * COUNTER_WORDS:
            raise ValueError(f"{path} has {found} bytes, but {COUNTER_WORDS} counters take {8 * COUNTER_WORDS}")
        self._alone = self._lock()
        memory = mmap.mmap(self._descriptor, found)
        self._words, self._all = memoryview(memory).cast("q"), torch.frombuffer(memory, dtype=torch.int64)
        self.ring = self._all[:_STATE]

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # The names of modules may be gone when the interpreter ends.
        if hasattr(self, "_descriptor"):
            close(self._descriptor)

    def _lock(self) -> bool:
        """Hold the file for as long as this object is there; False: another one holds it."""
        try:
            lock(self._descriptor, wait=False)
        except BlockingIOError:
            return False
        return True

    def appending(self, n: int) -> Self:
        """``with counters.appending(n):`` around a write of ``n`` rows at the cursor."""
        return self._noted(APPENDING, n)

    def overwriting(self, index: Tensor) -> Self:
        """``with counters.overwriting(index):`` around a write of rows at positions, int64 ``[n]``."""
        named = index.reshape(-1)[: COUNTER_WORDS - _NAMED]
        self._all[_NAMED : _NAMED + len(named)] = named
        return self._noted(OVERWRITING, index.numel())

    def replacing(self) -> Self:
        """``with counters.replacing():`` while all rows are replaced: until it ends none of them counts."""
        return self._noted(REPLACING, 0)

    def _noted(self, state: int, n: int) -> Self:
        words = self._words
        words[_WRITTEN], words[_SIZE], words[_ROWS] = words[rows.WRITTEN], words[rows.SIZE], n
        # Last, for it makes the others count.
        words[_STATE] = state
        return self

    def __enter__(self) -> None:
        """What is about to be written is noted."""

    def __exit__(self, *error: object) -> None:
        self._words[_STATE] = IDLE

    def recover(self, columns: Sequence[Tensor], capacity: int) -> None:
        """Drop or name the rows of a write that a killed process has left unfinished, if there is one.

        Of a ring that had gone round, a write at the cursor replaces the oldest rows: the others are moved to the
        beginning, O(capacity).

        Args:
            columns: the rows, ``[capacity, ...]`` for each key.
            capacity: rows.

        Raises:
            RuntimeError: the process is still there.
        """
        words = self._words
        deadline = time.monotonic() + _PATIENCE
        while words[_STATE] != IDLE and not (self._alone or self._lock()):
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{self._path.parent}: a write is unfinished, and another process, or another storage of this one, "
                    "has the files open: end it, or open the folder when the write is done"
                )
            time.sleep(1e-3)
        state, written, size, n = words[_STATE : _ROWS + 1].tolist()
        if state == IDLE:
            return
        where, possible = self._path.parent, 0 <= size <= min(written, capacity) and n > 0
        possible &= words[rows.WRITTEN] in (written, written + n)
        if state == OVERWRITING and possible:
            named = self._all[_NAMED:][:n].tolist()
            warn(
                f"{where}: a process was killed while it overwrote {n} rows by index, {named}"
                f"{' and others' if n > len(named) else ''}: they may be half old and half new, so write them again",
            )
        elif state == APPENDING and possible:
            kept = max(0, min(size, capacity - n))
            if kept < size:
                # Who is killed in here leaves no row that counts.
                # An odd number of laps: steps before these rows are lost.
                written, first, words[rows.WRITTEN] = (
                    (-(-(written + n) // capacity) | 1) * capacity,
                    written - kept,
                    written + n,
                )
                words[_STATE] = REPLACING
                for column in columns if kept else ():
                    _rotate(column, first % capacity)
                written += kept
            self.ring[: rows.SIZE + 1] = torch.tensor([written, kept], device="cpu")
            logger.warning("%s: a process was killed while it wrote %d rows: they are gone", where, n)
        else:
            laps = -(-words[rows.WRITTEN] // (2 * capacity)) * 2
            self.ring[: rows.SIZE + 1] = torch.tensor([laps * capacity, 0], device="cpu")
            logger.warning("%s: a process was killed while it replaced all rows: they are gone", where)
        words[_STATE] = IDLE


def _rotate(column: Tensor, first: int) -> None:
    """Bring row ``first`` to the beginning, and those before it to the end: blocks change places until all is done."""
    step = max(1, _CHUNK_BYTES * len(column) // max(1, column.nbytes))
    while 0 < first < len(column):
        n = min(first, len(column) - first)
        for at in range(0, n, step):
            left, right = column[:n][at : at + step], column[len(column) - n :][at : at + step]
            held = left.clone()
            left.copy_(right)
            right.copy_(held)
        # Of the longer block the rest is still in the wrong place.
        column, first = (column[:-n], first) if n == first else (column[n:], first - n)


# Temporary folders, which go with the process that made them, even where that is killed: it holds a lock on a file in
# each of them, which is gone with it, and whoever makes the next folder removes what such processes have left.


def new_folder() -> tuple[Path, int]:
    """A new folder, and the descriptor that holds it until it is closed, here and in every process forked from here."""
    sweep(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=TEMPORARY))
    unlocked = folder / f"{LOCK_FILE}.tmp"
    descriptor = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    lock(descriptor)
    # Only now: another process may be looking for folders that nobody holds.
    os.rename(unlocked, folder / LOCK_FILE)
    return folder, descriptor


def sweep(where: Path) -> None:
    """Remove the mapped files of this user's processes that have ended without doing it. Other files stay."""
    for folder in where.glob(f"{TEMPORARY}*"):
        # Of another user, being removed by another process, or in use.
        with contextlib.suppress(OSError):
            _sweep(folder)


def _sweep(folder: Path) -> None:
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | OPENING)
    try:
        lock(descriptor, wait=False)
        for level, _, names in os.walk(folder, topdown=False):
            for name in names:
                if is_own(name) and name != LOCK_FILE:
                    os.unlink(Path(level, name))
            if Path(level) != folder:
                with contextlib.suppress(OSError):
                    os.rmdir(level)
        os.unlink(folder / LOCK_FILE)
        os.rmdir(folder)
    finally:
        os.close(descriptor)
