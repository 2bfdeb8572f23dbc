"""Prioritized double DQN in one file.

Learns CartPole-v1, or another Gymnasium environment with a finite set of actions:

    python examples/dqn.py
    python examples/dqn.py --env Acrobot-v1 --steps 30000

The buffer makes transitions of several steps while it draws (``n_steps``), and stores each observation once
(``share_next``). "steps_to_next_obs" in a batch says how many steps each transition has, so the loss discounts by that.
"""

import argparse

import gymnasium as gym
import torch
from rich.progress import Progress
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss

from gpubuf import LazyTensorStorage, TensorDictPrioritizedReplayBuffer


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--steps", type=int, default=20_000, help="transitions (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=500, help="random transitions first (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=128, help="(default: %(default)s)")
    parser.add_argument("--n-steps", type=int, default=3, help="steps of a transition (default: %(default)s)")
    parser.add_argument("--gamma", type=float, default=0.99, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def loss_and_error(q: nn.Module, target_q: nn.Module, batch: TensorDict, gamma: float) -> tuple[Tensor, Tensor]:
    """The loss of double DQN (van Hasselt et al., arXiv 1509.06461), and the TD error of each row."""
    after = batch["next"]
    with torch.no_grad():
        best = q(after["observation"]).argmax(-1, keepdim=True)
        value = target_q(after["observation"]).gather(-1, best)
        discount = gamma ** batch["steps_to_next_obs"]
        target = after["reward"] + discount * value * ~after["terminated"]
    chosen = q(batch["observation"]).gather(-1, batch["action"])
    each = smooth_l1_loss(chosen, target, reduction="none").squeeze(-1)
    return (batch["priority_weight"] * each).mean(), (target - chosen).detach().abs().squeeze(-1)


def main(args: argparse.Namespace) -> list[float]:
    """Trains, and returns the return of every episode."""
    torch.manual_seed(args.seed)
    if args.device == "cpu":
        torch.set_num_threads(1)  # networks of this size are fastest so
    env = gym.make(args.env)
    env.action_space.seed(args.seed)

    def network() -> nn.Module:
        width = env.observation_space.shape[0]
        return nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, int(env.action_space.n))).to(args.device)

    q, target_q = network(), network()
    target_q.load_state_dict(q.state_dict())
    optimizer = torch.optim.Adam(q.parameters(), lr=5e-4)
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=0.6,
        beta=0.4,
        storage=LazyTensorStorage(args.steps, device=args.device, share_next=True),
        batch_size=args.batch_size,
        n_steps=args.n_steps,
        gamma=args.gamma,
    )

    def update() -> None:
        batch = buffer.sample()
        loss, batch["td_error"] = loss_and_error(q, target_q, batch, args.gamma)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(target_q.parameters(), q.parameters(), strict=True):
                slow.lerp_(fast, 0.005)
        buffer.update_tensordict_priority(batch)

    returns: list[float] = []
    total = 0.0
    observation = torch.as_tensor(env.reset(seed=args.seed)[0])
    with Progress() as progress:
        bar = progress.add_task("warming up", total=args.steps)
        for step in range(args.steps):
            # From 1 to 0.05 over the first half.
            epsilon = max(0.05, 1 - 1.9 * step / args.steps)
            if step < args.warmup or torch.rand(()) < epsilon:
                action = int(env.action_space.sample())
            else:
                action = int(q(observation.to(args.device)).argmax())
            following, reward, terminated, truncated, _ = env.step(action)
            total += float(reward)
            after = {
                "observation": torch.as_tensor(following),
                "reward": torch.tensor([reward], dtype=torch.float32),
                "done": torch.tensor([terminated or truncated]),
                "terminated": torch.tensor([terminated]),
            }
            buffer.add(TensorDict({"observation": observation, "action": torch.tensor([action]), "next": after}))
            observation = after["observation"]
            if terminated or truncated:
                returns.append(total)
                total = 0.0
                observation = torch.as_tensor(env.reset()[0])
            if step >= args.warmup:
                update()
            recent = returns[-20:]
            progress.update(bar, advance=1, description=f"return {sum(recent) / max(1, len(recent)):6.1f}")
    env.close()
    return returns


if __name__ == "__main__":
    returns = main(parse())
    recent = returns[-20:]
    print(f"{len(returns)} episodes, mean return of the last {len(recent)}: {sum(recent) / max(1, len(recent)):.1f}")
