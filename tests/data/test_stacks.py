"""Frame stacks: Gymnasium's own come back bit for bit from single frames, and what is no stack is refused."""

from __future__ import annotations

import copy
import itertools
import random
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.wrappers import FrameStackObservation
from tensordict import TensorDict
from torch import Tensor

from gpubuf.data import (
    Compose,
    FrameStack,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
    Window,
)
from gpubuf.planning import plan
from tests.support.fake_cuda import fake_cuda, no_blocking_copies

GAMMA = 0.5


class Frames(gym.Env[Any, Any]):
    """Random frames, NaN among floats, in episodes of random lengths that end or are cut off."""

    def __init__(self, dtype: Any, shape: tuple[int, ...], seed: int) -> None:
        self.random = np.random.default_rng(seed)
        high = 255 if dtype == np.uint8 else 1
        self.observation_space = gym.spaces.Box(0, high, shape, dtype)
        self.action_space = gym.spaces.Discrete(2)

    def frame(self) -> np.ndarray:
        frame = self.random.integers(256, size=self.observation_space.shape).astype(self.observation_space.dtype)
        if frame.dtype != np.uint8 and self.random.random() < 0.2:
            frame.reshape(-1)[0] = np.nan
        return frame

    def reset(self, **options: Any) -> Any:
        return self.frame(), {}

    def step(self, action: Any) -> Any:
        end = self.random.random()
        return self.frame(), float(self.random.integers(9)), end < 0.15, 0.15 <= end < 0.25, {}


@dataclass
class Row:
    """A row as it was written. ``last``: nothing that is stored continues it."""

    number: int
    stack: Tensor
    coming: Tensor
    reward: float
    terminated: bool
    truncated: bool
    last: bool


class Program:
    """A program that steps environments with stacked observations, and writes what they give.

    Args:
        seed: of all choices.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        choose = self.random.choice
        self.frames, self.n_envs, self.steps = choose([2, 3, 4]), choose([1, 1, 2, 3]), choose([5, 9, 20])
        self.n_steps, self.padding, self.time = choose([1, 1, 3]), choose(["reset", "zero"]), choose([0, 1])
        dtype, shape = choose([(np.uint8, (2, 3)), (np.float32, (2,)), (np.uint8, ())])
        self.sampler = choose([lambda rows: RandomSampler(), lambda rows: PrioritizedSampler(rows, 0.7, 0.5)])
        self.envs = [
            FrameStackObservation(Frames(dtype, shape, 10 * seed + env), self.frames, padding_type=self.padding)
            for env in range(self.n_envs)
        ]
        self.buffer = self.new()
        self.now = [env.reset()[0] for env in self.envs]
        self.rows: list[list[Row]] = [[] for _ in self.envs]
        self.count = 0

    def new(self) -> TensorDictReplayBuffer:
        capacity = self.steps * self.n_envs
        return TensorDictReplayBuffer(
            storage=LazyTensorStorage(
                capacity, ndim=1 + (self.n_envs > 1), share_next=["pixels"], next_capacity=capacity
            ),
            sampler=self.sampler(capacity),
            transform=FrameStack(["pixels"], self.frames, padding=self.padding),
            batch_size=32,
            dim_extend=self.time if self.n_envs > 1 else None,
            n_steps=self.n_steps,
            gamma=GAMMA,
            generator=torch.Generator().manual_seed(self.random.randrange(1000)),
        )

    # What is written

    def row(self, env: int) -> Row:
        stack = self.now[env]
        coming, reward, terminated, truncated, _ = self.envs[env].step(0)
        over = terminated or truncated
        self.now[env] = self.envs[env].reset()[0] if over else coming
        self.count += 1
        return Row(self.count, torch.tensor(stack), torch.tensor(coming), reward, terminated, truncated, over)

    def made(self, n: int) -> tuple[TensorDict, list[list[Row]]]:
        """A batch of ``n`` steps, ``[n]``, ``[E, n]`` or ``[n, E]``, and its rows."""
        rows = [[self.row(env) for _ in range(n)] for env in range(self.n_envs)]
        batch = torch.stack([batch_of(each) for each in rows], 1 - self.time)
        return batch if self.n_envs > 1 else batch.reshape(-1), rows

    def keep(self, rows: list[list[Row]]) -> None:
        for kept, new in zip(self.rows, rows, strict=True):
            kept += new
            del kept[: -self.steps]

    def write(self) -> None:
        """Write in any of the ways that there are."""
        batch, rows = self.made(n := self.random.choice([1, 1, 2, 3, 7, self.steps + 2]))
        way = self.random.choice(["extend", "columns", "dict", "single", "step"])
        if way == "step" and n == 1:
            self.buffer.add_columns(self.step_of(batch))
        elif way == "single" and n == 1:
            self.buffer.add(batch[:, 0] if self.n_envs > 1 and self.time else batch[0])
        elif way == "columns":
            self.buffer.extend_columns(dict(batch.items(True, True)))
        elif way == "dict" and self.n_envs == 1:
            self.buffer.extend({**batch.to_dict(), "next": batch["next"].to_dict()})
        else:
            before = batch.clone()
            self.buffer.extend(batch)
            assert all(torch.equal(bits(value), bits(before[key])) for key, value in batch.items(True, True))
        self.keep(rows)

    def step_of(self, batch: TensorDict) -> dict[Any, np.ndarray]:
        """The only step of a batch, as environments give it: arrays ``[...]``, or ``[E, ...]``."""
        step = batch[:, 0] if self.n_envs > 1 and self.time else batch[0]
        return {key: value.numpy() for key, value in step.items(True, True)}

    # What happens besides

    def leave(self) -> None:
        """Leave the episodes."""
        self.buffer.end_trajectories()
        self.begin()

    def begin(self) -> None:
        """Begin other episodes."""
        for kept in self.rows:
            if kept:
                kept[-1].last = True
        self.now = [env.reset()[0] for env in self.envs]

    def empty(self) -> None:
        self.buffer.empty()
        self.rows = [[] for _ in self.envs]
        self.begin()

    def load(self) -> None:
        """Go on in another buffer, perhaps a larger one: in new episodes, or in those of before."""
        if not self.buffer.initialized:
            return
        new_episodes = self.random.random() < 0.5
        self.steps += self.random.choice([0, 4])
        other = self.new()
        other.load_state_dict(self.buffer.state_dict(), end_trajectories=new_episodes)
        self.buffer = other
        if new_episodes:
            self.begin()

    def fault(self) -> None:
        """A batch with a bit that is no stack's: its row is named, nothing is written, and the next one is taken."""
        batch, rows = self.made(n := self.random.choice([1, 2, 5]))
        key = self.random.choice(["pixels", ("next", "pixels")])
        wrong = batch.clone()
        env, step = self.random.randrange(self.n_envs), self.random.randrange(n)
        stack = wrong[key][step if self.n_envs == 1 else (env, step) if self.time else (step, env)]
        stack[self.random.randrange(self.frames - 1)].view(-1).view(torch.uint8)[0] ^= 1
        before = self.buffer.write_count
        whose = f" of environment {env}:" if self.n_envs > 1 else ":"
        by_step = n == 1 and self.random.random() < 0.5
        write = partial(self.buffer.add_columns, self.step_of(wrong)) if by_step else partial(self.buffer.extend, wrong)
        with pytest.raises(ValueError, match=f"^row {step}{whose} {key!r}".replace("(", r"\(").replace(")", r"\)")):
            write()
        assert self.buffer.write_count == before
        self.buffer.extend(batch)
        self.keep(rows)

    def act(self) -> None:
        choose = self.random.choice
        choose([self.write] * 6 + [self.fault, self.leave, self.empty, self.load])()
        self.check()

    # What is due

    def due(self, env: int, i: int) -> tuple[Row, Row, float]:
        """A row, the last of its steps, and its return."""
        rows, last = self.rows[env], i
        while last + 1 < len(rows) and last + 1 < i + self.n_steps and not rows[last].last:
            last += 1
        return rows[i], rows[last], sum(GAMMA**k * row.reward for k, row in enumerate(rows[i : last + 1]))

    def check(self) -> None:
        """All that is drawn is what was written."""
        if not len(self.buffer) or not self.buffer.can_sample():
            return
        places = {row.number: (env, i) for env, rows in enumerate(self.rows) for i, row in enumerate(rows)}
        batch, info = self.buffer.sample(return_info=True)
        found = [self.due(*places[number]) for number in batch["number"].tolist()]
        assert same(batch["pixels"], torch.stack([row.stack for row, _, _ in found]))
        assert same(batch["next", "pixels"], torch.stack([last.coming for _, last, _ in found]))
        assert batch["next", "reward"].flatten().tolist() == [total for _, _, total in found]
        assert batch["next", "terminated"].flatten().tolist() == [last.terminated for _, last, _ in found]
        if self.buffer.sampler.has_priorities:
            self.buffer.update_priority(info["index"], torch.rand(32), generation=info["index_generation"])


def bits(value: Tensor) -> Tensor:
    return value.contiguous().view(torch.uint8)


def same(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors are alike bit for bit."""
    return one.shape == two.shape and one.dtype == two.dtype and torch.equal(bits(one), bits(two))


def batch_of(rows: list[Row]) -> TensorDict:
    def column(name: str) -> Tensor:
        return torch.tensor([getattr(row, name) for row in rows]).unsqueeze(-1)

    after = {name: column(name) for name in ("reward", "terminated", "truncated")}
    after["pixels"] = torch.stack([row.coming for row in rows])
    data = {"number": column("number").squeeze(-1), "pixels": torch.stack([row.stack for row in rows]), "next": after}
    return TensorDict(data, [len(rows)])


@pytest.mark.parametrize("seed", range(40))
def test_stacks_come_back(seed):
    """CASES 79. Random histories of Gymnasium's stacks, with steps, priorities, ends, loads and refused writes."""
    program = Program(seed)
    for _ in range(25):
        program.act()


def test_steps_of_arrays_are_looked_at_where_they_are():
    """Not by the way of batches, which takes ten times as long: of both paddings, along any dimension, at ends too."""
    for shape, dim, padding, next_too in itertools.product([(1, 5), (4, 5, 3)], [0, -1], ["reset", "zero"], [0, 1]):
        rows = stacked(*images(*shape), dim=dim, padding=padding)
        if not next_too:
            del rows["next", "pixels"]
        stack = FrameStack("pixels", dim=dim, padding=padding, next_too=bool(next_too))
        buffer = buffer_of(stack, once=["pixels"] * next_too)
        steps = [{key: value.numpy() for key, value in row.items(True, True)} for row in rows.unbind(0)]
        buffer.add_columns(steps[0])
        with mock.patch.object(FrameStack, "inv", side_effect=AssertionError):
            for step in steps[1:]:
                buffer.add_columns(step)
        found = everything(buffer)
        assert all(same(found[key], value) for key, value in rows.items(True, True))
    rows = stacked(*images(1, 5)).apply(lambda value: value.bfloat16())
    buffer = buffer_of(FrameStack("pixels"))
    for row in rows.unbind(0):
        buffer.add_columns(dict(row.items(True, True)))
    assert same(everything(buffer)["pixels"], rows["pixels"])


# One thing at a time

DONE = torch.tensor([0, 0, 1, 0, 0, 0, 1, 0], dtype=torch.bool).unsqueeze(-1)


def stacked(frames: Tensor, after: Tensor, n: int = 4, dim: int = 0, padding: str = "reset") -> TensorDict:
    """Eight rows of stacks ``n`` deep along ``dim``, of frames ``[8, ...]`` and those that come after them."""
    rows, history = list[list[Tensor]](), list[Tensor]()
    for step, (frame, coming) in enumerate(zip(frames, after, strict=True)):
        if step == 0 or DONE[step - 1]:
            history = [frame if padding == "reset" else torch.zeros_like(frame)] * (n - 1) + [frame]
        rows.append([torch.cat(history, dim), torch.cat([*history[1:], coming], dim)])
        history = [*history[1:], coming]
    stack, coming = map(torch.stack, zip(*rows, strict=True))
    return TensorDict({"pixels": stack, "next": {"pixels": coming, "done": DONE}}, [8])


def images(*shape: int, dtype: torch.dtype = torch.uint8) -> tuple[Tensor, Tensor]:
    """Frames of eight rows, and those that come after them."""
    numbers = torch.randperm(9 * int(np.prod(shape)), generator=torch.Generator().manual_seed(0))
    frames = (numbers % 251 + 1).to(dtype).view(9, *shape)
    return frames[:-1], torch.where(DONE.view(8, *[1] * len(shape)), frames[1:] ^ 1, frames[1:])


def buffer_of(
    stack: Any, capacity: int = 16, once: Any = ("pixels",), kind: Any = TensorDictReplayBuffer, **options: Any
) -> Any:
    storage = LazyTensorStorage(capacity, share_next=list(once), **options.pop("storage", {}))
    return kind(storage=storage, transform=stack, batch_size=8, **options)


def everything(buffer: ReplayBuffer) -> Any:
    """All rows as batches have them."""
    reader, n = buffer.parts.reader, len(buffer)
    return buffer.transform(reader.layout.assemble(reader.gather(torch.arange(n))[0], (n,), None))


def test_a_stack_that_crosses_an_end_is_refused():
    """CASES 79. Row 3 begins an episode, and goes on with the frames of the one before."""
    rows = stacked(*images(1, 5))
    before, frame = rows["next", "pixels"][2], rows["pixels"][3, -1:]
    rows["pixels"][3] = torch.cat([before[1:], frame])
    rows["next", "pixels"][3, :3] = rows["pixels"][3, 1:]
    for cut in (8, 3):
        buffer = buffer_of(FrameStack("pixels"))
        if cut == 3:
            buffer.extend(rows[:3])
        with pytest.raises(ValueError, match="^row 3: 'pixels'" if cut == 8 else "^row 0: 'pixels'"):
            buffer.extend(rows if cut == 8 else rows[3:])
        assert len(buffer) == (0 if cut == 8 else 3)


def test_a_stack_that_is_padded_within_an_episode_is_refused():
    """CASES 79. Row 5 goes on, and begins with its own frame, as after a reset."""
    rows = stacked(*images(1, 5))
    rows["pixels"][5] = rows["pixels"][5, -1:].expand(4, 5)
    rows["next", "pixels"][5, :3] = rows["pixels"][5, -1:].expand(3, 5)
    for start in (0, 5):
        buffer = buffer_of(FrameStack("pixels"))
        if start:
            buffer.extend(rows[:5])
        with pytest.raises(ValueError, match=f"^row {5 - start}: 'pixels' is no stack"):
            buffer.extend(rows[start:])
    buffer.end_trajectories()
    with pytest.raises(ValueError, match=r"^row 1: 'pixels'"):
        buffer.extend(rows[5:])
    buffer.add(rows[5])
    assert same(everything(buffer)["pixels"], rows["pixels"][:6])


@pytest.mark.parametrize("padding", ["reset", "zero"])
@pytest.mark.parametrize(("shape", "dim"), [((1, 4, 5), 0), ((4, 5, 1), -1), ((4, 5, 3), 2), ((2, 3), 1), ((6,), -1)])
def test_stacks_along_any_dimension(shape, dim, padding):
    """Channels first and last, of one and of several channels; one array per key; single frames by their index."""
    rows = stacked(*images(*shape), dim=dim, padding=padding)
    buffer = buffer_of(FrameStack("pixels", dim=dim, padding=padding))
    buffer.extend(rows[:5])
    buffer.extend_columns(dict(rows[5:].items(True, True)))
    found = everything(buffer)
    for key in ("pixels", ("next", "pixels")):
        assert same(found[key], rows[key])
        assert buffer.sample()[key].shape == rows[key].shape
        assert buffer.sample_columns()[key].shape == rows[key].shape
    assert buffer[:]["pixels"].shape == (8, *shape)
    assert buffer.storage.columns.nbytes <= 16 * (int(np.prod(shape)) + 1)
    other = "zero" if padding == "reset" else "reset"
    with pytest.raises(ValueError, match=r"^row 0: 'pixels'"):
        buffer_of(FrameStack("pixels", dim=dim, padding=other)).extend(rows)


def test_root_keys_alone():
    """Without next stacks any frame may follow, and the others are compared; identifiers tell the ends, too."""
    rows = stacked(*images(1, 5)).exclude(("next", "pixels"))
    rows["episode"] = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2])
    for options in ({}, {"traj_key": "episode"}):
        for cut in range(1, 8):
            buffer = buffer_of(FrameStack("pixels", next_too=False), once=(), **options)
            buffer.extend(rows[:cut])
            buffer.extend(rows[cut:])
            assert same(everything(buffer)["pixels"], rows["pixels"])
            wrong = rows.clone()
            wrong["pixels"][cut, 1, 0] ^= 1
            with pytest.raises(ValueError, match=f"^row {cut}: 'pixels'"):
                buffer_of(FrameStack("pixels", next_too=False), once=(), **options).extend(wrong)


def test_several_keys_of_dicts():
    """Keys that are nested, and stacked in different ways, of a buffer of dicts."""
    image, vector = stacked(*images(1, 4, 5)), stacked(*images(3), padding="zero")
    rows = {
        "obs": {"image": image["pixels"], "vector": vector["pixels"]},
        "next": {"obs": {"image": image["next", "pixels"], "vector": vector["next", "pixels"]}, "done": DONE},
    }
    keys = [("obs", "image"), ("obs", "vector")]
    for kind in (ReplayBuffer, TensorDictReplayBuffer):
        stacks = Compose(FrameStack(keys[0]), FrameStack(keys[1], padding="zero"))
        buffer = buffer_of(stacks, once=keys, kind=kind)
        buffer.extend(rows)
        assert rows["obs"]["image"] is image["pixels"]
        found = everything(buffer)
        for name in ("image", "vector"):
            assert same(found["obs"][name], rows["obs"][name])
            assert same(found["next"]["obs"][name], rows["next"]["obs"][name])


def test_a_stack_may_be_appended_and_copied():
    """A copy of a buffer, and another storage, go on with their own rows; two buffers don't share a FrameStack."""
    rows, stack = stacked(*images(1, 5)), FrameStack("pixels")
    buffer = buffer_of(None)
    buffer.append_transform(stack)
    buffer.extend(rows[:2])
    other = copy.deepcopy(buffer)
    other.extend(rows[2:])
    buffer.extend(rows[2:5])
    assert same(everything(other)["pixels"], rows["pixels"])
    with pytest.raises(ValueError, match="part of another buffer"):
        buffer_of(stack)
    buffer.set_storage(LazyTensorStorage(16, share_next=["pixels"]))
    buffer.extend(rows)
    assert same(everything(buffer)["next", "pixels"], rows["next", "pixels"])


def test_what_a_frame_stack_refuses():
    rows = stacked(*images(1, 5))
    for change, text in [
        ({"once": ()}, "share_next"),
        ({"storage": {"dtypes": {"pixels": torch.float16}}}, "out of dtypes"),
        ({"storage": {"batch_dtypes": {("next", "pixels"): torch.float16}}}, "out of dtypes"),
        ({"windows": {"pixels": Window(-1, 0)}}, "windows has these"),
        ({"writers": 1}, "several writers"),
        ({"capacity": 3}, "room for 4 steps"),
    ]:
        with pytest.raises(ValueError, match=text):
            buffer_of(FrameStack("pixels"), **change).extend(rows)
    for make, text in [
        (lambda: FrameStack("pixels", 1), "two frames"),
        (lambda: FrameStack("pixels", padding="edge"), "padding must be one of"),
        (lambda: FrameStack([]), "a key or a list"),
    ]:
        with pytest.raises(ValueError, match=text):
            make()
    with pytest.raises(TypeError, match="whole number"):
        FrameStack("pixels", 4.0)
    buffer = buffer_of(FrameStack("pixels"))
    buffer.extend(rows)
    with pytest.raises(TypeError, match="can't be overwritten"):
        buffer[0] = rows[0]
    for wrong, text in [
        (rows.exclude("pixels"), "under 'pixels', got nothing"),
        (rows.exclude(("next", "pixels")), "got nothing"),
        (rows.exclude(("next", "done")), r"none of \[\('next', 'done'\)"),
        (rows.clone().set("pixels", rows["pixels"][:, :3]), r"got the shape \(8, 3, 5\)"),
        (stacked(*images(1, 5, dtype=torch.int32)), r"torch.uint8\), got .*torch.int32"),
        (stacked(*images(1, 6)), r"\(1, 4, 5\), torch.uint8\), got \(\(1, 4, 6\), torch.uint8"),
    ]:
        with pytest.raises(ValueError, match=text):
            buffer.extend(wrong)
    assert len(buffer) == 8
    buffer.extend(rows[:0])
    # A write that is refused for another key leaves what comes next as it was.
    buffer.end_trajectories()
    with pytest.raises(ValueError, match="extra"):
        buffer.extend(rows[:1].clone().set(("next", "extra"), torch.zeros(1)))
    buffer.extend(rows[:2])
    assert len(buffer) == 10


def test_on_a_gpu_nothing_waits_and_wrong_rows_are_counted():
    """Rows on a GPU are never looked at; those on the host are, but for the first step of a write."""
    rows, wrong = stacked(*images(1, 5)), stacked(*images(1, 5))
    wrong["pixels"][4, 0, 0] ^= 1
    with fake_cuda(), no_blocking_copies():
        buffer = buffer_of(FrameStack("pixels"), storage={"device": "cuda"})
        on_gpu = rows.apply(lambda x: torch.empty(x.shape, dtype=x.dtype, device="cuda"), device="cuda")
        for _ in range(3):
            buffer.extend(on_gpu)
            assert buffer.sample()["pixels"].shape == (8, 4, 5)
        buffer.end_trajectories()
        buffer.extend(on_gpu[:1])
        buffer.empty()
    with mock.patch("gpubuf.data.stacks.host_can_read", return_value=False):
        buffer = buffer_of(FrameStack("pixels"))
        buffer.extend(wrong)
        buffer.sample()
        with pytest.raises(IndexError, match=r"^1 rows .*are no stacks"):
            buffer.state_dict()
        buffer.extend(rows)
        with pytest.raises(IndexError, match=r"^1 rows .*are no stacks"):
            buffer.state_dict()
        buffer.end_trajectories()
        buffer.extend(rows)
        buffer.state_dict()


def test_a_million_atari_rows():
    """7.1 GB, where stacks take 56.5 GB: as they are planned, and as a buffer takes them."""

    def keys(channels: int) -> dict[Any, str]:
        image = f"{channels}x84x84:uint8"
        return {"pixels": image, "action": "1:int64", ("next", "pixels"): image} | dict.fromkeys(
            [("next", "reward"), ("next", "done")], "1:float32"
        )

    n, stack = 1_000_000, FrameStack("pixels", dim=-1)
    once: dict[str, Any] = {"share_next": ["pixels"], "next_capacity": n // 500}
    assert plan(keys(4), n).rows == pytest.approx(56.5e9, rel=0.01)
    planned = plan(keys(1), n, windows=stack.windows, **once)
    assert planned.rows + planned.fit("cpu").index.index == pytest.approx(7.1e9, rel=0.01)
    few = 1_000
    buffer = buffer_of(stack, few, storage={"next_capacity": few // 500})
    images = torch.zeros(2, 84, 84, 4, dtype=torch.uint8)
    after = {"pixels": images, "reward": torch.zeros(2, 1), "done": torch.zeros(2, 1)}
    buffer.extend(TensorDict({"pixels": images, "action": torch.zeros(2, 1, dtype=torch.int64), "next": after}, [2]))
    assert buffer.memory().total / few == pytest.approx(7_100, rel=0.01)
