"""A replay buffer in an actor of Ray.

The actor owns the buffer, tasks collect on many machines, and this process learns the values of a random walk. The
actor saves its buffer after every round, and Ray starts it again if its process ends: kill the one whose number is
printed, and the run goes on with the rows of the last save.

    python examples/ray_actor.py --folder /tmp/replay

On several machines start Ray there (``ray start``), and pass a folder that all of them see.
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import ActorUnavailableError

from gpubuf import LazyTensorStorage, TensorDictPrioritizedReplayBuffer

STATES = 9


class Replay:
    """The buffer. One thread of the actor runs the calls, in the order in which they arrive."""

    def __init__(self, folder: Path, capacity: int) -> None:
        self.folder = folder
        self.buffer = TensorDictPrioritizedReplayBuffer(
            alpha=0.6, beta=0.4, storage=LazyTensorStorage(capacity), batch_size=64
        )
        if folder.exists():
            self.buffer.load(folder)

    def extend(self, columns: dict[Any, np.ndarray]) -> int:
        """Write rows, an array per key. Returns how many were ever written."""
        self.buffer.extend_columns(columns)
        return self.buffer.write_count

    def sample(self) -> dict[Any, torch.Tensor]:
        return self.buffer.sample_columns()

    def update_priority(self, index: torch.Tensor, generation: torch.Tensor, priority: torch.Tensor) -> None:
        """Rows that were overwritten since they were drawn keep their priority."""
        self.buffer.update_priority(index, priority, generation=generation)

    def save(self) -> int:
        """Write what has changed since the last save. Returns the number of rows that are safe now."""
        self.buffer.save(self.folder)
        return self.buffer.write_count

    def process(self) -> int:
        return os.getpid()


def start(folder: Path, capacity: int) -> Any:
    """The actor. Calls that a death has interrupted are made again by whoever made them: a write could come twice."""
    return ray.remote(max_restarts=-1, max_task_retries=0)(Replay).remote(folder, capacity)


def while_it_restarts(call: Callable[[], Any]) -> Any:
    """The result of a call on the actor, which is made again until the actor is there."""
    while True:
        try:
            return ray.get(call())
        except ActorUnavailableError:
            time.sleep(0.5)


@ray.remote
def collect(replay: Any, steps: int, seed: int) -> int:
    """Walk, and send the transitions in one write. A write that fails is not made again: its rows may be there."""
    generator = np.random.default_rng(seed)
    states, following, reward, ended = [], [], [], []
    state = STATES // 2
    for _ in range(steps):
        after = state + generator.choice((-1, 1))
        states.append(state)
        ended.append(not 0 <= after < STATES)
        reward.append(float(after == STATES))
        following.append(min(max(after, 0), STATES - 1))
        state = STATES // 2 if ended[-1] else after
    each = np.eye(STATES, dtype=np.float32)
    columns = {
        "observation": each[states],
        ("next", "observation"): each[following],
        ("next", "reward"): np.array(reward, np.float32)[:, None],
        ("next", "terminated"): np.array(ended)[:, None],
    }
    return ray.get(replay.extend.remote(columns))


def learn(values: torch.nn.Linear, optimizer: torch.optim.Optimizer, replay: Any) -> None:
    """One update of temporal differences, on a batch of the actor."""
    batch = while_it_restarts(lambda: replay.sample.remote())
    with torch.no_grad():
        goes_on = ~batch["next", "terminated"]
        target = batch["next", "reward"] + goes_on * values(batch["next", "observation"])
    error = (target - values(batch["observation"])).squeeze(-1)
    optimizer.zero_grad()
    (batch["priority_weight"] * error.square()).mean().backward()
    optimizer.step()
    # Not waited for: the actor makes it before the next sample.
    replay.update_priority.remote(batch["index"], batch["index_generation"], error.detach().abs())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="where the buffer is saved")
    parser.add_argument("--rounds", type=int, default=20, help="(default: %(default)s)")
    parser.add_argument("--collectors", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="of a collector in a round (default: %(default)s)")
    parser.add_argument("--updates", type=int, default=50, help="of a round (default: %(default)s)")
    args = parser.parse_args()
    ray.init(ignore_reinit_error=True)
    replay = start(args.folder.absolute(), capacity=100_000)
    print(f"the buffer is in process {while_it_restarts(lambda: replay.process.remote())}")
    values = torch.nn.Linear(STATES, 1, bias=False)
    optimizer = torch.optim.Adam(values.parameters(), lr=0.02)
    waiting: list[Any] = []
    for number in range(args.rounds):
        seeds = range(number * args.collectors, (number + 1) * args.collectors)
        new = [collect.remote(replay, args.steps, seed) for seed in seeds]
        # The collectors of this round walk while the rows of the one before are learned from.
        for written in waiting or new:
            ray.wait([written])
        for _ in range(args.updates):
            learn(values, optimizer, replay)
        waiting = new
        print(f"round {number + 1}: {while_it_restarts(lambda: replay.save.remote())} rows are safe")
    print("values:", " ".join(f"{value:.2f}" for value in values.weight.squeeze(0).tolist()))


if __name__ == "__main__":
    main()
