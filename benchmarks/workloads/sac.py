"""Soft actor-critic: the loss with its backward, and a whole update, by each library on the same networks."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from benchmarks.peers.libraries import ALPHA, BETA, EPS, UnavailableError
from benchmarks.workloads.plain_sac import (
    ACTION,
    LOWEST_SCALE,
    OBSERVATION,
    PlainSAC,
    forward_backward,
    make_batch,
    perceptron,
)

LOSSES = ("loss_actor", "loss_qvalue", "loss_alpha")
#: Rows of the buffer that updates draw from, speed of the targets, learning rate.
STORED, TAU, RATE = 100_000, 0.005, 3e-4


def fused(plain: PlainSAC, device: str) -> nn.Module:
    """A `SACLoss` on two critics as one ensemble, with the parameters of ``plain``."""
    from gpubuf import SACLoss
    from gpubuf.modules import make_sac_actor, make_sac_critic

    actor = make_sac_actor(OBSERVATION, ACTION, device=device)
    critics = make_sac_critic(OBSERVATION, ACTION, device=device)
    loss = SACLoss(actor, critics, target_entropy=-float(ACTION)).to(device)
    # The ensemble keeps weights as [in, out] and biases as [1, out], nn.Linear as [out, in] and [out].
    return with_parameters(loss, plain, lambda stacked: stacked.mT if stacked.ndim == 3 else stacked.unsqueeze(1))


def torchrls(plain: PlainSAC, device: str) -> nn.Module:
    """TorchRL's `SACLoss` on the same networks, with the parameters of ``plain``."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from tensordict.nn import TensorDictModule
            from torchrl.modules import NormalParamExtractor, ProbabilisticActor, TanhNormal, ValueOperator
            from torchrl.objectives import SACLoss
    except ImportError as error:
        raise UnavailableError(f"TorchRL is not installed here: {error}") from error

    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = perceptron(OBSERVATION + ACTION, 1, 256)

        def forward(self, observation: Tensor, action: Tensor) -> Tensor:
            return self.network(torch.cat([observation, action], -1))

    extract = NormalParamExtractor(scale_mapping="biased_softplus_1.0", scale_lb=LOWEST_SCALE)
    network = nn.Sequential(perceptron(OBSERVATION, 2 * ACTION, 256), extract)
    actor = ProbabilisticActor(
        TensorDictModule(network, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
    )
    critic = ValueOperator(Critic(), in_keys=["observation", "action"])
    loss = SACLoss(actor, critic, num_qvalue_nets=2, target_entropy=-float(ACTION))
    loss.make_value_estimator(gamma=plain.gamma)
    return with_parameters(loss.to(device), plain, lambda stacked: stacked)


def with_parameters(loss: Any, plain: PlainSAC, layout: Callable[[Tensor], Tensor]) -> Any:
    """The loss, with the networks' parameters copied from ``plain``; ``layout`` turns those of all critics into its."""
    pairs = list(zip(loss.actor_network_params.values(True, True), plain.actor.parameters(), strict=True))
    for parameters in (loss.qvalue_network_params, loss.target_qvalue_network_params):
        critics = [critic.parameters() for critic in plain.critics]
        for one, *others in zip(parameters.values(True, True), *critics, strict=True):
            pairs.append((one, layout(torch.stack(others))))
    with torch.no_grad():
        for one, other in pairs:
            assert one.shape == other.shape
            one.data.copy_(other)
    return loss


#: How each library's loss is made, by the name of its interface.
LOSS_MAKERS: dict[str, Callable[[PlainSAC, str], nn.Module]] = {
    "gpubuf": fused,
    "torchrl": torchrls,
    "plain": lambda plain, device: plain,
}


def made(library: str, device: str) -> tuple[nn.Module, PlainSAC]:
    """The library's loss, and the plain one with the same parameters."""
    torch.manual_seed(0)
    plain = PlainSAC().to(device)
    return LOSS_MAKERS[library.partition("-")[0]](plain, device), plain


def check(loss: nn.Module, plain: PlainSAC, batch: TensorDict, rtol: float = 1e-4) -> None:
    """Assert that both give the same losses, on the same random numbers."""
    torch.manual_seed(0)
    ours = loss(batch.clone())
    torch.manual_seed(0)
    theirs = plain(batch)
    for name in LOSSES:
        torch.testing.assert_close(ours[name], theirs[name], rtol=rtol, atol=rtol / 10)


def prepare_loss(library: str, rows: int, device: str) -> Callable[[], object]:
    """Check one against the other, and return the call to time: forward, and backward of the sum of the losses."""
    loss, plain = made(library, device)
    batch = make_batch(rows).to(device)
    # TorchRL keeps actions away from the ends of their range, which shows in the fourth digit.
    check(loss, plain, batch, rtol=1e-3 if library == "torchrl" else 1e-4)

    def call() -> None:
        loss.zero_grad(set_to_none=True)
        forward_backward(loss, batch)

    return call


def prepare_update(library: str, rows: int, device: str) -> Callable[[], object]:
    """A whole update: sample by priority, losses, backward, Adam, targets, new priorities."""
    loss, plain = made(library, device)
    check(loss, plain, make_batch(rows).to(device), rtol=1e-3 if library == "torchrl" else 1e-4)
    buffer = filled_buffer(library, device)
    update = updating(library, loss, buffer, rows, device)
    if library == "gpubuf-graph":
        if device != "cuda":
            raise UnavailableError("CUDA graphs need a GPU: elsewhere gpubuf.capture runs the same calls one by one")
        from gpubuf import capture

        update = capture(update)
        for _ in range(6):
            update()
    check_update(loss, buffer, update, rows, device)
    return update


def filled_buffer(library: str, device: str) -> Any:
    """A prioritized buffer of :data:`STORED` transitions."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            data = importlib.import_module("torchrl.data" if library == "torchrl" else "gpubuf")
            storage = data.LazyTensorStorage(STORED, device=device)
            buffer = data.TensorDictPrioritizedReplayBuffer(alpha=ALPHA, beta=BETA, eps=EPS, storage=storage)
    except ImportError as error:
        raise UnavailableError(f"{library} is not installed here: {error}") from error
    except RuntimeError as error:
        if "SegmentTree" not in str(error):
            raise
        raise UnavailableError(f"TorchRL's prioritized sampler does not load here: {error}") from error
    buffer.extend(make_batch(STORED).to(device))
    return buffer


def updating(library: str, loss: Any, buffer: Any, rows: int, device: str) -> Callable[[], Any]:
    """One update, as a user writes it; it returns the index of the rows drawn."""
    data = importlib.import_module("torchrl.objectives" if library == "torchrl" else "gpubuf")
    target = data.SoftUpdate(loss, tau=TAU)
    on_gpu = device == "cuda"
    optimizer = torch.optim.Adam(loss.parameters(), lr=RATE, capturable=on_gpu, fused=on_gpu)

    def update() -> Tensor:
        batch = buffer.sample(rows)
        losses = loss(batch)
        optimizer.zero_grad(set_to_none=True)
        (losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_alpha"]).backward()
        optimizer.step()
        target.step()
        buffer.update_tensordict_priority(batch)
        return batch["index"]

    return update


def check_update(loss: Any, buffer: Any, update: Callable[[], Any], rows: int, device: str) -> None:
    """Assert that an update moves all networks, the targets as far as they should, and sets priorities."""
    everything = torch.arange(STORED, device=device)
    # So little that the rows of one update outweigh all others together.
    buffer.update_priority(everything, torch.full((STORED,), 1e-8, device=device))
    learned = [name for name in loss.state_dict() if "network_params." in name or name == "log_alpha"]
    before = {name: loss.state_dict()[name].detach().clone() for name in learned}
    drawn = update().cpu()
    after = loss.state_dict()
    for name, value in before.items():
        assert not torch.equal(after[name], value), f"{name} did not change"
        assert after[name].isfinite().all(), f"{name} is not finite"
    critics, targets = loss.qvalue_network_params, loss.target_qvalue_network_params
    old = {name: value for name, value in before.items() if "target_qvalue" in name}
    assert len(old) == len(list(targets.values(True, True)))
    for (name, was), critic in zip(old.items(), critics.values(True, True), strict=True):
        torch.testing.assert_close(after[name], was.lerp(critic.detach(), TAU), rtol=1e-4, atol=1e-6)
    again = buffer.sample(rows)["index"].cpu()
    assert torch.isin(again, drawn).float().mean() > 0.5
    buffer.update_priority(everything, torch.ones(STORED, device=device))
