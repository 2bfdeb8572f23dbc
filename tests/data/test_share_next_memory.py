"""Observations stored once: bytes, places, moves and copies."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict import TensorDict

import gpubuf
from gpubuf import LazyTensorStorage, TensorDictReplayBuffer
from gpubuf.cli import main
from tests.support.fake_cuda import fake_cuda
from tests.support.placements import GIB, Machine
from tests.support.shared_rows import Ring, Stream, check, shared

OBSERVATION = 310


def spec() -> dict:
    return {
        "observation": ((OBSERVATION,), torch.float32),
        "action": ((12,), torch.float32),
        ("next", "observation"): ((OBSERVATION,), torch.float32),
        ("next", "reward"): ((1,), torch.float32),
        ("next", "done"): ((1,), torch.bool),
    }


def rows(n: int, envs: int | None = None) -> TensorDict:
    shape = [n] if envs is None else [n, envs]
    found = {key: torch.zeros(*shape, *size, dtype=dtype) for key, (size, dtype) in spec().items()}
    following = {key[1]: found.pop(key) for key in list(found) if isinstance(key, tuple)}
    return TensorDict({**found, "next": TensorDict(following, shape)}, shape)


@pytest.mark.parametrize(("dtype", "itemsize"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_ten_million_rows(dtype, itemsize):
    """The bytes of observations are what arithmetic says: halved, and halved again in bfloat16."""
    n = 10_000_000
    made = gpubuf.plan(spec(), n, share_next=True, dtypes={"observation": dtype})
    keys = {key.name: key for key in made.keys}
    width = OBSERVATION * itemsize
    assert keys["observation"].n_bytes == n * width
    assert keys["next.observation"].row_bytes == 0
    assert keys["next.observation"].n_bytes == (n // 8 + 1) * width
    rest = n * (12 * 4 + 4 + 1)
    assert made.rows == n * width + (n // 8 + 1) * width + rest
    assert made.fit("cpu").index.index == 4 * n + 8 * (n // 8 + 1)
    plain = gpubuf.plan(spec(), n, dtypes={"observation": dtype})
    assert plain.rows == 2 * n * width + rest


@pytest.mark.parametrize(
    ("envs", "next_capacity", "dtypes"),
    [(None, None, None), (8, 5, None), (8, None, {"observation": torch.bfloat16})],
)
def test_a_plan_is_what_is_then_taken(envs, next_capacity, dtypes):
    options = {"share_next": True, "next_capacity": next_capacity, "dtypes": dtypes}
    made = gpubuf.plan(rows(3), 3000, envs=envs or 1, **options)
    storage = LazyTensorStorage(3000, ndim=1 if envs is None else 2, **options)
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=4, dim_extend=0)
    buffer.extend(rows(3, envs))
    buffer.sample()
    taken, due = buffer.memory(), made.fit("cpu")
    assert (taken.rows, taken.index, taken.counters) == (made.rows, due.index.index, made.counters)
    assert storage.nbytes == made.rows
    assert taken.total == due.host_bytes


@pytest.mark.parametrize("kind", ["cuda", "pinned", "split"])
def test_a_plan_is_what_is_then_taken_on_a_gpu(monkeypatch, kind):
    machine = Machine(device=3_000_000 if kind == "split" else GIB).install(monkeypatch)
    options = {"share_next": True, "next_capacity": 300}
    made = gpubuf.plan(rows(3), 3000, envs=4, **options)
    with fake_cuda():
        storage = LazyTensorStorage(3000, ndim=2, device=kind, **options)
        buffer = TensorDictReplayBuffer(storage=storage, batch_size=4, dim_extend=0)
        buffer.extend(rows(3, 4))
        buffer.sample()
        taken = buffer.memory()
    due = made.fit(kind)
    assert taken.total == due.device_bytes + due.host_bytes
    assert due.host_bytes == sum(machine.ever_pinned)
    side = 304 * OBSERVATION * 4
    if kind == "pinned":
        assert due.host_bytes == made.rows
    if kind == "split":
        assert due.device_bytes > side
        assert due.host_bytes < made.rows - side


def test_the_command(capsys):
    entries = ["observation=310:float32", "next.observation=310:float32", "next.reward=1:float32"]
    arguments = [part for entry in entries for part in ("--spec", entry)]
    assert main(["plan", *arguments, "--capacity", "80000", "--share-next", "--next-capacity", "100"]) == 0
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if line.startswith("next.observation"))
    assert "122.3 KiB" in line
    found = []
    for ends in ("flags", "flags+continuity"):
        assert main(["plan", *arguments, "--capacity", "81920", "--ends", ends]) == 0
        found.append(next(line for line in capsys.readouterr().out.splitlines() if line.startswith("cpu")).split())
    assert found[0][3:5] == ["0", "bytes"]
    assert found[1][3:5] == ["80", "KiB"]


# Moves and copies


def used(capacity: int = 30, envs: int | None = None, steps: int = 47, **arguments):
    buffer = shared(capacity * (envs or 1), envs=envs, **arguments)
    ring, stream = Ring(capacity * (envs or 1)), Stream(3, envs)
    written = stream.steps(steps)
    buffer.extend(written)
    ring.extend(written)
    return buffer, ring, stream


def goes_on(buffer: TensorDictReplayBuffer, ring: Ring, stream: Stream) -> None:
    check(buffer, ring)
    for _ in range(3):
        written = stream.steps(9)
        buffer.extend(written)
        ring.extend(written)
        check(buffer, ring)
    at = [5, 17]
    other = stream.rows_at(2)
    buffer.storage.write(torch.tensor(at, device=buffer.storage.device), other)
    ring.write(at, other)
    check(buffer, ring)


@pytest.mark.parametrize(("begin", "target"), [("cpu", "split:50%"), ("split:50%", "pinned")])
def test_placements_and_moves(begin, target, monkeypatch):
    """With a CPU that does the work of the GPU, rows lie in pinned memory, or in two places."""
    Machine().install(monkeypatch, work_on_cpu=True)
    buffer, ring, stream = used(capacity=200, steps=230, device=begin)
    goes_on(buffer, ring, stream)
    goes_on(copy.deepcopy(buffer), copy.deepcopy(ring), copy.deepcopy(stream))
    before = buffer.storage.sharing.used
    buffer.to(target)
    assert buffer.storage.sharing.used == before
    goes_on(buffer, ring, stream)
    buffer.to("cpu")
    goes_on(buffer, ring, stream)


def test_a_move_that_fails_leaves_everything_where_it_was(monkeypatch):
    buffer, ring, stream = used()
    sides = buffer.storage.sharing.sides[0].data_ptr()
    with pytest.raises((RuntimeError, AssertionError)):
        buffer.to("cuda:7")
    assert buffer.storage.sharing.sides[0].data_ptr() == sides
    goes_on(buffer, ring, stream)
