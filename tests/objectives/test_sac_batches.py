"""SACLoss on batches that a buffer sampled, on actors that others built, and on one set of critics in several forms."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict.nn import (
    InteractionType,
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    set_interaction_type,
)
from torch import nn
from torch.distributions import Independent, Normal

from gpubuf.data import LazyTensorStorage, PrioritizedSampler, TensorDictReplayBuffer
from gpubuf.modules import TanhNormal
from gpubuf.objectives import SACLoss
from gpubuf.objectives.batch import rows_of
from tests.support.sac_setup import (
    ACTION,
    OBSERVATION,
    gradients,
    linear_critic,
    make_actor,
    make_batch,
    make_loss,
    run_loss,
    total,
)

F64 = torch.float64


def prioritized_buffer(rows=32):
    """A buffer whose rows have different priorities, sampled in batches of 8."""
    sampler = PrioritizedSampler(rows, alpha=0.7, beta=0.5)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(rows), sampler=sampler, batch_size=8)
    index = buffer.extend(make_batch(rows))
    buffer.update_priority(index, torch.linspace(0.1, 4.0, rows))
    return buffer


def test_a_sampled_batch(backend):
    """The weights of the buffer weigh the losses, and the priorities that the loss writes go back to their rows."""
    torch.manual_seed(0)
    buffer, loss = prioritized_buffer(), make_loss()
    batch = buffer.sample()
    weight = batch["priority_weight"].double().reshape(8)
    assert weight.unique().numel() > 1
    weighted, plain = run_loss(loss, batch, 1), make_loss(reduction="none", scalar_output_mode="exclude")
    plain.load_state_dict(loss.state_dict())
    each = run_loss(plain, batch.exclude("priority_weight"), 1)
    for name in ("loss_actor", "loss_qvalue", "loss_alpha"):
        assert each[name].shape == (8,)
        torch.testing.assert_close(weighted[name], (weight * each[name]).sum() / weight.sum())
    loss(batch)
    buffer.update_tensordict_priority(batch)
    priorities = torch.linspace(0.1, 4.0, 32)
    for row, error in zip(batch["index"].reshape(-1).tolist(), batch["td_error"].tolist(), strict=True):
        priorities[row] = error
    leaves = (priorities.double() + buffer.sampler.eps) ** 0.7
    torch.testing.assert_close(buffer.sampler.tree.total.double().reshape(()), leaves.sum(), rtol=1e-6, atol=0)


UNUSED_IN_BACKWARD = [("next", "observation"), ("next", "reward"), ("next", "terminated"), ("next", "done")]


@pytest.mark.parametrize("key", UNUSED_IN_BACKWARD, ids=str)
def test_a_key_changed_in_place_after_the_forward_pass(backend, key):
    """CASES 35: keys share an allocation, but backward fails for none of them because of another."""
    torch.manual_seed(0)
    batch, loss = prioritized_buffer().sample(), make_loss()
    expected = gradients(loss, total(run_loss(loss, batch.clone(), 1)))
    out = run_loss(loss, batch, 1)
    others = {name: value.clone() for name, value in batch.items(True, True) if name != key}
    batch[key].zero_()
    found = gradients(loss, total(out))
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=0)
    for name, value in others.items():
        assert torch.equal(batch[name], value)


@pytest.mark.parametrize("key", ["observation", "action", "priority_weight"])
def test_a_key_that_backward_reads_is_guarded(key):
    """CASES 35, the other way round: changing what backward reads is an error, or without effect; never wrong."""
    torch.manual_seed(0)
    batch, loss = prioritized_buffer().sample(), make_loss()
    expected = gradients(loss, total(run_loss(loss, batch.clone(), 1)))
    out = run_loss(loss, batch, 1)
    batch[key].zero_()
    try:
        found = gradients(loss, total(out))
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)  # noqa: PT017
    else:
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def independent_normal(loc, scale):
    return Independent(Normal(loc, scale), 1)


def test_a_latent_inside_the_actor_is_drawn_at_random():
    """The loss asks for random draws, also of what precedes the action, whatever the context says."""
    latent = TensorDictModule(
        nn.Sequential(nn.Linear(OBSERVATION, 8, dtype=F64), NormalParamExtractor()),
        ["observation"],
        ["latent_loc", "latent_scale"],
    )
    actor = ProbabilisticTensorDictSequential(
        latent,
        ProbabilisticTensorDictModule(
            {"loc": "latent_loc", "scale": "latent_scale"},
            ["latent"],
            distribution_class=independent_normal,
            default_interaction_type=InteractionType.DETERMINISTIC,
        ),
        TensorDictModule(
            nn.Sequential(nn.Linear(4, 2 * ACTION, dtype=F64), NormalParamExtractor()), ["latent"], ["loc", "scale"]
        ),
        ProbabilisticTensorDictModule(["loc", "scale"], ["action"], distribution_class=TanhNormal),
        return_composite=False,
    )
    loss, batch = make_loss(actor=actor, target_entropy=-1.0), make_batch(6)
    random = run_loss(loss, batch, 0)
    with set_interaction_type(InteractionType.RANDOM):
        torch.testing.assert_close(run_loss(loss, batch, 0), random)
    with set_interaction_type(InteractionType.DETERMINISTIC):
        torch.testing.assert_close(run_loss(loss, batch, 0), random)
    torch.manual_seed(0)
    with torch.no_grad():
        for state in (batch["next"], batch):
            loc, scale = latent.module(state["observation"])
            drawn = loc + scale * torch.randn(6, 4, dtype=F64)
            dist = TanhNormal(*actor[2].module(drawn))
            _, log_prob = dist.rsample_and_log_prob()
    torch.testing.assert_close(random["entropy"], -log_prob.mean())


@pytest.mark.parametrize(
    ("flag", "features", "expected"),
    [
        ([[True], [False]], (2, 5), [[True], [False]]),
        ([True, False], (2, 5), [[True], [False]]),
        ([[True, True], [True, False]], (2, 5), [[True], [False]]),
        ([[[True], [True]], [[False], [True]]], (2, 5), [[True], [False]]),
        ([[True], [False]], (2, 3, 5), [[[True]], [[False]]]),
        ([[True, False], [False, True]], (2, 2, 5), [[[True], [False]], [[False], [True]]]),
        ([[True], [False]], (2, 3, 4, 4), [[[[True]]], [[[False]]]]),
    ],
)
def test_a_flag_against_an_observation(flag, features, expected):
    """CASES 29: a state that agents share has ended where all of them have."""
    found = rows_of(torch.tensor(flag), torch.zeros(features))
    assert found.tolist() == expected
    assert torch.broadcast_shapes(found.shape, features) == features


def test_an_observation_that_agents_share():
    """CASES 29: the critics see a common state next to the agents' own; rows of one agent that ended keep it."""
    state, shape = 4, (5, 2)
    batch = make_batch(*shape)
    batch.batch_size = [5]
    batch["next"].batch_size = [5]
    batch["state"], batch["next", "state"] = (torch.randn(5, state, dtype=F64) for _ in range(2))
    ended = torch.tensor([[True, True], [True, False], [False, False], [False, True], [True, True]])
    batch["next", "terminated"], batch["next", "done"] = ended.unsqueeze(-1), ended.unsqueeze(-1)

    class WithState(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = linear_critic().module
            self.state = nn.Linear(state, 1, dtype=F64)

        def forward(self, observation, action, shared):
            return self.net(observation, action) + self.state(shared).unsqueeze(-2)

    keys = ["observation", "action", "state"]
    members = [TensorDictModule(WithState(), keys, ["state_action_value"]) for _ in range(2)]
    plain, skipping = (SACLoss(make_actor(), members, skip_done_states=flag) for flag in (False, True))
    skipping.load_state_dict(plain.state_dict())
    truth = run_loss(plain, batch, 3)
    torch.testing.assert_close(run_loss(skipping, batch, 3), truth)
    # Where both agents ended, the next state may be anything; the others' must be seen as it is.
    gone = batch.clone()
    gone["next", "state"][ended.all(-1)] = math.nan
    found = run_loss(skipping, gone, 3)
    torch.testing.assert_close(found, truth)
    assert all(gradient.isfinite().all() for gradient in gradients(skipping, total(found)).values())
