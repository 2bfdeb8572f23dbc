"""The files of a checkpoint, and what makes them survive a crash.

A checkpoint is a folder. A buffer, a mix of buffers, or each rank of a process group writes one safetensors file, under
a name that no checkpoint had before. When all of them are on the disk, ``manifest.json`` is replaced in one step: it
names the files, with sizes and checksums, and has a checksum of itself. Whatever happens on the way, the manifest that
is there names files that are whole. It can name files of its own folder only.
"""

from __future__ import annotations

import functools
import json
import os
import re
import stat
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from gpubuf import serialization, system
from gpubuf.data.operation import Operation, together
from gpubuf.data.pinning import copied, tensors_of
from gpubuf.terminal import progress_bar

MANIFEST = "manifest.json"
BUFFER, MIX, RANKS = "one buffer", "several buffers", "several ranks"
BAR_BYTES = 1 << 30
"""From this size on there is a progress bar, on a terminal."""

_FORMAT, _VERSION = "gpubuf-checkpoint", 2
# Those of version 1 too, which the next save removes.
_NAME = re.compile(r"(?:rows|tensor|state)(?:-\d{1,9})+-[0-9a-f]{16}\.safetensors")
#: Up to so much is copied, so that the buffer can be used while it is written.
_COPY_BYTES = 1 << 28


@dataclass(frozen=True)
class File:
    """One file: its name in the folder, its size, and the checksum stored in it."""

    name: str
    size: int
    checksum: int


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is of (:data:`BUFFER`, :data:`MIX` or :data:`RANKS`), and its files: of ranks one for each."""

    of: str
    files: tuple[File, ...]


class DamagedError(ValueError):
    """A checkpoint is not what this library writes."""


class ForeignError(DamagedError):
    """A manifest is that of another program, or of another kind of checkpoint."""


def need(condition: bool, what: str) -> None:
    """Raise :class:`DamagedError` unless ``condition`` holds."""
    if not condition:
        raise DamagedError(what)


# Writing


def check_replaceable(folder: Path, of: str) -> None:
    """Raise unless a checkpoint of this kind can be written to a folder.

    Raises:
        ValueError: there is a manifest of another program, or of another kind of checkpoint.
    """
    try:
        read_manifest(folder, of)
    except ForeignError as error:
        raise ValueError(f"{error}; it would be overwritten") from None
    except (FileNotFoundError, DamagedError):
        pass


def write(
    folder: Path,
    save_id: str,
    operations: list[Operation],
    state_now: Callable[[], dict[str, Any]],
    progress: bool | None,
    number: int = 0,
) -> File:
    """A new file with a state, on the disk.

    Args:
        folder: the checkpoint.
        save_id: 16 random hexadecimal digits.
        operations: of the buffers. No other one runs while the state is copied; above 256 MiB, until it is on the disk.
        state_now: gives the state.
        progress: as for :func:`gpubuf.data.checkpoints.save.save`.
        number: of the rank.
    """
    name = f"state-{number:05}-{save_id}.safetensors"

    def write_now(state: dict[str, Any]) -> File:
        total = sum(tensor.nbytes for tensor in tensors_of(state))
        with progress_bar("saving", total, progress, least=BAR_BYTES) as advance:
            size, checksum = serialization.write(folder / name, serialization.contents(state), advance)
        system.sync_folder(folder)
        return File(name, size, checksum)

    def begun() -> Callable[[], File]:
        state = state_now()
        if sum(tensor.nbytes for tensor in tensors_of(state)) <= _COPY_BYTES:
            return functools.partial(write_now, copied(state, torch.device("cpu")))
        file = write_now(state)
        return lambda: file

    return together(operations, begun)()


def commit(folder: Path, manifest: Manifest) -> None:
    """Put a manifest in place: from here on the checkpoint is this one. Files of earlier and of killed saves go."""
    content = asdict(manifest)
    text = json.dumps({"format": _FORMAT, "version": _VERSION, "checksum": _checksum(content), "content": content})
    serialization.replace(folder / MANIFEST, [text.encode()])
    system.sync_folder(folder)
    named = {file.name for file in manifest.files}
    for entry in folder.iterdir():
        # Files of other names are not ours, nor is a folder of such a name.
        ours = _NAME.fullmatch(entry.name) and (entry.is_symlink() or not entry.is_dir())
        if ours and entry.name not in named:
            entry.unlink(missing_ok=True)


# Reading


def read_manifest(folder: Path, of: str) -> Manifest:
    """The manifest of a checkpoint of this kind, verified; the files that it names are not looked at.

    Raises:
        FileNotFoundError: there is none.
        DamagedError: it is not one, is damaged, or is of another kind or version.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint at {folder}: it has no {MANIFEST}")
    try:
        raw = json.loads(path.read_bytes())
        form = raw.get("format") if isinstance(raw, dict) else None
        if form != _FORMAT:
            raise ForeignError(f"{path} is not the manifest of a gpubuf checkpoint: its format is {form!r}")
        version, content = raw.get("version"), raw.get("content")
        need(version == _VERSION, f"{path} is of version {version!r}; this release of gpubuf reads version {_VERSION}")
        need(raw.get("checksum") == _checksum(content), f"{path} is damaged: its checksum does not match")
        manifest = Manifest(content["of"], tuple(_file(entry) for entry in content["files"]))
    except DamagedError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged: {error!r}") from None
    if manifest.of != of:
        raise ForeignError(f"{path} is of {manifest.of}, not of {of}")
    need(bool(manifest.files) and (of == RANKS or len(manifest.files) == 1), f"{path} names too few or too many files")
    return manifest


def read(folder: Path, file: File, progress: bool | None) -> dict[str, Any]:
    """The content of a file, after checks of its size, checksum and structure. Rows are views of the mapped file.

    Raises:
        DamagedError, ValueError: it is not the file that the manifest names.
    """
    path = folder / file.name
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing, but {MANIFEST} names it") from None
    need(stat.S_ISREG(found.st_mode), f"{path} is not a regular file")
    need(found.st_size == file.size, f"{path} has {found.st_size} bytes, {MANIFEST} says {file.size}")
    with progress_bar("loading", file.size, progress, least=BAR_BYTES) as advance:
        state: dict[str, Any] = _owned(serialization.load(path, file.checksum, advance))
    return state


def _owned(state: Any) -> Any:
    """A state without views of its file, but for the rows: a buffer may keep tensors, and must not keep the file."""
    if type(state) is dict:
        return {name: value if name == "rows" and "size" in state else _owned(value) for name, value in state.items()}
    return [_owned(value) for value in state] if type(state) is list else copied(state, None)


def _file(raw: dict[str, Any]) -> File:
    file = File(**raw)
    named = isinstance(file.name, str) and _NAME.fullmatch(file.name)
    need(bool(named), f"{file.name!r} is not the name of a file in a checkpoint")
    for count in (file.size, file.checksum):
        need(type(count) is int and 0 <= count < 2**63, f"expected a count, got {count!r}")
    return file


def _checksum(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode())
