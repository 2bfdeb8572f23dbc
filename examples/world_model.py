"""Slices of trajectories for a world model.

Records Pendulum-v1 with random actions from several environments at once, and trains a recurrent model to foresee
observations and rewards:

    python examples/world_model.py

``SliceSampler`` draws runs of consecutive steps that stay in one episode. The model reads the first steps of each slice
and then goes on alone, with the actions only.
"""

import argparse

import gymnasium as gym
import torch
from rich.progress import Progress
from tensordict import TensorDict
from torch import Tensor, nn

from gpubuf import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2_000, help="updates (default: %(default)s)")
    parser.add_argument("--envs", type=int, default=8, help="environments (default: %(default)s)")
    parser.add_argument("--recorded", type=int, default=1_000, help="steps of each (default: %(default)s)")
    parser.add_argument("--slice-len", type=int, default=32, help="(default: %(default)s)")
    parser.add_argument("--slices", type=int, default=64, help="slices in a batch (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


class WorldModel(nn.Module):
    """A recurrent model of what an action leads to."""

    def __init__(self, obs_dim: int, action_dim: int, hidden: int = 128) -> None:
        super().__init__()
        self.cell = nn.GRUCell(obs_dim + action_dim, hidden)
        self.foresee = nn.Linear(hidden, obs_dim + 1)

    def forward(self, observation: Tensor, action: Tensor, given: int) -> Tensor:
        """Next observation and reward of every step, ``[B, T, O + 1]``, from the first ``given`` observations."""
        state = observation.new_zeros(observation.shape[0], self.cell.hidden_size)
        seen, foreseen = observation[:, 0], []
        for step in range(action.shape[1]):
            if step < given:
                seen = observation[:, step]
            state = self.cell(torch.cat([seen, action[:, step]], -1), state)
            outcome = self.foresee(state)
            seen = seen + outcome[:, :-1]
            foreseen.append(torch.cat([seen, outcome[:, -1:]], -1))
        return torch.stack(foreseen, 1)


def record(buffer: TensorDictReplayBuffer, envs: int, steps: int, seed: int) -> None:
    """Random actions. Each write is one step of all environments, ``[envs, 1]``."""
    env = gym.make_vec("Pendulum-v1", envs, vector_kwargs={"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP})
    env.action_space.seed(seed)
    observation, _ = env.reset(seed=seed)
    for _ in range(steps):
        action = env.action_space.sample()
        following, reward, terminated, truncated, info = env.step(action)
        # Where an episode ended, `following` is that of the next one.
        final = torch.as_tensor(following).clone()
        for i in (terminated | truncated).nonzero()[0]:
            final[i] = torch.as_tensor(info["final_obs"][i])
        row = {
            "observation": torch.as_tensor(observation),
            "action": torch.as_tensor(action),
            "next": {
                "observation": final,
                "reward": torch.as_tensor(reward, dtype=torch.float32).unsqueeze(-1),
                "done": torch.as_tensor(terminated | truncated).unsqueeze(-1),
            },
        }
        buffer.extend(TensorDict(row, [envs]).unsqueeze(-1))
        observation = following
    env.close()


def main(args: argparse.Namespace) -> list[float]:
    """Trains, and returns the loss of every update."""
    torch.manual_seed(args.seed)
    buffer = TensorDictReplayBuffer(
        # Two dimensions: the environments lie side by side, and no slice goes from one to another.
        storage=LazyTensorStorage(args.envs * args.recorded, ndim=2, device=args.device),
        sampler=SliceSampler(slice_len=args.slice_len, stack=True),
        batch_size=args.slices * args.slice_len,
    )
    record(buffer, args.envs, args.recorded, args.seed)

    model = WorldModel(3, 1).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses: list[float] = []
    with Progress() as progress:
        bar = progress.add_task("", total=args.steps)
        for _ in range(args.steps):
            batch = buffer.sample()  # [slices, slice_len]
            foreseen = model(batch["observation"], batch["action"], given=args.slice_len // 4)
            truth = torch.cat([batch["next", "observation"], batch["next", "reward"]], -1)
            # Angular velocity and reward reach 8 and 16, the other two numbers 1.
            loss = ((foreseen - truth) / truth.new_tensor([1.0, 1.0, 8.0, 16.0])).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            progress.update(bar, advance=1, description=f"loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    losses = main(parse())
    print(f"loss: {losses[0]:.4f} at first, {losses[-1]:.4f} at last")
