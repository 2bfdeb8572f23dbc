"""Rows whose windows reach what was overwritten, or must be whole, are not drawn: against plain Python."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from gpubuf.data import (
    Newest,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from gpubuf.data.storage.windows import Window
from tests.contracts.samplers import split
from tests.support.drawable_rows import counted, drawable, not_the_oldest, set_windows, windowed
from tests.support.slice_model import SliceModel
from tests.support.sum_tree_checks import assert_consistent, bits_of

WINDOWS = {
    "past": Window(-3, 0),
    "far past": Window(-40, 2),
    "whole": Window(-2, 1, outside="skip"),
    "whole after": Window(0, 3, outside="skip"),
    "both": {"number": Window(-4, 0), "is_init": Window(-1, 1, outside="skip")},
    "across": Window(-3, 0, outside="cross"),
}


class History:
    """Random writes, priorities and other events of a buffer, and of its model."""

    def __init__(self, windows, envs, sampler, *, steps=13, seed=0):
        self.random = random.Random(seed)
        self.model = SliceModel(steps, envs)
        self.buffer = windowed(sampler(steps * envs), self.model, windows)
        # The trajectory of every row since all were forgotten, also of those that were overwritten.
        self.episodes = {}

    @property
    def recipe(self):
        return self.buffer.parts.recipe

    def write(self):
        n = self.random.choice([1, 1, 2, 3, self.model.steps, self.model.steps + 3])
        batch = self.model.write([[self.random.random() < 0.2 for _ in range(self.model.envs)] for _ in range(n)])
        numbers, episodes = (batch[key].flatten().tolist() for key in ("number", "trajectory"))
        self.episodes.update(zip(numbers, episodes, strict=True))
        self.buffer.extend(batch)

    def prioritize(self):
        rows = self.random.sample(self.rows(), min(4, len(self.rows())))
        given = [self.random.choice([0.0, 0.5, 1.0, 3.0]) for _ in rows]
        index = torch.tensor([row.position for row in rows], dtype=torch.int64)
        if self.model.envs > 1:
            index = torch.stack([index // self.model.envs, index % self.model.envs], -1)
        self.buffer.update_priority(index, torch.tensor(given))

    def rows(self):
        return [row for rows in self.model.rows for row in rows]

    def end(self):
        self.buffer.end_trajectories()
        for rows in self.model.rows:
            if rows:
                rows[-1].done = True
        self.model.current = [self.model.new_episode() for _ in self.model.current]

    def empty(self):
        self.buffer.empty()
        self.model.empty()
        self.episodes.clear()

    def reload(self):
        self.buffer.load_state_dict(copy.deepcopy(self.buffer.state_dict()))
        if self.model.rows[0]:
            # The next row begins a trajectory.
            self.end()

    def mark(self):
        rows = self.random.sample(self.rows(), min(2, len(self.rows())))
        self.buffer.sampler.mark_update(torch.tensor([row.position for row in rows], dtype=torch.int64))

    def counted(self):
        """A model of what counts of trajectories."""
        part = copy.copy(self.model)
        part.trajectories = lambda: [t for t in counted(self.model, self.recipe.past) if t]
        return part

    def happens(self):
        events = [self.write] * 8 + [self.prioritize] * 3 + [self.end, self.mark, self.reload, self.empty]
        event = self.random.choice(events if self.rows() else [self.write])
        event()

    def drawn(self, batch):
        """The numbers of the rows that a batch stands for."""
        number, index = {row.position: row.number for row in self.rows()}, batch["index"]
        flat = index if self.model.envs == 1 else index[:, 0] * self.model.envs + index[:, 1]
        return [number[position] for position in flat.tolist()]

    def assert_tree(self):
        """Exactly the rows that may be drawn are eligible, and drawn in proportion to their priorities."""
        sampler, may = self.buffer.sampler, drawable(self.model, self.recipe)
        tree = sampler.tree
        assert_consistent(tree)
        capacity = self.model.steps * self.model.envs
        eligible = {row for row, bit in enumerate(bits_of(tree.eligible, capacity)) if bit}
        assert eligible == {row.position for row in may}
        weight = {row.number: tree.leaves[row.position].item() for row in may}
        positive = {number for number, q in weight.items() if q > 0}
        assert self.buffer.can_sample(8) == bool(positive)
        if not positive:
            if self.rows():
                with pytest.raises(RuntimeError, match=r"no row can be drawn: windows need .* steps before it"):
                    self.buffer.sample(8)
            return
        batch = self.buffer.sample(8)
        drawn = self.drawn(batch)
        assert set(drawn) <= positive
        least = min(weight[number] for number in positive)
        due = [(weight[number] / least) ** -1.0 for number in drawn]
        assert batch["priority_weight"].tolist() == pytest.approx(due)


def prioritized(capacity):
    return PrioritizedSampler(capacity, alpha=1.0, beta=1.0, eps=0.0)


@pytest.mark.parametrize("envs", [1, 3])
@pytest.mark.parametrize("name", WINDOWS)
def test_priorities_choose_among_rows_that_may_be_drawn(name, envs):
    """After each of many events: the set of rows, their weights, and the weights of importance."""
    history = History(WINDOWS[name], envs, prioritized, seed=len(name))
    for _ in range(60):
        history.happens()
        history.assert_tree()
    others = dict(WINDOWS)
    for windows in (others.pop(name), *list(others.values())[:3]):
        set_windows(history.buffer, windows)
        history.write()
        history.assert_tree()
    set_windows(history.buffer, ())
    assert history.buffer.sampler.tree.eligible is None
    assert history.buffer.sampler._eligible is None
    assert_consistent(history.buffer.sampler.tree)


DRAWS = {
    "uniform": lambda n: RandomSampler(),
    "by a law": lambda n: RandomSampler(law=Newest(10**9)),
    "prioritized": prioritized,
    "slices": lambda n: SliceSampler(slice_len=2, strict_length=False, pad_output=True),
    "slices by transition": lambda n: SliceSampler(slice_len=2, weighting="transition"),
    "slices by priority": lambda n: PrioritizedSliceSampler(n, 1.0, 1.0, 0.0, slice_len=2),
}


@pytest.mark.parametrize("envs", [1, 3])
@pytest.mark.parametrize("outside", ["repeat", "zero", "cross", "skip"])
@pytest.mark.parametrize("draws", DRAWS)
def test_no_drawn_window_reaches_overwritten_steps(draws, outside, envs):
    """CASES 79: a slot is padded where nothing was ever written, or beyond a trajectory's end, and nowhere else."""
    if outside == "skip" and draws not in ("uniform", "prioritized"):
        pytest.skip("refused")
    windows = {"number": Window(-4, 0, outside=outside, mask="is_pad")}
    history, padded = History(windows, envs, DRAWS[draws], seed=5), set()
    history.prioritize = history.mark = lambda: None
    for _ in range(80):
        history.happens()
        if not history.buffer.can_sample(32):
            continue
        batch, episodes = history.buffer.sample(32), history.episodes
        for window, pad in zip(batch["number"].tolist(), batch["is_pad"].tolist(), strict=True):
            wanted = [window[-1] - back * envs for back in range(4, -1, -1)]
            inside = [
                row in episodes and (outside == "cross" or episodes[row] == episodes[window[-1]]) for row in wanted
            ]
            assert pad == [not each for each in inside]
            assert [row for row, each in zip(window, inside, strict=True) if each] == [
                row for row, each in zip(wanted, inside, strict=True) if each
            ]
            padded.update(pad)
    assert padded == ({False} if outside == "skip" else {False, True})


SLICES = {
    "strict": (SliceSampler, {}, {}),
    "by transition": (SliceSampler, {"weighting": "transition"}, {"by_transition": True}),
    "short": (SliceSampler, {"strict_length": False}, {"strict": False}),
    "span": (SliceSampler, {"span": (1, 2)}, {"before": 1, "after": 2}),
    "epochs": (SliceSamplerWithoutReplacement, {}, {}),
}


@pytest.mark.parametrize("envs", [1, 3])
@pytest.mark.parametrize("name", SLICES)
def test_slices_begin_where_the_past_is_stored(name, envs):
    """After each of many events: the number of units that are drawn, and slices that the model has."""
    kind, options, rule = SLICES[name]
    history = History({"trajectory": Window(-3, 0)}, envs, lambda _: kind(slice_len=3, **options), seed=1)
    history.prioritize = history.mark = lambda: None
    seen = set()
    for _ in range(60):
        history.happens()
        due = history.counted().slices(3, **rule)
        assert history.buffer.can_sample(12) == bool(due)
        if not due:
            if history.rows():
                with pytest.raises(RuntimeError, match=r"single traj.* the longest .*oldest 3 steps do not count"):
                    history.buffer.sample(12)
            continue
        batch = history.buffer.sample(12)
        batch["number"] = torch.tensor(history.drawn(batch))
        drawn = split(batch.select("number", ("next", "truncated")))
        assert set(drawn) <= due.keys()
        seen |= {len(each) for each in drawn}
        if "by_transition" in rule:
            assert history.buffer.sampler.trajectory_index.total == len(due)
        else:
            long = [t for t in history.counted().trajectories() if len(t) >= (1 if name == "short" else 3)]
            assert history.buffer.sampler.trajectory_index.total == len(long)
    assert seen == ({1, 2, 3} if name in ("short", "span") else {3})


@pytest.mark.parametrize(("envs", "strict"), [(1, True), (3, False)])
def test_slices_by_priority_begin_where_the_past_is_stored(envs, strict):
    """After each of many events: exactly the starts from which enough steps remain, in a tree that holds together."""

    def sampler(capacity):
        return PrioritizedSliceSampler(capacity, 1.0, 1.0, 0.0, slice_len=3, strict_length=strict)

    history = History({"trajectory": Window(-3, 0)}, envs, sampler, seed=2)
    for _ in range(80):
        history.happens()
        assert_consistent(history.buffer.sampler.tree)
        eligible = bits_of(history.buffer.sampler.tree.eligible, history.model.steps * envs)
        starts = history.counted().starts(3, not strict)
        assert {row for row, bit in enumerate(eligible) if bit} == set(starts.values())
        if not strict or not history.buffer.can_sample(12):
            continue
        batch = history.buffer.sample(12)
        batch["number"] = torch.tensor(history.drawn(batch))
        assert {each[0] for each in split(batch)} <= set(starts)
    set_windows(history.buffer, Window(0, 1))
    history.write()
    starts = history.model.starts(3, not strict)
    assert history.buffer.can_sample(12) == bool(starts)
    eligible = bits_of(history.buffer.sampler.tree.eligible, history.model.steps * envs)
    assert {row for row, bit in enumerate(eligible) if bit} == set(starts.values())


@pytest.mark.parametrize("kind", [SliceSampler, SliceSamplerWithoutReplacement, PrioritizedSliceSampler])
def test_slices_take_no_whole_windows(kind):
    sampler = kind(100, 1.0, 1.0, slice_len=3) if kind is PrioritizedSliceSampler else kind(slice_len=3)
    with pytest.raises(ValueError, match=f"a {kind.__name__} draws slices .*outside='skip' need a RandomSampler"):
        windowed(sampler, SliceModel(10, 1), WINDOWS["whole"])


@pytest.mark.parametrize("envs", [1, 3])
@pytest.mark.parametrize("name", ["past", "far past", "across"])
def test_uniform_rows_are_not_of_the_oldest_steps(name, envs):
    """After each of many events: all others are drawn, the same by the launch that gathers and by positions alone."""
    history = History(WINDOWS[name], envs, lambda _: RandomSampler(), seed=3)
    history.prioritize = history.mark = lambda: None
    for _ in range(40):
        history.happens()
        assert history.buffer.can_sample(8) == bool(history.rows())
        if not history.rows():
            continue
        sampler = history.buffer.sampler
        random_state = sampler.random_state("cpu")
        before = random_state.state_dict()
        batch = history.buffer.sample(500)
        assert set(history.drawn(batch)) == {row.number for row in not_the_oldest(history.model, history.recipe.past)}
        random_state.load_state_dict(before)
        rows = history.buffer.storage.unravel(sampler.choose(500)[0])
        assert torch.equal(rows, batch["index"])


@pytest.mark.parametrize("envs", [1, 3])
@pytest.mark.parametrize("name", ["whole", "whole after", "both"])
def test_uniform_rows_with_whole_windows(name, envs):
    """After each of many events: each row whose windows are whole is a unit of the draw, and there is no other."""
    history = History(WINDOWS[name], envs, lambda _: RandomSampler(), seed=4)
    history.prioritize = history.mark = lambda: None
    for event in range(60):
        if event == 30:
            history.buffer = copy.deepcopy(history.buffer)
        history.happens()
        may = sorted(row.position for row in drawable(history.model, history.recipe))
        assert history.buffer.can_sample(8) == bool(may)
        if not may:
            if history.rows():
                with pytest.raises(RuntimeError, match=r"\d steps are needed, the longest of .* has \d"):
                    history.buffer.sample(8)
            continue
        index, before = history.buffer.sampler._whole.trajectory_index, history.recipe.whole[0]
        assert index.total == len(may)
        starts = index.draw(len(may), history.buffer.sampler.random_state("cpu"), torch.arange(len(may)))[0]
        assert sorted(starts.view(len(may), -1)[:, before].tolist()) == may
        assert set(history.drawn(history.buffer.sample(8))) <= {
            row.number for row in drawable(history.model, history.recipe)
        }
    set_windows(history.buffer, ())
    assert history.buffer.sampler._whole is None
    assert len(history.buffer.storage.followers.samplers) == 1


@pytest.mark.parametrize("name", ["past", "whole"])
def test_epochs_take_no_windows_that_leave_rows_out(name):
    with pytest.raises(ValueError, match=r"a SamplerWithoutReplacement draws every row, .* need a RandomSampler"):
        windowed(SamplerWithoutReplacement(), SliceModel(10, 1), WINDOWS[name])
    windowed(SamplerWithoutReplacement(), SliceModel(10, 1), Window(0, 3))
