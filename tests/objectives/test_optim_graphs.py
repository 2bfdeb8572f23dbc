"""AdamW in captured graphs, and without waiting for the GPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import gpubuf
from gpubuf.optim import AdamW
from tests.support.fake_cuda import DataDependentOutputException, fake_cuda, no_blocking_copies
from tests.support.graph_recorder import RecordedCuda
from tests.support.optim_setup import network
from tests.support.sac_setup import make_loss


@pytest.mark.parametrize("clipped", [False, True])
def test_a_captured_step_sees_changes(backend, clipped, monkeypatch):
    """CASES 33: learning rates, betas, decays, tau and steps are not part of the graph. It does what eager calls do."""
    RecordedCuda().install(monkeypatch)
    worlds = []
    for captured in (False, True):
        net, target = network(), network(seed=1)
        lr = torch.tensor(1e-2)
        pairs = list(zip(target.parameters(), net.parameters(), strict=True))
        groups = [{"params": [net[0].weight], "lr": lr}, {"params": [*list(net.parameters())[1:]]}]
        optimizer = AdamW(
            groups,
            targets=pairs,
            tau=0.1,
            max_grad_norm=0.5 if clipped else None,
            unit_rows=[(net[3].weight, 1)],
        )

        def update(x, net=net, optimizer=optimizer):
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = gpubuf.capture(update, warmup=2) if captured else update
        generator, losses = torch.Generator().manual_seed(0), []
        for i in range(8):
            losses.append(step(torch.randn(8, 5, generator=generator)).clone())
            lr.mul_(0.9)
            optimizer.param_groups[1]["lr"] *= 0.8
            optimizer.param_groups[1]["betas"] = (0.9, 0.9 + 0.01 * i)
            optimizer.param_groups[0]["weight_decay"] = 0.1 * i
            optimizer.param_groups[0]["tau"] = optimizer.param_groups[1]["tau"] = 0.05 * i
            if clipped:
                optimizer.max_grad_norm = 0.5 + i
        assert not captured or step.captured
        steps = [float(optimizer.state[p]["step"]) for p in net.parameters()]
        assert steps == [8.0] * len(steps)
        worlds.append([*losses, *(p.detach().clone() for p in (*net.parameters(), *target.parameters()))])
    for eager, graph in zip(*worlds, strict=True):
        assert torch.equal(eager, graph)


def test_a_state_is_loaded_into_a_captured_step(monkeypatch):
    """In place; but a graph whose parameters were replaced is refused."""
    RecordedCuda().install(monkeypatch)
    net = network()
    optimizer = AdamW(net.parameters(), lr=1e-2)

    def update(x):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()

    step, x = gpubuf.capture(update, warmup=1), torch.ones(8, 5)
    step(x)
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    results = []
    for _ in range(2):
        net.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        for _ in range(3):
            step(x)
        results.append([p.detach().clone() for p in net.parameters()])
    assert step.captured
    assert all(map(torch.equal, *results))
    weight = net[0].weight.data
    net[0].weight.data = weight.clone()
    with pytest.raises(gpubuf.CaptureError, match="moved or replaced"):
        step(x)
    net[0].weight.data = weight
    step(x)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    optimizer.step()
    with pytest.raises(gpubuf.CaptureError):
        step(x)


def test_a_loaded_loss_keeps_the_tables():
    """It looks its tensors up again, and finds them where they were: a graph goes on."""
    loss = make_loss()
    params = [param for param in loss.parameters() if param.requires_grad]
    optimizer = AdamW(params, targets=loss, tau=0.1)
    optimizer.step()
    before = optimizer._buckets
    loss.load_state_dict(copy.deepcopy(loss.state_dict()))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.step()
    assert optimizer._buckets is before
    loss.to(torch.float32)
    optimizer.step()
    assert optimizer._buckets is not before


def test_the_tables_are_not_made_in_a_graph(monkeypatch):
    """A graph would read addresses from host memory that is gone."""
    RecordedCuda().install(monkeypatch)
    net, used = network(), []
    optimizer = AdamW(net.parameters())

    def update(x):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        if used:
            optimizer.step()

    step, x = gpubuf.capture(update, warmup=1), torch.ones(8, 5)
    step(x)
    used.append(True)
    with pytest.raises(gpubuf.CaptureError, match="first step"):
        step(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_host_sync(dtype):
    """The first step, others, a change of the learning rate, and clipping, on fake CUDA tensors."""
    with fake_cuda(), no_blocking_copies(), torch.device("cuda"):
        weight, bias, target = (torch.zeros(shape, dtype=dtype) for shape in ((4, 3), (4,), (4, 3)))
        lr = torch.ones(())
        groups = [{"params": [nn.Parameter(weight)], "lr": lr}, {"params": [nn.Parameter(bias)]}]
        optimizer = AdamW(groups, unit_rows=[(groups[0]["params"][0], 1)], targets=[(target, weight)], tau=0.1)
        for i in range(3):
            for group in groups:
                for param in group["params"]:
                    param.grad = torch.ones(param.shape, dtype=dtype)
            optimizer.param_groups[1]["lr"] = 0.1 * i
            optimizer.max_grad_norm = 1.0 if i else None
            optimizer.step(groups=[0] if i == 2 else None)
        with pytest.raises(DataDependentOutputException):
            lr.item()
        assert optimizer.grad_norm.device.type == "cuda"
