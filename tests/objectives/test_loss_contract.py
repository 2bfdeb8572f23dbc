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

import gpubuf
from gpubuf import capture, objectives
from gpubuf.objectives import CrossQLoss, SoftUpdate
from tests.contracts import first_quick
from tests.contracts.objectives import BATCH_NORMS, CLASSES, COMPILED, CONTRACTS
from tests.support.dispatched import Dispatched
from tests.support.fake_cuda import DataDependentOutputException, fake_cuda
from tests.support.graph_recorder import RecordedCuda
from tests.support.losses_setup import assert_agrees, assert_values
from tests.support.sac_setup import gradients, run_loss, total

SEED = 3
every = pytest.mark.parametrize("contract", CONTRACTS.values(), ids=list(CONTRACTS))
of_each_class = pytest.mark.parametrize("contract", CLASSES.values(), ids=list(CLASSES))
#: Each class in every setting that changes what rows mean to it, of one kind of networks.
SETTINGS = ("value network", "lambda returns", "own, next", "mixture", "min, sigma")
FORMS = {name: each for name, each in CONTRACTS.items() if each in CLASSES.values() or name.endswith(SETTINGS)}
of_each_form = pytest.mark.parametrize("contract", FORMS.values(), ids=list(FORMS))
class_names = pytest.mark.parametrize("name", CLASSES)


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


def losses_of(out: Any) -> dict[str, Tensor]:
    return {name: out[name] for name in out.keys() if name.startswith("loss_")}


def assert_same(loss: Any, ours: dict[str, Tensor], other: Any, truth: dict[str, Tensor]) -> None:
    """Losses, priorities and gradients of two losses are equal."""
    torch.testing.assert_close(losses_of(ours), losses_of(truth))
    torch.testing.assert_close(ours["td_error"], truth["td_error"])
    torch.testing.assert_close(gradients(loss, total(ours)), gradients(other, total(truth)))


def test_every_loss_has_a_contract():
    """And is found in gpubuf itself, too."""
    losses = {name for name in objectives.__all__ if name.endswith("Loss")}
    assert losses == CLASSES.keys()
    assert all(getattr(gpubuf, name) is getattr(objectives, name) for name in losses)


@every
def test_losses_and_gradients(contract, backend):
    """Those of the formulas, on both backends."""
    loss, batch = contract.loss(), contract.batch(8)
    assert_agrees(loss, run_loss(loss, batch, SEED), contract.oracle(loss, batch, SEED))


@of_each_class
@pytest.mark.parametrize("loss_function", ["l1", "l2", "huber"])
def test_loss_functions(contract, loss_function):
    loss, batch = contract.loss(loss_function=loss_function), contract.batch(9)
    assert_agrees(loss, run_loss(loss, batch, SEED), contract.oracle(loss, batch, SEED))


@pytest.mark.parametrize("lmbda", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("name", ["SACLoss", "DiscreteSACLoss", "TD3Loss"])
def test_sequences(name, lmbda):
    """TD(lambda), TD(1) and, of one step, TD(0), on batches [B, T]."""
    contract = CLASSES[name]
    loss, batch = contract.loss(), contract.batch(3, 5)
    kind = {"value_type": "TD1"} if lmbda == 1 else {"value_type": "TDLambda", "lmbda": lmbda}
    loss.make_value_estimator(**kind, gamma=0.9)
    assert_agrees(loss, run_loss(loss, batch, SEED), contract.oracle(loss, batch, SEED, gamma=0.9, lmbda=lmbda))


@of_each_form
def test_truncated_rows_bootstrap(contract):
    """CASES 22: truncated and not terminated: the next value counts, also with ``skip_done_states``."""
    for skip in (False, True):
        loss = contract.loss(skip_done_states=skip)
        batch = flag(contract.batch(6), terminated=False, truncated=True, done=True)
        ours = run_loss(loss, batch, SEED)
        assert_values(ours, contract.oracle(loss, batch, SEED))
        assert not torch.equal(run_loss(loss, flag(batch, terminated=True), SEED)["td_error"], ours["td_error"])


@of_each_form
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with NumPy
def test_terminated_rows_may_hold_anything(contract, backend):
    """CASES 29 (TorchRL 2590): NaN there, and all is as if it weren't: the value is selected away, not multiplied."""
    batch = contract.batch(10)
    ended = batch["next", "terminated"].squeeze(-1)
    assert 0 < ended.sum() < 10
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


@of_each_form
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
        torch.testing.assert_close(losses_of(ours), losses_of(expected))
        torch.testing.assert_close(gradients(loss, total(ours)), wanted)


@of_each_class
def test_a_batch_without_rows_that_count(contract):
    """Masked, or without rows: all is 0, and finite."""
    masked = contract.batch(6).set("shifted_valid", torch.zeros(6, dtype=torch.bool))
    masked["observation"][:] = math.nan
    for batch in (masked, contract.batch(6)[:0]):
        loss = contract.loss(target_entropy=-2.0)
        out = run_loss(loss, batch, SEED)
        assert all(value == 0 for value in losses_of(out).values())
        total(out).backward()
        assert all((p.grad == 0).all() for p in loss.parameters() if p.grad is not None)


#: Each class, and each kind of critics. PyTorch's own batch norms can't run on fake CUDA tensors.
WAITING = {**CLASSES, "CrossQLoss, batch norms": BATCH_NORMS["CrossQLoss, batch norms, ensemble"]}
WAITING |= {name: CONTRACTS[name] for name in CONTRACTS if name.startswith("SACLoss, ")}
#: Nor can the recorder of graphs see what they change within ``torch.vmap``.
REPLAYED = {**CONTRACTS, "CrossQLoss, batch norms": BATCH_NORMS["CrossQLoss, batch norms, ensemble"]}


@pytest.mark.parametrize("contract", first_quick(WAITING.values(), len(CLASSES) + 1), ids=list(WAITING))
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


@pytest.mark.parametrize("name", first_quick(COMPILED))
def test_traced_as_one_graph(name):
    """Compiled once for update after update, backward included, with rows that have ended and masked ones."""
    torch._dynamo.reset()
    contract = COMPILED[name]
    loss = contract.loss(target_entropy=-2.0, skip_done_states=True)
    other = copy.deepcopy(loss)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    worlds = [(each, torch.optim.SGD(each.parameters(), lr=0.01), updater_of(each)) for each in (loss, other)]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(3):
            batch = with_extras(contract.batch(6, seed=seed))
            batch["collector", "mask"][2] = False
            batch["next", "done"][:2] = True
            batch["next", "observation"][0] = batch["observation"][2] = math.nan
            truth, data = run_loss(loss, batch, seed), batch.copy()
            torch.manual_seed(seed)
            assert_same(other, {**compiled(data), "td_error": data["td_error"]}, loss, truth)
            assert not data["td_error_mask"].all() or batch["next", "terminated"][0]
            torch.testing.assert_close(dict(other.named_buffers()), dict(loss.named_buffers()))
            for each, optimizer, updater in worlds:
                optimizer.zero_grad()
                total(run_loss(each, batch, seed)).backward()
                optimizer.step()
                if updater is not None:
                    updater.step()
                each.value_estimator.gamma.fill_(0.9 + 0.02 * seed)
                if hasattr(each, "log_alpha"):
                    each.log_alpha = -0.1 * seed


@pytest.mark.parametrize("contract", REPLAYED.values(), ids=list(REPLAYED))
def test_what_changes_between_replays_is_seen(contract, monkeypatch):
    """CASES 33: noise, temperature, statistics, discount and data are read at each replay of a captured step."""
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
            running = [buffer.clone() for buffer in loss.buffers() if buffer.is_floating_point()]
            return [*losses_of(out).values(), memory["td_error"], *running]

        once = step if machine is None else capture(step, warmup=2)
        found = []
        for number, batch in enumerate(batches):
            memory.update_(batch)
            if number == 3:
                for name, value in (("log_alpha", -1.5), ("reward_scale", 0.5), ("policy_noise", 0.7)):
                    if hasattr(loss, name):
                        setattr(loss, name, value)
                if "target_entropy" not in contract.lacks:
                    loss.target_entropy = 0.3
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
    loss, other, batch = contract.loss(target_entropy=-2.0), contract.loss(target_entropy=-2.0), contract.batch(6)
    with torch.no_grad():
        for tensor in (*other.parameters(), *other.buffers()):
            if tensor.is_floating_point() and tensor.numel() > 1:
                tensor.mul_(0.9).add_(0.01)
    before, expected = run_loss(loss, batch, SEED), run_loss(other, batch, SEED)
    assert not torch.equal(expected["loss_actor"], before["loss_actor"])
    given = {name: tensor.detach().clone() for name, tensor in (*other.named_parameters(), *other.named_buffers())}
    learnt = [given[name].requires_grad_() for name, _ in other.named_parameters()]
    torch.manual_seed(SEED)
    through = torch.func.functional_call(loss, given, (batch.clone(),))
    slopes = torch.autograd.grad(total(through), learnt)
    torch.testing.assert_close(list(slopes), list(gradients(other, total(expected)).values()))
    torch.testing.assert_close(run_loss(loss, batch, SEED), before)
    copied = copy.deepcopy(loss)
    loss.load_state_dict(other.state_dict())
    pickled = pickle.loads(pickle.dumps(other))
    torch.testing.assert_close(run_loss(copied, batch, SEED), before)
    for out in (through, run_loss(loss, batch, SEED), run_loss(pickled, batch, SEED)):
        torch.testing.assert_close(losses_of(out), losses_of(expected))
    total(run_loss(copied, batch, SEED)).backward()
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.sub_(parameter.grad)
    assert not torch.equal(run_loss(copied, batch, SEED)["loss_actor"], before["loss_actor"])


@every
def test_each_loss_reaches_its_own_parameters_only(contract):
    """The critics' loss the critics, the actor's the actor, and so on; one backward of the sum is one of each."""
    loss = contract.loss()
    out, named = run_loss(loss, contract.batch(6), SEED), dict(loss.named_parameters())
    owners = {"loss_qvalue": "qvalue", "loss_actor": "actor", "loss_alpha": "log_alpha", "loss_value": "value_network"}
    for name, value in losses_of(out).items():
        slopes = torch.autograd.grad(value, list(named.values()), retain_graph=True, allow_unused=True)
        reached = {key for key, slope in zip(named, slopes, strict=True) if slope is not None and slope.any()}
        assert reached
        assert all(key.startswith(owners[name]) for key in reached), name


@of_each_form
def test_updates_that_leave_the_actor_alone(contract):
    """``critic_losses`` gives the numbers and gradients of a whole call with the same noise, and nothing to others."""
    loss, batch = contract.loss(), contract.batch(6)
    if not hasattr(loss, "critic_losses"):
        pytest.skip("it has parts for that")
    alone = batch.clone()
    torch.manual_seed(SEED)
    found = loss.critic_losses(alone)
    whole = run_loss(loss, batch, SEED)
    assert ("loss_alpha" in found.keys()) == (getattr(loss, "temperature_from", None) == "next")
    for name, value in {**losses_of(found), "td_error": alone["td_error"]}.items():
        assert torch.equal(value, whole[name])
    critics = list(loss.qvalue_network_params.parameters())
    slopes = (torch.autograd.grad(out["loss_qvalue"], critics, retain_graph=True) for out in (found, whole))
    assert all(map(torch.equal, *slopes))
    total(found).backward()
    assert all(parameter.grad is None for parameter in loss.actor_network_params.parameters())


@of_each_class
def test_a_second_derivative_is_refused(contract):
    """It was taken without the kernel's part: a wrong number without a word."""
    loss, batch = contract.loss(target_entropy=0.5), contract.batch(6)
    parameters = list(loss.parameters())
    found = torch.autograd.grad(total(run_loss(loss, batch, 0)), parameters, create_graph=True)
    penalty = sum(each.square().sum() for each in found)
    with pytest.raises(RuntimeError, match="has no gradient of its gradient"):
        torch.autograd.grad(penalty, parameters, allow_unused=True)


@of_each_class
def test_the_batch_is_left_as_it_was(contract):
    """Only the priorities are added, and with ``skip_done_states`` which rows have one."""
    for skip, added in ((False, {"td_error"}), (True, {"td_error", "td_error_mask"})):
        batch = contract.batch(4)
        before = batch.clone()
        contract.loss(skip_done_states=skip)(batch)
        assert set(batch.keys(True, True)) - set(before.keys(True, True)) == added
        assert (batch.exclude(*added) == before).all()
        assert not batch["td_error"].requires_grad


@of_each_class
@pytest.mark.parametrize("key", [("collector", "mask"), "shifted_valid"])
def test_masked_rows_have_no_priority(contract, key):
    """The batch says so, and buffers leave the old one."""
    batch, mask = contract.batch(4), torch.tensor([True, False, True, False])
    batch[key] = mask
    contract.loss()(batch)
    assert torch.equal(batch["td_error_mask"].reshape(-1), mask)


@of_each_class
def test_arguments_in_the_place_of_a_batch(contract):
    """A tuple in the order of ``out_keys``, of what a TensorDict gives. A missing entry is named."""
    loss, batch = contract.loss(target_entropy=-2.0), contract.batch(6)
    names = {"action", "observation", *(("next", n) for n in ("observation", "reward", "done", "terminated"))}
    assert set(loss.in_keys) == names
    torch.manual_seed(SEED)
    out = loss(**{"_".join(key) if isinstance(key, tuple) else key: batch[key] for key in names})
    truth = run_loss(loss, batch, SEED)
    assert [*loss.out_keys, "td_error"] == list(truth)
    for name, value in zip(loss.out_keys, out, strict=True):
        torch.testing.assert_close(value, truth[name])
    for missing in ("action", "observation", ("next", "reward"), ("next", "observation")):
        with pytest.raises(KeyError, match=missing if isinstance(missing, str) else missing[-1]):
            loss(batch.exclude(missing))


@of_each_class
def test_keys(contract):
    """Where an entry lies is a setting; None restores it."""
    loss, batch = contract.loss(), contract.batch(4)
    expected = run_loss(loss, batch, SEED)
    loss.set_keys(priority="error", reward=("extra", "gain"), terminated="ended")
    moved = batch.exclude(("next", "terminated"), ("next", "reward"))
    moved["next", "extra", "gain"], moved["next", "ended"] = batch["next", "reward"], batch["next", "terminated"]
    assert {("next", "extra", "gain"), ("next", "ended")} < set(loss.in_keys)
    torch.testing.assert_close(run_loss(loss, moved, SEED), expected)
    loss.set_keys(priority=None, reward=None, terminated=None)
    torch.testing.assert_close(run_loss(loss, batch, SEED), expected)
    with pytest.raises(ValueError, match="priority_key is not an accepted tensordict key"):
        loss.set_keys(priority_key="p")


@of_each_class
def test_weights_can_be_refused_and_demanded(contract):
    batch = contract.batch(4)
    weighted = batch.clone().set("priority_weight", torch.rand(4))
    loss = contract.loss(use_prioritized_weights=False)
    torch.testing.assert_close(run_loss(loss, weighted, SEED), run_loss(loss, batch, SEED))
    with pytest.raises(KeyError, match="priority_weight"):
        contract.loss(use_prioritized_weights=True)(batch)


@of_each_form
def test_discount_and_steps(contract):
    """gamma to the number of steps that the reward spans."""
    batch = contract.batch(6)
    loss = contract.loss()
    loss.value_estimator.gamma.fill_(0.9)
    further = {}
    if not hasattr(loss.value_estimator, "lmbda"):
        further["steps"] = batch["steps_to_next_obs"] = torch.arange(1, 7).unsqueeze(-1)
    assert_values(run_loss(loss, batch, SEED), contract.oracle(loss, batch, SEED, gamma=0.9, **further))


@pytest.mark.skipif(torch.__version__ < (2, 9), reason="older versions of PyTorch make some operations of several")
@class_names
def test_dispatched_operations(name):
    """Forward and backward, with what is reported; TorchRL's SACLoss needs 415 to 1033."""
    contract, most = CLASSES[name], {"TD3Loss": 190, "DiscreteSACLoss": 130}
    loss, batch = contract.loss(), contract.batch(8)
    total(loss(batch)).backward()
    loss.zero_grad()
    with Dispatched() as noted:
        total(loss(batch)).backward()
    assert 50 < len(noted.calls) < most.get(name, 200)
