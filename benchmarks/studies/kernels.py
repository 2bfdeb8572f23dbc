"""What is known of the kernels without a GPU: their resources, and what a call launches and executes.

``python -m benchmarks.studies.kernels`` compiles every kernel ahead of time for four targets. It makes the calls of a
training step with tests/support/ptx in the place of a GPU, which executes the PTX for sm_90 on the CPU and counts: the
launches of a call, and of each its programs, warp instructions, bytes and dependent trips to memory. All goes into one
file of results. :mod:`benchmarks.studies.predict` makes times of it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.measure.elsewhere import ROOT
from benchmarks.measure.figures import described, of_run, table
from benchmarks.measure.machine import describe
from benchmarks.measure.results import Run, write_results
from benchmarks.peers.sources import transitions

CAPACITY, STORED = 1_000_000, 20_000
SIZES = {
    "uniform": (256, 4096, 32768),
    "observations once": (256, 4096),
    "prioritized": (256, 1024, 4096),
    "slices": (256, 4096),
    "prioritized slices": (256,),
}
"""Rows of a batch, by the kind of sampler. Slices have :data:`SLICE` rows."""

SLICE = 8

BATCH = 256
"""Rows of the pieces of a SAC loss."""


@contextlib.contextmanager
def shaped_as_on_a_gpu() -> Iterator[None]:
    """Trees and indices have the fan-outs that they have on a GPU, by the rule."""
    from gpubuf.kernels import config

    tree, index = config.tree_fan_out, config.index_fan_out
    with (
        mock.patch.object(config, "tree_fan_out", lambda capacity, *_: tree(capacity, "cuda")),
        mock.patch.object(config, "index_fan_out", lambda steps, envs, *_: index(steps, envs, "cuda")),
    ):
        yield


def episodes(n: int) -> Any:
    """``n`` transitions of episodes of a hundred steps: the next observation is that of the next row inside of one."""
    data = transitions(n)
    data["next", "observation"][:-1] = data["observation"][1:]
    ends = slice(99, None, 100)
    data["next", "done"][ends] = True
    data["next", "observation"][ends] = 0
    return data


def filled_buffer(kind: str, device: str = "cpu") -> Any:
    """A buffer with room for a million transitions, some of them written."""
    from gpubuf.data import (
        LazyTensorStorage,
        PrioritizedSampler,
        PrioritizedSliceSampler,
        RandomSampler,
        SliceSampler,
        TensorDictReplayBuffer,
    )

    samplers: dict[str, Callable[[], Any]] = {
        "uniform": RandomSampler,
        "observations once": RandomSampler,
        "prioritized": lambda: PrioritizedSampler(CAPACITY, 0.6, 0.4),
        "slices": lambda: SliceSampler(slice_len=SLICE),
        "prioritized slices": lambda: PrioritizedSliceSampler(CAPACITY, 0.6, 0.4, slice_len=SLICE),
    }
    storage = LazyTensorStorage(CAPACITY, device=device, share_next=kind == "observations once")
    buffer = TensorDictReplayBuffer(storage=storage, sampler=samplers[kind]())
    buffer.extend(episodes(STORED))
    if "prioritized" in kind:
        buffer.update_priority(torch.arange(STORED), torch.rand(STORED) + 0.1)
    return buffer


def calls(kind: str, sizes: Sequence[int], device: str = "cpu") -> Iterator[tuple[str, Callable[[], object]]]:
    """The calls of a training step on one kind of buffer, with their names."""
    buffer = filled_buffer(kind, device)
    for n in sizes:
        data, index, priority = (
            each.to(device) for each in (episodes(n), torch.randint(STORED, (n,)), torch.rand(n) + 0.1)
        )
        yield f"{kind}: sample, {n}", functools.partial(buffer.sample, n)
        if kind == "uniform":
            yield f"{kind}: gather, {n}", functools.partial(buffer.__getitem__, index)
        yield f"{kind}: extend, {n}", functools.partial(buffer.extend, data)
        if "prioritized" in kind:
            yield f"{kind}: priority update, {n}", functools.partial(buffer.update_priority, index, priority)


def sac_calls(device: str = "cpu") -> dict[str, Callable[[], object]]:
    """The fused pieces of a SAC loss, without their gradients."""
    from gpubuf.kernels import sac, tanh_normal, td

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    q, column, zero = zeros(2, BATCH), zeros(BATCH), zeros()
    flag = zeros(BATCH, dtype=torch.bool)
    loc, scale, noise = zeros(BATCH, 6), zeros(BATCH, 6) + 1, zeros(BATCH, 6)
    return {
        "tanh-normal sample": lambda: tanh_normal.sample(loc, scale, noise, None, None, -1.0, 1.0, 1),
        "soft TD target": lambda: td.soft_td_target(q, column, zero, column, flag, zero, None),
        "TD loss": lambda: td.td_loss(q, column, None, None, 1, 1),
        "actor loss": lambda: sac.actor_loss(q, column, zero, None, None, 1),
        "temperature loss": lambda: sac.temperature_loss(zero, column, zero, None, None, 1),
    }


def other_calls(device: str = "cpu") -> Iterator[tuple[str, Callable[[], object]]]:
    """Statistics of a normalised write, and the pieces of a SAC loss."""
    from gpubuf.kernels import moments

    rule = torch.tensor(moments.Rule(1e-8), dtype=torch.float64, device=device)
    for n, elements in ((256, 48), (4096, 48)):
        state, mean, factor, tickets = moments.new_state(elements, device)
        source = torch.randn(n, elements, device=device)
        update = functools.partial(moments.update, state, source, mean, factor, rule, tickets)
        yield f"statistics of {elements} elements, {n}", update
    for name, call in sac_calls(device).items():
        yield f"{name}, {BATCH}", call


def all_calls(device: str = "cpu") -> Iterator[tuple[str, Callable[[], object]]]:
    """Every call of the study, with its name."""
    for kind, sizes in SIZES.items():
        yield from calls(kind, sizes, device)
    yield from other_calls(device)


def resources() -> list[dict[str, Any]]:
    """The most that any specialisation of a kernel takes, by kernel and target. The targets side by side."""
    from gpubuf.kernels.aot.compiler import TARGETS, compile_in_subprocess
    from gpubuf.kernels.aot.operations import all_specs

    specs = all_specs()
    names = [spec.kernel.partition(":")[2] for spec in specs]
    found: dict[str, dict[str, Any]] = {
        name: {"kernel": name, "specialisations": names.count(name), "targets": {}} for name in dict.fromkeys(names)
    }
    with ThreadPoolExecutor(len(TARGETS)) as threads:
        compiled = dict(zip(TARGETS, threads.map(compile_in_subprocess, TARGETS), strict=True))
    for target, results in compiled.items():
        for name, result in zip(names, results, strict=True):
            if result.error:
                raise RuntimeError(f"{result.spec} on {target}: {result.error}")
            most = found[name]["targets"].setdefault(target, {"registers": 0, "spill_bytes": 0, "shared_bytes": 0})
            for what in most:
                most[what] = max(most[what], getattr(result, what))
    return list(found.values())


def counted_in_subprocess(*options: str) -> list[dict[str, Any]]:
    """What every call launches and executes, from a process whose kernels are compiled, whatever those here are."""
    command = [sys.executable, "-m", "tests.support.ptx.counts", *options]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: list[dict[str, Any]] = json.loads(run.stdout.splitlines()[-1])
    return found


#: The newest run of this study, for a page.
of_counts = of_run("kernels", "of `python -m benchmarks.studies.kernels`")


@of_counts
def launches_table(run: Run) -> str:
    """docs/performance.md: the kernels that every call launches."""
    rows = [
        [each["call"], str(each["total"]), ", ".join(f"`{name}`" for name in each["kernels"])]
        for each in run.data["kernels"]["launches"]
    ]
    return "\n\n".join([table(["call", "launches", "kernels"], rows), described(run)])


@of_counts
def resources_table(run: Run) -> str:
    """docs/performance.md: registers, shared memory and spills of every kernel."""
    found = run.data["kernels"]["resources"]
    targets = list(found[0]["targets"])

    def most(kernel: dict[str, Any], what: str) -> str:
        return " / ".join(str(kernel["targets"][target][what]) for target in targets)

    rows = [
        [f"`{each['kernel']}`", str(each["specialisations"])]
        + [most(each, what) for what in ("registers", "shared_bytes", "spill_bytes")]
        for each in found
    ]
    sentence = f"The most that any specialisation takes, on {', '.join(targets)}; bytes of shared memory and of spills."
    return f"{sentence}\n\n{table(['kernel', 'specialisations', 'registers', 'shared memory', 'spills'], rows)}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.kernels", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/kernels-<device>-<date>.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    machine = describe("cpu")
    launches = counted_in_subprocess()
    for each in launches:
        print(f"{each['total']:3} {each['call']}: {', '.join(each['kernels'])}")
    write_results("kernels", {"launches": launches, "resources": resources()}, machine, options.out)


if __name__ == "__main__":
    main()
