"""Builders of the networks of FastSAC and of FlashSAC: normalised layers, categorical critics.

The widths that they start from are those of the programs. They are made for GPUs: on a CPU give smaller ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from tensordict.nn import TensorDictModule
from tensordict.utils import NestedKey
from torch import Tensor, nn

from gpubuf.modules.mlp import MLP, EnsembleMLP
from gpubuf.modules.norms import NormName
from gpubuf.modules.sac import TanhNormalActor, tanh_normal_actor
from gpubuf.modules.unit_rows import draw_rows


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
    low: float | Sequence[float] | Any = -1.0,
    high: float | Sequence[float] | Any = 1.0,
    activation: Callable[[], nn.Module] = nn.SiLU,
    norm: NormName | None = "layer",
    log_std_min: float = -5.0,
    log_std_max: float = 0.0,
    in_keys: Sequence[NestedKey] = ("observation",),
    action_key: NestedKey = "action",
    return_log_prob: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> TanhNormalActor:
    """The actor of FastSAC: layer norm and SiLU, and a standard deviation whose logarithm tanh keeps in its range.

    The last layer begins at 0: the first policy has mean 0, and the standard deviation in the middle of its range,
    ``exp(-2.5) = 0.082``, everywhere.

    It is used as that of :func:`~gpubuf.modules.make_sac_actor`.

    Args:
        obs_dim: width of all inputs together.
        action_dim: number of action components, A.
        num_cells: widths of the hidden layers.
        low: lower bound of the actions: a number or ``[A]`` numbers.
        high: upper bound of the actions, as ``low``.
        activation: factory of the activation modules.
        norm: norm of the hidden layers, see :class:`~gpubuf.modules.MLP`.
        log_std_min: least logarithm of the standard deviation.
        log_std_max: greatest logarithm of the standard deviation.
        in_keys: keys of the inputs, each ``[*batch, width]``.
        action_key: key of the action, ``[*batch, A]``.
        return_log_prob: also write the log-density of the action.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: the bounds of the actions or of the standard deviation are out of order or not finite.
    """
    new: dict[str, Any] = {"device": device, "dtype": dtype}
    body = MLP(obs_dim, 2 * action_dim, num_cells, activation, norm=norm, **new)
    for parameter in body[-1].parameters():
        nn.init.zeros_(parameter)
    network = nn.Sequential(body, SquashedGaussianParameters(log_std_min, log_std_max))
    return tanh_normal_actor(
        network, action_dim, low=low, high=high, in_keys=in_keys, action_key=action_key,
        return_log_prob=return_log_prob, **new,
    )  # fmt: skip


def make_fastsac_critic(
    obs_dim: int,
    action_dim: int,
    num_cells: Sequence[int] = (768, 384, 192),
    *,
    num_atoms: int = 101,
    num_nets: int = 2,
    activation: Callable[[], nn.Module] = nn.SiLU,
    norm: NormName | None = "layer",
    in_keys: Sequence[NestedKey] = ("observation", "action"),
    out_key: NestedKey = "state_action_value",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> TensorDictModule:
    """The critics of FastSAC: layer norm and SiLU, and logits of the atoms of a categorical distribution.

    For a critic that knows more than the actor, name its observations among ``in_keys``.

    Args:
        obs_dim: width of all observations among ``in_keys`` together.
        action_dim: number of action components.
        num_cells: widths of the hidden layers.
        num_atoms: number of atoms, A; 1 for plain values.
        num_nets: number of networks, N.
        activation: factory of the activation modules.
        norm: norm of the hidden layers, see :class:`~gpubuf.modules.MLP`.
        in_keys: keys of the inputs, each ``[*batch, width]``.
        out_key: key of the logits, ``[N, *batch, A]``.
        device: of the parameters.
        dtype: of the parameters.
    """
    network = EnsembleMLP(
        num_nets, obs_dim + action_dim, num_atoms, num_cells, activation, norm=norm, device=device, dtype=dtype
    )
    return TensorDictModule(network, list(in_keys), [out_key])


def _flashsac_options(num_blocks: int, expansion: int, unit_rows: bool) -> dict[str, Any]:
    return {
        "norm": "batch",
        "input_norm": "batch",
        "head_norm": "rms",
        "norm_kwargs": {"momentum": 0.01},
        "num_blocks": num_blocks,
        "expansion": expansion,
        "bias": False,
        "unit_rows": unit_rows,
    }


def make_flashsac_actor(
    obs_dim: int,
    action_dim: int,
    width: int = 128,
    *,
    num_blocks: int = 2,
    expansion: int = 4,
    low: float | Sequence[float] | Any = -1.0,
    high: float | Sequence[float] | Any = 1.0,
    activation: Callable[[], nn.Module] = nn.ReLU,
    unit_rows: bool = True,
    log_std_min: float = -10.0,
    log_std_max: float = 2.0,
    in_keys: Sequence[NestedKey] = ("observation",),
    action_key: NestedKey = "action",
    return_log_prob: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> TanhNormalActor:
    """The actor of FlashSAC: batch norm, residual blocks, RMS norm before the head, weights with unit rows.

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
        low: lower bound of the actions: a number or ``[A]`` numbers.
        high: upper bound of the actions, as ``low``.
        activation: factory of the activation modules.
        unit_rows: the rows of all weights have unit length, and begin orthogonal; scale and shift of a norm together
            have the length sqrt(features).
        log_std_min: least logarithm of the standard deviation.
        log_std_max: greatest logarithm of the standard deviation.
        in_keys: keys of the inputs, each ``[*batch, width]``.
        action_key: key of the action, ``[*batch, A]``.
        return_log_prob: also write the log-density of the action.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: the bounds of the actions or of the standard deviation are out of order or not finite.
    """
    new: dict[str, Any] = {"device": device, "dtype": dtype}
    options = _flashsac_options(num_blocks, expansion, unit_rows)
    body = MLP(obs_dim, 2 * action_dim, (width,), activation, **options, **new)
    if unit_rows:
        # The program has two heads, of the means and of the standard deviations.
        for head in cast(Tensor, body[-1].weight).chunk(2):
            draw_rows(head, -1)
    network = nn.Sequential(body, SquashedGaussianParameters(log_std_min, log_std_max))
    return tanh_normal_actor(
        network, action_dim, low=low, high=high, in_keys=in_keys, action_key=action_key,
        return_log_prob=return_log_prob, **new,
    )  # fmt: skip


def make_flashsac_critic(
    obs_dim: int,
    action_dim: int,
    width: int = 256,
    *,
    num_blocks: int = 2,
    expansion: int = 4,
    num_atoms: int = 101,
    num_nets: int = 2,
    activation: Callable[[], nn.Module] = nn.ReLU,
    unit_rows: bool = True,
    in_keys: Sequence[NestedKey] = ("observation", "action"),
    out_key: NestedKey = "state_action_value",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> TensorDictModule:
    """The critics of FlashSAC: batch norm, residual blocks, RMS norm before the head, weights with unit rows.

    A net is ``head(rms(blocks(W batch_norm(x))))``; a block is ``x + a(batch_norm(W_2 a(batch_norm(W_1 x))))``. Call
    :func:`~gpubuf.modules.normalize_weights` after each step of the optimiser. For a critic that knows more than the
    actor, name its observations among ``in_keys``.

    Args:
        obs_dim: width of all observations among ``in_keys`` together.
        action_dim: number of action components.
        width: of the residual blocks.
        num_blocks: number of residual blocks.
        expansion: width within a residual block, as a multiple of ``width``.
        num_atoms: number of atoms, A; 1 for plain values.
        num_nets: number of networks, N.
        activation: factory of the activation modules.
        unit_rows: the rows of all weights have unit length, and begin orthogonal; scale and shift of a norm together
            have the length sqrt(features).
        in_keys: keys of the inputs, each ``[*batch, width]``.
        out_key: key of the logits, ``[N, *batch, A]``.
        device: of the parameters.
        dtype: of the parameters.
    """
    options = _flashsac_options(num_blocks, expansion, unit_rows)
    network = EnsembleMLP(
        num_nets, obs_dim + action_dim, num_atoms, (width,), activation, **options, device=device, dtype=dtype
    )
    return TensorDictModule(network, list(in_keys), [out_key])
