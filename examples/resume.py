"""A run that goes on after it was killed.

Learns the values of a random walk, and saves everything every few steps. Kill it at any moment, begin it again with
the same folder, and it ends with the very numbers of a run that nobody killed:

    python examples/resume.py --folder run
    # kill -9 it, then the same again
    python examples/resume.py --folder run

Buffer and learner must be of the same step. So each checkpoint goes into one of two folders in turn, and the file
``latest``, replaced last and at once, names the complete one. ``buffer.save`` writes only what has changed since
that folder was written.
"""

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from tensordict import TensorDict
from torch import nn

from gpubuf import LazyTensorStorage, TensorDictPrioritizedReplayBuffer

STATES = 9


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=5_000, help="transitions (default: %(default)s)")
    parser.add_argument("--save-every", type=int, default=500, help="(default: %(default)s)")
    parser.add_argument("--die-at", type=int, help="kill this process at a step, for a try")
    return parser.parse_args()


class Run:
    """Everything that a run is made of: a walk, a buffer and a learner."""

    def __init__(self, capacity: int) -> None:
        torch.manual_seed(0)
        self.step = 0
        self.state = STATES // 2
        self.values = nn.Linear(STATES, 1, bias=False)
        self.optimizer = torch.optim.Adam(self.values.parameters(), lr=0.02)
        self.buffer = TensorDictPrioritizedReplayBuffer(
            alpha=0.6, beta=0.4, storage=LazyTensorStorage(capacity), batch_size=32
        )

    def advance(self) -> None:
        """One step of the walk, which ends beyond either side with 1 on the right, and one update."""
        following = self.state + (1 if torch.rand(()) < 0.5 else -1)
        ended = not 0 <= following < STATES
        after = {
            "observation": torch.zeros(STATES) if ended else torch.eye(STATES)[following],
            "reward": torch.tensor([float(following == STATES)]),
            "terminated": torch.tensor([ended]),
        }
        self.buffer.add(TensorDict({"observation": torch.eye(STATES)[self.state], "next": after}))
        self.state = STATES // 2 if ended else following

        batch = self.buffer.sample()
        with torch.no_grad():
            target = batch["next", "reward"] + self.values(batch["next", "observation"])
        error = (target - self.values(batch["observation"])).squeeze(-1)
        self.optimizer.zero_grad()
        (batch["priority_weight"] * error.square()).mean().backward()
        self.optimizer.step()
        batch["td_error"] = error.detach().abs()
        self.buffer.update_tensordict_priority(batch)
        self.step += 1

    def save(self, folder: Path) -> None:
        """Into the one of two folders that ``latest`` does not name, which stays complete meanwhile."""
        latest = folder / "latest"
        slot = "b" if latest.exists() and latest.read_text() == "a" else "a"
        learner: dict[str, Any] = {
            "step": self.step,
            "state": self.state,
            "values": self.values.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
        }
        self.buffer.save(folder / slot / "buffer")
        torch.save(learner, folder / slot / "learner.pt")
        (folder / "latest.new").write_text(slot)
        os.replace(folder / "latest.new", latest)

    def load(self, folder: Path) -> None:
        slot = folder / (folder / "latest").read_text()
        learner = torch.load(slot / "learner.pt")
        # The environment goes on where it was, so the next row continues the trajectory.
        self.buffer.load(slot / "buffer", end_trajectories=False)
        self.step, self.state = learner["step"], learner["state"]
        self.values.load_state_dict(learner["values"])
        self.optimizer.load_state_dict(learner["optimizer"])
        torch.set_rng_state(learner["random"])


def main(args: argparse.Namespace) -> Run:
    """Runs, or goes on, until the last step."""
    run = Run(capacity=1_000)
    if (args.folder / "latest").exists():
        run.load(args.folder)
        print(f"resumed at step {run.step}")
    with Progress() as progress:
        bar = progress.add_task("learning", total=args.steps, completed=run.step)
        while run.step < args.steps:
            run.advance()
            if run.step % args.save_every == 0:
                run.save(args.folder)
            if run.step == args.die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            progress.update(bar, advance=1)
    return run


if __name__ == "__main__":
    run = main(parse())
    print("values:", " ".join(f"{value:.6f}" for value in run.values.weight.squeeze(0).tolist()))
