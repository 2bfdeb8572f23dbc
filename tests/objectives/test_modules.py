"""The networks: ensembles against separate networks, the tanh-normal distribution, the builders."""

from __future__ import annotations

import copy
import math

import gymnasium
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType, TensorDictModule, set_interaction_type
from torch.nn import functional

from gpubuf.modules import (
    MLP,
    EnsembleLinear,
    EnsembleMLP,
    GaussianParameters,
    TanhNormal,
    make_sac_actor,
    make_sac_critic,
)
from tests.kernels.reference.tanh_normal import tanh_normal as reference


def separate(ensemble: EnsembleMLP, k: int, x: torch.Tensor) -> torch.Tensor:
    """Net ``k`` of an ensemble, layer by layer."""
    for layer in ensemble.layers:
        if isinstance(layer, EnsembleLinear):
            x = functional.linear(x, layer.weight[k].T, layer.bias[k, 0])
        else:
            x = functional.relu(x)
    return x


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("wanted", [(), (0,), (1,), (0, 2), (0, 1, 2)], ids=str)
def test_ensemble_joins_its_inputs(frozen, wanted):
    """Values and gradients, whichever inputs need one, with the first layer taken apart or not."""
    net = EnsembleMLP(2, 9, 1, (7,), dtype=torch.float64).requires_grad_(not frozen)
    parts = [torch.randn(4, width, dtype=torch.float64) for width in (4, 2, 3)]
    for i in wanted:
        parts[i].requires_grad_()
    y, truth = net(*parts), torch.stack([separate(net, k, torch.cat(parts, -1)) for k in range(2)])
    torch.testing.assert_close(y, truth)
    inputs = [parts[i] for i in wanted] + [p for p in net.parameters() if p.requires_grad]
    if inputs:
        for one, other in zip(
            torch.autograd.grad(y.sum(), inputs), torch.autograd.grad(truth.sum(), inputs), strict=True
        ):
            torch.testing.assert_close(one, other)
    else:
        assert not y.requires_grad


def test_ensemble_starts_as_separate_linear_layers_do():
    net = EnsembleMLP(2, 100, 1, (400,))
    first = net.layers[0]
    assert isinstance(first, EnsembleLinear)
    assert not torch.equal(first.weight[0], first.weight[1])
    for parameter in (first.weight, first.bias):
        assert parameter.abs().max() <= 0.1
        assert parameter.std() > 0.8 * 0.1 / math.sqrt(3)
    with pytest.raises(ValueError, match="num_nets=0"):
        EnsembleMLP(0, 3, 1)


def test_ensemble_says_what_it_is():
    assert EnsembleMLP(4, 3, 1).ensemble_size == 4
    assert copy.deepcopy(EnsembleMLP(4, 3, 1)).layers[-1].weight.stride() == (256, 1, 256)


def test_activations_in_place_leave_the_input_alone():
    """A ReLU works in place, on nothing but the layer's own output."""
    for net in (MLP(3, 2, (4,)), EnsembleMLP(2, 3, 2, (4,))):
        x = torch.randn(5, 3)
        before = x.clone()
        net(x).sum().backward()
        assert torch.equal(x, before)
        assert all(p.grad.abs().sum() > 0 for p in net.parameters())


def distribution(**kwargs):
    generator = torch.Generator().manual_seed(0)
    loc = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    scale = torch.rand(4, 3, generator=generator, dtype=torch.float64) + 0.1
    return TanhNormal(loc, scale, **kwargs)


BOUNDS = [
    {},
    {"low": -0.3, "high": 2.0},
    {"low": torch.tensor([-1.0, -2, -3]).double(), "high": torch.tensor([0.0, 1, 2]).double()},
    {"low": torch.tensor(-2.0).double(), "high": 1.0},
]


@pytest.mark.parametrize("kwargs", BOUNDS, ids=["unit", "numbers", "tensors", "mixed"])
@pytest.mark.parametrize("sample_shape", [(), (2,)])
def test_samples_and_densities(kwargs, sample_shape):
    """The fused sample, its density, and the density of the same action met again."""
    dist = distribution(**kwargs)
    torch.manual_seed(1)
    action, log_prob = dist.rsample_and_log_prob(sample_shape)
    torch.manual_seed(1)
    noise = torch.randn(*sample_shape, 4, 3, dtype=torch.float64)
    truth = reference(dist.loc, dist.scale, noise, kwargs.get("low", -1.0), kwargs.get("high", 1.0))
    torch.testing.assert_close((action, log_prob), truth)
    assert dist.log_prob(action) is log_prob
    torch.testing.assert_close(dist.log_prob(action.clone()), log_prob)
    torch.manual_seed(1)
    torch.testing.assert_close(dist.rsample(sample_shape), action)
    torch.manual_seed(1)
    torch.testing.assert_close(dist.sample(sample_shape), action)
    assert (dist.batch_shape, dist.event_shape) == ((4,), (3,))


@pytest.mark.parametrize("event_dims", [0, 1, 2])
def test_event_dimensions(event_dims):
    dist = distribution(event_dims=event_dims)
    action, log_prob = dist.rsample_and_log_prob()
    assert log_prob.shape == (4, 3)[: 2 - event_dims] == dist.batch_shape
    torch.testing.assert_close(dist.log_prob(action.clone()), log_prob)
    with pytest.raises(ValueError, match="event_dims=3"):
        distribution(event_dims=3)


def test_density_integrates_to_one():
    dist = TanhNormal(torch.tensor([[0.4]]).double(), torch.tensor([[0.7]]).double(), low=-1.0, high=3.0)
    edges = torch.linspace(-1, 3, 200_001, dtype=torch.float64)
    middle = ((edges[1:] + edges[:-1]) / 2).unsqueeze(-1)
    total = dist.log_prob(middle).exp().sum() * (edges[1] - edges[0])
    torch.testing.assert_close(total, torch.ones((), dtype=torch.float64), rtol=1e-6, atol=0)


def test_density_of_foreign_values_is_differentiable():
    dist = distribution(low=-0.3, high=2.0)
    value = torch.rand(4, 3, dtype=torch.float64, requires_grad=True)
    loc, scale = dist.loc.requires_grad_(), dist.scale.requires_grad_()

    def density(value, loc, scale):
        return TanhNormal(loc, scale, low=-0.3, high=2.0).log_prob(value)

    assert torch.autograd.gradcheck(density, (value, loc, scale))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_density_at_the_bounds_is_finite(dtype):
    """Where a rounded tanh ends up, and beyond."""
    loc, scale = torch.zeros(1, 2, dtype=dtype, requires_grad=True), torch.ones(1, 2, dtype=dtype, requires_grad=True)
    for bound in (-1.0, 1.0, 1.5):
        value = torch.full((1, 2), bound, dtype=dtype, requires_grad=True)
        log_prob = TanhNormal(loc, scale).log_prob(value)
        gradients = torch.autograd.grad(log_prob.sum(), (value, loc, scale))
        assert log_prob.isfinite().all()
        assert all(gradient.isfinite().all() for gradient in gradients)


def test_sampling_without_a_graph():
    dist = TanhNormal(torch.zeros(2, 3, requires_grad=True), torch.ones(2, 3))
    assert not dist.sample().requires_grad
    assert dist.rsample().requires_grad


def test_the_deterministic_action():
    dist = distribution(low=-0.3, high=2.0)
    truth = -0.3 + 2.3 * (torch.tanh(dist.loc) + 1) / 2
    for value in (dist.deterministic_sample, dist.mode, dist.median):
        torch.testing.assert_close(value, truth)
    samples = dist.sample((4001,))
    torch.testing.assert_close(samples.median(0).values, truth, rtol=0, atol=0.1)


def test_bounded_mean_and_broadcast():
    dist = TanhNormal(torch.full((2, 3), 100.0), torch.ones(3), upscale=2.0, tanh_loc=True)
    assert (dist.loc <= 2.0).all()
    assert dist.scale.shape == (2, 3)
    with pytest.raises(ValueError, match=r"low=1\.0 and high=-1\.0"):
        TanhNormal(torch.zeros(2), torch.ones(2), low=1.0, high=-1.0)


def test_gaussian_parameters():
    loc, scale = GaussianParameters(0.01)(torch.tensor([[1.0, 2.0, 0.0, -1000.0]]))
    assert loc.tolist() == [[1.0, 2.0]]
    torch.testing.assert_close(scale, torch.tensor([[1.0, 0.01]]))
    with pytest.raises(ValueError, match="scale_lb"):
        GaussianParameters(1.0)


def observations(*shape):
    return TensorDict({"observation": torch.randn(*shape, 5)}, shape)


@pytest.mark.parametrize("shape", [(), (6,), (2, 3)], ids=str)
def test_actor(shape):
    actor = make_sac_actor(5, 3, (8,), return_log_prob=True)
    batch = actor(observations(*shape))
    assert batch["action"].shape == (*shape, 3)
    assert batch["action_log_prob"].shape == shape
    assert (batch["action"].abs() <= 1).all()
    dist = actor.get_dist(observations(*shape))
    assert isinstance(dist, TanhNormal)
    with set_interaction_type(InteractionType.DETERMINISTIC):
        action = actor(batch)["action"]
    torch.testing.assert_close(action, torch.tanh(batch["loc"]))
    torch.testing.assert_close(action, actor.get_dist(batch).deterministic_sample)


def test_actor_draws_alike_by_either_way():
    """get_dist() is a shortcut past the modules."""
    actor, batch = make_sac_actor(5, 3, (8,)), observations(6)
    torch.manual_seed(0)
    through = actor(batch.copy())["action"]
    torch.manual_seed(0)
    torch.testing.assert_close(actor.get_dist(batch).rsample(), through)
    assert set(batch.keys()) == {"observation"}
    calls = []
    actor[0].register_forward_hook(lambda *_: calls.append(1))
    torch.manual_seed(0)
    torch.testing.assert_close(actor.get_dist(batch).rsample(), through)
    assert calls


@pytest.mark.parametrize("low", [[-1.0, -2, -3], torch.tensor([-1.0, -2, -3])], ids=["list", "tensor"])
def test_actor_with_bounds_for_each_component(low):
    actor = make_sac_actor(5, 3, (8,), low=low, high=[0.0, 4, 5])
    with torch.no_grad():
        actor[0].module[0][-1].bias.copy_(torch.tensor([9.0, -9, 9, 0, 0, 0]))
    action = actor.get_dist(observations(4)).deterministic_sample
    torch.testing.assert_close(action, torch.tensor([0.0, -2.0, 5.0]).expand(4, 3), atol=1e-3, rtol=0)
    torch.testing.assert_close(actor(observations(4))["action"], action, atol=0.3, rtol=0)
    assert {"1.low", "1.high"} == {name.removeprefix("module.") for name, _ in actor.named_buffers()}
    moved = actor.to(torch.float64)
    assert moved.get_dist(observations(4).double()).rsample().dtype is torch.float64


def test_actor_takes_the_bounds_of_a_space():
    space = gymnasium.spaces.Box(-2.0, 2.0, (1,))
    actor = make_sac_actor(3, 1, (8,), low=space.low, high=space.high)
    assert actor[1].distribution_kwargs == {"low": -2.0, "high": 2.0}


@pytest.mark.parametrize(
    "bounds",
    [{"low": 1.0, "high": 1.0}, {"high": float("inf")}, {"low": [-1.0, -1.0]}, {"low": [[-1.0, -1, -1]]}],
    ids=str,
)
def test_actor_refuses_bounds(bounds):
    with pytest.raises(ValueError, match="bound"):
        make_sac_actor(5, 3, (8,), **bounds)


def test_nested_keys():
    actor = make_sac_actor(5, 3, (8,), in_keys=[("agents", "obs")], action_key=("agents", "move"))
    critic = make_sac_critic(5, 3, (8,), in_keys=[("agents", "obs"), ("agents", "move")], num_nets=3)
    batch = actor(TensorDict({"agents": {"obs": torch.randn(4, 2, 5)}}, [4]))
    assert batch["agents", "move"].shape == (4, 2, 3)
    assert ("agents", "loc") in batch.keys(True)
    assert isinstance(critic, TensorDictModule)
    assert critic.module(batch["agents", "obs"], batch["agents", "move"]).shape == (3, 4, 2, 1)


def test_no_graph_of_the_last_draw_is_kept_by_a_network():
    """A distribution remembers its draw; nothing remembers the distribution."""
    actor = make_sac_actor(5, 3, (8,))
    actor.get_dist(observations(4)).rsample()
    copy.deepcopy(actor)
