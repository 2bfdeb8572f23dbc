"""The files of a checkpoint: manifest, names, locks, and what makes them survive a crash.

A checkpoint is a folder. ``manifest.json`` names every other file of it, with size and checksum, and carries a checksum
of itself. Files are written under names that no checkpoint had before, then the manifest is replaced in one step:
whatever happens on the way, the manifest that is there names files that are whole. Nothing is read from a file before
the manifest's own checksum has been verified, and a manifest can name files of its own folder only.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import re
import select
import stat
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from gpubuf import serialization
from gpubuf.data.lock import Guard
from gpubuf.data.storage.layout import Key

MANIFEST = "manifest.json"
FORMAT = "gpubuf-checkpoint"
MIX_FORMAT = "gpubuf-mixed-checkpoint"
VERSION = 1

Kind = Literal["rows", "tensor", "state"]

_NAME = re.compile(r"(?:rows|tensor|state)(?:-\d{1,9})+-[0-9a-f]{16}\.safetensors")
_ID = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class File:
    """One file: its name in the folder, its size, the checksum stored in it, and what it holds: ``start .. stop``."""

    name: str
    size: int
    checksum: int
    start: int
    stop: int


@dataclass(frozen=True)
class LeafSpec:
    """One key of a row: its path, its dtype's name, and the shape of one row."""

    key: Key
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class RowFiles:
    """The rows.

    Attributes:
        leaves: the keys of a row.
        nested_batch: (path, batch dimensions beyond the storage's) of every TensorDict in a row that has some.
        batch_shape: ``[T, ...]``: how many steps there are, and the storage's other dimensions.
        files: steps ``start .. stop`` each, gapless from 0.
    """

    leaves: tuple[LeafSpec, ...]
    nested_batch: tuple[tuple[Key, tuple[int, ...]], ...]
    batch_shape: tuple[int, ...]
    files: tuple[File, ...]


@dataclass(frozen=True)
class TensorFiles:
    """A large tensor of the state: where in the state it belongs, and its first dimension in files."""

    path: Key
    dtype: str
    shape: tuple[int, ...]
    files: tuple[File, ...]


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint. ``rows`` is None if nothing had been written to the buffer."""

    id: str
    written: int
    size: int
    capacity: int
    rows: RowFiles | None
    tensors: tuple[TensorFiles, ...]
    state: File

    @property
    def files(self) -> list[File]:
        """Every file."""
        rows = self.rows.files if self.rows is not None else ()
        return [*rows, *(file for tensor in self.tensors for file in tensor.files), self.state]


@dataclass(frozen=True)
class MixManifest:
    """The content of a checkpoint of several buffers.

    Attributes:
        id: of the save.
        parts: what the folder of each buffer holds, also where its own manifest is an older one.
        state: what the buffers share.
    """

    id: str
    parts: tuple[Manifest, ...]
    state: File

    @property
    def files(self) -> list[File]:
        """Every file beside the folders of the buffers."""
        return [self.state]


_M = TypeVar("_M", Manifest, MixManifest)


class DamagedError(ValueError):
    """A checkpoint is not what this library writes."""


class ForeignError(DamagedError):
    """A manifest is that of another program, or of another kind of checkpoint."""


def need(condition: bool, what: str) -> None:
    """Raise :class:`DamagedError` unless ``condition`` holds."""
    if not condition:
        raise DamagedError(what)


# Writing


def write_manifest(folder: Path, manifest: Manifest | MixManifest) -> int:
    """Put the manifest in place: from here on the checkpoint is this one. Returns its size."""
    content = asdict(manifest)
    # Not indented: that takes an encoder whose functions refer to each other, and stay until garbage is collected.
    form = FORMAT if isinstance(manifest, Manifest) else MIX_FORMAT
    text = json.dumps({"format": form, "version": VERSION, "checksum": _checksum(content), "content": content}).encode()
    # The names of the files that the manifest refers to must be on the disk before it is.
    serialization.sync_folder(folder)
    serialization.replace(folder / MANIFEST, [text])
    serialization.sync_folder(folder)
    return len(text)


def remove_others(folder: Path, manifest: Manifest | MixManifest) -> None:
    """Remove the files of earlier and of killed saves. Files of other names are not ours, and stay."""
    named = {file.name for file in manifest.files}
    for entry in folder.iterdir():
        # A folder of such a name is not ours either.
        ours = _NAME.fullmatch(entry.name) and (entry.is_symlink() or not entry.is_dir())
        if ours and entry.name not in named:
            entry.unlink(missing_ok=True)


class FolderLock(Guard):
    """``with FolderLock(folder, exclusive=...):``: one save, or any number of loads at a time. Used once.

    A killed process lets go of it, and so does an interrupted call.
    """

    def __init__(self, folder: Path, *, exclusive: bool) -> None:
        super().__init__()
        self._folder, self._how = folder, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH

    def _take(self) -> Callable[..., None]:
        end = super()._take()
        # Any object of C's that owns a descriptor, and closes it without a word when it is freed.
        holder = select.epoll()
        self._give_back = functools.partial(holder.__exit__, None, None)
        descriptor = os.open(self._folder, os.O_RDONLY)
        try:
            os.dup2(descriptor, holder.fileno(), inheritable=False)
        finally:
            os.close(descriptor)
        fcntl.flock(holder, self._how)
        return end


# Reading


def read_manifest(folder: Path) -> Manifest:
    """The manifest, verified; the files that it names are not looked at.

    Raises:
        FileNotFoundError: there is none.
        DamagedError: it is not one, is damaged, or is of a newer version.
    """
    return _read(folder, FORMAT, "", _manifest)


def read_mix(folder: Path) -> MixManifest:
    """:func:`read_manifest` of a checkpoint of several buffers."""
    return _read(folder, MIX_FORMAT, " of several buffers", _mix)


def _read(folder: Path, form: str, what: str, build: Callable[[Any], _M]) -> _M:
    path = folder / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint at {folder}: it has no {MANIFEST}")
    try:
        raw = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged: {error}") from None
    found = raw.get("format") if isinstance(raw, dict) else None
    if found != form:
        raise ForeignError(
            f"{path} is not the manifest of a gpubuf checkpoint{what}: its format is {found!r}, not {form!r}"
        )
    version = raw.get("version")
    need(
        type(version) is int and version == VERSION,
        f"{path} is of version {version!r}; this release of gpubuf reads version {VERSION}",
    )
    content = raw.get("content")
    try:
        need(raw.get("checksum") == _checksum(content), f"{path} is damaged: its checksum does not match")
        return build(content)
    except DamagedError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged: {error!r}") from None


def open_file(folder: Path, file: File) -> dict[str, Any]:
    """The content of a file, after checks of its size, checksum and structure. Tensors are views of the mapped file."""
    path = folder / file.name
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing, but {MANIFEST} names it") from None
    need(stat.S_ISREG(found.st_mode), f"{path} is not a regular file")
    need(found.st_size == file.size, f"{path} has {found.st_size} bytes, {MANIFEST} says {file.size}")
    return serialization.load(path, file.checksum)


def _checksum(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode())


def _manifest(raw: dict[str, Any]) -> Manifest:
    manifest = Manifest(
        id=_text(raw["id"], _ID),
        written=_count(raw["written"]),
        size=_count(raw["size"]),
        capacity=_count(raw["capacity"]),
        rows=None if raw["rows"] is None else _rows(raw["rows"]),
        tensors=tuple(_tensor(tensor) for tensor in _list(raw["tensors"])),
        state=_file(raw["state"]),
    )
    names = [file.name for file in manifest.files]
    need(len(set(names)) == len(names), "two parts of the checkpoint have the same file")
    paths = [tensor.path for tensor in manifest.tensors]
    need(len(set(paths)) == len(paths), "two tensors of the checkpoint have the same path")
    return manifest


def _mix(raw: dict[str, Any]) -> MixManifest:
    parts = tuple(_manifest(part) for part in _list(raw["parts"]))
    return MixManifest(_text(raw["id"], _ID), parts, _file(raw["state"]))


def _rows(raw: dict[str, Any]) -> RowFiles:
    leaves = tuple(
        LeafSpec(_key(leaf["key"]), _dtype(leaf["dtype"]), _shape(leaf["shape"])) for leaf in _list(raw["leaves"])
    )
    keys = {leaf.key for leaf in leaves}
    prefixes = {key[:n] for key in keys for n in range(len(key))}
    need(len(keys) == len(leaves) and not keys & prefixes, "the keys of the rows contradict each other")
    nested = tuple((_key(path), _shape(shape)) for path, shape in _list(raw["nested_batch"]))
    batch_shape = _shape(raw["batch_shape"])
    need(len(batch_shape) > 0, "the rows have no dimension")
    return RowFiles(leaves, nested, batch_shape, _gapless(raw["files"], batch_shape[0]))


def _tensor(raw: dict[str, Any]) -> TensorFiles:
    shape = _shape(raw["shape"])
    need(len(shape) > 0, "a tensor in files has no dimension")
    return TensorFiles(_key(raw["path"]), _dtype(raw["dtype"]), shape, _gapless(raw["files"], shape[0]))


def _gapless(raw: Any, length: int) -> tuple[File, ...]:
    files = tuple(_file(file) for file in _list(raw))
    ends = [0, *(file.stop for file in files)]
    need(
        all(file.start == end and file.stop > file.start for file, end in zip(files, ends, strict=False))
        and ends[-1] == length,
        f"the files do not make up 0 .. {length}",
    )
    return files


def _file(raw: dict[str, Any]) -> File:
    return File(_text(raw["name"], _NAME), *(_count(raw[key]) for key in ("size", "checksum", "start", "stop")))


def _list(raw: Any) -> list[Any]:
    need(isinstance(raw, list), f"expected a list, got a {type(raw).__name__}")
    found: list[Any] = raw
    return found


def _count(raw: Any) -> int:
    need(type(raw) is int and 0 <= raw < 2**63, f"expected a count, got {raw!r}")
    return int(raw)


def _shape(raw: Any) -> tuple[int, ...]:
    return tuple(_count(length) for length in _list(raw))


def _key(raw: Any) -> Key:
    need(all(isinstance(name, str) for name in _list(raw)), f"expected a key, got {raw!r}")
    return tuple(raw)


def _dtype(raw: Any) -> str:
    need(isinstance(raw, str) and raw in serialization.DTYPES, f"expected a dtype, got {raw!r}")
    return str(raw)


def _text(raw: Any, pattern: re.Pattern[str]) -> str:
    need(isinstance(raw, str) and pattern.fullmatch(raw) is not None, f"{raw!r} is not a name in a checkpoint")
    return str(raw)


def file_name(kind: Kind, numbers: list[int], save: str) -> str:
    """The name of a file that the save of this id writes."""
    return f"{kind}-{'-'.join(f'{number:05}' for number in numbers)}-{save}.safetensors"
