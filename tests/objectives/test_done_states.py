"""Rows that have ended, with anything in the place of their next state: what ``skip_done_states`` does (CASES 65)."""

from __future__ import annotations

import warnings

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from gpubuf import LazyTensorStorage, MixedReplayBuffer, SoftUpdate, TensorDictPrioritizedReplayBuffer
from gpubuf.data import Window
from gpubuf.modules import MLP, make_sac_actor, make_sac_critic
from gpubuf.objectives import SACLoss
from gpubuf.objectives.batch import HAS_TARGET, without_ended
from tests.contracts.objectives import CLASSES, state_value
from tests.support.losses_setup import total
from tests.support.sac_setup import CELLS, OBSERVATION, gradients, make_batch, run_loss
from tests.support.sac_setup import make_loss as make_sac

NAN = float("nan")
#: Every loss, and what they do in settings of their own: a value network, lambda returns, presets.
VARIANTS = {
    **{name: (name, {}, None) for name in CLASSES},
    "next temperature": ("DistributionalSACLoss", {"temperature_from": "next"}, None),
    "joint batch": ("DistributionalSACLoss", {"joint_batch": "all", "cloning_weight": 0.5}, None),
    "lambda returns": ("SACLoss", {}, "TDLambda"),
    "sums of rewards": ("DiscreteSACLoss", {}, "TD1"),
    "value network": ("SACLoss", {"value_network": state_value}, None),
}


def variant(name: str, **kwargs):
    kind, options, estimator = VARIANTS[name]
    options = {key: value() if callable(value) else value for key, value in options.items()}
    noise = {"policy_noise": 0.0} if kind == "TD3Loss" else {"target_entropy": 0.5}
    loss = CLASSES[kind].loss(skip_done_states=True, **{**noise, **options, **kwargs})
    return loss.make_value_estimator(estimator) if estimator else loss


def ended_batch(name: str, *shape: int) -> TensorDict:
    """Rows of which some terminate, some are truncated and have no next state, and some are truncated and have one."""
    batch = CLASSES[VARIANTS[name][0]].batch(*shape)
    flat = batch.flatten() if len(shape) > 1 else batch
    kinds = torch.arange(len(flat)) % 5
    terminated, truncated = (kinds == 1), (kinds == 2) | (kinds == 3)
    for key, flag in (("terminated", terminated), ("truncated", truncated), ("done", terminated | truncated)):
        flat["next", key] = flag.unsqueeze(-1)
    flat["next", "observation"][kinds == 1] = NAN
    # One element, and not NaN, is enough.
    flat["next", "observation"][kinds == 2, 0] = torch.inf
    return flat.reshape(shape) if len(shape) > 1 else flat


def lost_rows(batch: TensorDict) -> torch.Tensor:
    unsound = ~batch["next", "observation"].isfinite().all(-1)
    return unsound & (batch["next", "done"] & ~batch["next", "terminated"]).squeeze(-1)


@pytest.mark.parametrize("name", VARIANTS)
def test_rows_without_a_target_are_masked_for_the_critics_alone(name):
    """The critics' loss and gradients are those of the batch with these rows masked; the actor learns from all."""
    loss, batch = variant(name), ended_batch(name, 4, 5)
    lost = lost_rows(batch)
    assert 0 < lost.sum() < lost.numel()
    sound = batch.clone()
    unsound = ~batch["next", "observation"].isfinite().all(-1)
    sound["next", "observation"] = torch.where(
        unsound.unsqueeze(-1), batch["observation"], batch["next", "observation"]
    )
    masked = sound.clone().set(("collector", "mask"), ~lost)
    ours, plain, truth = run_loss(loss, batch, 1), run_loss(loss, sound, 1), run_loss(loss, masked, 1)
    for key, value in ours.items():
        assert value.isfinite().all(), key
    from_next = loss.skip_done_states and getattr(loss, "temperature_from", "current") == "next"
    expected = {"loss_qvalue": truth, "loss_actor": plain, "loss_alpha": truth if from_next else plain}
    expected |= {"loss_value": plain, "loss": truth}
    right = {key: found[key] for key, found in expected.items() if key in ours}
    for key, value in right.items():
        torch.testing.assert_close(ours[key], value)
    found, expected = (gradients(loss, total(each)) for each in (ours, right))
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient)
    assert (ours["td_error"][lost] == 0).all()
    torch.testing.assert_close(ours["td_error"][~lost], truth["td_error"][~lost])


class Refuses(nn.Module):
    """Raises where a row is not finite, as a Cholesky factorisation does, or 0 throughout."""

    def forward(self, x):
        assert x.isfinite().all()
        assert x.any(-1).all()
        return x


def test_networks_see_whole_sound_states():
    """The next state of a row is its own or the next one, never a mixture; masked rows take theirs from sound ones."""
    seen = []
    body = TensorDictModule(
        MLP(OBSERVATION + 3, 1, CELLS, dtype=torch.float64), ["checked", "action"], ["state_action_value"]
    )
    look = TensorDictModule(lambda x: seen.append(x.detach()) or Refuses()(x), ["observation"], ["checked"])
    critic = TensorDictSequential(look, body)
    loss = SACLoss(make_sac(skip_done_states=True).actor_network, critic, skip_done_states=True, deactivate_vmap=True)
    batch = ended_batch("SACLoss", 10)
    batch["collector", "mask"] = torch.arange(10) != 4
    batch["observation"][4], batch["next", "observation"][4] = NAN, NAN
    # The first row that counts has no next state.
    batch["next", "observation"][0], batch["next", "done"][0] = NAN, True
    assert loss(batch)["loss_qvalue"].isfinite()
    own, after = batch["observation"], batch["next", "observation"]
    for states in seen:
        rows = [0, 1, 2, 3, *range(5, 10)]
        assert all((states[row] == own[row]).all() or (states[row] == after[row]).all() for row in rows)


@pytest.mark.parametrize("name", CLASSES)
def test_flags_that_are_numbers_and_nan(name):
    """A NaN among the flags stands for true: of ``terminated``, that nothing is bootstrapped."""
    loss, batch = variant(name), ended_batch(name, 10)
    expected = run_loss(loss, batch, 1)
    for key in ("terminated", "done"):
        flags = batch["next", key].double()
        batch["next", key] = torch.where(flags > 0, NAN, 0.0)
    for key, value in run_loss(loss, batch, 1).items():
        torch.testing.assert_close(value, expected[key])


def test_no_row_has_a_target():
    loss, batch = variant("SACLoss"), ended_batch("SACLoss", 10)
    batch["next", "observation"].fill_(NAN)
    batch["next", "terminated"].fill_(False)
    batch["next", "done"].fill_(True)
    out = run_loss(loss, batch, 1)
    assert out["loss_qvalue"] == 0
    assert all(value.isfinite().all() for value in out.values())
    assert all((each == 0).all() for name, each in gradients(loss, total(out)).items() if "qvalue" in name)


@pytest.mark.parametrize("done", [(4, 1), (4, 3), (4, 3, 1), (4, 3, 1, 1)], ids=str)
@pytest.mark.parametrize("flags", ["the same", "terminated of environments"])
def test_agents(done, flags):
    """A row is what a flag stands for: an agent, or an environment with all its agents."""
    loss = SACLoss(
        make_sac_actor(OBSERVATION, 3, CELLS, dtype=torch.float64),
        make_sac_critic(OBSERVATION, 3, CELLS, dtype=torch.float64),
        skip_done_states=True,
        target_entropy=0.5,
    )
    batch = make_batch(4, 3)
    over = torch.zeros(done, dtype=torch.bool)
    over[1] = over[2] = True
    over.flatten()[-1] = len(done) > 2 or done[1] == 3
    stop = torch.zeros(done if flags == "the same" else (4, 1), dtype=torch.bool)
    stop[2] = True
    batch["next", "observation"][1:3] = NAN
    batch["next", "observation"][3, 2, 0] = NAN if over.flatten()[-1] else 0.0
    batch.batch_size = batch["next"].batch_size = [4]
    batch["next", "done"], batch["next", "terminated"] = over, stop
    lost = torch.zeros(4, 3, dtype=torch.bool)
    lost[1], lost[3, 2] = True, bool(over.flatten()[-1])
    masked = batch.clone()
    unsound = ~batch["next", "observation"].isfinite().all(-1, keepdim=True)
    masked["next", "observation"] = torch.where(unsound, batch["observation"], batch["next", "observation"])
    ours, plain = run_loss(loss, batch, 1), run_loss(loss, masked, 1)
    masked["collector", "mask"] = ~lost
    truth = run_loss(loss, masked, 1)
    torch.testing.assert_close(ours["loss_qvalue"], truth["loss_qvalue"])
    torch.testing.assert_close(ours["loss_actor"], plain["loss_actor"])
    assert ((ours["td_error"] == 0) == lost).all()


def test_a_state_that_agents_share():
    """It is replaced where all have ended; of these those that are truncated have no target."""
    batch = make_batch(4, 3)
    batch.batch_size = batch["next"].batch_size = [4]
    batch["state"], batch["next", "state"] = torch.randn(4, 7), torch.randn(4, 7)
    over, stop = torch.zeros(4, 3, 1, dtype=torch.bool), torch.zeros(4, 3, 1, dtype=torch.bool)
    over[1], stop[1, 0], over[2, 1] = True, True, True
    batch["next", "state"][1] = NAN
    seen = without_ended(batch, ["state"], stop, over)
    assert (seen["next", "state"][1] == batch["state"][1]).all()
    assert (seen["next", "state"][2] == batch["next", "state"][2]).all()
    assert seen[HAS_TARGET].tolist() == [[True] * 3, [True, False, False], [True] * 3, [True] * 3]


def test_images_and_integers():
    """Of an image every dimension belongs to its row; integers are finite."""
    batch = make_batch(4)
    batch["pixels"], batch["next", "pixels"] = torch.rand(4, 3, 2, 2), torch.rand(4, 3, 2, 2)
    batch["index"], batch["next", "index"] = torch.arange(4), torch.arange(4, 8)
    over, stop = torch.tensor([[True], [True], [False], [False]]), torch.tensor([False, True, False, False])
    batch["next", "pixels"][0, 2, 1, 1] = NAN
    seen = without_ended(batch, ["pixels", "index"], stop, over)
    assert seen[HAS_TARGET].tolist() == [False, True, True, True]
    for key in ("pixels", "index"):
        own, after = batch[key], batch["next", key]
        from_own = [key == "pixels", True, False, False]
        for row, mine in enumerate(from_own):
            assert (seen["next", key][row] == (own if mine else after)[row]).all()


def filled(rows: TensorDict, **kwargs) -> TensorDictPrioritizedReplayBuffer:
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, eps=0.0, storage=LazyTensorStorage(len(rows)), batch_size=64, **kwargs
    )
    buffer.extend(rows)
    buffer.update_priority(torch.arange(len(rows)), torch.arange(1.0, len(rows) + 1))
    return buffer


def priorities(buffer) -> torch.Tensor:
    return buffer.sampler.tree.leaves[: len(buffer)].clone()


@pytest.mark.parametrize("kind", ["rows", "mixed", "windows"])
def test_an_update_leaves_the_old_priority(kind):
    """Of rows without a target; others get theirs."""
    rows = ended_batch("SACLoss", 10)
    rows["number"] = torch.arange(10)
    options = {"windows": {"number": Window(-2, 2, outside="cross")}} if kind == "windows" else {}
    buffer = filled(rows, **options)
    loss, source = variant("SACLoss"), buffer
    if kind == "mixed":
        source = MixedReplayBuffer([buffer, filled(rows)], [0.5, 0.5], batch_size=128)
    before = priorities(buffer)
    batch = source.sample()
    loss(batch)
    source.update_tensordict_priority(batch)
    after, lost = priorities(buffer), lost_rows(rows)
    drawn = torch.zeros(10, dtype=torch.bool)
    drawn[batch["index"]] = True
    assert drawn[lost].any()
    assert (after[lost] == before[lost]).all()
    assert (after[drawn & ~lost] != before[drawn & ~lost]).all()


@pytest.mark.parametrize("flat", [False, True])
def test_a_nan_without_the_flag_is_named_once(flat):
    loss, batch = CLASSES["SACLoss"].loss(), ended_batch("SACLoss", 10)
    if flat:
        for key in ("done", "terminated"):
            batch["next", key] = batch["next", key].squeeze(-1)
    SoftUpdate(loss, tau=0.1)
    place = r"\('next', 'observation'\) in 4 of 10 rows \(4 of them done\)"
    with pytest.warns(UserWarning, match=rf"SACLoss: loss_qvalue NaN\. .*not finite at {place}\. skip_done") as found:
        loss(batch.clone())
    assert len(found) == 1
    assert found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loss(batch.clone())["loss_qvalue"].isnan()
