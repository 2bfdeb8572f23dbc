"""Losses as one would write them by hand in plain PyTorch: what gpubuf's are compared with.

Each has two separate networks (REDQ ten), one after the other, the tanh-normal density in the usual softplus form, and
no TensorDict within. Those with categorical critics follow their programs: FastSAC adds the mass of moved atoms one
critic at a time, FlashSAC for the critic of the smaller mean. Both draw with ``torch.distributions.Normal``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional

OBSERVATION, ACTION = 17, 6
LOG_2 = math.log(2)
LOWEST_SCALE = 1e-4
SHIFT = math.log(math.expm1(1 - LOWEST_SCALE))
HALF_LOG_2_PI = 0.5 * math.log(2 * math.pi)

ATOMS, ACTIONS = 101, 6
#: Hidden layers of FastSAC's networks, and widths of FlashSAC's residual blocks (actor, critics): sizes for a CPU.
FASTSAC_CELLS, FLASHSAC_WIDTHS = (256, 256), (64, 128)
SIGMA = 0.15


def make_batch(rows: int) -> TensorDict:
    """A batch of random transitions of which one in ten is terminated."""
    terminated = torch.rand(rows, 1) < 0.1
    after = {"observation": torch.randn(rows, OBSERVATION), "reward": torch.randn(rows, 1)}
    after |= {"done": terminated, "terminated": terminated.clone()}
    action = torch.rand(rows, ACTION) * 2 - 1
    return TensorDict({"observation": torch.randn(rows, OBSERVATION), "action": action, "next": after}, [rows])


def perceptron(inputs: int, outputs: int, width: int = 256) -> nn.Sequential:
    """Two hidden layers."""
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs)
    )


def layer_normed(inputs: int, outputs: int, cells: Sequence[int]) -> nn.Sequential:
    """Hidden layers with layer norm and SiLU."""
    widths = (inputs, *cells)
    hidden = [(nn.Linear(a, b), nn.LayerNorm(b), nn.SiLU()) for a, b in zip(widths, cells, strict=False)]
    return nn.Sequential(*(part for layer in hidden for part in layer), nn.Linear(widths[-1], outputs))


class BatchNorm(nn.Module):
    """Batch norm whose statistics the caller chooses at each call, and an activation."""

    def __init__(self, width: int, activation: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("variance", torch.ones(width))
        self.activation = activation

    def forward(self, x: Tensor, of_batch: bool) -> Tensor:
        mean, variance = self.get_buffer("mean"), self.get_buffer("variance")
        x = functional.batch_norm(x, mean, variance, self.weight, self.bias, of_batch, 0.01)
        return x if self.activation is None else self.activation(x)


class Layers(nn.Module):
    """Modules in turn; batch norms are told which statistics to use."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor, of_batch: bool = True) -> Tensor:
        for part in self.parts:
            x = part(x, of_batch) if isinstance(part, (BatchNorm, Layers)) else part(x)
        return x


class Residual(Layers):
    """``x + layers(x)``."""

    def forward(self, x: Tensor, of_batch: bool = True) -> Tensor:
        return x + super().forward(x, of_batch)


def batch_normed(inputs: int, outputs: int, width: int) -> Layers:
    """CrossQ's critic: two hidden layers with batch norm and ReLU."""
    return Layers(
        *(nn.Linear(inputs, width), BatchNorm(width, functional.relu)),
        *(nn.Linear(width, width), BatchNorm(width, functional.relu)),
        nn.Linear(width, outputs),
    )


def residual(inputs: int, outputs: int, width: int) -> Layers:
    """FlashSAC's network: two residual blocks, four times as wide within."""

    def block() -> Residual:
        wide = 4 * width
        first = (nn.Linear(width, wide, bias=False), BatchNorm(wide, functional.relu))
        return Residual(*first, nn.Linear(wide, width, bias=False), BatchNorm(width, functional.relu))

    head = (nn.RMSNorm(width, eps=1e-6), nn.Linear(width, outputs))
    return Layers(BatchNorm(inputs), nn.Linear(inputs, width, bias=False), block(), block(), *head)


class PlainLoss(nn.Module):
    """Base class: networks with targets, a temperature, SAC's way to draw."""

    gamma = 0.99

    def __init__(self, actor: nn.Module, critics: Sequence[nn.Module], alpha: float = 1.0) -> None:
        super().__init__()
        self.actor, self.critics = actor, nn.ModuleList(critics)
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(alpha)))
        self.target_entropy = -float(ACTION)

    def draw(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """(action, log-density) for every row."""
        loc, raw = self.actor(observation).chunk(2, -1)
        scale = functional.softplus(raw + SHIFT) + LOWEST_SCALE
        noise = torch.randn_like(loc)
        x = loc + scale * noise
        log_det = 2 * (LOG_2 - x - functional.softplus(-2 * x))
        log_prob = (-0.5 * noise.square() - scale.log() - HALF_LOG_2_PI - log_det).sum(-1)
        return torch.tanh(x), log_prob

    def without_gradient(self, evaluate: Callable[[], Tensor]) -> Tensor:
        """Values of the critics that reach the actor, and no parameter of theirs."""
        self.critics.requires_grad_(False)
        value = evaluate()
        self.critics.requires_grad_(True)
        return value

    def bootstrapped(self, following: TensorDict, value: Tensor) -> Tensor:
        """Targets by values of the next states."""
        value = torch.where(following["terminated"].squeeze(-1), 0.0, value)
        return following["reward"].squeeze(-1) + self.gamma * value

    def temperature_loss(self, log_prob: Tensor, weight: Tensor | None = None) -> Tensor:
        """The temperature's loss; ``weight`` stands for the logarithm of the temperature."""
        weight = self.log_alpha if weight is None else weight
        return -(weight * (log_prob.detach() + self.target_entropy)).mean()

    def td_losses(self, values: Sequence[Tensor], target: Tensor) -> tuple[Tensor, Tensor]:
        """(the sum of the critics' losses, the largest error of each row)."""
        losses = [functional.smooth_l1_loss(value, target) for value in values]
        with torch.no_grad():
            error = torch.stack([value - target for value in values]).abs().amax(0)
        return torch.stack(losses).sum(), error


class PlainSAC(PlainLoss):
    """Two critics, of whose values the smaller counts."""

    nets = 2

    def __init__(self) -> None:
        super().__init__(perceptron(OBSERVATION, 2 * ACTION), [self.critic() for _ in range(self.nets)])

    def critic(self) -> nn.Module:
        """A new critic."""
        return perceptron(OBSERVATION + ACTION, 1)

    def next_value(self, pair: Tensor) -> Tensor:
        """By the targets, ``[B, 1]``."""
        return torch.minimum(self.targets[0](pair), self.targets[1](pair))

    def value(self, pair: Tensor) -> Tensor:
        """For the actor, ``[B, 1]``."""
        return torch.minimum(self.critics[0](pair), self.critics[1](pair))

    def critics_losses(self, batch: TensorDict, alpha: Tensor) -> tuple[Tensor, Tensor]:
        """As :meth:`td_losses`."""
        following = batch["next"]
        with torch.no_grad():
            action, log_prob = self.draw(following["observation"])
            value = self.next_value(torch.cat([following["observation"], action], -1)).squeeze(-1)
            target = self.bootstrapped(following, value - alpha * log_prob)
        pair = torch.cat([batch["observation"], batch["action"]], -1)
        return self.td_losses([critic(pair).squeeze(-1) for critic in self.critics], target)

    def forward(self, batch: TensorDict) -> dict[str, Tensor]:
        """The losses of a batch, and |td_error| of every row, in ``"td_error"``."""
        alpha = self.log_alpha.detach().exp()
        loss, error = self.critics_losses(batch, alpha)
        action, log_prob = self.draw(batch["observation"])
        pair = torch.cat([batch["observation"], action], -1)
        value = self.without_gradient(lambda: self.value(pair)).squeeze(-1)
        return {
            "loss_actor": (alpha * log_prob - value).mean(),
            "loss_qvalue": loss,
            "loss_alpha": self.temperature_loss(log_prob),
            "td_error": error,
        }


class PlainREDQ(PlainSAC):
    """Ten critics; a target takes the minimum of two of them, the actor learns from the mean of all."""

    nets = 10

    def next_value(self, pair: Tensor) -> Tensor:
        first, second = torch.randperm(10)[:2].tolist()
        return torch.minimum(self.targets[first](pair), self.targets[second](pair))

    def value(self, pair: Tensor) -> Tensor:
        return torch.stack([critic(pair) for critic in self.critics]).mean(0)

    def temperature_loss(self, log_prob: Tensor, weight: Tensor | None = None) -> Tensor:
        return super().temperature_loss(log_prob, self.log_alpha.exp())

    def td_losses(self, values: Sequence[Tensor], target: Tensor) -> tuple[Tensor, Tensor]:
        loss, error = super().td_losses(values, target)
        return loss / 10, error


class PlainCrossQ(PlainSAC):
    """No targets: (s, a) and (s', a') pass the critics as one batch."""

    def critic(self) -> nn.Module:
        return batch_normed(OBSERVATION + ACTION, 1, 256)

    def value(self, pair: Tensor) -> Tensor:
        return torch.minimum(*(critic(pair, False) for critic in self.critics))

    def critics_losses(self, batch: TensorDict, alpha: Tensor) -> tuple[Tensor, Tensor]:
        following = batch["next"]
        with torch.no_grad():
            action, log_prob = self.draw(following["observation"])
        present = torch.cat([batch["observation"], batch["action"]], -1)
        pairs = torch.cat([present, torch.cat([following["observation"], action], -1)])
        halves = [critic(pairs).squeeze(-1).chunk(2) for critic in self.critics]
        value = torch.minimum(halves[0][1], halves[1][1]).detach()
        target = self.bootstrapped(following, value - alpha * log_prob)
        return self.td_losses([half[0] for half in halves], target)


class PlainDiscreteSAC(PlainLoss):
    """Values of every action, and expectations over the policy."""

    def __init__(self) -> None:
        critics = [perceptron(OBSERVATION, ACTIONS) for _ in range(2)]
        super().__init__(perceptron(OBSERVATION, ACTIONS), critics)
        self.target_entropy = 0.98 * math.log(ACTIONS)

    def forward(self, batch: TensorDict) -> dict[str, Tensor]:
        observation, following, alpha = batch["observation"], batch["next"], self.log_alpha.detach().exp()
        with torch.no_grad():
            after = following["observation"]
            log_p = self.actor(after).log_softmax(-1)
            value = torch.minimum(self.targets[0](after), self.targets[1](after))
            target = self.bootstrapped(following, (log_p.exp() * (value - alpha * log_p)).sum(-1))
        values = [critic(observation) for critic in self.critics]
        index = batch["action"].unsqueeze(-1)
        loss, error = self.td_losses([value.gather(-1, index).squeeze(-1) for value in values], target)
        log_p = self.actor(observation).log_softmax(-1)
        p, value = log_p.exp(), torch.minimum(*values).detach()
        log_prob = (p * log_p).sum(-1)
        return {
            "loss_actor": (p * (alpha * log_p - value)).sum(-1).mean(),
            "loss_qvalue": loss,
            "loss_alpha": self.temperature_loss(log_prob),
            "td_error": error,
        }


class PlainTD3(PlainLoss):
    """A deterministic policy, and targets smoothed by clipped noise."""

    def __init__(self) -> None:
        critics = [perceptron(OBSERVATION + ACTION, 1) for _ in range(2)]
        super().__init__(nn.Sequential(perceptron(OBSERVATION, ACTION), nn.Tanh()), critics)
        self.target_actor = copy.deepcopy(self.actor).requires_grad_(False)

    def forward(self, batch: TensorDict) -> dict[str, Tensor]:
        observation, following = batch["observation"], batch["next"]
        action = self.actor(observation)
        pair = torch.cat([observation, action], -1)
        loss_actor = -self.without_gradient(lambda: self.critics[0](pair)).mean()
        with torch.no_grad():
            action = self.target_actor(following["observation"])
            action = (action + (0.2 * torch.randn_like(action)).clamp(-0.5, 0.5)).clamp(-1, 1)
            pair = torch.cat([following["observation"], action], -1)
            value = torch.minimum(self.targets[0](pair), self.targets[1](pair)).squeeze(-1)
            target = self.bootstrapped(following, value)
        pair = torch.cat([observation, batch["action"]], -1)
        loss, error = self.td_losses([critic(pair).squeeze(-1) for critic in self.critics], target)
        return {"loss_actor": loss_actor, "loss_qvalue": loss, "td_error": error.square()}


def draw_with_normal(parameters: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """(action, log-density), by the logarithm of the scale in [low, high]."""
    mean, raw = parameters.chunk(2, -1)
    normal = Normal(mean, (low + 0.5 * (high - low) * (raw.tanh() + 1)).exp(), validate_args=False)
    x = normal.rsample()
    # log(1 - tanh(x)^2), also where tanh saturates.
    log_slope = 2 * (math.log(2) - x - functional.softplus(-2 * x))
    return x.tanh(), (normal.log_prob(x) - log_slope).sum(-1)


def projected(p: Tensor, place: Tensor, below: Tensor, above: Tensor) -> Tensor:
    """The mass ``p`` at new places, ``[B, A]``."""
    out = torch.zeros_like(p)
    out.scatter_add_(1, below, p * (above.float() - place))
    return out.scatter_add_(1, above, p * (place - below.float()))


def cross_entropies(target: Tensor, logits: Tensor) -> Tensor:
    """Of each critic, the mean over rows: ``[N]``."""
    return -(target * logits.log_softmax(-1)).sum(-1).mean(-1)


class PlainDistributional(PlainLoss):
    """Base class: critics that say a distribution over atoms."""

    support: tuple[float, float]

    def moved_atoms(self, following: TensorDict, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(positions of the moved atoms among the atoms, whole numbers below and above)."""
        low, high = self.support
        z = torch.linspace(low, high, ATOMS)
        bootstraps = 1 - following["terminated"].float()
        moved = following["reward"] + self.gamma * bootstraps * (z - shift.unsqueeze(1))
        place = (moved.clamp(low, high) - low) / ((high - low) / (ATOMS - 1))
        below, above = place.floor().long(), place.ceil().long()
        # One moved onto an atom would count for neither neighbour.
        on_atom = below == above
        below = torch.where(on_atom & (below > 0), below - 1, below)
        above = torch.where(on_atom & (above == 0), above + 1, above)
        return place, below, above

    def expected(self, logits: Tensor) -> Tensor:
        """The mean values of distributions."""
        return (logits.softmax(-1) * torch.linspace(*self.support, ATOMS)).sum(-1)


class PlainFastSAC(PlainDistributional):
    """Each critic learns from its own distribution, the actor from the mean of the critics."""

    support = (-20.0, 20.0)

    def __init__(self) -> None:
        critics = [layer_normed(OBSERVATION + ACTION, ATOMS, FASTSAC_CELLS) for _ in range(2)]
        super().__init__(layer_normed(OBSERVATION, 2 * ACTION, FASTSAC_CELLS), critics, 0.001)
        self.target_entropy, self.gamma = 0.0, 0.97

    def forward(self, batch: TensorDict) -> dict[str, Tensor]:
        observation, following, alpha = batch["observation"], batch["next"], self.log_alpha.detach().exp()
        with torch.no_grad():
            action, next_log_prob = draw_with_normal(self.actor(following["observation"]), -5.0, 0.0)
            pair = torch.cat([following["observation"], action], -1)
            places = self.moved_atoms(following, alpha * next_log_prob)
            target = torch.stack([projected(critic(pair).softmax(-1), *places) for critic in self.targets])
        pair = torch.cat([observation, batch["action"]], -1)
        loss = cross_entropies(target, torch.stack([critic(pair) for critic in self.critics])).sum()
        action, log_prob = draw_with_normal(self.actor(observation), -5.0, 0.0)
        pair = torch.cat([observation, action], -1)
        values = self.without_gradient(lambda: torch.stack([critic(pair) for critic in self.critics]))
        return {
            "loss_actor": (alpha * log_prob - self.expected(values).mean(0)).mean(),
            "loss_qvalue": loss,
            "loss_alpha": self.temperature_loss(next_log_prob, self.log_alpha.exp()),
        }


class PlainFlashSAC(PlainDistributional):
    """All critics learn from the target of the smallest; present and next rows pass the networks as one batch."""

    support = (-5.0, 5.0)

    def __init__(self) -> None:
        critics = [residual(OBSERVATION + ACTION, ATOMS, FLASHSAC_WIDTHS[1]) for _ in range(2)]
        super().__init__(residual(OBSERVATION, 2 * ACTION, FLASHSAC_WIDTHS[0]), critics, 0.01)
        self.target_entropy = 0.5 * ACTION * math.log(2 * math.pi * math.e * SIGMA**2)

    def forward(self, batch: TensorDict) -> dict[str, Tensor]:
        observation, following, alpha = batch["observation"], batch["next"], self.log_alpha.detach().exp()
        after = following["observation"]
        with torch.no_grad():
            action, next_log_prob = draw_with_normal(self.actor(after, False), -10.0, 2.0)
            pairs = torch.cat([torch.cat([observation, batch["action"]], -1), torch.cat([after, action], -1)])
            logits = torch.stack([critic(pairs).chunk(2)[1] for critic in self.targets])
            smallest = self.expected(logits).argmin(0)
            p = logits.softmax(-1)[smallest, torch.arange(len(smallest))]
            target = projected(p, *self.moved_atoms(following, alpha * next_log_prob))
        here = torch.stack([critic(pairs).chunk(2)[0] for critic in self.critics])
        loss = cross_entropies(target, here).mean()
        drawn, log_probs = draw_with_normal(self.actor(torch.cat([observation, after])), -10.0, 2.0)
        log_prob = log_probs.chunk(2)[0]
        pair = torch.cat([observation, drawn.chunk(2)[0]], -1)
        values = self.without_gradient(lambda: torch.stack([critic(pair, False) for critic in self.critics]))
        return {
            "loss_actor": (alpha * log_prob - self.expected(values).amin(0)).mean(),
            "loss_qvalue": loss,
            "loss_alpha": self.temperature_loss(log_prob, self.log_alpha.exp()),
        }
