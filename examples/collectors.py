"""Collectors in other processes.

Soft actor-critic whose rows come from writers beside it:

    python examples/collectors.py
    python examples/collectors.py --env HalfCheetah-v5 --collectors 8 --steps 100000

Each collector has an environment, a client of the learner's buffer, and the actor's parameters in shared memory, which
the learner brings up to date now and then. ``ratio`` has learner and collectors wait for each other: one update for
each transition, whoever is faster.
"""

import argparse
import copy
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from rich.progress import track
from tensordict import TensorDict
from torch import multiprocessing, nn

from gpubuf import LazyTensorStorage, Learner, SACLoss, TensorDictReplayBuffer, WriterClient, Writers
from gpubuf.modules import make_sac_actor, make_sac_critic
from gpubuf.optim import AdamW


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--env", default="Pendulum-v1")
    parser.add_argument("--collectors", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10_000, help="transitions (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=1_000, help="transitions before updates (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=256, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def collect(client: WriterClient, actor: nn.Module, returns: Any, args: argparse.Namespace, number: int) -> None:
    """What a collector does, until the learner takes no more rows."""
    torch.set_num_threads(1)
    torch.manual_seed(args.seed + 1 + number)
    env = gym.make(args.env)
    env.action_space.seed(args.seed + number)
    observation, total, step = env.reset(seed=args.seed + number)[0].astype(np.float32), 0.0, 0
    while True:
        if step < args.warmup // args.collectors:
            action = env.action_space.sample()
        else:
            with torch.no_grad():
                action = actor(TensorDict({"observation": torch.as_tensor(observation)}))["action"].numpy()
        following, reward, terminated, truncated, _ = env.step(action)
        following, total, step = following.astype(np.float32), total + float(reward), step + 1
        row = {
            "observation": observation,
            "action": action,
            ("next", "observation"): following,
            ("next", "reward"): np.array([reward], np.float32),
            ("next", "done"): np.array([terminated or truncated]),
            ("next", "terminated"): np.array([terminated]),
        }
        try:
            client.add_columns(row)
        except RuntimeError:
            return
        observation = following
        if terminated or truncated:
            returns.put(total)
            observation, total = env.reset()[0].astype(np.float32), 0.0


def example_row(observation_size: int, action_size: int) -> TensorDict:
    """A batch of one row, so that clients know what they are going to write."""
    flags = {name: torch.zeros(1, 1, dtype=torch.bool) for name in ("done", "terminated")}
    after = {"observation": torch.zeros(1, observation_size), "reward": torch.zeros(1, 1), **flags}
    start = {"observation": torch.zeros(1, observation_size), "action": torch.zeros(1, action_size)}
    return TensorDict({**start, "next": after}, [1])


def main(args: argparse.Namespace) -> list[float]:
    """Trains, and returns the return of every episode."""
    torch.manual_seed(args.seed)
    if args.device == "cpu":
        torch.set_num_threads(1)  # networks of this size are fastest so
    env = gym.make(args.env)
    obs_dim, action_dim = env.observation_space.shape[0], env.action_space.shape[0]
    bounds = {"low": env.action_space.low, "high": env.action_space.high}
    actor = make_sac_actor(obs_dim, action_dim, **bounds, device=args.device)
    critic = make_sac_critic(obs_dim, action_dim, device=args.device)
    loss = SACLoss(actor, critic, target_entropy=-float(action_dim))
    optimizer = AdamW(loss.parameters(), lr=1e-3, weight_decay=0.0, targets=loss, tau=0.005)
    samples = args.batch_size
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(args.steps, device=args.device),
        batch_size=samples,
        writers=Writers(args.collectors, ratio=samples, margin=50.0 * samples, min_rows=args.warmup),
    )
    learner = Learner(loss, optimizer, buffer=buffer)

    # A collector may read parameters while they are being copied: it then acts by a mix of two policies.
    shared = copy.deepcopy(actor).cpu().share_memory()
    spawn = multiprocessing.get_context("spawn")
    returns: Any = spawn.SimpleQueue()
    row = example_row(obs_dim, action_dim)
    collectors = [
        spawn.Process(target=collect, args=(buffer.client(row), shared, returns, args, number))
        for number in range(args.collectors)
    ]
    for process in collectors:
        process.start()
    found: list[float] = []
    for update in track(range(args.steps - args.warmup), "learning"):
        learner()
        if update % 20 == 0:
            with torch.no_grad():
                for theirs, ours in zip(shared.parameters(), actor.parameters(), strict=True):
                    theirs.copy_(ours)
        while not returns.empty():
            found.append(returns.get())
    writers = buffer.writers
    assert writers is not None
    writers.close()
    for process in collectors:
        process.join()
    for one in writers.counters():
        print(f"collector {one.place}: {one.written} transitions, blocked for {one.blocked:.1f} s")
    return found


if __name__ == "__main__":
    args = parse()
    found = main(args)
    recent = found[-10:]
    print(f"{len(found)} episodes, mean return of the last {len(recent)}: {sum(recent) / max(1, len(recent)):.1f}")
