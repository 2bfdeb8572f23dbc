"""What every sampler must do, whatever it draws: ways to make one, and a plain Python model of what it may draw.

``tests/data/test_sampler_contract.py`` checks the properties. To check another sampler, add it to :data:`KINDS` and to
:meth:`SamplerContract.sampler`, and say in :meth:`Model.due` how often it draws what.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from gpubuf.data import (
    EmphasizeRecent,
    Geometric,
    Hindsight,
    LazyTensorStorage,
    Linear,
    Newest,
    Normalize,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    RandomShift,
    ReplayBuffer,
    Sampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
    Window,
)
from gpubuf.data.storage.plan import Recipe
from tests.contracts import pairwise
from tests.support.drawable_rows import drawable, not_the_oldest
from tests.support.slice_model import Row, SliceModel, split

STEPS, SLICE, UNITS, ALPHA, BETA, RATIO, DECAY = 15, 3, 6, 0.7, 0.5, 0.75, 0.6
OFFSETS = range(-1, 2)

Unit = tuple[int, ...]
"""The numbers of the rows that are drawn together: of one, of a slice, of a window, of a row and its goal."""

#: Of each kind its forms. Those of slices: see :data:`SLICES`.
KINDS: dict[str, tuple[str, ...]] = {
    "uniform": ("", "processed"),
    "without replacement": ("", "drop last", "in order"),
    "prioritized": ("", "stratified", "largest within"),
    "slices": ("strict", "short", "padded", "span", "stacked", "number"),
    "slices by transition": ("strict", "short", "padded", "span"),
    "slices without replacement": ("strict", "short"),
    "prioritized slices": ("strict", "short", "span", "stacked", "number"),
    "windows": ("repeat", "cross", "skip"),
    "prioritized windows": ("repeat", "skip"),
    "hindsight": ("future", "final", "episode", "geometric"),
    "prioritized hindsight": ("future",),
}
SLICES: dict[str, dict[str, Any]] = {
    "strict": {"slice_len": SLICE},
    "short": {"slice_len": SLICE, "strict_length": False},
    "padded": {"slice_len": SLICE, "strict_length": False, "pad_output": True},
    "span": {"slice_len": SLICE, "span": (1, True)},
    "stacked": {"slice_len": SLICE, "stack": True},
    "number": {"num_slices": UNITS},
}
#: Where trajectories end by the fixed tensors: every fifth step.
FIXED = [step % 5 == 4 for step in range(STEPS)]
ENDS: dict[str, dict[str, Any]] = {
    "done": {"end_key": ("next", "done")},
    "two flags": {"end_keys": [("next", "terminated"), ("next", "truncated"), ("next", "absent")]},
    "identifiers": {"traj_key": "trajectory"},
    "fixed flags": {"ends": FIXED},
    "fixed identifiers": {"trajectories": [step // 5 for step in range(STEPS)]},
}


def reached(achieved: Tensor, goal: Tensor, batch: TensorDict) -> Tensor:
    """The reward of hindsight."""
    return (achieved == goal).float()


def processing() -> list[Any]:
    """All that the launch may do to a batch."""
    return [Normalize("pair", clip=3), RandomShift("image", 1)]


@dataclass(frozen=True)
class SamplerContract:
    """A sampler in a buffer of :data:`STEPS` steps.

    Attributes:
        kind, form: see :data:`KINDS`.
        ends: what tells where trajectories end, a name in :data:`ENDS`.
        envs: environments; with two the storage has two dimensions.
    """

    kind: str
    form: str = ""
    ends: str = "done"
    envs: int = 1

    def __str__(self) -> str:
        told = [self.kind, self.form, "" if self.ends == "done" else self.ends, "" if self.envs == 1 else "envs"]
        return ", ".join(filter(None, told))

    @property
    def options(self) -> list[tuple[str, Any]]:
        """What it is made of."""
        return [(name, getattr(self, name)) for name in ("kind", "form", "ends", "envs")]

    @property
    def slices(self) -> bool:
        return "slices" in self.kind

    @property
    def windows(self) -> bool:
        return self.kind.endswith("windows")

    @property
    def around(self) -> dict[str, Window]:
        first, last, step = OFFSETS[0], OFFSETS[-1], OFFSETS.step
        return {"around": Window(first, last, step=step, outside=self.form, mask="around_is_pad")}

    @property
    def prioritized(self) -> bool:
        return self.kind.startswith("prioritized")

    @property
    def epochs(self) -> bool:
        """Whether what was drawn is not drawn again soon."""
        return "without" in self.kind

    @property
    def ragged(self) -> bool:
        """Whether the size of a batch depends on the rows."""
        return self.slices and self.form in ("short", "span")

    @property
    def capturable(self) -> bool:
        return not self.epochs and not self.ragged

    @property
    def unit(self) -> int:
        """Rows of a batch for each unit."""
        return SLICE if self.slices else 1

    def told(self, value: Any) -> Any:
        """An argument of :data:`ENDS`. Tensors have an entry per row."""
        return torch.tensor([each for each in value for _ in range(self.envs)]) if "fixed" in self.ends else value

    def sampler(self, capacity: int) -> Any:
        options = {**SLICES.get(self.form, {}), **{name: self.told(value) for name, value in ENDS[self.ends].items()}}
        priorities = {"max_capacity": capacity, "alpha": ALPHA, "beta": BETA, "eps": 0.0}
        match self.kind:
            case "without replacement":
                return SamplerWithoutReplacement(drop_last=self.form == "drop last", shuffle=self.form != "in order")
            case "slices":
                return SliceSampler(**options)
            case "slices by transition":
                return SliceSampler(**options, weighting="transition")
            case "slices without replacement":
                return SliceSamplerWithoutReplacement(**options)
            case "prioritized slices":
                after = {"span": (0, True)} if self.form == "span" else {}
                return PrioritizedSliceSampler(**priorities, **{**options, **after})
            case kind if kind.startswith("prioritized"):
                within = self.form == "largest within"
                return PrioritizedSampler(
                    **priorities, max_priority_within_buffer=within, stratified=self.form == "stratified"
                )
            case "uniform" | "windows" | "hindsight":
                return RandomSampler()
        raise ValueError(f"nobody has said how to make the sampler of {self.kind!r}")

    def new(self, *, seed: int = 3, device: str = "cpu", steps: int = STEPS, **options: Any) -> TensorDictReplayBuffer:
        """An empty buffer."""
        if self.windows:
            options["windows"] = self.around
        if "hindsight" in self.kind:
            ends = {"end_keys": [ENDS[self.ends]["end_key"]]} if self.ends == "done" else ENDS[self.ends]
            options["relabel"] = Hindsight(
                reached,
                goal_key="goal",
                achieved_key=("next", "number"),
                strategy=self.form,
                decay=DECAY,
                ratio=torch.tensor(RATIO, device=device) if self.form == "future" else RATIO,
                **ends,
            )
        capacity = steps * self.envs
        return TensorDictReplayBuffer(
            storage=LazyTensorStorage(capacity, ndim=self.envs, device=device),
            process=processing() if self.form == "processed" else (),
            sampler=self.sampler(capacity),
            batch_size=UNITS * self.unit,
            generator=torch.Generator().manual_seed(seed),
            **options,
        )

    def filled(self, steps: int = STEPS + 8, *, seed: int = 0, **options: Any) -> tuple[TensorDictReplayBuffer, Model]:
        """A buffer with rows, some of them with priorities, and its model."""
        buffer, model = self.new(**options), Model(self, seed)
        buffer.extend(model.rows_of(steps - 1))
        if self.prioritized:
            model.give_priorities(buffer, len(model.stored) - 1)
        buffer.extend(model.rows_of(1))
        return buffer, model

    def units(self, batch: TensorDict) -> list[Unit]:
        """What a batch is made of."""
        if self.slices:
            real, flat = (
                batch.get(("collector", "mask"), None),
                batch.select("number", ("next", "truncated")).reshape(-1),
            )
            return split(flat if real is None else flat[real.reshape(-1)])
        numbers = batch["number"].reshape(-1)
        if self.windows:
            return [tuple(window) for window in batch["around"].view(-1, len(OFFSETS)).tolist()]
        if "hindsight" in self.kind:
            return list(zip(numbers.tolist(), batch["goal"].reshape(-1).tolist(), strict=True))
        return [(number,) for number in numbers.tolist()]


class Model(SliceModel):
    """All rows that are stored, in plain lists, their priorities, and what can be drawn how often.

    Args:
        contract: of the buffer that the rows are written to.
        seed: of all choices.
    """

    def __init__(self, contract: SamplerContract, seed: int = 0, steps: int = STEPS) -> None:
        super().__init__(steps, contract.envs, by_id="identifiers" in contract.ends)
        self.contract, self.random = contract, random.Random(seed)
        self.priority: dict[int, float] = {}
        self.largest: float | None = None

    # Rows

    @property
    def stored(self) -> list[Row]:
        """All rows, by position."""
        return sorted((row for rows in self.rows for row in rows), key=lambda row: row.position)

    def rows_of(self, steps: int) -> TensorDict:
        """The next steps of all environments, as the buffer takes them."""
        due = self.new_priority
        flags = [[self.ends_at((self.written + step) % self.steps) for _ in range(self.envs)] for step in range(steps)]
        batch = self.write(flags)
        for number in batch["number"].reshape(-1).tolist():
            self.priority[number] = due
        flag, even = batch["next", "done"], batch["next", "terminated"]
        batch["goal"], batch["next", "number"] = torch.full_like(batch["number"], -1), batch["number"].clone()
        batch["next", "reward"] = torch.full(batch.shape, 9.0)
        batch["next", "truncated"] = flag & ~even
        if self.contract.windows:
            batch["around"] = batch["number"].clone()
        if self.contract.form == "processed":
            # Images, and pairs of numbers.
            number = batch["number"].float()
            batch["image"] = (number[..., None, None] % 50 + torch.arange(12).view(3, 4)).to(torch.uint8)
            batch["pair"] = torch.stack((number, -number / 2), -1)
        if self.contract.ends != "done":
            batch["next", "done"] = torch.zeros_like(flag)
        if self.contract.ends not in ("done", "two flags"):
            batch["next", "terminated"] = batch["next", "truncated"] = torch.zeros_like(flag)
        return batch

    def ends_at(self, place: int) -> bool:
        if "fixed" in self.contract.ends:
            return FIXED[place]
        return self.random.random() < 0.25

    @property
    def new_priority(self) -> float:
        if self.contract.form == "largest within":
            return max((self.priority[row.number] for row in self.stored), default=0.0) or 1.0
        return 1.0 if self.largest is None else self.largest

    def give_priorities(self, buffer: TensorDictReplayBuffer, n: int) -> None:
        """New priorities for ``n`` of the stored rows, some of them zero."""
        rows = self.random.sample(self.stored, n)
        given = [self.random.choice([0.0, 0.5, 1.0, 2.0, 5.0, 9.0]) for _ in rows]
        given[0] = 3.0
        index = torch.tensor([row.position for row in rows])
        buffer.update_priority(self.index(index), torch.tensor(given))
        self.note_priorities([row.number for row in rows], given)

    def note_priorities(self, numbers: list[int], given: list[float]) -> None:
        """Of a row that comes several times the last priority counts."""
        self.priority.update(zip(numbers, given, strict=True))
        self.largest = max([*given, *([] if self.largest is None else [self.largest])])

    def index(self, positions: Tensor) -> Any:
        """Flat positions as the buffer takes them."""
        return positions if self.envs == 1 else torch.stack((positions // self.envs, positions % self.envs), -1)

    def positions(self, index: Tensor) -> list[int]:
        """An index of the buffer as flat positions."""
        return (index if self.envs == 1 else index[..., 0] * self.envs + index[..., 1]).reshape(-1).tolist()

    def empty(self) -> None:
        super().empty()
        self.largest = None

    # What is due

    def q(self, number: int) -> float:
        """The weight of a row in the draw."""
        return self.priority[number] ** ALPHA if self.contract.prioritized else 1.0

    @property
    def can_start(self) -> dict[int, int]:
        """The rows at which a slice may begin: the position of each by its number."""
        return self.starts(1 if self.contract.form == "span" else SLICE, self.contract.form == "short")

    @property
    def anchors(self) -> dict[int, float]:
        """The rows that a sampler may choose, and the weight of each."""
        contract = self.contract
        found = self.can_start if contract.kind == "prioritized slices" else {row.number: 0 for row in self.stored}
        if contract.windows:
            recipe = Recipe(windows=contract.around)
            by_trajectory = contract.prioritized or recipe.whole
            rows = drawable(self, recipe) if by_trajectory else not_the_oldest(self, recipe.past)
            found = {row.number: row.position for row in rows}
        return {number: q for number in found if (q := self.q(number)) > 0}

    def due(self) -> dict[Unit, float]:
        """How likely every unit is that can be drawn."""
        contract = self.contract
        if contract.slices and not contract.prioritized:
            before, after = (1, SLICE - 1) if contract.form == "span" else (0, 0)
            strict = contract.form not in ("short", "padded")
            found = self.slices(SLICE, strict, before, after, "by transition" in contract.kind)
            return {unit: float(share) for unit, share in found.items()}
        anchors, shares = self.anchors, dict[Unit, float]()
        total = sum(anchors.values())
        around = {row.number: t for t in self.trajectories() for row in t}
        for anchor, q in anchors.items():
            for unit, share in self.units_of(anchor, [row.number for row in around[anchor]]).items():
                shares[unit] = shares.get(unit, 0.0) + share * q / total
        return shares

    def units_of(self, number: int, around: list[int]) -> dict[Unit, float]:
        """What comes with a row that was chosen, and how likely each is. ``around``: its trajectory."""
        contract = self.contract
        at = around.index(number)
        if contract.slices:
            return {tuple(around[at : at + SLICE]): 1.0}
        if contract.windows:
            return {self.window(around, number): 1.0}
        if "hindsight" in contract.kind:
            later = around[at:]
            goals = {"final": around[-1:], "episode": around}.get(contract.form, later)
            parts = [DECAY**k if contract.form == "geometric" else 1.0 for k in range(len(goals))]
            shares = {(number, goal): RATIO * part / sum(parts) for goal, part in zip(goals, parts, strict=True)}
            return {(number, -1): 1 - RATIO, **shares}
        return {(number,): 1.0}

    def window(self, around: list[int], number: int) -> Unit:
        """The rows around a drawn one, in its trajectory or, over its ends, in its environment."""
        if self.contract.form == "cross":
            (around,) = ([r.number for r in rows] for rows in self.rows if any(r.number == number for r in rows))
        at, last = around.index(number), len(around) - 1
        return tuple(around[min(max(at + offset, 0), last)] for offset in OFFSETS)

    def weight(self, number: int) -> float:
        """The importance weight of a row that was chosen."""
        return (self.q(number) / min(self.anchors.values())) ** -BETA

    def owner(self, unit: Unit) -> int:
        """What a sampler without replacement draws once: the row, or the trajectory of a slice."""
        if not self.contract.slices:
            return unit[0]
        (found,) = (t[-1].number for t in self.trajectories() if any(row.number == unit[0] for row in t))
        return found

    def rows_at(self, index: Tensor) -> list[Row]:
        """The rows that an index names."""
        by_position = {row.position: row for row in self.stored}
        return [by_position[position] for position in self.positions(index)]

    def check(self, batch: TensorDict, info: dict[Any, Tensor]) -> list[Unit]:
        """A batch is made of units that can be drawn, and says so. Returns them."""
        contract, units = self.contract, self.contract.units(batch)
        assert set(units) <= set(self.due())
        flat, rows = batch.reshape(-1), self.rows_at(info["index"])
        numbers = flat["number"].tolist()
        assert [row.number for row in rows] == numbers
        assert all(torch.equal(info[key], batch[key]) for key in info)
        if "priority_weight" in info:
            chosen = [unit[0] for unit in units for _ in (unit if contract.slices else unit[:1])]
            chosen = numbers if contract.windows else chosen
            weights = {number: self.weight(number) for number in set(chosen)}
            due = torch.tensor([weights[number] for number in chosen])
            torch.testing.assert_close(info["priority_weight"].reshape(-1), due, rtol=1e-5, atol=0)
        if "index_generation" in info:
            generations = info["index_generation"].reshape(-1).tolist()
            assert generations == [number // self.envs // self.steps + 1 for number in numbers]
        if contract.slices:
            assert batch.shape == ((len(units), SLICE) if contract.form == "stacked" else flat.shape)
            self.check_flags(flat, units)
        if contract.windows:
            self.check_windows(flat)
        if "hindsight" in contract.kind:
            new = info["relabelled"]
            assert torch.equal(flat["goal"] >= 0, new)
            reward = reached(flat["number"], flat["goal"], flat)
            assert torch.equal(flat["next", "reward"], torch.where(new, reward, 9.0))
        return units

    def check_flags(self, flat: TensorDict, units: list[Unit]) -> None:
        """The last step of a slice is truncated, and its first one begins it; what is padded repeats the last one."""
        stored = self.batch_of([number for unit in units for number in unit])
        places = [(step, len(unit)) for unit in units for step in range(len(unit))]
        if (real := flat.get(("collector", "mask"), None)) is not None:
            padded = flat.view(-1, SLICE)
            for numbers, mask in zip(padded["number"].tolist(), real.view(-1, SLICE).tolist(), strict=True):
                length = sum(mask)
                assert mask == [step < length for step in range(SLICE)]
                assert numbers[length:] == numbers[length - 1 : length] * (SLICE - length)
            flat = flat[real]
        last = torch.tensor([step == length - 1 for step, length in places]).unsqueeze(-1)
        first = torch.tensor([step == 0 for step, length in places]).unsqueeze(-1)
        assert torch.equal(flat["next", "truncated"], last)
        assert torch.equal(flat["next", "done"], stored["next", "done"] | last)
        assert torch.equal(flat["next", "terminated"], stored["next", "terminated"])
        assert torch.equal(flat["is_init"], stored["is_init"] | first)

    def batch_of(self, numbers: list[int]) -> TensorDict:
        """The flags of rows as they are stored."""
        rows = {row.number: row for row in self.stored}
        done = torch.tensor([[rows[number].done] for number in numbers])
        even = torch.tensor([[number % 2 == 0] for number in numbers])
        init = torch.tensor([[number % 7 == 0] for number in numbers])
        none = torch.zeros_like(done)
        told = {"done": done if self.contract.ends == "done" else none, "terminated": done & even}
        if self.contract.ends not in ("done", "two flags"):
            told["terminated"] = none
        return TensorDict({"is_init": init, "next": told}, [len(numbers)])

    def check_windows(self, flat: TensorDict) -> None:
        """The mask says which rows are repeated."""
        lags = flat["around"] - flat["number"].unsqueeze(-1)
        assert torch.equal(lags != torch.tensor(OFFSETS) * self.envs, flat["around_is_pad"])


SAMPLERS = pairwise(
    [
        SamplerContract(kind, form, ends, envs)
        for kind, forms in KINDS.items()
        for form in forms
        for ends in (ENDS if "slices" in kind else ["done", "identifiers"] if "hindsight" in kind else ["done"])
        for envs in (1, 2)
    ],
    lambda each: each.options,
)


def samplers(suits: Callable[[SamplerContract], bool] = lambda contract: True) -> list[SamplerContract]:
    """The samplers that suit a property, for ``pytest.mark.parametrize``."""
    return [contract for contract in SAMPLERS if suits(contract)]


def prioritized(**changes: Any) -> Any:
    return PrioritizedSampler(**{"max_capacity": 4, "alpha": 1.0, "beta": 1.0, **changes})


def prioritized_slices(**changes: Any) -> Any:
    return PrioritizedSliceSampler(**{"max_capacity": 4, "alpha": 1.0, "beta": 1.0, "slice_len": 2, **changes})


def slices(**changes: Any) -> Any:
    return SliceSampler(**{"slice_len": 2, **changes})


def buffer(**changes: Any) -> Any:
    return ReplayBuffer(**{"storage": LazyTensorStorage(4), **changes})


WHOLE = Window(-1, 0, outside="skip")


def goals(**changes: Any) -> Any:
    return Hindsight(lambda achieved, goal, batch: achieved, **changes)


def written() -> LazyTensorStorage:
    storage = LazyTensorStorage(4)
    storage.append(torch.arange(3))
    return storage


_NOT_FINITE = "must be finite and not negative, but is"
#: Calls that are refused, by error: what the message says, and the call.
_REFUSED: dict[type[Exception], list[tuple[str, Callable[[], Any]]]] = {
    ValueError: [
        *(
            (f"{name} {_NOT_FINITE} {value}", lambda make=make, name=name, value=value: make(**{name: value}))
            for make in (prioritized, prioritized_slices)
            for name in ("alpha", "beta", "eps")
            for value in (math.inf, math.nan)
        ),
        # TorchRL's words.
        ("alpha must be greater or equal than 0, got alpha=-1.0", lambda: prioritized(alpha=-1.0)),
        ("beta must be greater or equal to 0, got beta=-1.0", lambda: prioritized_slices(beta=-1.0)),
        ("beta must be", lambda: prioritized(beta=torch.ones(2))),
        ("beta must be", lambda: prioritized(beta=torch.tensor(math.inf))),
        ("reduction must be one of", lambda: prioritized(reduction="sum")),
        ("max_capacity", lambda: prioritized(max_capacity=0)),
        ("pad_output=True is incompatible", lambda: slices(pad_output=True)),
        ("weighting must be one of", lambda: slices(weighting="row")),
        ("a span must be smaller", lambda: slices(span=2)),
        ("a span must be smaller", lambda: slices(span=(0, -1))),
        ("a pair of numbers", lambda: slices(span=[1, 2, 3])),
        ("slice_len", lambda: slices(slice_len=0)),
        ("equal lengths", lambda: slices(strict_length=False, stack=True)),
        ("strategy must be one of", lambda: goals(strategy="random")),
        *(("ratio must be in", lambda ratio=ratio: goals(ratio=ratio)) for ratio in (-0.1, 1.5, math.nan)),
        *(("decay must be in", lambda decay=decay: goals(decay=decay)) for decay in (0, 1.0, math.nan)),
        *(("decay must be in", lambda decay=decay: Geometric(decay)) for decay in (0.0, 1.0, -0.5, math.nan)),
        ("count must be a whole number of at least 1", lambda: Newest(0)),
        ("eta must be in", lambda: EmphasizeRecent(1.5)),
        ("eta must be in", lambda: EmphasizeRecent(least=0)),
        ("law=Linear.. can't be", lambda: buffer(sampler=RandomSampler(law=Linear()), windows=WHOLE)),
        ("n_steps=3", lambda: buffer(relabel=goals(), n_steps=3)),
        ("'desired_goal' is relabelled", lambda: buffer(relabel=goals(), process=[Normalize("desired_goal")])),
        ("no offsets .* from 1 to 0", lambda: Window(1, 0)),
        ("no offsets .* from 0 to 3 by 2", lambda: Window(0, 3, step=2)),
        ("no offsets .* by 0", lambda: Window(0, 3, step=0)),
        ("reaches at most 4096", lambda: Window(-4097, 0)),
        ("outside must be one of", lambda: Window(0, 1, outside="wrap")),
        ("windows", lambda: buffer(relabel=goals(), windows=Window(0, 1))),
    ],
    TypeError: [
        ("either num_slices or slice_len", lambda: SliceSampler()),
        ("either num_slices or slice_len", lambda: slices(num_slices=2)),
        ("has no without-replacement variant", lambda: prioritized(replacement=False)),
        ("has no without-replacement variant", lambda: prioritized_slices(replacement=False)),
        ("windows are one Window or a dict", lambda: buffer(windows=3)),
        ("windows are one Window or a dict", lambda: buffer(windows={"action": 3})),
        ("first of a Window must be a whole number", lambda: Window(0.0, 1)),
    ],
    RuntimeError: [
        ("exclude each other", lambda: slices(end_key="done", end_keys=["done"])),
        ("exclude each other", lambda: slices(ends=torch.zeros(3), trajectories=torch.zeros(3))),
        ("exclude each other", lambda: slices(ends=torch.zeros(3), end_key="done")),
        ("exclude each other", lambda: slices(trajectories=torch.zeros(3), traj_key="episode")),
        ("divisible by slice_len", lambda: SamplerContract("slices", "strict").filled()[0].sample(SLICE + 1)),
        ("divisible by num_slices", lambda: SamplerContract("slices", "number").filled()[0].sample(UNITS + 1)),
        ("before the first write", lambda: slices().trajectories()),
        ("belongs to no buffer", lambda: RandomSampler().draw(3)),
        ("belongs to no buffer", lambda: RandomSampler().choose(3)),
    ],
    NotImplementedError: [
        (r"dtype torch\.int32 not supported by PrioritizedSampler", lambda: prioritized(dtype=torch.int32)),
        ("ndim=2", lambda: slices(fragmented=True)),
        ("overrides neither", lambda: buffer(storage=written(), sampler=Sampler()).sample(2)),
    ],
}
REFUSED = [(call, error, text) for error, calls in _REFUSED.items() for text, call in calls]
