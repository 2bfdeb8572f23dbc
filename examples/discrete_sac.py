"""Soft actor-critic over a finite set of actions.

Swings Gymnasium's pendulum up with a few torques to choose from, and solves it in 10,000 steps:

    python examples/discrete_sac.py
"""

import argparse
import statistics

import gymnasium as gym
import numpy as np
import torch
from rich.progress import track
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch.distributions import Categorical

from gpubuf import DiscreteSACLoss, LazyTensorStorage, Learner, TensorDictPrioritizedReplayBuffer
from gpubuf.modules import MLP, EnsembleMLP
from gpubuf.optim import AdamW


class Torques(gym.ActionWrapper):
    """A pendulum whose actions are the numbers of evenly spaced torques."""

    def __init__(self, count: int) -> None:
        super().__init__(gym.make("Pendulum-v1"))
        self.torques = np.linspace(-2.0, 2.0, count, dtype=np.float32)[:, None]
        self.action_space = gym.spaces.Discrete(count)

    def action(self, action: int) -> np.ndarray:
        return self.torques[action]


def make_loss(observations: int, actions: int, width: int) -> DiscreteSACLoss:
    """Actor, critics and temperature."""
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(MLP(observations, actions, (width, width)), ["observation"], ["logits"]),
        ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical),
    )
    critics = TensorDictModule(EnsembleMLP(2, observations, actions, (width, width)), ["observation"], ["action_value"])
    loss = DiscreteSACLoss(
        actor,
        critics,
        action_space="categorical",
        num_actions=actions,
        loss_function="l2",
        # Of the largest entropy. Near 1, the pendulum would be pushed about at random.
        target_entropy_weight=0.3,
    )
    loss.make_value_estimator(gamma=0.99)
    return loss


@torch.no_grad()
def choose(loss: DiscreteSACLoss, observation: np.ndarray, greedy: bool = False) -> int:
    """The number of a torque: drawn from the policy, or its most probable one."""
    policy = loss.actor_network.get_dist(TensorDict({"observation": torch.as_tensor(observation)}))
    return int(policy.logits.argmax() if greedy else policy.sample())


def evaluate(loss: DiscreteSACLoss, env: gym.Env, episodes: int) -> list[float]:
    """Returns of episodes in which the policy takes its most probable torque."""
    returns = []
    for episode in range(episodes):
        observation, _ = env.reset(seed=1_000_000 + episode)
        total, over = 0.0, False
        while not over:
            observation, reward, terminated, truncated, _ = env.step(choose(loss, observation, greedy=True))
            total, over = total + float(reward), terminated or truncated
        returns.append(total)
    return returns


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10_000, help="default: 10000")
    parser.add_argument("--learning-starts", type=int, default=1_000, help="default: 1000")
    parser.add_argument("--torques", type=int, default=9, help="default: 9")
    parser.add_argument("--width", type=int, default=256, help="of the two hidden layers; default: 256")
    parser.add_argument("--batch-size", type=int, default=256, help="default: 256")
    parser.add_argument("--episodes", type=int, default=20, help="of the evaluation at the end; default: 20")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    options = parser.parse_args(arguments)

    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    env = Torques(options.torques)
    env.action_space.seed(options.seed)
    loss = make_loss(3, options.torques, options.width)
    optimizer = AdamW(list(loss.parameters()), 1e-3, weight_decay=0.0, targets=loss, tau=0.005)
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=0.6, beta=0.4, storage=LazyTensorStorage(options.steps), batch_size=options.batch_size
    )
    learner = Learner(loss, optimizer, buffer=buffer)

    observation, _ = env.reset(seed=options.seed)
    for step in track(range(1, options.steps + 1), "training"):
        learning = step > options.learning_starts
        action = choose(loss, observation) if learning else int(env.action_space.sample())
        following, reward, terminated, truncated, _ = env.step(action)
        buffer.add(
            TensorDict(
                {
                    "observation": torch.as_tensor(observation),
                    "action": torch.tensor(action),
                    "next": {
                        "observation": torch.as_tensor(following),
                        "reward": torch.tensor([reward], dtype=torch.float32),
                        "done": torch.tensor([terminated or truncated]),
                        "terminated": torch.tensor([terminated]),
                    },
                }
            )
        )
        observation = env.reset()[0] if terminated or truncated else following
        if learning:
            learner()

    returns = evaluate(loss, env, options.episodes)
    print(f"mean return of {options.episodes} episodes: {statistics.fmean(returns):.1f}")
    return returns


if __name__ == "__main__":
    main()
