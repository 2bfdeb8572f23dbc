"""Linear layers with ReLU between them as one operation: see gpubuf.modules.linear."""

import itertools

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from gpubuf.modules import MLP, EnsembleMLP, linear
from gpubuf.objectives import TD3Loss

F64 = torch.float64


def parts(nets: int | None, bias: bool = True, out: int = 2):
    """(inputs, weights, biases) of three layers."""
    torch.manual_seed(0)
    lead = () if nets is None else (nets,)
    widths = (5, 4, 3, out)
    weights = [torch.randn(*lead, a, b, dtype=F64) for a, b in itertools.pairwise(widths)]
    shift = (lambda b: (b,)) if nets is None else (lambda b: (nets, 1, b))
    biases = [torch.randn(shift(b), dtype=F64) if bias or b == out else None for b in widths[1:]]
    inputs = [torch.randn(6, 3, dtype=F64), torch.randn(6, 2, dtype=F64)]
    return inputs, weights, biases


@pytest.fixture(params=["at once", "in groups"])
def grouped(request, monkeypatch):
    """All nets at once, or two at a time: the last group is smaller."""
    if request.param == "in groups":
        monkeypatch.setattr(linear, "GROUP_BYTES", 2 * 6 * 4 * 8)


@pytest.mark.usefixtures("grouped")
@pytest.mark.parametrize(
    ("nets", "bias", "out"), [(None, True, 1), (None, False, 2), (1, True, 2), (3, True, 1), (3, False, 2)]
)
def test_gradients(nets, bias, out):
    inputs, weights, biases = parts(nets, bias, out)
    learn = [t.requires_grad_() for t in (*inputs, *weights, *biases) if t is not None]

    def run(*_):
        return linear.perceptron(inputs, weights, biases)

    torch.testing.assert_close(run(), linear.by_layer(inputs, weights, biases))
    assert torch.autograd.gradcheck(run, learn)
    assert torch.autograd.gradgradcheck(run, learn)


@pytest.mark.usefixtures("grouped")
@pytest.mark.parametrize("wanted", ["action", "weights", "last bias", "first weight"])
def test_only_what_is_needed(wanted):
    """Each gradient alone is the same as with all others, and a second backward gives the same bits."""
    inputs, weights, biases = parts(3)
    learn = {"action": [inputs[1]], "weights": weights, "last bias": biases[-1:], "first weight": weights[:1]}[wanted]
    for tensor in learn:
        tensor.requires_grad_()
    out = linear.perceptron(inputs, weights, biases)
    slope = torch.randn_like(out)
    found = torch.autograd.grad(out, learn, slope, retain_graph=True)
    assert all(map(torch.equal, found, torch.autograd.grad(out, learn, slope)))
    expected = torch.autograd.grad(linear.by_layer(inputs, weights, biases), learn, slope)
    torch.testing.assert_close(found, expected)


@pytest.mark.usefixtures("grouped")
def test_leading_nets():
    """Values of all nets, and gradients through the first one."""
    inputs, weights, biases = parts(3)
    inputs[1].requires_grad_()
    out, expected = (
        linear.perceptron(inputs, weights, biases, 1),
        linear.perceptron(inputs, weights, biases),
    )
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(
        torch.autograd.grad(out[0].sum(), inputs[1]), torch.autograd.grad(expected[0].sum(), inputs[1])
    )


@pytest.mark.parametrize(
    "make", [lambda: MLP(5, 2, (4, 3), dtype=F64), lambda: EnsembleMLP(3, 5, 2, (4, 3), dtype=F64)]
)
def test_networks_take_it(make, monkeypatch):
    """Large batches do, in eager mode without hooks; all ways agree, in any batch shape."""
    net, x = make(), torch.randn(2, 6, 5, dtype=F64)
    expected = net(x)
    monkeypatch.setattr(linear.is_perceptron, "__defaults__", (0,))
    out = net(x)
    assert out.shape == expected.shape
    assert "Perceptron" in str(torch.autograd.graph.get_gradient_edge(out).node.next_functions[0][0].name())
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(torch.compile(net, backend="aot_eager", fullgraph=True)(x), expected)
    torch.testing.assert_close(torch.vmap(net)(x[None].transpose(0, 1))[1].squeeze(-3), expected.select(-3, 1))
    with torch.no_grad():
        torch.testing.assert_close(net(x), expected)
    seen = []
    activation = next(part for part in net.modules() if type(part) is nn.ReLU)
    activation.register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(net(x), expected)
    assert seen


def test_twin_critics_of_td3():
    """The actor's gradient comes from the first critic, whether or not all layers are one operation."""
    torch.manual_seed(0)
    actor = TensorDictModule(MLP(3, 2, (8,)), ["observation"], ["action"])
    critics = TensorDictModule(EnsembleMLP(2, 5, 1, (8, 8)), ["observation", "action"], ["state_action_value"])
    loss = TD3Loss(actor, critics, bounds=(-1.0, 1.0))
    batch = {"observation": torch.randn(6, 3)}
    action = actor.module(batch["observation"])
    first = loss._critics.detached_first

    data = TensorDict({**batch, "action": action}, [6])
    fast, slow = first(data, "state_action_value"), loss._critics.detached(data, "state_action_value")
    torch.testing.assert_close(fast, slow)
    ours, theirs = (torch.autograd.grad(q[0].mean(), action, retain_graph=True) for q in (fast, slow))
    torch.testing.assert_close(ours, theirs)
