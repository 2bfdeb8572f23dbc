"""A sampler of your own.

``RecentSampler`` draws new rows more often than old ones. The example compares it with uniform sampling where that
matters, on a target that drifts while it is being learned:

    python examples/custom_sampler.py

A sampler overrides ``choose``: which rows, and what else is known about each. The buffer gathers the rows, draws ahead
with ``prefetch``, and saves the sampler with the rest.
"""

import argparse
import math
from typing import Any

import torch
from rich.progress import track
from tensordict import TensorDict
from torch import Tensor, nn

from gpubuf import LazyTensorStorage, RandomSampler, TensorDictReplayBuffer
from gpubuf.data import Sampler


class RecentSampler(Sampler):
    """Draws a row with a probability that falls exponentially with its age.

    Args:
        half_life: the age, in rows, at which a row is drawn half as often as the newest.
    """

    drawn_state = ()  # a draw changes the random stream and nothing else, so that `prefetch` can take one back

    def __init__(self, half_life: float) -> None:
        super().__init__()
        self.half_life = half_life

    def choose(self, n: int) -> tuple[Tensor, dict[Any, Tensor]]:
        storage = self.storage
        uniform = self.random_state(storage.device).uniform(n)
        # The inverse of the distribution function of the ages, cut off at the oldest row.
        rate = math.log(2) / self.half_life
        oldest = 1 - math.exp(-rate * len(storage))
        age = (-torch.log1p(-uniform * oldest) / rate).long().clamp_(max=len(storage) - 1)
        return (storage.cursor - 1 - age) % storage.max_size, {"age": age}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "half_life": self.half_life}

    def load_state_dict(self, state: dict[str, Any], order: Tensor | None = None) -> None:
        super().load_state_dict(state, order)
        self.half_life = state["half_life"]

    def check_state(self, state: dict[str, Any], capacity: int, size: int) -> None:
        super().check_state(state, capacity, size)
        if not (isinstance(state["half_life"], float) and state["half_life"] > 0):
            raise ValueError(f"half_life must be a positive number, got {state['half_life']!r}")


def final_error(sampler: Sampler, steps: int) -> float:
    """Mean squared error on the target as it is in the end."""
    torch.manual_seed(0)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100 * steps), sampler=sampler, batch_size=64)
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def target(x: Tensor, step: int) -> Tensor:
        return torch.sin(3 * x + 4 * step / steps)

    for step in track(range(steps), description=type(sampler).__name__):
        x = torch.rand(16, 1) * 2 - 1
        buffer.extend(TensorDict({"x": x, "y": target(x, step)}, [16]))
        batch = buffer.sample()
        loss = (model(batch["x"]) - batch["y"]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    x = torch.linspace(-1, 1, 100).unsqueeze(-1)
    return float((model(x) - target(x, steps)).square().mean().detach())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=3_000, help="writes and updates (default: %(default)s)")
    args = parser.parse_args()
    uniform = final_error(RandomSampler(), args.steps)
    recent = final_error(RecentSampler(half_life=args.steps / 2), args.steps)
    print(f"error in the end: {uniform:.4f} uniform, {recent:.4f} recent")
