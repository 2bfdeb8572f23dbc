"""Times calls on an actor of Ray: TorchRL's ``RayReplayBuffer`` with either library's buffer in it, and a plain actor.

``.peers/ray/bin/python -m benchmarks.studies.ray_calls`` prints medians of a write and of a sample of 256 transitions,
in turns. Each is a call of this process that waits for its result.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.measure.elsewhere import ROOT
from benchmarks.measure.in_turn import Contender, in_turn
from benchmarks.peers.sources import transitions

ROWS, BATCH = 10_000, 256


class Columns:
    """A buffer in an actor, as examples/ray_actor.py has it."""

    def __init__(self) -> None:
        from gpubuf import LazyTensorStorage, TensorDictReplayBuffer

        self.buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(ROWS), batch_size=BATCH)

    def extend(self, columns: dict[Any, Any]) -> None:
        self.buffer.extend_columns(columns)

    def sample(self) -> dict[Any, Any]:
        return self.buffer.sample_columns()


def contenders(ray: Any) -> dict[str, Contender]:
    """Each full of the same rows."""
    import torchrl.data as theirs  # type: ignore[import-not-found]

    from gpubuf.integrations import torchrl as ours

    rows, few = transitions(ROWS), transitions(BATCH)
    found = {}
    for title, library in (("TorchRL in RayReplayBuffer", theirs), ("gpubuf in RayReplayBuffer", ours)):
        buffer = theirs.RayReplayBuffer(
            storage=partial(library.LazyTensorStorage, ROWS),
            replay_buffer_cls=library.TensorDictReplayBuffer,
            batch_size=BATCH,
        )
        buffer.extend(rows)
        found[title] = Contender({f"sample {BATCH}": buffer.sample, f"extend {BATCH}": partial(buffer.extend, few)})
    actor = ray.remote(Columns).remote()

    def arrays(data: Any) -> dict[Any, Any]:
        return {key: value.numpy() for key, value in data.items(True, True)}

    columns = arrays(few)
    ray.get(actor.extend.remote(arrays(rows)))
    calls = {
        f"sample {BATCH}": lambda: ray.get(actor.sample.remote()),
        f"extend {BATCH}": lambda: ray.get(actor.extend.remote(columns)),
    }
    found["gpubuf in a plain actor, as columns"] = Contender(calls)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.ray_calls", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=20, help="default: 20")
    options = parser.parse_args(arguments)
    import ray  # type: ignore[import-not-found]

    torch.set_num_threads(1)
    folders = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    ray.init(include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": folders}})
    for title, one in in_turn(contenders(ray), options.rounds).items():
        print(f"{title:36} " + ", ".join(f"{what} {took:8.0f} µs" for what, took in one["calls"].items()))


if __name__ == "__main__":
    main()
