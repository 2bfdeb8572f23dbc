"""What every checkpoint must do, whatever buffer it is of: checkpoints to damage, and buffers to load them into."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gpubuf import ReplayBuffer, serialization, system
from gpubuf.data.checkpoints import files
from tests.contracts.buffers import BufferContract


def state_bytes(buffer: Any) -> bytes:
    """Everything in a buffer that a load can change."""
    return b"".join(map(bytes, serialization.contents(buffer.state_dict())))


class Target:
    """A folder with a checkpoint, to be changed and made whole again, and a buffer that holds something else."""

    def __init__(self, folder: Path, contract: BufferContract) -> None:
        torch.manual_seed(0)
        self.folder, self.contract = folder, contract
        saved, other, third = (contract.filled(seed=seed)[0] for seed in (0, 5, 7))
        for buffer in (saved, other, third):
            buffer.sample()
        saved.save(folder)
        third.save(folder.parent / "another")
        self.good = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
        self.manifest = json.loads(self.good[files.MANIFEST])
        self.saved, self.origin = saved, pickle.dumps(other)
        self.buffer: ReplayBuffer = pickle.loads(self.origin)
        self.before = state_bytes(self.buffer)
        fresh = contract.new(seed=9)
        fresh.load(folder, end_trajectories=False)
        self.after = state_bytes(fresh)

    def refused(self) -> str:
        """Load; the text of the refusal, after which the buffer is as it was, bit for bit, or else ""."""
        try:
            self.buffer.load(self.folder, end_trajectories=False)
        except (ValueError, FileNotFoundError) as error:
            text = str(error)
        else:
            return ""
        assert state_bytes(self.buffer) == self.before, text
        return text

    def put_back(self, *, loaded: bool) -> None:
        """Make the checkpoint whole, and the buffer what it was."""
        for name, data in self.good.items():
            path = self.folder / name
            if path.is_symlink() or not path.exists() or path.read_bytes() != data:
                # Truncating a file that is there would make the file system wait for the disk.
                path.unlink(missing_ok=True)
                path.write_bytes(data)
        if loaded:
            self.buffer = pickle.loads(self.origin)


# Changes of bytes, which checksums notice


def change_bytes(data: bytearray, chance: random.Random) -> bytearray:
    """One change that a disk, a transfer or an editor might make."""
    at = chance.randrange(len(data))
    upto = min(len(data), at + chance.choice([1, 2, 8, 100]))
    # Digits make the shapes, offsets, sizes and counters.
    digits = [i for i in range(min(len(data), 3_000)) if 48 <= data[i] < 58]
    kind = chance.randrange(6)
    if kind == 0:
        data[at] ^= 1 << chance.randrange(8)
    elif kind == 1:
        del data[at : chance.choice([upto, len(data)])]
    elif kind == 2:
        data[at:at] = data[at:upto]
    elif kind == 3:
        data[at:upto] = chance.choice([bytes(upto - at), chance.randbytes(upto - at)])
    elif kind == 4:
        data += chance.randbytes(8)
    elif digits:
        data[chance.choice(digits)] = chance.randrange(48, 58)
    return data


def change_files(target: Target, chance: random.Random) -> None:
    """Damage one file, remove it, or put another in its place."""
    path = target.folder / chance.choice(list(target.good))
    kind = chance.randrange(12)
    path.unlink()
    if kind == 1:
        path.write_bytes(target.good[chance.choice(list(target.good))])
    elif kind == 2:
        path.write_bytes(chance.choice(sorted((target.folder.parent / "another").iterdir())).read_bytes())
    elif kind > 2:
        path.write_bytes(change_bytes(bytearray(target.good[path.name]), chance))


# Changes of what the files say, with the checksums made right again

ODD: list[Any] = [None, True, -1, 0, 1, 7, 40, 41, 2**31, 2**62, 2**63, 10**30, 1.5, -0.5, 1e308, float("nan")]
ODD += ["", "0", "F32", [], {}, [0], [2**40, 3], {"a": 1}, "../escape", "/etc/passwd", "RandomSampler"]
ODD += ["state-00000-0123456789abcdef.safetensors"]


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    found = []
    for key, value in items:
        found += [(tree, key), *places(value)]
    return found


def change_tensor(tensor: torch.Tensor, chance: random.Random) -> torch.Tensor:
    tensor = tensor.clone()
    kind = chance.randrange(6)
    if kind == 0:
        return tensor.to(chance.choice([torch.float32, torch.int64, torch.float64, torch.uint8]))
    if kind == 1:
        return tensor.unsqueeze(chance.randrange(tensor.dim() + 1))
    if kind == 2 and tensor.dim():
        return tensor[: chance.randrange(len(tensor) + 1)]
    if kind == 3 and tensor.dim():
        return torch.cat([tensor, tensor])
    if tensor.numel():
        values: list[float] = [-1, 41, 2**40, -(2**62)] if tensor.dtype is torch.int64 else [0, 1]
        if tensor.is_floating_point():
            values = [-1, 0, 41, float("nan"), float("inf"), -0.5, 1e30]
        tensor.view(-1)[chance.randrange(tensor.numel())] = chance.choice(values)
    return tensor


def change_tree(tree: Any, place: int, chance: random.Random) -> None:
    """Change one value of a tree, or remove, double or rename it."""
    container, key = places(tree)[place]
    kind = chance.randrange(8)
    if isinstance(container[key], torch.Tensor) and kind < 6:
        container[key] = change_tensor(container[key], chance)
    elif kind == 0:
        del container[key]
    elif kind == 1 and isinstance(container, list):
        container.insert(key, copy.deepcopy(container[key]))
    elif kind == 2 and isinstance(container, dict):
        container[chance.choice(["", "rows", "tree", "x", "$tensor"])] = container.pop(key)
    elif kind == 3:
        other, place = chance.choice(places(tree))
        container[key] = copy.deepcopy(other[place])
    elif kind == 4 and type(container[key]) is int:
        container[key] += chance.choice([-1, 1, 40])
    else:
        container[key] = copy.deepcopy(chance.choice(ODD))


def reseal(folder: Path, content: Any) -> None:
    """Write a manifest whose checksum is right."""
    try:
        checksum = files._checksum(content)
    except ValueError:
        checksum = 0
    manifest = json.loads((folder / files.MANIFEST).read_text())
    (folder / files.MANIFEST).write_text(json.dumps(manifest | {"checksum": checksum, "content": content}))


def change_meaning(folder: Path, file: str | None, change: Callable[[Any], None]) -> None:
    """Change what the manifest says, or, if ``file`` is one, that file."""
    content = json.loads((folder / files.MANIFEST).read_text())["content"]
    if file is None:
        change(content)
    else:
        (entry,) = [held for held, key in places(content) if key == "name" and held[key] == file]
        state = copy.deepcopy(serialization.load(folder / file))
        change(state)
        # Files are created, never overwritten.
        (folder / file).unlink()
        entry["size"], entry["checksum"] = serialization.write(folder / file, serialization.contents(state))
    reseal(folder, content)


# Saves that are cut short


class PowerCutError(BaseException):
    """Not an Exception: nothing may handle it."""


def cut_short(patched: pytest.MonkeyPatch, fail_at: int, save: Callable[[], object]) -> bool:
    """Let a save fail before one of its calls that change the disk; whether it had as many."""
    calls, lock = [0], threading.Lock()

    def counted(module: Any, name: str) -> None:
        original = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            # Not those of a finalizer, which removes the files of another test's storage whenever it comes to it.
            if sys._getframe(1).f_code.co_name != "_remove":
                with lock:
                    if calls[0] == fail_at:
                        raise PowerCutError
                    calls[0] += 1
            return original(*args, **kwargs)

        patched.setattr(module, name, call)

    for module, name in ((os, "replace"), (os, "fsync"), (Path, "unlink")):
        counted(module, name)
    counted(serialization, "write")
    counted(system, "sync_folder")
    try:
        save()
    except PowerCutError:
        return True
    return False


# Loads that fail late


class FailedError(Exception):
    """What parts of these tests raise."""


def break_part(part: Any, method: str, *, late: bool) -> Callable[[], None]:
    """Let a part of a buffer be one of a user's own that fails when it is loaded: at once, or when it has changed.

    Returns:
        What mends it.
    """
    kind = type(part)

    class Failing(kind):  # type: ignore[misc, valid-type]
        broken = True

        def fail(self, *arguments: Any, **named: Any) -> None:
            if late or not self.broken:
                getattr(super(), method)(*arguments, **named)
                self.history[0].fill_(7.0)
                self.history.append(torch.ones(1))
            if self.broken:
                raise FailedError

    setattr(Failing, method, Failing.fail)
    Failing.__name__ = kind.__name__
    part.__class__ = Failing
    part.history = [torch.zeros(2)]
    return lambda: setattr(part, "broken", False)
