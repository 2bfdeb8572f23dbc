"""A TorchRL script before the change.

TD3 on Pendulum-v1 with TorchRL's buffer, as it is often written. ``torchrl_after.py`` is the same program with
gpubuf: only the lines that import differ.

    python examples/torchrl_before.py
"""

import argparse

import gymnasium as gym
import torch
from rich.progress import Progress
from tensordict import TensorDict
from torch import nn
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10_000, help="transitions (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=1_000, help="random transitions first (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, outputs))


class Critics(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.first, self.second = mlp(inputs, 1), mlp(inputs, 1)

    def forward(self, observation: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.cat([observation, action], -1)
        return self.first(both), self.second(both)


def main(args: argparse.Namespace) -> list[float]:
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    env = gym.make("Pendulum-v1")
    env.action_space.seed(args.seed)
    actor, target_actor, critics, target_critics = mlp(3, 1), mlp(3, 1), Critics(4), Critics(4)
    target_actor.load_state_dict(actor.state_dict())
    target_critics.load_state_dict(critics.state_dict())
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
    critic_optimizer = torch.optim.Adam(critics.parameters(), lr=1e-3)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(args.steps, device="cpu"),
        sampler=SamplerWithoutReplacement(),
        batch_size=128,
        prefetch=2,
    )

    def update(delayed: bool) -> None:
        batch = buffer.sample()
        observation, after = batch["observation"], batch["next", "observation"]
        with torch.no_grad():
            noise = (torch.randn_like(batch["action"]) * 0.2).clamp(-0.5, 0.5)
            action = (target_actor(after).tanh() + noise).clamp(-1, 1)
            value = torch.minimum(*target_critics(after, action))
            target = batch["next", "reward"] + 0.99 * value * ~batch["next", "terminated"]
        loss = sum((q - target).square().mean() for q in critics(observation, batch["action"]))
        critic_optimizer.zero_grad()
        loss.backward()
        critic_optimizer.step()
        if not delayed:
            return
        loss = -critics(observation, actor(observation).tanh())[0].mean()
        actor_optimizer.zero_grad()
        loss.backward()
        actor_optimizer.step()
        with torch.no_grad():
            for target_net, net in ((target_actor, actor), (target_critics, critics)):
                for slow, fast in zip(target_net.parameters(), net.parameters(), strict=True):
                    slow.lerp_(fast, 0.005)

    returns, total = [], 0.0
    observation = torch.as_tensor(env.reset(seed=args.seed)[0])
    with Progress() as progress:
        bar = progress.add_task("return", total=args.steps)
        for step in range(args.steps):
            if step < args.warmup:
                action = torch.rand(1) * 2 - 1
            else:
                with torch.no_grad():
                    action = (actor(observation).tanh() + 0.1 * torch.randn(1)).clamp(-1, 1)
            following, reward, terminated, truncated, _ = env.step(2 * action.numpy())
            total += float(reward)
            after = {
                "observation": torch.as_tensor(following),
                "reward": torch.tensor([reward], dtype=torch.float32) / 10,
                "done": torch.tensor([terminated or truncated]),
                "terminated": torch.tensor([terminated]),
            }
            buffer.extend(TensorDict({"observation": observation, "action": action, "next": after}).unsqueeze(0))
            observation = after["observation"]
            if terminated or truncated:
                returns.append(total)
                total = 0.0
                observation = torch.as_tensor(env.reset()[0])
            if step >= args.warmup:
                update(delayed=step % 2 == 0)
            progress.update(
                bar, advance=1, description=f"return {sum(returns[-10:]) / max(1, len(returns[-10:])):7.1f}"
            )
    env.close()
    return returns


if __name__ == "__main__":
    returns = main(parse())
    print(f"{len(returns)} episodes, mean return of the last 10: {sum(returns[-10:]) / max(1, len(returns[-10:])):.1f}")
