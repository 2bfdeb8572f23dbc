"""Buffers made of every storage, sampler and writer, and what they do with every kind of rows."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch

from tests.support.torchrl_behaviours.asking import Facts, asked, data_of, form, numbers

SAMPLERS: dict[str, Callable[[Any, int], Any]] = {
    "RandomSampler": lambda lib, size: lib.RandomSampler(),
    "SamplerWithoutReplacement": lambda lib, size: lib.SamplerWithoutReplacement(),
    "PrioritizedSampler": lambda lib, size: lib.PrioritizedSampler(max_capacity=size, alpha=0.8, beta=0.9),
}
SIZES = (3, 100)
WRITERS = ("RoundRobinWriter", "TensorDictMaxValueWriter")
ROWS = [
    ("ReplayBuffer", "ListStorage", "tensor"),
    ("TensorDictReplayBuffer", "ListStorage", "tensordict"),
    *(("ReplayBuffer", "LazyTensorStorage", kind) for kind in ("tensor", "tensordict", "tree")),
    ("ReplayBuffer", "LazyMemmapStorage", "tree"),
    ("TensorDictReplayBuffer", "LazyTensorStorage", "tensordict"),
    ("TensorDictReplayBuffer", "LazyMemmapStorage", "tensordict"),
]


def composed(lib: Any, buffer: str, storage: str, kind: str, sampler: str, writer: str, size: int) -> Facts:
    """A buffer of these parts is written, read and copied."""

    def make() -> Any:
        return getattr(lib, buffer)(
            storage=getattr(lib, storage)(size, compilable=False),
            sampler=SAMPLERS[sampler](lib, size),
            writer=getattr(lib, writer)(compilable=False),
            batch_size=3,
        )

    def written() -> Any:
        made = make()
        made.extend(data_of(kind, 5))
        return made

    def add() -> Any:
        made = make()
        index = made.add(data_of(kind, 1)[0] if kind != "tree" else _row(data_of(kind, 1)))
        drawn = made.sample(1)
        return [int(index), len(made), bool(str(made)), numbers(drawn), drawn_form(drawn)]

    def extend() -> Any:
        made = make()
        index = made.extend(data_of(kind, 5))
        stored = [numbers(row)[0] for row in made.storage] if kind != "tree" else numbers(made[:])
        found = [index.tolist(), len(made), sorted(stored), made.write_count]
        made.extend(data_of(kind, 2 * size + 2))
        return [*found, len(made), made.initialized]

    def sample() -> Any:
        drawn = written().sample()
        return [set(numbers(drawn)) <= set(range(5)), drawn_form(drawn)]

    def index() -> Any:
        made = written()
        at = [numbers(made[2]), numbers(made.storage[2])]
        return [at[0] == at[1], form(made[2]), numbers(made[:]), len(numbers(made[1:3])), made.batch_size]

    def copied() -> Any:
        made = written()
        other = pickle.loads(pickle.dumps(made))
        return [vars(made).keys() == vars(other).keys(), len(other), numbers(other[:])]

    def alone() -> Any:
        kept, own = getattr(lib, storage)(size), getattr(lib, writer)()
        own.register_storage(kept)
        own.extend(data_of(kind, 5))
        return [len(kept), own._cursor]

    def emptied() -> Any:
        made = written()
        made.empty()
        found = [len(made), made.write_count, made.can_sample()]
        made.extend(data_of(kind, 2))
        return [*found, len(made), numbers(made[:])]

    def drawn_form(drawn: Any) -> Any:
        return form(drawn)

    return asked(
        {
            "add": add,
            "extend": extend,
            "sample": sample,
            "index": index,
            "pickle": copied,
            "writer alone": alone,
            "empty": emptied,
        }
    )


def _row(rows: Any) -> Any:
    if isinstance(rows, dict):
        return {key: _row(value) for key, value in rows.items()}
    if isinstance(rows, (tuple, list)):
        return type(rows)(map(_row, rows))
    return rows[0]


def facts(lib: Any) -> dict[str, Facts]:
    """All of them, by the names of the parts."""
    found = {}
    for parts in ROWS:
        for writer in WRITERS:
            for sampler in SAMPLERS:
                for size in SIZES:
                    memmap = parts[1] == "LazyMemmapStorage"
                    if sampler != "RandomSampler" and (memmap or size != 3):
                        continue
                    # The files of a storage take longer than all else.
                    if memmap and (size != 3 or writer != WRITERS[0]):
                        continue
                    torch.manual_seed(0)
                    name = " ".join((*parts, sampler, writer, str(size)))
                    found[name] = composed(lib, *parts, sampler, writer, size)
    return found
