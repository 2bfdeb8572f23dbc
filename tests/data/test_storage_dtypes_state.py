"""Storages with other dtypes than are written: their checkpoints, and their memory in other places."""

from __future__ import annotations

import json

import pytest
import torch

import gpubuf
from gpubuf.data import (
    Codec,
    LazyTensorStorage,
    TensorDictReplayBuffer,
    load_torchrl,
    moving,
    save_torchrl,
)
from tests.support.moved_buffers import SAMPLERS, alike, episodes
from tests.support.placements import Machine
from tests.support.stored_dtypes import LOSSLESS, LOSSLESS_BYTES
from tests.support.transitions import same, transitions

CAPACITY = 60


def buffer(sampler=None, ndim: int = 1, size: int = CAPACITY, dtypes=LOSSLESS, **options) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(size, ndim=ndim, dtypes=dtypes, **options),
        sampler=sampler,
        batch_size=8,
        generator=torch.Generator().manual_seed(3),
    )


def write(made: TensorDictReplayBuffer, n: int, start: int) -> None:
    data = episodes(n, start)
    made.extend(data if made.storage.ndim == 1 else data.view(2, n // 2))


# States and checkpoints


def test_files_hold_what_is_stored(tmp_path):
    """The manifest says in which dtypes, the rows take no more room than in memory, and an unchanged part is kept."""
    source = buffer(size=4000)
    source.extend(transitions(200).expand(20, 200).reshape(4000))
    first = source.save(tmp_path / "saved", file_bytes=LOSSLESS_BYTES * 500)
    content = json.loads((tmp_path / "saved" / "manifest.json").read_text())["content"]
    dtypes = {".".join(leaf["key"]): leaf["dtype"] for leaf in content["rows"]["leaves"]}
    assert dtypes == {
        "observation": "BF16",
        "action": "F32",
        "pixels": "F16",
        "next.observation": "BF16",
        "next.reward": "F16",
        "next.done": "U8",
        "next.step": "I16",
    }
    files = [file["size"] for file in content["rows"]["files"]]
    assert len(files) == 8
    assert 4000 * LOSSLESS_BYTES < sum(files) < 4000 * LOSSLESS_BYTES + 8 * 2500
    source.extend(transitions(100, 5))
    second = source.save(tmp_path / "saved", file_bytes=LOSSLESS_BYTES * 500)
    assert second.files_written == 3 < first.files_written
    target = buffer(size=4000)
    target.load(tmp_path / "saved")
    assert same(source[:], target[:])
    assert source.save(tmp_path / "saved", file_bytes=LOSSLESS_BYTES * 500).files_written == 2


OTHERS = {
    "plain": None,
    "another dtype": LOSSLESS | {"observation": torch.float16},
    "another scale": LOSSLESS | {"pixels": Codec(torch.float16, scale=0.25, offset=3.0)},
    "one key more": LOSSLESS | {("next", "observation"): torch.float16},
}


@pytest.mark.parametrize(
    ("other", "way", "fresh"),
    [(other, "state" if number % 2 else "checkpoint", number < 2) for number, other in enumerate(OTHERS)],
)
def test_a_storage_with_other_dtypes_refuses(tmp_path, way, fresh, other):
    """With both sides in the text, and the buffer is as it was."""
    source, target = buffer(), buffer(dtypes=OTHERS[other])
    source.extend(transitions(75))
    if not fresh:
        target.extend(transitions(9))
    for giver, taker in ((source, target), (target, source)):
        if not giver.storage.initialized:
            continue
        before = taker[:].clone() if taker.storage.initialized else None
        if way == "checkpoint":
            giver.save(tmp_path / "saved")
        with pytest.raises(ValueError, match=r"the rows are stored in another way: .* there, .* in this storage"):
            taker.load(tmp_path / "saved") if way == "checkpoint" else taker.load_state_dict(giver.state_dict())
        assert taker.storage.initialized == (before is not None)
        if before is not None:
            assert same(taker[:], before)
    target.extend(transitions(3, 20))
    assert same(target[-3:], transitions(3, 20))


@pytest.mark.parametrize(
    "damage",
    [
        lambda form: None,
        lambda form: "text",
        lambda form: [],
        lambda form: {"key": 1},
        lambda form: form[1:],
        lambda form: form + form,
        lambda form: [form[0] | {"key": [3]}, *form[1:]],
        lambda form: [form[0] | {"key": []}, *form[1:]],
        lambda form: [form[0] | {"key": ["next"]}, *form[1:]],
        lambda form: [form[0] | {"written": "float99"}, *form[1:]],
        lambda form: [form[0] | {"written": ["float32"]}, *form[1:]],
        lambda form: [form[0] | {"shape": [-1]}, *form[1:]],
        lambda form: [form[0] | {"shape": [10**15]}, *form[1:]],
        lambda form: [form[0] | {"shape": 3}, *form[1:]],
        lambda form: [form[0] | {"scale": 2.0}, *form[1:]],
        lambda form: [{name: value for name, value in form[0].items() if name != "stored"}, *form[1:]],
        lambda form: [5, *form[1:]],
        lambda form: [form[3], form[0], *form[4:], form[1], form[2]],
    ],
)
@pytest.mark.parametrize("fresh", [True, False])
def test_a_state_that_says_nonsense(damage, fresh):
    source, target = buffer(), buffer()
    source.extend(transitions(20))
    state = source.state_dict()
    state["_storage"]["form"] = damage(state["_storage"]["form"])
    if not fresh:
        target.extend(transitions(4, 30))
    with pytest.raises(ValueError, match=r"what was written|stored in another way|the batch"):
        target.load_state_dict(state)
    assert len(target) == (0 if fresh else 4)
    target.load_state_dict(source.state_dict())
    assert same(source[:], target[:])


# Placement


@pytest.mark.parametrize("kind", ["uniform", "prioritized slices"])
def test_batches_go_on_while_rows_move(monkeypatch, kind):
    """To pinned memory and back, and in two places: the fields follow, as the table of addresses does."""
    machine = Machine().install(monkeypatch, work_on_cpu=True)
    monkeypatch.setattr(moving, "CHUNK_BYTES", 64)
    stays, moves = (
        buffer(SAMPLERS[kind](), batch_dtypes={"action": torch.float64, "observation": torch.float64}) for _ in range(2)
    )
    for start, n in ((0, 40), (40, 30)):
        for each in (stays, moves):
            write(each, n, start)
        table = moves.storage.plans.batch.table
        for place in ("pinned", "cpu", "pinned"):
            moves.to(place)
            assert moves.storage.plans.batch.table is table
            assert alike(stays, moves)
            assert same(stays[:], moves[:])
        assert sum(machine.pinned.values()) == moves.storage.nbytes
    assert same(stays[2:9], moves[2:9])
    assert same(stays[-1], moves[-1])


@pytest.mark.parametrize("kind", ["cuda", "pinned", "split"])
def test_a_plan_is_what_is_then_taken_on_a_gpu(monkeypatch, kind):
    from tests.support.fake_cuda import fake_cuda

    Machine(device=100_000 if kind == "split" else 1 << 30).install(monkeypatch)
    options = {"dtypes": LOSSLESS, "batch_dtypes": {"observation": torch.bfloat16}}
    made = gpubuf.plan(transitions(3), 5000, **options)
    with fake_cuda():
        each = TensorDictReplayBuffer(storage=LazyTensorStorage(5000, device=kind, **options), batch_size=2)
        each.extend(transitions(28))
        each.sample()
        taken = each.memory()
    due = made.fit(kind)
    assert taken.total == due.device_bytes + due.host_bytes


# Files


def test_torchrl_gets_what_was_written(tmp_path):
    source = buffer(dtypes=LOSSLESS)
    source.extend(transitions(75))
    save_torchrl(source, tmp_path / "dump")
    found = load_torchrl(tmp_path / "dump")
    assert same(found[:].exclude("index"), source[:])
    assert found.write_count == 75


@pytest.mark.parametrize(("size", "kind"), [(CAPACITY, "uniform"), (80, "prioritized")])
def test_torchrl_gives_what_is_to_be_stored(tmp_path, size, kind):
    """Rows lie where they lay, or oldest first where there is more room; priorities go with them."""
    source = buffer(SAMPLERS[kind](), dtypes=None)
    source.extend(transitions(75))
    if kind == "prioritized":
        source.update_priority(torch.arange(CAPACITY), torch.arange(CAPACITY) + 1.0)
    save_torchrl(source, tmp_path / "dump")
    found = load_torchrl(tmp_path / "dump", storage=LazyTensorStorage(size, dtypes=LOSSLESS))
    due = transitions(60, 15) if size > CAPACITY else torch.cat([transitions(15, 60), transitions(45, 15)])
    assert same(found[:].exclude("index"), due)
    assert found.storage.nbytes == size * LOSSLESS_BYTES
    if kind == "prioritized":
        leaves = source.sampler.tree.leaves[:CAPACITY].roll(-15)
        assert torch.equal(found.sampler.tree.leaves[:CAPACITY], leaves)
    found.extend(transitions(5, 75).set("index", torch.zeros(5, dtype=torch.int64)))
    assert len(found.sample(8)) == 8
    with pytest.raises(ValueError, match="holds 60 rows, the storage has room for 59"):
        load_torchrl(tmp_path / "dump", storage=LazyTensorStorage(59, dtypes=LOSSLESS))
