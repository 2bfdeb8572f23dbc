"""On a CPU: ensembles net by net where a batch is large, and products by oneDNN. See gpubuf.modules.linear."""

import copy

import pytest
import torch
from torch import nn

from gpubuf.modules import MLP, EnsembleMLP, linear, mlp

F64 = torch.float64


def results(net, *inputs):
    """Values, and gradients of inputs and parameters."""
    out = net(*inputs)
    learn = [tensor for tensor in (*inputs, *net.parameters()) if tensor.requires_grad]
    return out, *torch.autograd.grad((out * torch.linspace(1, 2, out.numel(), dtype=F64).view_as(out)).sum(), learn)


@pytest.fixture
def seen(monkeypatch):
    """Every batch is large enough; the calls."""
    monkeypatch.setattr(linear.runs_net_by_net, "__defaults__", (0,))
    calls, run = [], mlp.net_by_net
    monkeypatch.setattr(mlp, "net_by_net", lambda *arguments: calls.append(1) or run(*arguments))
    return calls


@pytest.mark.parametrize("batch", [(6,), (2, 6), ()])
@pytest.mark.parametrize(("bias", "out"), [(True, 1), (False, 2)])
def test_it_gives_what_the_batched_products_give(batch, bias, out, request):
    torch.manual_seed(0)
    net = EnsembleMLP(3, 5, out, (4, 3), bias=bias, dtype=F64)
    inputs = torch.randn(*batch, 3, dtype=F64), torch.randn(*batch, 2, dtype=F64, requires_grad=True)
    expected = results(net, *inputs)
    calls = request.getfixturevalue("seen")
    torch.testing.assert_close(results(net, *inputs), expected)
    with torch.no_grad():
        torch.testing.assert_close(net(*inputs), expected[0])
    assert len(calls) == 2


def test_in_transformed_code_and_with_hooks(request):
    net, x = EnsembleMLP(3, 5, 2, (4, 3), dtype=F64), torch.randn(2, 6, 5, dtype=F64)
    expected = net(x)
    calls = request.getfixturevalue("seen")
    torch.testing.assert_close(torch.vmap(net)(x[None].transpose(0, 1))[1].squeeze(-3), expected.select(-3, 1))
    calls.clear()
    torch.testing.assert_close(torch.compile(net, backend="aot_eager", fullgraph=True)(x), expected)
    heard = []
    activation = next(part for part in net.modules() if type(part) is nn.ReLU)
    activation.register_forward_hook(lambda *_: heard.append(1))
    torch.testing.assert_close(net(x), expected)
    assert heard
    other = EnsembleMLP(3, 5, 2, (4, 3), dtype=F64)
    of_all = nn.modules.module.register_module_forward_hook(lambda module, *_: heard.append(type(module)))
    other(x)
    of_all.remove()
    assert nn.ReLU in heard
    assert not calls


@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize(
    "network",
    [
        lambda: MLP(5, 3, (16, 8)),
        lambda: MLP(5, 3, (16, 8), nn.SiLU, norm="layer"),
        lambda: EnsembleMLP(3, 5, 2, (16, 8)),
    ],
    ids=["ReLU", "layer norm", "ensemble"],
)
def test_products_of_either_library(monkeypatch, network, onednn):
    """float64's values and gradients to a rounding, the same bits again, and gradients of gradients."""
    fast = torch.ops.mkldnn._linear_pointwise.default
    calls = []
    monkeypatch.setattr(linear, "ONEDNN_WORK", 2)
    monkeypatch.setattr(linear, "_onednn", lambda: (lambda *args: calls.append(0) or fast(*args)) if onednn else None)
    torch.manual_seed(0)
    net, x = network(), torch.randn(6, 5, requires_grad=True)
    wide = copy.deepcopy(net).double()

    def gradients(net, x):
        out = net(x)
        slope = torch.linspace(0.5, 2, out.numel(), dtype=out.dtype).reshape(out.shape)
        return [out, *torch.autograd.grad(out, [x, *net.parameters()], slope)]

    found, again, true = gradients(net, x), gradients(net, x), gradients(wide, x.double())
    assert bool(calls) == onednn
    assert all(map(torch.equal, found, again))
    torch.testing.assert_close([each.double() for each in found], true, rtol=1e-5, atol=1e-5)
    (slope,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(slope.square().sum(), x)
    y = x.detach().double().requires_grad_()
    (slope,) = torch.autograd.grad(wide(y).square().sum(), y, create_graph=True)
    (expected,) = torch.autograd.grad(slope.square().sum(), y)
    torch.testing.assert_close(second.double(), expected, rtol=1e-4, atol=1e-4)
