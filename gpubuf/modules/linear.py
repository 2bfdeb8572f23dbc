"""Linear layers of one net or N nets as one batched product, and on a CPU with ReLU between them as one operation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every_module

from gpubuf.kernels._differentiable import past_functorch
from gpubuf.modules.fast_call import hooked
from gpubuf.modules.weight_norm import draw_rows

#: Bytes of an activation of the nets that are worked on at a time. The allocator gives larger memory back to the
#: system, and each call then waits for new pages: with ten nets and 8192 rows a third of the time of the products.
GROUP_BYTES = 16 << 20

#: Numbers in the activations of a layer from which on memory counts. PyTorch spends less time on each call.
MANY = 1 << 19

#: A weight of at most so many outputs is copied so that each has its inputs side by side: MKL is then twice as fast.
FEW_OUTPUTS = 16

_hooks_of_all = (
    every_module._global_forward_hooks,
    every_module._global_forward_pre_hooks,
    every_module._global_backward_hooks,
    every_module._global_backward_pre_hooks,
)
_forward_ad: Any = torch.autograd.forward_ad
_threshold_backward = torch.ops.aten.threshold_backward.grad_input

Some = Sequence[Tensor | None]


def fast_here(x: Tensor, weight: Tensor) -> bool:
    """Whether functions of our own may take the place of PyTorch's: on a CPU, in eager mode, nothing transformed."""
    return (
        x.is_cpu
        and x.dtype is weight.dtype
        and (x.dtype is torch.float32 or x.dtype is torch.float64)
        and not (
            torch.compiler.is_compiling()
            or torch._C._are_functorch_transforms_active()
            or torch.is_autocast_enabled("cpu")
            or torch._C._get_tracing_state()
            or _forward_ad._current_level >= 0
        )
    )


def is_perceptron(layers: Sequence[Any], linear: Any, inputs: Sequence[Tensor], nets: int, many: int = MANY) -> bool:
    """Whether :func:`perceptron` can take the place of ``layers`` of ``nets`` nets, and a layer has ``many`` outputs.

    The layers are linear ones of this very type with a ReLU between them, without hooks.
    """
    x, first = inputs[0], layers[0]
    if x.ndim < 2 or not x.shape[-1] or type(first) is not linear:
        return False
    if x.numel() // x.shape[-1] * first.out_features * nets < many or not fast_here(x, first.weight):
        return False
    for i, layer in enumerate(layers):
        if type(layer) is not (nn.ReLU if i % 2 else linear) or hooked(layer):
            return False
    return len(layers) % 2 == 1 and not any(_hooks_of_all)


def product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """``x @ weight + bias``: ``[N, rows, in]`` by ``[N, in, out]``, or ``[rows, in]`` by ``[in, out]``. No gradient."""
    if weight.shape[-1] <= FEW_OUTPUTS < weight.shape[-2] and weight.stride(-1) == 1:
        # With a new stride where there is one output: MKL takes it for the distance of columns.
        weight = weight.mT.contiguous().view(*weight.shape[:-2], weight.shape[-1], -1).mT
    if x.ndim == 2:
        return torch.mm(x, weight, out=out) if bias is None else torch.addmm(bias, x, weight, out=out)
    return torch.bmm(x, weight, out=out) if bias is None else torch.baddbmm(bias, x, weight, out=out)


def by_weight(x: Tensor, grad: Tensor) -> Tensor:
    """The gradient of the weight, ``x^T grad``. MKL is faster if the smaller dimension of a product comes first."""
    multiply = torch.mm if x.ndim == 2 else torch.bmm
    if grad.shape[-1] < x.shape[-1]:
        return multiply(grad.mT, x).mT
    return multiply(x.mT, grad)


def by_input(grad: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the input, ``grad weight^T``."""
    if weight.shape[-1] == 1:
        return grad * weight.mT
    return torch.mm(grad, weight.mT) if grad.ndim == 2 else torch.bmm(grad, weight.mT)


def by_layer(inputs: Sequence[Tensor], weights: Sequence[Tensor], biases: Some) -> Tensor:
    """The network in PyTorch's own operations, which have gradients of gradients."""
    x = torch.cat(list(inputs), -1)
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        x = (x.relu() if i else x) @ weight
        x = x if bias is None else x + bias
    return x


def _nets_at_a_time(rows: int, weights: Sequence[Tensor]) -> int:
    nets = weights[0].shape[0]
    widest = max([weight.shape[-1] for weight in weights[:-1]], default=1)
    return max(min(nets, GROUP_BYTES // max(rows * widest * weights[0].element_size(), 1)), 1)


def _split(tensors: Some, nets: int, size: int) -> list[list[Any]]:
    """``tensors`` of all nets, by group of ``size`` nets."""
    absent = [None] * -(-nets // size)
    return [list(group) for group in zip(*(absent if t is None else t.split(size) for t in tensors), strict=True)]


def _activations(x: Tensor, weights: Sequence[Tensor], biases: Some, out: Tensor | None = None) -> list[Tensor]:
    """What comes out of each layer, the last one the output."""
    found, last = [], len(weights) - 1
    for i in range(last):
        x = product(x, weights[i], biases[i]).relu_()
        found.append(x)
    found.append(product(x, weights[last], biases[last], out))
    return found


def _forward(rows: Tensor, weights: Sequence[Tensor], biases: Some) -> tuple[Tensor, list[Tensor]]:
    """(the output, the activations of the hidden layers, group by group)."""
    if weights[0].ndim == 2:
        *hidden, out = _activations(rows, weights, biases)
        return out, hidden
    nets, size = weights[0].shape[0], _nets_at_a_time(rows.shape[0], weights)
    if size == nets:
        *hidden, out = _activations(rows.expand(nets, -1, -1), weights, biases)
        return out, hidden
    out, hidden = rows.new_empty(nets, rows.shape[0], weights[-1].shape[-1]), []
    for own, place in zip(_split([*weights, *biases], nets, size), out.split(size), strict=True):
        x = rows.expand(len(place), -1, -1)
        hidden += _activations(x, own[: len(weights)], own[len(weights) :], place)[:-1]
    return out, hidden


class _Perceptron(torch.autograd.Function):
    """``forward(numbers of inputs and layers, leading, *inputs, *weights, *biases)``; see :func:`perceptron`."""

    @staticmethod
    def forward(ctx: Any, n_inputs: int, n_layers: int, leading: int | None, *tensors: Tensor) -> Tensor:
        inputs, weights, biases = tensors[:n_inputs], tensors[n_inputs:-n_layers], tensors[-n_layers:]
        rows = inputs[0] if n_inputs == 1 else torch.cat(inputs, -1)
        out, hidden = _forward(rows, weights, biases)
        if leading is not None:
            hidden = [each[:leading] for each in hidden[: n_layers - 1]]
        ctx.counts = n_inputs, n_layers, leading
        ctx.save_for_backward(*tensors, rows, *hidden)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        n_inputs, n_layers, leading = ctx.counts
        n = n_inputs + 2 * n_layers
        tensors, rows, hidden = ctx.saved_tensors[:n], ctx.saved_tensors[n], ctx.saved_tensors[n + 1 :]
        needed = ctx.needs_input_grad[3:]
        if torch.is_grad_enabled():
            return None, None, None, *_differentiable(tensors, needed, grad, n_inputs, n_layers)
        widths = [each.shape[-1] for each in tensors[:n_inputs]]
        weights = tensors[n_inputs:-n_layers]
        if leading is not None:
            weights, grad = [weight[:leading] for weight in weights], grad[:leading]
        batched, nets, layers = weights[0].ndim == 3, weights[0].shape[0], n_layers - 1
        size = _nets_at_a_time(rows.shape[0], weights) if batched and len(hidden) > layers else nets
        parts: Any = [(weights, grad)]
        if size < nets:
            parts = zip(_split(weights, nets, size), grad.split(size), strict=True)
        groups = []
        for k, (own, slope) in enumerate(parts):
            x = rows.expand(len(slope), -1, -1) if batched else rows
            groups.append(_gradients(x, hidden[k * layers : (k + 1) * layers], own, slope, needed, widths))
        if len(groups) == 1:
            return None, None, None, *groups[0]
        found: list[Tensor | None] = []
        for j, parts in enumerate(zip(*groups, strict=True)):
            if parts[0] is None:
                found.append(None)
            else:
                found.append(sum(parts[1:], start=parts[0]) if j < n_inputs else torch.cat(parts))
        return None, None, None, *found


def _gradients(
    x: Tensor,
    hidden: Sequence[Tensor],
    weights: Sequence[Tensor],
    grad: Tensor,
    needed: Sequence[bool],
    widths: list[int],
) -> list[Tensor | None]:
    """The gradients of inputs, weights and biases, where needed. ``grad`` is not written to."""
    n_inputs, n_layers = len(widths), len(weights)
    found: list[Tensor | None] = [None] * len(needed)
    for i in range(n_layers - 1, -1, -1):
        below = hidden[i - 1] if i else x
        if needed[n_inputs + i]:
            found[n_inputs + i] = by_weight(below, grad)
        if needed[n_inputs + n_layers + i]:
            found[n_inputs + n_layers + i] = grad.sum(-2, keepdim=grad.ndim == 3)
        if i:
            if not (any(needed[: n_inputs + i]) or any(needed[n_inputs + n_layers : n_inputs + n_layers + i])):
                return found
            grad = by_input(grad, weights[i])
            _threshold_backward(grad, below, 0, grad_input=grad)
    start = 0
    for j, width in enumerate(widths):
        if needed[j]:
            each = by_input(grad, weights[0].narrow(-2, start, width))
            found[j] = each if each.ndim == 2 else each[0] if len(each) == 1 else each.sum(0)
        start += width
    return found


def _differentiable(
    tensors: Sequence[Tensor | None], needed: Sequence[bool], grad: Tensor, n_inputs: int, n_layers: int
) -> list[Tensor | None]:
    """The gradients, with a graph of their own."""
    inputs: Any = tensors[:n_inputs]
    weights: Any = tensors[n_inputs:-n_layers]
    out = by_layer(inputs, weights, tensors[-n_layers:])
    wanted = [tensor for tensor, need in zip(tensors, needed, strict=True) if need]
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))  # type: ignore[arg-type]
    return [next(found) if need else None for need in needed]


_perceptron = past_functorch(_Perceptron)


def perceptron(inputs: Sequence[Tensor], weights: Sequence[Tensor], biases: Some, leading: int | None = None) -> Tensor:
    """Linear layers with ReLU between them, where :func:`fast_here`.

    Args:
        inputs: each ``[*batch, in_i]``, joined along the last dimension.
        weights: of the layers, ``[in, out]``, or of N nets ``[N, in, out]``.
        biases: ``[out]``, or ``[N, 1, out]``, or None.
        leading: how many of the nets have gradients, the first ones; of inputs only. None: all. At most as many as are
            worked on at a time.

    Returns:
        ``[*batch, out]``, or ``[N, *batch, out]``.
    """
    batch = inputs[0].shape[:-1]
    rows = list(inputs) if len(batch) == 1 else [x.reshape(-1, x.shape[-1]) for x in inputs]
    tensors = [*rows, *weights, *biases]
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        out = cast(Tensor, _perceptron(len(rows), len(weights), leading, *tensors))
    else:
        out, _ = _forward(rows[0] if len(rows) == 1 else torch.cat(rows, -1), weights, biases)
    return out if len(batch) == 1 else out.reshape(*out.shape[:-2], *batch, out.shape[-1])


def joined(inputs: Sequence[Tensor]) -> Tensor:
    """The inputs of a network, concatenated along the last dimension."""
    return inputs[0] if len(inputs) == 1 else torch.cat(list(inputs), -1)


def _rows(x: Tensor) -> Tensor:
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


def shared_rows(inputs: Sequence[Tensor], num_nets: int) -> Tensor:
    """Inputs that N nets share, joined, ``[N, rows, in]``; nothing is repeated in memory."""
    return _rows(joined(inputs)).expand(num_nets, -1, -1)


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
    constant = [x for x in inputs if not x.requires_grad]
    if weight.requires_grad or len(constant) in (0, len(inputs)) or not torch.is_grad_enabled():
        x = shared_rows(inputs, n)
        return torch.bmm(x, weight) if bias is None else torch.baddbmm(bias, x, weight)
    out = bias
    pieces = list(zip(inputs, weight.split([x.shape[-1] for x in inputs], 1), strict=True))
    for x, part in sorted(pieces, key=lambda piece: piece[0].requires_grad):
        rows = _rows(x).expand(n, -1, -1)
        out = torch.bmm(rows, part) if out is None else torch.baddbmm(out, rows, part)
    assert out is not None
    return out


class _Narrowing(torch.autograd.Function):
    """:func:`ensemble_product` on a CPU for few outputs: its products have the layout that is fast."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            by_input(grad, weight) if of_x else None,
            by_weight(x, grad) if of_weight else None,
            grad.sum(1, keepdim=True) if of_bias else None,
        )


_narrowing = past_functorch(_Narrowing)


def ensemble_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """One linear layer of N nets: ``[N, rows, in]`` times ``[N, in, out]``, plus ``[N, 1, out]`` or None."""
    if 2 * weight.shape[-1] <= weight.shape[-2] and fast_here(x, weight):
        if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            return cast(Tensor, _narrowing(x, weight, bias))
        if bias is None or not bias.requires_grad:
            return product(x, weight, bias)
    return torch.bmm(x, weight) if bias is None else torch.baddbmm(bias, x, weight)


class UnitLinear(nn.Linear):
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
        return ensemble_product(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        text = f"num_nets={self.num_nets}, in_features={self.in_features}, out_features={self.out_features}"
        return f"{text}, bias={self.bias is not None}" + (", unit_rows=True" if self.unit_rows else "")


def make_linear(
    num_nets: int | None, in_features: int, out_features: int, *, bias: bool, unit_rows: bool, **new: object
) -> nn.Module:
    """A linear layer of one net (None), or of ``num_nets`` nets; ``new`` are device and dtype."""
    if num_nets is not None:
        return EnsembleLinear(num_nets, in_features, out_features, bias=bias, unit_rows=unit_rows, **new)  # type: ignore[arg-type]
    kind = UnitLinear if unit_rows else nn.Linear
    return kind(in_features, out_features, bias=bias, **new)
