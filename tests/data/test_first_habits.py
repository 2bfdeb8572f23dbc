"""What people write before they have read anything works, or says what to write instead."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import nn

import gpubuf
from gpubuf import (
    LazyTensorStorage,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    SACLoss,
    SoftUpdate,
    TD3Loss,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from gpubuf.commands import whole_number
from gpubuf.data import (
    ListStorage,
    PrioritizedSliceSampler,
    RoundRobinWriter,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from gpubuf.modules import make_sac_actor, make_sac_critic

ALPHAS = {"alpha": 0.6, "beta": 0.4}
KINDS = [
    (ReplayBuffer, {}),
    (TensorDictReplayBuffer, {}),
    (PrioritizedReplayBuffer, ALPHAS),
    (TensorDictPrioritizedReplayBuffer, ALPHAS),
]


def arrays(n):
    return {
        "observation": np.arange(3 * n, dtype=np.float32).reshape(n, 3),
        "next": {"done": np.zeros((n, 1), dtype=bool), "reward": np.full((n, 1), 0.5, np.float32)},
    }


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_a_number_is_a_capacity(kind, options):
    """The first argument, as elsewhere, or by its name."""
    for buffer in (kind(5, **options), kind(storage=5, **options)):
        assert type(buffer.storage) is LazyTensorStorage
        buffer.extend(TensorDict({"x": torch.arange(7)}, [7]))
        assert sorted(buffer.storage[:]["x"].tolist()) == [2, 3, 4, 5, 6]


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("way", ["dict", "tensors", "rows", "add"])
def test_numpy_rows_and_dicts(kind, options, way):
    buffer, given = kind(10, batch_size=4, **options), arrays(6)
    rows = [
        {"observation": given["observation"][i], "next": {k: v[i] for k, v in given["next"].items()}} for i in range(6)
    ]
    if way == "add":
        assert [buffer.add(row) for row in rows] == list(range(6))
    elif way == "rows":
        buffer.extend(rows)
    else:
        tensors = {"observation": torch.from_numpy(given["observation"]), "next": given["next"]}
        buffer.extend(given if way == "dict" else tensors)
    stored = buffer.storage[:]
    assert isinstance(stored, TensorDict) is issubclass(kind, TensorDictReplayBuffer)
    assert torch.equal(stored["observation"], torch.from_numpy(given["observation"]))
    assert stored["next"]["done"].dtype is torch.bool
    assert stored["next"]["reward"].tolist() == [[0.5]] * 6
    # The caller's own are as they were, and nothing of the buffer's.
    given["observation"][:] = -1
    assert (buffer.storage[:]["observation"] >= 0).all()
    assert buffer.sample()["observation"].shape == (4, 3)


def test_numbers_in_a_row():
    buffer = TensorDictReplayBuffer(4)
    buffer.add({"reward": 1.5, "action": 2, "done": False, "speed": np.float32(3)})
    row = buffer.storage[0]
    kinds = {"reward": torch.float32, "action": torch.int64, "done": torch.bool, "speed": torch.float32}
    assert {key: row[key].dtype for key in kinds} == kinds


def test_rows_of_two_dimensions():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(6, ndim=2))
    buffer.extend({"x": np.arange(6).reshape(2, 3)})
    assert buffer.storage.shape == (3, 2)
    assert buffer.storage[:]["x"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_an_array_alone():
    buffer = ReplayBuffer(4)
    buffer.extend(np.arange(3.0))
    assert buffer.storage[:].tolist() == [0.0, 1.0, 2.0]


def test_arrays_that_pytorch_would_not_take():
    """Read-only ones, of which it warns, and reversed ones."""
    fixed = np.arange(3.0)
    fixed.flags.writeable = False
    buffer = TensorDictReplayBuffer(4)
    buffer.extend({"fixed": fixed, "reversed": np.arange(3.0)[::-1]})
    assert buffer.storage[:]["fixed"].tolist() == [0.0, 1.0, 2.0]
    assert buffer.storage[:]["reversed"].tolist() == [2.0, 1.0, 0.0]


def test_a_list_storage_keeps_what_it_is_given():
    buffer = ReplayBuffer(storage=ListStorage(4))
    row = {"x": np.zeros(2)}
    buffer.extend([row])
    assert buffer.storage[0] is row


@pytest.mark.parametrize("name", ["DQNLoss", "ClipPPOLoss", "SamplerEnsemble"])
def test_a_name_of_torchrl_s_at_the_top(name):
    with pytest.raises(ImportError, match=f"gpubuf has no {name} as TorchRL"):
        getattr(gpubuf, name)
    with pytest.raises(AttributeError, match="no attribute 'replay'"):
        gpubuf.replay  # noqa: B018


@pytest.mark.parametrize(
    ("actor", "critic", "name"),
    [
        (nn.Linear(3, 2), make_sac_critic(3, 1), "actor_network"),
        (make_sac_actor(3, 1), nn.Linear(4, 1), "qvalue_network"),
        (make_sac_actor(3, 1), [make_sac_critic(3, 1), nn.Linear(4, 1)], "qvalue_network"),
        (lambda observation: observation, make_sac_critic(3, 1), "actor_network"),
        (make_sac_actor(3, 1), None, "qvalue_network"),
    ],
)
def test_a_plain_module_is_told_how_to_become_one_with_keys(actor, critic, name):
    with pytest.raises(TypeError, match=rf"{name} must say .* does not: wrap it in .*TensorDictModule\("):
        SACLoss(actor, critic)


@pytest.mark.parametrize("kind", [SACLoss, TD3Loss])
def test_actions_of_another_width(kind):
    options = {"bounds": (-1, 1)} if kind is TD3Loss else {}
    loss = kind(make_sac_actor(3, 1), make_sac_critic(3, 1), **options)
    SoftUpdate(loss, tau=0.005)
    flags = {name: torch.zeros(5, 1, dtype=torch.bool) for name in ("done", "terminated")}
    following = {"observation": torch.zeros(5, 3), "reward": torch.zeros(5, 1), **flags}
    batch = TensorDict({"observation": torch.zeros(5, 3), "action": torch.zeros(5, 2), "next": following}, [5])
    with pytest.raises(ValueError, match="the batch has actions of 2 numbers at 'action', and the policy gives 1"):
        loss(batch)
    batch["action"] = torch.zeros(5)
    with pytest.raises(ValueError, match=r"the shape is \[5\], and \[\.\.\., 1\] is needed"):
        loss(batch)
    # Another error stays what it is.
    batch["action"] = torch.zeros(5, 1)
    batch["observation"] = torch.zeros(5, 4)
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|size"):
        loss(batch)


@pytest.mark.parametrize("kind", [SACLoss, TD3Loss])
def test_a_batch_without_the_step_after(kind):
    loss = kind(make_sac_actor(3, 1), make_sac_critic(3, 1), **({"bounds": (-1, 1)} if kind is TD3Loss else {}))
    SoftUpdate(loss, tau=0.005)
    with pytest.raises(KeyError, match=r"the batch has no 'next', .* its keys are .'action', 'observation'"):
        loss(TensorDict({"observation": torch.zeros(5, 3), "action": torch.zeros(5, 1)}, [5]))


def test_lists_of_numbers_and_tuples_of_arrays():
    buffer = TensorDictReplayBuffer(4)
    buffer.extend({"steps": [1, 2, 3], "reward": [0.5, 1.0, np.float64(2)]})
    rows = buffer.storage[:]
    assert (rows["steps"].tolist(), rows["reward"].tolist()) == ([1, 2, 3], [0.5, 1.0, 2.0])
    assert (rows["steps"].dtype, rows["reward"].dtype) == (torch.int64, torch.float32)
    buffer = ReplayBuffer(4)
    buffer.extend((np.zeros((3, 2)), np.arange(3)))
    assert buffer.storage[:][1].tolist() == [0, 1, 2]
    buffer = ReplayBuffer()
    buffer.extend({"x": np.arange(3)})
    assert buffer.storage[:]["x"].tolist() == [0, 1, 2]


def test_a_reward_may_be_a_number_of_python_or_of_numpy():
    """Gymnasium's environments give either, and some of them both."""
    buffer = TensorDictReplayBuffer(4)
    for reward in (1.0, np.float64(2.0), np.float32(3.0)):
        buffer.add({"observation": np.zeros(2), "reward": reward})
    assert buffer.storage[:]["reward"].tolist() == [1.0, 2.0, 3.0]


def test_a_row_without_batch_dimension_is_sent_to_add():
    with pytest.raises(ValueError, match=r"the batch has shape \(\); add\(\) writes a single row"):
        TensorDictReplayBuffer(4).extend(TensorDict({"x": torch.zeros(3)}, []))


@pytest.mark.parametrize(("text", "number"), [("1000000", 10**6), ("1_000", 1000), ("1e6", 10**6), ("1.5M", 1_500_000)])
def test_numbers_on_the_command_line(text, number):
    assert whole_number(text) == number
    for wrong in ("1.5", "M", "1e-1", "many"):
        with pytest.raises(ValueError):  # noqa: PT011
            whole_number(wrong)


def test_parts_say_what_was_chosen():
    keys = repr(SliceSamplerWithoutReplacement(num_slices=2, traj_key="episode", drop_last=True))
    assert keys.startswith("SliceSamplerWithoutReplacement(num_slices=2, traj_key='episode', drop_last=True, ")
    assert repr(RoundRobinWriter(track_generations=True)) == "RoundRobinWriter(track_generations=True)"
    assert repr(SliceSampler(slice_len=4)) == "SliceSampler(slice_len=4, strict_length=True, weighting='trajectory')"
    assert repr(SliceSampler(num_slices=8)).startswith("SliceSampler(num_slices=8, ")
    assert repr(RoundRobinWriter()) == "RoundRobinWriter()"
    both = repr(PrioritizedSliceSampler(10, 0.6, 0.4, slice_len=4))
    assert both.startswith("PrioritizedSliceSampler(slice_len=4, ")
    assert both.endswith(", alpha=0.6, beta=0.4)")
    buffer = PrioritizedReplayBuffer(5, alpha=0.6, beta=0.4)
    assert repr(buffer.sampler) == "PrioritizedSampler(alpha=0.6, beta=0.4, eps=1e-08)"
