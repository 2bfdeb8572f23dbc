"""Normalised layers, of one net or of each net of an ensemble: layer norm, RMS norm, batch norm, batch renorm.

Each has a scale and most a shift per feature and net. ``num_nets=None`` is one net, on ``[*batch, features]``, with
parameters ``[features]``; otherwise the input is ``[num_nets, rows, features]`` and the parameters are
``[num_nets, 1, features]``. With ``unit_rows`` one parameter, ``weight``, has the scale and after it the shift, twice
as many features. Inputs of lower precision, as under autocast, are normalised in float32 and returned in their own. A
norm with its activation is one kernel each way (:mod:`gpubuf.kernels.norms`), and one more for the statistics of a
batch. Code that ``torch.compile`` or ``torch.vmap`` transforms has PyTorch's operations instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from gpubuf.kernels import norms
from gpubuf.kernels._operations import snapshot

Statistics = Literal["update", "batch", "running"]
NormName = Literal["layer", "rms", "batch", "batch_renorm"]

_ACTIVATIONS = {None: norms.NONE, "relu": norms.RELU, "silu": norms.SILU}

# The innermost transform of torch.func that is at work, or None.
_transforms = torch._C._functorch.maybe_current_level


def _takes_torch(x: Tensor) -> bool:
    """Whether PyTorch's operations are due: a compiler fuses them itself; transforms and traces know no others."""
    if torch.compiler.is_compiling() or _transforms() is not None or torch._C._get_tracing_state() is not None:
        return True
    return not (x.is_cpu or x.is_cuda)


class _Norm(nn.Module):
    """Base class: parameters, the activation, and what makes unit rows (see :mod:`gpubuf.modules.weight_norm`)."""

    in_dim = -1
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        features: int,
        num_nets: int | None = None,
        *,
        eps: float,
        bias: bool,
        activation: str | None = None,
        unit_rows: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise ValueError(f"activation must be one of {[*_ACTIVATIONS]}, got {activation!r}")
        self.activation = activation
        self.features, self.num_nets, self.eps, self.unit_rows = features, num_nets, eps, unit_rows
        self.row_norm = math.sqrt(features)
        self._shape = (features,) if num_nets is None else (num_nets, 1, features)
        # A row that has one length is one tensor: the optimiser scales it in the program that updates it.
        self._joint = unit_rows and bias
        shape = (*self._shape[:-1], 2 * features) if self._joint else self._shape
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        apart = bias and not self._joint
        self.bias = nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) if apart else None
        _Norm.reset_parameters(self)

    @property
    def scale(self) -> Tensor:
        """What the normalised input is multiplied with, ``[features]`` or ``[num_nets, 1, features]``."""
        return self.weight.chunk(2, -1)[0] if self._joint else self.weight

    @property
    def shift(self) -> Tensor | None:
        """What is added to it, of the same shape."""
        return self.weight.chunk(2, -1)[1] if self._joint else self.bias

    def reset_parameters(self) -> None:
        """Set the scale to 1 and the shift to 0."""
        shift = self.shift
        with torch.no_grad():
            self.scale.fill_(1)
            if shift is not None:
                shift.zero_()

    def extra_repr(self) -> str:
        nets = "" if self.num_nets is None else f", num_nets={self.num_nets}"
        return f"{self.features}{nets}, eps={self.eps}, activation={self.activation}, unit_rows={self.unit_rows}"


class _RowNorm(_Norm):
    """Base class of norms over the features of a row."""

    _kind: int

    def forward(self, x: Tensor) -> Tensor:
        how = self.eps, self._kind, _ACTIVATIONS[self.activation]
        if self.features > norms.MAX_WIDTH or _takes_torch(x):
            return norms.composed(x, self.scale, self.shift, *how)
        y: Tensor = norms.norm_activation_direct(x, self.scale, self.shift, *how)[0]
        return y


class LayerNorm(_RowNorm):
    """``activation((x - mean) / sqrt(var + eps) * weight + bias)`` over the features of each row.

    Ba, Kiros and Hinton, "Layer Normalization", arXiv 1607.06450. ``var`` is the biased one.

    Args:
        features: width of a row.
        num_nets: number of nets, None for one.
        eps: added to the variance.
        bias: add a shift.
        activation: "relu", "silu" or None.
        unit_rows: scale and shift together are to have the norm sqrt(features), see :mod:`gpubuf.modules.weight_norm`.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: there is no such activation.
    """

    _kind = norms.LAYER

    def __init__(
        self, features: int, num_nets: int | None = None, *, eps: float = 1e-5, bias: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(features, num_nets, eps=eps, bias=bias, **kwargs)


class RMSNorm(_RowNorm):
    """``activation(x / sqrt(mean(x^2) + eps) * weight)`` over the features of each row.

    Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467.

    Args:
        features: width of a row.
        num_nets: number of nets, None for one.
        eps: added to the mean square.
        bias: add a shift.
        activation: "relu", "silu" or None.
        unit_rows: scale and shift together are to have the norm sqrt(features), see :mod:`gpubuf.modules.weight_norm`.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: there is no such activation.
    """

    _kind = norms.RMS

    def __init__(
        self, features: int, num_nets: int | None = None, *, eps: float = 1e-6, bias: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(features, num_nets, eps=eps, bias=bias, **kwargs)


class BatchNorm(_Norm):
    """``activation((x - mean) / sqrt(var + eps) * weight + bias)`` over the rows of a batch, for each feature and net.

    Ioffe and Szegedy, "Batch Normalization", arXiv 1502.03167. ``var`` is the biased one; the running variance is made
    of the unbiased one, as in PyTorch.

    Mean and variance are those of the batch, and the running statistics follow them, in training mode *while gradients
    are enabled*. In evaluation mode and under ``torch.no_grad()`` they are the running ones: an actor that explores, or
    that proposes the next action of a target, is not normalised by whatever batch it happens to see. The attribute
    ``statistics`` changes that, see :func:`set_statistics`. Nothing synchronises with the host.

    Args:
        features: width of a row.
        num_nets: number of nets, None for one.
        eps: added to the variance.
        momentum: share of a new batch in the running statistics.
        renorm_warmup: correct the batch's statistics by the running ones after so many batches: batch renormalisation
            (Ioffe, arXiv 1702.03275), as CrossQ has it (Bhatt et al., arXiv 1902.05605). The activation's input becomes
            ``((x - mean) / s * r + d) * weight + bias``, with ``s = sqrt(var + eps)``, ``S`` the same of the running
            variance, ``r = clip(s / S, 1 / r_max, r_max)`` and ``d = clip((mean - running_mean) / S, -d_max, d_max)``,
            both constants to autograd. None: no renormalisation.
        r_max: largest correction of the scale.
        d_max: largest correction of the mean, in standard deviations.
        activation: "relu", "silu" or None.
        unit_rows: scale and shift together are to have the norm sqrt(features), see :mod:`gpubuf.modules.weight_norm`.
        device: of the parameters.
        dtype: of the parameters.

    Attributes:
        statistics: "update", "batch" or "running", see :func:`set_statistics`.
        counts: which rows count, or None; see :func:`count_rows`. The others are normalised like these, and change no
            statistic, running one or gradient. With fewer than two rows that count the running statistics stay.

    ``forward`` raises ValueError if the statistics of a batch of fewer than two rows are asked for, or if ``counts``
    does not have one element for each row.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches: Tensor

    def __init__(
        self,
        features: int,
        num_nets: int | None = None,
        *,
        eps: float = 1e-5,
        momentum: float = 0.01,
        renorm_warmup: int | None = None,
        r_max: float = 3.0,
        d_max: float = 5.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(features, num_nets, eps=eps, bias=True, **kwargs)
        if not 0 < momentum <= 1:
            raise ValueError(f"momentum must be in (0, 1], got {momentum}")
        self.momentum, self.renorm_warmup, self.r_max, self.d_max = momentum, renorm_warmup, r_max, d_max
        self.statistics: Statistics = "update"
        self.counts: Tensor | None = None
        self.register_buffer("running_mean", torch.zeros_like(self.scale))
        self.register_buffer("running_var", torch.ones_like(self.scale))
        if renorm_warmup is not None:
            self.register_buffer("num_batches", torch.zeros((), dtype=torch.int64, device=self.weight.device))

    def reset_parameters(self) -> None:
        """Set the scale to 1, the shift to 0, and forget the running statistics."""
        super().reset_parameters()
        with torch.no_grad():
            self.running_mean.zero_()
            self.running_var.fill_(1)
            if self.renorm_warmup is not None:
                self.num_batches.zero_()

    def forward(self, x: Tensor) -> Tensor:
        by_torch = _takes_torch(x)
        weight, bias = self.scale, self.shift
        assert bias is not None
        follows = self.statistics == "update" and self.training and torch.is_grad_enabled()
        if not (follows or (self.statistics == "batch" and self.training)):
            mean, var = self.running_mean, self.running_var
            # They may move before a backward reads them.
            if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
                copy = snapshot if by_torch else torch.clone
                mean, var = copy(mean), copy(var)
            fixed = norms.composed_batch if by_torch else norms.batch_norm_activation_direct
            return cast(Tensor, fixed(x, weight, bias, mean, var, self.eps, _ACTIVATIONS[self.activation], False))
        rows: int | Tensor = x.numel() // weight.numel()
        if rows < 2:
            raise ValueError(f"the statistics of a batch need at least two rows, got an input of shape {list(x.shape)}")
        if self.counts is not None:
            by_torch = True
            mean, var, rows = self._of_counting(x, self.counts)
        else:
            mean, var = self._by_torch(x) if by_torch else self._moments(x)
        if self.renorm_warmup is not None:
            r, d = self._renorm(mean.detach(), var.detach())
            if by_torch:  # The statistics move before the backward, which would compute both anew.
                r, d = snapshot(r), snapshot(d)
            weight, bias = weight * r, torch.addcmul(bias, weight, d)
        if follows:
            self._follow(mean.detach(), var.detach(), rows)
        # PyTorch's operations differentiate mean and variance themselves.
        run = norms.composed_batch if by_torch else norms.batch_norm_activation_direct
        return cast(Tensor, run(x, weight, bias, mean, var, self.eps, _ACTIVATIONS[self.activation], not by_torch))

    @torch.no_grad()
    def _moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, var = norms.batch_moments_direct(x, self.running_mean)
        return mean, var

    def _by_torch(self, x: Tensor) -> tuple[Tensor, Tensor]:
        dims = tuple(range(x.ndim - 1)) if self.num_nets is None else (1,)
        var, mean = torch.var_mean(x.to(torch.promote_types(x.dtype, torch.float32)), dims, correction=0)
        return mean.reshape(self._shape), var.reshape(self._shape)

    def _of_counting(self, x: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(mean, variance, number) of the rows that count; 0 if none does."""
        rows, dims = (x.shape[:-1], tuple(range(x.ndim - 1))) if self.num_nets is None else (x.shape[1:-1], (1,))
        if counts.numel() != rows.numel():
            raise ValueError(
                f"which rows count must be said of each: got {list(counts.shape)} for an input of {list(x.shape)}"
            )
        counts, x = counts.reshape(*rows, 1), x.to(torch.promote_types(x.dtype, torch.float32))
        number = counts.sum().to(x.dtype)
        mean = torch.where(counts, x, 0.0).sum(dims, keepdim=True) / number.clamp(min=1)
        var = torch.where(counts, x - mean, 0.0).square().sum(dims, keepdim=True) / number.clamp(min=1)
        return mean.reshape(self._shape), var.reshape(self._shape), number

    @torch.no_grad()
    def _renorm(self, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        """(r, d); (1, 0) while the running statistics warm up."""
        assert self.renorm_warmup is not None
        inverse = (self.running_var + self.eps).rsqrt()
        warm = self.num_batches >= self.renorm_warmup
        r = ((var + self.eps).sqrt() * inverse).clamp(1 / self.r_max, self.r_max)
        d = ((mean - self.running_mean) * inverse).clamp(-self.d_max, self.d_max)
        return torch.where(warm, r, 1.0), torch.where(warm, d, 0.0)

    @torch.no_grad()
    def _follow(self, mean: Tensor, var: Tensor, rows: int | Tensor) -> None:
        mean, unbiased = mean - self.running_mean, var * (rows / (rows - 1)) - self.running_var
        if isinstance(rows, Tensor):
            mean, unbiased = (torch.where(rows > 1, step, 0.0) for step in (mean, unbiased))
        # Not lerp_, which vmap does not know.
        self.running_mean.add_(mean, alpha=self.momentum)
        self.running_var.add_(unbiased, alpha=self.momentum)
        if self.renorm_warmup is not None:
            self.num_batches.add_(rows > 1)

    def extra_repr(self) -> str:
        renorm = "" if self.renorm_warmup is None else f", renorm_warmup={self.renorm_warmup}"
        return f"{super().extra_repr()}, momentum={self.momentum}{renorm}"


def count_rows(module: nn.Module, counts: Tensor | None) -> None:
    """Say which rows count in the statistics of a batch of every :class:`BatchNorm` within ``module``, until told anew.

    Args:
        module: the network.
        counts: bool, an element for each row of the inputs to come; None for all rows.
    """
    for part in module.modules():
        if isinstance(part, BatchNorm):
            part.counts = counts


def set_statistics(module: nn.Module, statistics: Statistics) -> None:
    """Choose the statistics of every :class:`BatchNorm` within ``module``.

    Args:
        module: the network.
        statistics: "update" for those of the batch, which the running ones follow, in training mode while gradients are
            enabled, and else the running ones; "batch" for those of the batch in training mode, which leave the running
            ones alone; "running" for the running ones always.
    """
    for part in module.modules():
        if isinstance(part, BatchNorm):
            part.statistics = statistics


_NAMES: dict[str, Callable[..., nn.Module]] = {
    "layer": LayerNorm,
    "rms": RMSNorm,
    "batch": BatchNorm,
    "batch_renorm": lambda *args, **kwargs: BatchNorm(*args, **{"renorm_warmup": 100_000, **kwargs}),
}


def check_norm(**names: str | None) -> None:
    """Raise ValueError unless each argument is the name of a norm, or None."""
    for argument, name in names.items():
        if name is not None and name not in _NAMES:
            raise ValueError(f"{argument} must be None or one of {sorted(_NAMES)}, got {name!r}")


def make_norm(
    name: str, num_nets: int | None, features: int, activation: Callable[[], nn.Module] | None, **kwargs: Any
) -> list[nn.Module]:
    """A norm and the activation after it, as one module where that is possible."""
    made = None if activation is None else activation()
    fused = "relu" if type(made) is nn.ReLU else "silu" if type(made) is nn.SiLU else None
    norm = _NAMES[name](features, num_nets, activation=fused, **kwargs)
    return [norm] if made is None or fused is not None else [norm, made]
