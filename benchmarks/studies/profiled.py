"""Makes the calls of the headline figures once each, for a profiler of NVIDIA's to look at.

``ncu --profile-from-start off python -m benchmarks.studies.profiled`` sees the launches of these calls and no others:
buffers are filled, and kernels compiled, before it is told to look. A stage of ``make gpu`` runs it, see
:mod:`benchmarks.stages`. What ncu says of duration, instructions and stalls is compared with docs/performance.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence

import torch

from benchmarks.workloads.registry import REGISTRY, LastFilled
from gpubuf.kernels import moments

WORKLOADS = (
    "uniform-sample-256",
    "uniform-sample-32768",
    "prioritized-sample-256",
    "priority-update-256",
    "slices-100k-in-120k-write-and-sample",
)

WARM_UP = 5


def calls(device: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """What is looked at: a draw and a gather, small and large, a priority update, both kernels of the trajectory index,
    and a normalised write's statistics."""
    filled = LastFilled()
    for name in WORKLOADS:
        entry = REGISTRY[name]
        yield name, entry.prepare(filled.get(entry, "gpubuf", device), "gpubuf", device)
    source = torch.randn(4096, 48, device=device)
    state, mean, factor, tickets = moments.new_state(48, device)
    rule = torch.tensor(moments.Rule(1e-8), dtype=torch.float64, device=device)
    yield "moments of 4096 x 48", lambda: moments.update(state, source, mean, factor, rule, tickets)


def main(arguments: Sequence[str] | None = None) -> None:
    (device,) = sys.argv[1:] if arguments is None else arguments
    for name, call in calls(device):
        for _ in range(WARM_UP):
            call()
        print(name, flush=True)
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
