"""Checkpoints: a tree of tensors and plain values in one safetensors file, without pickle.

The tensors are the file's tensors, named by their dotted path for people who look into it
(``optimizer.state.0.exp_avg``). The tree itself, with every value that is not a tensor, is JSON in the file's
metadata, and is what decides where a tensor belongs. One file, so that replacing it is atomic: a save that is
killed leaves the previous checkpoint whole. A checksum over the file is stored as its last tensor, so that a flipped
bit is found before anything is restored. Loading runs no code.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections import namedtuple
from collections.abc import Iterable, Iterator, Mapping, Sequence
from mmap import mmap
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, is_non_tensor, is_tensorclass
from torch import Tensor

from gpubuf import system
from gpubuf.terminal import Advance, show_nothing

Buffer = bytes | memoryview

_FORMAT = "gpubuf-state"
_VERSION = "1"
_CHECKSUM = "#crc32"
_CHECKSUM_BYTES = 4
_CHUNK_BYTES = 1 << 22
_LENGTH_BYTES = 8
_ALIGNMENT = 16

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float4_e2m1fn_x2: "F4_X2",
    torch.complex32: "C32",
    torch.complex64: "C64",
    torch.complex128: "C128",
}
"""Every dtype that is saved."""

# What a file holds in place of dtypes that not every reader of safetensors knows; the last dimension is one more.
_HELD_AS = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
    torch.float4_e2m1fn_x2: torch.uint8,
}
# Those that NumPy has, too.
_NUMPY = {str(dtype).removeprefix("torch.") for dtype in NAMES} & set(np.sctypeDict)
DTYPES = {name: dtype for dtype, name in NAMES.items()}


def save(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Write ``state`` to ``path``, replacing what is there only once the new file is complete and on the disk.

    Args:
        path: The file to write. ``path`` + ``.tmp`` is used on the way.
        state: A tree of dictionaries, TensorDicts, lists and tuples whose leaves are tensors of any device and
            stride, NumPy's arrays and numbers, integers of any size, floats, complex numbers, strings, bytes, booleans
            or None. Dictionary keys are strings, integers,
            floats, booleans or None. Nothing in it is changed, and no tensor that is contiguous on the CPU is copied.

    Raises:
        TypeError: A leaf is of another type; the message gives its path. Nothing was written.

    Synchronises with the host where tensors are on a GPU.
    """
    target = Path(path)
    pieces = contents(state)
    replace(target, pieces)
    system.sync_folder(target.parent)


def replace(target: Path, pieces: Iterable[Buffer]) -> int:
    """Put a file in the place of ``target`` once it is complete and on the disk. Returns its size.

    Raises:
        OSError: It can't be written; ``target`` is as it was. So it is where somebody else's folder is in the way, at
            ``target`` or at ``target`` + ``.tmp``.
    """
    temporary = target.with_name(target.name + ".tmp")
    # Of a process that was killed, or a link that somebody has planted: the link goes, not what it points to.
    temporary.unlink(missing_ok=True)
    try:
        size, _ = write(temporary, pieces)
        os.replace(temporary, target)
    except FileExistsError:
        # Not ours: it was made in this moment.
        raise
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return size


def create(path: str | os.PathLike[str]) -> BinaryIO:
    """A new file, open for writing. Nothing that is there is opened or followed, a link least of all.

    Raises:
        FileExistsError: There is something at ``path``.
    """
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | system.OPENING, 0o666), "wb")


def contents(state: Mapping[str, Any]) -> Iterator[Buffer]:
    """The bytes of the file that `save` writes, piece by piece; the last piece is the checksum of all others.

    Raises:
        TypeError: As `save`, at the call.
    """
    tensors: dict[str, Tensor] = {}
    tree = _encode(state, "", tensors)
    # Widest elements first: the format allows no gaps, and this keeps every tensor aligned in the mapped file.
    widest_first = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    ordered = {name: _held(tensor) for name, tensor in widest_first}
    header = _header(ordered, json.dumps(tree, separators=(",", ":"), allow_nan=False))

    def pieces() -> Iterator[Buffer]:
        yield header
        checksum = zlib.crc32(header)
        for tensor in ordered.values():
            for chunk in _chunks(tensor):
                checksum = zlib.crc32(chunk, checksum)
                yield chunk
        yield checksum.to_bytes(_CHECKSUM_BYTES, "little")

    return pieces()


def write(path: str | os.PathLike[str], pieces: Iterable[Buffer], advance: Advance = show_nothing) -> tuple[int, int]:
    """Write the `contents` of a state to a new file, and wait until they are on the disk. Not atomic: see `replace`.

    Args:
        path: The file.
        pieces: The contents.
        advance: Called with the bytes written.

    Returns:
        The size of the file, and its checksum.

    Raises:
        FileExistsError: There is something at ``path``.
    """
    size = 0
    last: Buffer = b""
    with create(path) as file:
        for piece in pieces:
            size += file.write(piece)
            last = piece
            advance(len(piece))
        file.flush()
        os.fsync(file.fileno())
    return size, int.from_bytes(last, "little")


def load(path: str | os.PathLike[str], checksum: int | None = None, advance: Advance = show_nothing) -> dict[str, Any]:
    """Read what `save` wrote.

    Args:
        path: The file to read.
        checksum: What `write` returned; None takes any file that agrees with the checksum in itself.
        advance: Called with the bytes verified.

    Returns:
        The tree, with dictionaries, TensorDicts, lists, tuples and values of the types they had. The tensors are on
        the CPU; they are private, writable views of the mapped file, so that a large buffer is not read before it is
        copied into place. Don't truncate the file while they live (`save` never does, it replaces the file).

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is not a checkpoint of this library, or is damaged.
    """
    if not os.path.exists(path):
        raise FileNotFoundError(f"there is no checkpoint at {os.fspath(path)}")
    try:
        metadata, tensors = _open(path)
    except (OSError, OverflowError, RecursionError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{os.fspath(path)} is damaged or not a checkpoint: {error}") from None
    if metadata.get("format") != _FORMAT:
        raise ValueError(f"{os.fspath(path)} is a safetensors file, but not a gpubuf checkpoint")
    if metadata.get("version") != _VERSION:
        raise ValueError(f"{os.fspath(path)} is a checkpoint of version {metadata.get('version')}, this is {_VERSION}")
    stored = tensors.pop(_CHECKSUM, None)
    found = None if stored is None else int.from_bytes(bytes(stored.tolist()), "little")
    if found is None or found != _checksum(path, advance):
        raise ValueError(f"{os.fspath(path)} is damaged: its checksum does not match")
    if checksum is not None and found != checksum:
        raise ValueError(f"{os.fspath(path)} is another file: its checksum is {found:08x}, {checksum:08x} was expected")
    try:
        tree = _decode(json.loads(metadata["state"]), tensors)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{os.fspath(path)} is damaged: its tree cannot be read: {error!r}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{os.fspath(path)} is damaged: its tree is a {type(tree).__name__}, not a dictionary")
    return tree


def _open(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The metadata of a safetensors file, and its tensors: private views of the mapped file.

    Not by ``safetensors.safe_open``: its ``get_tensor`` leaks 64 bytes a tensor (0.8.0), in a run that loads for weeks.

    Raises:
        ValueError: The file is not one. So are, from what the header says, OverflowError, RecursionError, RuntimeError
            and TypeError.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = _LENGTH_BYTES + int.from_bytes(file.read(_LENGTH_BYTES), "little")
        need(_LENGTH_BYTES < start <= size, f"a header of {start - _LENGTH_BYTES} bytes in a file of {size}")
        header = json.loads(file.read(start - _LENGTH_BYTES).decode())
        # Private, so that the file stays as it is. Linux would refuse to reserve as much as the machine has not.
        memory = torch.frombuffer(mmap(file.fileno(), size, **system.PRIVATE), dtype=torch.uint8)
    need(isinstance(header, dict), f"the header is a {type(header).__name__}")
    metadata = header.pop("__metadata__", {})
    need(isinstance(metadata, dict), f"the metadata is a {type(metadata).__name__}")
    entries = {name: _entry(entry, start) for name, entry in header.items()}
    at = start
    for _, _, begin, end in sorted(entries.values(), key=lambda entry: entry[2:]):
        need(begin == at, f"byte {at} belongs to none or to two of the tensors")
        at = end
    need(at == size, f"the tensors end at byte {at} of {size}")
    return metadata, {
        name: memory[begin:end].view(dtype).view(shape) for name, (dtype, shape, begin, end) in entries.items()
    }


def _entry(raw: Any, start: int) -> tuple[torch.dtype, list[int], int, int]:
    """Dtype, shape, and first byte and end in the file of one tensor of a header whose data begins at ``start``."""
    need(isinstance(raw, dict) and raw.keys() == {"dtype", "shape", "data_offsets"}, f"{raw!r} describes no tensor")
    dtype, shape, offsets = DTYPES.get(str(raw["dtype"])), raw["shape"], raw["data_offsets"]
    for counts in (shape, offsets):
        is_counts = isinstance(counts, list) and all(type(n) is int and n >= 0 for n in counts)
        need(is_counts, f"expected counts, got {counts!r}")
    need(dtype is not None and len(offsets) == 2, f"{raw!r} describes no tensor")
    assert dtype is not None
    begin, end = (start + offset for offset in offsets)
    need(end - begin == math.prod(shape) * dtype.itemsize, f"{shape} of {dtype} in {end - begin} bytes")
    return dtype, shape, begin, end


def need(condition: bool, otherwise: str) -> None:
    """Raise a ValueError unless ``condition`` holds."""
    if not condition:
        raise ValueError(otherwise)


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """The JSON form of ``value``; its tensors go into ``tensors`` under a unique name."""
    if isinstance(value, Tensor):
        if value.dtype not in NAMES or value.layout is not torch.strided:
            raise TypeError(f"cannot save {path or 'the state'}: a {value.layout} tensor of dtype {value.dtype}")
        name = path or "tensor"
        # The keys "a.b" and "a" -> "b" have the same dotted path.
        while name in tensors or name == _CHECKSUM:
            name += "'"
        tensors[name] = value.detach()
        return {"$tensor": name, "dtype": NAMES[value.dtype]} if value.dtype in _HELD_AS else {"$tensor": name}
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, bytes):
        return {"$bytes": value.decode("latin-1")}
    if isinstance(value, complex):
        return {"$complex": [_encode(value.real, path, tensors), _encode(value.imag, path, tensors)]}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.isnative and value.dtype.name in _NUMPY:
        scalar = isinstance(value, np.generic)
        return {"$numpy": _encode(torch.from_numpy(np.array(value)), path, tensors), "scalar": scalar}
    if isinstance(value, (list, tuple)):
        items = [_encode(item, f"{path}.{i}" if path else str(i), tensors) for i, item in enumerate(value)]
        if hasattr(value, "_fields"):
            return {"$namedtuple": [type(value).__name__, list(value._fields), items]}
        return items if isinstance(value, list) else {"$tuple": items}
    if is_non_tensor(value):
        return {"$nontensor": _encode(value.tolist(), path, tensors), "batch_size": list(value.batch_size)}
    if is_tensorclass(value):
        # No class is looked up by name when a file is read: its entries are what is saved.
        value = value._tensordict
    if isinstance(value, TensorDictBase):
        rows = {key: _encode(item, f"{path}.{key}" if path else key, tensors) for key, item in value.items()}
        return {"$tensordict": rows, "batch_size": list(value.batch_size)}
    if isinstance(value, Mapping):
        for key in value:
            if not (key is None or isinstance(key, (str, bool, int, float))):
                raise TypeError(f"cannot save {path or 'the state'}: it has a key of type {type(key).__name__}")
        pairs = [(key, _encode(item, f"{path}.{key}" if path else str(key), tensors)) for key, item in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in pairs):
            return dict(pairs)
        return {"$dict": [[_encode(key, "", {}), item] for key, item in pairs]}
    raise TypeError(f"cannot save {path or 'the state'}: it is of type {type(value).__name__}")


def _decode(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(tree, list):
        return [_decode(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if "$tensor" in tree:
        found = tensors[tree["$tensor"]]
        return found.view(DTYPES[tree["dtype"]]).squeeze(-1) if "dtype" in tree else found
    if "$bytes" in tree:
        return tree["$bytes"].encode("latin-1")
    if "$complex" in tree:
        return complex(*(_decode(part, tensors) for part in tree["$complex"]))
    if "$numpy" in tree:
        array = _decode(tree["$numpy"], tensors).numpy()
        return array[()] if tree["scalar"] else array
    if "$tensordict" in tree:
        rows = {key: _decode(item, tensors) for key, item in tree["$tensordict"].items()}
        return TensorDict(rows, tree["batch_size"])
    if "$nontensor" in tree:
        return _non_tensor(_decode(tree["$nontensor"], tensors), tree["batch_size"])
    if "$float" in tree:
        return float(tree["$float"])
    if "$tuple" in tree:
        return tuple(_decode(item, tensors) for item in tree["$tuple"])
    if "$namedtuple" in tree:
        # A class of its own: that of the saved one is code of the user's.
        name, fields, items = tree["$namedtuple"]
        return namedtuple(name, fields)(*(_decode(item, tensors) for item in items))
    if "$dict" in tree:
        return {_decode(key, tensors): _decode(item, tensors) for key, item in tree["$dict"]}
    return {key: _decode(item, tensors) for key, item in tree.items()}


def _non_tensor(values: Any, shape: Sequence[int]) -> NonTensorData | NonTensorStack:
    if not shape or not all(shape):
        return NonTensorData(values, batch_size=shape)
    return NonTensorStack(*(_non_tensor(value, shape[1:]) for value in values))


def _header(tensors: Mapping[str, Tensor], tree: str) -> bytes:
    """The safetensors header: its length as eight bytes, then JSON that gives each tensor's place in the data."""
    entries: dict[str, Any] = {"__metadata__": {"format": _FORMAT, "version": _VERSION, "state": tree}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    checksum_place = [offset, offset + _CHECKSUM_BYTES]
    entries[_CHECKSUM] = {"dtype": "U8", "shape": [_CHECKSUM_BYTES], "data_offsets": checksum_place}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _held(tensor: Tensor) -> Tensor:
    """A tensor in a dtype that a file holds."""
    dtype = _HELD_AS.get(tensor.dtype)
    if dtype is None:
        return tensor
    if dtype.itemsize == tensor.itemsize:
        return tensor.view(dtype).unsqueeze(-1)
    return tensor.resolve_conj().resolve_neg().unsqueeze(-1).contiguous().view(dtype)


def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of ``tensor``, piece by piece, so that no more than a piece of a GPU's tensor is on the host."""
    # One element is contiguous whatever its stride, but can be viewed as bytes only with a stride of 1.
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    for start in range(0, flat.numel(), _CHUNK_BYTES):
        yield flat[start : start + _CHUNK_BYTES].cpu().numpy().data


def _checksum(path: str | os.PathLike[str], advance: Advance) -> int:
    """The checksum of the file up to the place where its own is stored."""
    remaining = os.path.getsize(path) - _CHECKSUM_BYTES
    checksum, chunk = 0, memoryview(bytearray(max(0, min(remaining, _CHUNK_BYTES))))
    # Read, not mapped: where the disk can't deliver, this raises, and mapped memory kills the process.
    with open(path, "rb", buffering=0) as file:
        while remaining > 0 and (n := file.readinto(chunk[:remaining])):
            checksum = zlib.crc32(chunk[:n], checksum)
            remaining -= n
            advance(n)
    return checksum
