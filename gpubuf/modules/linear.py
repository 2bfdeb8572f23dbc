"""Linear layers of one net, and of N nets as one batched product, or net by net where that is faster."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from itertools import repeat
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as every_module

from gpubuf.kernels._operations import past_functorch
from gpubuf.modules.fast_call import hooked
from gpubuf.modules.weight_norm import draw_rows

#: Numbers in the activations of a layer of N nets from which on, on a CPU, these run one after the other: what one net
#: reads and writes stays in the cache, and the allocator keeps its memory.
MANY = 1 << 19

#: Multiplications of a product from which on oneDNN gains more than calls for single nets cost.
ONEDNN_WORK = 1 << 23

_hooks_of_all = (
    every_module._global_forward_hooks,
    every_module._global_forward_pre_hooks,
    every_module._global_backward_hooks,
    every_module._global_backward_pre_hooks,
)
_forward_ad: Any = torch.autograd.forward_ad
_threshold_backward = torch.ops.aten.threshold_backward


def fast_here(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN's product may take the place of PyTorch's: on a CPU, in eager mode, nothing transformed."""
    return (
        x.is_cpu
        and x.dtype is weight.dtype
        and not (
            torch.compiler.is_compiling()
            or torch._C._are_functorch_transforms_active()
            or torch.is_autocast_enabled("cpu")
            or torch._C._get_tracing_state()
            or _forward_ad._current_level >= 0
        )
    )


def _amd_family() -> int:
    """The family of an AMD processor: 25 for Zen 3 and 4, 26 for Zen 5. 0 for others, and where Linux doesn't say."""
    try:
        found = re.search(r"AuthenticAMD\ncpu family\s*: (\d+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        return 0
    return int(found[1]) if found else 0


@functools.cache
def _onednn() -> Any:
    """oneDNN's linear layer where its products are faster than MKL's, else None.

    PyTorch's float32 products on x86 are MKL's, which takes its path for AVX2 on processors that are not Intel's. On
    those whose units have 512 bits, AMD's from Zen 5 on, it reaches half the speed of oneDNN. Decided by the processor,
    not by a measurement that might come out otherwise the next time: a run has the same bits as the one before.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or _amd_family() < 26:
        return None
    return getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)


def worth_onednn(rows: int, inner: int, columns: int) -> bool:
    """Whether oneDNN multiplies float32 ``[rows, inner]`` by ``[inner, columns]``: its calls take longer to begin."""
    large = rows * inner * columns >= ONEDNN_WORK and min(rows, inner, columns) > 1
    # Compiled code has products of its own, and can't look at what is kept.
    return large and not torch.compiler.is_compiling() and _onednn() is not None


def multiplied(x: Tensor, y: Tensor, bias: Tensor | None = None, relu: bool = False) -> Tensor:
    """``x @ y + bias`` of matrices, or of N of them side by side; with ``relu`` its positive part. No gradient."""
    if x.dtype is torch.float32 and worth_onednn(x.shape[-2], x.shape[-1], y.shape[-1]):
        run, what = _onednn(), "relu" if relu else "none"
        if x.ndim == 2:
            return cast(Tensor, run(x, y.mT, bias, what, [], ""))
        biases = repeat(None) if bias is None else bias.squeeze(1)
        return torch.stack([run(a, b, c, what, [], "") for a, b, c in zip(x, y.mT, biases, strict=False)])
    if x.ndim == 2:
        out = torch.mm(x, y) if bias is None else torch.addmm(bias, x, y)
    else:
        out = torch.bmm(x, y) if bias is None else torch.baddbmm(bias, x, y)
    return out.relu_() if relu else out


def joined(inputs: Sequence[Tensor]) -> Tensor:
    """The inputs of a network, concatenated along the last dimension."""
    return inputs[0] if len(inputs) == 1 else torch.cat(tuple(inputs), -1)


def flat_rows(x: Tensor) -> Tensor:
    """``[*batch, features]`` as a matrix."""
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


def ensemble_input_layer(inputs: Sequence[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    """The first layer of N nets on inputs that they share, joined along the last dimension: ``[N, rows, out]``.

    If some inputs need gradients and the weights do not (an actor is trained through its critics), the product is split
    by input. So no gradient is computed for the inputs that need none.

    Args:
        inputs: each ``[*batch, in_i]``; ``rows`` is the size of the batch.
        weight: ``[N, in, out]``.
        bias: ``[N, 1, out]`` or None.
    """
    n = weight.shape[0]
    mixed = False
    for x in inputs:
        mixed = mixed or x.requires_grad is not inputs[0].requires_grad
    if not mixed or weight.requires_grad or not torch.is_grad_enabled():
        x = inputs[0] if len(inputs) == 1 else torch.cat(tuple(inputs), -1)
        return linear_product((x if x.ndim == 2 else flat_rows(x)).expand(n, -1, -1), weight, bias)
    out, parts = bias, weight.split([x.shape[-1] for x in inputs], 1)
    for with_gradient in (False, True):
        for x, part in zip(inputs, parts, strict=True):
            if x.requires_grad is with_gradient:
                rows = (x if x.ndim == 2 else flat_rows(x)).expand(n, -1, -1)
                out = torch.bmm(rows, part) if out is None else torch.baddbmm(out, rows, part)
    assert out is not None
    return out


class _Product(torch.autograd.Function):
    """:func:`linear_product` by oneDNN, whose products have no gradient of their own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
        out = multiplied(x, weight, bias, relu)
        ctx.save_for_backward(x, weight, out if relu else None)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight, positive = ctx.saved_tensors
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        if positive is not None:
            grad = _threshold_backward(grad, positive, 0)
        multiply = torch.matmul if torch.is_grad_enabled() else multiplied
        wider = weight.shape[-1] < weight.shape[-2]
        return (
            # Of one output the product is elementwise. MKL is faster if the smaller dimension comes first.
            (grad * weight.mT if weight.shape[-1] == 1 else multiply(grad, weight.mT)) if of_x else None,
            (multiply(grad.mT, x).mT if wider else multiply(x.mT, grad)) if of_weight else None,
            grad.sum(-2, keepdim=grad.ndim == 3) if of_bias else None,
            None,
        )


_product = past_functorch(_Product)


def linear_product(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool = False) -> Tensor:
    """One linear layer: ``[rows, in]`` times ``[in, out]``, plus ``[out]`` or None.

    Or one of N nets: ``[N, rows, in]`` times ``[N, in, out]``, plus ``[N, 1, out]`` or None. With ``relu`` its positive
    part.
    """
    # The cheapest question first: it is asked of every layer.
    large = x.dtype is torch.float32 and x.numel() * weight.shape[-1] >= ONEDNN_WORK
    if large and worth_onednn(x.shape[-2], x.shape[-1], weight.shape[-1]) and fast_here(x, weight):
        if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            return cast(Tensor, _product(x, weight, bias, relu))
        if bias is None or not bias.requires_grad:
            return multiplied(x, weight, bias, relu)
    if x.ndim == 2:
        out = functional.linear(x, weight.t(), bias)
    else:
        out = torch.bmm(x, weight) if bias is None else torch.baddbmm(bias, x, weight)
    return out.relu_() if relu else out


class Linear(nn.Linear):
    """``nn.Linear`` by the products that are fast on this machine."""

    def forward(self, input: Tensor) -> Tensor:
        """``[*batch, in_features] -> [*batch, out_features]``."""
        small = not input.is_cpu or input.ndim < 2 or input.numel() * self.out_features < ONEDNN_WORK
        # A trace has tensors for sizes.
        if (
            torch._C._get_tracing_state()
            or small
            or not worth_onednn(input.numel() // self.in_features, self.in_features, self.out_features)
        ):
            return functional.linear(input, self.weight, self.bias)
        out = linear_product(flat_rows(input), self.weight.t(), self.bias)
        return out if input.ndim == 2 else out.reshape(*input.shape[:-1], -1)


PLAIN_LINEAR = (nn.Linear, Linear)
"""Layers that are ``x @ weight^T + bias`` and nothing else."""


class UnitLinear(Linear):
    """``nn.Linear`` whose weight has rows of unit length: see :mod:`gpubuf.modules.weight_norm`.

    The rows start orthogonal (see :func:`~gpubuf.modules.weight_norm.draw_rows`), and the bias at 0.
    """

    unit_rows = True
    in_dim = -1
    row_norm = 1.0

    def reset_parameters(self) -> None:
        """Draw the directions of all rows anew, and set the bias to 0."""
        draw_rows(self.weight, -1)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class EnsembleLinear(nn.Module):
    """``num_nets`` independent linear layers as one ``torch.baddbmm``.

    ``[num_nets, B, in_features] -> [num_nets, B, out_features]``. Every net is initialised as ``nn.Linear`` is, or with
    ``unit_rows`` as :class:`UnitLinear`.

    Args:
        num_nets: number of nets.
        in_features: width of the input.
        out_features: width of the output.
        bias: add one.
        unit_rows: the weights of every output have unit length, see :mod:`gpubuf.modules.weight_norm`.
        device: of the parameters.
        dtype: of the parameters.
    """

    in_dim = -2
    row_norm = 1.0

    def __init__(
        self,
        num_nets: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        unit_rows: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_nets, self.in_features, self.out_features = num_nets, in_features, out_features
        self.unit_rows = unit_rows
        weight = torch.empty(num_nets, in_features, out_features, device=device, dtype=dtype)
        if out_features == 1:
            # The same elements, with a last stride of in_features instead of 1. MKL takes that stride for the leading
            # dimension of the matrix, and is seven times slower with 1.
            weight = weight.view(num_nets, 1, in_features).transpose(1, 2)
        self.weight = nn.Parameter(weight)
        shape = (num_nets, 1, out_features)
        self.bias = nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters anew: uniform in +-1/sqrt(in_features) as ``nn.Linear``, or as :class:`UnitLinear`."""
        if self.unit_rows:
            draw_rows(self.weight, -2)
            if self.bias is not None:
                nn.init.zeros_(self.bias)
            return
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None or x.numel() * self.out_features >= ONEDNN_WORK:
            return linear_product(x, self.weight, self.bias)
        return torch.baddbmm(self.bias, x, self.weight)

    def extra_repr(self) -> str:
        text = f"num_nets={self.num_nets}, in_features={self.in_features}, out_features={self.out_features}"
        return f"{text}, bias={self.bias is not None}" + (", unit_rows=True" if self.unit_rows else "")


def runs_net_by_net(layers: Sequence[Any], inputs: Sequence[Tensor], many: int = MANY) -> bool:
    """Whether :func:`net_by_net` can take the place of the layers of an ensemble, and one has ``many`` outputs."""
    x, first = inputs[0], layers[0]
    if not x.is_cpu or not x.shape[-1] or type(first) is not EnsembleLinear or torch.compiler.is_compiling():
        return False
    rows, width = x.numel() // x.shape[-1], first.out_features
    if rows * width * first.num_nets < many:
        large = x.dtype is torch.float32 and len(layers) > 1 and rows * width * width >= ONEDNN_WORK
        if not large or not worth_onednn(rows, width, width):
            return False
    if any(_hooks_of_all):
        return False
    return all(
        type(part) is (nn.ReLU if i % 2 else EnsembleLinear) and not hooked(part) for i, part in enumerate(layers)
    )


def net_by_net(layers: Sequence[Any], inputs: Sequence[Tensor], leading: int | None = None) -> Tensor:
    """:class:`EnsembleLinear` layers with ReLU between them on inputs that all nets share: ``[N, rows, out]``.

    Args:
        layers: of all nets.
        inputs: each ``[*batch, in_i]``, joined along the last dimension.
        leading: how many of the nets have gradients, the first ones; None: all.
    """
    x, found = flat_rows(joined(inputs)), []
    parameters = [
        (part.weight.unbind(), repeat(None) if part.bias is None else part.bias.squeeze(1).unbind())
        for part in layers[::2]
    ]
    nets = zip(*(zip(*each, strict=False) for each in parameters), strict=True)
    for net, own in enumerate(nets):
        with torch.set_grad_enabled(torch.is_grad_enabled() and (leading is None or net < leading)):
            y = x
            for i, (weight, bias) in enumerate(own):
                y = linear_product(y, weight, bias, relu=i < len(parameters) - 1)
        found.append(y)
    return torch.stack(found)


def make_linear(
    num_nets: int | None, in_features: int, out_features: int, *, bias: bool, unit_rows: bool, **new: object
) -> nn.Module:
    """A linear layer of one net (None), or of ``num_nets`` nets; ``new`` are device and dtype."""
    if num_nets is not None:
        return EnsembleLinear(num_nets, in_features, out_features, bias=bias, unit_rows=unit_rows, **new)  # type: ignore[arg-type]
    kind = UnitLinear if unit_rows else Linear
    return kind(in_features, out_features, bias=bias, **new)
