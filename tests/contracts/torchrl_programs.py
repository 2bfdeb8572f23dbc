"""Programs on replay buffers that TorchRL and gpubuf run alike: what each call gives, as plain values.

A program takes a namespace of classes. :data:`PROGRAMS` has them by name: those of :func:`story` make random calls of
one buffer, the others each look at what TorchRL's own tests look at. What is drawn at random is told by what must hold.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import pickle
import random
import tempfile
import types
import warnings
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase, is_non_tensor, is_tensor_collection, tensorclass
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from tests.contracts import torchrl_losses
from tests.support.n_step_model import Model
from tests.support.torchrl_buffers import edits, max_value, two_dimensions

Point = namedtuple("Point", ["x", "y"])
PROGRAMS: dict[str, Callable[[Any], Any]] = {}
RECORD = Path(__file__).with_name("torchrl.json")


@tensorclass
class Row:
    """A tensorclass with a TensorDict in it."""

    a: Tensor
    nested: TensorDict


def program(*cases: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function of a namespace and of the arguments of each case, or of a namespace alone."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for case in cases or ((),):
            given = case if isinstance(case, tuple) else (case,)
            name = " ".join([function.__name__, *map(str, given)])
            PROGRAMS[name] = functools.partial(_with, function, given)
        return function

    return register


def _with(function: Callable[..., Any], given: tuple[Any, ...], lib: Any) -> Any:
    found = function(lib, *given)
    return list(found) if isinstance(found, Iterator) else found


def plain(value: Any) -> Any:
    """Tensors and shapes as lists; the rest as JSON gives it back."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(entry) for entry in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(plain, value))
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


def fact(action: Callable[..., Any], *arguments: Any) -> Any:
    """What an action gives, or Python's own errors that its error is one of."""

    def kinds(error: type) -> list[str]:
        if error.__module__ == "builtins":
            return [error.__name__]
        return [kind for base in error.__bases__ for kind in kinds(base)]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return plain(action(*arguments))
        except Exception as error:
            return f"error: {' or '.join(kinds(type(error)))}"


def run(name: str, lib: Any) -> Any:
    """A program's facts, as JSON gives them back."""
    torch.manual_seed(0)
    return json.loads(json.dumps(fact(PROGRAMS[name], lib), sort_keys=True))


def differences(name: str, ours: Any, theirs: Any) -> dict[str, tuple[Any, Any]]:
    """Where the facts of a program differ, by the program's name and the place in it."""
    if not (isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs)):
        return {} if same(ours, theirs) else {name: (ours, theirs)}
    found = {}
    for place, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        label = str(place)
        if isinstance(own, list) and len(own) == 2 and isinstance(own[0], str) and own[0] == other[0]:
            (label, own), other = own, other[1]
        if not same(own, other):
            found[f"{name}/{label}"] = own, other
    return found


def same(ours: Any, theirs: Any) -> bool:
    """Whether two facts agree. An error of ours may be of several kinds, one of them theirs."""
    if ours == theirs:
        return True
    errors = [fact.removeprefix("error: ").split(" or ") for fact in (ours, theirs) if str(fact).startswith("error: ")]
    return len(errors) == 2 and set(errors[1]) <= set(errors[0])


# TorchRL's own


class Sums:
    """A vector with the methods of TorchRL's compiled tree of sums, which may not load."""

    empty = 0.0

    def __init__(self, size: int) -> None:
        self.values = torch.full((size,), self.empty)

    def query(self, start: int, stop: int) -> float:
        return float(self.values[start:stop].sum())

    def scan_lower_bound(self, mass: Any) -> Tensor:
        return torch.searchsorted(self.values.double().cumsum(0), torch.as_tensor(mass).double())

    def __getitem__(self, index: Any) -> Tensor:
        return self.values[index]

    def __setitem__(self, index: Any, values: Any) -> None:
        self.values[index] = torch.as_tensor(values, dtype=torch.float32)


class Minima(Sums):
    empty = torch.finfo(torch.float32).max

    def query(self, start: int, stop: int) -> float:
        return float(self.values[start:stop].min())


def torchrls() -> Any:
    """TorchRL's names, with plain trees in the place of its compiled ones."""
    import torchrl.data
    from torchrl.data import replay_buffers
    from torchrl.data.replay_buffers import samplers, storages, writers
    from torchrl.data.replay_buffers.samplers import prioritized
    from torchrl.envs.transforms import MultiStepTransform

    for bits in (32, 64):
        setattr(prioritized, f"SumSegmentTreeFp{bits}", Sums)
        setattr(prioritized, f"MinSegmentTreeFp{bits}", Minima)
    names: dict[str, Any] = {}
    for module in (samplers, storages, writers, replay_buffers, torchrl.data):
        names.update({name: value for name, value in vars(module).items() if not name.startswith("_")})
    return types.SimpleNamespace(**{**names, "__name__": "torchrl", "MultiStepTransform": MultiStepTransform})


PRIORITIES = [0.5, 2.0, 0.0, 4.0, 1.0]


def five_rows(lib: Any, sampler: Any) -> Any:
    """A buffer with 5 rows in room for 8; with priorities they are :data:`PRIORITIES`."""
    buffer = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(8), sampler=sampler, batch_size=2)
    buffer.extend(TensorDict({"number": torch.arange(5)}, [5]))
    if isinstance(sampler, lib.PrioritizedSampler):
        buffer.update_priority(torch.arange(5), torch.tensor(PRIORITIES))
    return buffer


def states_of_samplers(lib: Any) -> Any:
    """Of TorchRL's, for tests that load them."""
    buffer = five_rows(lib, lib.SamplerWithoutReplacement(drop_last=True))
    buffer.sample()
    state = five_rows(lib, lib.PrioritizedSampler(8, 0.5, 0.25, eps=0.0)).sampler.state_dict()
    trees = {name: state[name].values for name in ("_sum_tree", "_min_tree")}
    random = five_rows(lib, lib.RandomSampler()).sampler.state_dict()
    return plain({"prioritized": {**state, **trees}, "epoch": buffer.sampler.state_dict(), "random": random})


# Rows


def _number(n: int, *width: int) -> Tensor:
    return torch.arange(n).view(n, *[1] * len(width)).expand(n, *width).float().contiguous()


KINDS: dict[str, Callable[[int], Any]] = {
    "tensor": lambda n: _number(n, 1),
    "TensorDict": lambda n: TensorDict({"a": torch.arange(n), "b": {"c": _number(n, 2)}}, [n]),
    "tensorclass": lambda n: Row(a=torch.arange(n), nested=TensorDict({"b": _number(n, 2)}, [n]), batch_size=[n]),
    "dict": lambda n: {"a": torch.arange(n), "obs": {"image": torch.zeros(n, 2, 2, dtype=torch.uint8)}},
    "tuple": lambda n: (torch.arange(n), (torch.zeros(n), {"a": [torch.ones(n, 1)]})),
    "namedtuple": lambda n: Point(torch.arange(n), torch.zeros(n, 2)),
    "TensorDict in a dict": lambda n: {"td": TensorDict({"a": torch.arange(n)}, [n]), "x": torch.zeros(n)},
    "text": lambda n: TensorDict({"a": torch.arange(n), "text": NonTensorStack(*map(str, range(n)))}, [n]),
}
"""Batches of ``n`` rows. No two rows are equal."""


def one_row(rows: Any) -> Any:
    """The first row, without a batch dimension."""
    if isinstance(rows, dict):
        return {key: one_row(value) for key, value in rows.items()}
    if isinstance(rows, Point):
        return Point(*map(one_row, rows))
    return type(rows)(map(one_row, rows)) if isinstance(rows, (tuple, list)) else rows[0]


def numbers(rows: Any) -> list[int]:
    """Which rows these are."""
    if isinstance(rows, dict):
        rows = rows.get("td", rows)
    if is_tensor_collection(rows):
        rows = rows.get("a")
    leaf = next(leaf for leaf in tree_leaves(rows) if isinstance(leaf, Tensor))
    return [int(value) for value in leaf.reshape(-1)]


def form(rows: Any) -> Any:
    """Kind and shapes of rows."""
    if is_non_tensor(rows):
        return ["not a tensor", list(rows.batch_size)]
    if isinstance(rows, TensorDictBase):
        # Generations come with more batches than TorchRL's.
        keys = sorted(key for key in rows.keys() if key != "index_generation")
        return {"TensorDict": list(rows.batch_size), **{key: form(rows.get(key)) for key in keys}}
    if is_tensor_collection(rows):
        return {type(rows).__name__: form(rows.to_tensordict())}
    if isinstance(rows, Tensor):
        return [str(rows.dtype).removeprefix("torch."), *rows.shape]
    if isinstance(rows, dict):
        return {str(key): form(value) for key, value in rows.items() if key != "index_generation"}
    if isinstance(rows, (tuple, list)):
        return [type(rows).__name__, *map(form, rows)]
    return type(rows).__name__


# Transitions of several steps


@program()
def several_steps(lib: Any) -> Any:
    """As they are written. Flags are in TorchRL those of the first step, and it keeps one row more back."""
    options = {"write_time": True} if lib.__name__ == "gpubuf.integrations.torchrl" else {}
    transform, model = lib.MultiStepTransform(n_steps=3, gamma=0.9, **options), Model(1000, envs=2, seed=1)
    made = [transform.inv(model.write(n)) for n in (7, 1, 12, 3)]
    rows = torch.cat([part for part in made if part is not None and part.numel()], 1)[:, :20]
    one = rows["steps_to_next_obs"].reshape(2, 20) == 1
    found = [["steps", rows["steps_to_next_obs"].reshape(2, 20)]]
    found += [[name, rows["next", name][one]] for name in ("done", "terminated", "truncated")]
    numbers = [key for key in rows.keys(True, True) if rows[key].is_floating_point() and "original_reward" not in key]
    keys = sorted((key for key in numbers if key != "gamma"), key=str)
    return found + [[str(key), (rows[key] * 1000).round().long()] for key in keys]


# One buffer, called at random

SAMPLERS: dict[str, Callable[[Any, int], Any]] = {
    "RandomSampler": lambda lib, size: lib.RandomSampler(),
    "SamplerWithoutReplacement": lambda lib, size: lib.SamplerWithoutReplacement(),
    "PrioritizedSampler": lambda lib, size: lib.PrioritizedSampler(max_capacity=size, alpha=0.8, beta=0.9),
}


@program(
    ("ReplayBuffer", "LazyTensorStorage", "tensor", "PrioritizedSampler", 5),
    ("ReplayBuffer", "LazyTensorStorage", "tensorclass", "SamplerWithoutReplacement", 5),
    ("ReplayBuffer", "LazyTensorStorage", "dict", "RandomSampler", 5),
    ("ReplayBuffer", "LazyTensorStorage", "tuple", "PrioritizedSampler", 9),
    ("ReplayBuffer", "LazyTensorStorage", "namedtuple", "RandomSampler", 100),
    ("ReplayBuffer", "LazyTensorStorage", "text", "RandomSampler", 5),
    ("ReplayBuffer", "LazyMemmapStorage", "dict", "RandomSampler", 5),
    ("ReplayBuffer", "ListStorage", "tensor", "SamplerWithoutReplacement", 5),
    ("TensorDictReplayBuffer", "LazyTensorStorage", "TensorDict", "PrioritizedSampler", 9),
    ("TensorDictReplayBuffer", "LazyMemmapStorage", "TensorDict", "RandomSampler", 5),
    ("TensorDictReplayBuffer", "ListStorage", "TensorDict", "RandomSampler", 100),
)
def story(lib: Any, buffer: str, storage: str, kind: str, sampler: str, capacity: int) -> Any:
    """Writes, reads and copies in an order drawn at random, the same for every library."""
    chance = random.Random(f"{buffer} {storage} {kind} {sampler}")
    rows = KINDS[kind]

    def new() -> Any:
        return getattr(lib, buffer)(
            storage=getattr(lib, storage)(capacity), sampler=SAMPLERS[sampler](lib, capacity), batch_size=3
        )

    made = [new()]

    def read(index: Any, of_storage: bool = False) -> Any:
        found = (made[0].storage if of_storage else made[0])[index]
        return [form(found), numbers(found) if storage != "ListStorage" else [numbers(row) for row in found]]

    def through_state() -> Any:
        state, other = copy.deepcopy(made[0].state_dict()), new()
        other.load_state_dict(state)
        return [len(other), numbers(other[:]), other.writer._cursor]

    def through_folder() -> Any:
        with tempfile.TemporaryDirectory() as folder:
            other = new()
            made[0].dumps(folder)
            other.loads(folder)
            return [len(other), numbers(other[:])]

    def drawn() -> Any:
        batch = made[0].sample()
        return [set(numbers(batch)) <= set(numbers(made[0][:])), form(batch), len(made[0].sample(2))]

    actions: dict[str, Callable[[], Any]] = {
        "extend": lambda: made[0].extend(rows(chance.choice((1, 2, 3, 4, 2 * capacity + 1 if capacity < 10 else 7)))),
        "add": lambda: int(made[0].add(one_row(rows(1)))),
        "extend by rows": lambda: len(made[0].extend([one_row(rows(1)) for _ in range(2)])),
        "assign": lambda: made[0].__setitem__([0, 1], rows(2)),
        "assign a slice": lambda: made[0].__setitem__(slice(0, 1), rows(1)),
        "read": lambda: read(chance.choice(([0, 1], slice(0, 2), slice(None), torch.tensor([1, 0])))),
        "read the storage": lambda: read(chance.choice(([0, 1], slice(None))), True),
        "row": lambda: form(made[0][1]),
        "sample": drawn,
        "state": through_state,
        "folder": through_folder,
        "pickle": lambda: numbers(pickle.loads(pickle.dumps(made[0]))[:]),
        "empty": lambda: (made[0].empty(), made[0].extend(rows(2)))[0],
    }
    if storage == "LazyMemmapStorage":
        # TorchRL's files can't be pickled.
        del actions["pickle"]
    if buffer == "TensorDictReplayBuffer":
        # TorchRL's rows of a list would need an index of their own.
        del actions["extend by rows"]
    found = [["extend", fact(lambda: made[0].extend(rows(4)))]]
    # Each of them twice, at random.
    for name in chance.sample(list(actions), len(actions)) + chance.sample(list(actions), len(actions)):
        found.append([name, fact(actions[name])])
        found.append(["counts", [len(made[0]), made[0].write_count, made[0].writer._cursor]])
    return found


@program(*((kind, ndim) for kind in ("TensorDict", "tensorclass", "dict") for ndim in (1, 2)))
def dimensions(lib: Any, kind: str, ndim: int) -> Any:
    """Rows of one and of two dimensions, read and overwritten by environment and step."""
    shape = (8,) if ndim == 1 else (2, 4)
    rows = {
        "TensorDict": TensorDict({"a": torch.arange(8).view(shape), "b": {"c": torch.arange(8).view(shape)}}, shape),
        "tensorclass": Row(a=torch.arange(8).view(shape), nested=TensorDict({}, shape), batch_size=shape),
        "dict": {"a": torch.arange(8).view(shape), "y": [{"z": torch.ones(shape)}]},
    }[kind]
    buffer = lib.ReplayBuffer(storage=lib.LazyTensorStorage(20, ndim=ndim), batch_size=4)
    index = buffer.extend(rows)
    found = [list(index.shape), len(buffer), form(buffer[:]), form(buffer.sample()), buffer.storage.max_size]
    if kind == "TensorDict":
        for place in [(0, slice(1, 2)), (slice(None), slice(1, 3))] if ndim == 2 else [slice(1, 3), [0, 3]]:
            buffer[place] = buffer[place].clone().zero_()
            found += [form(buffer[place]), buffer[:]["a"], buffer["b", "c"], buffer.writer._cursor]
    return found


# Writers


@program(("RoundRobinWriter", True), ("TensorDictRoundRobinWriter", False))
def generations(lib: Any, kind: str, track: bool) -> Any:
    writer = getattr(lib, kind)(track_generations=track)
    buffer = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(8), writer=writer, batch_size=4)
    rows = KINDS["TensorDict"]
    found = [buffer.extend(rows(6)), writer._cursor, buffer.write_count, buffer.extend(rows(5)), writer._cursor]
    found += [writer.tracks_generations, "index_generation" in buffer.sample().keys()]
    before = writer.generations_of(torch.arange(8)) if track else torch.zeros(8)
    buffer.extend(rows(2))
    after = writer.generations_of(torch.arange(8)) if track else torch.zeros(8)
    found += [after - before, buffer[[2, 5]]["a"], writer._cursor, len(buffer)]
    buffer.empty()
    return [*found, writer._cursor, buffer.write_count, len(buffer)]


# Transforms, parts of their own, several buffers


@program("constructor", "factory", "appended", "inserted")
def transform(lib: Any, way: str) -> Any:
    def doubled(rows: TensorDict) -> TensorDict:
        return rows.set("double", rows["a"] * 2)

    given = {"constructor": {"transform": doubled}, "factory": {"transform_factory": lambda: doubled}}.get(way, {})
    buffer = lib.ReplayBuffer(storage=lib.LazyTensorStorage(10), batch_size=2, **given)
    if way in ("appended", "inserted"):
        buffer.append_transform(doubled if way == "appended" else lambda rows: rows.set("a", rows["a"] + 1))
    if way == "inserted":
        buffer.insert_transform(0, doubled)
    buffer.extend(KINDS["TensorDict"](3))
    rows = buffer[:]
    return [rows["a"], rows["double"], "double" in buffer.sample().keys(), "double" in buffer.storage[:].keys()]


@program()
def transforms(lib: Any) -> Any:
    found = []
    buffer = lib.ReplayBuffer(
        storage=lib.LazyTensorStorage(100), transform=lambda rows: tree_map(torch.zeros_like, rows)
    )
    buffer.add({"a": torch.randn(3), "b": {"c": (torch.ones(2), [torch.ones(1)])}, 30: -torch.ones(())})
    drawn = buffer.sample(10)
    found += [form(drawn), float(drawn["b"]["c"][0].abs().sum() + drawn[30].abs().sum())]
    buffer = lib.ReplayBuffer(storage=lib.LazyTensorStorage(10), batch_size=4)
    buffer.append_transform(lambda rows: rows.apply_(lambda value: value + 1), invert=True)
    rows = TensorDict({"a": torch.zeros(10)}, [10])
    buffer.extend(rows)
    found += [buffer[:]["a"].sum(), rows["a"].sum()]
    buffer[3:4] = TensorDict({"a": torch.zeros(1)}, [1])
    found.append(buffer[3:5]["a"])
    buffer = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(10), batch_size=4)
    buffer.append_transform(lambda rows: None, invert=True)
    found += [len(buffer.extend(KINDS["TensorDict"](3))), len(buffer)]
    buffer = lib.ReplayBuffer(storage=lib.ListStorage(10), collate_fn=torch.stack, batch_size=1)
    buffer.add(TensorDict({"a": torch.ones(2, 4)}, []))
    return [*found, form(buffer.sample())]


@program("ReplayBuffer", "PrioritizedReplayBuffer", "TensorDictReplayBuffer", "TensorDictPrioritizedReplayBuffer")
def own_parts(lib: Any, kind: str) -> Any:
    """Buffers that make their own storage."""
    buffer = getattr(lib, kind)(batch_size=3, **({"alpha": 0.8, "beta": 0.9} if "Prioritized" in kind else {}))
    index = buffer.extend(KINDS["TensorDict"](5) if kind.startswith("TensorDict") else list(torch.arange(5).view(5, 1)))
    drawn = buffer.sample(1)
    value = drawn["a"] if isinstance(drawn, TensorDict) else drawn
    found = [index, len(buffer), buffer.writer._cursor, len(buffer[:4]), len(buffer[4:]), value.shape]
    buffer.empty()
    return [*found, len(buffer), fact(buffer.sample)]


@program()
def refused(lib: Any) -> Any:
    buffer = lib.ReplayBuffer(storage=lib.LazyTensorStorage(10))
    buffer.extend(torch.arange(5))
    epochs = lib.ReplayBuffer(storage=lib.ListStorage(10), sampler=lib.SamplerWithoutReplacement())
    epochs.extend(torch.zeros(10))
    actions: dict[str, Callable[[], Any]] = {
        "storage": lambda: lib.ReplayBuffer(storage="none"),
        "sampler": lambda: lib.ReplayBuffer(sampler="none"),
        "writer": lambda: lib.ReplayBuffer(writer="none"),
        "tensors for TensorDicts": lambda: len(lib.TensorDictReplayBuffer().extend(torch.zeros(3))),
        "update_priority": lambda: lib.ReplayBuffer().extend(torch.zeros(3), update_priority=True),
        "prefetch without a size": lambda: lib.ReplayBuffer(prefetch=2),
        "two transforms": lambda: lib.ReplayBuffer(transform=lambda x: x, transform_factory=lambda: lambda x: x),
        "dim_extend": lambda: lib.ReplayBuffer(dim_extend=-1),
        "beyond the rows": lambda: buffer[7],
        "no size": buffer.sample,
        "iterated without a size": lambda: list(epochs),
        "ragged rows": lambda: lib.ReplayBuffer(storage=lib.LazyTensorStorage(9)).extend(
            [torch.ones(4), torch.ones(1)]
        ),
        "no tensors": lambda: lib.TensorStorage(None),
        "another max_size": lambda: lib.TensorStorage(torch.zeros(3), max_size=4),
        "slices of nothing": lambda: lib.SliceSampler(),
        "slices of both": lambda: lib.SliceSampler(num_slices=2, slice_len=2),
        "two end keys": lambda: lib.SliceSampler(num_slices=2, end_key="done", end_keys=["done"]),
        "a negative alpha": lambda: lib.PrioritizedSampler(10, alpha=-1.0, beta=0.9),
        "a negative beta": lambda: lib.PrioritizedSampler(10, alpha=0.7, beta=-1.0),
        "a negative eps": lambda: str(lib.PrioritizedSampler(10, alpha=0.7, beta=0.9, eps=-1.0).alpha),
    }
    return [[name, fact(action)] for name, action in actions.items()]


# States and folders


#: Longer programs. The few cases of some are those that are kept.
STORIES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "edits": edits.story,
    "max_value": max_value.story,
    "two_dimensions": functools.partial(two_dimensions.story, every=1),
    "few two_dimensions": two_dimensions.story,
}


@program(*STORIES)
def long(lib: Any, name: str) -> Any:
    return [list(told) for told in STORIES[name](lib).items()]


@program(
    ("LazyTensorStorage", "LazyMemmapStorage", False),
    ("LazyMemmapStorage", "LazyTensorStorage", True),
    ("LazyTensorStorage", "LazyTensorStorage", True),
)
def state_of_another(lib: Any, given: str, taken: str, begun: bool) -> Any:
    row = TensorDict({"observation": torch.ones(1, 4), "next": {"observation": torch.ones(1, 4)}}, [1])
    buffer, other = (
        lib.TensorDictReplayBuffer(storage=getattr(lib, kind)(100), prefetch=3, batch_size=3) for kind in (given, taken)
    )
    for _ in range(3):
        buffer.extend(row)
    if begun:
        other.extend(row)
    other.load_state_dict(buffer.state_dict())
    return [len(other), bool((other.sample().exclude("index") == 1).all()), other.writer._cursor]


@program("tensor", "TensorDict", "dict", "tensorclass")
def folder_of_a_storage(lib: Any, kind: str) -> Any:
    with tempfile.TemporaryDirectory() as path:
        storage, other = lib.LazyTensorStorage(10), lib.LazyTensorStorage(10)
        storage.set(range(3), KINDS[kind](3))
        storage.dumps(Path(path))
        storage.dumps(Path(path))
        other.set(range(3), tree_map(torch.zeros_like, KINDS[kind](3)) if kind == "dict" else KINDS[kind](3) * 0)
        other.loads(Path(path))
        return [len(other), numbers(other[:]), form(other[:])]


@program()
def rows_that_are_set(lib: Any) -> Any:
    """``storage.set`` by many kinds of index, before the first write and after it."""
    found: list[Any] = []
    rows = KINDS["TensorDict"](3)
    for cursor in (range(3), slice(0, 3), [0, 1, 2], torch.arange(3)):
        storage = lib.LazyTensorStorage(6)
        storage.set(cursor, rows)
        found.append([len(storage), form(storage[:])])
        storage.set(cursor, rows, set_cursor=False)
        found.append([len(storage), storage._len, form(storage[...])])
    storage = lib.LazyTensorStorage(6)
    storage.set(0, rows[0])
    return [*found, form(storage[:]), form(storage._storage)]


# Samplers

LENGTHS = (30, 25, 15, 30)


def trajectories(key: Any = "episode", done_key: Any = ("next", "done"), lengths: tuple[int, ...] = LENGTHS) -> Any:
    """Rows that know their trajectory, counted from 1, and their step in it."""
    steps = torch.cat([torch.arange(n) for n in lengths])
    number = torch.arange(1, len(lengths) + 1).repeat_interleave(torch.tensor(lengths))
    rows = TensorDict({"count": torch.arange(len(steps)), "steps": steps, "which": number}, [len(steps)])
    if key is not None:
        rows[key] = number
    if done_key is not None:
        rows[done_key] = torch.cat([torch.arange(n) == n - 1 for n in lengths]).unsqueeze(-1)
    return rows


def leaves(sampler: Any, n: int) -> list[float]:
    """The priorities of the first ``n`` rows, as the sampler weights them."""
    if hasattr(sampler, "tree"):
        return plain(sampler.tree.leaves[:n])  # type: ignore[no-any-return]
    return [float(sampler._sum_tree[i]) for i in range(n)]


@program(
    *((kind, ndim) for kind in ("ReplayBuffer", "TensorDictReplayBuffer") for ndim in (1, 2)),
    ("TensorDictPrioritizedReplayBuffer", 1),
)
def priorities(lib: Any, kind: str, ndim: int) -> Any:
    shape = (10,) if ndim == 1 else (2, 5)
    rows = TensorDict({"a": torch.arange(10).view(shape), "p": torch.ones(shape) / 2}, shape)
    storage = lib.LazyTensorStorage(100, ndim=ndim)
    if kind == "TensorDictPrioritizedReplayBuffer":
        buffer = lib.TensorDictPrioritizedReplayBuffer(
            alpha=1.0, beta=1.0, storage=storage, batch_size=4, priority_key="p"
        )
    else:
        sampler = lib.PrioritizedSampler(max_capacity=100, alpha=1.0, beta=1.0)
        buffer = getattr(lib, kind)(sampler=sampler, storage=storage, batch_size=4)
    index = buffer.extend(rows)
    found = [index.shape, leaves(buffer.sampler, 10)]
    buffer.update_priority(index, 2)
    found.append(leaves(buffer.sampler, 10))
    _, info = buffer.sample(return_info=True)
    buffer.update_priority(info["index"], 3)
    found.append({*leaves(buffer.sampler, 10)})
    if kind != "ReplayBuffer":
        drawn = buffer.sample()
        buffer.update_tensordict_priority(drawn.set(buffer.priority_key, torch.full((4,), 1e6)))
        found += [max(leaves(buffer.sampler, 10)), {*buffer.sample()["a"].tolist()} <= {*drawn["a"].tolist()}]
    return found


@program(True, False)
def largest_priority(lib: Any, within: bool) -> Any:
    sampler = lib.PrioritizedSampler(max_capacity=11, alpha=1.0, beta=1.0, max_priority_within_buffer=within)
    buffer = lib.ReplayBuffer(storage=lib.LazyTensorStorage(11), sampler=sampler)
    found: list[Any] = []
    for number in range(20):
        index = buffer.add(torch.tensor(number))
        found.append([int(index), round(leaves(sampler, 11)[int(index)], 4)])
        buffer.update_priority(index, 21 - number)
    found.append(round(float(sampler.default_priority), 4))
    buffer.update_priority(buffer.extend(torch.arange(10)), 12)
    return [*found, round(float(sampler.default_priority), 4), leaves(sampler, 11)]


@program((True, 1, True), (False, 2, True), (True, 2, False), (False, 1, False))
def priorities_of_slices(lib: Any, strict: bool, ndim: int, again: bool) -> Any:
    rows = trajectories(None, "done", (5, 10, 15, 20, 25))
    rows["priority"] = torch.where(rows["which"] == 1, 10, 1)
    rows = rows if ndim == 1 else torch.stack([rows, rows])
    sampler = lib.PrioritizedSliceSampler(
        rows.numel(), 1.0, 1.0, end_key="done", slice_len=10, strict_length=strict, cache_values=True
    )
    storage = lib.LazyTensorStorage(rows.numel(), ndim=ndim)
    buffer = lib.TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=50)
    if again:
        buffer.extend(rows[..., : rows.shape[-1] // 3])
    index = buffer.extend(rows)
    buffer.update_priority(index, rows["priority"])
    batches = [buffer.sample() for _ in range(40)]
    seen = {int(number) for batch in batches for number in batch["which"]}
    # Of trajectories that are shorter than a slice, and much longer.
    return [index.shape, {len(batch) < 50 for batch in batches}, seen & {1, 5}]


def trajectory_rows(lib: Any, **options: Any) -> Any:
    """A buffer with 5 rows that are trajectories of 4 steps."""
    buffer = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(10), batch_size=3, **options)
    buffer.extend(TensorDict({"a": torch.zeros(5, 4), "b": torch.zeros(5, 4, 2)}, [5, 4]))
    return buffer


@program("min", "max", "mean", "median")
def reduction(lib: Any, kind: str) -> Any:
    """Of the priorities of a row of several steps."""
    buffer = trajectory_rows(lib, sampler=lib.PrioritizedSampler(10, 1.0, 1.0, eps=0.0, reduction=kind))
    batch = buffer.sample()
    batch["td_error"] = torch.tensor([[1.0, 5.0, 2.0, 4.0], [0.5, 0.25, 0.125, 3.0], [7.0, 7.0, 1.0, 2.0]])
    batch["index"] = torch.arange(3).unsqueeze(1).expand(3, 4)
    buffer.update_tensordict_priority(batch.exclude("index_generation"))
    return leaves(buffer.sampler, 5)


@program("uniform", "generations", "prioritized")
def rows_that_are_trajectories(lib: Any, kind: str) -> Any:
    options = {
        "uniform": {},
        "generations": {"writer": lib.TensorDictRoundRobinWriter(track_generations=True)},
        "prioritized": {"sampler": lib.PrioritizedSampler(10, 1.0, 1.0, eps=0.0)},
    }
    buffer = trajectory_rows(lib, **options[kind])
    batch, info = buffer.sample(return_info=True)
    found = {"sample": batch, "info": info, "all": buffer[:], "some": buffer[:3], "one": buffer[1]}
    return [[name, form(rows)] for name, rows in (found | {"several": buffer[torch.tensor([1, 2])]}).items()]


@program(("RandomSampler", "state"), ("PrioritizedSampler", "folder"), ("SliceSampler", "folder"))
def seed(lib: Any, sampler: str, way: str) -> Any:
    """A buffer with a generator draws the same after the same state."""
    given = {"PrioritizedSampler": (100, 1.0, 1.0)}.get(sampler, ())
    made = getattr(lib, sampler)(*given, **({"num_slices": 4} if sampler == "SliceSampler" else {}))
    generator = torch.Generator().manual_seed(1)
    buffer = lib.ReplayBuffer(sampler=made, storage=lib.LazyTensorStorage(100), generator=generator)
    buffer.extend(trajectories())
    with tempfile.TemporaryDirectory() as path:
        saved = buffer.dumps(path) if way == "folder" else copy.deepcopy(buffer.state_dict())
        first = buffer.sample(32)["count"].tolist()
        buffer.loads(path) if way == "folder" else buffer.load_state_dict(saved)
    second, third = (buffer.sample(32)["count"].tolist() for _ in range(2))
    return [first == second, first == third]


@program((10, 5, True), (15, 9, False), (20, 11, True), (10, 16, True), (15, 16, False))
def epochs(lib: Any, size: int, samples: int, drop_last: bool) -> Any:
    storage = lib.ListStorage(size)
    storage.set(range(size), range(size))
    sampler = lib.SamplerWithoutReplacement(drop_last=drop_last)
    found = []
    for _ in range(6):
        index, _ = sampler.sample(storage, samples)
        found.append([index.numel(), index.unique().numel(), sampler.ran_out])
    return found


@program((10, True, 0, "ListStorage"), (12, False, 3, "LazyTensorStorage"), (10, False, 3, "ListStorage"))
def iterated(lib: Any, size: int, drop_last: bool, prefetch: int, storage: str) -> Any:
    sampler = lib.SamplerWithoutReplacement(drop_last=drop_last)
    buffer = lib.ReplayBuffer(storage=getattr(lib, storage)(size), sampler=sampler, batch_size=3, prefetch=prefetch)
    buffer.extend([torch.tensor([i]) for i in range(size)])
    rounds = [[batch.flatten().tolist() for batch in buffer] for _ in range(3)]
    # Threads of TorchRL's finish in any order.
    return [
        [sorted(map(len, batches)) for batches in rounds],
        [len({*itertools.chain(*batches)}) for batches in rounds],
    ]


@program(
    ("SliceSampler", 100, "episode", ("next", "done"), {"num_slices": 20}),
    ("SliceSampler", 120, ("some", "episode"), ("some", "done"), {"slice_len": 4}),
    ("SliceSampler", 101, None, "done", {"slice_len": 101, "strict_length": False}),
    ("PrioritizedSliceSampler", 100, "episode", "done", {"num_slices": 20}),
)
def slices(lib: Any, kind: str, size: int, key: Any, done_key: Any, options: dict[str, Any]) -> Any:
    kept = lib.LazyTensorStorage(100)
    kept.set(range(100), trajectories(key, done_key))
    if kind == "PrioritizedSliceSampler":
        options = {**options, "max_capacity": 100, "alpha": 0.7, "beta": 0.9}
    truncated = "truncated" if isinstance(done_key, str) else (*done_key[:-1], "truncated")
    keys = {} if key is None else {"traj_key": key}
    sampler = getattr(lib, kind)(end_key=done_key, truncated_key=truncated, **keys, **options)
    if kind == "PrioritizedSliceSampler":
        sampler.extend(torch.arange(100))
        sampler.update_priority(torch.arange(100), 1, storage=kept)
    told: list[Any] = [set(), set(), set(), set()]
    for _ in range(40):
        index, info = sampler.sample(kept, batch_size=size)
        batch, ends = kept[index], info[truncated].view(-1)
        inside = ~ends[:-1]
        told[0].add(len(batch))
        told[1] |= {int(number) for number in batch["which"]}
        told[2] |= {bool((batch["steps"].diff() == 1)[inside].all()), bool((batch["which"].diff() == 0)[inside].all())}
        told[3].add(bool(info[done_key].view(-1)[ends].all()))
    return [*told, sorted(str(key) for key in info), list(info[truncated].shape[1:]), type(index).__name__]


@program((2, 2), (True, 1), ((False, True), 2), (3, 1))
def span(lib: Any, given: Any, ndim: int) -> Any:
    """How far slices reach beyond their trajectory."""
    rows = trajectories(None, None, (10,) * 12)
    sampler = lib.SliceSampler(num_slices=10, traj_key="which", span=given)
    buffer = lib.TensorDictReplayBuffer(sampler=sampler, batch_size=50, storage=lib.LazyTensorStorage(120, ndim=ndim))
    buffer.extend(rows if ndim == 1 else rows.reshape(4, 30))
    lengths: set[Any] = set()
    for _ in range(80):
        batch, begin = buffer.sample(), 0
        for stop in batch["next", "truncated"].view(-1).nonzero().flatten().tolist():
            part, begin = batch[begin : stop + 1], stop + 1
            lengths.add((len(part), len(part) < 5 and int(part["steps"][0]) == 0))
    return lengths


# Programs that people run with TorchRL: the calls of their buffers, with random data and no learning


def transitions(*shape: int) -> TensorDict:
    """A collector's batch, with all that its environments put in."""
    flags = {name: torch.zeros(*shape, 1, dtype=torch.bool) for name in ("done", "terminated", "truncated")}
    following = {"observation": torch.randn(*shape, 4), "reward": torch.randn(*shape, 1), **flags}
    steps = torch.arange(shape[-1]).view(-1, 1).expand(*shape, 1).contiguous()
    return TensorDict(
        {
            "observation": torch.randn(*shape, 4),
            "action": torch.randn(*shape, 2),
            **{name: flag.clone() for name, flag in flags.items()},
            "step_count": steps,
            "collector": {"traj_ids": torch.arange(shape[0]).view(-1, *[1] * (len(shape) - 1)).expand(shape).clone()},
            "next": {**following, "step_count": steps + 1, "episode_reward": torch.randn(*shape, 1)},
        },
        shape,
    )


@program()
def leanrl(lib: Any) -> Any:
    """One step of the environments a write, and a batch at once."""
    buffer = lib.ReplayBuffer(storage=lib.LazyTensorStorage(100, device=torch.device("cpu")))
    for _ in range(3):
        flags = {name: torch.zeros(2, dtype=torch.bool) for name in ("terminations", "dones")}
        numbers = {name: torch.randn(2, 4) for name in ("observations", "next_observations")}
        buffer.extend(TensorDict({**numbers, **flags, "rewards": torch.randn(2)}, [2], device="cpu"))
        yield form(buffer.sample(32))


@program()
def dreamer(lib: Any) -> Any:
    """Sequences of pixels from ``[E, T]`` batches: stored as integers, drawn as floats."""

    def without_pixels(data: TensorDict) -> TensorDict:
        return data.exclude("pixels", ("next", "pixels"))

    def to_floats(data: TensorDict) -> TensorDict:
        assert "pixels" not in data.keys()
        for part in (data, data["next"]):
            part["pixels"] = part["pixels_int"].permute(*range(data.ndim), -1, -3, -2).float() / 255
        return data

    with tempfile.TemporaryDirectory() as folder:
        options = {"slice_len": 5, "strict_length": False, "traj_key": ("collector", "traj_ids"), "cache_values": True}
        buffer = lib.TensorDictReplayBuffer(
            pin_memory=False,
            prefetch=3,
            storage=lib.LazyMemmapStorage(200, scratch_dir=folder, device="cpu", ndim=2),
            sampler=lib.SliceSampler(**options),
            batch_size=20,
        )
        buffer.append_transform(without_pixels, invert=True)
        for each in (to_floats, lambda data: data.to("cpu")):
            buffer.append_transform(each)
        for _ in range(2):
            collected = transitions(2, 25)
            for part in (collected, collected["next"]):
                part["pixels_int"] = torch.randint(255, (2, 25, 6, 6, 3), dtype=torch.uint8)
                part["pixels"] = torch.rand(2, 25, 3, 6, 6)
            buffer.extend(collected)
            yield form(buffer.sample().reshape(-1, 5))


@program("RandomSampler", "PrioritizedSampler")
def coding_ddpg(lib: Any, sampler: str) -> Any:
    """Rows are trajectories, of which a transform cuts pieces; at last one priority for a whole one."""

    def crop(data: TensorDict) -> TensorDict:
        start = int(torch.randint(data.shape[1] - 5 + 1, ()))
        return data[:, start : start + 5]

    with tempfile.TemporaryDirectory() as folder:
        storage, drawn = lib.LazyMemmapStorage(50, scratch_dir=folder), SAMPLERS[sampler](lib, 50)
        options = {"batch_size": 8, "sampler": drawn, "pin_memory": False, "prefetch": 3, "transform": crop}
        buffer = lib.TensorDictReplayBuffer(storage=storage, **options)
        for _ in range(3):
            buffer.extend(transitions(4, 20))
            batch = buffer.sample(8)
            yield form(batch)
            buffer.update_tensordict_priority(batch.set("td_error", torch.rand(*batch.shape, 1)))
        batch = buffer.sample(8)
        index = batch.get("index")
        batch.batch_size = [8]
        buffer.update_tensordict_priority(batch.set("td_error", torch.rand(8)).set("index", index))
        yield len(buffer)


@program()
def decision_transformer(lib: Any) -> Any:
    """An offline data set whose storage is exchanged, and an online buffer that is filled from it."""

    def rename(data: TensorDict) -> TensorDict:
        return data.rename_key_("observation", "observation_cat").rename_key_("action", "action_cat")

    parts = {"sampler": lib.RandomSampler(), "writer": lib.RoundRobinWriter(), "prefetch": 4, "batch_size": 6}
    offline = lib.TensorDictReplayBuffer(storage=lib.TensorStorage(transitions(30, 12)), **parts)
    everything = offline[:]
    yield form(everything)
    with everything.unlock_():
        everything["return_to_go"] = everything["next", "reward"].flip(1).cumsum(1).flip(1)
    offline._storage = lib.TensorStorage(everything.exclude("index"))
    offline.append_transform(lambda data: data[:, :5])
    offline.append_transform(rename)
    yield form(offline.sample())
    with tempfile.TemporaryDirectory() as folder:
        storage = lib.LazyMemmapStorage(max_size=40, scratch_dir=folder, device="cpu")
        online = lib.TensorDictReplayBuffer(pin_memory=False, prefetch=3, storage=storage, batch_size=6)
        online.extend(offline[:20].exclude("index").clone().detach().to_tensordict())
        online.append_transform(lambda batch: batch.set("scaled", batch["return_to_go"] * 0.001))
        yield form(online.sample())


@program("ReplayBuffer", "TensorDictReplayBuffer")
def tensorclasses(lib: Any, kind: str) -> Any:
    """One row, prefetched batches, and rows."""
    rows, options = KINDS["tensorclass"](10), {"batch_size": 12, "prefetch": 10}
    buffer, other = (getattr(lib, kind)(storage=lib.LazyMemmapStorage(100), **options) for _ in range(2))
    buffer.add(rows)
    other.extend(rows)
    yield [form(batch) for batch in itertools.islice(buffer, 4)]
    yield form(other.sample())


@program()
def objects(lib: Any) -> Any:
    """In a buffer without a storage of its own, in a list, and with priorities."""
    buffer = lib.ReplayBuffer()
    buffer.extend(range(2000))
    yield len(buffer)
    options = {"storage": lib.ListStorage(1000), "collate_fn": lambda found: found}
    buffer = lib.ReplayBuffer(sampler=lib.PrioritizedSampler(max_capacity=1000, alpha=0.8, beta=1.1), **options)
    index = buffer.extend([1, "foo", None])
    buffer.update_priority(index=index, priority=torch.tensor([0, 1_000, 0.1]))
    found, info = buffer.sample(10, return_info=True)
    yield [len(found), form(dict(info))]


@program()
def priorities_of_a_list(lib: Any) -> Any:
    rows = TensorDict({"a": torch.arange(512).view(128, 4), ("b", "c"): torch.arange(1024).view(128, 8)}, [128])
    sampler = lib.PrioritizedSampler(1000, alpha=0.8, beta=1.1)
    options = {"priority_key": "td_error", "batch_size": 1024}
    buffer = lib.TensorDictReplayBuffer(storage=lib.ListStorage(1000), sampler=sampler, **options)
    buffer.extend(rows.set("td_error", torch.arange(128)))
    batch = buffer.sample()
    yield form(batch)
    buffer.update_tensordict_priority(batch.set("td_error", 128 - batch["index"]))
    yield form(buffer.sample())


@program()
def rollouts(lib: Any) -> Any:
    """Raw pictures are stored, and transformed ones drawn; a row may be a whole rollout."""

    def scaled(data: TensorDict) -> TensorDict:
        for part in (data, data["next"]):
            part["scaled"] = part["pixels"].float() / 255
        return data

    rollout = transitions(10)
    for part in (rollout, rollout["next"]):
        part["pixels"] = torch.randint(255, (10, 4, 4, 3), dtype=torch.uint8)
    for write, n in (("extend", 16), ("add", 1)):
        buffer = lib.TensorDictReplayBuffer(storage=lib.LazyMemmapStorage(1000), transform=scaled, batch_size=16)
        getattr(buffer, write)(rollout)
        yield form(buffer.sample(n))


#: The programs whose facts are kept, for where TorchRL is not installed: one or two of each kind.
KEPT = [
    "story ReplayBuffer LazyTensorStorage tuple PrioritizedSampler 9",
    "story TensorDictReplayBuffer LazyTensorStorage TensorDict PrioritizedSampler 9",
    "story ReplayBuffer ListStorage tensor SamplerWithoutReplacement 5",
    "dimensions TensorDict 2",
    "generations RoundRobinWriter True",
    "transforms",
    "refused",
    *(f"long {name}" for name in STORIES if name != "two_dimensions"),
    "rows_that_are_set",
    "priorities TensorDictReplayBuffer 1",
    "largest_priority True",
    *(f"reduction {kind}" for kind in ("min", "max", "mean", "median")),
    *(f"rows_that_are_trajectories {kind}" for kind in ("uniform", "generations", "prioritized")),
    "epochs 15 9 False",
    "span 2 2",
    "several_steps",
    "leanrl",
    "dreamer",
    "coding_ddpg PrioritizedSampler",
    "decision_transformer",
    "tensorclasses ReplayBuffer",
    "objects",
    "priorities_of_a_list",
    "rollouts",
]


def main() -> None:
    """Record TorchRL's facts and losses: ``.peers/torchrl/bin/python -m tests.contracts.torchrl_programs``."""
    lib = torchrls()
    record = {**{name: run(name, lib) for name in KEPT}, "states of samplers": states_of_samplers(lib)}
    RECORD.write_text(json.dumps(record, separators=(",", ":")) + "\n")
    import torchrl.objectives

    torchrl_losses.record(torchrl.objectives)


if __name__ == "__main__":
    main()
