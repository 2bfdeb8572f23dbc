"""The files of a checkpoint: manifest, names, locks, what makes them survive a crash, and reading them.

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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import torch
from tensordict import TensorDict
from torch import Tensor

from gpubuf import serialization
from gpubuf.data.lock import Guard
from gpubuf.data.prefetch import copied
from gpubuf.data.storage.layout import Data, Key, Pieces, RowLayout
from gpubuf.data.storage.storage import TensorStorage
from gpubuf.terminal import Advance

MANIFEST = "manifest.json"
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

    def verify(self) -> None:
        """Raise unless the name is one of a file of a checkpoint."""
        need(_NAME.fullmatch(self.name) is not None, f"{self.name!r} is not the name of a file in a checkpoint")


@dataclass(frozen=True)
class LeafSpec:
    """One key of a row: its path, its dtype's name, and the shape of one row."""

    key: Key
    dtype: str
    shape: tuple[int, ...]

    def verify(self) -> None:
        """Raise unless there is such a dtype."""
        need(self.dtype in serialization.DTYPES, f"expected a dtype, got {self.dtype!r}")


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

    def verify(self) -> None:
        """Raise unless keys, shape and files fit together."""
        keys = {leaf.key for leaf in self.leaves}
        prefixes = {key[:n] for key in keys for n in range(len(key))}
        need(len(keys) == len(self.leaves) and not keys & prefixes, "the keys of the rows contradict each other")
        need(len(self.batch_shape) > 0, "the rows have no dimension")
        _need_gapless(self.files, self.batch_shape[0])


@dataclass(frozen=True)
class TensorFiles:
    """A large tensor of the state: where in the state it belongs, and its first dimension in files."""

    path: Key
    dtype: str
    shape: tuple[int, ...]
    files: tuple[File, ...]

    def verify(self) -> None:
        """Raise unless there is such a dtype, and the files make up the tensor."""
        need(self.dtype in serialization.DTYPES, f"expected a dtype, got {self.dtype!r}")
        need(len(self.shape) > 0, "a tensor in files has no dimension")
        _need_gapless(self.files, self.shape[0])


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

    def verify(self) -> None:
        """Raise unless no two parts have one name."""
        need(_ID.fullmatch(self.id) is not None, f"{self.id!r} is not the name of a checkpoint")
        names = [file.name for file in self.files]
        need(len(set(names)) == len(names), "two parts of the checkpoint have the same file")
        paths = [tensor.path for tensor in self.tensors]
        need(len(set(paths)) == len(paths), "two tensors of the checkpoint have the same path")


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

    def verify(self) -> None:
        """Raise unless the save has a name."""
        need(_ID.fullmatch(self.id) is not None, f"{self.id!r} is not the name of a checkpoint")


@dataclass(frozen=True)
class ShardManifest:
    """The content of a checkpoint of the ranks of a process group.

    Attributes:
        id: of the save.
        parts: what the folder of each rank holds, also where its own manifest is an older one.
        states: what each rank keeps beside its buffer.
    """

    id: str
    parts: tuple[Manifest, ...]
    states: tuple[File, ...]

    @property
    def files(self) -> list[File]:
        """Every file beside the folders of the ranks."""
        return list(self.states)

    def verify(self) -> None:
        """Raise unless the save has a name, and every rank a state."""
        need(_ID.fullmatch(self.id) is not None, f"{self.id!r} is not the name of a checkpoint")
        need(len(self.parts) == len(self.states) > 0, "the checkpoint has no state for every rank")


AnyManifest = Manifest | MixManifest | ShardManifest
#: The format of each kind of manifest, and what that is of.
_FORMATS: dict[type, tuple[str, str]] = {
    Manifest: ("gpubuf-checkpoint", ""),
    MixManifest: ("gpubuf-mixed-checkpoint", " of several buffers"),
    ShardManifest: ("gpubuf-sharded-checkpoint", " of several ranks"),
}
_M = TypeVar("_M", Manifest, MixManifest, ShardManifest)


class DamagedError(ValueError):
    """A checkpoint is not what this library writes."""


class ForeignError(DamagedError):
    """A manifest is that of another program, or of another kind of checkpoint."""


def need(condition: bool, what: str) -> None:
    """Raise :class:`DamagedError` unless ``condition`` holds."""
    if not condition:
        raise DamagedError(what)


def need_form(text: str, tensor: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raise :class:`DamagedError`, whose text begins with ``text``, unless ``tensor`` has this dtype and shape."""
    found = (tensor.dtype, tuple(tensor.shape)) if isinstance(tensor, Tensor) else type(tensor).__name__
    need(found == (dtype, shape), f"{text} {found}, expected {(dtype, shape)}")


# Writing


def write_manifest(folder: Path, manifest: AnyManifest) -> int:
    """Put the manifest in place: from here on the checkpoint is this one. Returns its size."""
    content = asdict(manifest)
    # Not indented: that takes an encoder whose functions refer to each other, and stay until garbage is collected.
    form, _ = _FORMATS[type(manifest)]
    text = json.dumps({"format": form, "version": VERSION, "checksum": _checksum(content), "content": content}).encode()
    # The names of the files that the manifest refers to must be on the disk before it is.
    serialization.sync_folder(folder)
    serialization.replace(folder / MANIFEST, [text])
    serialization.sync_folder(folder)
    return len(text)


def is_own(name: str) -> bool:
    """Whether a file of this name in the folder of a checkpoint is one of ours."""
    return name == MANIFEST or _NAME.fullmatch(name) is not None


def remove_others(folder: Path, manifest: AnyManifest) -> None:
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


def read_manifest(folder: Path, kind: type[_M]) -> _M:
    """The manifest, of this kind, verified; the files that it names are not looked at.

    Raises:
        FileNotFoundError: there is none.
        DamagedError: it is not one, is damaged, or is of a newer version.
    """
    path, (form, what) = folder / MANIFEST, _FORMATS[kind]
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint at {folder}: it has no {MANIFEST}")
    try:
        raw = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged: {error}") from None
    own = raw.get("format") if isinstance(raw, dict) else None
    if own != form:
        raise ForeignError(
            f"{path} is not the manifest of a gpubuf checkpoint{what}: its format is {own!r}, not {form!r}"
        )
    version = raw.get("version")
    need(
        type(version) is int and version == VERSION,
        f"{path} is of version {version!r}; this release of gpubuf reads version {VERSION}",
    )
    content = raw.get("content")
    try:
        need(raw.get("checksum") == _checksum(content), f"{path} is damaged: its checksum does not match")
        found: _M = _built(kind, content)
        return found
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


@functools.cache
def _types_of(kind: type) -> dict[str, Any]:
    """The types of a dataclass's fields. Kept, since they come from evaluating our annotations."""
    return get_type_hints(kind)


def _built(kind: Any, raw: Any) -> Any:
    """What JSON holds, as a dataclass of this module, or what a field of one is annotated with.

    Raises:
        DamagedError: it is none; or KeyError or TypeError.
    """
    if is_dataclass(kind):
        found: Any = kind(**{name: _built(field, raw[name]) for name, field in _types_of(kind).items()})  # type: ignore[arg-type, operator]
        found.verify()
        return found
    of = get_args(kind)
    if get_origin(kind) is tuple:
        need(isinstance(raw, list), f"expected a list, got a {type(raw).__name__}")
        kinds = [of[0]] * len(raw) if of[-1] is ... else of
        return tuple(_built(each, item) for each, item in zip(kinds, raw, strict=True))
    if of:
        # Something, or None.
        return None if raw is None else _built(of[0], raw)
    need(type(raw) is kind and (kind is str or 0 <= raw < 2**63), f"expected a {kind.__name__}, got {raw!r}")
    return raw


def _need_gapless(files: tuple[File, ...], length: int) -> None:
    ends = [0, *(file.stop for file in files)]
    need(
        all(file.start == end and file.stop > file.start for file, end in zip(files, ends, strict=False))
        and ends[-1] == length,
        f"the files do not make up 0 .. {length}",
    )


def file_name(kind: Kind, numbers: list[int], save: str) -> str:
    """The name of a file that the save of this id writes."""
    return f"{kind}-{'-'.join(f'{number:05}' for number in numbers)}-{save}.safetensors"


# The state of a buffer


def read(folder: Path, manifest: Manifest, advance: Advance) -> tuple[dict[str, Any], list[list[Tensor]]]:
    """The state without the rows, and the tensors of every file of rows; all of it verified."""

    def parts(file: File, specs: list[tuple[torch.dtype, tuple[int, ...]]]) -> list[Tensor]:
        found: list[Tensor] | None = open_file(folder, file).get("parts")
        need(isinstance(found, list) and len(found) == len(specs), f"{file.name} doesn't hold what it should")
        assert found is not None
        for tensor, (dtype, shape) in zip(found, specs, strict=True):
            need_form(f"{file.name} holds", tensor, dtype, (file.stop - file.start, *shape))
        advance(file.size)
        return found

    state = open_file(folder, manifest.state)
    # Copies: the buffer may keep tensors of the state, and must not keep the file with them.
    state = copied(state, None)
    rows: list[list[Tensor]] = []
    if manifest.rows is not None:
        batch = manifest.rows.batch_shape[1:]
        specs = [(serialization.DTYPES[leaf.dtype], (*batch, *leaf.shape)) for leaf in manifest.rows.leaves]
        rows = [parts(file, specs) for file in manifest.rows.files]
    for tensor in manifest.tensors:
        dtype = serialization.DTYPES[tensor.dtype]
        found = [parts(file, [(dtype, tensor.shape[1:])])[0] for file in tensor.files]
        need(len(found) > 0, f"the tensor {'.'.join(tensor.path)} has no files")
        at: Any = state
        for name in tensor.path[:-1]:
            at = at.get(name) if isinstance(at, dict) else None
        need(
            isinstance(at, dict) and bool(tensor.path) and tensor.path[-1] in at and at[tensor.path[-1]] is None,
            f"the state has no place for {'.'.join(tensor.path)}",
        )
        at[tensor.path[-1]] = torch.cat(found)
    return state, rows


def pieces(storage: TensorStorage, rows: RowFiles, parts: list[list[Tensor]], advance: Advance) -> Pieces:
    """The rows as a storage takes them: batches like those that were written, a file at a time."""
    batch = rows.batch_shape[1:]
    try:
        empty = [
            torch.empty((0, *batch, *leaf.shape), dtype=serialization.DTYPES[leaf.dtype], device="cpu")
            for leaf in rows.leaves
        ]
    except (RuntimeError, TypeError) as error:
        raise DamagedError(f"the rows' shapes are impossible: {error}") from None
    layout = RowLayout(_batch(rows, empty), storage.ndim)
    if storage.initialized and {leaf.key for leaf in storage.layout.leaves} == {leaf.key for leaf in layout.leaves}:
        # Only the storage knows which tensorclasses its rows are made of.
        layout = storage.layout
    order = {leaf.key: position for position, leaf in enumerate(rows.leaves)}
    places = [order[leaf.key] for leaf in layout.leaves]

    def data(tensors: list[Tensor]) -> Data:
        own = tuple(tensors[0].shape[: storage.ndim]) if tensors else (0, *batch)
        return layout.assemble([tensors[i] for i in places], own, None)

    told = set[str]()

    def each() -> Iterator[tuple[int, Data]]:
        for file, tensors in zip(rows.files, parts, strict=True):
            yield file.start, data(tensors)
            if file.name not in told:
                told.add(file.name)
                advance(file.size)

    return Pieces(data(empty), each)


def _batch(rows: RowFiles, tensors: list[Tensor]) -> Data:
    """Tensors in the order of ``rows.leaves`` as a tensor, or a TensorDict."""
    if [leaf.key for leaf in rows.leaves] == [()]:
        return tensors[0]
    try:
        return _level(rows, tensors, ())
    except RuntimeError as error:
        raise DamagedError(f"the rows' shapes contradict each other: {error}") from None


def _level(rows: RowFiles, tensors: list[Tensor], path: Key) -> TensorDict:
    found: dict[str, Any] = {}
    for leaf, tensor in zip(rows.leaves, tensors, strict=True):
        if leaf.key[: len(path)] == path:
            name = leaf.key[len(path)]
            if len(leaf.key) == len(path) + 1:
                found[name] = tensor
            elif name not in found:
                found[name] = _level(rows, tensors, (*path, name))
    nested = dict(rows.nested_batch).get(path, ())
    return TensorDict(found, (0, *rows.batch_shape[1:], *nested))
