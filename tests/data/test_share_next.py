"""Observations stored once: rows come back as they were written, whatever is written, overwritten and read."""

from __future__ import annotations

import contextlib
import itertools
import random
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from gpubuf import (
    LazyMemmapStorage,
    LazyTensorStorage,
    TensorDictReplayBuffer,
)
from gpubuf.data.checkpoints import files
from gpubuf.data.storage.share_next import entries_of
from gpubuf.kernels import _launching as launching
from gpubuf.kernels.rows import FAULTS, LOST
from tests.contracts import first_quick
from tests.contracts.checkpoints import change_meaning
from tests.support.interpreter import triton_on_cpu

WIDTH = 6
KEYS = ("observation", "number", ("next", "observation"), ("next", "reward"), ("next", "done"))


class Stream:
    """Makes steps of environments. Observations have few values, so that equal ones meet by chance, too.

    Args:
        seed: of all choices.
        envs: environments; None: rows of one dimension.
        breaks: how often, of 100 steps, the observation that follows is another than was announced.
    """

    def __init__(self, seed: int = 0, envs: int | None = None, breaks: int = 20) -> None:
        self.random = random.Random(seed)
        self.envs, self.breaks, self.count = envs, breaks, 0
        self.now = [self.observation() for _ in range(envs or 1)]

    def observation(self) -> Tensor:
        """One out of a few: NaN with two different payloads, and both zeros, among them."""
        bits = self.random.choice([0x7FC00000, 0x7FC00001, 0, -0x80000000, *range(1, 12)])
        return torch.full((WIDTH,), bits, dtype=torch.int32).view(torch.float32)

    def steps(self, n: int) -> TensorDict:
        """``n`` steps: ``[n]`` rows, or ``[n, envs]``."""
        found: list[TensorDict] = []
        for _ in range(n):
            row = []
            for env in range(self.envs or 1):
                coming = self.observation()
                row.append(self._row(self.now[env], coming))
                self.now[env] = self.observation() if self.random.randrange(100) < self.breaks else coming
            found.append(torch.stack(row) if self.envs else row[0])
        if not found:
            return self.rows_at(0)
        return torch.stack(found)

    def rows_at(self, n: int) -> TensorDict:
        """``n`` rows, ``[n]``, that have nothing to do with each other."""
        if n == 0:
            shape = (0, self.envs) if self.envs else (0,)
            return self._row(self.now[0], self.now[0]).expand(*shape)
        return torch.stack([self._row(self.observation(), self.observation()) for _ in range(n)])

    def _row(self, now: Tensor, coming: Tensor) -> TensorDict:
        self.count += 1
        number = torch.tensor(self.count)
        following = {"observation": coming, "reward": number[None] / 2, "done": (number % 7 == 0)[None]}
        return TensorDict({"observation": now, "number": number, "next": TensorDict(following, [])}, [])


class Ring:
    """The rows that a storage has, each as it was written: the last ``capacity`` of a list, by position."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.written = capacity, 0
        self.rows: dict[int, TensorDict] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Ring:
        """Another ring with the same rows: those that TensorDict copies lose the sign of zero."""
        other = Ring(self.capacity)
        other.written, other.rows = self.written, dict(self.rows)
        return other

    def extend(self, data: TensorDict) -> None:
        """Write steps at the cursor."""
        for row in data.reshape(-1).unbind(0):
            self.rows[self.written % self.capacity] = row
            self.written += 1

    def write(self, index: list[int], data: TensorDict) -> None:
        """Overwrite rows in place."""
        for position, row in zip(index, data.unbind(0), strict=True):
            self.rows[position] = row

    def empty(self) -> None:
        """Forget all rows."""
        self.rows.clear()
        self.written = -(-self.written // self.capacity) * self.capacity

    def __len__(self) -> int:
        return len(self.rows)

    def at(self, positions: list[int]) -> TensorDict:
        """Rows by position."""
        return torch.stack([self.rows[position] for position in positions])


def same_bytes(a: TensorDict, b: TensorDict) -> bool:
    """Whether two batches agree in all of :data:`KEYS`, bit by bit."""
    return all(
        torch.equal(a[key].contiguous().view(torch.uint8), b[key].contiguous().view(torch.uint8)) for key in KEYS
    )


def shared(capacity: int, *, envs: int | None = None, **arguments: Any) -> TensorDictReplayBuffer:
    """A buffer that stores observations once."""
    arguments = {"share_next": True, "next_capacity": capacity} | arguments
    storage = LazyTensorStorage(capacity, ndim=1 if envs is None else 2, **arguments)
    # Time is the first dimension of what Stream makes.
    return TensorDictReplayBuffer(storage=storage, batch_size=16, dim_extend=0)


def check(buffer: TensorDictReplayBuffer, ring: Ring) -> None:
    """Whatever way rows are read, they are what was written."""
    storage = buffer.storage
    assert len(buffer) == len(ring)
    if not len(ring):
        return
    everything = ring.at(list(range(len(ring))))
    assert same_bytes(buffer[:].reshape(-1), everything)
    order = torch.randperm(len(ring))
    rows = storage.batch_layout.assemble(storage.plans.batch.gather(order.to(storage.device))[0], order.shape, None)
    assert same_bytes(rows, everything[order])
    sample, info = buffer.sample(return_info=True)
    positions = info["index"]
    if storage.ndim > 1:
        positions = positions[..., 0] * storage.shape[1] + positions[..., 1]
    assert same_bytes(sample, everything[positions.cpu()])


# Capacity of the memory aside


@pytest.mark.parametrize(
    ("capacity", "envs", "asked", "due"),
    [
        (10_000, 1, None, 1250),
        (1000, 1, None, 256),
        (100, 1, None, 100),
        (4096, 1024, None, 1024),
        (512, 512, None, 512),
        (100, 1, 7, 7),
        (100, 1, 1000, 100),
        (10_001, 1, None, 1251),
    ],
)
def test_room_aside(capacity, envs, asked, due):
    """An eighth of the rows, at least 256 and one an environment, never more than rows."""
    assert entries_of(capacity, envs, asked) == due


def test_a_write_without_room_is_refused():
    """Case 40: nothing is written, and the text says how many rows are not continued and what to do."""
    stream, ring = Stream(breaks=100), Ring(20)
    buffer = shared(20, next_capacity=3)
    rows = stream.steps(3)
    buffer.extend(rows)
    ring.extend(rows)
    before = buffer.storage.sharing.used
    with pytest.raises(RuntimeError, match=r"next_capacity=3 .*share_next=False.*ndim=2"):
        buffer.extend(stream.steps(9))
    check(buffer, ring)
    assert buffer.storage.sharing.used == before


def test_entries_come_free_with_their_rows():
    """Case 40: what is overwritten gives its entry back, so that a ring of episodes goes on for ever."""
    capacity, episode = 24, 6
    buffer, ring = shared(capacity, next_capacity=5), Ring(capacity)
    stream = Stream(breaks=0)
    for step in range(200):
        rows = stream.steps(1)
        if step % episode == episode - 1:
            # The next episode begins with a reset.
            stream.now = [torch.full((WIDTH,), float(step))]
        buffer.extend(rows)
        ring.extend(rows)
        assert buffer.storage.sharing.used <= 4
    check(buffer, ring)


def test_a_write_in_place_without_room_is_refused():
    """Case 40: the rows are what they were."""
    capacity = 12
    buffer, ring, stream = shared(capacity, next_capacity=2), Ring(capacity), Stream(breaks=0)
    rows = stream.steps(9)
    buffer.extend(rows)
    ring.extend(rows)
    other = Stream(seed=5).rows_at(2)
    with pytest.raises(RuntimeError, match="next_capacity=2"):
        buffer[torch.tensor([2, 6])] = other
    check(buffer, ring)
    buffer[torch.tensor([8])] = other[:1]
    ring.write([8], other[:1])
    check(buffer, ring)


# Which keys


def td(n: int = 4, **keys: torch.Tensor) -> TensorDict:
    following = {name.removeprefix("next_"): value for name, value in keys.items() if name.startswith("next_")}
    own = {name: value for name, value in keys.items() if not name.startswith("next_")}
    return TensorDict({**own, "next": TensorDict(following, [n])}, [n])


def test_keys_that_are_found():
    """Equal ones, but for flags and rewards."""
    data = td(
        large=torch.zeros(4, 5),
        next_large=torch.zeros(4, 5),
        small=torch.zeros(4, 4),
        next_small=torch.zeros(4, 4),
        done=torch.zeros(4, 1, dtype=torch.bool),
        next_done=torch.zeros(4, 1, dtype=torch.bool),
        other=torch.zeros(4, 5),
        next_other=torch.zeros(4, 5, dtype=torch.float64),
        shape=torch.zeros(4, 6),
        next_shape=torch.zeros(4, 3, 2),
        alone=torch.zeros(4, 9),
    )
    storage = LazyTensorStorage(8, share_next=True)
    storage.append(data)
    assert set(storage.sharing.keys) == {("small",), ("large",)}
    named = LazyTensorStorage(8, share_next=["large", "done"])
    named.append(data)
    assert set(named.sharing.keys) == {("done",), ("large",)}
    for one in (storage, named):
        assert set(one[:].keys(True, True)) == set(data.keys(True, True))


def test_wrong_keys():
    data = td(a=torch.zeros(4, 5), next_b=torch.zeros(4, 5))
    unequal = td(a=torch.zeros(4, 5), next_a=torch.zeros(4, 5, dtype=torch.float64))
    for share_next, given, text in (
        (True, data, r"finds no key.*but for flags and rewards"),
        (["a"], data, r"names 'a', but \('next', 'a'\) is not stored"),
        (["b"], data, "names 'b', but 'b' is not stored"),
        (["a"], unequal, "only equal ones can share a column"),
    ):
        with pytest.raises(ValueError, match=text):
            LazyTensorStorage(8, share_next=share_next).append(given)
    with pytest.raises(ValueError, match="next_capacity must be a whole number of at least 1"):
        LazyTensorStorage(8, share_next=True, next_capacity=0)
    with pytest.raises(ValueError, match="next_capacity is for storages with share_next"):
        LazyTensorStorage(8, next_capacity=3)
    with pytest.raises(TypeError, match="list of keys"):
        LazyTensorStorage(8, share_next="observation")
    with pytest.raises(NotImplementedError, match="share_next"):
        LazyMemmapStorage(8, share_next=True)


def episodes(n: int, breaks: list[bool], first: int = 0) -> TensorDict:
    """``n`` rows of one environment: row i is not continued by the row behind it if ``breaks[i]``."""
    now = torch.arange(first, first + n, dtype=torch.float32)
    coming = now + 1
    for i, broken in enumerate(breaks[:n]):
        if broken:
            coming[i] = -1 - now[i]
    wide = [values[:, None].expand(n, 6).contiguous() for values in (now, coming)]
    return TensorDict({"observation": wide[0], "next": {"observation": wide[1]}}, [n])


def storage_of(capacity: int, **arguments) -> LazyTensorStorage:
    return LazyTensorStorage(capacity, share_next=True, **({"next_capacity": capacity} | arguments))


def test_an_environment_in_progress_needs_no_room_aside():
    """Case 39: a write of several steps that ends in the middle of trajectories."""
    stream, ring = Stream(1, 4, breaks=0), Ring(40)
    buffer = shared(40, envs=4, next_capacity=4)
    for n in (3, 1, 5, 7, 12):
        rows = stream.steps(n)
        buffer.extend(rows)
        ring.extend(rows)
        check(buffer, ring)
        assert buffer.storage.sharing.used == 0


def test_lost_rows_are_faults_on_a_gpu(backend):
    """Case 40: the CPU refuses, a GPU counts. Other rows come back all the same."""
    storage = storage_of(8, next_capacity=2)
    storage.append(episodes(2, []))
    rows = episodes(6, [True] * 6, first=2)
    if backend == "numba":
        with pytest.raises(RuntimeError, match="next_capacity=2"):
            storage.append(rows)
        assert len(storage) == 2
        return
    storage.append(rows)
    assert (storage.sharing.links == LOST).sum() == 3
    with pytest.raises(IndexError, match=r"^3 rows .*next_capacity"):
        storage.refresh()
    assert storage[3]["next", "observation"][0] == -4
    with pytest.raises(ValueError, match="lost"):
        storage_of(9).load_state_dict(storage.state_dict())


# Interrupts


@pytest.mark.parametrize("place", first_quick([1, 3, 0, 2, 4], 2))
@pytest.mark.parametrize("write", ["extend", "in place"])
def test_a_write_that_is_interrupted_between_its_launches(write, place, monkeypatch):
    """Case 54: on a GPU a write is several launches; the next operation makes all of them again."""
    stream, buffer, ring = Stream(5), shared(12), Ring(12)
    index, other, launches, made = [3, 8], Stream(6).rows_at(2), itertools.count(), launching.Variant.launch
    rows = stream.steps(17)
    buffer.extend(rows)
    ring.extend(rows)
    with triton_on_cpu():

        def launch(variant: launching.Variant, *args) -> None:
            if next(launches) == place:
                raise KeyboardInterrupt
            made(variant, *args)

        rows = stream.steps(5)
        with monkeypatch.context() as patch:
            patch.setattr(launching.Variant, "launch", launch)
            with contextlib.suppress(KeyboardInterrupt):
                if write == "extend":
                    buffer.extend(rows)
                else:
                    buffer[torch.tensor(index)] = other
        if write == "extend":
            ring.extend(rows)
        elif place:
            # Before the first launch the next observations are read that are to be kept.
            ring.write(index, other)
        # The next operation.
        assert same_bytes(buffer[:], ring.at(list(range(12))))
    check(buffer, ring)


ROWS = 40


def test_what_a_storage_says_of_itself():
    storage = LazyTensorStorage(ROWS, share_next=True)
    storage.append(Stream(4).steps(20))
    assert "('next', 'observation'): [6] torch.float32 in 'observation'" in repr(storage)
    assert repr(storage.sharing) == "Sharing(observation, room for 40 aside)"


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


def moved(buffer: TensorDictReplayBuffer, target: TensorDictReplayBuffer, way: str, folder) -> None:
    """Bring the state of a buffer into another one."""
    if way == "state":
        target.load_state_dict(buffer.state_dict())
    else:
        buffer.save(folder)
        target.load(folder)


WAYS = pytest.mark.parametrize("way", ["state", "files"])


@WAYS
def test_rows_that_don_t_fit_leave_an_empty_buffer(way, tmp_path):
    """Case 40: how many next observations need room shows only when the rows are written."""
    plain = used(31, share_next=False, next_capacity=None)[0]
    target, _, stream = used(4, next_capacity=3)
    with pytest.raises(ValueError, match=r"\d+ of \d+ rows .*no room aside .*next_capacity=3"):
        moved(plain, target, way, tmp_path)
    assert len(target) == 0
    ring, rows = Ring(CAPACITY), stream.steps(2)
    target.extend(rows)
    ring.extend(rows)
    assert same_bytes(target[:], ring.at([0, 1]))


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
    for position in (3, 11, 17):
        rows = stream.rows_at(1)
        with triton_on_cpu(on_gpu):
            target.storage.write(torch.tensor([position]), rows)
        ring.write([position], rows)
    for turn in range(3):
        check(target, ring)
        rows = stream.steps(9)
        with triton_on_cpu(on_gpu and turn == 0):
            target.extend(rows)
        ring.extend(rows)
    check(target, ring)
    assert target.storage.ring.counters[FAULTS] == 0


# Files that were changed


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
    used(31)[0].save(tmp_path)
    (file,) = files.read_manifest(tmp_path, files.BUFFER).files
    change_meaning(tmp_path, file.name, lambda state: CHANGES[kind](state["_storage"]["sharing"]))
    for share in (True, False):
        target, ring, _ = used(9, seed=6, share_next=share, next_capacity=CAPACITY if share else None)
        with pytest.raises(ValueError, match=r"\w"):
            target.load(tmp_path)
        check(target, ring)
