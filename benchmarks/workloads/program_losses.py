"""FastSAC's and FlashSAC's losses as their programs write them in PyTorch: what people run today.

:mod:`benchmarks.workloads.plain_losses` has the same mathematics with more care. As in the programs:

- FastSAC (holosoma, commit fc600e7) computes the places of the moved atoms for each critic anew. The backward of the
  actor's loss gives gradients to the critics' parameters, too, which the next step throws away.
- FlashSAC (commit 87edc90) has its critics in one network with a leading dimension: products by ``einsum``, batch norm
  and RMS norm in elementwise operations. Each call gives log-probabilities and means of all rows.
- Both have separate heads for mean and scale, and ``Normal`` checks its arguments.

What they compute for logs alone is left out.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional

from benchmarks.workloads.plain_losses import (
    ATOMS,
    BatchNorm,
    Layers,
    PlainFastSAC,
    PlainFlashSAC,
    moved_atoms,
    projected_by_index_add,
)


class TwoHeads(nn.Module):
    """An actor that draws: mean and scale by separate layers, from the parameters of a plain actor's last one."""

    def __init__(self, body: nn.Module, last: nn.Linear, scales: tuple[float, float]) -> None:
        super().__init__()
        self.body, self.scales = body, scales
        actions = last.out_features // 2
        self.mean, self.scale = (nn.Linear(last.in_features, actions) for _ in range(2))
        with torch.no_grad():
            for part, rows in ((self.mean, slice(actions)), (self.scale, slice(actions, None))):
                part.weight.copy_(last.weight[rows])
                part.bias.copy_(last.bias[rows])

    def draw(self, *inputs: Tensor | bool) -> tuple[Normal, Tensor]:
        """(distribution before the tanh, a value from it) for every row; further arguments go to the body."""
        x = self.body(*inputs)
        low, high = self.scales
        log_scale = low + 0.5 * (high - low) * (self.scale(x).tanh() + 1)
        normal = Normal(self.mean(x), log_scale.exp())
        return normal, normal.rsample()


class ProgramFastSAC(nn.Module):
    """FastSAC's loss, on copies of the parameters of the plain one."""

    def __init__(self, plain: PlainFastSAC) -> None:
        super().__init__()
        plain = copy.deepcopy(plain)
        *body, last = plain.actor.children()
        assert isinstance(last, nn.Linear)
        self.actor = TwoHeads(nn.Sequential(*body), last, (-5.0, 0.0))
        self.critics, self.targets = plain.critics, plain.targets
        self.log_alpha, self.gamma, self.target_entropy = plain.log_alpha, plain.gamma, plain.target_entropy
        self.support = plain.support
        self.register_buffer("z", torch.linspace(*plain.support, ATOMS))
        self.register_buffer("action_scale", torch.ones(self.actor.mean.out_features))
        self.register_buffer("action_bias", torch.zeros(self.actor.mean.out_features))

    def draw(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """(action, log-density) for every row."""
        normal, x = self.actor.draw(observation)
        tanh, scale = x.tanh(), self.get_buffer("action_scale")
        log_prob = normal.log_prob(x) - torch.log(1 - tanh.pow(2) + 1e-6) - torch.log(scale + 1e-6)
        return tanh * scale + self.get_buffer("action_bias"), log_prob.sum(1)

    def values(self, logits: Tensor) -> Tensor:
        return (logits.softmax(-1) * self.get_buffer("z")).sum(-1)

    def forward(self, batch: TensorDict) -> dict[str, Tensor]:
        observation, following = batch["observation"], batch["next"]
        with torch.no_grad():
            action, next_log_prob = self.draw(following["observation"])
            reward, bootstraps = following["reward"].squeeze(-1), 1 - following["terminated"].squeeze(-1).float()
            shift = self.log_alpha.exp() * next_log_prob
            moved = []
            for critic in self.targets:
                places = moved_atoms(reward, bootstraps, shift, self.gamma, self.support, ATOMS)
                logits = critic(torch.cat([following["observation"], action], 1))
                moved.append(projected_by_index_add(logits.softmax(1), *places))
            target = torch.stack(moved)
        logits = torch.stack([critic(torch.cat([observation, batch["action"]], 1)) for critic in self.critics])
        loss = -(target * logits.log_softmax(-1)).sum(-1)
        action, log_prob = self.draw(observation)
        logits = torch.stack([critic(torch.cat([observation, action], 1)) for critic in self.critics])
        return {
            "loss_actor": (self.log_alpha.exp().detach() * log_prob - self.values(logits).mean(0)).mean(),
            "loss_qvalue": loss.mean(1).sum(0),
            "loss_alpha": -(self.log_alpha.exp() * (next_log_prob + self.target_entropy)).mean(),
        }


class EnsembleLinear(nn.Module):
    """A layer of several networks, by ``einsum``."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.stack([layer.weight.detach() for layer in layers]))
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        self.bias = nn.Parameter(torch.stack(biases).unsqueeze(1)) if biases else None

    def forward(self, x: Tensor) -> Tensor:
        x = torch.einsum("nbi,noi->nbo", x, self.weight)
        return x if self.bias is None else x + self.bias


class EnsembleBatchNorm(nn.Module):
    """Batch norm of several networks, in elementwise operations."""

    def __init__(self, norms: Sequence[BatchNorm]) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.stack([getattr(norm, name).detach() for norm in norms]).unsqueeze(1))
            for name in ("weight", "bias")
        )
        self.register_buffer("mean", torch.stack([norm.get_buffer("mean") for norm in norms]))
        self.register_buffer("variance", torch.stack([norm.get_buffer("variance") for norm in norms]))
        self.activation = norms[0].activation

    def forward(self, x: Tensor, of_batch: bool) -> Tensor:
        if of_batch:
            mean, variance = x.mean(1, keepdim=True), x.var(1, correction=0, keepdim=True)
            with torch.no_grad():
                rows = x.shape[1]
                self.get_buffer("mean").lerp_(mean.squeeze(1).float(), 0.01)
                self.get_buffer("variance").lerp_((variance.squeeze(1) * (rows / (rows - 1))).float(), 0.01)
        else:
            mean, variance = self.get_buffer("mean").unsqueeze(1), self.get_buffer("variance").unsqueeze(1)
        x = (x - mean) * torch.rsqrt(variance + 1e-5) * self.weight + self.bias
        return x if self.activation is None else self.activation(x)


class EnsembleRMSNorm(nn.Module):
    """RMS norm of several networks, in elementwise operations."""

    def __init__(self, norms: Sequence[nn.RMSNorm]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.stack([norm.weight.detach() for norm in norms]).unsqueeze(1))

    def forward(self, x: Tensor) -> Tensor:
        return x / torch.sqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-6) * self.weight


class EnsembleLayers(nn.Module):
    """Several networks of :class:`~benchmarks.workloads.plain_losses.Layers` as one; residual ones where those are."""

    def __init__(self, networks: Sequence[Layers], residual: bool = False) -> None:
        super().__init__()
        self.residual = residual
        stacked = {nn.Linear: EnsembleLinear, BatchNorm: EnsembleBatchNorm, nn.RMSNorm: EnsembleRMSNorm}
        self.parts = nn.ModuleList(
            stacked[type(part[0])](part) if type(part[0]) in stacked else EnsembleLayers(part, residual=True)  # type: ignore[arg-type]
            for part in zip(*(network.parts for network in networks), strict=True)
        )

    def forward(self, x: Tensor, of_batch: bool) -> Tensor:
        entered = x
        for part in self.parts:
            x = part(x, of_batch) if isinstance(part, (EnsembleBatchNorm, EnsembleLayers)) else part(x)
        return x + entered if self.residual else x


class ProgramFlashSAC(nn.Module):
    """FlashSAC's loss, on copies of the parameters of the plain one."""

    def __init__(self, plain: PlainFlashSAC) -> None:
        super().__init__()
        plain = copy.deepcopy(plain)
        assert isinstance(plain.actor, Layers)
        *body, last = plain.actor.parts
        assert isinstance(last, nn.Linear)
        self.actor = TwoHeads(Layers(*body), last, (-10.0, 2.0))
        self.critics, self.targets = (EnsembleLayers(list(nets)) for nets in (plain.critics, plain.targets))  # type: ignore[arg-type]
        self.targets.requires_grad_(False)
        self.log_alpha, self.gamma, self.target_entropy = plain.log_alpha, plain.gamma, plain.target_entropy
        self.support = plain.support
        self.register_buffer("z", torch.linspace(*plain.support, ATOMS).reshape(1, 1, -1))

    def draw(self, observation: Tensor, of_batch: bool) -> tuple[Tensor, Tensor]:
        """(action, log-density) for every row."""
        normal, x = self.actor.draw(observation, of_batch)
        log_det = 2 * (math.log(2) - x - functional.softplus(-2 * x))
        return x.tanh(), (normal.log_prob(x) - log_det).sum(1)

    def evaluate(
        self, critics: nn.Module, observation: Tensor, action: Tensor, of_batch: bool
    ) -> tuple[Tensor, Tensor]:
        """(means, log-probabilities) by every critic."""
        pair = torch.cat([observation, action], -1).unsqueeze(0).expand(2, -1, -1).contiguous()
        log_p = critics(pair, of_batch).log_softmax(-1)
        return (log_p.exp() * self.get_buffer("z")).sum(-1), log_p

    def target(self, log_p: Tensor, reward: Tensor, terminated: Tensor, shift: Tensor) -> Tensor:
        """The mass at its new places, ``[B, A]``."""
        low, high = self.support
        moved = reward + self.gamma * (self.get_buffer("z")[0] - shift.unsqueeze(-1)) * (1.0 - terminated.float())
        place = (moved.clamp(low, high) - low) / ((high - low) / (ATOMS - 1))
        below = place.floor().long()
        above, share = (below + 1).clamp(0, ATOMS - 1), place - below.float()
        p = log_p.exp()
        out = torch.zeros_like(p)
        out.scatter_add_(1, below, p * (1.0 - share))
        return out.scatter_add_(1, above, p * share)

    def forward(self, batch: TensorDict) -> dict[str, Tensor]:
        observation, following = batch["observation"], batch["next"]
        after = following["observation"]
        alpha = self.log_alpha.exp().detach()
        both = torch.cat([observation, after])
        drawn, log_probs = self.draw(both, True)
        log_prob = log_probs.chunk(2)[0]
        self.critics.requires_grad_(False)
        values, _ = self.evaluate(self.critics, observation, drawn.chunk(2)[0], False)
        self.critics.requires_grad_(True)
        loss_actor = (alpha * log_prob - torch.minimum(values[0], values[1])).mean()
        with torch.no_grad():
            action, next_log_prob = self.draw(after, False)
            actions = torch.cat([batch["action"], action])
            values, log_p = (x.chunk(2, 1)[1] for x in self.evaluate(self.targets, both, actions, True))
            index = values.argmin(0)[None, :, None].expand(1, -1, ATOMS)
            smallest = log_p.gather(0, index)[0]
            target = self.target(smallest, following["reward"], following["terminated"], alpha * next_log_prob)
        _, log_p = self.evaluate(self.critics, both, actions, True)
        loss = -(target.unsqueeze(0) * log_p.chunk(2, 1)[0]).sum(-1).mean()
        return {
            "loss_actor": loss_actor,
            "loss_qvalue": loss,
            "loss_alpha": -(self.log_alpha.exp() * (log_prob.detach() + self.target_entropy)).mean(),
        }
