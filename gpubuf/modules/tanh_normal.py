"""The distribution of tanh(x) for normal x, rescaled to the bounds of an action space."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints
from torch.nn.functional import softplus

from gpubuf.kernels import tanh_normal


class TanhNormal(Distribution):
    """``a = low + (high - low) * (tanh(x) + 1) / 2`` with ``x ~ Normal(loc, scale)``.

    The log-density of ``a`` is summed over the last ``event_dims`` dimensions (Haarnoja et al., "Soft Actor-Critic",
    ICML 2018, appendix C). It is evaluated from ``x``, not from ``a``, wherever ``x`` is known, as
    ``log(1 - tanh(x)^2) = 2 * (log 2 - |x| - log(1 + exp(-2|x|)))``, which neither overflows nor cancels.
    Nothing here synchronises with the host.

    Args:
        loc: mean of the normal, ``[*batch, A]``.
        scale: standard deviation of the normal, positive, ``[*batch, A]``.
        upscale: with ``tanh_loc``, the bound of the mean.
        low: lower bound of the support: a number, or a tensor that broadcasts against the last dimension of ``loc``
            and lives on its device (another would be copied at every use).
        high: upper bound of the support, as ``low``.
        event_dims: number of trailing dimensions whose log-densities are summed.
        tanh_loc: replace ``loc`` by ``upscale * tanh(loc / upscale)``.

    Raises:
        ValueError: ``low`` and ``high`` are numbers and ``low >= high``.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {"loc": constraints.real, "scale": constraints.positive}
    has_rsample = True

    def __init__(
        self,
        loc: Tensor,
        scale: Tensor,
        upscale: float = 5.0,
        low: float | Tensor = -1.0,
        high: float | Tensor = 1.0,
        event_dims: int = 1,
        tanh_loc: bool = False,
    ) -> None:
        if not isinstance(low, Tensor) and not isinstance(high, Tensor) and low >= high:
            raise ValueError(f"low must be less than high, got low={low} and high={high}")
        if loc.shape != scale.shape:
            loc, scale = torch.broadcast_tensors(loc, scale)
        if event_dims > loc.ndim:
            raise ValueError(f"event_dims={event_dims}, but loc has only {loc.ndim} dimensions: {list(loc.shape)}")
        self.loc = torch.tanh(loc / upscale) * upscale if tanh_loc else loc
        self.scale = scale
        self.low, self.high = low, high
        self._bounds: tuple[Tensor | None, Tensor | None, float, float]
        if isinstance(low, Tensor) or isinstance(high, Tensor):
            last = loc.shape[-1:] or (1,)
            low_row, high_row = (
                torch.as_tensor(b, dtype=scale.dtype, device=loc.device).expand(last) for b in (low, high)
            )
            self._bounds = (low_row, high_row, -1.0, 1.0)
        else:
            self._bounds = (None, None, float(low), float(high))
        self._drawn: tuple[Tensor, Tensor] | None = None
        split = loc.ndim - event_dims
        super().__init__(loc.shape[:split], loc.shape[split:], validate_args=False)

    @constraints.dependent_property(is_discrete=False, event_dim=1)
    def support(self) -> Any:
        """The interval of the actions."""
        return constraints.independent(constraints.interval(self.low, self.high), len(self.event_shape))

    def _action(self, x: Tensor) -> Tensor:
        half = (self.high - self.low) / 2
        return torch.tanh(x) * half + (self.low + half)

    def _log_prob_from(self, x: Tensor, noise: Tensor) -> Tensor:
        half = (self.high - self.low) / 2
        log_half = half.log() if isinstance(half, Tensor) else math.log(half)
        magnitude = x.abs()
        log_det = 2 * (math.log(2) - magnitude - softplus(-2 * magnitude))
        each = -0.5 * noise.square() - self.scale.log() - 0.5 * math.log(2 * math.pi) - log_det - log_half
        dims = len(self.event_shape)
        return each.sum(tuple(range(-dims, 0))) if dims else each

    def rsample_and_log_prob(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
        """A sample ``[*sample_shape, *batch, A]`` and its log-density, both differentiable in ``loc`` and ``scale``.

        The noise comes from ``torch.randn`` of the default generator.
        """
        loc, scale = self.loc, self.scale
        if sample_shape:
            shape = self._extended_shape(sample_shape)
            loc, scale = loc.expand(shape), scale.expand(shape)
        dtype = torch.float64 if torch.float64 in (loc.dtype, scale.dtype) else torch.float32
        noise = torch.randn(loc.shape, dtype=dtype, device=loc.device)
        self._drawn = tanh_normal.sample_direct(loc, scale, noise, *self._bounds, len(self.event_shape))
        return self._drawn

    def rsample(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> Tensor:  # type: ignore[override]
        """A differentiable sample, ``[*sample_shape, *batch, A]``."""
        return self.rsample_and_log_prob(sample_shape)[0]

    def sample(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> Tensor:  # type: ignore[override]
        """A sample without gradient, ``[*sample_shape, *batch, A]``."""
        with torch.no_grad():
            return self.rsample(sample_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density of ``value`` (``[..., A]``), summed over the event dimensions.

        For the tensor that this object drew last, it is the exact value of that draw. Any other value is mapped back
        through atanh. Rounding can bring tanh to a bound; a value on or beyond a bound counts as the nearest
        representable value inside, so that the result and its gradients are finite.
        """
        if self._drawn is not None and value is self._drawn[0]:
            return self._drawn[1]
        unit = (value - self.low) / ((self.high - self.low) / 2) - 1
        edge = 1 - torch.finfo(unit.dtype).eps
        x = torch.atanh(unit.clamp(-edge, edge))
        return self._log_prob_from(x, (x - self.loc) / self.scale)

    @property
    def deterministic_sample(self) -> Tensor:
        """The image of ``loc``, the median of every component: the action for evaluation, ``[*batch, A]``."""
        return self._action(self.loc)

    @property
    def mode(self) -> Tensor:
        """The image of the normal's mode, the same as :attr:`deterministic_sample`."""
        return self.deterministic_sample

    @property
    def median(self) -> Tensor:
        """The median of every component: tanh is monotone, so it is the image of ``loc``."""
        return self.deterministic_sample
