"""Counts the Python calls of gpubuf between a call of a buffer and its first launch, and the files they are in.

``python -m tests.support.trace_calls`` prints them for a prioritized buffer.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict

import gpubuf
from gpubuf.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer

PACKAGE = Path(gpubuf.__file__).parent
KERNELS = Path(gpubuf.kernels.__path__[0]).resolve()
BATCH = 32


class Step(NamedTuple):
    """A call: the file, relative to the package, and the function."""

    file: str
    function: str


def _place(code_file: str) -> str | None:
    """The file of a function of gpubuf, relative to the package; None for one of another package."""
    path = Path(code_file).resolve()
    if path.is_relative_to(KERNELS):
        return str("kernels" / path.relative_to(KERNELS))
    return str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else None


def _launches(file: str) -> bool:
    return file.startswith("kernels/") and Path(file).name.startswith(("_cpu", "_numba", "_launch"))


def until_launch(call: Callable[[], Any]) -> list[Step]:
    """The calls of gpubuf's functions that ``call`` makes before it enters the launcher of a kernel."""
    steps: list[Step] = []
    launched = False

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal launched
        if event != "call" or launched:
            return
        file = _place(frame.f_code.co_filename)
        if file is None:
            return
        if _launches(file):
            launched = True
        else:
            steps.append(Step(file, frame.f_code.co_qualname))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    assert launched, "nothing was launched"
    return steps


def traces() -> dict[str, list[Step]]:
    """The calls of operations of a prioritized buffer on the CPU, but for the first write all used before."""
    rows = TensorDict({"observation": torch.zeros(500, 4)}, [500])

    def new() -> TensorDictPrioritizedReplayBuffer:
        return TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=LazyTensorStorage(1000), batch_size=BATCH)

    buffer, unused = new(), new()
    for _ in range(3):
        buffer.extend(rows)
    batch = buffer.sample().set("td_error", torch.ones(BATCH))
    buffer.update_tensordict_priority(batch)
    return {
        "first extend": until_launch(lambda: unused.extend(rows)),
        "extend": until_launch(lambda: buffer.extend(rows)),
        "sample": until_launch(buffer.sample),
        "update_tensordict_priority": until_launch(lambda: buffer.update_tensordict_priority(batch)),
    }


def main() -> None:
    """Print every call, and how many there are in how many files."""
    for name, steps in traces().items():
        print(f"{name}: {len(steps)} calls in {len({step.file for step in steps})} files before the first launch")
        for step in steps:
            print(f"    {step.file}: {step.function}")


if __name__ == "__main__":
    main()
