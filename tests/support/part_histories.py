"""Random histories of several buffers with common storages, whose parts are replaced, copied, saved and interrupted.

The model is a list of rows for each storage, and priorities for each buffer. ``tests/data/test_buffer_contract.py``
does the same with one buffer of every kind, and more kinds of rows.
"""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict

from gpubuf.data import (
    Hindsight,
    LazyMemmapStorage,
    LazyTensorStorage,
    MultiStepTransform,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
    Window,
)
from gpubuf.kernels.rows import has_lost
from tests.support.interrupted_buffers import is_free
from tests.support.interrupts import interrupted

GAMMA, BATCH, ALPHA = 0.5, 8, 0.7
END = [("next", "done")]
SAMPLERS: dict[str, Callable[[int], Any]] = {
    "uniform": lambda capacity: RandomSampler(),
    "prioritized": lambda capacity: PrioritizedSampler(capacity, ALPHA, 0.5, eps=0.0),
    "slices": lambda capacity: SliceSampler(slice_len=2),
    "prioritized slices": lambda capacity: PrioritizedSliceSampler(capacity, ALPHA, 0.5, eps=0.0, slice_len=2),
    "without replacement": lambda capacity: SamplerWithoutReplacement(),
}
READINGS = ["rows", "steps", "windows", "goals"]


@dataclass
class Row:
    number: int
    done: bool
    marked: bool = False

    @property
    def ends(self) -> bool:
        return self.done or self.marked


@dataclass
class Rows:
    """A storage and its rows, the oldest first. ``end`` counts positions, ``count`` what users count."""

    storage: Any
    capacity: int
    rows: list[Row] = field(default_factory=list)
    end: int = 0
    count: int = 0

    def write(self, rows: list[Row]) -> list[int]:
        """Returns the positions of those that stay."""
        self.rows = [*self.rows, *rows][-self.capacity :]
        self.end, self.count = self.end + len(rows), self.count + len(rows)
        return [(self.end - 1 - i) % self.capacity for i in range(min(len(rows), self.capacity))]

    def forget(self, recount: bool = True) -> None:
        self.rows, self.end = [], -(-self.end // (2 * self.capacity)) * 2 * self.capacity
        self.count = 0 if recount else self.count

    @property
    def at(self) -> dict[int, int]:
        """The number in :attr:`rows` of the row at each position."""
        return {(self.end - len(self.rows) + i) % self.capacity: i for i in range(len(self.rows))}

    def trajectory(self, i: int) -> tuple[int, int]:
        first = last = i
        while first > 0 and not self.rows[first - 1].ends:
            first -= 1
        while last < len(self.rows) - 1 and not self.rows[last].ends:
            last += 1
        return first, last

    @property
    def numbers(self) -> list[int]:
        return [self.rows[i].number for _, i in sorted(self.at.items())]


@dataclass
class Known:
    """A buffer, and what is known of it."""

    buffer: Any
    rows: Rows
    sampler: str
    reading: str
    priority: dict[int, float] = field(default_factory=dict)
    largest: float | None = None

    def begin(self) -> None:
        self.priority, self.largest = dict.fromkeys(self.rows.at, 1.0), None

    @property
    def prioritized(self) -> bool:
        return "prioritized" in self.sampler


class Saved(NamedTuple):
    sampler: str
    rows: Rows
    priority: dict[int, float]
    largest: float | None
    state: Any


class Step(NamedTuple):
    """An operation, what it does to the model, and whether it has happened; None: that can't be seen."""

    act: Callable[[], Any]
    note: Callable[[], Any]
    happened: Callable[[], bool | None]


def reward(achieved: Any, goal: Any, batch: Any) -> Any:
    return -(achieved - goal).abs()


def batch_of(rows: list[Row]) -> TensorDict:
    number = torch.tensor([row.number for row in rows])
    value, done = number.float().unsqueeze(-1), torch.tensor([[row.done] for row in rows])
    after = {"observation": value + 1, "achieved_goal": value, "reward": value, "done": done}
    now = {"number": number, "around": number.clone(), "desired_goal": -torch.ones_like(value)}
    return TensorDict({**now, "next": after}, [len(rows)])


class History:
    """Does :meth:`step` after step, each of which is interrupted with a probability."""

    def __init__(self, seed: int, interrupts: float, folder: Path) -> None:
        torch.manual_seed(seed)
        self.random, self.interrupts, self.folder = random.Random(seed), interrupts, folder
        self.mapped, self.numbers, self.saved = self.random.random() < 0.25, 0, list[Saved]()
        self.storages = [self.new_rows() for _ in range(self.random.choice([1, 2]))]
        self.buffers = [self.new_buffer() for _ in range(self.random.choice([1, 2, 3]))]

    def new_rows(self, capacity: int = 0) -> Rows:
        capacity = capacity or self.random.choice([5, 8, 13])
        return Rows((LazyMemmapStorage if self.mapped else LazyTensorStorage)(capacity), capacity)

    def new_buffer(self) -> Known:
        rows, reading = self.random.choice(self.storages), self.random.choice(READINGS)
        kind = self.random.choice([ReplayBuffer, TensorDictReplayBuffer])
        name = self.random.choice(list(SAMPLERS) if reading == "rows" else ["uniform", "prioritized"])
        name = "uniform" if reading in ("windows", "goals") else name
        options = {
            "rows": {},
            "steps": {"n_steps": 3, "gamma": GAMMA},
            "windows": {"windows": {"around": Window(-1, 1, mask="around_is_pad")}},
            "goals": {"relabel": Hindsight(reward, end_keys=END)},
        }[reading]
        buffer = kind(storage=rows.storage, sampler=SAMPLERS[name](rows.capacity), end_keys=END, **options)
        known = Known(buffer, rows, name, reading)
        known.begin()
        return known

    def of(self, rows: Rows) -> list[Known]:
        return [known for known in self.buffers if known.rows is rows]

    def step(self) -> bool:
        """Do something. False: nobody can tell whether it has happened."""
        found = None
        while found is None:
            operations = [self.extend, self.extend, self.extend, self.end, self.empty, self.prioritize, self.overwrite]
            operations += [self.set_sampler, self.set_storage, self.set_writer, self.steps, self.copy, self.save]
            found = self.random.choice([*operations, self.load, self.load, self.join])(self.random.choice(self.buffers))
        interrupt = None
        if self.random.random() < self.interrupts:
            place, lines = self.random.randrange(self.random.choice([10, 60, 400])), self.random.random() < 0.5
            interrupt = interrupted(found.act, place, lines=lines)
        else:
            found.act()
        if interrupt is not None:
            assert all(is_free(known.buffer) for known in self.buffers)
        happened = True if interrupt is None else found.happened()
        if happened is None:
            return False
        if happened:
            found.note()
        for known in self.buffers:
            check(known)
        return True

    # Operations

    def extend(self, known: Known) -> Step:
        n, way = self.random.choice([1, 1, 2, 3, 5, 20]), self.random.choice(["extend", "columns", "writer", "storage"])
        rows = [Row(self.numbers + i, self.random.random() < 0.25) for i in range(n)]
        self.numbers += n
        batch, buffer, count = batch_of(rows), known.buffer, known.rows.count

        def act() -> None:
            if way == "columns":
                buffer.extend_columns({key: value.numpy() for key, value in batch.items(True, True)})
            elif way == "extend":
                buffer.extend(batch)
            else:
                buffer.operation.run(buffer.writer.extend if way == "writer" else buffer.storage.append, batch)

        def note() -> None:
            positions = known.rows.write(rows)
            for each in self.of(known.rows):
                new = 1.0 if each.largest is None else each.largest
                each.priority |= dict.fromkeys(positions, new)

        return Step(act, note, lambda: buffer.write_count != count)

    def end(self, known: Known) -> Step | None:
        if not (rows := known.rows.rows):
            return None
        newest, marks = (known.rows.end - 1) % known.rows.capacity, known.buffer.storage.marks
        return Step(
            known.buffer.end_trajectories,
            lambda: setattr(rows[-1], "marked", True),
            lambda: marks.kept and bool(marks.rows[newest]),
        )

    def empty(self, known: Known) -> Step | None:
        recount, frees = self.random.random() < 0.7, self.random.random() < 0.3 and not self.mapped
        if not known.rows.rows or self.random.random() < 0.5:
            return None

        def note() -> None:
            known.rows.forget(recount or frees)
            for each in self.of(known.rows):
                each.begin()

        act = known.buffer.free if frees else lambda: known.buffer.empty(recount)
        return Step(act, note, lambda: len(known.buffer) == 0)

    def prioritize(self, known: Known) -> Step | None:
        if not known.prioritized or not known.rows.rows:
            return None
        at = self.random.choices(list(known.rows.at), k=3)
        # None is like another, so that it shows whether they were set.
        new = {position: 2.0 + self.random.random() for position in at}
        values = torch.tensor([new[position] for position in at])

        def note() -> None:
            known.priority |= new
            known.largest = max(known.largest or 0.0, *new.values())

        return Step(
            lambda: known.buffer.update_priority(torch.tensor(at), values),
            note,
            lambda: priorities_are(known, known.priority | new),
        )

    def overwrite(self, known: Known) -> Step | None:
        if not known.rows.rows:
            return None
        position, row = self.random.choice(list(known.rows.at)), Row(self.numbers, self.random.random() < 0.4)
        self.numbers += 1
        index, own = torch.tensor([position]), known.rows.rows[known.rows.at[position]]

        def note() -> None:
            own.number, own.done = row.number, row.done

        return Step(
            lambda: known.buffer.__setitem__(index, batch_of([row])),
            note,
            lambda: known.buffer[index]["number"].item() == row.number,
        )

    def set_sampler(self, known: Known) -> Step | None:
        if known.reading in ("windows", "goals"):
            return None
        name = self.random.choice(list(SAMPLERS) if known.reading == "rows" else ["uniform", "prioritized"])
        new = SAMPLERS[name](known.rows.capacity)

        def note() -> None:
            known.sampler = name
            known.begin()

        return Step(lambda: known.buffer.set_sampler(new), note, lambda: known.buffer.sampler is new)

    def set_storage(self, known: Known) -> Step | None:
        new = self.random.choice([*self.storages, self.new_rows(known.rows.capacity)])
        if new is known.rows or new.capacity != known.rows.capacity or self.random.random() < 0.5:
            return None

        def note() -> None:
            self.storages = [each for each in self.storages if each is not new] + [new]
            known.rows = new
            known.begin()

        return Step(lambda: known.buffer.set_storage(new.storage), note, lambda: known.buffer.storage is new.storage)

    def set_writer(self, known: Known) -> Step:
        writer = RoundRobinWriter()
        return Step(lambda: known.buffer.set_writer(writer), lambda: None, lambda: known.buffer.writer is writer)

    def steps(self, known: Known) -> Step | None:
        if known.reading != "rows" or known.sampler not in ("uniform", "prioritized") or self.random.random() < 0.5:
            return None
        transform = MultiStepTransform(3, GAMMA, done_keys=["done"])
        return Step(
            lambda: known.buffer.append_transform(transform),
            lambda: setattr(known, "reading", "steps"),
            lambda: known.buffer.parts.recipe.n_steps == 3,
        )

    def copy(self, known: Known) -> Step:
        made: list[Any] = []
        pickles = self.random.random() < 0.5
        stays = len(self.buffers) < 4 and self.random.random() < 0.5

        def act() -> None:
            buffer = known.buffer
            made.append(pickle.loads(pickle.dumps(buffer)) if pickles else copy.deepcopy(buffer))

        def note() -> None:
            rows = Rows(made[0].storage, known.rows.capacity, *copied(known.rows))
            self.storages.append(rows)
            new = Known(made[0], rows, known.sampler, known.reading, dict(known.priority), known.largest)
            self.buffers = [each for each in self.buffers if stays or each is not known] + [new]

        return Step(act, note, lambda: bool(made))

    def join(self, known: Known) -> Step | None:
        if len(self.buffers) > 3:
            return None
        made: list[Known] = []
        return Step(lambda: made.append(self.new_buffer()), lambda: self.buffers.extend(made), lambda: bool(made))

    def save(self, known: Known) -> Step:
        made: list[Any] = []
        path = self.folder / str(len(self.saved))

        def act() -> None:
            made.append(copy.deepcopy(known.buffer.state_dict()) if self.random.random() < 0.5 else path)
            if made[0] is path:
                known.buffer.save(path)

        def note() -> None:
            rows = Rows(None, known.rows.capacity, *copied(known.rows))
            self.saved.append(Saved(known.sampler, rows, dict(known.priority), known.largest, made[0]))

        return Step(act, note, lambda: False)

    def load(self, known: Known) -> Step | None:
        rows, storage = known.rows, known.buffer.storage
        fitting = [
            each for each in self.saved if each.sampler == known.sampler and 0 < len(each.rows.rows) <= rows.capacity
        ]
        if not fitting:
            return None
        saved, ends = self.random.choice(fitting), self.random.random() < 0.6
        new = Rows(None, saved.rows.capacity, *copied(saved.rows))
        priority = saved.priority
        if new.capacity != rows.capacity:
            priority = {i: priority[position] for position, i in new.at.items() if position in priority}
            new = Rows(None, rows.capacity, new.rows, len(new.rows), len(new.rows))
        before, asked = rows.numbers, storage.readers.ends_by is not None or storage.followers.follow_trajectories

        def act() -> None:
            if isinstance(saved.state, Path):
                known.buffer.load(saved.state, end_trajectories=ends)
            else:
                known.buffer.load_state_dict(copy.deepcopy(saved.state), end_trajectories=ends)

        def note() -> None:
            rows.rows, rows.end, rows.count = new.rows, new.end, new.count
            if ends and asked:
                rows.rows[-1].marked = True
            for each in self.of(rows):
                each.begin()
            if known.prioritized:
                known.priority, known.largest = dict(priority), saved.largest

        def happened() -> bool | None:
            found = known.buffer[:]["number"].tolist() if len(known.buffer) else []
            assert found in ([], before, new.numbers)
            return None if found == [] or before == new.numbers else found == new.numbers

        return Step(act, note, happened)


def copied(rows: Rows) -> tuple[list[Row], int, int]:
    return copy.deepcopy(rows.rows), rows.end, rows.count


def priorities_are(known: Known, due: dict[int, float]) -> bool:
    leaves = known.buffer.sampler.tree.leaves[: known.rows.capacity]
    weights = torch.tensor([due.get(position, 0.0) for position in range(known.rows.capacity)]) ** ALPHA
    stored = torch.tensor([position in known.rows.at for position in range(known.rows.capacity)])
    return torch.allclose(leaves, torch.where(stored, weights, 0.0), rtol=1e-5)


def check(known: Known) -> None:
    """The buffer holds the rows of the model, and draws what these give."""
    buffer, rows, at = known.buffer, known.rows, known.rows.at
    assert buffer.storage is rows.storage
    assert (len(buffer), buffer.write_count) == (len(at), rows.count)
    if not at:
        return
    assert buffer[:]["number"].tolist() == rows.numbers
    assert not known.prioritized or priorities_are(known, known.priority)
    slices = "slices" in known.sampler
    if slices and all(first == last for first, last in map(rows.trajectory, range(len(at)))):
        assert not buffer.can_sample(BATCH)
        return
    n = BATCH if known.sampler != "without replacement" else 2
    data, info = buffer.sample(n, return_info=True)
    index = info["index"][0] if isinstance(info["index"], tuple) else info["index"]
    drawn = [at[position] for position in index.reshape(-1).tolist()]
    assert data["number"].reshape(-1).tolist() == [rows.rows[i].number for i in drawn]
    if slices:
        for one, two in zip(drawn[::2], drawn[1::2], strict=True):
            assert two == one + 1 <= rows.trajectory(one)[1]
    elif known.reading == "steps":
        for i, steps, total in zip(drawn, data["steps_to_next_obs"], data["next", "reward"], strict=True):
            last = min(rows.trajectory(i)[1], i + 2)
            assert steps == last - i + 1
            torch.testing.assert_close(
                total.item(),
                sum(GAMMA**k * row.number for k, row in enumerate(rows.rows[i : last + 1])),
                rtol=1e-5,
                atol=0,
            )
    elif known.reading == "windows":
        # What came before the oldest row may be lost.
        assert min(drawn) > 0 or len(at) == 1 or not has_lost(rows.end, len(at), rows.capacity)
        for i, around, outside in zip(drawn, data["around"].tolist(), data["around_is_pad"].tolist(), strict=True):
            first, last = rows.trajectory(i)
            assert outside == [not first <= j <= last for j in (i - 1, i, i + 1)]
            assert around == [rows.rows[min(max(j, first), last)].number for j in (i - 1, i, i + 1)]
    elif known.reading == "goals":
        for i, moved, goal in zip(drawn, info["relabelled"], data["desired_goal"].flatten().tolist(), strict=True):
            later = rows.rows[i : rows.trajectory(i)[1] + 1]
            assert goal in ([row.number for row in later] if moved else [-1])
