"""Multilayer perceptrons: one network, and an ensemble of them that runs as one batched product per layer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


def _joined(inputs: Sequence[Tensor]) -> Tensor:
    return inputs[0] if len(inputs) == 1 else torch.cat(list(inputs), -1)


def _rows(x: Tensor) -> Tensor:
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
    constant = [x for x in inputs if not x.requires_grad]
    if weight.requires_grad or len(constant) in (0, len(inputs)) or not torch.is_grad_enabled():
        x = _rows(_joined(inputs)).expand(n, -1, -1)
        return torch.bmm(x, weight) if bias is None else torch.baddbmm(bias, x, weight)
    out = bias
    pieces = list(zip(inputs, weight.split([x.shape[-1] for x in inputs], 1), strict=True))
    for x, part in sorted(pieces, key=lambda piece: piece[0].requires_grad):
        rows = _rows(x).expand(n, -1, -1)
        out = torch.bmm(rows, part) if out is None else torch.baddbmm(out, rows, part)
    assert out is not None
    return out


def _activation(factory: Callable[[], nn.Module]) -> nn.Module:
    """An activation after a layer. A ReLU works in place, since nobody else sees the output of that layer."""
    module = factory()
    if type(module) is nn.ReLU:
        module.inplace = True
    return module


class MLP(nn.Sequential):
    """Linear layers with an activation between them; none after the last.

    ``forward(*inputs)`` concatenates its inputs, each ``[*batch, in_i]`` with the ``in_i`` adding up to
    ``in_features``, along the last dimension and returns ``[*batch, out_features]``.

    Args:
        in_features: width of the (concatenated) input.
        out_features: width of the output.
        num_cells: widths of the hidden layers; empty for a single linear layer.
        activation: factory of the activation modules.
        device: of the parameters.
        dtype: of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_cells: Sequence[int] = (256, 256),
        activation: Callable[[], nn.Module] = nn.ReLU,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes = [in_features, *num_cells, out_features]
        layers: list[nn.Module] = []
        for fan_in, fan_out in itertools.pairwise(sizes):
            layers += [nn.Linear(fan_in, fan_out, device=device, dtype=dtype), _activation(activation)]
        super().__init__(*layers[:-1])

    def forward(self, *inputs: Tensor) -> Tensor:
        output: Tensor = super().forward(_joined(inputs))  # type: ignore[no-untyped-call]
        return output


class EnsembleLinear(nn.Module):
    """``num_nets`` independent linear layers as one ``torch.baddbmm``.

    ``[num_nets, B, in_features] -> [num_nets, B, out_features]``. Every net is initialised as ``nn.Linear`` is.
    """

    def __init__(
        self,
        num_nets: int,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_nets, self.in_features, self.out_features = num_nets, in_features, out_features
        weight = torch.empty(num_nets, in_features, out_features, device=device, dtype=dtype)
        if out_features == 1:
            # The same elements, with a last stride of in_features instead of 1. MKL takes that stride for the leading
            # dimension of the matrix, and is seven times slower with 1.
            weight = weight.view(num_nets, 1, in_features).transpose(1, 2)
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.empty(num_nets, 1, out_features, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters anew, uniform in +-1/sqrt(in_features), as ``nn.Linear`` does."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, x, self.weight)

    def extra_repr(self) -> str:
        return f"num_nets={self.num_nets}, in_features={self.in_features}, out_features={self.out_features}"


class EnsembleMLP(nn.Module):
    """``num_nets`` independent multilayer perceptrons that run together, one ``torch.baddbmm`` per layer.

    ``forward(*inputs)`` concatenates its inputs along the last dimension, ``[*batch, in_features]`` in all, gives
    the same to every net and returns ``[num_nets, *batch, out_features]``. With ``shared_input=False`` each net
    has its own input, ``[num_nets, *batch, in_features]``.

    :class:`~gpubuf.objectives.SACLoss` recognises such a critic by its attribute ``ensemble_size``: any module that
    has one, and returns its nets along a new first dimension, is run as it is, without ``torch.vmap``.

    Args:
        num_nets: number of nets.
        in_features: width of the (concatenated) input.
        out_features: width of the output.
        num_cells: widths of the hidden layers.
        activation: factory of the activation modules, elementwise.
        shared_input: whether all nets see the same input.
        device: of the parameters.
        dtype: of the parameters.
    """

    def __init__(
        self,
        num_nets: int,
        in_features: int,
        out_features: int,
        num_cells: Sequence[int] = (256, 256),
        activation: Callable[[], nn.Module] = nn.ReLU,
        *,
        shared_input: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_nets < 1:
            raise ValueError(f"an ensemble needs at least one net, got num_nets={num_nets}")
        self.ensemble_size = num_nets
        self.shared_input = shared_input
        sizes = [in_features, *num_cells, out_features]
        layers: list[nn.Module] = []
        for fan_in, fan_out in itertools.pairwise(sizes):
            layers += [EnsembleLinear(num_nets, fan_in, fan_out, device=device, dtype=dtype), _activation(activation)]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, *inputs: Tensor) -> Tensor:
        if self.shared_input:
            batch = inputs[0].shape[:-1]
            first, *others = self.layers
            assert isinstance(first, EnsembleLinear)
            x = ensemble_input_layer(inputs, first.weight, first.bias)
            for layer in others:
                x = layer(x)
        else:
            x = _joined(inputs)
            if x.ndim < 2 or x.shape[0] != self.ensemble_size:
                raise ValueError(
                    f"with shared_input=False the first dimension of the input is the net: expected "
                    f"[{self.ensemble_size}, *batch, in_features], got {list(x.shape)}"
                )
            batch = x.shape[1:-1]
            x = self.layers(x if x.ndim == 3 else x.reshape(self.ensemble_size, -1, x.shape[-1]))
        return x if len(batch) == 1 else x.reshape(self.ensemble_size, *batch, -1)
