"""Case 62: compiled and eager losses agree in values, gradients and statistics, over batch norms that move fast.

Inductor computes in the backward anew what is cheap, also from statistics that the forward has moved.
"""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from gpubuf.modules import MLP, EnsembleMLP, make_flashsac_actor, make_flashsac_critic
from gpubuf.objectives import CrossQLoss, DiscreteSACLoss, DistributionalSACLoss, REDQLoss, SACLoss, TD3Loss
from tests.contracts import SLOW_AND_NIGHTLY, first_quick
from tests.contracts.objectives import NORMALISED, TorchCritic, norms
from tests.contracts.objectives import normalised_actor as actor
from tests.support.losses_setup import ACTIONS, discrete_actor, discrete_batch
from tests.support.sac_setup import ACTION, KEYS, OBSERVATION, VALUE, make_batch

# The import of Inductor warns of PyTorch's own code.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")

F64 = {"dtype": torch.float64}
FAST, RENORM = norms(), norms("batch_renorm", renorm_warmup=0)
PAIR = OBSERVATION + ACTION


def critic(outputs=1, nets=2, **options):
    return TensorDictModule(EnsembleMLP(nets, PAIR, outputs, (8,), **(options or FAST)), KEYS, VALUE)


class Batched(TorchCritic):
    """It runs as it is, as a batch of one."""

    ensemble_size = 1

    def forward(self, observation, action):
        return super().forward(observation, action).unsqueeze(0)


def state_value():
    return TensorDictModule(MLP(OBSERVATION, 1, (8,), **FAST), ["observation"], ["state_value"])


def values_of_actions():
    return TensorDictModule(EnsembleMLP(2, OBSERVATION, ACTIONS, (8,), **FAST), ["observation"], ["action_value"])


def deterministic():
    network = nn.Sequential(MLP(OBSERVATION, ACTION, (8,), **FAST), nn.Tanh())
    return TensorDictModule(network, ["observation"], ["action"])


def flashsac():
    sizes = {"width": 4, "num_blocks": 1, "expansion": 2, **F64}
    critic = make_flashsac_critic(OBSERVATION, ACTION, num_atoms=11, **sizes)
    networks = make_flashsac_actor(OBSERVATION, ACTION, **sizes), critic
    for part in (each for network in networks for each in network.modules()):
        if hasattr(part, "momentum"):
            part.momentum = 0.5
    return DistributionalSACLoss.flashsac(*networks, num_atoms=11)


ENTROPY = {"target_entropy": -3.0}
LOSSES = {
    "SACLoss": lambda: SACLoss(actor(), critic(), **ENTROPY),
    "SACLoss, batch renorm": lambda: SACLoss(actor(**RENORM), critic(**RENORM), delay_actor=True, **ENTROPY),
    "SACLoss, value network": lambda: SACLoss(actor(), critic(), state_value(), **ENTROPY),
    "SACLoss, PyTorch's norms": lambda: SACLoss(actor(), NORMALISED["vmap"](), **ENTROPY),
    "DiscreteSACLoss": lambda: DiscreteSACLoss(
        discrete_actor(network=MLP(OBSERVATION, ACTIONS, (8,), **FAST)),
        values_of_actions(),
        num_actions=ACTIONS,
        action_space="one-hot",
    ),
    "TD3Loss": lambda: TD3Loss(deterministic(), critic(), bounds=(-1.0, 1.0)),
    "REDQLoss": lambda: REDQLoss(actor(), critic(nets=3), num_qvalue_nets=3, sub_sample_len=2, **ENTROPY),
    "CrossQLoss": lambda: CrossQLoss(actor(), critic(), **ENTROPY),
    "CrossQLoss, batch renorm": lambda: CrossQLoss(actor(**RENORM), critic(**RENORM), **ENTROPY),
    "CrossQLoss, vmap of PyTorch's norms": lambda: CrossQLoss(actor(), NORMALISED["vmap"](), **ENTROPY),
    "CrossQLoss, vmap of ours": lambda: CrossQLoss(
        actor(), TensorDictModule(MLP(PAIR, 1, (8,), **RENORM), KEYS, VALUE), **ENTROPY
    ),
    "CrossQLoss, loop": lambda: CrossQLoss(actor(), NORMALISED["vmap"](), deactivate_vmap=True, **ENTROPY),
    "CrossQLoss, PyTorch's norm in a batched network": lambda: CrossQLoss(
        actor(), TensorDictModule(Batched(), KEYS, VALUE), num_qvalue_nets=1, **ENTROPY
    ),
    "FastSAC": lambda: DistributionalSACLoss.fastsac(actor(), critic(11), v_min=-3.0, v_max=3.0, num_atoms=11),
    "FlashSAC": flashsac,
}


def as_inductor(graph, inputs, **options):
    """Inductor's passes and its division into forward and backward, but their graphs run in Python: no C++."""
    from functorch.compile import make_boxed_func
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(graph, inputs, inner_compile=lambda part, *_, **__: make_boxed_func(part.forward))


def outcome(loss, function, batch):
    """Losses, priorities, gradients and all buffers after a call with the same noise."""
    torch.manual_seed(3)
    batch = batch.copy()
    out = function(batch)
    losses = {key: out.get(key) for key in out.keys() if key.startswith("loss_")}
    named = {name: parameter for name, parameter in loss.named_parameters() if parameter.requires_grad}
    slopes = torch.autograd.grad(sum(losses.values()), named.values())
    found = {**losses, "td_error": batch.get(loss.tensor_keys.priority)}
    found |= {f"gradient of {name}": slope for name, slope in zip(named, slopes, strict=True)}
    return found | {name: buffer.clone() for name, buffer in loss.named_buffers()}


def check(name, sizes=(6, 10), **options):
    torch._dynamo.reset()
    torch.manual_seed(0)
    loss = LOSSES[name]()
    other = copy.deepcopy(loss)
    # Sizes vary from the beginning, so that one compilation serves all.
    compiled = torch.compile(other, fullgraph=True, dynamic=True, **options)
    moved = 0
    for rows in sizes:
        batch = discrete_batch(rows) if name == "DiscreteSACLoss" else make_batch(rows)
        before = {key: value.clone() for key, value in loss.named_buffers() if "running" in key}
        expected, found = outcome(loss, loss, batch), outcome(other, compiled, batch)
        for key, value in expected.items():
            torch.testing.assert_close(
                found[key], value, rtol=1e-9, atol=1e-9, equal_nan=True, msg=lambda text, key=key: f"{key}: {text}"
            )
        moved += sum(not torch.equal(expected[key], value) for key, value in before.items())
    assert moved


#: At night: FlashSAC's takes a minute and a half, and of what the others are made, other losses are made too.
NIGHTLY = (
    "FlashSAC",
    "SACLoss",
    "SACLoss, value network",
    "CrossQLoss, batch renorm",
    "CrossQLoss, vmap of PyTorch's norms",
)
#: When to run a loss, if not with the slow tests.
MARKS = {**dict.fromkeys(NIGHTLY, pytest.mark.nightly)}


@pytest.mark.parametrize("name", [pytest.param(n, marks=MARKS.get(n, pytest.mark.slow)) for n in LOSSES])
def test_the_backward_reads_the_statistics_of_its_forward(name):
    with torch._inductor.config.patch(fallback_random=True):
        check(name, backend=as_inductor)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
# PyTorch's own, of its lowering of `diagonal`.
@pytest.mark.filterwarnings("ignore:.torch._prims_common.check. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "name", first_quick(["FlashSAC", "SACLoss, value network", "CrossQLoss"], 2, marks=SLOW_AND_NIGHTLY)
)
def test_inductor(name):
    """With the compiler of C++, which takes most of a minute each: those whose lowering is special."""
    check(name, options={"fallback_random": True})
