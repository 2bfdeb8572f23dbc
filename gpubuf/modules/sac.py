"""Builders of the usual networks of soft actor-critic, FastSAC and FlashSAC, as modules on TensorDicts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torch.nn.functional import softplus

from gpubuf.modules.fast_call import entries, is_plain
from gpubuf.modules.mlp import MLP, EnsembleMLP
from gpubuf.modules.pixels import Encoded, PixelEncoder
from gpubuf.modules.tanh_normal import TanhNormal
from gpubuf.modules.weight_norm import draw_rows


class GaussianParameters(nn.Module):
    """Splits the last dimension into the mean and the standard deviation.

    ``scale = softplus(raw + c) + scale_lb``, with c such that a raw 0 gives 1.

    Args:
        scale_lb: lower bound of the standard deviation, in [0, 1).

    Raises:
        ValueError: the bound is out of range.
    """

    def __init__(self, scale_lb: float = 1e-4) -> None:
        super().__init__()
        if not 0 <= scale_lb < 1:
            raise ValueError(f"scale_lb must be in [0, 1), got {scale_lb}")
        self.scale_lb = scale_lb
        self.shift = math.log(math.expm1(1 - scale_lb))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loc, raw = x.chunk(2, -1)
        return loc, softplus(raw + self.shift) + self.scale_lb


class TanhNormalHead(ProbabilisticTensorDictModule):
    """Draws an action from a :class:`TanhNormal` whose bounds differ between the components.

    The bounds are buffers, so that they follow the module to another device.
    """

    low: torch.Tensor
    high: torch.Tensor

    def __init__(self, low: torch.Tensor, high: torch.Tensor, **kwargs: Any) -> None:
        super().__init__(distribution_class=TanhNormal, **kwargs)
        self.register_buffer("low", low)
        self.register_buffer("high", high)

    def get_dist(self, tensordict: TensorDictBase) -> TanhNormal:
        loc, scale = (tensordict.get(key) for key in self.in_keys)
        return TanhNormal(loc, scale, low=self.low, high=self.high)

    build_dist_from_params = get_dist


class TanhNormalActor(ProbabilisticTensorDictSequential):
    """A network that returns mean and standard deviation, and the head that draws the action.

    A ``ProbabilisticTensorDictSequential``, but for :meth:`get_dist`, which leaves its input as it is.
    """

    def get_dist(self, tensordict: TensorDictBase, *args: Any, **kwargs: Any) -> TanhNormal:
        """The distribution of the action given the observation in ``tensordict``."""
        network, head = cast("list[Any]", self.module)
        if args or kwargs or not is_plain(network, outputs=2):
            return super().get_dist(tensordict, *args, **kwargs)  # type: ignore[return-value]
        loc, scale = network.module(*entries(tensordict, network.in_keys))
        if isinstance(head, TanhNormalHead):
            return TanhNormal(loc, scale, low=head.low, high=head.high)
        return TanhNormal(loc, scale, **head.distribution_kwargs)


def _per_component(bound: Any, action_dim: int) -> NDArray[np.float64]:
    """A bound for each of ``action_dim`` components, from a number, an array or a tensor."""
    values = np.asarray(bound.tolist() if isinstance(bound, torch.Tensor) else bound, dtype=np.float64)
    if values.shape not in ((), (1,), (action_dim,)):
        raise ValueError(f"a bound must be a number or have the shape [{action_dim}], got {list(values.shape)}")
    return np.broadcast_to(values, (action_dim,))


def make_sac_actor(
    obs_dim: int,
    action_dim: int,
    num_cells: Sequence[int] = (256, 256),
    *,
    activation: Callable[[], nn.Module] = nn.ReLU,
    scale_lb: float = 1e-4,
    encoder: PixelEncoder | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **head: Any,
) -> TanhNormalActor:
    """A Gaussian policy squashed by tanh: MLP, mean and standard deviation, :class:`TanhNormal`.

    Calling it on a TensorDict writes ``"loc"``, ``"scale"`` and the action. The action is drawn at random, except
    within ``tensordict.nn.set_interaction_type(InteractionType.DETERMINISTIC)``. :class:`~gpubuf.objectives.SACLoss`
    calls its ``get_dist``.

    Args:
        obs_dim: width of all inputs together; with an encoder, of what is made of its features, 50 in DrQ.
        action_dim: number of action components, A.
        num_cells: widths of the hidden layers.
        activation: factory of the activation modules.
        scale_lb: lower bound of the standard deviation, which starts near 1.
        encoder: that of the critics, for images: see :class:`~gpubuf.modules.Encoded`. They alone train it.
        device: of the parameters.
        dtype: of the parameters.
        **head: ``low``, ``high``, ``in_keys``, ``action_key`` and ``return_log_prob`` of :func:`tanh_normal_actor`.

    Raises:
        ValueError: a bound is infinite, ``low >= high``, or the bounds are not ``[A]``.
    """
    body = MLP(obs_dim, 2 * action_dim, num_cells, activation, device=device, dtype=dtype)
    seeing = body if encoder is None else Encoded(encoder, obs_dim, body, learns=False)
    network = nn.Sequential(seeing, GaussianParameters(scale_lb))
    return tanh_normal_actor(network, action_dim, device=device, dtype=dtype, **head)


def tanh_normal_actor(
    network: nn.Module,
    action_dim: int,
    *,
    low: float | Sequence[float] | Any = -1.0,
    high: float | Sequence[float] | Any = 1.0,
    in_keys: Sequence[NestedKey] = ("observation",),
    action_key: NestedKey = "action",
    return_log_prob: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> TanhNormalActor:
    """The actor whose mean and standard deviation, each ``[*batch, A]``, ``network`` returns.

    Args:
        network: from inputs to mean and standard deviation.
        action_dim: number of action components, A.
        low: lower bound of the actions: a number or ``[A]`` numbers (``env.action_space.low``).
        high: upper bound of the actions, as ``low``.
        in_keys: keys of the inputs, each ``[*batch, width]``.
        action_key: key of the action, ``[*batch, A]``. With a nested key the parameters of the distribution are written
            beside the action, for example at ``("agents", "loc")``.
        return_log_prob: also write the log-density of the action.
        device: of the bounds.
        dtype: of the bounds.

    Raises:
        ValueError: a bound is infinite, ``low >= high``, or the bounds are not ``[A]``.
    """
    lows, highs = (_per_component(bound, action_dim) for bound in (low, high))
    if not ((lows < highs).all() and np.isfinite(lows).all() and np.isfinite(highs).all()):
        raise ValueError(f"actions need finite bounds with low < high, got low={lows.tolist()}, high={highs.tolist()}")
    prefix = action_key[:-1] if isinstance(action_key, tuple) else ()
    params: list[NestedKey] = [(*prefix, name) if prefix else name for name in ("loc", "scale")]
    head_kwargs: dict[str, Any] = {
        "in_keys": params,
        "out_keys": [action_key],
        "default_interaction_type": InteractionType.RANDOM,
        "return_log_prob": return_log_prob,
    }
    head: ProbabilisticTensorDictModule
    if (lows == lows[0]).all() and (highs == highs[0]).all():
        bounds = {"low": float(lows[0]), "high": float(highs[0])}
        head = ProbabilisticTensorDictModule(distribution_class=TanhNormal, distribution_kwargs=bounds, **head_kwargs)
    else:
        dtype_ = dtype or torch.get_default_dtype()
        tensors = [torch.tensor(bound.tolist(), dtype=dtype_, device=device) for bound in (lows, highs)]
        head = TanhNormalHead(*tensors, **head_kwargs)
    return TanhNormalActor(TensorDictModule(network, list(in_keys), params), head)


def make_sac_critic(
    obs_dim: int,
    action_dim: int,
    num_cells: Sequence[int] = (256, 256),
    *,
    num_nets: int = 2,
    num_atoms: int = 1,
    activation: Callable[[], nn.Module] = nn.ReLU,
    encoder: PixelEncoder | None = None,
    in_keys: Sequence[NestedKey] = ("observation", "action"),
    out_key: NestedKey = "state_action_value",
    **layers: Any,
) -> TensorDictModule:
    """An ensemble of action-value networks, for ``SACLoss(actor, critic, num_qvalue_nets=num_nets)``.

    For a critic that knows more than the actor, name its observations among ``in_keys``.

    Args:
        obs_dim: width of all observations among ``in_keys`` together; with an encoder, as for the actor.
        action_dim: number of action components.
        num_cells: widths of the hidden layers.
        num_nets: number of networks, N.
        num_atoms: number of outputs, A: logits of the atoms of a categorical distribution; 1 for plain values.
        activation: factory of the activation modules.
        encoder: of images, the first of ``in_keys``; all nets have it in common.
        in_keys: keys of the inputs, each ``[*batch, width]``.
        out_key: key of the values, ``[N, *batch, A]``.
        **layers: ``device``, ``dtype``, and other keyword arguments of :class:`EnsembleMLP`, such as ``norm``.
    """
    network = EnsembleMLP(num_nets, obs_dim + action_dim, num_atoms, num_cells, activation, **layers)
    seeing = network if encoder is None else Encoded(encoder, obs_dim, network)
    return TensorDictModule(seeing, list(in_keys), [out_key])


class SquashedGaussianParameters(nn.Module):
    """Splits the last dimension into the mean and the standard deviation, whose logarithm tanh keeps in a range.

    ``log(scale) = log_std_min + (log_std_max - log_std_min) * (tanh(raw) + 1) / 2``.

    Args:
        log_std_min: least logarithm of the standard deviation.
        log_std_max: greatest logarithm of the standard deviation.

    Raises:
        ValueError: ``log_std_min >= log_std_max``.
    """

    def __init__(self, log_std_min: float = -5.0, log_std_max: float = 0.0) -> None:
        super().__init__()
        if log_std_min >= log_std_max:
            raise ValueError(f"log_std_min must be less than log_std_max, got {log_std_min} and {log_std_max}")
        self.log_centre = (log_std_max + log_std_min) / 2
        self.log_half = (log_std_max - log_std_min) / 2

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        loc, raw = x.chunk(2, -1)
        return loc, (self.log_centre + self.log_half * raw.tanh()).exp()


def make_fastsac_actor(
    obs_dim: int,
    action_dim: int,
    num_cells: Sequence[int] = (512, 256, 128),
    *,
    log_std_min: float = -5.0,
    log_std_max: float = 0.0,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **head: Any,
) -> TanhNormalActor:
    """The actor of FastSAC: layer norm and SiLU, and a standard deviation whose logarithm tanh keeps in its range.

    The last layer begins at 0: the first policy has mean 0, and the standard deviation in the middle of its range,
    ``exp(-2.5) = 0.082``, everywhere.

    It is used as that of :func:`~gpubuf.modules.make_sac_actor`.

    Args:
        obs_dim: width of all inputs together.
        action_dim: number of action components, A.
        num_cells: widths of the hidden layers.
        log_std_min: least logarithm of the standard deviation.
        log_std_max: greatest logarithm of the standard deviation.
        device: of the parameters.
        dtype: of the parameters.
        **head: ``low``, ``high``, ``in_keys``, ``action_key`` and ``return_log_prob``, as for
            :func:`~gpubuf.modules.make_sac_actor`.

    Raises:
        ValueError: the bounds of the actions or of the standard deviation are out of order or not finite.
    """
    new: dict[str, Any] = {"device": device, "dtype": dtype}
    body = MLP(obs_dim, 2 * action_dim, num_cells, nn.SiLU, norm="layer", **new)
    for parameter in body[-1].parameters():
        nn.init.zeros_(parameter)
    network = nn.Sequential(body, SquashedGaussianParameters(log_std_min, log_std_max))
    return tanh_normal_actor(network, action_dim, **new, **head)


def make_fastsac_critic(
    obs_dim: int, action_dim: int, num_cells: Sequence[int] = (768, 384, 192), *, num_atoms: int = 101, **options: Any
) -> TensorDictModule:
    """The critics of FastSAC: layer norm and SiLU, and logits of the atoms of a categorical distribution.

    Args:
        obs_dim: width of all observations among ``in_keys`` together.
        action_dim: number of action components.
        num_cells: widths of the hidden layers.
        num_atoms: number of atoms, A; 1 for plain values.
        **options: further arguments of :func:`~gpubuf.modules.make_sac_critic`.
    """
    kind: dict[str, Any] = {"activation": nn.SiLU, "norm": "layer"}
    return make_sac_critic(obs_dim, action_dim, num_cells, num_atoms=num_atoms, **kind, **options)


_FLASHSAC: dict[str, Any] = {
    **{"norm": "batch", "input_norm": "batch", "head_norm": "rms", "norm_kwargs": {"momentum": 0.01}},
    **{"bias": False, "unit_rows": True},
}


def make_flashsac_actor(
    obs_dim: int,
    action_dim: int,
    width: int = 128,
    *,
    num_blocks: int = 2,
    expansion: int = 4,
    log_std_min: float = -10.0,
    log_std_max: float = 2.0,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **head: Any,
) -> TanhNormalActor:
    """The actor of FlashSAC: batch norm, residual blocks, RMS norm before the head, weights with unit rows.

    The rows of all weights begin orthogonal; scale and shift of a norm together have the length sqrt(features).

    It is used as that of :func:`~gpubuf.modules.make_sac_actor`, with two differences. Call
    :func:`~gpubuf.modules.normalize_weights` after each step of the optimiser. And its batch norms use the statistics
    of a batch only in training mode while gradients are enabled (see :class:`~gpubuf.modules.BatchNorm`), so explore
    under ``torch.no_grad()``.

    Args:
        obs_dim: width of all inputs together.
        action_dim: number of action components, A.
        width: of the residual blocks.
        num_blocks: number of residual blocks.
        expansion: width within a residual block, as a multiple of ``width``.
        log_std_min: least logarithm of the standard deviation.
        log_std_max: greatest logarithm of the standard deviation.
        device: of the parameters.
        dtype: of the parameters.
        **head: ``low``, ``high``, ``in_keys``, ``action_key`` and ``return_log_prob``, as for
            :func:`~gpubuf.modules.make_sac_actor`.

    Raises:
        ValueError: the bounds of the actions or of the standard deviation are out of order or not finite.
    """
    new: dict[str, Any] = {"device": device, "dtype": dtype}
    body = MLP(obs_dim, 2 * action_dim, (width,), num_blocks=num_blocks, expansion=expansion, **_FLASHSAC, **new)
    # The program has two heads, of the means and of the standard deviations.
    for rows in cast(Tensor, body[-1].weight).chunk(2):
        draw_rows(rows, -1)
    network = nn.Sequential(body, SquashedGaussianParameters(log_std_min, log_std_max))
    return tanh_normal_actor(network, action_dim, **new, **head)


def make_flashsac_critic(
    obs_dim: int, action_dim: int, width: int = 256, *, num_blocks: int = 2, num_atoms: int = 101, **options: Any
) -> TensorDictModule:
    """The critics of FlashSAC: batch norm, residual blocks, RMS norm before the head, weights with unit rows.

    A net is ``head(rms(blocks(W batch_norm(x))))``; a block is ``x + a(batch_norm(W_2 a(batch_norm(W_1 x))))``. Call
    :func:`~gpubuf.modules.normalize_weights` after each step of the optimiser.

    Args:
        obs_dim: width of all observations among ``in_keys`` together.
        action_dim: number of action components.
        width: of the residual blocks.
        num_blocks: number of residual blocks.
        num_atoms: number of atoms, A; 1 for plain values.
        **options: further arguments of :func:`~gpubuf.modules.make_sac_critic`, as ``expansion``, the width within a
            residual block as a multiple of ``width``, 4 by default.
    """
    return make_sac_critic(
        obs_dim, action_dim, (width,), num_atoms=num_atoms, num_blocks=num_blocks, **_FLASHSAC, **options
    )
