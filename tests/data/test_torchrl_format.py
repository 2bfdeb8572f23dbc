"""Buffers from and to TorchRL: folders that TorchRL wrote (tests/support/torchrl_files), and folders like them."""

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from gpubuf.integrations.torchrl import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
    load_torchrl,
)
from tests.support.torchrl_files.torchrl_rows import filled, transitions
from tests.support.transitions import same

DUMPS = Path(__file__).parents[1] / "support" / "torchrl_files" / "torchrl"


def expected(*steps: int) -> TensorDict:
    rows = [transitions(1, step) for step in steps]
    return torch.cat(rows)


def stored(buffer: ReplayBuffer) -> TensorDict:
    found = buffer.storage[:]
    return found.exclude("index") if isinstance(found, TensorDict) else found


# From TorchRL


def test_what_a_folder_holds():
    """CASES.md 18: a ring that went round, an exactly full one, one with room; and single tensors."""
    buffer = load_torchrl(DUMPS / "wrapped")
    assert type(buffer) is TensorDictReplayBuffer
    assert same(stored(buffer), expected(8, 9, 10, 3, 4, 5, 6, 7))
    assert (buffer.write_count, buffer.storage.cursor, buffer.batch_size) == (11, 3, 4)
    assert set(buffer.sample().keys()) == {*expected(0).keys(), "index"}
    assert buffer.extend(transitions(1, 11)).tolist() == [3]
    buffer = load_torchrl(DUMPS / "full", batch_size=3)
    assert same(stored(buffer), transitions(8))
    assert (len(buffer), buffer.write_count, buffer.storage.cursor, buffer.batch_size) == (8, 8, 0, 3)
    buffer = load_torchrl(DUMPS / "partial")
    assert same(stored(buffer), transitions(6))
    assert (buffer.storage.max_size, buffer.write_count) == (16, 6)
    buffer = load_torchrl(DUMPS / "tensor")
    assert type(buffer) is ReplayBuffer
    assert (stored(buffer).tolist(), buffer.storage.max_size) == ([0.0, 1.5, 3.0], 5)


@pytest.mark.parametrize("storage", [None, lambda: LazyTensorStorage(12, ndim=2)])
def test_two_dimensions(storage: Callable | None):
    """How many dimensions a dump has is found out, or follows from the storage."""
    buffer = load_torchrl(DUMPS / "two_dimensions", storage=storage)
    assert buffer.storage.shape == (6, 2)
    steps = [[102, 105], [1, 5], [2, 6], [3, 7], [100, 103], [101, 104]]
    assert same(stored(buffer), torch.stack([expected(*pair) for pair in steps]))
    assert (buffer.write_count, buffer.storage.cursor, len(buffer)) == (14, 2, 12)


def test_another_capacity():
    """CASES.md 10: twice as large, with the oldest row first. Too small is refused."""
    buffer = load_torchrl(DUMPS / "wrapped", storage=LazyTensorStorage(16))
    assert same(stored(buffer), transitions(8, 3))
    assert buffer.storage.cursor == 8
    with pytest.raises(ValueError, match="holds 8 rows, the storage has room for 7"):
        load_torchrl(DUMPS / "wrapped", storage=LazyTensorStorage(7))


def test_into_files(tmp_path: Path):
    load_torchrl(DUMPS / "wrapped", storage=LazyMemmapStorage(8, scratch_dir=tmp_path))
    storage = LazyMemmapStorage.open(tmp_path)
    assert same(storage[:].exclude("index"), expected(8, 9, 10, 3, 4, 5, 6, 7))
    assert storage.written == 11


def test_priorities():
    """CASES.md 10: the maximum too. A row of weight zero is not drawn."""
    buffer = load_torchrl(DUMPS / "prioritized")
    sampler = buffer.sampler
    assert isinstance(sampler, PrioritizedSampler)
    assert (sampler.alpha, sampler.beta, sampler.eps) == (0.5, 0.25, 0.0)
    assert sampler.tree.leaves[:8].tolist() == [1, 2, 3, 0.5, 0, 1, 0, 0]
    assert (float(sampler.tree.total), float(sampler.default_priority)) == (7.5, 9.0)
    _, info = buffer.sample(1000, return_info=True)
    drawn = info["index"].bincount(minlength=6).tolist()
    assert [n > 0 for n in drawn] == [True, True, True, True, False, True]
    torch.testing.assert_close(info["priority_weight"], (sampler.tree.leaves[info["index"]] / 0.5) ** -0.25)
    buffer.extend(transitions(1, 6))
    assert sampler.tree.leaves[6] == 3


# As if from TorchRL


def dump(buffer: ReplayBuffer, folder: Path) -> None:
    """Write the files that TorchRL would, but for priorities."""
    buffer.storage._storage.memmap(folder / "storage")
    rows = {"metadata": {}, "is_pytree": False, "len": len(buffer)}
    (folder / "storage" / "storage_metadata.json").write_text(json.dumps(rows))
    (folder / "writer").mkdir()
    per_step = buffer.storage.shape[1:].numel()
    place = {"cursor": buffer.storage.cursor // per_step, "write_count": buffer.write_count // per_step}
    (folder / "writer" / "metadata.json").write_text(json.dumps(place))
    (folder / "buffer_metadata.json").write_text(json.dumps({"batch_size": buffer.batch_size}))


@pytest.mark.parametrize("capacity", [5, 23])
def test_there_and_back(tmp_path: Path, capacity: int):
    """Any state of the ring; nested batch dimensions, odd names and elements of no size."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), batch_size=32)
    step = torch.arange(19)
    agents = TensorDict({"x": step[:, None, None].expand(19, 2, 1).half()}, [19, 2])
    data = TensorDict({"a b/../c": step, "%": -step, "agents": agents, "deep": {"er": {"z": step.bool()}}}, [19])
    for start in range(0, 19, 4):
        buffer.extend(data[start : start + 4])
    dump(buffer, tmp_path / "dump")
    again = load_torchrl(tmp_path / "dump")
    assert same(stored(again), stored(buffer))
    assert (again.write_count, again.storage.max_size, again.batch_size) == (19, capacity, 32)
    larger = load_torchrl(tmp_path / "dump", storage=LazyTensorStorage(30))
    oldest = 19 - min(19, capacity)
    assert stored(larger)["a b/../c"].tolist() == list(range(oldest, 19))


def test_agents_at_the_root(tmp_path: Path):
    """Rows that have dimensions of their own are told from storage dimensions by how much was written."""
    for n in (3, 4, 9):
        buffer = ReplayBuffer(storage=LazyTensorStorage(6))
        buffer.extend(TensorDict({"x": torch.arange(2 * n).view(n, 2)}, [n, 2]))
        dump(buffer, tmp_path / str(n))
        again = load_torchrl(tmp_path / str(n))
        assert (again.storage.ndim, len(again)) == (1, min(n, 6))
        assert same(stored(again), stored(buffer))


def test_counts_beyond_an_int(tmp_path: Path):
    """TorchRL counts written steps in a C int, which wraps: the cursor stays right."""
    buffer = filled(TensorDictReplayBuffer(storage=LazyTensorStorage(7)), 7)
    dump(buffer, tmp_path / "dump")
    (tmp_path / "dump" / "writer" / "metadata.json").write_text(json.dumps({"cursor": 2, "write_count": -5}))
    again = load_torchrl(tmp_path / "dump")
    assert (again.storage.cursor, again.write_count) == (2, 9)


# Errors


def copied(name: str, to: Path) -> Path:
    return Path(shutil.copytree(DUMPS / name, to / name))


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "no storage": ("wrapped", lambda f: shutil.rmtree(f / "storage"), "no memory-mapped storage"),
    "no writer": ("wrapped", lambda f: shutil.rmtree(f / "writer"), "is missing"),
    "no settings": ("wrapped", lambda f: (f / "buffer_metadata.json").unlink(), "is missing"),
    "truncated": ("wrapped", lambda f: os.truncate(f / "storage" / "action.memmap", 60), "60 bytes, but"),
    "more rows than room": ("wrapped", lambda f: edit(f / "storage" / "storage_metadata.json", len=9), "impossible"),
    "no number of rows": ("wrapped", lambda f: edit(f / "storage" / "storage_metadata.json", len=None), "integer"),
    "half a step": ("two_dimensions", lambda f: edit(f / "storage" / "storage_metadata.json", len=11), "impossible"),
    "cursor beyond the end": ("wrapped", lambda f: edit(f / "writer" / "metadata.json", cursor=8), "impossible"),
    "not a ring": ("partial", lambda f: edit(f / "writer" / "metadata.json", cursor=2), "not those of a ring"),
    "a list of tensors": (
        "tensor",
        lambda f: edit(f / "storage" / "storage_metadata.json", metadata={"0": {}, "1": {}}),
        "only single tensors",
    ),
    "non-tensor data": (
        "wrapped",
        lambda f: edit(f / "storage" / "meta.json", action={"type": "NonTensorData"}),
        "non-tensor data",
    ),
    "a newer sampler": ("prioritized", lambda f: edit(sampler(f), _schema_version=2), "has version 2"),
    "alpha is text": ("prioritized", lambda f: edit(sampler(f), _alpha="1"), "'alpha' must be a number"),
    "beta is not finite": ("prioritized", lambda f: edit(sampler(f), _beta=float("inf")), "'beta' must be a number"),
    "half a row of room": ("prioritized", lambda f: edit(sampler(f), _max_capacity=7.5), "whole number"),
    "less priorities": ("prioritized", lambda f: edit(sampler(f), _max_capacity=7), "64 bytes, but"),
    "maximum is a number": ("prioritized", lambda f: edit(sampler(f), _max_priority=3), "a priority and an index"),
    "weights below zero": ("prioritized", lambda f: weights(f).write_bytes(b"\xbf" * 64), "negative or not finite"),
    "weights are NaN": ("prioritized", lambda f: weights(f).write_bytes(b"\xff" * 64), "negative or not finite"),
    "too few priorities": (
        "prioritized",
        lambda f: (edit(sampler(f), _max_capacity=5), os.truncate(weights(f), 40)),
        "room for 5 rows",
    ),
}


def sampler(folder: Path) -> Path:
    return folder / "sampler" / "sampler_metadata.json"


def weights(folder: Path) -> Path:
    return folder / "sampler" / "sumtree.memmap"


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_an_error(tmp_path: Path, damage: str):
    name, spoil, message = DAMAGES[damage]
    folder = copied(name, tmp_path)
    spoil(folder)
    with pytest.raises(ValueError, match=message):
        load_torchrl(folder)


PIECES = ("0", "-1", "8", "1e99", "9" * 25, "NaN", "null", "true", '"x"', '"../x"', "[]", "[8]", "[8, 2]", "{}", "")


def test_links_are_refused(tmp_path: Path):
    """Case 56: nothing is read from outside of the folder that was named."""
    below = [path.relative_to(DUMPS / "prioritized") for path in sorted((DUMPS / "prioritized").rglob("*"))]
    used = [name for name in below if name.name != "mintree.memmap"]
    assert {Path("storage"), Path("sampler"), Path("writer"), Path("storage/next")} < set(used)
    for number, name in enumerate(used):
        folder = copied("prioritized", tmp_path / str(number))
        (folder / name).rename(tmp_path / f"{number}-away")
        (folder / name).symlink_to(tmp_path / f"{number}-away")
        with pytest.raises(ValueError, match="link"):
            load_torchrl(folder)


def test_mutated_dumps(tmp_path: Path):
    """Whatever a value of the metadata is replaced by: a ValueError, or a buffer that works."""
    chance = random.Random(4)
    outcomes = []
    for trial in range(100):
        name = chance.choice(sorted(path.name for path in DUMPS.iterdir()))
        folder = copied(name, tmp_path / str(trial))
        path = chance.choice(sorted(folder.rglob("*.json")))
        text = path.read_text()
        token = chance.choice(list(re.finditer(r'[\d.]+|"[^"]*"|true|false|null|\[[^\]]*\]', text)))
        path.write_text(text[: token.start()] + chance.choice(PIECES) + text[token.end() :])
        try:
            buffer = load_torchrl(folder)
            if len(buffer):
                buffer.sample(buffer.batch_size or 2)
            outcomes.append("loaded")
        except ValueError:
            outcomes.append("refused")
    assert set(outcomes) == {"loaded", "refused"}


def test_foreign_folders(tmp_path: Path):
    with pytest.raises(ValueError, match="not a folder"):
        load_torchrl(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no memory-mapped storage"):
        load_torchrl(tmp_path)


def test_storage_must_fit():
    full = LazyTensorStorage(8)
    filled(TensorDictReplayBuffer(storage=full), 3)
    with pytest.raises(ValueError, match="must be empty"):
        load_torchrl(DUMPS / "wrapped", storage=full)
    with pytest.raises(ValueError, match="2 dimension"):
        load_torchrl(DUMPS / "wrapped", storage=LazyTensorStorage(8, ndim=2))


def test_no_pickle_is_read(tmp_path: Path):
    """Code in the pickles that TorchRL writes beside the rows is not run; the loss of a transform's state is said."""

    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "exploded"),))

    folder = copied("wrapped", tmp_path)
    for name in ("prefetch.pkl", "transform.t"):
        torch.save(Bomb(), folder / name)
    with pytest.warns(UserWarning, match="transform"):
        assert len(load_torchrl(folder)) == 8
    assert not (tmp_path / "exploded").exists()


def state_of_torchrl(written: int, tree: list[float] | None = None) -> dict:
    """What ``state_dict()`` of a buffer of TorchRL has, with room for 8 rows, of which the first dimension counts."""
    rows = torch.cat([transitions(1, step) for step in range(max(written - 8, 0), written)])
    rows = rows.roll(written % 8, 0) if written > 8 else torch.cat([rows, rows[:1].expand(8 - written)])
    flat = {".".join(key) if isinstance(key, tuple) else key: value for key, value in rows.items(True, True)}
    sampler = {} if tree is None else {"_alpha": 1.0, "_beta": 0.5, "_eps": 0.0, "_max_priority": (9.0, 1)}
    return {
        "_storage": {"_storage": {**flat, "index": torch.arange(8)}, "initialized": True, "_len": min(written, 8)},
        "_sampler": sampler | ({} if tree is None else {"_schema_version": 1, "_sum_tree": torch.tensor(tree)}),
        "_writer": {"_cursor": written % 8, "_write_count": written},
        "_transforms": {},
        "_batch_size": 2,
        "_prefetch_state": {"version": 1, "capacity": 0, "queue": ()},
    }


@pytest.mark.parametrize("written", [5, 8, 13])
def test_a_state_of_torchrls(written: int):
    tree = [float(row + 1) for row in range(8)]
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(8), sampler=PrioritizedSampler(8, alpha=0.5, beta=0.5), batch_size=3
    )
    buffer.load_state_dict(state_of_torchrl(written, tree))
    assert (buffer.write_count, len(buffer), buffer.batch_size) == (written, min(written, 8), 2)
    steps = range(max(written - 8, 0), written)
    assert same(stored(buffer), expected(*sorted(steps, key=lambda step: step % 8)))
    assert buffer.sampler.tree.leaves[: len(buffer)].tolist() == tree[: len(buffer)]
    buffer.extend(transitions(1, written))
    assert same(buffer.storage[[written % 8]].exclude("index"), expected(written))


def test_parts_of_a_state_of_torchrls_are_refused():
    """They were a KeyError, and a success that did nothing."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=2)
    buffer.extend(transitions(3))
    state = state_of_torchrl(5)
    with pytest.raises(ValueError, match="are no state of a storage: one of TorchRL's comes with that of its buffer"):
        buffer.storage.load_state_dict(state["_storage"])
    with pytest.raises(ValueError, match="are no state of a TensorDictRoundRobinWriter"):
        buffer.writer.load_state_dict(state["_writer"])
    for wrong in ({"_len": 9}, {"_len": 3}, {"_storage": {}}):
        with pytest.raises(ValueError, match=r"impossible|not those of a ring|no rows"):
            buffer.load_state_dict({**state, "_storage": {**state["_storage"], **wrong}})
    assert same(stored(buffer), transitions(3))
