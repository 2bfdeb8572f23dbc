"""Stacks of frames, chunks of actions and sequences, each out of the same rows by gpubuf and by other libraries.

A contender is a function of :class:`Episodes` that writes all rows into a buffer, as a user of that library does, and
returns it :class:`Filled`. What a batch has to be is said by :class:`Episodes` alone, which shares no code with any.
"""

from __future__ import annotations

import collections
import functools
import gc
import importlib.util
import itertools
import random
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from benchmarks.peers.libraries import needing
from gpubuf.data import LazyTensorStorage, TensorDictReplayBuffer, Window

#: Steps of an episode, from .. to; frames of a stack, actions of a chunk, steps of a sequence.
STEPS = (500, 1500)
STACK, CHUNK, SEQUENCE = 4, 16, 65
#: Rows of a write.
WRITE = 500
END = ("next", "done")


class Episodes:
    """Rows ``0 .. rows`` of several episodes, of random content. An episode has a frame more than it has rows.

    Args:
        rows: how many.
        shape: of a frame.
        dtype: of a frame: uint8, or floats.
    """

    def __init__(self, rows: int, shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> None:
        generator = torch.Generator().manual_seed(0)
        until = torch.randint(*STEPS, (rows // STEPS[0] + 1,), generator=generator).cumsum(0)
        until = torch.cat([until[until < rows], torch.tensor([rows])])
        self.rows, self.count, self.number = rows, len(until), torch.arange(rows)
        self.episode = torch.bucketize(self.number, until, right=True)
        self.last = until[self.episode] - 1
        # By row: its frame, and the first one of its episode.
        self.at = self.number + self.episode
        self.start = torch.cat([torch.zeros(1, dtype=torch.int64), until[:-1]])[self.episode] + self.episode
        self.frames = torch.empty((rows + self.count, *shape), dtype=dtype)
        for part in self.frames.split(WRITE):
            part.random_(256, generator=generator) if dtype == torch.uint8 else part.normal_(generator=generator)

    def frame(self, number: Tensor, ahead: int = 0) -> Tensor:
        """The frames of rows, or those ``ahead``."""
        return self.frames[self.at[number] + ahead]

    def stack(self, number: Tensor, ahead: int = 0) -> Tensor:
        """Stacks along the first dimension of frames, those of rows or ``ahead``; the first frame is repeated."""
        at = (self.at[number] + ahead)[:, None] + torch.arange(1 - STACK, 1)
        return self.frames[at.maximum(self.start[number][:, None])].flatten(1, 2)

    def stacks(self, number: Tensor) -> dict[str, Tensor]:
        """What a batch of stacks has of the rows ``[B]``."""
        return {"stack": self.stack(number), "next": self.stack(number, 1)}

    def chunks(self, number: Tensor) -> dict[str, Tensor]:
        """What a batch of chunks has of the rows ``[B]``; the action is the frame, and the last one is repeated."""
        step, last = number[:, None] + torch.arange(CHUNK), self.last[number][:, None]
        return {"action": self.frame(step.minimum(last)), "pad": step > last}

    def sequences(self, number: Tensor) -> dict[str, Tensor]:
        """What a batch of sequences has, of the rows ``[B, T]``: those that follow the first, in one episode."""
        step = number[:, :1] + torch.arange(SEQUENCE)
        return {"pixels": self.frame(step), "rows": step.minimum(self.last[number[:, :1]])}

    def writes(self, see: Callable[..., Tensor] | None = None) -> Iterator[TensorDict]:
        """All rows as transitions, with pixels and next pixels as ``see`` gives them; None: no next pixels."""
        for number in self.number.split(WRITE):
            done = (number == self.last[number]).unsqueeze(1)
            after = {"reward": torch.zeros(len(number), 1), "done": done}
            after |= {} if see is None else {"pixels": see(number, 1)}
            pixels = self.frame(number) if see is None else see(number)
            yield TensorDict({"pixels": pixels, "number": number, "next": after}, [len(number)])

    def steps(self, see: Callable[..., Tensor]) -> Iterator[tuple[np.ndarray, np.ndarray, int, bool]]:
        """The same one by one: pixels, next pixels, number and done."""
        for rows in self.writes(see):
            columns = (rows["pixels"], rows["next", "pixels"], rows["number"], rows["next", "done"])
            for pixels, after, number, done in zip(*(each.numpy() for each in columns), strict=True):
                yield pixels, after, int(number), bool(done)


@dataclass(frozen=True)
class Filled:
    """A buffer with all rows.

    Attributes:
        buffer: what holds the rows.
        sample: a batch of so many rows, stacks or sequences.
        read: what is compared of a batch: the ``number`` of each row, and what the function of :class:`Episodes` gives.
        held: bytes of the rows where :func:`held` can't see them.
    """

    buffer: Any
    sample: Callable[[int], Any]
    read: Callable[[Any], dict[str, Tensor]]
    held: int | None = None


def held(buffer: object) -> int:
    """Bytes of all memory of tensors and arrays that a buffer refers to, each counted once."""
    seen, memory, due = set[int](), dict[int, int](), [buffer]
    while due:
        each = due.pop()
        if id(each) in seen or isinstance(each, (type, types.ModuleType, types.FunctionType)):
            continue
        seen.add(id(each))
        if isinstance(each, Tensor) and not torch.nn.parameter.is_lazy(each):
            whole = each.untyped_storage()
            memory[whole.data_ptr()] = whole.nbytes()
        elif isinstance(each, np.ndarray) and not isinstance(each.base, np.ndarray):
            memory[each.__array_interface__["data"][0]] = each.nbytes
        due += gc.get_referents(each) + ([each.base] if isinstance(each, np.ndarray) else [])
    return sum(memory.values())


# Stacks


def _stacks(batch: Any, pixels: str = "pixels") -> dict[str, Tensor]:
    return {"number": batch["number"].flatten(), "stack": batch[pixels], "next": batch["next", pixels]}


def gpubuf_stacks(data: Episodes, windows: bool = True) -> Filled:
    """Frames once, and stacks by windows; or stacks, each once."""
    window = Window(1 - STACK, 0, join=0)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(data.rows, share_next=["pixels"], next_capacity=2 * data.count),
        windows={"pixels": window, ("next", "pixels"): window} if windows else None,
    )
    for rows in data.writes(data.frame if windows else data.stack):
        buffer.extend(rows)
    return Filled(buffer, buffer.sample, _stacks)


class LazyFrames:
    """Frames that become a stack where an array is asked for, as gymnasium's class of this name until version 0.29."""

    def __init__(self, frames: list[np.ndarray]) -> None:
        self.frames = frames

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.concatenate(self.frames)


def lazy_frames(data: Episodes) -> Filled:
    """A deque of transitions whose stacks share their frames, as programs with DQN have had it."""
    memory: collections.deque[Any] = collections.deque(maxlen=data.rows)
    frames: collections.deque[np.ndarray] = collections.deque(maxlen=STACK)
    for pixels, after, number, done in data.steps(data.frame):
        if not frames:
            frames.extend([pixels.copy()] * STACK)
        before = LazyFrames(list(frames))
        frames.append(after.copy())
        memory.append((before, number, 0.0, LazyFrames(list(frames)), done))
        if done:
            frames.clear()

    def sample(n: int) -> list[np.ndarray]:
        return [np.stack(column) for column in zip(*random.sample(memory, n), strict=True)]

    def read(batch: list[np.ndarray]) -> dict[str, Tensor]:
        stack, number, _, after, _ = map(torch.from_numpy, batch)
        return {"number": number, "stack": stack, "next": after}

    return Filled(memory, sample, read)


def sb3_stacks(data: Episodes) -> Filled:
    """Stable-Baselines3's buffer with ``optimize_memory_usage``: the next stack at an end is of another episode."""
    from gymnasium.spaces import Box

    with needing("Stable-Baselines3"):
        from stable_baselines3.common.buffers import ReplayBuffer
    shape, nothing = data.stack(data.number[:1])[0].shape, np.zeros(1, np.float32)
    buffer = ReplayBuffer(
        data.rows,
        Box(0, 255, shape, np.uint8),
        Box(-1, 1, (1,), np.float32),
        device="cpu",
        optimize_memory_usage=True,
        handle_timeout_termination=False,
    )
    for stack, after, number, done in data.steps(data.stack):
        buffer.add(stack[None], after[None], nothing + number, nothing, nothing + done, [{}])

    def read(batch: Any) -> dict[str, Tensor]:
        goes_on = batch.dones.flatten() == 0
        number, stack, after = (each[goes_on] for each in (batch.actions, batch.observations, batch.next_observations))
        return {"number": number.flatten().long(), "stack": stack, "next": after}

    return Filled(buffer, buffer.sample, read)


def torchrl_stacks(data: Episodes, cat: bool = True) -> Filled:
    """TorchRL: frames, of which slices are stacked as ``CatFrames`` recommends; or stacks."""
    with needing("TorchRL"):
        from torchrl.data import LazyTensorStorage, ReplayBuffer
        from torchrl.envs.transforms import CatFrames
    options = {}
    if cat:
        frames = CatFrames(N=STACK, dim=-3, in_keys=["pixels"], out_keys=["stack"], reset_key="_reset")
        # Nothing is written between the batches that are timed: the ends of episodes are looked for once.
        made = frames.make_rb_transform_and_sampler(batch_size=None, end_key=END, cache_values=True)
        options = dict(zip(("transform", "sampler"), made, strict=True))
    buffer = ReplayBuffer(storage=LazyTensorStorage(data.rows), **options)
    for rows in data.writes(data.frame if cat else data.stack):
        buffer.extend(rows)
    return Filled(buffer, buffer.sample, functools.partial(_stacks, pixels="stack" if cat else "pixels"))


def cpprb_stacks(data: Episodes) -> Filled:
    """cpprb with ``next_of`` and ``stack_compress``: frames last."""
    with needing("cpprb"):
        import cpprb
    shape = (*data.frames.shape[2:], STACK)
    columns = {"obs": {"shape": shape, "dtype": np.uint8}, "number": {"dtype": np.int64}, "rew": {}, "done": {}}
    buffer = cpprb.ReplayBuffer(data.rows, columns, next_of="obs", stack_compress="obs")
    for stack, after, number, done in data.steps(data.stack):
        stack, after = (np.moveaxis(each, 0, -1) for each in (stack, after))
        buffer.add(obs=stack, next_obs=after, number=number, rew=0.0, done=done)
        if done:
            buffer.on_episode_end()

    def read(batch: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        stack, after = (torch.from_numpy(batch[name]).movedim(-1, 1) for name in ("obs", "next_obs"))
        return {"number": torch.from_numpy(batch["number"]).flatten(), "stack": stack, "next": after}

    return Filled(buffer, buffer.sample, read)


# Chunks of actions


def gpubuf_chunks(data: Episodes) -> Filled:
    """Rows, the states of which are the actions as well, and chunks by a window."""
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(data.rows), windows={"action": Window(0, CHUNK - 1, mask="action_is_pad")}
    )
    for rows in data.writes():
        buffer.extend(rows.rename_key_("pixels", "action").set("state", rows["action"]))

    def read(batch: Any) -> dict[str, Tensor]:
        return {"number": batch["number"].flatten(), "action": batch["action"], "pad": batch["action_is_pad"]}

    return Filled(buffer, buffer.sample, read)


def lerobot_chunks(data: Episodes) -> Filled:
    """LeRobot's own dataset and ``delta_timestamps``, through PyTorch's DataLoader in this process."""
    with needing("LeRobot's dataset"):
        import datasets  # noqa: F401

        # LeRobot imports it for images, which there are none of here; datasets would look for more than its name.
        if importlib.util.find_spec("torchvision") is None:
            missing: Any = types.ModuleType("torchvision")
            missing.transforms = None
            sys.modules["torchvision"] = missing
        from lerobot.datasets.lerobot_dataset import LeRobotDataset
    width, fps = data.frames.shape[1], 50
    keys = {key: {"dtype": "float32", "shape": (width,), "names": None} for key in ("observation.state", "action")}
    folder = tempfile.TemporaryDirectory()
    where: dict[str, Any] = {"repo_id": "benchmarks/windows", "root": f"{folder.name}/rows"}
    made = LeRobotDataset.create(**where, fps=fps, features=keys, use_videos=False)
    for number, frame in enumerate(data.frame(data.number).numpy()):
        made.add_frame({**dict.fromkeys(keys, frame), "task": "none"})
        if number == data.last[number]:
            made.save_episode()
    made.finalize()
    dataset = LeRobotDataset(**where, delta_timestamps={"action": [step / fps for step in range(CHUNK)]})

    @functools.cache
    def batches(n: int) -> Iterator[Any]:
        loader = torch.utils.data.DataLoader(dataset, n, shuffle=True, drop_last=True)
        return itertools.chain.from_iterable(itertools.repeat(loader))

    def read(batch: Any) -> dict[str, Tensor]:
        return {"number": batch["index"], "action": batch["action"], "pad": batch["action_is_pad"]}

    return Filled((dataset, folder), lambda n: next(batches(n)), read, dataset.hf_dataset.data.nbytes)


# Sequences


def gpubuf_sequences(data: Episodes) -> Filled:
    """Rows, and whole windows within an episode."""
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(data.rows), windows=Window(0, SEQUENCE - 1, outside="skip")
    )
    for rows in data.writes():
        buffer.extend(rows)
    return Filled(buffer, buffer.sample, lambda batch: _sequences(batch["number"], batch["pixels"]))


def _sequences(number: Tensor, pixels: Tensor) -> dict[str, Tensor]:
    number = number.reshape(-1, SEQUENCE)
    return {"number": number, "rows": number, "pixels": pixels.reshape(*number.shape, *pixels.shape[-3:])}


def torchrl_sequences(data: Episodes) -> Filled:
    """TorchRL's slices, whose steps are rows of the batch."""
    with needing("TorchRL"):
        from torchrl.data import LazyTensorStorage, ReplayBuffer, SliceSampler
    sampler = SliceSampler(slice_len=SEQUENCE, end_key=END, cache_values=True)
    buffer = ReplayBuffer(storage=LazyTensorStorage(data.rows), sampler=sampler)
    for rows in data.writes():
        buffer.extend(rows)
    return Filled(
        buffer, lambda n: buffer.sample(n * SEQUENCE), lambda batch: _sequences(batch["number"], batch["pixels"])
    )


Contenders = Mapping[str, Callable[[Episodes], Filled]]


@dataclass(frozen=True)
class Workload:
    """Batches that are made of neighbouring rows.

    Attributes:
        title: for people.
        batches: how many stacks, chunks or sequences a batch has.
        data: rows, so many.
        expected: what a batch has to be.
        ours: gpubuf's way, by windows.
        others: other ways, by the environment that has the library, ``""`` for gpubuf's own.
    """

    title: str
    batches: tuple[int, ...]
    data: Callable[[int], Episodes]
    expected: Callable[[Episodes, Tensor], dict[str, Tensor]]
    ours: Callable[[Episodes], Filled]
    others: Mapping[str, Contenders]


OURS = "gpubuf"
WORKLOADS = {
    "stacks": Workload(
        f"stacks of {STACK} frames 84x84, and next stacks",
        (32, 256),
        lambda rows: Episodes(rows, (1, 84, 84)),
        Episodes.stacks,
        gpubuf_stacks,
        {
            "": {"gpubuf, stacks": functools.partial(gpubuf_stacks, windows=False), "LazyFrames": lazy_frames},
            "sb3": {"Stable-Baselines3, stacks": sb3_stacks},
            "torchrl": {
                "TorchRL, CatFrames": torchrl_stacks,
                "TorchRL, stacks": functools.partial(torchrl_stacks, cat=False),
            },
            "cpprb": {"cpprb, stack_compress": cpprb_stacks},
        },
    ),
    "chunks": Workload(
        f"chunks of {CHUNK} actions of 14 floats, with a mask",
        (64,),
        lambda rows: Episodes(rows, (14,), torch.float32),
        Episodes.chunks,
        gpubuf_chunks,
        {"lerobot": {"LeRobotDataset": lerobot_chunks}},
    ),
    "sequences": Workload(
        f"sequences of {SEQUENCE} frames 64x64x3",
        (16,),
        lambda rows: Episodes(rows, (64, 64, 3)),
        Episodes.sequences,
        gpubuf_sequences,
        {"torchrl": {"TorchRL, SliceSampler": torchrl_sequences}},
    ),
}


def check(workload: Workload, data: Episodes, filled: Filled, n: int) -> None:
    """Raise a RuntimeError unless a batch is made of rows of the data, and is what those give."""
    found = filled.read(filled.sample(n))
    for name, value in workload.expected(data, found["number"]).items():
        # Rows that a contender can't give right are left out of what is read: ends, which are few.
        if len(value) < n // 2 or not torch.equal(found[name], value):
            raise RuntimeError(f"{workload.title}: {name} of a batch of {n} is not what its rows give")
