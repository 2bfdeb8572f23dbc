"""Normalised networks: every norm against its formula, every net of an ensemble against the same net alone.

The builders of FastSAC's and FlashSAC's networks, and these networks as the parts of a loss.
"""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType, TensorDictModule, set_interaction_type
from torch import nn
from torch.nn import functional

from gpubuf.kernels.norms import MAX_WIDTH
from gpubuf.modules import (
    MLP,
    BatchNorm,
    EnsembleLinear,
    EnsembleMLP,
    LayerNorm,
    ResidualBlock,
    RMSNorm,
    SquashedGaussianParameters,
    TanhNormal,
    UnitLinear,
    make_fastsac_actor,
    make_fastsac_critic,
    make_flashsac_actor,
    make_flashsac_critic,
    make_sac_actor,
    normalize_weights,
    set_statistics,
    unit_weights,
)
from gpubuf.modules.linear import Linear
from gpubuf.objectives import SACLoss, SoftUpdate
from gpubuf.optim import AdamW
from tests.support.dispatched import Dispatched
from tests.support.sac_setup import total

DOUBLE = {"dtype": torch.float64}


def draw(*shape, seed=0, **kwargs):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **{**DOUBLE, **kwargs})


def scattered(module):
    """``module`` with parameters and running statistics that are all different."""
    with torch.no_grad():
        for i, tensor in enumerate(itertools.chain(module.parameters(), module.buffers())):
            if tensor.is_floating_point():
                tensor.copy_(0.5 + draw(tensor.shape, seed=i).abs())
    return module


OPTIONS = {
    "plain": {},
    "layer": {"norm": "layer", "activation": nn.SiLU},
    "layer before": {"norm": "layer", "norm_place": "before"},
    "layer tanh": {"norm": "layer", "activation": nn.Tanh, "norm_kwargs": {"eps": 1e-2}},
    "rms": {"norm": "rms", "head_norm": "layer", "bias": False},
    "batch": {"norm": "batch", "norm_kwargs": {"momentum": 0.3}, "activation": nn.SiLU},
    "crossq": {"norm": "batch_renorm", "norm_place": "before", "norm_kwargs": {"renorm_warmup": 0}},
    "flashsac": {
        "norm": "batch",
        "input_norm": "batch",
        "head_norm": "rms",
        "num_blocks": 2,
        "expansion": 2,
        "bias": False,
        "unit_rows": True,
    },
    "blocks before": {"norm": "layer", "norm_place": "before", "num_blocks": 1, "expansion": 3},
    "blocks bare": {"num_blocks": 1, "expansion": 1, "input_norm": "layer"},
}


def net_of(ensemble, k, **options):
    """Net ``k`` of an ensemble as an MLP of its own."""
    (first, *_), last = ensemble.layers, ensemble.layers[-1]
    width = first.in_features if isinstance(first, EnsembleLinear) else first.features
    net = MLP(width, last.out_features, CELLS, **options, **DOUBLE)
    state = {}
    for name, tensor in ensemble.state_dict().items():
        own = tensor if tensor.ndim == 0 else tensor[k]
        kept = net.state_dict()[name.removeprefix("layers.")]
        state[name.removeprefix("layers.")] = own.T if kept.ndim == 2 else own.reshape(kept.shape)
    net.load_state_dict(state)
    return net


CELLS = (7, 4)


@pytest.mark.parametrize(
    ("training", "batch", "out"), [(True, (6,), 2), (False, (2, 3), 1), (False, (), 3)], ids=["training", "one", "none"]
)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_net_of_an_ensemble_is_a_net(name, batch, out, training):
    """Outputs, gradients and running statistics."""
    options = OPTIONS[name]
    ensemble = scattered(EnsembleMLP(3, 5, out, CELLS, **options, **DOUBLE)).train(training)
    nets = [net_of(ensemble, k, **options).train(training) for k in range(3)]
    x = draw(*batch, 5).requires_grad_()
    y, each = ensemble(x), [net(x) for net in nets]
    assert y.shape == (3, *batch, out)
    torch.testing.assert_close(y, torch.stack(each))
    weight = draw(*y.shape, seed=9)
    ours = torch.autograd.grad((y * weight).sum(), [x, *ensemble.parameters()])
    theirs = [
        torch.autograd.grad((one * w).sum(), [x, *net.parameters()])
        for one, w, net in zip(each, weight, nets, strict=True)
    ]
    torch.testing.assert_close(ours[0], sum(grads[0] for grads in theirs))
    for i, gradient in enumerate(ours[1:], 1):
        for k in range(3):
            one = theirs[k][i]
            torch.testing.assert_close(gradient[k], one.T if one.ndim == 2 else one.reshape(gradient[k].shape))
    for (key, buffer), *others in zip(ensemble.named_buffers(), *(net.named_buffers() for net in nets), strict=True):
        for k, (_, own) in enumerate(others):
            torch.testing.assert_close(buffer if buffer.ndim == 0 else buffer[k].reshape(own.shape), own, msg=key)


def test_inputs_of_their_own():
    """Without a shared input every net normalises its own rows."""
    options = OPTIONS["flashsac"]
    ensemble = scattered(EnsembleMLP(3, 5, 2, CELLS, shared_input=False, **options, **DOUBLE))
    nets = [net_of(ensemble, k, **options) for k in range(3)]
    for batch in ((6,), (2, 3)):
        x = draw(3, *batch, 5)
        torch.testing.assert_close(ensemble(x), torch.stack([net(one) for net, one in zip(nets, x, strict=True)]))
    with pytest.raises(ValueError, match=r"\[3, \*batch, in_features\], got \[2, 5\]"):
        ensemble(draw(2, 5))


@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_row_norms(kind, bias, activation):
    """Against the formula written out."""
    norm = scattered(kind(5, 3, bias=bias, activation=activation, eps=1e-2, **DOUBLE))
    x = draw(3, 4, 5)
    centred = x - x.mean(-1, keepdim=True) if kind is LayerNorm else x
    truth = centred / (centred.square().mean(-1, keepdim=True) + 1e-2).sqrt() * norm.weight
    if bias:
        truth = truth + norm.bias
    act = {None: nn.Identity(), "relu": functional.relu, "silu": functional.silu}[activation]
    torch.testing.assert_close(norm(x), act(truth))
    assert torch.autograd.gradcheck(norm, x.requires_grad_())


def test_batch_norm_is_that_of_torch():
    """Values, gradients and running statistics, in training and in evaluation."""
    ours, theirs = BatchNorm(4, momentum=0.2, **DOUBLE), nn.BatchNorm1d(4, momentum=0.2, **DOUBLE)
    with torch.no_grad():
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            one.copy_(draw(4, seed=3))
            other.copy_(one)
    for step in range(3):
        x = draw(6, 4, seed=step) * 3 + 1
        a, b = ours(x), theirs(x)
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(
            torch.autograd.grad(a.square().sum(), list(ours.parameters())),
            torch.autograd.grad(b.square().sum(), list(theirs.parameters())),
        )
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))
    assert torch.autograd.gradcheck(ours.train(), draw(3, 2, 4).requires_grad_())


def test_batch_renorm():
    """Against its formula, for statistics within the bounds and beyond; nothing but batch norm while it warms up."""
    norm = BatchNorm(3, renorm_warmup=2, momentum=0.5, eps=1e-3, **DOUBLE)
    plain = BatchNorm(3, momentum=0.5, eps=1e-3, **DOUBLE)
    for step in range(2):
        x = draw(8, 3, seed=step)
        torch.testing.assert_close(norm(x), plain(x))
    mean, var = norm.running_mean.clone(), norm.running_var.clone()
    # The second feature is beyond r_max, the third beyond d_max.
    x = (draw(8, 3, seed=5) * torch.tensor([1.0, 50, 1]) + torch.tensor([0.1, 0, 90])).requires_grad_()
    sigma, running = (x.var(0, correction=0) + 1e-3).sqrt(), (var + 1e-3).sqrt()
    r = (sigma / running).clamp(1 / 3, 3).detach()
    d = ((x.mean(0) - mean) / running).clamp(-5, 5).detach()
    truth = (x - x.mean(0)) / sigma * r + d
    y = norm(x)
    assert (r[1], d[2]) == (3, 5)
    torch.testing.assert_close(y, truth)
    weight = draw(8, 3, seed=6)
    torch.testing.assert_close(*(torch.autograd.grad((out * weight).sum(), x)[0] for out in (y, truth)))
    assert norm.num_batches == 3
    norm.reset_parameters()
    assert norm.num_batches == 0
    assert torch.equal(norm.running_var, torch.ones(3, **DOUBLE))


@pytest.mark.parametrize(
    ("statistics", "training", "grad", "batch", "moves"),
    [
        ("update", True, True, True, True),
        ("update", True, False, False, False),
        ("update", False, True, False, False),
        ("batch", True, True, True, False),
        ("batch", True, False, True, False),
        ("batch", False, True, False, False),
        ("running", True, True, False, False),
    ],
)
def test_whose_statistics(statistics, training, grad, batch, moves):
    net = MLP(3, 2, (4,), norm="batch", **DOUBLE).train(training)
    set_statistics(net, statistics)
    x = draw(6, 3) * 5 + 3
    before = {key: value.clone() for key, value in net.state_dict().items()}
    with torch.set_grad_enabled(grad):
        y = net(x)
    hidden = functional.linear(x, net[0].weight, net[0].bias)
    mean, var = (hidden.mean(0), hidden.var(0, correction=0)) if batch else (0.0, torch.ones(4, **DOUBLE))
    truth = net[-1](torch.relu((hidden - mean) / (var + 1e-5).sqrt()))
    torch.testing.assert_close(y, truth)
    assert torch.equal(net[1].running_mean, before["1.running_mean"]) is not moves


def test_statistics_of_one_row_are_refused():
    net = MLP(3, 2, (4,), norm="batch")
    with pytest.raises(ValueError, match=r"at least two rows, got an input of shape \[1, 4\]"):
        net(torch.zeros(1, 3))
    with torch.no_grad():
        assert net(torch.zeros(3)).shape == (2,)


@pytest.mark.parametrize(
    "options",
    [
        {"norm": "group"},
        {"input_norm": "group"},
        {"head_norm": "group"},
        {"norm_place": "inside"},
        {"dropout": 1.0},
        {"num_blocks": -1},
        {"num_blocks": 1, "num_cells": ()},
        {"norm": "batch", "norm_kwargs": {"momentum": 0.0}},
    ],
    ids=str,
)
def test_options_are_checked(options):
    for make in (lambda **kwargs: MLP(3, 2, **kwargs), lambda **kwargs: EnsembleMLP(2, 3, 2, **kwargs)):
        with pytest.raises(ValueError, match=r"must|num_cells"):
            make(**options)
    with pytest.raises(ValueError, match="activation"):
        LayerNorm(3, activation="gelu")


def test_a_norm_has_the_activation_that_its_attribute_says():
    """Also if it is set later: a GPU's fused update goes by it."""
    norm, x = LayerNorm(3, activation="relu"), torch.randn(4, 3)
    norm.activation = "silu"
    torch.testing.assert_close(norm(x), LayerNorm(3, activation="silu")(x), rtol=0, atol=0)


def test_the_order_of_layers():
    def kinds(**options):
        return [type(part).__name__ for part in MLP(3, 2, (4, 5), **options)]

    assert kinds(activation=nn.Tanh) == ["Linear", "Tanh", "Linear", "Tanh", "Linear"]
    assert [type(part) for part in MLP(3, 2, ())] == [Linear]
    assert kinds(norm="layer") == ["Linear", "LayerNorm", "Linear", "LayerNorm", "Linear"]
    assert kinds(norm="rms", activation=nn.Tanh, dropout=0.1)[:4] == ["Linear", "Dropout", "RMSNorm", "Tanh"]
    assert kinds(norm="batch", norm_place="before") == [
        "BatchNorm", "Linear", "ReLU", "BatchNorm", "Linear", "ReLU", "BatchNorm", "Linear",
    ]  # fmt: skip
    assert kinds(norm="batch", norm_place="before", input_norm="layer", head_norm="rms")[::7] == ["LayerNorm", "Linear"]
    assert kinds(norm="layer", num_blocks=2, head_norm="rms") == [
        "Linear", "LayerNorm", "Linear", "ResidualBlock", "ResidualBlock", "RMSNorm", "Linear",
    ]  # fmt: skip
    flash = MLP(3, 2, (4,), **OPTIONS["flashsac"])
    assert [type(part).__name__ for part in flash] == [
        "BatchNorm", "UnitLinear", "ResidualBlock", "ResidualBlock", "RMSNorm", "UnitLinear",
    ]  # fmt: skip
    block = flash[2]
    assert isinstance(block, ResidualBlock)
    assert [type(part).__name__ for part in block.layers] == ["UnitLinear", "BatchNorm"] * 2
    assert [part.activation for part in block.layers[1::2]] == ["relu", "relu"]
    assert (block.layers[0].out_features, block.layers[0].bias, flash[-1].bias.tolist()) == (8, None, [0, 0])


@pytest.mark.parametrize("nets", [None, 3])
def test_rows_stay_of_unit_length(nets):
    options = OPTIONS["flashsac"]
    net = MLP(5, 2, (4,), **options) if nets is None else EnsembleMLP(nets, 5, 1, (4,), **options)
    linear = [part for part in net.modules() if isinstance(part, UnitLinear | EnsembleLinear)]
    norms = [part for part in net.modules() if isinstance(part, BatchNorm | RMSNorm)]

    def check():
        for part in linear:
            lengths = part.weight.norm(dim=-1 if nets is None else 1)
            torch.testing.assert_close(lengths, torch.ones_like(lengths))
        for part in norms:
            lengths = part.weight.norm(dim=-1)
            torch.testing.assert_close(lengths, torch.full_like(lengths, math.sqrt(part.features)))

    check()
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    for step in range(3):
        net(draw(6, 5, seed=step, dtype=torch.float32)).square().sum().backward()
        optimizer.step()
        before = [part.weight.detach().clone() for part in (*linear, *norms)]
        net.normalize_weights()
        check()
        for part, weight in zip((*linear, *norms), before, strict=True):
            ratio = part.weight / weight
            torch.testing.assert_close(ratio, ratio.amax(part.in_dim, keepdim=True).expand_as(ratio))
        assert all(p.grad_fn is None for p in net.parameters())
    found = {unit.path: (unit.dim, unit.norm) for unit in unit_weights(net)}
    assert len(found) == len(linear) + len(norms)
    parameters = dict(net.named_parameters())
    for path, (dim, norm) in found.items():
        lengths = parameters[".".join(path)].norm(dim=dim)
        torch.testing.assert_close(lengths, torch.full_like(lengths, norm))


def test_rows_of_zeros_stay():
    layer = UnitLinear(3, 2)
    with torch.no_grad():
        layer.weight[0] = 0
    normalize_weights(layer)
    assert torch.equal(layer.weight[0], torch.zeros(3))
    assert not unit_weights(EnsembleMLP(2, 3, 1, norm="layer"))


def test_dropout():
    """Nets differ in what they drop, and nothing is dropped in evaluation."""
    ensemble = EnsembleMLP(2, 3, 1, (64,), norm="layer", dropout=0.5)
    with torch.no_grad():
        for parameter in ensemble.parameters():
            parameter[1] = parameter[0]
    x = torch.randn(4, 3)
    one, other = ensemble(x)
    assert not torch.equal(one, other)
    one, other = ensemble.eval()(x)
    assert torch.equal(one, other)
    assert torch.equal(one, copy.deepcopy(ensemble)(x)[0])


@pytest.mark.parametrize("name", ["layer", "rms", "batch", "flashsac"])
def test_autocast(name):
    """Norms compute in the precision of their parameters; what they return is as precise as what they got."""
    torch.manual_seed(0)
    ensemble = EnsembleMLP(2, 5, 3, CELLS, **{**OPTIONS[name], "norm_kwargs": {}})
    x = draw(16, 5, dtype=torch.float32)
    truth = ensemble(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = ensemble(x)
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y.float(), truth, rtol=0.1, atol=0.1)
    y.sum().backward()
    assert all(p.grad.dtype is torch.float32 for p in ensemble.parameters())
    assert all(b.dtype is torch.float32 for b in ensemble.buffers())


def test_compiled():
    """In one graph, with the running statistics."""
    ensemble = EnsembleMLP(2, 5, 3, CELLS, **OPTIONS["flashsac"], **DOUBLE)
    other = copy.deepcopy(ensemble)
    x = draw(6, 5)
    torch.testing.assert_close(torch.compile(ensemble, fullgraph=True, backend="aot_eager")(x), other(x))
    for one, two in zip(ensemble.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(one, two)


def check_vmap(single, norm, x, y, weight, grads):
    """The nets of ``norm`` through ``torch.vmap`` of a norm without nets, which takes PyTorch's operations."""

    def one(x, weight, bias):
        return torch.func.functional_call(single, {"weight": weight, "bias": bias}, (x,))

    mapped = torch.vmap(one)(x, norm.weight[:, 0], norm.bias[:, 0])
    torch.testing.assert_close(mapped, y)
    torch.testing.assert_close(torch.autograd.grad(mapped, [x, *norm.parameters()], weight), grads)


@pytest.mark.parametrize("statistics", ["batch", "running"])
def test_batch_norms_are_few_operations(backend, statistics):
    """Moments, forward and backward, on both backends; running statistics may move before the backward."""
    norm = BatchNorm(5, 3, activation="silu")
    set_statistics(norm, statistics)
    x = draw(3, 4, 5, dtype=torch.float32).requires_grad_()
    weight = torch.ones(3, 4, 5)
    with Dispatched() as noted:
        y = norm(x)
        with torch.no_grad():
            norm.running_mean.add_(1)
            norm.running_var.add_(1)
        grads = torch.autograd.grad(y, [x, *norm.parameters()], weight)
    assert len(noted.calls) - 2 == (3 if statistics == "batch" else 4)
    norm.running_mean.sub_(1)
    norm.running_var.sub_(1)
    single = BatchNorm(5, activation="silu")
    set_statistics(single, statistics)
    check_vmap(single, norm, x, y, weight, grads)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_row_norms_are_one_operation(backend, activation):
    """Forward and backward, on both backends; vmap and rows that are too wide take PyTorch's operations."""
    norm = scattered(LayerNorm(5, 3, activation=activation))
    x = draw(3, 4, 5, dtype=torch.float32).requires_grad_()
    weight = draw(3, 4, 5, dtype=torch.float32, seed=1)
    with Dispatched() as noted:
        y = norm(x)
        grads = torch.autograd.grad(y, [x, *norm.parameters()], weight)
    assert len(noted.calls) == 2
    single = LayerNorm(5, activation=activation)
    check_vmap(single, norm, x, y, weight, grads)
    wide = LayerNorm(MAX_WIDTH + 1)
    assert wide(draw(2, MAX_WIDTH + 1, dtype=torch.float32)).shape == (2, MAX_WIDTH + 1)


def test_scale_and_shift_have_one_length():
    """FlashSAC's rule: their squares together add up to d, after normalize_weights and after a step of AdamW."""
    for norm in (BatchNorm(4, unit_rows=True), BatchNorm(4, 2, unit_rows=True), LayerNorm(4, unit_rows=True)):
        with torch.no_grad():
            norm.weight.copy_(draw(*norm.weight.shape) + 2)
            weight, bias = norm.scale.clone(), norm.shift.clone()
        due = 2 / (weight.square().sum(-1, keepdim=True) + bias.square().sum(-1, keepdim=True)).sqrt()
        other = copy.deepcopy(norm)
        normalize_weights(norm)
        other.weight.grad = torch.zeros_like(other.weight)
        AdamW(other.parameters(), lr=0.0, weight_decay=0.0, unit_rows=other).step()
        for each in (norm, other):
            torch.testing.assert_close(each.scale, weight * due)
            torch.testing.assert_close(each.shift, bias * due)
    assert unit_weights(norm)[0].norm == 2.0


SMALL = {"fastsac": {"num_cells": (8, 6)}, "flashsac": {"width": 6, "num_blocks": 1, "expansion": 2}}
ACTORS = {"fastsac": make_fastsac_actor, "flashsac": make_flashsac_actor}
CRITICS = {"fastsac": make_fastsac_critic, "flashsac": make_flashsac_critic}


def batch(*shape, privileged=0):
    generator = torch.Generator().manual_seed(0)
    flags = torch.zeros(*shape, 1, dtype=torch.bool)

    def state():
        extra = {"state": torch.randn(*shape, privileged, generator=generator)} if privileged else {}
        return {"observation": torch.randn(*shape, 5, generator=generator), **extra}

    following = {**state(), "reward": torch.randn(*shape, 1, generator=generator), "done": flags, "terminated": flags}
    action = torch.rand(*shape, 3, generator=generator) * 2 - 1
    return TensorDict({**state(), "action": action, "next": following}, shape)


def running(loss):
    return {name: value.clone() for name, value in loss.state_dict().items() if "running" in name}


@pytest.mark.parametrize("name", SMALL)
def test_actors(name):
    actor = ACTORS[name](5, 3, low=[-1.0, -2, 0], high=2.0, return_log_prob=True, **SMALL[name])
    data = batch(6).select("observation")
    dist = actor.get_dist(data)
    assert isinstance(dist, TanhNormal)
    assert (dist.rsample().shape, dist.scale.shape) == ((6, 3), (6, 3))
    with torch.no_grad():
        out = actor(data)
        assert (out["action"].shape, out["action_log_prob"].shape) == ((6, 3), (6,))
        assert actor(batch().select("observation"))["action"].shape == (3,)  # one observation
        with set_interaction_type(InteractionType.DETERMINISTIC):
            torch.testing.assert_close(actor(data)["action"], actor.get_dist(data).deterministic_sample)


def test_the_standard_deviation_stays_in_its_range():
    split = SquashedGaussianParameters(-5.0, 1.0)
    loc, scale = split(torch.tensor([[7.0, 8.0, -9.0, 1.0, 0.0, -100.0, 100.0, math.atanh(0.5)]]))
    assert loc.tolist() == [[7, 8, -9, 1]]
    torch.testing.assert_close(scale.log(), torch.tensor([[-2.0, -5.0, 1.0, -0.5]]))
    with pytest.raises(ValueError, match="log_std_min"):
        SquashedGaussianParameters(1.0, 1.0)
    with pytest.raises(ValueError, match="log_std_min"):
        make_flashsac_actor(5, 3, 8, log_std_min=3)


@pytest.mark.parametrize("shape", [(6,), (2, 3)], ids=str)
@pytest.mark.parametrize("name", SMALL)
def test_critics(name, shape):
    """Logits of N nets, of keys that the actor need not know."""
    critic = CRITICS[name](9, 3, num_atoms=11, num_nets=3, in_keys=("observation", "state", "action"), **SMALL[name])
    data = batch(*shape, privileged=4)
    assert isinstance(critic, TensorDictModule)
    assert critic(data.clone().auto_batch_size_(0))["state_action_value"].shape == (3, *shape, 11)
    inputs = (data["observation"], data["state"], data["action"])
    torch.testing.assert_close(
        critic.eval().module(*inputs), critic.module(torch.cat(inputs, -1)), rtol=1e-5, atol=1e-6
    )


def test_sizes_of_the_programs():
    fast, flash = make_fastsac_critic(48, 12).module, make_flashsac_critic(48, 12).module
    widths = [part.weight.shape[-1] for part in fast.layers if hasattr(part, "in_features")]
    assert widths == [768, 384, 192, 101]
    assert [type(part).__name__ for part in fast.layers[:2]] == ["EnsembleLinear", "LayerNorm"]
    assert fast.layers[1].activation == "silu"
    assert [tuple(part.weight.shape) for part in flash.layers[2].layers[::2]] == [(2, 256, 1024), (2, 1024, 256)]
    assert flash.layers[-1].weight.shape == (2, 256, 101)
    assert len(unit_weights(flash)) == 12
    assert not unit_weights(fast)


@pytest.mark.parametrize("privileged", [0, 4])
@pytest.mark.parametrize("name", SMALL)
def test_in_a_loss(name, privileged):
    """Gradients reach everything; only the online pass moves running statistics, and the targets follow."""
    keys = ("observation", *(("state",) if privileged else ()), "action")
    actor = ACTORS[name](5, 3, **SMALL[name])
    critic = CRITICS[name](5 + privileged, 3, num_atoms=1, in_keys=keys, **SMALL[name])
    loss, data = SACLoss(actor, critic, num_qvalue_nets=2), batch(6, privileged=privileged)
    updater = SoftUpdate(loss, tau=0.25)
    first = running(loss)
    total(loss(data)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in loss.parameters())
    after = running(loss)
    assert bool(after) is (name == "flashsac")
    for key, value in after.items():
        assert torch.equal(value, first[key]) is key.startswith("target_"), key
    # Only once: by the mean of the present batch.
    if name == "flashsac":
        inputs = torch.cat([data[key] for key in keys], -1)
        mean = after["qvalue_network_params.module.layers.0.running_mean"]
        torch.testing.assert_close(mean, 0.01 * inputs.mean(0).expand_as(mean))
        mean = after["actor_network_params.module.0.module.0.0.running_mean"]
        torch.testing.assert_close(mean, 0.01 * data["observation"].mean(0))
    updater.step()
    for key, value in running(loss).items():
        if key.startswith("target_"):
            online = after[key.removeprefix("target_")]
            torch.testing.assert_close(value, first[key] + 0.25 * (online - first[key]))


def critic_alone(**options):
    """One network, which the loss copies and stacks."""
    return TensorDictModule(MLP(8, 1, (6,), **options), ["observation", "action"], ["state_action_value"])


@pytest.mark.parametrize("vmap", [True, False], ids=["vmap", "loop"])
@pytest.mark.parametrize(
    "options",
    [
        {"norm": "layer", "activation": nn.SiLU},
        {"norm": "rms", "dropout": 0.1},
        {"norm": "batch_renorm", "norm_place": "before", "norm_kwargs": {"renorm_warmup": 1}},
        {"norm": "batch", "num_blocks": 1, "unit_rows": True},
    ],
    ids=["layer", "rms", "renorm", "blocks"],
)
def test_copied_networks(options, vmap):
    loss = SACLoss(make_sac_actor(5, 3, (8,)), critic_alone(**options), num_qvalue_nets=2, deactivate_vmap=not vmap)
    first = running(loss)
    for _ in range(2):
        total(loss(batch(6))).backward()
    after = running(loss)
    for key, value in after.items():
        assert torch.equal(value, first[key]) is key.startswith("target_"), key
    counters = {key: value.tolist() for key, value in loss.state_dict().items() if "num_batches" in key}
    assert all(value == ([0, 0] if key.startswith("target_") else [2, 2]) for key, value in counters.items())
    with torch.no_grad():
        loss(batch(6))
    assert all(torch.equal(value, after[key]) for key, value in running(loss).items())


def test_first_policies_and_weights_of_the_programs():
    """holosoma: both heads 0, so mean 0 and standard deviation exp(-2.5). FlashSAC: orthogonal rows of unit length."""
    observation = TensorDict({"observation": torch.randn(6, 5)}, [6])
    with torch.no_grad():
        fast = make_fastsac_actor(5, 3, (16, 8)).get_dist(observation)
    assert fast.loc.eq(0).all()
    torch.testing.assert_close(fast.scale, torch.full((6, 3), math.exp(-2.5)))
    assert round(float(fast.scale[0, 0]), 3) == 0.082
    flash, critic = make_flashsac_actor(5, 3, 16), make_flashsac_critic(5, 3, 16, num_atoms=11)
    mlp = flash[0].module[0]
    eye = torch.eye(3)
    for head in mlp[-1].weight.chunk(2):
        torch.testing.assert_close(head @ head.T, eye)
    assert mlp[-1].bias.eq(0).all()
    narrow = mlp[2].layers[2].weight  # [16, 64]: fewer rows than a row has elements
    torch.testing.assert_close(narrow @ narrow.T, torch.eye(16))
    wide = mlp[2].layers[0].weight  # [64, 16]
    torch.testing.assert_close(wide.norm(dim=1), torch.ones(64))
    for net in critic.module.layers[-1].weight:  # [16, 11]
        torch.testing.assert_close(net.T @ net, torch.eye(11))
