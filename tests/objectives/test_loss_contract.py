"""What holds for every loss, of every kind of networks: :data:`tests.contracts.objectives.CONTRACTS`."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from gpubuf import capture
from gpubuf.objectives import CrossQLoss, SoftUpdate
from tests.contracts.objectives import CLASSES, CONTRACTS
from tests.support.fake_cuda import DataDependentOutputException, fake_cuda
from tests.support.graph_recorder import RecordedCuda
from tests.support.loss_matrix import SEED
from tests.support.losses_setup import assert_agrees, assert_values, total
from tests.support.sac_setup import gradients, run_loss

every = pytest.mark.parametrize("contract", CONTRACTS.values(), ids=list(CONTRACTS))
of_each_class = pytest.mark.parametrize("contract", CLASSES.values(), ids=list(CLASSES))


def flag(batch: TensorDict, **values: bool) -> TensorDict:
    """The batch with the same flags in every row."""
    for name, value in values.items():
        batch["next", name][:] = value
    return batch


def updater_of(loss: Any) -> SoftUpdate | None:
    """Of its targets, if it has some."""
    return None if isinstance(loss, CrossQLoss) else SoftUpdate(loss, tau=0.1)


def with_extras(batch: TensorDict) -> TensorDict:
    """The batch with weights, numbers of steps and a mask, too."""
    n = batch.shape[0]
    more = {"priority_weight": torch.rand(n), "steps_to_next_obs": torch.ones(n, 1, dtype=torch.int64)}
    return batch.update({**more, ("collector", "mask"): torch.ones(n, dtype=torch.bool)})


@every
def test_losses_and_gradients(contract, backend):
    """Those of the formulas, on both backends."""
    loss, batch = contract.loss(), contract.batch(7)
    assert_agrees(loss, run_loss(loss, batch, SEED), contract.oracle(loss, batch, SEED))


@every
def test_truncated_rows_bootstrap(contract):
    """CASES 22: truncated and not terminated: the next value counts, also with ``skip_done_states``."""
    for skip in (False, True):
        loss = contract.loss(skip_done_states=skip)
        batch = flag(contract.batch(5), terminated=False, truncated=True, done=True)
        ours = run_loss(loss, batch, SEED)
        assert_values(ours, contract.oracle(loss, batch, SEED))
        assert not torch.equal(run_loss(loss, flag(batch, terminated=True), SEED)["td_error"], ours["td_error"])


@every
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with NumPy
def test_terminated_rows_may_hold_anything(contract, backend):
    """CASES 29 (TorchRL 2590): NaN there, and all is as if it weren't: the value is selected away, not multiplied."""
    batch = contract.batch(9)
    ended = batch["next", "terminated"].squeeze(-1)
    assert 0 < ended.sum() < 9
    spoilt = batch.clone()
    spoilt["next", "observation"][ended] = math.nan
    loss = contract.loss(target_entropy=-2.0)
    skipping = contract.loss(target_entropy=-2.0, skip_done_states=True)
    clean, ours = run_loss(loss, batch, SEED), run_loss(skipping, spoilt, SEED)
    for name in ("loss_qvalue", "loss_actor", "td_error"):
        torch.testing.assert_close(ours[name], clean[name])
    wanted, found = gradients(loss, total(clean)), gradients(skipping, total(ours))
    assert all(slope.isfinite().all() for slope in found.values())
    for name, slope in wanted.items():
        if "qvalue" in name:
            torch.testing.assert_close(found[name], slope)


@every
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_masked_rows_hold_reaches_nothing(contract, bad):
    """No mean and, as 0 times NaN, no gradient; what counts is as if these rows were not there."""
    loss, batch = contract.loss(target_entropy=-2.0), contract.batch(6)
    mask = torch.tensor([True, False, True, True, False, True])
    batch.set(("collector", "mask"), mask)
    expected = run_loss(loss, batch, SEED)
    wanted = gradients(loss, total(expected))
    for key in ("observation", "action", ("next", "observation"), ("next", "reward")):
        spoilt = batch.clone()
        spoilt[key][~mask] = bad if spoilt[key].is_floating_point() else 99
        ours = run_loss(loss, spoilt, SEED)
        assert ours["td_error"].isfinite().all()
        for name in (name for name in expected if name.startswith("loss_")):
            torch.testing.assert_close(ours[name], expected[name])
        for name, slope in gradients(loss, total(ours)).items():
            torch.testing.assert_close(slope, wanted[name])


@every
def test_no_host_sync(contract, monkeypatch):
    """Nothing reads a value: construction, forward, backward, target update on fake tensors.

    A CPU build of torch aborts when autograd records an operation on a (fake) CUDA tensor, since it asks for its
    stream. So the backward runs on fake CPU tensors, which refuse to be read just as well.
    """
    # Nor can fake CUDA tensors draw random numbers in place there.
    for name in ("kaiming_uniform_", "uniform_"):
        monkeypatch.setattr(nn.init, name, lambda tensor, *_, **__: tensor)
    real = with_extras(contract.batch(6))
    for device in ("cuda", "cpu"):
        with fake_cuda(), torch.device(device), torch.set_grad_enabled(device == "cpu"):
            loss = contract.loss(skip_done_states=True)
            with pytest.raises(DataDependentOutputException):
                torch.randn(()).item()
            batch = real.apply(lambda x: torch.zeros(x.shape, dtype=x.dtype), device=torch.device(device))
            updater = updater_of(loss)
            for _ in range(2):
                out = loss(batch)
                if device == "cpu":
                    total(out).backward()
                if updater is not None:
                    updater.step()
            assert out["loss_actor"].device.type == batch["td_error"].device.type == device
            assert all((parameter.grad is not None) == (device == "cpu") for parameter in loss.parameters())


@of_each_class
def test_traced_as_one_graph(contract):
    """Compiled once, backward included; random numbers and hyperparameters are no constants."""
    torch._dynamo.reset()
    loss, batch = contract.loss(target_entropy=-2.0), contract.batch(6)
    run_loss(loss, batch, 0)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(2):
            loss.value_estimator.gamma.fill_(0.9 + 0.05 * seed)
            torch.manual_seed(seed)
            ours, truth = compiled(batch.clone()), run_loss(loss, batch, seed)
            for name in (name for name in truth if name.startswith("loss_")):
                torch.testing.assert_close(ours[name], truth[name])
            found, expected = gradients(loss, total(ours)), gradients(loss, total(truth))
            for name, slope in expected.items():
                torch.testing.assert_close(found[name], slope)


@every
def test_what_changes_between_replays_is_seen(contract, monkeypatch):
    """CASES 33: noise, temperature, target entropy, discount and data are read at each replay of a captured step."""
    batches = [contract.batch(6, seed=seed) for seed in range(5)]

    def run(machine: RecordedCuda | None) -> list[list[Tensor]]:
        loss, memory = contract.loss(target_entropy=-2.0), contract.batch(6)
        updater = updater_of(loss)
        optimizer = torch.optim.Adam(loss.parameters(), lr=1e-2, fused=True, capturable=True)

        def step() -> list[Tensor]:
            optimizer.zero_grad(set_to_none=False)
            out = loss(memory)
            total(out).backward()
            optimizer.step()
            if updater is not None:
                updater.step()
            return [*(out[name] for name in sorted(out.keys()) if name.startswith("loss_")), memory["td_error"]]

        once = step if machine is None else capture(step, warmup=2)
        found = []
        for number, batch in enumerate(batches):
            memory.update_(batch)
            if number == 3:
                if hasattr(loss, "log_alpha"):
                    loss.log_alpha = -1.5
                if "target_entropy" not in contract.lacks:
                    loss.target_entropy = 0.3
                if hasattr(loss, "reward_scale"):
                    loss.reward_scale = 0.5
                loss.value_estimator.gamma.fill_(0.5)
            found.append([tensor.detach().clone() for tensor in once()])
        assert machine is None or machine.log.count("replay") == 3
        return found

    eager = run(None)
    for one, other in zip(run(RecordedCuda().install(monkeypatch)), eager, strict=True):
        torch.testing.assert_close(one, other)


@every
def test_copies_states_and_given_parameters(contract):
    """A copy, a pickle, a loss that has loaded the state, and ``functional_call`` give the same; all stand alone."""
    loss, other, batch = contract.loss(target_entropy=-2.0), contract.loss(target_entropy=-2.0), contract.batch(5)
    with torch.no_grad():
        for tensor in (*other.parameters(), *other.buffers()):
            if tensor.is_floating_point() and tensor.numel() > 1:
                tensor.mul_(0.9).add_(0.01)
    before, expected = run_loss(loss, batch, SEED), run_loss(other, batch, SEED)
    assert not torch.equal(expected["loss_actor"], before["loss_actor"])
    given = {name: tensor.detach().clone() for name, tensor in (*other.named_parameters(), *other.named_buffers())}
    torch.manual_seed(SEED)
    through = torch.func.functional_call(loss, given, (batch.clone(),))
    torch.testing.assert_close(run_loss(loss, batch, SEED), before)
    copied = copy.deepcopy(loss)
    loss.load_state_dict(other.state_dict())
    pickled = pickle.loads(pickle.dumps(other))
    torch.testing.assert_close(run_loss(copied, batch, SEED), before)
    for out in (through, run_loss(loss, batch, SEED), run_loss(pickled, batch, SEED)):
        for name in (name for name in expected if name.startswith("loss_")):
            torch.testing.assert_close(out[name], expected[name])


@every
def test_each_loss_reaches_its_own_parameters_only(contract):
    """The critics' loss the critics, the actor's the actor, and the temperature's the temperature."""
    loss = contract.loss()
    out = run_loss(loss, contract.batch(5), SEED)
    for name in (name for name in out if name.startswith("loss_")):
        owner = {"loss_qvalue": "qvalue", "loss_actor": "actor", "loss_alpha": "log_alpha"}[name]
        named = dict(loss.named_parameters())
        slopes = torch.autograd.grad(out[name], list(named.values()), retain_graph=True, allow_unused=True)
        reached = {key for key, slope in zip(named, slopes, strict=True) if slope is not None and slope.any()}
        assert reached
        assert all(owner in key for key in reached), name


@of_each_class
def test_the_batch_is_left_as_it_was(contract):
    """Only priorities are added."""
    batch = contract.batch(4)
    before = batch.clone()
    contract.loss()(batch)
    assert set(batch.keys(True, True)) - set(before.keys(True, True)) == {"td_error"}
    assert (batch.exclude("td_error") == before).all()


@of_each_class
def test_weights_can_be_refused_and_demanded(contract):
    batch = contract.batch(4)
    weighted = batch.clone().set("priority_weight", torch.rand(4))
    loss = contract.loss(use_prioritized_weights=False)
    torch.testing.assert_close(run_loss(loss, weighted, SEED), run_loss(loss, batch, SEED))
    with pytest.raises(KeyError, match="priority_weight"):
        contract.loss(use_prioritized_weights=True)(batch)


@every
def test_discount_and_steps(contract):
    """gamma to the number of steps that the reward spans."""
    batch = contract.batch(6)
    steps = torch.arange(1, 7).unsqueeze(-1)
    batch["steps_to_next_obs"] = steps
    loss = contract.loss()
    loss.make_value_estimator(gamma=0.9)
    assert_values(run_loss(loss, batch, SEED), contract.oracle(loss, batch, SEED, gamma=0.9, steps=steps))
