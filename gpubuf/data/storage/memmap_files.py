"""Rows in files: one memory-mapped file per key, JSON that says what they hold, the journal, and temporary folders.

The layout of a folder is that of a memory-mapped TensorDict inside TorchRL's ``storage/``, so that either side opens
what the other has written: ``meta.json`` lists the entries of one level with shape and dtype, a tensor lies in
``<key>.memmap``, a nested TensorDict in the folder ``<key>/``, and ``storage_metadata.json`` says how much is valid.
Everything read is checked before a byte is mapped; nothing is unpickled, and no class is looked up by name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import math
import mmap
import os
import stat
import tempfile
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from gpubuf import serialization
from gpubuf.data.storage.layout import Data, Key, Node, RowLayout
from gpubuf.kernels import rows
from gpubuf.kernels._registry import lazy
from gpubuf.kernels.rows import JOURNAL_CHECK, JOURNAL_KEYS, JOURNAL_ROWS, JOURNAL_STATE, JOURNAL_WORDS

_keep = lazy("gpubuf.kernels.rows._cpu:keep")

logger = logging.getLogger("gpubuf")

META_FILE = "meta.json"
STORAGE_FILE = "storage_metadata.json"
GPUBUF_FILE = "gpubuf.json"
COUNTERS_FILE = "gpubuf.counters"
JOURNAL_FILE = "gpubuf.journal"
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
#: Values of the first word: nothing is being written; old rows are kept here; all rows are being replaced.
_IDLE, _KEPT, _GONE = range(3)
_LEAST_BYTES, _MOST_BYTES = 1 << 16, 1 << 26
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
    known = (META_FILE, STORAGE_FILE, GPUBUF_FILE, COUNTERS_FILE, JOURNAL_FILE, MARKS_FILE)
    return name.endswith(".memmap") or name.removesuffix(".tmp") in known


# Opening


def open_file(path: Path, flags: int, root: Path | None = None) -> int:
    """A descriptor of a regular file. Nothing that is a link is followed on the way from ``root`` to it.

    Args:
        path: the file.
        flags: as for ``os.open``. With ``os.O_CREAT`` missing folders are made.
        root: a folder above the file; it may be reached through links. None: the one that the file is in.

    Raises:
        FileExistsError: with ``os.O_EXCL``: there is something at ``path``.
        ValueError: the file is missing, is a link or something else than a file, or lies in a folder that is a link.
    """
    root = path.parent if root is None else root
    *folders, name = path.relative_to(root).parts
    own = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # to open a pipe does not wait for its other end
    folder, descriptor = -1, -1
    try:
        folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for part in folders:
            if flags & os.O_CREAT:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=folder)
            above, folder = folder, os.open(part, os.O_RDONLY | os.O_DIRECTORY | own, dir_fd=folder)
            os.close(above)
        descriptor = os.open(name, flags | own, 0o666, dir_fd=folder)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{path} is not a regular file")
        found, descriptor = descriptor, -1
        return found
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO):
            raise
        raise ValueError(f"{path} is no regular file, or below {root} a link leads to it: links are refused") from None
    finally:
        for left in (folder, descriptor):
            if left >= 0:
                os.close(left)


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


# Writes that can be taken back


class Journal:
    """What a write to mapped files is about to replace, so that whoever opens them after a kill can take it back.

    A process that is killed leaves in the files what it has stored until then, in the order in which it stored it.
    Before rows change, their old bytes and the counters go into one more file, and then a word that says so. It is
    taken back when the write is done. If it is still there when the folder is opened, the old bytes are put back: the
    write never happened. This is about processes; after a crash of the machine the disk may hold later bytes without
    earlier ones.

    Args:
        root: the folder of the storage.
        row_bytes: of each key, in the order of the storage's table.
        capacity: rows.
    """

    def __init__(self, root: Path, row_bytes: Sequence[int], capacity: int) -> None:
        self._path, self._capacity = root / JOURNAL_FILE, capacity
        self._row_bytes, self._all = list(row_bytes), array("q", range(len(row_bytes)))
        self._bytes_each = 8 + sum(row_bytes)
        # The table and the ring of the last write, and what the kernel is told of them.
        self._of: tuple[Any, Any, Any] = (None, None, None)
        # Older storages have none.
        self._descriptor = open_file(self._path, os.O_RDWR | os.O_CREAT)
        self._alone = self._lock()
        self._map(max(os.fstat(self._descriptor).st_size, _LEAST_BYTES))

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def _lock(self) -> bool:
        """Hold the file for as long as this object is there; False: another one holds it."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _map(self, n_bytes: int) -> None:
        # Not sparse: who runs out of disk in a mapping is killed, and here it is an OSError.
        os.posix_fallocate(self._descriptor, 0, n_bytes)
        memory, self._room = mmap.mmap(self._descriptor, n_bytes), n_bytes
        self._bytes = torch.from_numpy(np.frombuffer(memory, np.uint8))
        self._words, self._address = memoryview(memory).cast("q"), self._bytes.data_ptr()

    # Writing

    def keep(
        self, table: Tensor, ring: Tensor, n: int, index: Tensor | None = None, keys: Sequence[int] | None = None
    ) -> Self:
        """Keep rows and counters that are about to change, until :meth:`settle`, or the end of a ``with``.

        Args:
            table, ring: of the storage.
            n: number of rows. Without ``index`` they are those from the cursor on.
            index: int64 ``[n]``, positions, contiguous and in memory.
            keys: which of the storage's keys will change; None: all.

        Raises:
            IndexError: an index is out of range.
            OSError: there is no room on the disk.
        """
        self._words[JOURNAL_STATE] = _IDLE
        # Of all keys, with as much for each as rounding up can take.
        need = 8 * (JOURNAL_WORDS + 2 * len(self._all)) + n * self._bytes_each
        if need > self._room:
            self._map(1 << (need - 1).bit_length())
        if table is not self._of[0] or ring is not self._of[1]:
            self._of = table, ring, (table.data_ptr(), self._all.buffer_info()[0], len(self._all), ring.data_ptr())
        place = self._of[2]
        if keys is not None:
            chosen = array("q", keys)
            place = place[0], chosen.buffer_info()[0], len(chosen), place[3]
        _keep(place, index, n, self._capacity, self._address)
        self._words[JOURNAL_STATE] = _KEPT
        return self

    def __enter__(self) -> None:
        """Rows were kept."""

    def __exit__(self, *error: object) -> None:
        self.settle()

    def void(self) -> None:
        """All rows are about to be replaced: until :meth:`settle` none of them counts."""
        self._words[JOURNAL_STATE] = _GONE

    def settle(self) -> None:
        """The write is done."""
        self._words[JOURNAL_STATE] = _IDLE
        if self._room > _MOST_BYTES:
            self._map(_LEAST_BYTES)
            os.truncate(self._descriptor, _LEAST_BYTES)

    def flush(self) -> None:
        """Wait until the disk knows that nothing is being written."""
        self.settle()
        os.fsync(self._descriptor)

    # After a kill

    def recover(self, columns: Sequence[Tensor], ring: Tensor) -> None:
        """Take back the write that a killed process has left unfinished, if there is one.

        Args:
            columns: the rows, ``[capacity, ...]`` for each key.
            ring: the counters.

        Raises:
            RuntimeError: the process is still there.
        """
        deadline = time.monotonic() + _PATIENCE
        while self._words[JOURNAL_STATE] != _IDLE and not (self._alone or self._lock()):
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{self._path.parent}: a write is unfinished, and another process, or another storage of this one, "
                    "has the files open: end it, or open the folder when the write is done"
                )
            time.sleep(1e-3)
        state = self._words[JOURNAL_STATE]
        if state == _KEPT and self._put_back(columns, ring):
            logger.warning("%s: a process was killed while it wrote: its last write is undone", self._path.parent)
        elif state == _GONE:
            laps = -(-int(ring[rows.WRITTEN]) // self._capacity)
            ring[: rows.SIZE + 1] = torch.tensor([laps * self._capacity, 0], device="cpu")
            logger.warning("%s: a process was killed while it replaced all rows: they are gone", self._path.parent)
        self._words[JOURNAL_STATE] = _IDLE

    def _put_back(self, columns: Sequence[Tensor], ring: Tensor) -> bool:
        """Put the kept rows back; False: they are not whole, as after a crash of the machine."""
        words = self._bytes.view(torch.int64)
        n, n_keys = int(words[JOURNAL_ROWS]), int(words[JOURNAL_KEYS])
        first = JOURNAL_WORDS + n_keys + n
        if min(n, n_keys) < 0 or n_keys > len(columns) or first > len(words):
            return False
        keys, index = words[JOURNAL_WORDS : first - n].tolist(), words[first - n : first]
        if not all(0 <= key < len(columns) for key in keys):
            return False
        starts = [first]
        for key in keys:
            starts.append(starts[-1] + -(-n * self._row_bytes[key] // 8))
        whole = starts[-1] <= len(words) and bool(((index >= -self._capacity) & (index < self._capacity)).all())
        if not whole or int(words[JOURNAL_CHECK + 1 : starts[-1]].sum()) != int(words[JOURNAL_CHECK]):
            return False
        for key, start in zip(keys, starts, strict=False):
            column = columns[key]
            kept = words[start:].view(torch.uint8)[: n * self._row_bytes[key]]
            column[index] = kept.view(column.dtype).view(n, *column.shape[1:])
        ring[: rows.SIZE + 1] = words[JOURNAL_CHECK + 1 : JOURNAL_ROWS]
        return True


# Temporary folders, which go with the process that made them, even where that is killed: it holds a lock on a file in
# each of them, which is gone with it, and whoever makes the next folder removes what such processes have left.


def new_folder() -> tuple[Path, int]:
    """A new folder, and the descriptor that holds it until it is closed, here and in every process forked from here."""
    sweep(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=TEMPORARY))
    unlocked = folder / f"{LOCK_FILE}.tmp"
    descriptor = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
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
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
