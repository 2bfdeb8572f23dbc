"""What every buffer must do, whatever it is made of: ways to make one, and a plain Python model of its rows.

``tests/data/test_buffer_contract.py`` checks the properties. To check another way to make a buffer, add it to
:data:`CONTRACTS`.
"""

from __future__ import annotations

import copy
import io
import pickle
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict
from torch import Tensor

from gpubuf.data import (
    Hindsight,
    LazyMemmapStorage,
    LazyTensorStorage,
    Normalize,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from gpubuf.integrations.torchrl import ListStorage

STEPS, BATCH, GAMMA, SLICE, WIDTH = 12, 8, 0.9, 2, 3

SAMPLERS: dict[str, Callable[[int], Any]] = {
    "uniform": lambda capacity: RandomSampler(),
    "without replacement": lambda capacity: SamplerWithoutReplacement(),
    "prioritized": lambda capacity: PrioritizedSampler(capacity, 0.7, 0.5),
    "stratified": lambda capacity: PrioritizedSampler(capacity, 0.7, 0.5, stratified=True),
    "slices": lambda capacity: SliceSampler(slice_len=SLICE),
    "prioritized slices": lambda capacity: PrioritizedSliceSampler(capacity, 0.7, 0.5, slice_len=SLICE),
}
#: Numbers of the model survive in these.
NARROW = {"critic": torch.bfloat16, "observation": torch.bfloat16, ("next", "done"): torch.uint8, "number": torch.int16}


def achieved_reward(achieved: Tensor, goal: Tensor, batch: Any) -> Tensor:
    """For hindsight."""
    return -(achieved - goal).abs().sum(-1, keepdim=True)


@dataclass(frozen=True)
class BufferContract:
    """A way to make a buffer.

    Attributes:
        storage: ``"tensor"``, ``"memmap"`` or ``"list"``.
        envs: environments of a storage of two dimensions; 0: one dimension.
        sampler: a name in :data:`SAMPLERS`.
        rows: what is written: a ``"tensordict"``, the same with ``"text"``, or a ``"dict"`` or ``"tuple"`` of tensors.
        n_steps: steps of a transition.
        share_next: observations are stored once.
        narrow: keys are stored in other dtypes.
        marks: trajectories also end at rows that are marked.
        generations: the writer counts how often a row was written.
        relabel, process, transform, collate, prefetch: as the buffer's arguments.
        steps: that fit.
    """

    storage: str = "tensor"
    envs: int = 0
    sampler: str = "uniform"
    rows: str = "tensordict"
    n_steps: int = 1
    share_next: bool = False
    narrow: bool = False
    marks: bool = False
    generations: bool = False
    relabel: bool = False
    process: bool = False
    transform: bool = False
    collate: bool = False
    prefetch: int = 0
    steps: int = STEPS

    def __str__(self) -> str:
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        told = [
            name if value is True else f"{name} {value}"
            for name, value in own.items()
            if value != type(self).__dataclass_fields__[name].default
        ]
        return ", ".join(told) or "plain"

    @property
    def options(self) -> list[tuple[str, Any]]:
        """What it is made of. Of a number only counts whether it is more than usual."""
        own = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        return [(name, value if isinstance(value, str) else value != usual) for name, (value, usual) in own.items()]

    @property
    def capacity(self) -> int:
        return self.steps * max(self.envs, 1)

    @property
    def slices(self) -> bool:
        return "slices" in self.sampler

    @property
    def prioritized(self) -> bool:
        return self.sampler in ("prioritized", "stratified", "prioritized slices")

    @property
    def on_device(self) -> bool:
        """Whether nothing of it is on the host, so that it can be captured."""
        return self.storage == "tensor" and self.rows != "text"

    @property
    def storage_options(self) -> dict[str, Any]:
        """What a plan of the buffer's memory is told, too."""
        options: dict[str, Any] = {}
        if self.share_next:
            options |= {"share_next": True, "next_capacity": self.capacity}
        if self.narrow:
            options |= {"dtypes": NARROW, "batch_dtypes": {"critic": torch.float64}}
        return options

    def storage_of(self, device: str) -> Any:
        if self.storage == "list":
            return ListStorage(self.capacity)
        options = self.storage_options | ({"device": device} if self.storage == "tensor" else {})
        kind = {"tensor": LazyTensorStorage, "memmap": LazyMemmapStorage}[self.storage]
        return kind(self.capacity, ndim=2 if self.envs else 1, **options)

    def new(self, *, seed: int = 3, device: str = "cpu", storage: Any = None) -> ReplayBuffer:
        """A buffer, which is empty unless the storage is not."""
        plain = self.rows in ("dict", "tuple")
        kind = ReplayBuffer if plain else TensorDictReplayBuffer
        writer = RoundRobinWriter if plain else TensorDictRoundRobinWriter
        return kind(
            storage=self.storage_of(device) if storage is None else storage,
            sampler=SAMPLERS[self.sampler](self.capacity),
            writer=writer(track_generations=self.generations),
            batch_size=BATCH,
            dim_extend=0 if self.envs else None,
            n_steps=self.n_steps,
            gamma=GAMMA,
            process=[Normalize(("next", "reward"), update="manual", clip=(-0.5, 1.5))] if self.process else (),
            relabel=Hindsight(achieved_reward, goal_key="goal", achieved_key=("next", "observation"))
            if self.relabel
            else None,
            transform=marked if self.transform else None,
            collate_fn=collated if self.collate else None,
            prefetch=self.prefetch or None,
            generator=torch.Generator().manual_seed(seed),
        )

    def filled(self, steps: int = STEPS + 5, *, seed: int = 0) -> tuple[ReplayBuffer, Model]:
        """A buffer that has gone round, and its model."""
        buffer, model = self.new(), Model(self, seed)
        buffer.extend(model.write(steps))
        if self.marks:
            model.end(buffer, 0 if self.envs else None)
            buffer.extend(model.write(1))
        return buffer, model

    def written(self, batch: TensorDict) -> Any:
        """Rows of the model as the buffer takes them."""
        if self.narrow:
            batch = batch.set("critic", wide(batch["observation"]))
            batch["next", "critic"] = wide(batch["next", "observation"])
        if self.relabel:
            batch["goal"] = batch["observation"] + 9
        if self.rows == "text":
            batch["text"] = NonTensorStack(*[f"row {number}" for number in batch["number"].reshape(-1).tolist()])
        if self.rows == "dict":
            return batch.to_dict()
        if self.rows == "tuple":
            return tuple(batch[key] for key in sorted(batch.keys(True, True), key=str))
        return batch

    def read(self, data: Any) -> TensorDict:
        """Rows of the buffer as the model has them."""
        if self.rows == "text":
            text, data = data.get("text"), data.exclude("text")
            assert text.batch_size == data.batch_size
            assert flat(text.tolist()) == [f"row {number}" for number in data["number"].reshape(-1).tolist()]
        if self.rows == "dict":
            data = TensorDict(data, data["number"].shape[:-1])
        if self.rows == "tuple":
            keys = sorted(as_batch([], (0,)).keys(True, True), key=str)
            data = TensorDict(dict(zip(keys, data, strict=True)), data[0].shape[:-1])
        return data


def flat(nested: list[Any]) -> list[Any]:
    """The entries of nested lists."""
    return [value for item in nested for value in (flat(item) if isinstance(item, list) else [item])]


def wide(observation: Tensor) -> Tensor:
    """Observations with more elements behind theirs."""
    return torch.cat([observation, observation[..., :2] + 0.5], -1)


def marked(data: Any) -> Any:
    """A transform."""
    return data.set("twice", data["number"] * 2)


def collated(data: Any) -> Any:
    """A collate function."""
    return data.set("thrice", data["number"] * 3)


@dataclass(frozen=True)
class Transition:
    """One row. Observations are a small number, repeated :data:`WIDTH` times: many are equal by chance."""

    observation: int
    number: int
    reward: float
    next_observation: int
    terminated: bool
    truncated: bool

    @property
    def ends(self) -> bool:
        return self.terminated or self.truncated


def as_batch(rows: list[Transition], shape: tuple[int, ...]) -> TensorDict:
    """Rows as the TensorDict that is written."""

    def column(values: list, dtype: torch.dtype, width: int = 1) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).view(-1, 1).repeat(1, width).view(*shape, width)

    after = {
        "observation": column([row.next_observation for row in rows], torch.float32, WIDTH),
        "reward": column([row.reward for row in rows], torch.float32),
        "terminated": column([row.terminated for row in rows], torch.bool),
        "truncated": column([row.truncated for row in rows], torch.bool),
        "done": column([row.ends for row in rows], torch.bool),
    }
    root = {
        "observation": column([row.observation for row in rows], torch.float32, WIDTH),
        "number": column([row.number for row in rows], torch.int64),
    }
    return TensorDict({**root, "next": TensorDict(after, shape)}, shape)


class Model:
    """All rows that were ever written, the stored ones among them: a list without bounds for each environment.

    Args:
        contract: of the buffer that the rows are written to.
        seed: of all choices.
    """

    def __init__(self, contract: BufferContract, seed: int = 0) -> None:
        self.steps, self.envs, self.first = contract.steps, max(contract.envs, 1), 0
        self.of_env: list[list[Transition]] = [[] for _ in range(self.envs)]
        self.contract, self.random, self.count = contract, random.Random(seed), 0
        # (step, environment) of rows that keep a next observation of their own whatever comes to lie after them.
        self.apart: set[tuple[int, int]] = set()
        #: (step, environment) of rows that are marked.
        self.marked: set[tuple[int, int]] = set()

    @property
    def written(self) -> int:
        """Steps so far."""
        return len(self.of_env[0])

    @property
    def oldest(self) -> int:
        """The oldest step that is stored."""
        return max(self.first, self.written - self.steps)

    @property
    def stored(self) -> list[int]:
        """Positions of the rows that are stored, in rising order."""
        return sorted(
            step % self.steps * self.envs + env for step in range(self.oldest, self.written) for env in range(self.envs)
        )

    def empty(self) -> None:
        """Forget every row; the next one goes to position 0."""
        self.skip(-self.written % (2 * self.steps))

    def skip(self, steps: int) -> None:
        """Count steps that nobody wrote."""
        for rows in self.of_env:
            rows += [Transition(0, -1, 0.0, 0, False, False)] * steps
        self.first = self.written

    def place(self, position: int) -> tuple[int, int]:
        """The step and the environment of the row that is stored at a position."""
        slot, env = divmod(position, self.envs)
        return self.written - 1 - (self.written - 1 - slot) % self.steps, env

    def at(self, position: int) -> Transition:
        """The row that is stored at a position."""
        step, env = self.place(position)
        return self.of_env[env][step]

    def put(self, position: int, row: Transition) -> None:
        """Overwrite it."""
        step, env = self.place(position)
        self.of_env[env][step] = row

    def n_step(self, position: int, n: int, gamma: float) -> tuple[Transition, int]:
        """The row of a batch with ``n`` steps, and how many there are."""
        step, env = self.place(position)
        rows = self.of_env[env][step : min(step + n, self.written)]
        count = next((i + 1 for i, row in enumerate(rows) if row.ends), len(rows))
        last = rows[count - 1]
        reward = sum(gamma**j * row.reward for j, row in enumerate(rows[:count]))
        return replace(last, observation=rows[0].observation, number=rows[0].number, reward=reward), count

    @property
    def written_rows(self) -> int:
        """Rows since the beginning, or since they were emptied."""
        return (self.written - self.first) * self.envs

    def new_row(self, before: Transition | None) -> Transition:
        """A row that goes on from the one before more often than not."""
        self.count += 1
        goes_on = before is not None and not before.ends and self.random.random() < 0.8
        observation = before.next_observation if before is not None and goes_on else self.random.randrange(4)
        end = self.random.choice(["", "", "", "terminated", "truncated"])
        reward = self.random.choice([-1.0, 0.5, 2.0])
        coming = self.random.randrange(4)
        return Transition(observation, self.count, reward, coming, end == "terminated", end == "truncated")

    def write(self, steps: int) -> Any:
        """The next steps of all environments, as the buffer takes them."""
        rows = []
        for _ in range(steps):
            for of_env in self.of_env:
                rows.append(self.new_row(of_env[-1] if len(of_env) > self.oldest else None))
                of_env.append(rows[-1])
        return self.contract.written(as_batch(rows, (steps, self.envs) if self.contract.envs else (steps,)))

    def end(self, buffer: ReplayBuffer, env: int | None) -> None:
        """Mark the newest rows of a buffer, or that of one environment, as ends."""
        buffer.end_trajectories(env)
        self.marked |= {(self.written - 1, each) for each in (range(self.envs) if env is None else [env])}

    def overwrite(self, positions: list[int]) -> Any:
        """Other rows at these positions, as the buffer takes them."""
        rows = [self.new_row(None) for _ in positions]
        places = [self.place(position) for position in positions]
        before = [(step - 1, env) for step, env in places if step > self.oldest and (step - 1, env) not in places]
        shared = [place for place in before if self.goes_on(*place)]
        for position, row in zip(positions, rows, strict=True):
            self.put(position, row)
        if self.contract.share_next:
            self.apart -= set(places)
            self.apart |= {place for place in before if place not in shared or not self.goes_on(*place)}
        return self.contract.written(as_batch(rows, (len(rows),)))

    def renumber(self, position: int) -> int:
        """Give the row at a position another number, which it returns."""
        self.count += 1
        self.put(position, replace(self.at(position), number=self.count))
        return self.count

    def index(self, positions: list[int]) -> Any:
        """Positions as the buffer takes them."""
        flat = torch.tensor(positions)
        return (flat // self.envs, flat % self.envs) if self.contract.envs else flat

    def positions(self, index: Tensor) -> list[int]:
        """An index of the buffer as positions."""
        flat = index[..., 0] * self.envs + index[..., 1] if self.contract.envs else index
        return flat.reshape(-1).tolist()

    def generation(self, position: int) -> int:
        """How many times a position was written."""
        return self.place(position)[0] // self.steps + 1

    def chosen(self, n: int) -> list[int]:
        """Some of the stored positions."""
        stored = self.stored
        return self.random.sample(stored, min(n, len(stored)))

    # What is due

    def check_rows(self, buffer: ReplayBuffer) -> None:
        """Every row that is stored comes back as it was written, by index and by slice."""
        stored = self.stored
        assert len(buffer) == len(stored)
        if not stored:
            return
        due = self.contract.written(as_batch([self.at(position) for position in stored], (len(stored),)))
        check_same(self.contract.read(buffer[self.index(stored)]), self.contract.read(due))
        if self.contract.storage != "list":
            check_same(self.contract.read(buffer[:]).reshape(-1), self.contract.read(due))

    def check_batch(self, buffer: ReplayBuffer, data: Any, info: dict[Any, Any]) -> None:
        """A batch holds the transitions that begin at the rows of its index."""
        contract, found = self.contract, self.contract.read(data).reshape(-1)
        positions = self.positions(info["index"])
        assert len(found) == len(positions) > 0
        rows, counts = zip(*(self.transition(position) for position in positions), strict=True)
        due = contract.read(contract.written(as_batch(list(rows), (len(rows),))))
        if contract.process:
            due["next", "reward"] = due["next", "reward"].clamp(-0.5, 1.5)
        if contract.transform:
            marked(due)
        if contract.collate:
            collated(due)
        if contract.n_steps > 1:
            assert found["steps_to_next_obs"].tolist() == [[count] for count in counts]
        if contract.narrow:
            due["critic"], due["next", "critic"] = due["critic"].double(), due["next", "critic"].double()
        if contract.relabel:
            new = info["relabelled"].reshape(-1)
            for position, goal in zip(torch.tensor(positions)[new].tolist(), found["goal"][new].tolist(), strict=True):
                assert goal[0] in {row.next_observation for row in self.trajectory(position)}
            assert torch.equal(found["goal"][~new], due["goal"][~new])
            fresh = achieved_reward(found["next", "observation"], found["goal"], None)
            due["next", "reward"] = torch.where(new[:, None], fresh, due["next", "reward"])
            due["goal"] = found["goal"]
        if contract.slices:
            self.check_slices(positions)
            # The last step of a slice is marked as truncated.
            for flag in ("truncated", "done"):
                assert (found["next", flag] >= due["next", flag]).all()
                due["next", flag] = found["next", flag]
        check_same(found, due)
        if "index_generation" in info:
            generations = info["index_generation"].reshape(-1).tolist()
            assert generations == [self.generation(position) for position in positions]

    def check_slices(self, positions: list[int]) -> None:
        """The rows of each slice follow each other, in one trajectory."""
        for position, after in zip(positions[::SLICE], positions[1::SLICE], strict=True):
            step, env = self.place(position)
            assert self.place(after) == (step + 1, env)
            assert self.continues(step, env)

    def trajectory(self, position: int) -> list[Transition]:
        """The rows from one on, to the end of its trajectory or to the newest one."""
        step, env = self.place(position)
        rows = self.of_env[env]
        last = step
        while last + 1 < self.written and self.continues(last, env):
            last += 1
        return rows[step : last + 1]

    def turned(self, contract: BufferContract) -> Model:
        """What another storage has that took the rows over, oldest first. A round stands for those that were lost."""
        other, oldest = Model(contract, 8), self.oldest
        other.skip(contract.steps if oldest > self.first else 0)
        later = other.first - oldest
        other.of_env = [[*mine, *rows[oldest:]] for mine, rows in zip(other.of_env, self.of_env, strict=True)]
        other.apart = {(step + later, env) for step, env in self.apart if step >= oldest}
        other.marked = {(step + later, env) for step, env in self.marked if step >= oldest}
        other.count = self.count
        return other

    def continues(self, step: int, env: int) -> bool:
        """Whether the row after this one is of the same trajectory."""
        return not self.of_env[env][step].ends and (step, env) not in self.marked

    def goes_on(self, step: int, env: int) -> bool:
        """Whether the next observation of a row is the observation of the row after it, and stored as such."""
        rows = self.of_env[env]
        return (step, env) not in self.apart and rows[step].next_observation == rows[step + 1].observation

    def transition(self, position: int) -> tuple[Transition, int]:
        """The transition that begins with a row, and its number of steps."""
        step, env = self.place(position)
        n = self.contract.n_steps
        # A marked row ends its trajectory, and its flags say nothing of it.
        n = next((i + 1 for i in range(n) if (step + i, env) in self.marked), n)
        return self.n_step(position, n, GAMMA)


def check_same(found: TensorDict, due: TensorDict) -> None:
    """Whether a batch has what is due; it may have more: its index, weights, steps."""
    for key in due.keys(True, True):
        one, other = found[key], due[key]
        assert one.dtype is other.dtype, key
        # Mostly they are the same, which is much sooner known.
        if not torch.equal(one, other):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")


# Ways to copy a buffer


def by_state(contract: Any, buffer: Any) -> Any:
    other = contract.new(seed=9)
    other.load_state_dict(buffer.state_dict(), end_trajectories=False)
    return other


def by_files(contract: Any, buffer: Any) -> Any:
    other = contract.new(seed=9)
    with tempfile.TemporaryDirectory() as folder:
        buffer.save(Path(folder) / "saved")
        other.load(Path(folder) / "saved", end_trajectories=False)
    return other


def by_torch(contract: Any, buffer: Any) -> Any:
    file = io.BytesIO()
    torch.save(buffer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


#: Ways to copy what a contract makes.
COPIES: dict[str, Callable[[Any, Any], Any]] = {
    "state_dict": by_state,
    "files": by_files,
    "pickle": lambda contract, buffer: pickle.loads(pickle.dumps(buffer)),
    "deepcopy": lambda contract, buffer: copy.deepcopy(buffer),
    "torch.save": by_torch,
}


def write(buffer: ReplayBuffer, rows: TensorDict, chance: random.Random) -> None:
    """Write rows as a TensorDict, or as an array or tensor for each key, whose memory is used again."""
    columns = dict(rows.items(True, True))
    given = {key: value.numpy() if chance.random() < 0.5 else value for key, value in columns.items()}
    way = chance.choice(["rows", "by key", "in order"])
    if way == "rows":
        buffer.extend(rows)
    elif way == "in order" and buffer.initialized:
        buffer.extend_columns([given[key] for key in buffer.column_keys])
    else:
        buffer.extend_columns(given)
    for value in columns.values():
        value.zero_()


# The ways to make a buffer: every pair of options that go together is in one of them.

_C = BufferContract
CONTRACTS = [
    _C(),
    _C(share_next=True, envs=2, n_steps=2, marks=True, process=True, narrow=True),
    _C(envs=3, sampler="prioritized", n_steps=3, generations=True),
    _C(share_next=True, narrow=True, sampler="slices", transform=True),
    _C(share_next=True, n_steps=3, sampler="prioritized", collate=True),
    _C(narrow=True, envs=2, sampler="prioritized slices", process=True),
    _C(marks=True, sampler="stratified", relabel=True, generations=True),
    _C(relabel=True, envs=2, share_next=True, sampler="without replacement", transform=True),
    _C(relabel=True, narrow=True, sampler="prioritized"),
    _C(marks=True, envs=2, sampler="slices", collate=True),
    _C(marks=True, n_steps=3, sampler="prioritized", generations=True),
    _C(n_steps=4, narrow=True, sampler="without replacement", transform=True),
    _C(rows="dict", envs=2, sampler="prioritized", n_steps=2, process=True, share_next=True),
    _C(rows="dict", narrow=True, sampler="without replacement"),
    _C(rows="tuple", sampler="stratified", generations=True),
    _C(rows="tuple", envs=2),
    _C(rows="text", sampler="prioritized", generations=True),
    _C(rows="text", sampler="without replacement", narrow=True),
    _C(storage="memmap", n_steps=3, sampler="prioritized", transform=True, prefetch=2),
    _C(storage="memmap", envs=2, sampler="slices", prefetch=1, generations=True),
    _C(storage="memmap", envs=2, marks=True, collate=True, process=True, n_steps=2),
    _C(storage="memmap", rows="dict"),
    _C(storage="list", sampler="prioritized", transform=True),
    _C(storage="list", sampler="without replacement"),
]


def contracts(suits: Callable[[BufferContract], bool] = lambda contract: True) -> list[BufferContract]:
    """The contracts that suit a property, for ``pytest.mark.parametrize``."""
    return [contract for contract in CONTRACTS if suits(contract)]
