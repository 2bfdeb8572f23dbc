"""docs/migration.md and its two tables say what is so of gpubuf as it is imported here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import gpubuf.data
import gpubuf.objectives
from gpubuf.integrations import torchrl as G
from tests.support import torchrl_stand_in

DOCS = Path(__file__).parents[2] / "docs"
PAGE, NAMES, ARGUMENTS = (DOCS / f"migration{name}.md" for name in ("", "-names", "-arguments"))


def test_every_name_is_on_the_page_with_its_state():
    """Missing are those that can't be imported; of the rest of ``torchrl.data`` names are listed."""
    text, recorded = NAMES.read_text(), torchrl_stand_in.recorded()
    assert [name for name in recorded if f"`{name}`" not in text] == []
    states = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", text, re.MULTILINE))
    assert set(states.values()) <= {"same", "better", "different", "missing"}
    here = {name for module in (gpubuf.data, gpubuf.objectives, G) for name in module.__all__}
    listed = {name for name, entry in recorded.items() if not entry["area"].startswith("other: ")}
    assert states.keys() == listed
    assert [name for name in listed & here if states[name] == "missing"] == []


def test_members_that_are_called_missing_are():
    """Those named in the tables of classes, without arguments of methods and constructors."""
    sections = re.split(r"^## `(\w+)`$", ARGUMENTS.read_text(), flags=re.MULTILINE)[1:]
    here = {**vars(gpubuf.objectives), **vars(gpubuf.data), **{name: getattr(G, name) for name in G.__all__}}
    wrong = []
    for name, table in zip(sections[::2], sections[1::2], strict=True):
        for items in re.findall(r"^\| (.+?) \| missing \|", table, re.MULTILINE):
            wrong += [f"{name}.{item}" for item in re.findall(r"`(\w+)`", items) if hasattr(here[name], item)]
    assert wrong == []


PROBES = [
    "ReplayBuffer(consume_after_n_samples=1)",
    "ReplayBuffer(delayed_init=True)",
    "ReplayBuffer(checkpointer=object())",
]
"""Others are in test_torchrl_messages.py, with what is said of them."""


@pytest.mark.parametrize("call", PROBES)
def test_an_argument_is_accepted_at_its_default_only(call: str):
    with pytest.raises(NotImplementedError):
        eval(call, {each: getattr(G, each) for each in G.__all__})


@pytest.mark.skipif(not torchrl_stand_in.installed(), reason="needs TorchRL")
def test_the_recorded_names_are_torchrls():
    import torchrl.data
    import torchrl.objectives

    recorded = torchrl_stand_in.recorded()
    assert {*torchrl.data.__all__, *torchrl.objectives.__all__} <= recorded.keys()
    for name, entry in recorded.items():
        found = getattr(torchrl.data, name, None)
        assert found is None or [each for each in entry.get("members", ()) if not hasattr(found, each)] == [], name


# The table of differences


def rows(n: int, **keys: torch.Tensor) -> TensorDict:
    return TensorDict({"a": torch.arange(n), **keys}, [n])


def filled(data: Any = None, kind: Any = G.TensorDictReplayBuffer, **parts: Any) -> Any:
    data = rows(4) if data is None else data
    n = data.numel() if isinstance(data, (TensorDict, torch.Tensor)) else len(data)
    buffer = kind(**{"storage": G.LazyTensorStorage(n), "batch_size": 2, **parts})
    buffer.extend(data)
    return buffer


def refuses(kind: type[Exception], call: Any, *arguments: Any) -> bool:
    with pytest.raises(kind):
        call(*arguments)
    return True


def slices(**named: Any) -> Any:
    sampler = G.SliceSampler(slice_len=2, **named)
    return filled(rows(12, episode=torch.arange(12) // 4), sampler=sampler, batch_size=4)


def two_dimensions(**parts: Any) -> Any:
    data = TensorDict({"a": torch.arange(10).view(2, 5)}, [2, 5])
    return filled(data, storage=G.LazyTensorStorage(10, ndim=2), **parts)


def without_a_storage() -> bool:
    kept = filled(storage=None).storage
    small = filled(storage=None, sampler=G.PrioritizedSampler(5, 1.0, 1.0)).storage
    words = filled(["a"], G.ReplayBuffer, storage=None).storage
    return (type(kept), kept.max_size, small.max_size, type(words)) == (G.LazyTensorStorage, 1000, 5, G.ListStorage)


def copies_in_a_list() -> bool:
    data = rows(4)
    buffer = filled(data, storage=G.ListStorage(4))
    data["a"].zero_()
    return bool(buffer[3]["a"] == 3)


def initialized() -> bool:
    buffer = G.ReplayBuffer(storage=G.LazyTensorStorage(4))
    before = buffer.initialized
    buffer.extend(torch.arange(2))
    return (before, buffer.initialized) == (False, True)


def n_steps() -> bool:
    flags = torch.zeros(8, 1, dtype=torch.bool)
    data = TensorDict({"next": {"reward": torch.ones(8, 1), "done": flags}}, [8])
    buffer = filled(data, transform=G.MultiStepTransform(n_steps=3, gamma=0.5), batch_size=64)
    waiting = filled(data, transform=G.MultiStepTransform(n_steps=3, gamma=0.5, write_time=True))
    batch, stored = buffer.sample(), buffer[:]
    assert batch["steps_to_next_obs"].shape == (64, 1)
    assert not {"nonterminal", "gamma"} & set(batch.keys()) | {"original_reward"} & set(batch["next"].keys())
    assert len(waiting) < 8
    assert set(waiting[:]["next", "reward"].reshape(-1).tolist()) == {1.75}
    return len(buffer) == 8 and bool((stored["next", "reward"] == 1).all()) and "steps_to_next_obs" not in stored.keys()


def generations() -> bool:
    buffer = filled(rows(2), storage=G.LazyTensorStorage(4))
    first = buffer.writer.generations_of([0, 1, 2]).tolist()
    buffer.extend(rows(4))
    return (first, buffer.writer.generations_of([0, 1, 2]).tolist()) == ([1, 1, -1], [2, 2, 1])


def prioritized(**named: Any) -> Any:
    return filled(kind=G.TensorDictPrioritizedReplayBuffer, alpha=1.0, beta=1.0, **named)


def new_rows() -> bool:
    buffer = prioritized()
    buffer.update_priority(torch.arange(4), 0.5)
    return float(buffer.sampler.default_priority) == 0.5


def update_without_tracking() -> bool:
    buffer = filled()
    handle = {"index": torch.arange(4), "generation": buffer.writer.generations_of(torch.arange(4))}
    buffer.update_if_present(**handle, data=TensorDict({"a": torch.zeros(4, dtype=torch.int64)}, [4]))
    return not buffer[:]["a"].any()


def ahead() -> bool:
    seen = list[Any]()
    buffer = filled(
        torch.arange(64), G.ReplayBuffer, prefetch=2, batch_size=8, transform=lambda x: (seen.append(x), x)[1]
    )
    buffer.sample()
    return len(seen) == 1 and buffer.stats()["prefetch_queue_size"] == 0


def from_a_generator() -> bool:
    buffers = [filled(torch.arange(64), G.ReplayBuffer) for _ in range(2)]
    for buffer in buffers:
        buffer.set_rng(torch.Generator().manual_seed(1))
    return not hasattr(buffers[0], "_rng") and torch.equal(buffers[0].sample(), buffers[1].sample())


#: The tasks of the table, and whether gpubuf does what their rows say.
CHECKS = {
    "Buffer without a storage": without_a_storage,
    "First write": lambda: (
        all(
            refuses(ValueError, filled(rows(2, b=torch.ones(2))).extend, other)
            for other in (rows(2), rows(2, b=torch.ones(2, 1)), rows(2, b=torch.ones(2), c=torch.ones(2, 1))[:, None])
        )
        and filled(rows(2, b=torch.ones(2))).extend(rows(2, b=torch.ones(2), c=torch.ones(2))).tolist() == [0, 1]
    ),
    "Empty write": lambda: filled().extend(rows(0)).shape == (0,),
    "Batch with more rows than the capacity": lambda: filled().extend(rows(6)).tolist() == [-1, -1, 2, 3, 0, 1],
    "`ListStorage`: the batch is changed after `extend`": copies_in_a_list,
    "`ListStorage`: `sample()` of ints or strings": lambda: (
        filled(["a", "a"], G.ReplayBuffer, storage=G.ListStorage(4)).sample() == ["a", "a"]
    ),
    "`buffer.initialized`": initialized,
    '`info["index"]` with `ndim=2`': lambda: two_dimensions().sample(return_info=True)[1]["index"].shape == (2, 2),
    "`buffer[tensor]` with `ndim=2`": lambda: two_dimensions()[torch.tensor([[3, 1]])]["a"].tolist() == [8],
    '`"index"` of slices': lambda: slices().sample()["index"].shape == (4,),
    "`SliceSampler(pad_output=True)`": lambda: (
        ("collector", "mask") in slices(strict_length=False, pad_output=True).sample().keys(True)
    ),
    "`SliceSamplerWithoutReplacement`": lambda: (
        issubclass(G.SliceSamplerWithoutReplacement, G.SliceSampler)
        and not issubclass(G.SliceSamplerWithoutReplacement, G.SamplerWithoutReplacement)
    ),
    "`SamplerWithoutReplacement(drop_last=True)` without `batch_size`": lambda: (
        len(filled(sampler=G.SamplerWithoutReplacement(drop_last=True), batch_size=None).sample(3)) == 3
    ),
    "`MultiStepTransform(n_steps=n)`": n_steps,
    "Generations of rows": generations,
    "Samples with priorities": lambda: (
        {"index", "priority_weight", "index_generation"} < set(prioritized().sample().keys())
    ),
    "`update_tensordict_priority` of a batch without priorities": lambda: (
        lambda made: refuses(KeyError, made.update_tensordict_priority, made.sample())
    )(prioritized()),
    "Priority of new rows": new_rows,
    "NaN, infinite or negative priority": lambda: all(
        refuses(ValueError, prioritized().update_priority, torch.arange(4), value)
        for value in (float("nan"), float("inf"), -1.0)
    ),
    "`update_if_present`": update_without_tracking,
    "`TensorDictMaxValueWriter`": lambda: (
        "index" in filled(writer=G.TensorDictMaxValueWriter("a"), kind=G.ReplayBuffer)[:].keys()
    ),
    "`generator=`": from_a_generator,
    "`state_dict()`": lambda: not {"_rng", "_prefetch_state"} & set(filled().state_dict()),
    "`prefetch=n`": ahead,
    "`dumps(path)`": lambda: G.ReplayBuffer.dumps.__annotations__["return"] not in (None, "None"),
}


@pytest.mark.parametrize("task", CHECKS)
def test_the_table_of_differences_is_true(task: str):
    assert CHECKS[task]() is True


def test_every_difference_is_checked():
    introduction = PAGE.read_text().partition("## Every name")[0]
    table = re.findall(r"^\| (.+?) \| .+ \| .+ \| .*\|$", introduction, re.MULTILINE)
    assert table == ["task", "---", *CHECKS]
