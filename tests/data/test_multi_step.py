"""MultiStepTransform, with TorchRL's name and arguments: made when a batch is drawn, or when rows are written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from gpubuf import (
    LazyTensorStorage,
    MultiStepTransform,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from tests.support.n_step_model import Model, agents_rows, new

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("given", ["to the constructor", "by a factory", "appended"])
def test_a_buffer_takes_it_for_n_steps(given):
    """Rows are stored as they are, and every one of them can be drawn."""
    transform = MultiStepTransform(3, 0.9)
    options = {"to the constructor": {"transform": transform}, "by a factory": {"transform_factory": lambda: transform}}
    buffer, model = new(12, sampler="without replacement", batch_size=12, **options.get(given, {})), Model(12)
    if given == "appended":
        buffer.extend(model.write(3))
        buffer.append_transform(transform)
    buffer.extend(model.write(20))
    batch = buffer.sample()
    model.check(batch, 3, 0.9)
    assert sorted(batch["observation"][:, 0].tolist()) == model.stored()
    assert len(buffer.transform) == 0
    assert buffer.sampler.reader.recipe.n_steps == 3
    assert "steps_to_next_obs" not in buffer[:].keys()


def test_with_other_transforms():
    """Those see batches as they are drawn."""
    buffer, model = new(12, transform=lambda data: data.set("k", data["steps_to_next_obs"] * 10)), Model(12)
    buffer.append_transform(MultiStepTransform(2, 0.5))
    buffer.extend(model.write(20))
    batch = buffer.sample()
    model.check(batch, 2, 0.5)
    assert torch.equal(batch["k"], batch["steps_to_next_obs"] * 10)


def test_keys_as_torchrl_names_them():
    """Without "next"; with it they mean the same."""
    rows = agents_rows(8)
    rows["next", "gain"] = rows["next", "reward"] * 2
    rows["next", "stop"] = rows["next", "done"].clone()
    rows["next", "stop"][3] = True
    for named in (
        {"reward_keys": ["gain"], "done_key": "stop"},
        {"reward_keys": [("next", "gain")], "done_keys": ["done", ("next", "stop")]},
    ):
        buffer = ReplayBuffer(
            storage=LazyTensorStorage(8),
            sampler=SamplerWithoutReplacement(shuffle=False),
            transform=MultiStepTransform(2, 1.0, **named),
        )
        buffer.extend(rows)
        batch = buffer.sample(8)
        assert batch["steps_to_next_obs"].flatten().tolist() == [2, 2, 2, 1, 2, 2, 2, 1]
        assert batch["next", "gain"].flatten().tolist() == [2, 6, 10, 6, 18, 22, 26, 14]
        assert batch["next", "reward"].flatten().tolist() == [1, 2, 3, 3, 5, 6, 7, 7]


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: MultiStepTransform(0, 0.9), ValueError, "n_steps must be in"),
        (lambda: MultiStepTransform(3, 1.1), ValueError, "gamma must be in"),
        (lambda: MultiStepTransform(3, 0.9, mask_key="valid"), NotImplementedError, "mask_key='valid'"),
        (lambda: ReplayBuffer(n_steps=2, transform=MultiStepTransform(3, 0.9)), TypeError, "either n_steps or"),
        (
            lambda: ReplayBuffer(transform=MultiStepTransform(3, 0.9)).append_transform(MultiStepTransform(3, 0.9)),
            TypeError,
            "n_steps is 3 already",
        ),
    ],
)
def test_what_makes_no_sense(make, error, text):
    with pytest.raises(error, match=text):
        make()


# When rows are written


@pytest.mark.parametrize("envs", [None, 3])
@pytest.mark.parametrize("n_steps", [1, 2, 4])
def test_rows_are_changed_before_they_are_stored(n_steps, envs):
    """A row is stored once those behind it have come; flags are those of its last step."""
    transform = MultiStepTransform(n_steps, 0.9, write_time=True)
    buffer, model = new(50, envs, transform=transform), Model(1000, envs, seed=2)
    written = 0
    for n in (1, 1, 1, 5, 2, 30):
        rows = model.write(n)
        before = rows.clone()
        index = buffer.extend(rows)
        assert (rows == before).all()
        stored = max(model.written - n_steps + 1, 0)
        assert len(index) == (stored - written) * (envs or 1)
        written = stored
    model.check(buffer[:].exclude("index"), n_steps, 0.9)
    assert len(buffer) == written * (envs or 1)
    assert buffer.sample()["steps_to_next_obs"].shape == (24, 1)


def test_what_lies_behind_an_end_does_not_count():
    """Not even if it is NaN."""
    rows = agents_rows(4)
    rows["next", "done"][1] = True
    rows["next", "reward"][2] = float("nan")
    out = MultiStepTransform(3, 0.5, write_time=True).inv(rows)
    assert out["next", "reward"].flatten().tolist() == [0.5, 1]


def test_rows_that_wait_are_part_of_the_state(tmp_path):
    """As of any other state of the buffer: saved, and restored."""

    def made():
        return new(50, transform=MultiStepTransform(4, 0.9, write_time=True))

    first, model = made(), Model(1000)
    first.extend(model.write(10))
    first.save(tmp_path / "c")
    rows = model.write(6)
    first.extend(rows)
    second, third = made(), made()
    second.load(tmp_path / "c")
    third.extend(Model(1000, seed=9).write(30))
    third.load(tmp_path / "c")
    for buffer in (second, third):
        buffer.extend(rows)
        assert (buffer[:] == first[:]).all()
    model.check(second[:].exclude("index"), 4, 0.9)


def dotted_rows(n):
    rows = TensorDict(
        {"observation.state": torch.rand(n, 3), "a": {"b": {"c": torch.rand(n)}}, "a.b": torch.rand(n)}, [n]
    )
    done = torch.zeros(n, 1, dtype=torch.bool)
    return rows.set(
        "next", TensorDict({"observation.state": torch.rand(n, 3), "reward": torch.rand(n, 1), "done": done}, [n])
    )


def dotted():
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(50), transform=MultiStepTransform(3, 0.9, write_time=True), batch_size=4
    )


def test_keys_with_dots_wait_under_their_own_names(tmp_path):
    """LeRobot's "observation.state" comes back from a checkpoint as one name, beside nested keys."""
    first, rows = dotted(), dotted_rows(5)
    first.extend(dotted_rows(10))
    first.save(tmp_path / "c")
    second = dotted()
    second.load(tmp_path / "c")
    for buffer in (first, second):
        buffer.extend(rows)
    assert len(second) == 13
    assert (second[:] == first[:]).all()


@pytest.mark.parametrize(
    "state", [3, {"waiting": 3}, {"rows": [], "shape": [2]}, {"rows": {"a": 1}, "shape": [2]}, {"x": 1}]
)
def test_states_of_something_else(state):
    transform = MultiStepTransform(3, 0.9, write_time=True)
    transform.inv(agents_rows(8))
    with pytest.raises(ValueError, match="rows that wait"):
        transform.set_extra_state(state)
    assert transform._waiting.batch_size == (2,)


def test_keys_that_are_missing():
    with pytest.raises(KeyError, match="is stored: give end_keys"):
        MultiStepTransform(2, 0.9, write_time=True).inv(agents_rows(4).exclude(("next", "done")))
