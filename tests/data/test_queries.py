"""The trajectories of a buffer, and those that fulfil a condition, as TorchRL finds them."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from gpubuf import data as gpubuf_data
from gpubuf.data import LazyTensorStorage, ListStorage, ReplayBuffer, Trajectory, TrajectoryPredicate, traj
from tests.support.torchrl_buffers.queries import rows


@pytest.mark.parametrize("storage", [{"dtypes": {"a": torch.int32}}, {"share_next": ["a"]}, {}])
def test_rows_in_other_forms(storage):
    buffer = ReplayBuffer(storage=LazyTensorStorage(12, **storage))
    for start in (0, 6, 12):
        data = rows(6, start)
        buffer.extend(data.set(("next", "a"), data["a"] + 1))
    found = [trajectory.a.tolist() for trajectory in buffer.query(traj.length >= 3)]
    assert found == [[7, 8, 9], [10, 11, 12, 13], [14, 15, 16]]


def test_objects_and_refusals():
    buffer = ReplayBuffer(storage=ListStorage(20))
    buffer.extend(rows(9))
    assert [each.a.tolist() for each in buffer.query()] == [[0, 1, 2], [3, 4, 5, 6], [7, 8]]
    plain = ReplayBuffer(storage=LazyTensorStorage(4))
    plain.extend(torch.arange(3.0))
    with pytest.raises(TypeError, match="tensordict-backed storage, of TensorDicts"):
        plain.query()
    with pytest.raises(AttributeError, match="neither at the root"):
        _ = buffer.query()[0].nothing
    with pytest.raises(ValueError, match="single batch dimension"):
        Trajectory(rows(4).view(2, 2))


def test_flags_with_several_elements_end_trajectories_if_any_is_set():
    done = torch.tensor([[0, 0], [0, 1], [0, 0], [0, 0]], dtype=torch.bool)
    data = TensorDict({"a": torch.arange(4), "next": {"done": done}}, [4])
    assert [each.a.tolist() for each in gpubuf_data.iter_trajectories(data)] == [[0, 1], [2, 3]]


def test_conditions_say_what_they_are():
    condition = (traj.reward.sum() > 1) & ~(traj["next", "done"] == 1).any()
    assert repr(condition) == "TrajectoryPredicate(((traj.reward.sum() > 1) & ~(traj[('next', 'done')] == 1).any()))"
    assert condition.required_keys() == {"reward", ("next", "done")}
    assert (condition | TrajectoryPredicate(len)).required_keys() is None
    assert repr(traj) == "traj"
    assert repr(traj.a.mean()) == "traj.a.mean()"
    assert "Elementwise" in repr(traj.a != 3)
    assert repr(Trajectory(rows(3))) == "Trajectory(length=3, keys=['a', 'next'])"
    assert len(Trajectory(rows(3))) == 3
    with pytest.raises(TypeError):
        hash(traj.a)
