"""Checkpoints whose files were changed: refused, or loaded as a whole; the buffer is never left in between.

Two kinds of changes: of bytes, which checksums notice, and of what the files say, with the checksums made right again,
which leave the checks of structure and values to notice them.
"""

from __future__ import annotations

import contextlib
import copy
import json
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gpubuf import (
    LazyTensorStorage,
    ListStorage,
    MultiStepTransform,
    PrioritizedSliceSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
    serialization,
)
from gpubuf.data import TensorDictMaxValueWriter
from gpubuf.data.checkpoints import files
from gpubuf.data.processing.statistics import Normalize
from gpubuf.data.storage import host_memory
from tests.support.checkpoint_setup import contents
from tests.support.transitions import transitions

CAPACITY = 40
FILE_BYTES = 2_000
SAMPLERS: dict[str, Callable[[], Any]] = {
    "prioritized": lambda: PrioritizedSliceSampler(CAPACITY, 0.7, 0.5, slice_len=2),
    "rows": SamplerWithoutReplacement,
    "slices": lambda: SliceSamplerWithoutReplacement(slice_len=2),
}


def filled(kind: str, start: int) -> TensorDictReplayBuffer:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), sampler=SAMPLERS[kind]())
    buffer.extend(transitions(55, start=start))
    batch = buffer.sample(6)
    if kind == "prioritized":
        buffer.update_priority(batch["index"], torch.rand(6))
    return buffer


class Target:
    """A folder with a checkpoint, to be changed and made whole again, and a buffer that holds something else."""

    def __init__(self, folder: Path, kind: str) -> None:
        torch.manual_seed(0)
        self.folder, self.kind = folder, kind
        saved = filled(kind, 0)
        saved.save(folder, file_bytes=FILE_BYTES)
        self.good = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.names = sorted(self.good)
        self.buffer = filled(kind, 500)
        self.before = contents(self.buffer)
        self.backup = copy.deepcopy({k: v for k, v in self.buffer.state_dict().items() if k != "_storage"})
        other = filled(kind, 0)
        other.load(folder)
        self.after = contents(other)
        self.other_storage = copy.deepcopy(self.buffer.storage.state_dict())
        self.path_of_other = folder.parent / "another"
        filled(kind, 900).save(self.path_of_other, file_bytes=FILE_BYTES)

    def refused(self) -> bool:
        """Try to load; whether that was refused. The buffer must then be as it was, bit for bit."""
        try:
            self.buffer.load(self.folder)
        except (ValueError, FileNotFoundError) as error:
            message = str(error)
        else:
            return False
        assert message
        assert contents(self.buffer) == self.before, message
        return True

    def put_back(self) -> None:
        """Make the checkpoint whole, and the buffer what it was."""
        for name, data in self.good.items():
            path = self.folder / name
            if not path.exists() or path.read_bytes() != data:
                # Truncating a file that is there would make the file system wait for the disk.
                path.unlink(missing_ok=True)
                path.write_bytes(data)

    def restore_buffer(self) -> None:
        self.buffer.load_state_dict(copy.deepcopy({**self.backup, "_storage": self.other_storage}))
        assert contents(self.buffer) == self.before


def change_bytes(data: bytearray, generator: random.Random) -> bytearray:
    """One change that a disk, a transfer or an editor might make."""
    at = generator.randrange(len(data))
    upto = min(len(data), at + generator.choice([1, 2, 8, 100]))
    kind = generator.randrange(9)
    if kind == 0:
        data[at] ^= 1 << generator.randrange(8)
    elif kind == 1:
        data[at] = generator.randrange(256)
    elif kind == 2:
        del data[at:]
    elif kind == 3:
        del data[at:upto]
    elif kind == 4:
        data[at:at] = data[at:upto]
    elif kind == 5:
        data[at:upto] = bytes(upto - at)
    elif kind == 6:
        data += bytes(generator.randrange(256) for _ in range(generator.choice([1, 8, 50])))
    elif kind == 7:
        data[at:upto] = generator.randbytes(upto - at)
    else:
        # Digits make the shapes, offsets, sizes and counters.
        digits = [i for i in range(min(len(data), 3_000)) if 48 <= data[i] < 58]
        if digits:
            data[generator.choice(digits)] = generator.randrange(48, 58)
    return data


def change_files(target: Target, generator: random.Random) -> None:
    path = target.folder / generator.choice(target.names)
    kind = generator.randrange(12)
    if kind == 0:
        path.unlink()
    elif kind == 1:
        path.write_bytes(target.good[generator.choice(target.names)])
    elif kind == 2:
        shutil.copyfile(generator.choice(sorted(target.path_of_other.iterdir())), path)
    else:
        path.unlink()
        path.write_bytes(change_bytes(bytearray(target.good[path.name]), generator))


@pytest.mark.parametrize("kind", SAMPLERS)
def test_changed_bytes(kind, tmp_path):
    """Whatever byte of whatever file was changed: refused, unless the files say the same all the same."""
    target, generator = Target(tmp_path / "c", kind), random.Random(1)
    n_refused, n = 0, 2_400
    for _ in range(n):
        change_files(target, generator)
        if target.refused():
            n_refused += 1
        else:
            assert contents(target.buffer) == target.after
            target.restore_buffer()
        target.put_back()
    assert n_refused > 0.8 * n


# What the files say

ODD: list[Any] = [None, True, -1, 0, 1, 7, 40, 41, 2**31, 2**62, 2**63, 10**30, 1.5, -0.5, 1e308, float("nan")]
ODD += ["", "0", "F32", [], {}, [0], [2**40, 3], {"a": 1}, "../escape", "/etc/passwd", "RandomSampler"]
ODD += ["rows-00000-0123456789abcdef.safetensors"]


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    found = []
    for key, value in items:
        found += [(tree, key), *places(value)]
    return found


def change_tensor(tensor: torch.Tensor, generator: random.Random) -> torch.Tensor:
    tensor = tensor.clone()
    kind = generator.randrange(6)
    if kind == 0:
        return tensor.to(generator.choice([torch.float32, torch.int64, torch.float64, torch.uint8]))
    if kind == 1:
        return tensor.unsqueeze(generator.randrange(tensor.dim() + 1))
    if kind == 2 and tensor.dim():
        return tensor[: generator.randrange(len(tensor) + 1)]
    if kind == 3 and tensor.dim():
        return torch.cat([tensor, tensor])
    if tensor.numel():
        values: list[float] = [-1, 41, 2**40, -(2**62)] if tensor.dtype is torch.int64 else [0, 1]
        if tensor.is_floating_point():
            values = [-1, 0, 41, float("nan"), float("inf"), -0.5, 1e30]
        value = generator.choice(values)
        tensor.view(-1)[generator.randrange(tensor.numel())] = value
    return tensor


def change_tree(tree: Any, generator: random.Random, place: int | None = None) -> None:
    """Change one value of a tree, or remove, double or rename it."""
    found = places(tree)
    container, key = generator.choice(found) if place is None else found[place]
    kind = generator.randrange(8)
    if isinstance(container[key], torch.Tensor) and kind < 6:
        container[key] = change_tensor(container[key], generator)
    elif kind == 0:
        del container[key]
    elif kind == 1 and isinstance(container, list):
        container.insert(key, copy.deepcopy(container[key]))
    elif kind == 2 and isinstance(container, dict):
        container[generator.choice(["", "rows", "tree", "x", "$tensor"])] = container.pop(key)
    elif kind == 3:
        other, place = generator.choice(places(tree))
        container[key] = copy.deepcopy(other[place])
    elif kind == 4 and type(container[key]) is int:
        container[key] += generator.choice([-1, 1, 40])
    else:
        container[key] = copy.deepcopy(generator.choice(ODD))


def reseal(folder: Path, content: Any) -> None:
    try:
        checksum = files._checksum(content)
    except ValueError:
        checksum = 0
    whole = {
        "format": files.FORMAT,
        "version": files.VERSION,
        "checksum": checksum,
        "content": content,
    }
    (folder / files.MANIFEST).write_text(json.dumps(whole))


def change_meaning(target: Target, generator: random.Random) -> None:
    folder = target.folder
    content = json.loads(target.good[files.MANIFEST])["content"]
    file = generator.choice([None, None, content["state"], content["state"], *content["rows"]["files"]])
    if file is None:
        change_tree(content, generator)
    else:
        state = copy.deepcopy(serialization.load(folder / file["name"]))
        change_tree(state, generator)
        # Files are created, never overwritten.
        (folder / file["name"]).unlink()
        file["size"], file["checksum"] = serialization.write(folder / file["name"], serialization.contents(state))
    reseal(folder, content)


@pytest.mark.parametrize("kind", SAMPLERS)
def test_changed_meaning(kind, tmp_path):
    """Contents that no save has written, with all checksums right: refused, or loaded as a whole."""
    target, generator = Target(tmp_path / "c", kind), random.Random(2)
    n_refused, n = 0, 1_000
    for _ in range(n):
        change_meaning(target, generator)
        if target.refused():
            n_refused += 1
        else:
            after = contents(target.buffer)
            assert after != target.before
            target.buffer._batches._batch_size = None
            # What an epoch says may have become untrue, but no sample may read outside of the rows.
            with contextlib.suppress(RuntimeError, ValueError, IndexError):
                target.buffer.sample(4)
            target.restore_buffer()
        target.put_back()
    assert n_refused > 0.5 * n
    assert n_refused < n


class Scale(torch.nn.Module):
    """A transform with parameters, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))

    def forward(self, data: Any) -> Any:
        return data


SYSTEMS: dict[str, Callable[[], TensorDictReplayBuffer]] = {
    "prefetch and transforms": lambda: TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY), batch_size=6, prefetch=2, transform=Scale()
    ),
    "steps at the write": lambda: TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY), batch_size=6, transform=MultiStepTransform(3, 0.9, write_time=True)
    ),
    "processing": lambda: TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY), batch_size=6, process=[Normalize("observation")]
    ),
    "ranks": lambda: TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY), batch_size=6, writer=TensorDictMaxValueWriter()
    ),
    "next observations shared": lambda: TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY, share_next=["observation"]), batch_size=6
    ),
    "containers and text": lambda: ReplayBuffer(storage=ListStorage(CAPACITY), batch_size=6),
}


def filled_system(kind: str, start: int) -> Any:
    buffer: Any = SYSTEMS[kind]()
    rows = transitions(55, start=start)
    buffer.extend([{"text": "a", "row": row} for row in rows] if kind.startswith("containers") else rows)
    buffer.sample()
    return buffer


def state_bytes(buffer: Any) -> bytes:
    return b"".join(map(bytes, serialization.contents(buffer.state_dict())))


@pytest.mark.parametrize("kind", SYSTEMS)
def test_every_field_of_every_part(kind, tmp_path):
    """Each field of a manifest and of the state, changed in many ways: a ValueError, or loaded as a whole."""
    folder, generator = tmp_path / "c", random.Random(3)
    torch.manual_seed(0)
    filled_system(kind, 0).save(folder)
    content = json.loads((folder / files.MANIFEST).read_text())["content"]
    name = content["state"]["name"]
    state = copy.deepcopy(serialization.load(folder / name))
    buffer = filled_system(kind, 500)
    before, kept = state_bytes(buffer), copy.deepcopy(buffer.state_dict())
    n_fields = {"manifest": len(places(content)), "state": len(places(state))}
    n_refused = n = 0
    for part, fields in n_fields.items():
        chosen = range(fields) if fields <= 150 else generator.sample(range(fields), 150)
        for place in chosen:
            for _ in range(3):
                said, told = copy.deepcopy(content), copy.deepcopy(state)
                change_tree(said if part == "manifest" else told, generator, place)
                if part == "state":
                    (folder / name).unlink(missing_ok=True)
                    sizes = serialization.write(folder / name, serialization.contents(told))
                    said["state"]["size"], said["state"]["checksum"] = sizes
                reseal(folder, said)
                n += 1
                try:
                    buffer.load(folder)
                except ValueError as error:
                    refusal = str(error)
                else:
                    buffer.load_state_dict(copy.deepcopy(kept))
                    continue
                n_refused += 1
                assert refusal
                assert state_bytes(buffer) == before, (part, place, refusal)
        (folder / name).unlink()
        sizes = serialization.write(folder / name, serialization.contents(state))
        content["state"]["size"], content["state"]["checksum"] = sizes
    assert 0.2 * n < n_refused < n


def test_a_batch_size_that_no_buffer_could_have(tmp_path):
    buffer = filled_system("prefetch and transforms", 0)
    for size in (2**31, 0, -1, 1.5, True, "6"):
        with pytest.raises(ValueError, match="batch"):
            buffer.load_state_dict({**buffer.state_dict(), "_batch_size": size})
    assert buffer.batch_size == 6
    with pytest.raises(ValueError, match="below 2"):
        ReplayBuffer(storage=LazyTensorStorage(4), batch_size=2**31)


@pytest.mark.parametrize("name", ["../out.safetensors", "/tmp/out.safetensors", "sub/rows.safetensors", "..", ""])
def test_no_file_outside_of_the_folder_is_named(name, tmp_path):
    target = Target(tmp_path / "c", "rows")
    content = json.loads(target.good[files.MANIFEST])["content"]
    content["state"]["name"] = name
    reseal(target.folder, content)
    with pytest.raises(ValueError, match="is not the name of a file in a checkpoint"):
        target.buffer.load(target.folder)


def test_links_are_not_followed(tmp_path):
    target = Target(tmp_path / "c", "rows")
    name = next(name for name in target.names if name.startswith("state"))
    (target.folder / name).rename(tmp_path / "elsewhere")
    (target.folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="not a regular file"):
        target.buffer.load(target.folder)


def test_versions_and_formats(tmp_path):
    target = Target(tmp_path / "c", "rows")
    found = json.loads(target.good[files.MANIFEST])
    path = target.folder / files.MANIFEST
    path.write_text(json.dumps(found | {"version": 2}))
    with pytest.raises(ValueError, match="is of version 2; this release of gpubuf reads version 1"):
        target.buffer.load(target.folder)
    path.write_text(json.dumps(found | {"format": "torchrl"}))
    with pytest.raises(ValueError, match="its format is 'torchrl', not 'gpubuf-checkpoint'"):
        target.buffer.load(target.folder)
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="is damaged"):
        target.buffer.load(target.folder)
    assert contents(target.buffer) == target.before


events: list[tuple[str, Any]] | None = None


def audit(event: str, arguments: tuple[Any, ...]) -> None:
    if events is not None and event in ("open", "exec", "pickle.find_class", "subprocess.Popen", "os.system"):
        events.append((event, arguments[0]))


def test_loading_runs_no_code_and_reads_no_other_file(tmp_path):
    target = Target(tmp_path / "c", "prioritized")
    target.buffer.load(target.folder)
    sys.addaudithook(audit)

    def heard(action: Callable[[], object]) -> set[Path]:
        global events
        events = []
        try:
            action()
        finally:
            seen, events = events, None
        assert {event for event, _ in seen} == {"open"}
        return {Path(path) for _, path in seen}

    # A load asks for free memory, to keep what the buffer held.
    machine = heard(host_memory.free)
    opened = heard(lambda: target.buffer.load(target.folder))
    assert machine < opened
    assert {path.parent for path in opened - machine - {target.folder}} == {target.folder}
