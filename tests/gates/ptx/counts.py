"""``python -m tests.gates.ptx.counts``: what the calls of :mod:`benchmarks.studies.kernels` execute, as JSON.

With ``--small`` of 256 rows alone, with ``--windows`` those of :mod:`benchmarks.studies.windows`, with ``--sm_80`` or
``--sm_120`` as they are compiled for another GPU than sm_90. Triton must not be in its interpreter's mode.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch

from benchmarks.studies import windows
from benchmarks.studies.kernels import SIZES, calls, law_calls, other_calls
from gpubuf.data import writing
from gpubuf.kernels import _registry, config
from tests.gates.ptx.launch import TARGETS, Executor
from tests.support.dispatched import Dispatched

COUNTED = (
    "kernel", "programs", "warps", "instructions", "most_instructions", "bytes_loaded", "bytes_stored", "trips",
    "products", "flops",
)  # fmt: skip
"""What is written down of a :class:`~tests.gates.ptx.launch.Launch`."""

WITHOUT_LAUNCH = ("aten::set_", "aten::empty", "aten::new_empty", "aten::_reshape_alias")
"""Operations of PyTorch that are no views, and only make tensors."""


@contextlib.contextmanager
def shaped_as_on_a_gpu() -> Iterator[None]:
    """Trees and indices have the fan-outs that they have on a GPU, by the rule."""
    tree, index = config.tree_fan_out, config.index_fan_out
    with (
        mock.patch.object(config, "tree_fan_out", lambda capacity, *_: tree(capacity, "cuda")),
        mock.patch.object(config, "index_fan_out", lambda steps, envs, *_: index(steps, envs, "cuda")),
    ):
        yield


def of_training(most: int | None = None) -> Iterator[tuple[str, Callable[[], object]]]:
    """The calls of :mod:`benchmarks.studies.kernels`, for so many sizes of batches."""
    of_buffers = (calls(kind, sizes[:most]) for kind, sizes in SIZES.items())
    yield from itertools.chain(*of_buffers, law_calls(), other_calls())


def is_launch(operation: Any) -> bool:
    """Whether PyTorch would launch a kernel of its own: it computes, and not by ours."""
    name = operation.name()
    return name.startswith("aten::") and not (operation.is_view or name.startswith(WITHOUT_LAUNCH))


def count(named: Iterable[tuple[str, Callable[[], object]]], target: str = TARGETS[0]) -> list[dict[str, Any]]:
    """What every call launches, what each launch executes, and how many ``others`` PyTorch would launch.

    Those are of tensors on a CPU: they count where a GPU has the same, not checks of an index that only a CPU makes.
    """
    torch.manual_seed(0)
    executor, found = Executor(target=target), []
    # Buffers are filled on the CPU, and would go on with the writes that are prepared there.
    general = mock.patch.object(writing, "runs_at_once", return_value=False)
    with shaped_as_on_a_gpu(), executor.installed(), general:
        for name, call in named:
            # The first call of a kind allocates, and may launch what later ones don't.
            for _ in range(2):
                executor.launches.clear()
                with mock.patch.object(_registry, "_triton_on_cpu", True), Dispatched() as dispatched:
                    call()
            launches = [{what: getattr(each, what) for what in COUNTED} for each in executor.launches]
            others = sum(is_launch(operation) for operation, _ in dispatched.calls)
            kernels = Counter(each["kernel"] for each in launches)
            found.append({"call": name, "total": len(launches), "kernels": kernels, "launches": launches})
            found[-1]["others"] = others
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    asked = windows.calls() if "--windows" in sys.argv else of_training(1 if "--small" in sys.argv else None)
    target = next((target for target in TARGETS if f"--{target}" in sys.argv), TARGETS[0])
    print(json.dumps(count(asked, target)))
