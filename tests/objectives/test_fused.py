"""Updates of soft actor-critic in whole perceptrons: those of autograd where they fit; what goes the general way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from gpubuf import SACLoss
from gpubuf.kernels import perceptrons
from gpubuf.modules import (
    MLP,
    EnsembleMLP,
    LayerNorm,
    TanhNormalActor,
    TanhNormalHead,
    make_fastsac_actor,
    make_fastsac_critic,
    make_flashsac_actor,
    make_flashsac_critic,
    make_sac_actor,
    make_sac_critic,
)
from gpubuf.objectives import DistributionalSACLoss
from gpubuf.objectives.explicit import UnknownError, update_of
from gpubuf.objectives.fused import FUSED, FusedSACUpdate, allows_tf32
from gpubuf.optim import AdamW
from tests.support.counted_launches import counted_launches
from tests.support.fake_cuda import fake_cuda, no_blocking_copies
from tests.support.interpreter import triton_on_cpu
from tests.support.learners import ACTION, OBSERVATION, td3_loss, transitions

F32, KEYS, ROWS = torch.float32, ["observation", "action"], 24


def rows(number: int = ROWS, **more: Any) -> TensorDict:
    return transitions(number, dtype=F32, **more)


def sac(cells: tuple[int, ...] = (8, 12), actor: Any = None, critic: Any = None, **options: Any) -> SACLoss:
    nets = options.get("num_qvalue_nets", 2)
    actor = actor or make_sac_actor(OBSERVATION, ACTION, cells)
    critic = critic or make_sac_critic(OBSERVATION, ACTION, cells, num_nets=nets)
    loss = SACLoss(actor, critic, **{"target_entropy": -1.0, **options})
    # What asks for an updater of the targets, once.
    loss._forward_pre_hooks.clear()
    return loss


def critics_of(network: nn.Module, keys: list[str]) -> TensorDictModule:
    return TensorDictModule(network, keys, ["state_action_value"])


def fused(loss: Any) -> FusedSACUpdate:
    found = update_of(loss, loss.parameters(), FUSED)
    assert type(found) is FusedSACUpdate
    return found


def apart(loss: SACLoss) -> SACLoss:
    """With targets that are not the networks."""
    with torch.no_grad():
        for name, each in loss.named_buffers():
            if "target_" in name and each.ndim:
                each.add_(0.1 * torch.randn_like(each))
    return loss


def check(loss: SACLoss, batch: TensorDict, policy: bool = True) -> None:
    """Losses, priorities and gradients are those of autograd in float32, for the same noise."""
    update = fused(apart(loss))
    mine, theirs = batch.clone(), batch.clone()
    assert update.fits(mine)
    torch.manual_seed(1)
    found = update(mine, policy)
    learning = {name: each for name, each in loss.named_parameters() if each.requires_grad}
    gradients = {name: each.grad for name, each in learning.items()}
    for each in loss.parameters():
        each.grad = None
    torch.manual_seed(1)
    due = loss(theirs) if policy else loss.critic_losses(theirs)
    sum(value for name, value in due.items() if name.startswith("loss_")).backward()
    close = {"rtol": 1e-4, "atol": 1e-5}
    assert found.keys() == {name for name, value in due.items() if value.ndim == 0}
    for name, value in found.items():
        torch.testing.assert_close(value, due[name].detach(), **close)
    assert set(mine.keys(True, True)) == set(theirs.keys(True, True))
    torch.testing.assert_close(mine["td_error"], theirs["td_error"], **close)
    for name, each in learning.items():
        if each.grad is None:
            assert gradients[name] is None, name
            continue
        scale = max(each.grad.abs().max().item(), 1e-3)
        torch.testing.assert_close(gradients[name], each.grad, rtol=0, atol=2e-5 * scale, msg=name)


def bounded() -> SACLoss:
    return sac(actor=make_sac_actor(OBSERVATION, ACTION, (8,), low=[-2.0, -1.0], high=[0.5, 3.0]))


def stacked() -> SACLoss:
    """Critics that SACLoss itself has stacked, whose weights are turned."""
    return sac(critic=critics_of(MLP(OBSERVATION + ACTION, 1, (8, 8)), KEYS))


def action_first() -> SACLoss:
    return sac(critic=critics_of(EnsembleMLP(2, OBSERVATION + ACTION, 1, (8,)), KEYS[::-1]))


def discounted() -> SACLoss:
    loss = sac()
    loss.make_value_estimator(gamma=0.3)
    return loss


def fastsac(atoms: int = 101, critic: Any = None, **options: Any) -> DistributionalSACLoss:
    """Critics and actor with layer norms and SiLU, whose last layer no longer is zero."""
    actor = make_fastsac_actor(OBSERVATION, ACTION, (9, 12))
    critic = critic or make_fastsac_critic(OBSERVATION, ACTION, (12, 7, 5), num_atoms=atoms)
    for each in actor.parameters():
        each.data.add_(0.1 * torch.randn_like(each))
    loss = DistributionalSACLoss.fastsac(actor, critic, num_atoms=atoms, **options)
    loss._forward_pre_hooks.clear()
    return loss


def normed(name: str = "layer", **options: Any) -> TensorDictModule:
    return make_sac_critic(OBSERVATION, ACTION, (8, 8), norm=name, **options)


KNOWN = {
    "plain": sac,
    "FastSAC": fastsac,
    "the smallest critic, for the actor too": lambda: fastsac(11, target="min", actor_value="min"),
    "a mixture, and priorities of values": lambda: fastsac(
        12, target="mixture", priority="value_error", average_critics=True, reward_scale=0.5, reduction="sum"
    ),
    "a temperature of SAC's": lambda: fastsac(
        5, temperature_loss="log_alpha", temperature_from="current", alpha_init=0.3
    ),
    "an entropy by sigma": lambda: fastsac(5, target_sigma=0.15, temperature_from="current"),
    "another support": lambda: fastsac(7, v_min=-1.0, v_max=0.5, fixed_alpha=True),
    "atoms without norms": lambda: fastsac(
        6, critic=make_sac_critic(OBSERVATION, ACTION, (8,), num_atoms=6, activation=nn.SiLU)
    ),
    "norms of critics": lambda: sac(critic=normed()),
    "norms with eps": lambda: sac(critic=normed(norm_kwargs={"eps": 0.3})),
    "SiLU": lambda: sac(
        actor=make_sac_actor(OBSERVATION, ACTION, (8, 8), activation=nn.SiLU),
        critic=make_sac_critic(OBSERVATION, ACTION, (8, 8), activation=nn.SiLU),
    ),
    "squares": lambda: sac(loss_function="l2"),
    "absolute": lambda: sac(loss_function="l1"),
    "sums": lambda: sac(reduction="sum"),
    "one net": lambda: sac(num_qvalue_nets=1),
    "five nets": lambda: sac(num_qvalue_nets=5),
    "a fixed temperature": lambda: sac(fixed_alpha=True, alpha_init=0.3),
    "a least temperature": lambda: sac(min_alpha=0.5, alpha_init=0.1),
    "a largest temperature": lambda: sac(max_alpha=0.5, alpha_init=0.7),
    "an entropy of its own": lambda: sac(target_entropy="auto"),
    "a delayed actor": lambda: sac(delay_actor=True),
    "critics that are their own targets": lambda: sac(delay_qvalue=False),
    "weights that don't count": lambda: sac(use_prioritized_weights=False),
    "one hidden layer": lambda: sac((7,)),
    "three hidden layers": lambda: sac((33, 1, 5)),
    "bounds": bounded,
    "stacked": stacked,
    "action first": action_first,
    "another discount": discounted,
}
WEIGHTS = {"priority_weight": torch.linspace(0.1, 1, ROWS)}


@pytest.mark.parametrize("name", KNOWN)
def test_an_update_is_that_of_autograd(name):
    torch.manual_seed(0)
    for more in ({}, WEIGHTS):
        for policy in (True, False):
            check(KNOWN[name](), rows(**more), policy)


@pytest.mark.parametrize("name", ["plain", "a delayed actor", "stacked", "action first", "FastSAC", "norms of critics"])
def test_an_update_by_the_kernels(name):
    torch.manual_seed(0)
    with triton_on_cpu():
        check(KNOWN[name](), rows(**WEIGHTS))


def test_numbers_of_another_dtype():
    """Rewards in float64, steps as whole numbers, ends as bytes, weights in float64: as they are."""
    batch = rows(priority_weight=torch.linspace(0.1, 1, ROWS, dtype=torch.float64))
    batch["next", "reward"] = batch["next", "reward"].double()
    check(sac(), batch)
    with triton_on_cpu():
        check(sac(), batch)


def frozen() -> SACLoss:
    loss = sac()
    next(loss.actor_network_params.parameters()).requires_grad_(False)
    return loss


def hooked() -> SACLoss:
    loss = sac()
    loss.actor_network.register_forward_hook(lambda *_: None)
    return loss


def of_sequences() -> SACLoss:
    loss = sac()
    loss.make_value_estimator("TDLambda", gamma=0.9, lmbda=0.9)
    return loss


def no_bias() -> SACLoss:
    return sac(critic=critics_of(EnsembleMLP(2, OBSERVATION + ACTION, 1, (8,), bias=False), KEYS))


def several_entries() -> SACLoss:
    return sac(critic=critics_of(EnsembleMLP(2, 2 * OBSERVATION + ACTION, 1, (8,)), ["observation", "aside", "action"]))


def with_a_value_network() -> SACLoss:
    return sac(value_network=TensorDictModule(MLP(OBSERVATION, 1, (8,)), ["observation"], ["state_value"]))


def bounds_of_a_distribution() -> SACLoss:
    loss = sac()
    bounds = {"low": torch.tensor([-2.0, -1.0]), "high": torch.tensor([0.5, 3.0])}
    loss.actor_network.module[1].distribution_kwargs = bounds
    return loss


def bounds_of_a_head(low: Tensor, high: Tensor) -> SACLoss:
    network = make_sac_actor(OBSERVATION, ACTION, (8,)).module[0]
    head = TanhNormalHead(low, high, in_keys=["loc", "scale"], out_keys=["action"])
    return sac(actor=TanhNormalActor(network, head))


def one_norm_for_all_nets() -> SACLoss:
    critic = make_sac_critic(OBSERVATION, ACTION, (8,), norm="layer")
    critic.module.layers[1] = LayerNorm(8, activation="relu")
    return sac(critic=critic)


UNKNOWN = {
    "bounds that components share": lambda: bounds_of_a_head(torch.tensor([-2.0]), torch.tensor([0.5])),
    "bounds with strides": lambda: bounds_of_a_head(*torch.tensor([[-2.0, 0.5], [-1.0, 3.0]]).unbind(1)),
    "a norm that nets share": one_norm_for_all_nets,
    "bounds that are options of a distribution": bounds_of_a_distribution,
    "float64": lambda: sac().double(),
    "bfloat16": lambda: sac().bfloat16(),
    "two activations": lambda: sac(critic=make_sac_critic(OBSERVATION, ACTION, (8,), activation=nn.SiLU)),
    "no hidden layer": lambda: sac(()),
    "no bias": no_bias,
    "several entries": several_entries,
    "a value network": with_a_value_network,
    "frozen": frozen,
    "hooks": hooked,
    "targets over several steps": of_sequences,
    "losses of rows": lambda: sac(reduction="none", scalar_output_mode="exclude"),
    "TD3": td3_loss,
    "an actor that is cloned": lambda: fastsac(5, cloning_weight=0.1),
    "RMS norms": lambda: sac(critic=normed("rms")),
    "norms before layers": lambda: sac(critic=normed(norm_place="before")),
    "a norm of the input": lambda: sac(critic=normed(input_norm="layer")),
    "norms without shifts": lambda: sac(critic=normed(norm_kwargs={"bias": False})),
    "norms with unit rows": lambda: sac(critic=normed(unit_rows=True)),
    "another number of atoms": lambda: fastsac(5, critic=make_fastsac_critic(OBSERVATION, ACTION, (8,), num_atoms=6)),
    "FlashSAC": lambda: DistributionalSACLoss.flashsac(
        make_flashsac_actor(OBSERVATION, ACTION, 8), make_flashsac_critic(OBSERVATION, ACTION, 8)
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_goes_the_general_way(name):
    """Whatever a CPU writes out of it."""
    with pytest.raises(UnknownError):
        fused(UNKNOWN[name]())


@pytest.mark.parametrize("make", [fastsac, lambda: sac(critic=normed())])
def test_a_cpu_writes_out_no_norms_and_no_atoms(make):
    with pytest.raises(UnknownError):
        update_of(loss := make(), loss.parameters())


def test_a_subclass_is_not_known():
    class Variant(SACLoss):
        pass

    loss = Variant(make_sac_actor(OBSERVATION, ACTION, (8,)), make_sac_critic(OBSERVATION, ACTION, (8,)))
    loss._forward_pre_hooks.clear()
    with pytest.raises(UnknownError):
        fused(loss)


@pytest.mark.parametrize(
    "change",
    [
        lambda batch: batch.set(("collector", "mask"), torch.arange(ROWS) % 3 > 0),
        lambda batch: batch.double(),
        lambda batch: batch.set("action", batch["action"][:, :1]),
        lambda batch: batch[:0],
        lambda batch: batch.unsqueeze(0),
        lambda batch: batch.exclude("next"),
    ],
)
def test_batches_that_do_not_fit(change):
    update, batch = fused(sac()), rows()
    assert update.fits(batch)
    assert not update.fits(change(batch))


def test_states_to_skip_do_not_fit():
    assert not fused(sac(skip_done_states=True)).fits(rows())


def test_more_elements_than_32_bits_count_do_not_fit():
    """The sums of a layer, of three kinds of rows and two critics."""
    update = fused(sac((8, 12)))
    fitting = ((1 << 31) - 1) // (3 * 2 * 12)
    for number, fits in ((fitting, True), (fitting + 1, False)):
        many = rows(1).apply(lambda each, number=number: each.expand(number, -1), batch_size=[number])
        assert update.fits(many) == fits


# --- precision --------------------------------------------------------------------------------------------------------


@pytest.fixture
def settings():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def precisions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Those that the products of weights are called with from now on."""
    found: list[int] = []
    monkeypatch.setattr(perceptrons, "weight_gradients", lambda *given: found.append(given[-1]))
    return found


def test_precision_is_that_of_pytorch(monkeypatch, settings):
    """TF32 where PyTorch's products may be, bfloat16 under autocast; else float32."""
    update, found = fused(sac()), precisions(monkeypatch)
    update(rows())
    torch.set_float32_matmul_precision("high")
    assert allows_tf32()
    update(rows())
    with torch.autocast("cpu", torch.bfloat16):
        assert update.fits(rows())
        update(rows())
    torch.set_float32_matmul_precision("highest")
    assert not allows_tf32()
    update(rows())
    assert found == [perceptrons.IEEE, perceptrons.TF32, perceptrons.BF16, perceptrons.IEEE]


def test_autocast_to_float16_goes_the_general_way():
    with torch.autocast("cpu", torch.float16):
        assert not fused(sac()).fits(rows())


def test_gradients_in_bfloat16_are_float32_and_near():
    """As those of the general update under autocast are, by rounding alone."""
    loss, batch = sac((32, 32)), rows()
    update, found = fused(loss), []
    for enabled in (False, True):
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            update(batch.clone())
        found.append([each.grad.clone() for each in loss.parameters() if each.requires_grad])
    exact, near = (torch.cat([each.flatten() for each in some]) for some in found)
    assert near.dtype is F32
    assert 1e-4 < float((near - exact).norm() / exact.norm()) < 0.2


# --- launches and waits -----------------------------------------------------------------------------------------------


OF_ATOMS = {"categorical_target_kernel", "categorical_loss_kernel", "finish_loss_kernel"}


@pytest.mark.parametrize(("make", "more"), [(sac, set()), (fastsac, OF_ATOMS)])
@pytest.mark.parametrize(("policy", "launches"), [(True, 5), (False, 4)])
def test_an_update_is_five_launches(policy, launches, make, more):
    """And those of the noise, which are PyTorch's, and of the optimiser; and what the atoms learn, and their loss."""
    update, batch = fused(make()), rows(**WEIGHTS)
    update(batch, policy)
    with triton_on_cpu(), counted_launches() as found:
        update(batch, policy)
    assert sum(found.values()) == launches + len(more)
    assert {name for name in found if not name.startswith("perceptrons_")} == more


def test_the_optimiser_is_one_launch_more():
    loss = sac()
    loss._forward_pre_hooks.clear()
    update, batch = fused(loss), rows(**WEIGHTS)
    optimizer = AdamW([each for each in loss.parameters() if each.requires_grad], 1e-3, targets=loss, tau=0.01)
    update(batch)
    with triton_on_cpu():
        optimizer.step()
        with counted_launches() as found:
            update(batch)
            optimizer.step()
    assert sum(found.values()) == 6


@pytest.mark.parametrize("make", [sac, fastsac])
@pytest.mark.parametrize("policy", [True, False])
def test_an_update_never_waits(policy, make):
    """On fake CUDA tensors, where reading a value raises, as do copies that wait."""
    with fake_cuda(), torch.device("cuda"):
        flags, loss = torch.zeros(ROWS, 1, dtype=torch.bool), make()
        state, action = torch.randn(ROWS, OBSERVATION), torch.randn(ROWS, ACTION)
        following = {"observation": state, "reward": torch.randn(ROWS, 1), "terminated": flags, "done": flags}
        entries = {"observation": state, "action": action, "priority_weight": torch.rand(ROWS), "next": following}
        batch, update = TensorDict(entries, [ROWS]), fused(loss)
        with no_blocking_copies():
            found = update(batch, policy)
        assert {value.device.type for value in found.values()} == {"cuda"}
        assert batch["td_error"].device.type == "cuda"
        assert next(loss.qvalue_network_params.parameters()).grad is not None


# --- learning ---------------------------------------------------------------------------------------------------------


def test_a_policy_learns_as_by_autograd():
    """Many updates on a fixed batch: the critics' loss falls, to where that of autograd falls."""
    last = []
    for known in (True, False):
        torch.manual_seed(0)
        loss, batch = sac((16, 16)), rows()
        learning = [each for each in loss.parameters() if each.requires_grad]
        optimizer = AdamW(learning, 1e-2)
        update = fused(loss)
        values: list[Tensor] = []
        for _ in range(60):
            if known:
                values.append(update(batch)["loss_qvalue"].clone())
            else:
                optimizer.zero_grad()
                losses = loss(batch)
                sum(losses[name] for name in ("loss_qvalue", "loss_actor", "loss_alpha")).backward()
                values.append(losses["loss_qvalue"].detach())
            optimizer.step()
        assert values[-1] < values[0] / 2
        last.append(float(values[-1]))
    assert last[0] == pytest.approx(last[1], rel=0.05)


@pytest.mark.parametrize(
    ("capability", "due"), [((8, 0), "TF32X3"), ((8, 9), "IEEE"), ((9, 0), "TF32X3"), ((12, 0), "IEEE")]
)
def test_float32_is_multiplied_in_parts_where_that_takes_less_time(capability, due, monkeypatch: pytest.MonkeyPatch):
    """GPUs for graphics have as many operations of float32 a second as of TF32."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    assert perceptrons.float32_on(torch.device("cuda", 0)) == getattr(perceptrons, due)
    assert perceptrons.float32_on(torch.device("cpu")) == perceptrons.IEEE


def test_a_temperature_in_a_vector_goes_the_general_way():
    """Which says that a learner minimises scalars."""
    loss = sac()
    loss.log_alpha = nn.Parameter(loss.log_alpha.detach().reshape(1))
    with pytest.raises(UnknownError):
        fused(loss)
