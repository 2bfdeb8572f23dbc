"""Captures that CUDA, other threads or the garbage collector could break, and what a broken one leaves behind."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from gpubuf import CaptureError, capture


def test_an_error_of_cuda_is_explained(machine):
    """What only CUDA finds out (here: the optimiser's own check) is said to be about the capture."""

    def step(x: Tensor) -> Tensor:
        if machine.log.count("capture on side"):
            raise RuntimeError("Attempting CUDA graph capture of step() for an instance of Adam, capturable is False")
        return x

    run = capture(step, warmup=1)
    run(torch.ones(1))
    with pytest.raises(CaptureError, match=r"captured in a CUDA graph: Attempting.* capturable is False"):
        run(torch.ones(1))


def test_other_threads_may_use_cuda_during_a_capture(machine):
    """CUDA's "global" mode would end both the capture and the other thread's allocation with an error."""
    step = capture(lambda x: x + 1, warmup=1)
    for _ in range(3):
        step(torch.ones(1))
    assert machine.capture_error_modes == ["thread_local"]


@pytest.mark.parametrize("fails", [False, True])
def test_garbage_is_not_collected_during_a_capture(machine, fails):
    """Its finalisers call CUDA, which a capture does not survive."""
    collecting = []

    def step(x: Tensor) -> Tensor:
        collecting.append(gc.isenabled())
        if fails and len(collecting) == 2:
            raise RuntimeError("no luck")
        return x + 1

    run = capture(step, warmup=1)
    run(torch.ones(1))
    with pytest.raises(RuntimeError, match="no luck") if fails else contextlib.nullcontext():
        run(torch.ones(1))
    assert collecting == [True, False]
    assert gc.isenabled()


def test_a_capture_that_cuda_invalidates_leaves_everything_as_it_was(machine, monkeypatch):
    """PyTorch does not where ending the capture fails too: neither stream nor allocator nor generator."""
    graph, kept = torch.cuda.graph, []

    @contextlib.contextmanager
    def invalidated(*args: Any, stream: Any, **kwargs: Any) -> Iterator[None]:
        switched = torch.cuda.stream(stream)
        switched.__enter__()
        with graph(*args, stream=stream, **kwargs):
            yield
        if not kept:
            kept.append(switched)
            machine.invalidated = True
            raise RuntimeError("operation failed due to a previous error during capture")
        switched.__exit__(None, None, None)

    monkeypatch.setattr(torch.cuda, "graph", invalidated)
    step = capture(lambda x: x + 1, warmup=1)
    before = torch.cuda.current_stream()
    step(torch.ones(1))
    with pytest.raises(CaptureError, match="previous error during capture"):
        step(torch.ones(1))
    assert torch.cuda.current_stream() is before
    # A capture that succeeds ends the broken one for the generator.
    assert machine.log[-3:] == ["capture on side", "allocation leaves the pool", "capture on side"]
    assert step(torch.ones(1)).tolist() == [2.0]
    assert step.captured


def test_a_capture_that_is_refused_needs_no_repair(machine):
    step = capture(lambda x: x.sum().item(), warmup=1)
    with pytest.raises(ValueError, match="would be the same"):
        step(torch.ones(1))
    step = capture(lambda x: x * x.sum().item(), warmup=1)
    step(torch.ones(1))
    with pytest.raises(CaptureError, match="reads a value"):
        step(torch.ones(1))
    assert machine.log.count("capture on side") == 1
    assert not machine.invalidated
