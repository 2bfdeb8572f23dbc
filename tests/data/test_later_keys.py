"""Keys that come after the first write: a column from then on, where the storage can add one."""

from __future__ import annotations

import itertools

import pytest
import torch
from tensordict import TensorDict

from gpubuf import capture
from gpubuf.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    Normalize,
    PrioritizedSampler,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
    Window,
)
from gpubuf.data.recording import CaptureError
from tests.support.graph_recorder import RecordedCuda
from tests.support.interrupts import interrupted


def steps(first: int, last: int, **later: float) -> TensorDict:
    """Rows of two environments ``[2, T]``, of episodes of 5 steps. ``later``: what is added to their numbers."""
    number = torch.arange(first, last).float().expand(2, -1).clone()
    done = (number % 5 == 4).unsqueeze(-1)
    rows = TensorDict({"next": {"done": done, "reward": number.unsqueeze(-1)}, "number": number}, number.shape)
    for name, value in later.items():
        rows[name] = {"value": number + value} if name == "nested" else (number + value).unsqueeze(-1)
    return rows


LATE = {
    "uniform": dict,
    "prioritized": lambda: {"sampler": PrioritizedSampler(24, 0.7, 0.5)},
    "slices": lambda: {"sampler": SliceSampler(slice_len=2)},
    "without replacement": lambda: {"sampler": SamplerWithoutReplacement()},
    "n-step": lambda: {"n_steps": 3},
    "windows": lambda: {"windows": {"number": Window(-1, 2, mask="is_pad")}},
    "normalized": lambda: {"process": [Normalize("number")], "transform": torch.nn.Identity()},
}


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("kind", LATE)
def test_a_key_that_comes_later_is_a_column(kind, ndim, tmp_path):
    """Issue 45, B15: rows of before have zeros there, and all that is known of them stays."""
    late, plain, restored = (
        TensorDictReplayBuffer(storage=LazyTensorStorage(24, ndim=ndim), batch_size=8, **LATE[kind]()) for _ in range(3)
    )
    for buffer in (late, plain):
        buffer.set_rng(torch.Generator().manual_seed(3))
        # Three times: writes of this size are prepared.
        for first in range(0, 6, 2):
            buffer.extend(steps(first, first + 2) if ndim == 2 else steps(first, first + 2)[0])
        batch = buffer.sample()
        if kind == "prioritized":
            buffer.update_priority(batch["index"], torch.arange(8.0) + 1)
    given = steps(6, 9, value_target=0.5, nested=1)
    late.extend(given if ndim == 2 else given[0])
    plain.extend(steps(6, 9) if ndim == 2 else steps(6, 9)[0])
    columns = steps(9, 11, value_target=0.5, nested=1, final=7)
    late.extend_columns(dict((columns if ndim == 2 else columns[0]).items(True, True)))
    plain.extend(steps(9, 11) if ndim == 2 else steps(9, 11)[0])
    rows = late[:]
    assert torch.equal(rows["value_target"][..., 0], torch.where(rows["number"] < 6, 0, rows["number"] + 0.5))
    assert torch.equal(rows["nested", "value"], torch.where(rows["number"] < 6, 0, rows["number"] + 1))
    assert torch.equal(rows["final"][..., 0], torch.where(rows["number"] < 9, 0, rows["number"] + 7))
    more = ["value_target", "nested", "final"]
    assert (rows.exclude(*more) == plain[:]).all()
    for _ in range(4):
        batch = late.sample()
        assert set(more) < set(batch.keys())
        assert (batch.exclude(*more) == plain.sample()).all()
    late.save(tmp_path)
    restored.load(tmp_path, end_trajectories=False)
    assert (restored[:] == rows).all()
    assert (restored.sample() == late.sample()).all()
    with pytest.raises(ValueError, match="missing"):
        late.extend(steps(11, 13) if ndim == 2 else steps(11, 13)[0])
    assert late.write_count == 11 * ndim


@pytest.mark.parametrize(
    ("storage", "options"),
    [
        (lambda: LazyMemmapStorage(8), {}),
        (lambda: LazyTensorStorage(8, dtypes={"number": torch.float64}), {}),
        (lambda: LazyTensorStorage(8), {"writers": 1}),
        (lambda: LazyTensorStorage(8), {"n_steps": 2}),
    ],
)
def test_a_key_that_can_be_no_column_is_refused(storage, options):
    """Issue 45, B15: where there is no memory for more columns, or others would tell where trajectories end."""
    buffer = TensorDictReplayBuffer(storage=storage(), batch_size=4, **options)
    buffer.extend(steps(0, 4)[0])
    late = steps(4, 6, value_target=1)[0]
    if "n_steps" in options:
        late = steps(4, 6)[0].set("steps_to_next_obs", torch.ones(2, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"give that a placeholder for what comes later, or empty|n_steps=2 get a key"):
        buffer.extend(late)
    for key in (("next", "value"), "priority_weight"):
        with pytest.raises(ValueError, match="extra"):
            buffer.extend(steps(4, 6)[0].set(key, torch.ones(2)))
    assert len(buffer) == buffer.write_count == 4


def test_an_interrupted_column_is_none():
    """Until it is there, rows are as they were."""
    for stop in itertools.count(0, 5):
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=4, n_steps=2)
        buffer.extend(steps(0, 4)[0])
        more = interrupted(lambda buffer=buffer: buffer.extend(steps(4, 6, late=1)[0]), stop)
        n = len(buffer)
        assert n in (4, 6)
        assert buffer[:]["number"].tolist() == list(range(n))
        assert buffer.sample().shape == (4,)
        buffer.extend(steps(n, n + 1, late=1)[0])
        assert buffer[:]["late"][:, 0].tolist() == [0] * 4 + [float(number + 1) for number in range(4, n + 1)]
        if more is None:
            break


def test_a_step_that_was_captured_before_has_to_be_captured_anew(monkeypatch):
    """It would leave the new column as it is in the rows that it writes."""
    machine = RecordedCuda().install(monkeypatch)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=4)
    buffer.extend(steps(0, 4)[0])
    machine.memory = buffer.storage.columns.parts
    run = capture(lambda rows: buffer.extend(rows), warmup=1)
    for _ in range(2):
        run(steps(4, 6)[0])
    assert run.captured
    buffer.extend(steps(6, 8, late=1)[0])
    with pytest.raises(CaptureError, match="call reset"):
        run(steps(8, 10)[0])
    run.reset()
    run(steps(8, 10, late=1)[0])
    assert len(buffer) == 8
    assert buffer[:]["late"].count_nonzero() == 4


@pytest.mark.parametrize("what", ["a key is missing", "another shape", "other environments", "no priority"])
def test_what_can_be_no_row_changes_nothing(what):
    """A key is no column beside what is refused."""
    sampler = PrioritizedSampler(8, 0.7, 0.5)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8, ndim=2), sampler=sampler, batch_size=4)
    buffer.extend(steps(0, 2, td_error=1))
    wrong = steps(4, 6, td_error=1, late=1)
    if what == "a key is missing":
        wrong = wrong.exclude("number")
    elif what == "another shape":
        wrong["number"] = torch.ones(2, 2, 3)
    elif what == "other environments":
        wrong = wrong[:1]
    else:
        wrong["td_error"] = torch.full((2, 2, 1), float("nan"))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"missing|rows of shape|must agree|priorit"):
            buffer.extend(wrong)
    assert set(buffer[:].keys()) == {"next", "number", "td_error", "index"}
    buffer.extend(steps(2, 4, td_error=1))
    assert buffer[:]["number"].tolist() == steps(0, 4)["number"].tolist()
    assert buffer.write_count == 8


@pytest.mark.parametrize(("key", "options"), [("is_init", {}), ("terminated", {"truncated_key": "truncated"})])
def test_flags_of_slices_that_come_later(key, options):
    """Slices have them as if they had been stored from the beginning."""
    buffers = []
    for first in (True, False):
        sampler = SliceSampler(slice_len=4, **options)
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(64), sampler=sampler)
        buffer.set_rng(torch.Generator().manual_seed(0))
        for number in range(3):
            done = torch.arange(20)[:, None] == 19
            rows = TensorDict({"observation": torch.zeros(20, 3), "next": {"done": done}}, [20])
            if first or number:
                rows[key] = torch.full((20, 1), number > 0)
            buffer.extend(rows)
            if number == 0:
                buffer.sample(16)
        buffers.append(buffer)
    due, found = (buffer.sample(64)[key] for buffer in buffers)
    assert torch.equal(found, due)
    assert found.any()
