"""Case 57: windows of data that lack an end. With ``ends="flags+continuity"`` they stop where rows don't go on."""

from __future__ import annotations

import random

import pytest
import torch
from tensordict import TensorDict

from gpubuf import (
    LazyTensorStorage,
    PrioritizedSliceSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from gpubuf.data import Codec, Sequence

CAPACITY = 48
CONTINUITY = "flags+continuity"

ONCE = {"share_next": ["pixels"], "next_capacity": CAPACITY}


class Stream:
    """Environments whose episodes end without a word. ``chance`` of an end at each step.

    Observations count up within an episode, in one of two keys alone; ``"of"`` numbers the episodes.
    """

    def __init__(self, envs: int = 1, chance: float = 0.2, seed: int = 0) -> None:
        self.random, self.envs, self.chance = random.Random(seed), envs, chance
        self.at, self.episode, self.started = [0] * envs, list(range(envs)), envs

    def rows(self, steps: int) -> TensorDict:
        """``[steps]``, or ``[envs, steps]`` of several environments."""
        taken = [[self.step(env) for _ in range(steps)] for env in range(self.envs)]
        now, coming, of = (
            torch.tensor(values).view(self.envs, steps, 1) for values in zip(*map(zip_, taken), strict=True)
        )
        data = TensorDict(
            {
                "observation": (now % 2).float().expand(-1, -1, 5).contiguous(),
                "pixels": now.expand(-1, -1, 3).to(torch.uint8).contiguous(),
                "of": of,
                "next": {
                    "observation": (coming % 2).float().expand(-1, -1, 5).contiguous(),
                    "pixels": coming.expand(-1, -1, 3).to(torch.uint8).contiguous(),
                    "reward": torch.ones(self.envs, steps, 1),
                    "done": torch.zeros(self.envs, steps, 1, dtype=torch.bool),
                    "terminated": torch.zeros(self.envs, steps, 1, dtype=torch.bool),
                    "was": of,
                },
            },
            [self.envs, steps],
        )
        return data if self.envs > 1 else data[0]

    def step(self, env: int) -> tuple[int, int, int]:
        now, of = self.at[env], self.episode[env]
        self.at[env] = now + 1
        if self.random.random() < self.chance:
            # An episode begins where none has begun or gone on, so that each end shows.
            self.at[env], self.episode[env] = (now + self.random.choice([2, 3, 100])) % 256, self.started
            self.started += 1
        self.at[env] %= 256
        return now, (now + 1) % 256, of


def zip_(rows: list[tuple[int, int, int]]) -> tuple[list[int], ...]:
    return tuple(list(column) for column in zip(*rows, strict=True))


def broken(buffer: TensorDictReplayBuffer) -> list[bool]:
    """Which rows the next one does not continue: read one by one."""
    storage = buffer.storage
    rows, n = storage[:].reshape(-1), len(storage)
    envs = storage.shape[1] if storage.ndim > 1 else 1
    newest = (storage.written // envs - 1) % storage.shape[0]
    found = []
    for row in range(n):
        after = (row + envs) % storage.max_size
        keys = ("observation", "pixels")
        goes_on = all(torch.equal(rows["next", key][row], rows[key][after if after < n else 0]) for key in keys)
        found.append(row // envs != newest and not goes_on)
    return found


def assert_breaks(buffer: TensorDictReplayBuffer) -> None:
    assert buffer.storage.breaks.found[: len(buffer.storage)].tolist() == broken(buffer)


SAMPLERS = {
    "slices": lambda: SliceSampler(slice_len=4, end_key=("next", "done"), strict_length=False, pad_output=True),
    "by identifier": lambda: SliceSampler(slice_len=4, traj_key="lane", strict_length=False, pad_output=True),
    "in turn": lambda: SliceSamplerWithoutReplacement(slice_len=2, end_key=("next", "done")),
    "prioritized": lambda: PrioritizedSliceSampler(CAPACITY, 0.7, 0.5, slice_len=2, end_key=("next", "done")),
    "fixed": lambda: SliceSampler(slice_len=2, ends=torch.zeros(CAPACITY, dtype=torch.bool)),
}


@pytest.mark.parametrize(("kind", "options"), [*((kind, {}) for kind in SAMPLERS), ("slices", ONCE)])
def test_slices(backend, kind, options):
    """Case 57: of one episode each, with the flags of any other slice."""
    if backend == "triton" and kind in ("in turn", "fixed"):
        pytest.skip("the interpreter is slow")
    stream, sampler = Stream(3, seed=3), SAMPLERS[kind]()
    storage = LazyTensorStorage(CAPACITY, ends=CONTINUITY, ndim=2, **options)
    buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=16)
    for n in (8, 3, 1, 16, 5, 2, 40) if backend == "numba" else (10, 2, 14):
        rows = stream.rows(n)
        buffer.extend(rows.set("lane", torch.zeros_like(rows["of"])))
        length = sampler.slice_len
        batch = buffer.sample().reshape(-1, length)
        assert (batch["of"] == batch["of"][:, :1]).all()
        real = batch.get(("collector", "mask"), torch.ones(batch.shape, dtype=torch.bool))
        assert torch.equal(batch["next", "truncated"].sum(1), torch.ones(batch.shape[0], 1))
        assert not batch["next", "terminated"].any()
        steps = torch.arange(length).view(1, -1, 1) % real.sum(1).view(-1, 1, 1).clamp(min=1)
        due = (batch["pixels"][:, :1].int() + steps) % 256
        assert torch.equal(torch.where(real.unsqueeze(-1), batch["pixels"].int(), due), due)
    found = sampler.trajectories()
    assert len(found) == sum(broken(buffer)) + 3


def test_sequences_and_queries():
    """Case 57: all that knows trajectories. Hindsight is in tests/contracts/buffers.py."""
    stream = Stream(2, seed=5)
    rows = stream.rows(40)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY, ends=CONTINUITY, ndim=2),
        batch_size=32,
        sample_unit=Sequence(3, burn_in=1, bootstrap=1),
    )
    buffer.extend(rows)
    windows = buffer.sample().reshape(32, 5)
    assert torch.equal(windows["of"], windows["of"][:, 1:2].expand(-1, 5, -1))


def test_bytes_are_compared():
    """NaN continues NaN, and -0.0 is not 0.0: a difference that is stored is one."""
    now = torch.tensor([[1.0], [float("nan")], [0.0], [3.0]])
    coming = torch.tensor([[float("nan")], [-0.0], [3.0], [4.0]])
    rows = TensorDict({"observation": now, "next": {"observation": coming, "done": torch.zeros(4, 1).bool()}}, [4])
    for options in ({}, {"share_next": True}, {"dtypes": {"observation": torch.float16}}):
        storage = LazyTensorStorage(8, ends=CONTINUITY, **options)
        TensorDictReplayBuffer(storage=storage).extend(rows)
        assert storage.breaks.found[:4].tolist() == [False, True, False, False]
    # What a codec makes equal is equal: compared is what is stored.
    storage = LazyTensorStorage(8, ends=CONTINUITY, dtypes={"observation": Codec(torch.int8)})
    TensorDictReplayBuffer(storage=storage).extend(rows.apply(lambda value: value.nan_to_num(7)))
    assert storage.breaks.found[:4].tolist() == [False, False, False, False]


def test_prefixes_are_compared_with_their_whole():
    rows = Stream().rows(30)
    for part in (rows, rows["next"]):
        part["actor"] = part["pixels"][:, :2].clone()
    storage = LazyTensorStorage(CAPACITY, ends=CONTINUITY, prefixes={"actor": "pixels"})
    buffer = TensorDictReplayBuffer(storage=storage)
    buffer.extend(rows)
    assert_breaks(buffer)


def test_refusals():
    """Both sides are named, and nothing is written."""
    with pytest.raises(ValueError, match="ends must be 'flags' or 'flags\\+continuity', got 'both'"):
        LazyTensorStorage(8, ends="both")
    rows = Stream().rows(4)
    for dropped, options, message in (
        ("observation", {}, "finds nothing to compare.*'action'"),
        (None, {"dtypes": {("next", "observation"): torch.float16}}, "float32, 1.0, 0.0.*float16, 1.0, 0.0"),
    ):
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8, ends=CONTINUITY, **options))
        data = rows if dropped is None else TensorDict({"action": torch.ones(4, 1), "next": rows["next"]}, [4])
        with pytest.raises(ValueError, match=message):
            buffer.extend(data)
        assert not buffer.storage.initialized
