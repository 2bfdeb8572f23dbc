"""Windows in plain Python: lists of rows, the steps around one of them, and histories of writes that tests compare."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from gpubuf.data import LazyTensorStorage, RandomSampler, Sampler, TensorDictReplayBuffer, Window

GAMMA = 0.5
FRAME = torch.arange(6).view(2, 1, 3)


@dataclass
class Step:
    """A row. ``last``: nothing that is stored continues it."""

    frame: int
    coming: int
    number: int
    reward: float
    done: bool
    last: bool = False


@dataclass
class Steps:
    """The stored rows of one environment, the oldest first.

    Attributes:
        capacity: how many there may be.
        rows: all of them.
        gone: whether there were others before them.
        emptied: whether rows were forgotten: a ring that is full then may have lost some.
    """

    capacity: int
    rows: list[Step] = field(default_factory=list)
    gone: bool = False
    emptied: bool = False

    @property
    def lost(self) -> bool:
        """Whether there may have been others before them."""
        return self.gone or (self.emptied and len(self.rows) == self.capacity)

    def first(self, i: int) -> int:
        """The first row of a row's trajectory."""
        while i and not self.rows[i - 1].last:
            i -= 1
        return i

    def final(self, i: int) -> int:
        """The last one."""
        while i + 1 < len(self.rows) and not self.rows[i].last:
            i += 1
        return i

    def bounds(self, i: int, window: Window) -> tuple[int, int]:
        """The rows that a window of a row can have."""
        return (0, len(self.rows) - 1) if window.outside == "cross" else (self.first(i), self.final(i))

    def around(self, i: int, window: Window) -> list[tuple[int, bool]]:
        """The rows of a window, and whether each is outside."""
        first, last = self.bounds(i, window)
        at = range(i + window.first, i + window.last + 1, window.step)
        return [(min(max(j, first), last), not first <= j <= last) for j in at]

    def frames(self, i: int, window: Window) -> list[int]:
        """Of next frames that are stored once: those that followed, before which comes the own one of the first row."""
        first, last = self.bounds(i, window)
        seen = [self.rows[first].frame, *(self.rows[j].coming for j in range(first, last + 1))]
        at = [j - first + 1 for j in range(i + window.first, i + window.last + 1, window.step)]
        nothing = window.outside == "zero"
        return [0 if nothing and not 0 <= j < len(seen) else seen[min(max(j, 0), len(seen) - 1)] for j in at]

    def begins(self, j: int) -> bool:
        """Whether a row begins a trajectory."""
        return self.rows[j - 1].last if j else not self.lost


def images(frames: Any) -> Tensor:
    """Frames ``[..., 2, 1, 3]`` by their numbers, 0 for black ones."""
    number = torch.as_tensor(frames)[..., None, None, None]
    return torch.where(number > 0, number * 10 + FRAME, 0)


class History:
    """Writes to a buffer and a model, with windows, keys and sizes that ``seed`` chooses.

    Args:
        seed: of all choices.
        sampler: makes that of a buffer of so many rows.
    """

    def __init__(self, seed: int, sampler: Callable[[int], Sampler] = lambda capacity: RandomSampler()) -> None:
        self.random = random.Random(seed)
        choose = self.random.choice
        self.envs, self.steps, self.n_steps = choose([1, 1, 2, 3]), choose([1, 3, 8, 20]), choose([1, 1, 2, 4])
        self.once, self.count = choose([True, True, False]), 0
        self.windows = {key: self.window(key) for key in ("frame", "number", ("next", "frame"), ("next", "done"))}
        self.windows = {key: window for key, window in self.windows.items() if choose([True, True, False])}
        self.sampler = sampler
        self.envs_rows = [Steps(self.steps) for _ in range(self.envs)]
        self.buffer = self.new(self.steps)
        self.now = [self.number() for _ in range(self.envs)]

    def new(self, steps: int) -> TensorDictReplayBuffer:
        """An empty buffer."""
        capacity = steps * self.envs
        once: dict[str, Any] = {"share_next": ["frame"], "next_capacity": 4 * capacity} if self.once else {}
        return TensorDictReplayBuffer(
            storage=LazyTensorStorage(capacity, ndim=1 + (self.envs > 1), **once),
            sampler=self.sampler(capacity),
            batch_size=32,
            n_steps=self.n_steps,
            gamma=GAMMA,
            end_keys=[("next", "done")],
            windows=dict(self.windows),
            generator=torch.Generator().manual_seed(self.random.randrange(1000)),
        )

    def number(self) -> int:
        self.count += 1
        return self.count

    def window(self, key: Any) -> Window:
        """Any window of a key."""
        choose, next_key = self.random.choice, key[0] == "next"
        first, step, n = choose([-5, -3, -1, 0, 0, 1]), choose([1, 1, 2, 3]), choose([1, 2, 4, 7])
        outside = choose(["repeat", "repeat", "zero", "cross"])
        if key == ("next", "frame") and not self.once and outside != "cross":
            first = max(first, 0)
        told = {} if next_key else {"mask": f"{key}_is_pad", "is_first": f"{key}_is_first"}
        join = 0 if key in ("frame", ("next", "frame")) and choose([True, False]) else None
        return Window(first, first + step * (n - 1), step=step, outside=outside, join=join, **told)

    # What is done

    def write(self, n: int) -> None:
        """Write ``n`` steps of all environments."""
        new = [[self.step_of(env) for _ in range(n)] for env in range(self.envs)]
        for steps, rows in zip(self.envs_rows, new, strict=True):
            steps.rows += rows
            steps.gone |= len(steps.rows) > self.steps
            del steps.rows[: -self.steps]
        batch = torch.stack([self.batch_of(rows) for rows in new])
        self.buffer.extend(batch if self.envs > 1 else batch[0])

    def step_of(self, env: int) -> Step:
        done = self.random.random() < 0.25
        frame, coming = self.now[env], self.number()
        # After the last frame of an episode comes another one.
        self.now[env] = self.number() if done else coming
        return Step(frame, coming, frame, self.random.randrange(9), done, done)

    def batch_of(self, rows: list[Step]) -> TensorDict:
        def column(name: str, dtype: torch.dtype) -> Tensor:
            return torch.tensor([getattr(row, name) for row in rows], dtype=dtype)

        after = {
            "frame": images(column("coming", torch.int64)),
            "reward": column("reward", torch.float32).unsqueeze(-1),
            "done": column("done", torch.bool).unsqueeze(-1),
        }
        number = column("number", torch.int64)
        data = {"frame": images(column("frame", torch.int64)), "number": number, "row": number.clone(), "next": after}
        return TensorDict(data, [len(rows)])

    def end(self) -> None:
        """End the trajectories of the newest rows."""
        self.buffer.end_trajectories()
        for steps in self.envs_rows:
            if steps.rows:
                steps.rows[-1].last = True

    def empty(self) -> None:
        """Forget all rows."""
        self.buffer.empty()
        for steps in self.envs_rows:
            steps.emptied |= steps.gone or bool(steps.rows)
            steps.gone = False
            steps.rows.clear()

    def load(self, folder: Path | None = None) -> None:
        """Go on with another buffer, of as much room or more."""
        if not self.buffer.initialized:
            return
        more = self.random.choice([0, 5])
        for steps in self.envs_rows:
            steps.gone, steps.emptied, steps.capacity = steps.lost, steps.emptied and not more, steps.capacity + more
        self.steps += more
        other = self.new(self.steps)
        if folder is None:
            other.load_state_dict(self.buffer.state_dict(), end_trajectories=False)
        else:
            self.buffer.save(folder)
            other.load(folder, end_trajectories=False)
        self.buffer = other

    def act(self, folder: Path | None = None) -> None:
        """Do something, and compare all that is stored then."""
        choose = self.random.choice
        action = choose([self.write] * 8 + [self.end, self.end, self.empty, self.load])
        if action == self.write:
            self.write(choose([1, 1, 2, 3, 7, self.steps, self.steps + 2]))
        elif action == self.load:
            self.load(folder)
        else:
            action()
        self.check()

    # What is due

    def due(self, env: int, i: int) -> dict[Any, Tensor]:
        """The keys of a batch for a row."""
        steps = self.envs_rows[env]
        rows, last = steps.rows, min(i + self.n_steps - 1, steps.final(i))
        taken = rows[i : last + 1]
        found = {
            "row": torch.tensor(rows[i].number),
            ("next", "reward"): torch.tensor([sum(GAMMA**k * row.reward for k, row in enumerate(taken))]),
            "frame": images(rows[i].frame),
            "number": torch.tensor(rows[i].number),
            ("next", "frame"): images(rows[last].coming),
            ("next", "done"): torch.tensor([rows[last].done]),
        }
        if self.n_steps > 1:
            found["steps_to_next_obs"] = torch.tensor([len(taken)])
        for key, window in self.windows.items():
            around = steps.around(last if key[0] == "next" else i, window)
            if key == ("next", "frame") and self.once:
                value = images(steps.frames(last, window))
            else:
                name = {("next", "frame"): "coming", ("next", "done"): "done"}.get(key, key)
                told = [getattr(rows[j], name) for j, _ in around]
                value = images(told) if "frame" in key else torch.tensor(told)
                value = value.unsqueeze(-1) if key == ("next", "done") else value
                if window.outside == "zero":
                    outside = torch.tensor([out for _, out in around])
                    value = value.masked_fill(outside.view(-1, *[1] * (value.dim() - 1)), 0)
            found[key] = value if window.join is None else value.flatten(0, 1)
            if window.mask is not None:
                found[window.mask[0]] = torch.tensor([out for _, out in around])
                found[window.is_first[0]] = torch.tensor([steps.begins(j) for j, _ in around])
        return found

    @property
    def drawable(self) -> set[int]:
        """The numbers of the rows that may be drawn: steps that are needed before them were not overwritten.

        A uniform sampler always has the newest step.
        """
        past, found = self.buffer.parts.recipe.past, set[int]()
        for steps in self.envs_rows:
            n, uniform = len(steps.rows), isinstance(self.buffer.sampler, RandomSampler)
            needed = min(past, n - 1) if uniform else past
            found |= {row.number for row in steps.rows[needed if steps.lost else 0 :]}
        return found

    def compare(self, batch: TensorDict) -> None:
        """Each row of a batch is what the model has for it."""
        places = {row.number: (env, i) for env, steps in enumerate(self.envs_rows) for i, row in enumerate(steps.rows)}
        dues = [self.due(*places[number]) for number in batch["row"].tolist()]
        for key in dues[0]:
            expected = torch.stack([due[key] for due in dues])
            assert batch[key].dtype == expected.dtype, key
            assert torch.equal(batch[key], expected), (key, self.windows.get(key), batch[key], expected)

    def check(self) -> None:
        """All stored rows as they are read, and a batch as it is drawn."""
        parts = self.buffer.parts
        if not len(self.buffer):
            return
        stored = {row.number for steps in self.envs_rows for row in steps.rows}
        n = len(self.buffer)
        tensors, _ = parts.reader.gather(torch.arange(n))
        every = parts.reader.layout.assemble(tensors, (n,), None)
        assert set(every["row"].tolist()) == stored
        self.compare(every)
        if not self.drawable:
            assert not self.buffer.can_sample()
            return
        batch = self.buffer.sample()
        assert batch.shape == (32,)
        assert set(batch["row"].tolist()) <= self.drawable
        self.compare(batch)
