"""Soft actor-critic from pixels, with random shifts (DrQ).

Swings up a pendulum of which the program only sees pictures, drawn here in a few lines:

    python examples/pixel_sac.py

What the buffer does for it:

* it stores each picture once, and gives stacks of three, from which the speed can be seen (docs/windows.md);
* it moves each stack of a batch by a few pixels, another way each time (``RandomShift``);
* the critics' loss trains the encoder, through which the actor only looks.

On a GPU an update is one CUDA graph, from the draw to the optimizer's step.

Kostrikov et al. 2020, "Image augmentation is all you need" (arXiv 2004.13649).
"""

import argparse
from collections import deque

import gymnasium as gym
import torch
from rich.progress import Progress
from tensordict import TensorDict
from torch import Tensor

from gpubuf import LazyTensorStorage, Learner, SACLoss, TensorDictReplayBuffer, Window
from gpubuf.data import RandomShift
from gpubuf.modules import PixelEncoder, make_sac_actor, make_sac_critic
from gpubuf.optim import AdamW

FRAMES = 3


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=6_000, help="transitions (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=600, help="random transitions first (default: %(default)s)")
    parser.add_argument("--size", type=int, default=32, help="pixels of a side (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=2, help="steps of an action (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def picture(cosine: float, sine: float, size: int) -> Tensor:
    """A pendulum that points up where the cosine is 1: uint8 ``[1, size, size]``, white on black, with soft edges."""
    y, x = torch.meshgrid(torch.linspace(1, -1, size), torch.linspace(-1, 1, size), indexing="ij")
    along = (cosine * y - sine * x).clamp(0, 0.8)  # how far along the rod its nearest point is
    distance = torch.hypot(x + along * sine, y - along * cosine)
    return ((0.15 - distance) * size / 2 + 0.5).clamp(0, 1).mul(255).byte().unsqueeze(0)


def main(args: argparse.Namespace) -> list[float]:
    """Trains, and returns the return of every episode."""
    torch.manual_seed(args.seed)
    env = gym.make("Pendulum-v1")
    env.action_space.seed(args.seed)
    encoder = PixelEncoder((FRAMES, args.size, args.size), "drq", device=args.device)
    actor = make_sac_actor(50, 1, (256,), low=-2.0, high=2.0, encoder=encoder, in_keys=["pixels"], device=args.device)
    critic = make_sac_critic(50, 1, (256,), encoder=encoder, in_keys=["pixels", "action"], device=args.device)
    loss = SACLoss(actor, critic, target_entropy=-1.0, alpha_init=0.1)
    loss.make_value_estimator(gamma=0.97)
    parameters = [parameter for parameter in loss.parameters() if parameter.requires_grad]
    optimizer = AdamW(parameters, lr=1e-3, weight_decay=0.0, targets=loss, tau=0.01)
    stack = Window(1 - FRAMES, 0, join=0)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(args.steps, share_next=["pixels"], device=args.device),
        windows={"pixels": stack, ("next", "pixels"): stack},
        process=[RandomShift(["pixels"], pad=args.size // 16)],
        batch_size=args.batch_size,
    )
    learner = Learner(loss, optimizer, buffer=buffer)

    def seen(observation: Tensor) -> Tensor:
        return picture(float(observation[0]), float(observation[1]), args.size)

    frames = deque([seen(env.reset(seed=args.seed)[0])] * FRAMES, FRAMES)
    returns, total = list[float](), 0.0
    with Progress() as progress:
        bar = progress.add_task("warming up", total=args.steps)
        for step in range(args.steps):
            learning = step >= args.warmup
            action = torch.as_tensor(env.action_space.sample())
            if learning:
                with torch.no_grad():
                    action = actor(TensorDict({"pixels": torch.cat([*frames]).to(args.device)}))["action"].cpu()
            reward, over = 0.0, False
            for _ in range(args.repeat):
                observation, gained, terminated, truncated, _ = env.step(action.numpy())
                reward, over = reward + float(gained), terminated or truncated
                if over:
                    break
            following = seen(observation)
            # Rewards of a size that the critics learn fast.
            after = {"pixels": following, "reward": torch.tensor([reward / 10]), "done": torch.tensor([over])}
            after["terminated"] = torch.tensor([terminated])
            buffer.add(TensorDict({"pixels": frames[-1], "action": action, "next": after}))
            frames.append(following)
            total += reward
            if over:
                returns.append(total)
                total, frames = 0.0, deque([seen(env.reset()[0])] * FRAMES, FRAMES)
            if learning:
                learner()
            recent = returns[-10:]
            text = f"return {sum(recent) / len(recent):7.1f}" if recent else "warming up"
            progress.update(bar, advance=1, description=text)
    env.close()
    return returns


if __name__ == "__main__":
    returns = main(parse())
    recent = returns[-10:]
    print(f"{len(returns)} episodes, mean return of the last {len(recent)}: {sum(recent) / max(1, len(recent)):.1f}")
