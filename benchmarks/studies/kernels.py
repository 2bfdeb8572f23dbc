"""The resources of the kernels, and how many of them a call launches: all that is known without a GPU.

``python -m benchmarks.studies.kernels`` compiles every kernel ahead of time for four targets, runs the calls of a
training step through Triton's interpreter and counts the launches, and writes both into one file of results. Neither
needs a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.measure.figures import OPEN, described, table
from benchmarks.measure.machine import describe
from benchmarks.measure.results import Runs, write_results
from benchmarks.studies.checkpoints import rows as transitions

CAPACITY, STORED = 1_000_000, 20_000
SAMPLERS = ("uniform", "prioritized", "slices", "prioritized slices")


@contextlib.contextmanager
def counted_launches() -> Iterator[Counter[str]]:
    """Counts the kernels that Triton's interpreter runs, by name."""
    from triton.runtime.interpreter import GridExecutor

    found: Counter[str] = Counter()
    launch = GridExecutor.__call__

    def counting(self: GridExecutor, *args: Any, **kwargs: Any) -> Any:
        found[self.fn.__name__] += 1
        return launch(self, *args, **kwargs)

    with mock.patch.object(GridExecutor, "__call__", counting):
        yield found


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


def filled_buffer(kind: str) -> Any:
    """A buffer with room for a million transitions, some of them written, by the twins on the CPU."""
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
        "prioritized": lambda: PrioritizedSampler(CAPACITY, 0.6, 0.4),
        "slices": lambda: SliceSampler(slice_len=8),
        "prioritized slices": lambda: PrioritizedSliceSampler(CAPACITY, 0.6, 0.4, slice_len=8),
    }
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), sampler=samplers[kind]())
    data = transitions(STORED)
    data["next", "done"][99::100] = True
    buffer.extend(data)
    if "prioritized" in kind:
        buffer.update_priority(torch.arange(STORED), torch.rand(STORED) + 0.1)
    return buffer


def calls(kind: str, n: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """The calls of a training step on one kind of buffer, with their names."""
    buffer, data = filled_buffer(kind), transitions(n)
    yield f"{kind}: sample, {n}", lambda: buffer.sample(n)
    yield f"{kind}: extend, {n}", lambda: buffer.extend(data)
    if "prioritized" in kind:
        index, priority = torch.randint(STORED, (n,)), torch.rand(n) + 0.1
        yield f"{kind}: priority update, {n}", lambda: buffer.update_priority(index, priority)


def count(kinds: Sequence[str] = SAMPLERS, sizes: Sequence[int] = (256,)) -> list[dict[str, Any]]:
    """Launches of every call. Needs ``TRITON_INTERPRET=1``, set before Triton is imported."""
    from gpubuf.kernels._registry import triton_on_cpu

    found = []
    with shaped_as_on_a_gpu(), counted_launches() as launches:
        for kind in kinds:
            for n in sizes:
                for name, call in calls(kind, n):
                    # The first call of a kind allocates, and may launch what later ones don't.
                    for _ in range(2):
                        launches.clear()
                        with triton_on_cpu():
                            call()
                    found.append({"call": name, "total": launches.total(), "kernels": dict(launches)})
    return found


def resources() -> list[dict[str, Any]]:
    """The most that any specialisation of a kernel takes, by kernel and target. The targets side by side."""
    from gpubuf.kernels.aot.compiler import TARGETS, all_specs, compile_in_subprocess

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


def counted_in_subprocess() -> list[dict[str, Any]]:
    """:func:`count` in a process with Triton's interpreter."""
    command = [sys.executable, "-m", "benchmarks.studies.kernels", "--count"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def launches_table(runs: Runs) -> str:
    """docs/performance.md: the kernels that every call launches."""
    run = runs.get("kernels")
    if run is None:
        return f"No run of `python -m benchmarks.studies.kernels` is committed: {OPEN}."
    rows = [
        [each["call"], str(each["total"]), ", ".join(f"`{name}`" for name in each["kernels"])]
        for each in run.data["kernels"]["launches"]
    ]
    return "\n\n".join([table(["call", "launches", "kernels"], rows), described(run)])


def resources_table(runs: Runs) -> str:
    """docs/performance.md: registers, shared memory and spills of every kernel."""
    run = runs.get("kernels")
    if run is None:
        return f"No run of `python -m benchmarks.studies.kernels` is committed: {OPEN}."
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
    parser.add_argument("--count", action="store_true", help="print the launches as JSON, and nothing else")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/kernels-<device>-<date>.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.count:
        print(json.dumps(count()))
        return
    machine = describe("cpu")
    launches = counted_in_subprocess()
    for each in launches:
        print(f"{each['total']:3} {each['call']}: {', '.join(each['kernels'])}")
    write_results("kernels", {"launches": launches, "resources": resources()}, machine, options.out)


if __name__ == "__main__":
    main()
