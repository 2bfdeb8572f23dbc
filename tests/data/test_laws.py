"""Laws of drawing: how often each row is drawn, by every backend, with windows, and as they change."""

from __future__ import annotations

import math

import pytest
import torch

from gpubuf.data import (
    Balanced,
    EmphasizeRecent,
    Geometric,
    LazyTensorStorage,
    Linear,
    Newest,
    RandomSampler,
    TensorDictReplayBuffer,
)
from gpubuf.data.storage.windows import Window
from tests.support.drawable_rows import windowed
from tests.support.slice_model import SliceModel
from tests.support.sum_tree_checks import chi_square_bound


def emphasized(progress):
    law = EmphasizeRecent(0.999, least=4)
    law.progress = progress
    return law


def newest(n, count):
    return [float(rank < count) for rank in range(n)]


#: Each law, and the parts of ``n`` rows, the newest first.
LAWS = {
    "geometric": (lambda: Geometric(0.9), lambda n: [0.9**rank for rank in range(n)]),
    "nearly uniform": (lambda: Geometric(1 - 1e-12), lambda n: [1.0] * n),
    "steep": (lambda: Geometric(1e-3), lambda n: [1e-3**rank for rank in range(n)]),
    "linear": (Linear, lambda n: [n - rank for rank in range(n)]),
    "newest": (lambda: Newest(5), lambda n: newest(n, 5)),
    "more than there are": (lambda: Newest(10**9), lambda n: [1.0] * n),
    "all are emphasized": (lambda: emphasized(0.0), lambda n: [1.0] * n),
    "half of the way": (lambda: emphasized(0.5), lambda n: newest(n, max(int(0.999**500 * n), 4))),
    "emphasis at its end": (lambda: emphasized(1.0), lambda n: newest(n, max(int(0.999**1000 * n), 4))),
}


def due(model, parts, past=0):
    """The probability of each row that may be drawn, by its number."""
    lost = model.written > model.steps
    steps = list(zip(*model.rows, strict=True))[min(past, model.steps - 1) if lost else 0 :]
    newest_first = [row.position for step in reversed(steps) for row in reversed(step)]
    found = parts(len(newest_first))
    total = math.fsum(found)
    return {position: part / total for position, part in zip(newest_first, found, strict=True) if part}


def assert_as_often(positions, due):
    drawn = torch.bincount(positions, minlength=max(due) + 1).tolist()
    assert {position for position, count in enumerate(drawn) if count} <= due.keys()
    n = positions.numel()
    some = {position: share * n for position, share in due.items() if share * n >= 5}
    rest = n - sum(some.values())
    statistic = sum((drawn[position] - count) ** 2 / count for position, count in some.items())
    if rest >= 5:
        statistic += (n - sum(drawn[position] for position in some) - rest) ** 2 / rest
    assert statistic < chi_square_bound(len(some))


@pytest.mark.parametrize("windows", [None, Window(-2, 0), {"number": Window(-1, 1, outside="cross")}])
@pytest.mark.parametrize("envs", [1, 3])
@pytest.mark.parametrize("name", LAWS)
def test_rows_are_drawn_as_often_as_the_law_says(name, envs, windows):
    """Of a ring with room, a full one, and one that has lost rows; the positions alone are drawn alike."""
    law, parts = LAWS[name]
    model = SliceModel(20, envs)
    buffer = windowed(RandomSampler(law=law()), model, windows)
    buffer.set_rng(torch.Generator().manual_seed(1))
    past = buffer.parts.recipe.past
    for steps in (1, 11, 8, 7):
        buffer.extend(model.write([[step % 4 == 3] * envs for step in range(steps)]))
        state = buffer.sampler.random_state("cpu").state_dict()
        index = buffer.sample(4000)["index"]
        positions = index if envs == 1 else index[:, 0] * envs + index[:, 1]
        assert_as_often(positions, due(model, parts, past))
        buffer.sampler.random_state("cpu").load_state_dict(state)
        assert torch.equal(buffer.sampler.choose(4000)[0], positions)


@pytest.mark.parametrize("options", [{}, {"n_steps": 3}, {"windows": Window(-2, 0)}], ids=str)
@pytest.mark.parametrize(
    "tasks",
    [["reach", "push", "reach", "reach", "open"], torch.tensor([7, 7, 7, 7, 7]), [2, 1, 2, 1, 0], range(5)],
    ids=str,
)
def test_tasks_are_drawn_equally_often(tasks, options):
    """A task, then a row of it, both uniformly: of a ring with room, a full one, and one that has lost rows."""
    labels, model = (
        torch.as_tensor(tasks).tolist() if isinstance(tasks, torch.Tensor) else list(tasks),
        SliceModel(9, 5),
    )
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(45, ndim=2),
        sampler=RandomSampler(law=Balanced(tasks)),
        reward_keys=["reward"],
        **options,
    )
    buffer.set_rng(torch.Generator().manual_seed(1))
    for steps in (1, 5, 3, 4):
        rows = model.write([[False] * 5 for _ in range(steps)])
        rows["reward"] = torch.rand(5, steps, 1)
        buffer.extend(rows)
        left_out = 2 if "windows" in options and model.written > 9 else 0
        share = 1 / len(set(labels)) / (len(model.rows[0]) - left_out)
        due = {
            row.position: share / labels.count(labels[env])
            for env, of_env in enumerate(model.rows)
            for row in of_env[left_out:]
        }
        assert math.fsum(due.values()) == pytest.approx(1)
        state = buffer.sampler.random_state("cpu").state_dict()
        index = buffer.sample(20_000)["index"]
        positions = index[:, 0] * 5 + index[:, 1]
        assert_as_often(positions, due)
        buffer.sampler.random_state("cpu").load_state_dict(state)
        assert torch.equal(buffer.sampler.choose(20_000)[0], positions)


def test_tasks_are_those_of_all_environments():
    with pytest.raises(ValueError, match="tasks are those of the environments, of which there is at least one"):
        Balanced([])
    model = SliceModel(10, 3)
    buffer = windowed(RandomSampler(law=Balanced("aab")), model, None)
    buffer.extend(model.write([[False] * 3] * 2))
    assert buffer.sample(8).shape == (8,)
    buffer.sampler.law = Balanced("aabb")
    with pytest.raises(ValueError, match=r"Balanced\(2 tasks of 4 environments\) can't draw rows of 3 environments"):
        buffer.sample(8)


@pytest.mark.parametrize("value", [0.5, torch.tensor(0.5), torch.tensor([0.5], dtype=torch.float64)])
def test_progress_is_set_in_place(value):
    """A captured step finds it where it was."""
    law = EmphasizeRecent(0.99, least=2)
    numbers = law.numbers
    assert law.progress == 0
    law.progress = value
    assert law.progress.item() == pytest.approx(0.5)
    assert law.numbers is numbers
    without = EmphasizeRecent(1.0)
    without.progress = value
    assert without.progress == 0


def test_one_law_serves_several_buffers():
    """Of plain rows, and of rows with windows."""
    law, model = Newest(2), SliceModel(10, 1)
    buffers = [windowed(RandomSampler(law=law), model, windows) for windows in (None, Window(-1, 0))]
    rows = model.write([[False]] * 13)
    for buffer in buffers:
        buffer.extend(rows)
    for buffer in buffers * 2:
        assert set(buffer.sample(50)["index"].tolist()) == {1, 2}


@pytest.mark.parametrize("count", [0, 2.5, float("nan")])
def test_the_newest_are_a_whole_number_of_rows(count):
    with pytest.raises(ValueError, match="count must be a whole number of at least 1"):
        Newest(count)


def test_a_law_is_one():
    with pytest.raises(TypeError, match=r"expected a Law .*got str"):
        RandomSampler(law="linear")


def test_laws_and_epochs_or_ranks_exclude_each_other():
    with pytest.raises(TypeError, match="law"):
        RandomSampler(law=Linear(), replacement=False)
    with pytest.raises(ValueError, match="law and process_group exclude each other"):
        RandomSampler(law=Linear(), process_group=object())
    assert repr(RandomSampler(law=Geometric(0.5))) == "RandomSampler(law=Geometric(0.5))"
    assert repr(RandomSampler()) == "RandomSampler()"
