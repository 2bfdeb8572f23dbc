"""The cost of batches that are computed from rows: n-step returns, observations stored once, dtypes, normalisation.

``python -m benchmarks.studies.batches`` draws uniform batches of 256 and 4096 from buffers that differ in one thing, in
one process, one thread, and in turn: a shared machine is then equally slow for all. Three programs' own buffers take
part, each in a process of its environment (``make bench`` makes them), beside ours with the same rows:

* holosoma's ``SimpleReplayBuffer`` (FastSAC): n-step while sampling, from ``[envs, steps]`` tensors;
* cpprb's ``ReplayBuffer(Nstep=...)``: n-step while writing;
* FlashSAC's ``TorchUniformBuffer``: n-step while writing. It is on no package index: name a clone of its repository by
  ``--flashsac``.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks.measure.elsewhere import found_by, peer_python
from benchmarks.measure.figures import OPEN, described, load_before, table
from benchmarks.measure.machine import describe
from benchmarks.measure.results import Runs, write_results
from benchmarks.peers.sources import transitions

BATCHES = (256, 4096)
#: Rows, and the same as steps of environments.
ROWS, ENVS = 1_000_000, 64
#: Rows with observations of :data:`WIDE` numbers.
WIDE, WIDE_ROWS = 310, 200_000
GAMMA = 0.99
#: Seconds of one contender in one round.
SLICE_OF_TIME = 0.05

#: Draws a batch of so many rows.
Draw = Callable[[int], object]
#: Makes the buffers of a group, by the names of the contenders.
Group = Callable[[], dict[str, Draw]]


def wide(n: int, observation: int = WIDE) -> TensorDict:
    """Steps of one environment: each next observation is the observation of the row behind, but for 1 row in 500."""
    rows = transitions(n, 0, observation, 6)
    following = rows["observation"].roll(-1, 0)
    ends = rows["next", "done"].view(-1)
    following[ends] += 1
    rows["next", "observation"] = following
    return rows


def buffer_of(rows: TensorDict, storage: Mapping[str, Any] | None = None, **options: Any) -> Draw:
    """Our buffer, full of these rows."""
    from gpubuf.data import LazyTensorStorage, TensorDictReplayBuffer

    ndim = len(rows.batch_size)
    held = LazyTensorStorage(rows.numel(), ndim=ndim, **(storage or {}))
    buffer = TensorDictReplayBuffer(storage=held, dim_extend=0, **options)
    steps = max(1, 65_536 // (rows.numel() // rows.shape[0]))
    for start in range(0, rows.shape[0], steps):
        buffer.extend(rows[start : start + steps])
    return buffer.sample


def n_step() -> dict[str, Draw]:
    """Steps of one environment, 17 + 6 + 17 numbers."""
    rows = wide(ROWS, 17)
    return {
        "n = 1": buffer_of(rows),
        **{f"n = {n}": buffer_of(rows, n_steps=n, gamma=GAMMA) for n in (3, 8)},
    }


def observations() -> dict[str, Draw]:
    """Observations of 310 numbers: twice a row, once, and in two bytes."""
    rows = wide(WIDE_ROWS)
    half = {"observation": torch.bfloat16}
    return {
        "float32": buffer_of(rows),
        "share_next": buffer_of(rows, {"share_next": True}),
        "share_next, n = 3": buffer_of(rows, {"share_next": True}, n_steps=3, gamma=GAMMA),
        "bfloat16": buffer_of(rows, {"dtypes": half}),
        "bfloat16, share_next": buffer_of(rows, {"dtypes": half, "share_next": True}),
        "float32, half as wide": buffer_of(wide(WIDE_ROWS, WIDE // 2)),
    }


def normalised() -> dict[str, Draw]:
    """Observations of 310 numbers, normalised with running statistics: in the launch, and after it."""
    from gpubuf.data import Normalize

    rows = wide(WIDE_ROWS)
    plain = buffer_of(rows)
    variance, mean = torch.var_mean(rows["observation"], 0)
    factor = (variance + 1e-8).rsqrt()

    def after(n: int) -> object:
        batch: Any = plain(n)
        for key in ("observation", ("next", "observation")):
            batch[key] = (batch[key] - mean) * factor
        return batch

    return {
        "as stored": plain,
        "normalised while copied": buffer_of(rows, process=[Normalize(["observation"])]),
        "normalised by torch": after,
    }


def asymmetric(steps: int, envs: int) -> TensorDict:
    """``[steps, envs]`` rows as holosoma keeps them: with a critic's observation beside the actor's."""
    flat = wide(steps * envs, 17)
    flat["critic_observation"] = flat["observation"].clone()
    flat["next", "critic_observation"] = flat["next", "observation"].clone()
    flat["next", "truncated"] = flat["next", "done"] & ~flat["next", "terminated"]
    return flat.view(envs, steps).transpose(0, 1).contiguous()


def holosoma() -> dict[str, Draw]:
    """FastSAC's buffer and ours: 64 environments, an observation for the actor and one for the critic, 1 M rows."""
    from holosoma.agents.fast_sac.fast_sac_utils import SimpleReplayBuffer  # type: ignore[import-not-found]

    steps = ROWS // ENVS
    rows = asymmetric(steps, ENVS)

    def theirs(n_steps: int) -> Draw:
        buffer = SimpleReplayBuffer(ENVS, steps, 17, 6, 17, n_steps, GAMMA, "cpu")
        flat = rows.transpose(0, 1)
        for name, value in (
            ("observations", flat["observation"]),
            ("critic_observations", flat["critic_observation"]),
            ("actions", flat["action"]),
            ("rewards", flat["next", "reward"].squeeze(-1)),
            ("dones", flat["next", "done"].squeeze(-1).long()),
            ("truncations", flat["next", "truncated"].squeeze(-1).long()),
            ("next_observations", flat["next", "observation"]),
            ("next_critic_observations", flat["next", "critic_observation"]),
        ):
            getattr(buffer, name).copy_(value)
        buffer.ptr = steps
        return lambda n: buffer.sample(n // ENVS)

    return {
        **{f"holosoma, n = {n}": theirs(n) for n in (1, 3, 8)},
        **{f"gpubuf, n = {n}": buffer_of(rows, n_steps=n, gamma=GAMMA) for n in (1, 3, 8)},
    }


def written_with_n_step(name: str, theirs: Draw) -> dict[str, Draw]:
    """A buffer that sums when it writes, and ours."""
    rows = wide(ROWS, 17)
    return {
        name: theirs,
        **{f"gpubuf, n = {n}": buffer_of(rows, n_steps=n, gamma=GAMMA) for n in (1, 3)},
    }


def cpprb() -> dict[str, Draw]:
    """cpprb's buffer and ours: one environment, 1 M rows."""
    from cpprb import ReplayBuffer  # type: ignore[import-not-found]

    widths = {"obs": {"shape": 17}, "act": {"shape": 6}, "rew": {}, "next_obs": {"shape": 17}, "done": {}}
    buffer = ReplayBuffer(ROWS, widths, Nstep={"size": 3, "gamma": GAMMA, "rew": "rew", "next": "next_obs"})
    rows = wide(ROWS, 17)
    buffer.add(
        obs=rows["observation"].numpy(),
        act=rows["action"].numpy(),
        rew=rows["next", "reward"].numpy(),
        next_obs=rows["next", "observation"].numpy(),
        done=rows["next", "done"].numpy(),
    )
    return written_with_n_step("cpprb, n = 3", buffer.sample)


def flashsac() -> dict[str, Draw]:
    """FlashSAC's buffer and ours: 1 M rows."""
    import gymnasium
    from flash_rl.buffers.torch_buffer import TorchUniformBuffer  # type: ignore[import-not-found]

    rows = wide(ROWS, 17)
    spaces = [gymnasium.spaces.Box(-1, 1, (ENVS, width)) for width in (17, 6)]
    buffers: dict[int, Any] = {}
    for n in BATCHES:
        buffers[n] = TorchUniformBuffer(*spaces, 3, GAMMA, ROWS, 1, n, "cpu")
        for start in range(0, ROWS - ROWS % ENVS, ENVS):
            part = rows[start : start + ENVS]
            following = part["next"]
            buffers[n].add(
                {
                    "observation": part["observation"],
                    "action": part["action"],
                    "reward": following["reward"].squeeze(-1),
                    "terminated": following["terminated"].squeeze(-1).float(),
                    "truncated": (following["done"] & ~following["terminated"]).squeeze(-1).float(),
                    "next_observation": following["observation"],
                }
            )
    return written_with_n_step("FlashSAC, n = 3", lambda n: buffers[n].sample())


#: Groups of contenders, by name.
GROUPS: dict[str, Group] = {
    group.__name__: group for group in (n_step, observations, normalised, holosoma, cpprb, flashsac)
}
#: Those that need an environment of a peer.
PEERS = ("holosoma", "cpprb", "flashsac")
TITLES = {
    "n_step": "n-step returns: one environment, 1 M rows of 17 + 6 + 17 numbers",
    "observations": f"observations of {WIDE} numbers, {WIDE_ROWS:,} rows",
    "normalised": f"normalised observations of {WIDE} numbers",
    "holosoma": f"beside holosoma: {ENVS} environments, two observations",
    "cpprb": "beside cpprb, which sums when it writes",
    "flashsac": "beside FlashSAC, which sums when it writes",
}


def timed(call: Callable[[], object]) -> float:
    """Microseconds of a call: the median over a slice of time."""
    took, until = [], time.perf_counter() + SLICE_OF_TIME
    while time.perf_counter() < until or len(took) < 3:
        start = time.perf_counter()
        call()
        took.append(time.perf_counter() - start)
    return statistics.median(took) * 1e6


#: Microseconds by contender and batch.
Found = dict[str, dict[str, float]]


def measure(group: str, rounds: int) -> Found:
    """The medians over rounds, in each of which every contender had its turn."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    contenders = GROUPS[group]()
    calls = {(name, n): functools.partial(draw, n) for name, draw in contenders.items() for n in BATCHES}
    for call in calls.values():
        timed(call)
    took: dict[tuple[str, int], list[float]] = {place: [] for place in calls}
    for _ in range(rounds):
        for place, call in calls.items():
            took[place].append(timed(call))
    return {name: {str(n): statistics.median(took[name, n]) for n in BATCHES} for name in contenders}


def measure_elsewhere(group: str, rounds: int, flashsac_at: Path | None) -> Found | None:
    """:func:`measure` in a process of its own; None if the peer is not installed."""
    arguments = ("--group", group, "--rounds", str(rounds))
    try:
        found: Found = found_by(
            peer_python(group), "benchmarks.studies.batches", *arguments, path=str(flashsac_at or "")
        )
    except subprocess.CalledProcessError:
        print(f"{group}: can't be measured here", file=sys.stderr)
        return None
    return found


def rows_of(found: Found) -> list[list[str]]:
    """A line a contender, with its ratios to the first."""
    first = next(iter(found.values()))
    return [
        [name, *(f"{times[str(n)]:.1f} ({times[str(n)] / first[str(n)]:.2f}x)" for n in BATCHES)]
        for name, times in found.items()
    ]


def batches_section(runs: Runs) -> str:
    """docs/rows.md: the newest run."""
    run = runs.get("batches")
    if run is None:
        return f"No run of `python -m benchmarks.studies.batches` is committed: {OPEN}."
    head = [f"batch of {n}, µs" for n in BATCHES]
    found: dict[str, Found] = run.data["batches"]
    tables = [table([TITLES[group], *head], rows_of(part)) for group, part in found.items()]
    return "\n\n".join([*tables, described(run), load_before(run)])


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--flashsac", type=Path, help="a clone of FlashSAC's repository")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/batches-<device>-<date>.json")
    parser.add_argument("--group", choices=GROUPS, help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    if arguments.group:
        print(json.dumps(measure(arguments.group, arguments.rounds)))
        return
    machine = {**describe("cpu"), "threads": 1}
    found = {}
    for group in arguments.groups:
        part = measure_elsewhere(group, arguments.rounds, arguments.flashsac)
        if part is not None:
            found[group] = part
            print(table([TITLES[group], *map(str, BATCHES)], rows_of(part)), flush=True)
    write_results("batches", found, machine, arguments.out)


if __name__ == "__main__":
    main()
