"""Soft actor-critic as one would write it by hand in plain PyTorch: what `SACLoss` is compared with.

The same mathematics as `gpubuf.objectives.SACLoss` with two critics and the smooth L1 loss: two separate networks as
``nn.Sequential``, the tanh-normal density in the usual softplus form, no ``torch.distributions``, no TensorDict.
Run it for the comparison: ``python -m benchmarks.workloads.plain_sac``.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn import functional

OBSERVATION, ACTION = 17, 6
LOG_2 = math.log(2)
LOWEST_SCALE = 1e-4
SHIFT = math.log(math.expm1(1 - LOWEST_SCALE))
HALF_LOG_2_PI = 0.5 * math.log(2 * math.pi)


def perceptron(inputs: int, outputs: int, width: int) -> nn.Sequential:
    """Two hidden layers."""
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs)
    )


class PlainSAC(nn.Module):
    """Actor, two critics, their targets, the temperature, and the losses.

    Args:
        observation: numbers in an observation.
        action: numbers in an action, each in [-1, 1].
        width: of both hidden layers.
        gamma: discount.
    """

    def __init__(
        self, observation: int = OBSERVATION, action: int = ACTION, width: int = 256, gamma: float = 0.99
    ) -> None:
        super().__init__()
        self.actor = perceptron(observation, 2 * action, width)
        self.critics = nn.ModuleList(perceptron(observation + action, 1, width) for _ in range(2))
        self.targets = nn.ModuleList(perceptron(observation + action, 1, width) for _ in range(2))
        self.targets.load_state_dict(self.critics.state_dict())
        self.targets.requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.zeros(()))
        self.target_entropy = -float(action)
        self.gamma = gamma

    def draw(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """(action, log-density) for every row."""
        loc, raw = self.actor(observation).chunk(2, -1)
        scale = functional.softplus(raw + SHIFT) + LOWEST_SCALE
        noise = torch.randn_like(loc)
        x = loc + scale * noise
        log_det = 2 * (LOG_2 - x - functional.softplus(-2 * x))
        log_prob = (-0.5 * noise.square() - scale.log() - HALF_LOG_2_PI - log_det).sum(-1)
        return torch.tanh(x), log_prob

    def forward(self, batch: TensorDict) -> dict[str, Tensor]:
        """The losses of a batch, and |td_error| of every row, in ``"td_error"``."""
        observation, action, following = batch["observation"], batch["action"], batch["next"]
        alpha = self.log_alpha.detach().exp()
        with torch.no_grad():
            next_action, next_log_prob = self.draw(following["observation"])
            pair = torch.cat([following["observation"], next_action], -1)
            next_value = torch.minimum(self.targets[0](pair), self.targets[1](pair)).squeeze(-1)
            next_value = torch.where(following["terminated"].squeeze(-1), 0.0, next_value - alpha * next_log_prob)
            target = following["reward"].squeeze(-1) + self.gamma * next_value
        pair = torch.cat([observation, action], -1)
        values = [critic(pair).squeeze(-1) for critic in self.critics]
        loss_qvalue = functional.smooth_l1_loss(values[0], target) + functional.smooth_l1_loss(values[1], target)
        with torch.no_grad():
            td_error = torch.maximum((values[0] - target).abs(), (values[1] - target).abs())
        new_action, log_prob = self.draw(observation)
        self.critics.requires_grad_(False)
        pair = torch.cat([observation, new_action], -1)
        value = torch.minimum(self.critics[0](pair), self.critics[1](pair)).squeeze(-1)
        self.critics.requires_grad_(True)
        loss_actor = (alpha * log_prob - value).mean()
        loss_alpha = -(self.log_alpha * (log_prob.detach() + self.target_entropy)).mean()
        return {
            "loss_actor": loss_actor,
            "loss_qvalue": loss_qvalue,
            "loss_alpha": loss_alpha,
            "alpha": alpha,
            "entropy": -log_prob.detach().mean(),
            "td_error": td_error,
        }


def make_batch(rows: int = 256, observation: int = OBSERVATION, action: int = ACTION) -> TensorDict:
    """A batch of random transitions."""
    following = {
        "observation": torch.randn(rows, observation),
        "reward": torch.randn(rows, 1),
        "done": torch.zeros(rows, 1, dtype=torch.bool),
        "terminated": torch.zeros(rows, 1, dtype=torch.bool),
    }
    return TensorDict(
        {
            "observation": torch.randn(rows, observation),
            "action": torch.rand(rows, action) * 2 - 1,
            "next": TensorDict(following, [rows]),
        },
        [rows],
    )


def forward_backward(loss: Callable[[TensorDict], dict[str, Tensor] | TensorDict], batch: TensorDict) -> None:
    """One evaluation, and one backward of the sum of the losses."""
    out = loss(batch)
    (out["loss_actor"] + out["loss_qvalue"] + out["loss_alpha"]).backward()


def compare(rows: int = 256, repetitions: int = 60) -> dict[str, list[float]]:
    """Seconds of forward and backward, in turns, by plain PyTorch and by SACLoss on both kinds of critics."""
    from tensordict.nn import TensorDictModule

    from gpubuf.modules import MLP, make_sac_actor, make_sac_critic
    from gpubuf.objectives import SACLoss

    replicated = TensorDictModule(MLP(OBSERVATION + ACTION, 1), ["observation", "action"], ["state_action_value"])
    losses: dict[str, nn.Module] = {
        "plain PyTorch": PlainSAC(),
        "SACLoss, EnsembleMLP": SACLoss(
            make_sac_actor(OBSERVATION, ACTION), make_sac_critic(OBSERVATION, ACTION), target_entropy=-float(ACTION)
        ),
        "SACLoss, replicated MLP": SACLoss(
            make_sac_actor(OBSERVATION, ACTION), replicated, target_entropy=-float(ACTION)
        ),
    }
    batch = make_batch(rows)
    seconds: dict[str, list[float]] = {name: [] for name in losses}
    for _ in range(repetitions):
        for name, loss in losses.items():
            # A few at a time, the first of them not counted: each leaves other data in the caches than the others need.
            for turn in range(8):
                loss.zero_grad()
                start = time.perf_counter()
                forward_backward(loss, batch)
                if turn >= 3:
                    seconds[name].append(time.perf_counter() - start)
    return seconds


def main() -> None:
    torch.set_num_threads(1)
    for rows in (256, 1024):
        seconds = compare(rows)
        plain = statistics.median(seconds["plain PyTorch"])
        for name, values in seconds.items():
            median = statistics.median(values)
            print(
                f"batch {rows:5d}  {name:25s} median {median * 1e3:7.3f} ms  best {min(values) * 1e3:7.3f} ms  "
                f"{median / plain:.3f} of plain"
            )


if __name__ == "__main__":
    main()
