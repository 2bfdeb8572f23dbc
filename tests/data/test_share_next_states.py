"""Observations stored once: states, checkpoints, and data from and for other programs."""

from __future__ import annotations

import contextlib
import copy
import json

import pytest
import torch
from tensordict import TensorDict

from gpubuf import (
    LazyTensorStorage,
    TensorDictReplayBuffer,
    from_minari,
    load_torchrl,
    save_torchrl,
    serialization,
)
from gpubuf.data.checkpoints import files
from gpubuf.kernels._registry import triton_on_cpu
from gpubuf.kernels.rows import FAULTS
from tests.support.shared_rows import Ring, Stream, check, same_bytes, shared

CAPACITY = 24


def used(steps: int = 31, envs: int | None = None, seed: int = 3, capacity: int = CAPACITY, **arguments):
    capacity *= envs or 1
    buffer, ring, stream = shared(capacity, envs=envs, **arguments), Ring(capacity), Stream(seed, envs, breaks=30)
    rows = stream.steps(steps)
    buffer.extend(rows)
    ring.extend(rows)
    if len(ring) > 9:
        index, rows = [2, 7], stream.rows_at(2)
        buffer.storage.write(torch.tensor(index), rows)
        ring.write(index, rows)
    return buffer, ring, stream


def goes_on(buffer: TensorDictReplayBuffer, ring: Ring, stream: Stream) -> None:
    check(buffer, ring)
    for _ in range(3):
        rows = stream.steps(9)
        buffer.extend(rows)
        ring.extend(rows)
        check(buffer, ring)


def turned(ring: Ring, capacity: int) -> Ring:
    """What a storage of another capacity has after it has taken the rows, oldest first."""
    other = Ring(capacity)
    first = ring.written % ring.capacity if len(ring) == ring.capacity else 0
    for i in range(len(ring)):
        other.rows[i] = ring.rows[(first + i) % ring.capacity]
    other.written = len(ring)
    return other


def moved(buffer: TensorDictReplayBuffer, target: TensorDictReplayBuffer, way: str, folder) -> None:
    """Bring the state of a buffer into another one."""
    if way == "state":
        target.load_state_dict(buffer.state_dict())
    else:
        buffer.save(folder, file_bytes=300)
        target.load(folder)


WAYS = pytest.mark.parametrize("way", ["state", "files"])


@WAYS
@pytest.mark.parametrize(("steps", "envs"), [(1, None), (24, 2), (31, None)])
def test_a_restored_buffer_goes_on_the_same(steps, envs, way, tmp_path):
    """CASES.md 18: every fill. Entries and links too are what they were."""
    buffer, ring, stream = used(steps, envs)
    for target in (shared(ring.capacity, envs=envs), used(5, envs, seed=8)[0]):
        moved(buffer, target, way, tmp_path)
        own, other = buffer.storage.sharing, target.storage.sharing
        assert torch.equal(own.links, other.links)
        assert torch.equal(own.owners, other.owners)
        goes_on(target, copy.deepcopy(ring), copy.deepcopy(stream))


@pytest.mark.parametrize(("way", "room", "capacity", "envs"), [("state", 22, 40, 2), ("files", 23, 24, None)])
def test_other_capacities(room, capacity, envs, way, tmp_path):
    """Of rows, and of next observations: rows are linked anew, oldest first."""
    envs_or_one = envs or 1
    buffer, ring, stream = used(31, envs)
    target = shared(capacity * envs_or_one, envs=envs, next_capacity=room * envs_or_one)
    moved(buffer, target, way, tmp_path)
    others = copy.deepcopy(ring) if capacity == CAPACITY else turned(ring, capacity * envs_or_one)
    check(target, others)
    sharing = target.storage.sharing
    owners = sharing.owners[:-1]
    assert owners[: sharing.used].diff().ge(0).all()
    goes_on(target, others, stream)


@pytest.mark.parametrize(
    ("way", "fresh", "envs", "capacity"), [("state", True, 2, 40), ("files", False, None, 24), ("files", True, 2, 24)]
)
def test_between_full_and_shared_rows(capacity, envs, fresh, way, tmp_path):
    """Case 39: rows of a storage that stores all next observations go into one that doesn't, and back."""
    envs_or_one = envs or 1
    buffer, ring, stream = used(31, envs)
    others = ring if capacity == CAPACITY else turned(ring, capacity * envs_or_one)
    plain = used(4, envs, 5, capacity, share_next=False, next_capacity=None)[0]
    if fresh:
        plain = shared(capacity * envs_or_one, envs=envs, share_next=False, next_capacity=None)
    moved(buffer, plain, way, tmp_path / "a")
    assert plain.storage.sharing is None
    check(plain, others)
    target = shared(capacity * envs_or_one, envs=envs) if fresh else used(4, envs, 5, capacity)[0]
    moved(plain, target, way, tmp_path / "b")
    goes_on(target, copy.deepcopy(others), copy.deepcopy(stream))
    goes_on(plain, others, stream)


@WAYS
def test_rows_that_don_t_fit_change_nothing(way, tmp_path):
    """Case 40: where there is no room for it, the buffer is put back as it was."""
    plain = used(31, share_next=False, next_capacity=None)[0]
    target, ring, _ = used(4, next_capacity=3)
    with pytest.raises(ValueError, match=r"\d+ of \d+ rows .*no room aside .*next_capacity=3"):
        moved(plain, target, way, tmp_path)
    check(target, ring)


def test_dtypes_and_sharing(tmp_path):
    options = {"dtypes": {"observation": torch.float16}}
    rows = Stream(2).steps(40)
    rows["observation"], rows["next", "observation"] = (
        torch.arange(41.0).repeat_interleave(6).view(41, 6).unfold(0, 40, 1).movedim(2, 1)
    )
    one, plain, other = (
        TensorDictReplayBuffer(storage=LazyTensorStorage(40, share_next=share, **options), batch_size=8)
        for share in (True, False, True)
    )
    one.extend(rows)
    assert same_bytes(one[:], rows)
    moved(one, plain, "files", tmp_path / "a")
    assert same_bytes(plain[:], rows)
    moved(plain, other, "files", tmp_path / "b")
    assert same_bytes(other[:], rows)
    wide = TensorDictReplayBuffer(storage=LazyTensorStorage(40, share_next=True), batch_size=8)
    with pytest.raises(ValueError, match="stored in another way"):
        wide.load(tmp_path / "a")


def test_prefixes_and_sharing(tmp_path):
    whole = torch.rand(31, 9)
    rows = TensorDict(
        {
            "observation": whole[:30, :5],
            "critic_observation": whole[:30],
            "next": {"observation": whole[1:, :5], "critic_observation": whole[1:], "reward": torch.rand(30, 1)},
        },
        [30],
    )
    options = {"prefixes": {"observation": "critic_observation"}}
    one, plain, other = (
        TensorDictReplayBuffer(storage=LazyTensorStorage(20, share_next=share, **options), batch_size=8)
        for share in (True, False, True)
    )
    one.extend(rows)
    assert one.storage.sharing.keys == (("critic_observation",),)
    assert one.storage.nbytes < 20 * (9 * 4 + 4) + 21 * 9 * 4 + 1
    moved(one, plain, "state", tmp_path)
    moved(plain, other, "files", tmp_path)
    for buffer in (one, plain, other):
        found, due = buffer[:], torch.cat([rows[20:], rows[10:20]])
        assert all(torch.equal(found[key], due[key]) for key in due.keys(True, True))


def test_a_second_save_writes_what_changed(tmp_path):
    buffer, ring, stream = used(200, capacity=4000, next_capacity=500)
    first = buffer.save(tmp_path, file_bytes=2000)
    again = buffer.save(tmp_path, file_bytes=2000)
    assert again.files_written <= 2
    rows = stream.steps(5)
    buffer.extend(rows)
    ring.extend(rows)
    assert buffer.save(tmp_path, file_bytes=2000).bytes_written < first.bytes_written / 2
    target = shared(4000, next_capacity=500)
    target.load(tmp_path)
    goes_on(target, ring, stream)


@pytest.mark.parametrize(("way", "on_gpu"), [("files", False), ("state", True)])
def test_a_turn_that_has_come_to_a_taken_entry(way, on_gpu, tmp_path):
    """As versions left it whose turn counted the entries that were taken: what is free lies behind."""
    buffer, ring, stream = used(31, next_capacity=CAPACITY - 1)
    sharing = buffer.storage.sharing
    live = sharing.owners[:-1] >= buffer.storage.rows_written - CAPACITY
    assert live.any()
    assert not live.all()
    sharing.owners[-1] = sharing.slots + int((live & ~live.roll(-1)).nonzero()[0])
    target = shared(CAPACITY, next_capacity=CAPACITY - 1)
    moved(buffer, target, way, tmp_path)
    with triton_on_cpu() if on_gpu else contextlib.nullcontext():
        for position in (3, 11, 17):
            rows = stream.rows_at(1)
            target.storage.write(torch.tensor([position]), rows)
            ring.write([position], rows)
        goes_on(target, ring, stream)
    assert target.storage.ring[FAULTS] == 0


# Files that were changed


def changed(tmp_path, change):
    """A checkpoint whose state was changed by somebody who makes the checksums right again."""
    buffer = used(31)[0]
    buffer.save(tmp_path)
    made = files.read_manifest(tmp_path)
    path = tmp_path / made.state.name
    state = copy.deepcopy(dict(serialization.load(path, made.state.checksum)))
    change(state["_storage"]["sharing"])
    path.unlink()
    size, checksum = serialization.write(path, serialization.contents(state))
    raw = json.loads((tmp_path / files.MANIFEST).read_text())
    raw["content"]["state"] |= {"size": size, "checksum": checksum}
    raw["checksum"] = files._checksum(raw["content"])
    (tmp_path / files.MANIFEST).write_text(json.dumps(raw))


def aside(sharing) -> int:
    return int((sharing["links"] > 0).nonzero()[0])


CHANGES = {
    "a link beyond the entries": lambda s: s["links"].__setitem__(0, 25),
    "a link below": lambda s: s["links"].__setitem__(0, -2),
    "a link to another row's entry": lambda s: s["links"].__setitem__(aside(s), s["links"].max() % 5 + 6),
    "links of another dtype": lambda s: s.__setitem__("links", s["links"].long()),
    "fewer links": lambda s: s.__setitem__("links", s["links"][:-1].clone()),
    "an owner from the future": lambda s: s["owners"].__setitem__(0, 31),
    "an owner below": lambda s: s["owners"].__setitem__(0, -2),
    "fewer taken than linked": lambda s: s["owners"].__setitem__(-1, 1),
    "negative count": lambda s: s["owners"].__setitem__(-1, -1),
    "fewer owners": lambda s: s.__setitem__("owners", s["owners"][1:].clone()),
    "fewer entries": lambda s: s["entries"].__setitem__("0", s["entries"]["0"][1:].clone()),
    "entries of another dtype": lambda s: s["entries"].__setitem__("0", s["entries"]["0"].double()),
    "no entries": lambda s: s["entries"].clear(),
    "other pending rows": lambda s: s["pending"].__setitem__("0", s["pending"]["0"][:, 1:].clone()),
    "a list of links": lambda s: s.__setitem__("links", s["links"].tolist()),
    "no room": lambda s: s.__setitem__("slots", 0),
    "room for more": lambda s: s.__setitem__("slots", 25),
    "room in words": lambda s: s.__setitem__("slots", "24"),
    "another key": lambda s: s.__setitem__("keys", [["action"]]),
    "a key that is stored": lambda s: s.__setitem__("keys", [["next", "reward"]]),
    "no keys": lambda s: s.__setitem__("keys", []),
    "a key twice": lambda s: s["keys"].append(["observation"]),
    "a key that is a number": lambda s: s.__setitem__("keys", [[7]]),
    "keys missing": lambda s: s.pop("keys"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_files_that_lie_are_refused(kind, tmp_path):
    """No link leads out of the memory aside, or to the observation of another row; the buffer is as it was."""
    changed(tmp_path, CHANGES[kind])
    for share in (True, False):
        target, ring, _ = used(9, seed=6, share_next=share, next_capacity=CAPACITY if share else None)
        with pytest.raises(ValueError, match=r"\w"):
            target.load(tmp_path)
        check(target, ring)


# Other programs


@pytest.mark.parametrize("envs", [None, 2])
def test_torchrl_s_files_hold_full_rows(envs, tmp_path):
    buffer, ring, stream = used(31, envs)
    save_torchrl(buffer, tmp_path / "dump")
    plain = load_torchrl(tmp_path / "dump", dim_extend=0, batch_size=16)
    check(plain, ring)
    capacity = CAPACITY * (envs or 1)
    storage = LazyTensorStorage(capacity, ndim=1 if envs is None else 2, share_next=True, next_capacity=capacity)
    again = load_torchrl(tmp_path / "dump", storage=storage, dim_extend=0, batch_size=16)
    assert again.storage.sharing is not None
    goes_on(again, ring, stream)


class Episodes:
    """A data set like those of Minari."""

    total_steps, total_episodes = 30, 5

    def iterate_episodes(self):
        from types import SimpleNamespace

        import numpy as np

        for number in range(5):
            observations = np.arange(7 * 6, dtype=np.float32).reshape(7, 6) + 100 * number
            flags = np.zeros(6, bool)
            yield SimpleNamespace(
                id=number,
                observations=observations,
                actions=np.ones((6, 2), np.float32),
                rewards=np.arange(6, dtype=np.float32),
                terminations=flags,
                truncations=flags,
            )


def test_minari_s_episodes():
    plain = from_minari(Episodes())
    buffer = from_minari(Episodes(), storage=LazyTensorStorage(30, share_next=True))
    assert buffer.storage.sharing.used == 4
    one, other = plain[:], buffer[:]
    assert all(torch.equal(one[key], other[key]) for key in one.keys(True, True))


# Samplers
