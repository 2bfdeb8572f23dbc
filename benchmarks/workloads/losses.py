"""Every loss by gpubuf, by hand in plain PyTorch and by TorchRL, on the same parameters: forward and backward.

They are made by :func:`made`, which asserts that their losses and gradients agree with those by hand.
"""

from __future__ import annotations

import copy
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any
from unittest import mock

import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor, nn
from torch.distributions import Categorical

from benchmarks.measure.clocks import Call
from benchmarks.measure.in_turn import Contender
from benchmarks.peers.libraries import UnavailableError, needing
from benchmarks.workloads import plain_losses as plain
from benchmarks.workloads.plain_losses import ACTION, OBSERVATION, PlainLoss, make_batch
from gpubuf import modules, objectives
from gpubuf.modules import MLP, EnsembleMLP

#: Losses that are compiled at every size of a batch.
COMPILED_WIDE = ("sac", "fastsac", "flashsac")
LOSSES = ("loss_actor", "loss_qvalue", "loss_alpha")
#: Contenders: a loss by hand, ours and TorchRL's.
BY_HAND, OURS, TORCHRL = "plain PyTorch", "gpubuf", "TorchRL"

Networks = tuple[Any, Any]
"""(actor, critics)."""


def wave(shape: Sequence[int], device: Any = None) -> Tensor:
    """Numbers that look like normal ones, by a formula: the same for every batch of the last two dimensions."""
    last = torch.Size(shape[-2:])
    noise = 1.4 * torch.sin(0.3 + 1.7 * torch.arange(last.numel(), dtype=torch.float32, device=device)).reshape(last)
    return noise.expand(shape).clone()


@contextmanager
def without_chance() -> Iterator[None]:
    """Within it PyTorch's random numbers follow a formula, in whatever order libraries ask for them."""

    def shaped(*shape: Any, device: Any = None, **_: Any) -> Tensor:
        return wave(shape[0] if isinstance(shape[0], (tuple, list)) else shape, device)

    with (
        mock.patch.object(torch, "randn", shaped),
        mock.patch.object(torch, "randn_like", lambda x, **_: wave(x.shape, x.device)),
        mock.patch.object(torch, "normal", lambda mean, std: mean + std * wave(mean.shape, mean.device)),
        mock.patch.object(torch.distributions.normal, "_standard_normal", lambda shape, **more: shaped(shape, **more)),
        mock.patch.object(torch, "randperm", lambda n, device=None, **_: torch.arange(n, device=device)),
    ):
        yield


def with_own_parameters(module: nn.Module) -> list[nn.Module]:
    """The parts of ``module`` that hold parameters."""
    return [part for part in module.modules() if any(True for _ in part.parameters(recurse=False))]


@torch.no_grad()
def copy_parameters(source: nn.Module, networks: list[nn.Module]) -> None:
    """Copy from a network of gpubuf, or net k of an ensemble of them into the k-th of ``networks``."""
    stacked = any(isinstance(getattr(part, "ensemble_size", None), int) for part in source.modules())
    for k, network in enumerate(networks):
        for ours, theirs in zip(with_own_parameters(source), with_own_parameters(network), strict=True):
            for name, parameter in theirs.named_parameters(recurse=False):
                # Of a norm with unit rows one parameter has both.
                name = {"weight": "scale", "bias": "shift"}[name] if hasattr(ours, "shift") else name
                value = getattr(ours, name)[k] if stacked else getattr(ours, name)
                parameter.copy_(value.T if stacked and parameter.ndim == 2 else value.reshape(parameter.shape))


@dataclass(frozen=True)
class Workload:
    """One loss.

    Attributes:
        name: gpubuf's name of the loss, or of one of its presets; TorchRL's is the same.
        plain: makes the loss by hand.
        networks: makes gpubuf's (actor, critics).
        options: of gpubuf's loss and TorchRL's.
        same: the losses in which TorchRL's agrees; none: it has no such loss.
        more: of the title.
    """

    name: str
    plain: Callable[[], PlainLoss]
    networks: Callable[[], Networks]
    options: Mapping[str, Any] = field(default_factory=dict)
    same: tuple[str, ...] = LOSSES
    more: str = ""

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.name}{self.more}"

    @property
    def contenders(self) -> list[str]:
        """Who can do it, the one that the others are compared with first."""
        return [BY_HAND, OURS, *([TORCHRL] if self.same else [])]

    def ours(self, actor: Any, critics: Any) -> Any:
        """gpubuf's loss of these networks."""
        return attrgetter(self.name)(objectives)(actor, critics, **self.options)


VALUES = (["observation", "action"], ["state_action_value"])
ACTION_VALUES = (["observation"], ["action_value"])


def gaussian_and_values(nets: int, **critic_options: Any) -> Networks:
    """SAC's actor, and critics of two hidden layers."""
    critics = EnsembleMLP(nets, OBSERVATION + ACTION, 1, (256, 256), **critic_options)
    return modules.make_sac_actor(OBSERVATION, ACTION), TensorDictModule(critics, *VALUES)


def categorical_actor(network: nn.Module) -> Any:
    """A policy over indices."""
    options = {"distribution_class": Categorical, "distribution_kwargs": {"validate_args": False}}
    head = ProbabilisticTensorDictModule(["logits"], ["action"], **options)
    return ProbabilisticTensorDictSequential(TensorDictModule(network, ["observation"], ["logits"]), head)


def discrete_networks() -> Networks:
    critics = EnsembleMLP(2, OBSERVATION, plain.ACTIONS, (256, 256))
    actor = categorical_actor(MLP(OBSERVATION, plain.ACTIONS, (256, 256)))
    return actor, TensorDictModule(critics, *ACTION_VALUES)


def deterministic_networks() -> Networks:
    network = nn.Sequential(MLP(OBSERVATION, ACTION, (256, 256)), nn.Tanh())
    return TensorDictModule(network, ["observation"], ["action"]), gaussian_and_values(2)[1]


def program_networks(program: str, actor: Any, critics: Any) -> Networks:
    """Those of FastSAC or FlashSAC, of sizes as :mod:`benchmarks.workloads.plain_losses` has them."""
    make_actor, make_critics = (getattr(modules, f"make_{program}_{part}") for part in ("actor", "critic"))
    return make_actor(OBSERVATION, ACTION, actor), make_critics(OBSERVATION, ACTION, critics)


ENTROPY = {"target_entropy": -float(ACTION)}
TEN = {"num_qvalue_nets": 10, **ENTROPY}
DISCRETE = {"action_space": "categorical", "num_actions": plain.ACTIONS}
BOUNDS = {"bounds": (-1.0, 1.0)}
WORKLOADS = {
    "sac": Workload("SACLoss", plain.PlainSAC, partial(gaussian_and_values, 2), ENTROPY),
    # Its entropy, and so the temperature's loss, mixes in the actions of the next states.
    "redq": Workload(
        "REDQLoss", plain.PlainREDQ, partial(gaussian_and_values, 10), TEN, same=LOSSES[:2], more=", ten critics"
    ),
    "crossq": Workload(
        "CrossQLoss",
        plain.PlainCrossQ,
        partial(gaussian_and_values, 2, norm="batch", norm_kwargs={"momentum": 0.01}),
        ENTROPY,
    ),
    "discrete": Workload("DiscreteSACLoss", plain.PlainDiscreteSAC, discrete_networks, DISCRETE),
    "td3": Workload("TD3Loss", plain.PlainTD3, deterministic_networks, BOUNDS, same=LOSSES[:2]),
    "fastsac": Workload(
        "DistributionalSACLoss.fastsac",
        plain.PlainFastSAC,
        partial(program_networks, "fastsac", plain.FASTSAC_CELLS, plain.FASTSAC_CELLS),
        same=(),
    ),
    "flashsac": Workload(
        "DistributionalSACLoss.flashsac",
        plain.PlainFlashSAC,
        partial(program_networks, "flashsac", *plain.FLASHSAC_WIDTHS),
        same=(),
    ),
}


class Pair(nn.Module):
    """A network of observation and action, or of their concatenation."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *inputs: Tensor) -> Tensor:
        value: Tensor = self.network(torch.cat(inputs, -1) if len(inputs) > 1 else inputs[0])
        return value


def for_torchrl(network: nn.Module) -> nn.Module:
    """A copy of a plain network with PyTorch's own batch norms, which TorchRL can run on several critics at once."""
    if not isinstance(network, plain.Layers):
        return copy.deepcopy(network)
    parts: list[nn.Module] = []
    for part in network.parts:
        if isinstance(part, plain.BatchNorm):
            norm = nn.BatchNorm1d(len(part.weight), momentum=0.01)
            norm.weight, norm.bias = copy.deepcopy((part.weight, part.bias))
            parts += [norm, nn.ReLU()]
        else:
            parts.append(copy.deepcopy(part))
    return nn.Sequential(*parts)


def torchrls(workload: Workload, by_hand: PlainLoss) -> nn.Module:
    """TorchRL's loss, on copies of the networks of ``by_hand``."""
    with needing("TorchRL"):
        from torchrl import objectives
        from torchrl.modules import NormalParamExtractor, ProbabilisticActor, TanhNormal
    name, keys = workload.name, VALUES
    network: nn.Module = copy.deepcopy(by_hand.actor)
    if name == "DiscreteSACLoss":
        actor, keys = categorical_actor(network), ACTION_VALUES
    elif name == "TD3Loss":
        actor = TensorDictModule(network, ["observation"], ["action"])
    else:
        extract = NormalParamExtractor(scale_mapping="biased_softplus_1.0", scale_lb=plain.LOWEST_SCALE)
        head = TensorDictModule(nn.Sequential(network, extract), ["observation"], ["loc", "scale"])
        actor = ProbabilisticActor(
            head, in_keys=["loc", "scale"], distribution_class=TanhNormal, return_log_prob=name == "REDQLoss"
        )
    critics = [TensorDictModule(Pair(for_torchrl(critic)), *keys) for critic in by_hand.critics]
    with needing("TorchRL"):
        loss = getattr(objectives, name)(actor, critics, **{"num_qvalue_nets": len(critics), **workload.options})
        loss.make_value_estimator(gamma=by_hand.gamma)
        if any("target_qvalue" in key for key in loss._modules):
            objectives.SoftUpdate(loss, tau=0.005)
    return loss  # type: ignore[no-any-return]


def summed(out: Any) -> Tensor:
    """The sum of the losses."""
    total: Tensor = out["loss_actor"] + out["loss_qvalue"]
    return total + out["loss_alpha"] if "loss_alpha" in out else total


def agree(workload: Workload, name: str, loss: Any, by_hand: PlainLoss, batch: TensorDict) -> None:
    """Assert that a loss, and the gradient that the actor's last layer gets from it, are those of the loss by hand."""
    by_hand = copy.deepcopy(by_hand)  # whose running statistics move with each call
    with without_chance():
        found, expected = loss(batch.clone()), by_hand(batch)
    keys = workload.same if name == TORCHRL else [key for key in LOSSES if key in expected]
    # TorchRL keeps actions away from the ends of their range, which shows in the fourth digit.
    rtol = 2e-3 if name == TORCHRL else 1e-4
    for key in keys:
        text = f"{key} of {name}'s {workload.title}"
        torch.testing.assert_close(
            found[key], expected[key], rtol=rtol, atol=rtol / 10, msg=lambda m, t=text: f"{t}: {m}"
        )
    parameters = [list(by_hand.actor.parameters())[-1]]
    (theirs,) = torch.autograd.grad(expected["loss_actor"], parameters)
    parameters = [p for p in loss.actor_network_params.parameters() if p.shape == theirs.shape][-1:]
    ours = torch.cat(torch.autograd.grad(found["loss_actor"], parameters))
    torch.testing.assert_close(ours, theirs, rtol=20 * rtol, atol=rtol / 10)


def forward_backward(loss: Callable[[TensorDict], Any], parameters: list[Tensor], batch: TensorDict) -> Call:
    """The call to time."""

    def call() -> None:
        summed(loss(batch)).backward()
        for parameter in parameters:
            parameter.grad = None

    return call


def made(name: str, who: str, rows: int, device: str = "cpu") -> tuple[Any, TensorDict]:
    """One loss, which agrees with the one by hand, and a batch; the same parameters and rows whoever is asked.

    Args:
        name: one of :data:`WORKLOADS`.
        who: one of its contenders.
        rows: the batch.
        device: where it is computed.

    Raises:
        UnavailableError: TorchRL is missing.
    """
    workload = WORKLOADS[name]
    torch.manual_seed(0)
    batch = make_batch(rows).to(device)
    if name == "discrete":
        batch["action"] = torch.randint(plain.ACTIONS, (rows,), device=device)
    by_hand = workload.plain()
    actor, critics = workload.networks()
    copy_parameters(actor, [by_hand.actor])
    copy_parameters(critics, list(by_hand.critics))
    by_hand.targets.load_state_dict(by_hand.critics.state_dict())
    if isinstance(by_hand, plain.PlainTD3):
        by_hand.target_actor.load_state_dict(by_hand.actor.state_dict())
    by_hand.to(device)
    if who == BY_HAND:
        return by_hand, batch
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss = workload.ours(actor, critics).to(device) if who == OURS else torchrls(workload, by_hand)
        agree(workload, who, loss, by_hand, batch)
    return loss, batch


def prepare(name: str, who: str, rows: int, device: str) -> Call:
    """Check a loss against the one by hand, and return the call to time: forward, and backward of the sum."""
    loss, batch = made(name, who, rows, device)
    return forward_backward(loss, list(loss.parameters()), batch)


def calls(name: str, rows: int, compiled: bool) -> dict[str, Call]:
    """The calls of one loss by contender; ``compiled``: also ours and the one by hand under ``torch.compile``."""
    found = {}
    for who in WORKLOADS[name].contenders:
        try:
            found[who] = prepare(name, who, rows, "cpu")
        except UnavailableError as error:
            print(f"{name}: {error}")
    if compiled:
        found |= {f"{who}, compiled": compiled_call(*made(name, who, rows)) for who in (BY_HAND, OURS)}
    return found


def contenders(name: str, batches: Sequence[int] = (256, 1024)) -> dict[str, Contender]:
    """A loss with its networks at every size of a batch; compiled where there is a C++ compiler, and at most sizes."""
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    found: dict[str, dict[str, Call]] = {}
    for rows in batches:
        # Compiling takes longer than measuring.
        compiled = compiler is not None and (rows == batches[0] or name in COMPILED_WIDE)
        for who, call in calls(name, rows, compiled).items():
            found.setdefault(who, {})[f"batch of {rows}"] = call
    return {
        # What is compiled has no operations of its own.
        who: Contender(of_sizes, counted=None if ", " in who else of_sizes[f"batch of {batches[0]}"])
        for who, of_sizes in found.items()
    }


def compiled_call(loss: Any, batch: TensorDict) -> Call:
    """The call under ``torch.compile``, once it agrees with the eager one on the same noise."""
    import torch._dynamo
    import torch._inductor.config as inductor

    inductor.fallback_random = True
    torch._dynamo.reset()
    compiled = torch.compile(loss)
    found = []
    for each in (loss, compiled, compiled):
        torch.manual_seed(1)
        found.append({key: value.detach().clone() for key, value in each(batch).items() if key in LOSSES})
    for key, value in found[0].items():
        torch.testing.assert_close(found[2][key], value, rtol=1e-3, atol=1e-4)
    return forward_backward(compiled, list(loss.parameters()), batch)
