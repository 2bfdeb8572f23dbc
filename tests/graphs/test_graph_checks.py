"""What a CUDA graph can't hold is refused, operation by operation, on CUDA tensors without a GPU."""

from __future__ import annotations

import contextlib
import random

import numpy as np
import pytest
import torch

from gpubuf import CaptureError
from gpubuf.graphs import NoHostWork, host_random_state, refuse_host_random
from tests.support.fake_cuda import fake_cuda
from tests.support.graph_worlds import WORLDS


@pytest.fixture(autouse=True)
def on_fake_cuda():
    with fake_cuda():
        yield


def x() -> torch.Tensor:
    return torch.ones(4, device="cuda")


def mask() -> torch.Tensor:
    return torch.ones(4, dtype=torch.bool, device="cuda")


REFUSED = {
    "item": (lambda: x()[0].item(), "reads a value"),
    "a branch": (lambda: 1 if mask().any() else 2, "reads a value"),
    "equal": (lambda: torch.equal(x(), x()), "reads a value"),
    "nonzero": (lambda: torch.ops.aten.nonzero(mask()), "size only the GPU knows"),
    "masked_select": (lambda: x().masked_select(mask()), "size only the GPU knows"),
    "unique": (lambda: x().unique(), "size only the GPU knows"),
    "repeat_interleave": (lambda: x().repeat_interleave(x().long()), "size only the GPU knows"),
    "a mask as an index": (lambda: x()[mask()], "size only the GPU knows"),
    "a mask that is assigned to": (lambda: torch.ops.aten.index_put_(x(), [mask()], x()), "size only the GPU knows"),
    "cpu": (lambda: x().cpu(), "copies between host and GPU"),
    "to cuda": (lambda: torch.ones(0).to("cuda"), "on the CPU"),
    "a constant": (lambda: torch.tensor([1.0, 2.0], device="cuda"), "on the CPU"),
    "host noise": (lambda: torch.randn(3), "makes a tensor on the CPU"),
    "a random number": (lambda: torch.rand(()), "makes a tensor on the CPU"),
    "host work": (lambda: torch.zeros(3), "makes a tensor on the CPU"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    work, reason = REFUSED[name]
    with pytest.raises(CaptureError, match=reason), NoHostWork(torch.device("cuda")):
        work()


def test_a_copy_from_the_host_is_refused():
    batch, target = torch.ones(4), x()
    for copy in (lambda: batch.to("cuda"), lambda: target.copy_(batch)):
        with pytest.raises(CaptureError, match="pass the tensor as an argument"), NoHostWork(torch.device("cuda")):
            copy()


ALLOWED = {
    "numbers": lambda: (x() * 2 + 1.5).clamp_(max=1),
    "where": lambda: torch.where(mask(), 1.0, x()),
    "masks that keep sizes": lambda: x().masked_fill_(mask(), 0.0),
    "one value for a mask": lambda: torch.ops.aten.index_put_(x(), [mask()], x()[:1]),
    "an index": lambda: x()[x().long()],
    "noise on the device": lambda: torch.randn(4, device="cuda").sum(),
    "lists": lambda: torch._foreach_lerp_([x()], [x()], 0.1),
    "views": lambda: x().view(2, 2).t().contiguous(),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed(name):
    with NoHostWork(torch.device("cuda")):
        ALLOWED[name]()


@pytest.mark.parametrize("name", [name for name in WORLDS if not name.startswith("soft")])
def test_whole_steps_work_on_the_device_alone(name):
    """CASES 28: writing, drawing and setting priorities never touches the host."""
    world = WORLDS[name]("cuda")
    data = world.data(0)
    world.step(data)
    with NoHostWork(torch.device("cuda")):
        index, batch = world.step(data)
    assert index.device.type == batch.device.type == "cuda"


@pytest.mark.parametrize("name", [name for name in WORLDS if name.startswith("soft")])
@torch.no_grad()
def test_learning_works_on_the_device_alone(name):
    """Loss, optimiser and target update. (Autograd needs CUDA itself for tensors that claim to be there.)"""
    world = WORLDS[name]("cuda")
    assert world.loss is not None
    batch = world.buffer.sample()
    with NoHostWork(torch.device("cuda")):
        losses = world.loss(batch)
    for parameter in world.loss.parameters():
        parameter.grad = torch.empty_like(parameter)
    world.optimizer.step()
    with NoHostWork(torch.device("cuda")):
        world.optimizer.step()
        world.updater.step()
    assert losses["loss_qvalue"].device.type == "cuda"


@pytest.mark.parametrize("capturable", [True, False])
def test_adam_is_to_be_capturable(capturable):
    parameter = torch.nn.Parameter(x())
    parameter.grad = x()
    optimizer = torch.optim.Adam([parameter], capturable=capturable, foreach=False)
    optimizer.step()
    refused = contextlib.nullcontext() if capturable else pytest.raises(CaptureError, match="on the CPU")
    with refused, NoHostWork(torch.device("cuda")):
        optimizer.step()


@pytest.mark.parametrize("draw", [random.random, np.random.random, lambda: torch.empty(2).uniform_()])
def test_random_numbers_of_the_host(draw):
    # Not on fake tensors, which have no numbers.
    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        state = host_random_state()
        refuse_host_random(state)
        draw()
        with pytest.raises(CaptureError, match="draws from"):
            refuse_host_random(state)
