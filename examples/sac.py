"""Soft actor-critic in one file.

Trains on a Gymnasium environment with bounded actions, from prioritized replay:

    python examples/sac.py
    python examples/sac.py --env HalfCheetah-v5 --steps 20000 --plot curve.png

A step of the loop acts, writes one transition, draws a batch, and updates critics, actor and temperature. On a GPU the
update becomes one CUDA graph.
"""

import argparse

import gymnasium as gym
import torch
from rich.progress import Progress
from tensordict import TensorDict

from gpubuf import LazyTensorStorage, Learner, SACLoss, TensorDictPrioritizedReplayBuffer
from gpubuf.modules import make_sac_actor, make_sac_critic
from gpubuf.optim import AdamW


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--env", default="Pendulum-v1")
    parser.add_argument("--steps", type=int, default=10_000, help="transitions (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=1_000, help="random transitions first (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=256, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--plot", help="write the learning curve into this picture")
    return parser.parse_args()


def main(args: argparse.Namespace) -> list[tuple[int, float]]:
    """Trains, and returns the step and the return of every episode."""
    torch.manual_seed(args.seed)
    if args.device == "cpu":
        torch.set_num_threads(1)  # networks of this size are fastest so
    env = gym.make(args.env)
    env.action_space.seed(args.seed)
    obs_dim, action_dim = env.observation_space.shape[0], env.action_space.shape[0]

    actor = make_sac_actor(
        obs_dim, action_dim, low=env.action_space.low, high=env.action_space.high, device=args.device
    )
    critic = make_sac_critic(obs_dim, action_dim, device=args.device)
    loss = SACLoss(actor, critic, target_entropy=-float(action_dim))
    optimizer = AdamW(loss.parameters(), lr=1e-3, weight_decay=0.0, targets=loss, tau=0.005)
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=0.6,
        beta=0.4,
        storage=LazyTensorStorage(args.steps, device=args.device),
        batch_size=args.batch_size,
    )
    learner = Learner(loss, optimizer, buffer=buffer)

    def act(observation: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return actor(TensorDict({"observation": observation.to(args.device)}))["action"].cpu()

    curve: list[tuple[int, float]] = []
    total = 0.0
    observation = torch.as_tensor(env.reset(seed=args.seed)[0], dtype=torch.float32)
    with Progress() as progress:
        bar = progress.add_task("warming up", total=args.steps)
        for step in range(1, args.steps + 1):
            learning = step > args.warmup
            action = act(observation) if learning else torch.as_tensor(env.action_space.sample())
            following, reward, terminated, truncated, _ = env.step(action.numpy())
            total += float(reward)
            after = {
                "observation": torch.as_tensor(following, dtype=torch.float32),
                "reward": torch.tensor([reward], dtype=torch.float32),
                "done": torch.tensor([terminated or truncated]),
                "terminated": torch.tensor([terminated]),
            }
            buffer.add(TensorDict({"observation": observation, "action": action, "next": after}))
            observation = after["observation"]
            if terminated or truncated:
                curve.append((step, total))
                total = 0.0
                observation = torch.as_tensor(env.reset()[0], dtype=torch.float32)
            if learning:
                learner()
            recent = [value for _, value in curve[-10:]]
            description = f"return {sum(recent) / len(recent):7.1f}" if recent else "warming up"
            progress.update(bar, advance=1, description=description)
    env.close()
    return curve


def plot(curve: list[tuple[int, float]], path: str) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots()
    axes.plot(*zip(*curve, strict=True))
    axes.set(xlabel="transitions", ylabel="return of an episode")
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    args = parse()
    curve = main(args)
    recent = [value for _, value in curve[-10:]]
    print(f"{len(curve)} episodes, mean return of the last {len(recent)}: {sum(recent) / max(1, len(recent)):.1f}")
    if args.plot:
        plot(curve, args.plot)
        print(f"curve: {args.plot}")
