"""AdamW beside torch.optim.AdamW, SoftUpdate and a plain normalisation of rows.

AdamW in captured graphs, and without waiting for the GPU.
"""

from __future__ import annotations

import contextlib
import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional

import gpubuf
from gpubuf.objectives import SoftUpdate
from gpubuf.optim import AdamW
from tests.support.fake_cuda import DataDependentOutputException, fake_cuda, no_blocking_copies
from tests.support.graph_recorder import RecordedCuda
from tests.support.optim_setup import backward, network
from tests.support.sac_setup import make_loss


def random_gradients(net: nn.Module, generator: torch.Generator, *others: nn.Module) -> None:
    for params in zip(*(each.parameters() for each in (net, *others)), strict=True):
        grad = torch.randn(params[0].shape, generator=generator, dtype=torch.float64).to(params[0].dtype)
        for param in params:
            param.grad = grad.clone()


def largest_difference(a: nn.Module, b: nn.Module) -> float:
    return max(float((p - q).detach().abs().max()) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)], ids=str)
def test_a_thousand_steps_are_those_of_torch(dtype, tolerance, decay):
    ours, theirs = network(dtype), network(dtype)
    a = AdamW(ours.parameters(), lr=3e-3, betas=(0.8, 0.99), weight_decay=decay)
    b = torch.optim.AdamW(theirs.parameters(), lr=3e-3, betas=(0.8, 0.99), weight_decay=decay, foreach=True)
    generator = torch.Generator().manual_seed(1)
    for _ in range(1000):
        random_gradients(ours, generator, theirs)
        a.step()
        b.step()
    assert largest_difference(ours, theirs) <= tolerance
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        for name in ("exp_avg", "exp_avg_sq", "step"):
            torch.testing.assert_close(a.state[p][name], b.state[q][name].to(a.state[p][name].dtype))


@pytest.mark.parametrize("tau", [0.005, 0.75])
def test_targets_are_those_of_soft_update(backend, tau):
    """Of a loss: parameters, buffers and sources that another optimiser has."""
    ours, theirs = make_loss(), make_loss()
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    critics = [list(loss.qvalue_network_params.parameters()) for loss in (ours, theirs)]
    a = AdamW(critics[0], targets=ours, tau=tau)
    b = torch.optim.AdamW(critics[1])
    with pytest.warns(UserWarning, match="more than half") if tau > 0.5 else contextlib.nullcontext():
        updater = SoftUpdate(theirs, tau=tau)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for p, q in zip(*critics, strict=True):
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            q.grad = p.grad.clone()
        a.step()
        b.step()
        updater.step()
    for mine, other in zip(ours.target_pairs(), theirs.target_pairs(), strict=True):
        torch.testing.assert_close(mine[0], other[0], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(mine[1], other[1], rtol=1e-6, atol=1e-7)


def test_targets_of_any_pairs():
    """A target of a parameter, of a view of one, of a frozen tensor; two of one source; counters are copied."""
    net = network()
    weight, frozen, counter = net[0].weight, torch.randn(4), torch.tensor(7)
    sources = [weight, weight[:2], frozen, weight, counter]
    targets = [torch.zeros_like(source) for source in sources]
    optimizer = AdamW(net.parameters(), targets=zip(targets, sources, strict=True), tau=0.25)
    backward(net, 0)
    optimizer.step()
    for target, source in zip(targets[:4], sources, strict=False):
        torch.testing.assert_close(target, 0.25 * source.detach())
    assert targets[4] == 7
    net.zero_grad()
    optimizer.step(targets=False)
    torch.testing.assert_close(targets[2], 0.25 * frozen)
    optimizer.step()
    torch.testing.assert_close(targets[2], (0.25 + 0.75 * 0.25) * frozen)


class Unit(nn.Linear):
    unit_rows, in_dim, row_norm = True, -1, 3.0


def test_unit_rows():
    """Rows of the weights of marked modules, and of parameters that are given with a dimension."""
    net = nn.Sequential(Unit(5, 4), nn.Linear(4, 3))
    free = nn.Parameter(torch.randn(2, 6, 3))
    plain = copy.deepcopy(net), nn.Parameter(free.detach().clone())
    a = AdamW([*net.parameters(), free], unit_rows=[net, (free, -2)])
    b = torch.optim.AdamW([*plain[0].parameters(), plain[1]])
    for i in range(5):
        generator = torch.Generator().manual_seed(i)
        random_gradients(net, generator, plain[0])
        free.grad = torch.randn(free.shape, generator=generator)
        plain[1].grad = free.grad.clone()
        a.step()
        b.step()
        with torch.no_grad():
            plain[0][0].weight.copy_(3 * functional.normalize(plain[0][0].weight, dim=-1))
            plain[1].copy_(functional.normalize(plain[1], dim=-2))
    assert largest_difference(net, plain[0]) < 1e-6
    torch.testing.assert_close(free, plain[1])


def skip_a_gradient(net: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    if number % 2:
        net[0].weight.grad = None


def change_a_group(net: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.param_groups[-1]["eps"] = 1e-8 * (1 + number)


def halve(net: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] * 0.5


def expand(net: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Gradients of strides that no parameter has."""
    net[0].weight.grad = net[0].weight.grad[:, :1].expand_as(net[0].weight)


#: Options of both optimisers, those of torch's alone, and what happens between backward and step.
WAYS = {
    "Adam": ({"weight_decay": 0.0}, {}, None),
    "a tensor as learning rate": ({"lr": torch.tensor(1e-2)}, {"lr": 1e-2}, halve),
    "parameters without gradient": ({}, {}, skip_a_gradient),
    "gradients of any strides": ({}, {}, expand),
    "a change of a group": ({}, {}, change_a_group),
}


@pytest.mark.parametrize("way", WAYS)
def test_beside_torch(way):
    options, of_torch, between = WAYS[way]
    ours, theirs = network(), network()
    pair = [(ours, AdamW(ours.parameters(), **options))]
    pair.append((theirs, torch.optim.AdamW(theirs.parameters(), **{**options, **of_torch})))
    for number in range(6):
        for net, optimizer in pair:
            backward(net, number)
            if between is not None:
                between(net, optimizer, number)
            optimizer.step()
    assert largest_difference(ours, theirs) < 1e-6
    skipped = between is skip_a_gradient
    assert [float(pair[0][1].state[p]["step"]) for p in ours.parameters()] == [3 if skipped else 6, *[6] * 5]


def test_schedulers_and_groups():
    """Each group has its own values."""
    ours, theirs = network(), network()
    pair = []
    for net, kind in ((ours, AdamW), (theirs, torch.optim.AdamW)):
        groups = [
            {"params": net[0].parameters(), "lr": 1e-2},
            {"params": [*net[2].parameters(), *net[3].parameters()], "betas": (0.5, 0.9), "weight_decay": 0.3},
        ]
        optimizer = kind(groups, lr=1e-3)
        pair.append((net, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-2, 1e-3], total_steps=30)))
    for i in range(20):
        for net, optimizer, scheduler in pair:
            backward(net, i)
            optimizer.step()
            scheduler.step()
    assert largest_difference(ours, theirs) < 2e-6


def test_delayed_groups():
    """A policy that is updated at every second step: parameters, moments, steps and targets stay in between."""
    net, target = network(), network()
    pairs = list(zip(target.parameters(), net.parameters(), strict=True))
    groups = [{"params": net[0].parameters()}, {"params": [*net[2].parameters(), *net[3].parameters()]}]
    optimizer = AdamW(groups, targets=pairs, tau=0.5)
    backward(net, 0)
    before = copy.deepcopy(net[0]), copy.deepcopy(target[0])
    optimizer.step(groups=[1])
    assert largest_difference(net[0], before[0]) == largest_difference(target[0], before[1]) == 0
    assert [float(optimizer.state[p]["step"]) for p in net.parameters()] == [0, 0, 1, 1, 1, 1]
    optimizer.step(groups=[0, 1], targets=False)
    assert largest_difference(net[0], before[0]) > 0
    assert largest_difference(target[0], before[1]) == 0
    with pytest.raises(ValueError, match="2 parameter groups"):
        optimizer.step(groups=[2])


@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_clipping(max_norm):
    ours, theirs = network(), network()
    a, b = AdamW(ours.parameters(), max_grad_norm=max_norm), torch.optim.AdamW(theirs.parameters())
    for i in range(5):
        backward(ours, i)
        backward(theirs, i)
        untouched = ours[0].weight.grad.clone()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
        a.step()
        b.step()
        torch.testing.assert_close(a.grad_norm, norm)
        assert torch.equal(ours[0].weight.grad, untouched)
    assert largest_difference(ours, theirs) < 1e-5


# State


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_loaded_state_goes_on(dtype):
    """The same bits as without the interruption, also where the moments are wider than the parameters."""
    net = network(dtype)
    optimizer = AdamW(net.parameters(), lr=1e-2)
    for i in range(3):
        backward(net, i)
        optimizer.step()
    file = io.BytesIO()
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    resumed = network(dtype, seed=9)
    resumed.load_state_dict(saved["net"])
    other = AdamW(resumed.parameters(), lr=1.0)
    other.load_state_dict(saved["optimizer"])
    for i in range(3, 6):
        for each, its in ((net, optimizer), (resumed, other)):
            backward(each, i)
            its.step()
    assert largest_difference(net, resumed) == 0
    assert {moments["exp_avg"].dtype for moments in other.state.values()} == {torch.float32}


def test_states_of_torch_and_ours():
    """Each goes on with the state of the other."""
    nets = [network() for _ in range(2)]
    theirs, ours = torch.optim.AdamW(nets[0].parameters(), lr=1e-2), AdamW(nets[1].parameters(), lr=0.5)
    for i in range(6):
        if i == 2:
            nets[1].load_state_dict(nets[0].state_dict())
            ours.load_state_dict(theirs.state_dict())
        if i == 4:
            theirs = torch.optim.AdamW(nets[0].parameters())
            theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
        for net, optimizer in zip(nets, (theirs, ours), strict=True):
            backward(net, i)
            optimizer.step()
    assert largest_difference(*nets) < 1e-6
    assert set(ours.state_dict()["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    assert ours.param_groups[0]["tau"] == 0


def test_other_kinds_of_adam_are_refused():
    net = network()
    theirs = torch.optim.AdamW(net.parameters(), amsgrad=True)
    with pytest.raises(ValueError, match="amsgrad"):
        AdamW(net.parameters()).load_state_dict(theirs.state_dict())


def test_copies():
    """A copy has parameters, targets and a state of its own."""
    net, target = network(), network()
    pairs = list(zip(target.parameters(), net.parameters(), strict=True))
    optimizer = AdamW(net.parameters(), targets=pairs, tau=0.5, unit_rows=[(net[0].weight, 1)])
    backward(net, 0)
    optimizer.step()
    (other_net, other), before = copy.deepcopy((net, optimizer)), copy.deepcopy(net)
    backward(other_net, 1)
    other.step()
    assert largest_difference(net, before) == 0
    backward(net, 1)
    optimizer.step()
    assert largest_difference(net, other_net) == 0


def test_moved_parameters_are_found():
    """Parameters, targets or states that were replaced: nothing is written where they were."""
    net, target = network(), network()
    pairs = [(t.data, p) for t, p in zip(target.parameters(), net.parameters(), strict=True)]
    optimizer = AdamW(net.parameters(), targets=pairs, tau=0.5)
    backward(net, 0)
    optimizer.step()
    old = net[0].weight.data
    kept = old.clone()
    net[0].weight.data = old.clone()
    backward(net, 1)
    optimizer.step()
    assert torch.equal(old, kept)
    assert not torch.equal(net[0].weight, kept)
    assert float(optimizer.state[net[0].weight]["step"]) == 2
    optimizer.state.clear()
    optimizer.step()
    assert float(optimizer.state[net[0].weight]["step"]) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_that_was_transposed_in_its_memory_is_found(dtype):
    """At the address that it had, and of the shape that it had."""
    initial = torch.randn(3, 3, dtype=dtype)
    optimizers = []
    for _ in range(2):
        weight = nn.Parameter(initial.clone())
        optimizers.append((weight, AdamW([weight], lr=0.1)))
    for number in range(4):
        for i, (weight, optimizer) in enumerate(optimizers):
            if number == 2:
                weight.data = weight.data.t() if i else weight.data.t().contiguous()
            weight.grad = torch.full((3, 3), 0.5, dtype=dtype).triu(number - 2)
            optimizer.step()
    (one, _), (other, _) = optimizers
    assert torch.equal(one, other)


# Errors


def test_what_is_refused():
    net = network()
    given = {"lr": -1.0, "betas": (1.0, 0.5), "eps": -1e-8, "weight_decay": -0.1, "max_grad_norm": 0.0}
    for name, value in given.items():
        with pytest.raises(ValueError, match="beta1" if name == "betas" else name):
            AdamW(net.parameters(), **{name: value})
    with pytest.raises(ValueError, match="go together"):
        AdamW(net.parameters(), tau=0.1)
    with pytest.raises(ValueError, match="tau"):
        AdamW(net.parameters(), targets=[], tau=1.5)
    with pytest.raises(ValueError, match="no parameter of this optimiser"):
        AdamW(net.parameters(), unit_rows=[(torch.ones(3, 3), 1)])
    with pytest.raises(ValueError, match="no dimension 2"):
        AdamW(net.parameters(), unit_rows=[(net[0].weight, 2)])
    with pytest.raises(TypeError, match="float16"):
        AdamW(network(torch.float16).parameters())
    with pytest.raises(ValueError, match="like its source"):
        AdamW(net.parameters(), targets=[(torch.ones(4), net[0].weight)], tau=0.1).step()
    with pytest.raises(ValueError, match="dense"):
        AdamW([nn.Parameter(torch.ones(4, 4)[:, :2])])
    weight = nn.Parameter(torch.ones(3, 2))
    weight.grad = torch.ones(3, 2).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        AdamW([weight]).step()
    weight.grad = torch.ones(3, 2)
    weight.data = torch.ones(2, 2)
    with pytest.raises(ValueError, match="like its parameter"):
        AdamW([weight]).step()


def test_autograd_sees_the_step():
    """A graph that saved a weight can't be gone through once the weight has changed."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = AdamW([weight])
    loss = weight.square().sum()
    weight.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_closure():
    net = network()
    optimizer = AdamW(net.parameters())

    def closure() -> float:
        backward(net, 0)
        return 3.5

    assert optimizer.step(closure) == 3.5
    assert float(optimizer.state[net[0].weight]["step"]) == 1


# torch 2.11 warns.
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_hooks_and_profilers():
    """They see steps as they see those of torch's optimisers."""
    net, seen = network(), []
    optimizer = AdamW(net.parameters())
    backward(net, 0)
    handles = [
        optimizer.register_step_pre_hook(lambda *_: seen.append("before")),
        optimizer.register_step_post_hook(lambda *_: seen.append("after")),
    ]
    optimizer.step()
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert seen == ["before", "after"]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    assert "Optimizer.step#AdamW.step" in {event.key for event in profile.key_averages()}
    assert float(optimizer.state[net[0].weight]["step"]) == 3


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
