"""Multilayer perceptrons: one network, and an ensemble of them that runs as one batched product per layer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gpubuf.modules.linear import (
    EnsembleLinear,
    ensemble_input_layer,
    flat_rows,
    joined,
    make_linear,
    net_by_net,
    runs_net_by_net,
)
from gpubuf.modules.norms import NormName, check_norm, make_norm
from gpubuf.modules.weight_norm import normalize_weights

__all__ = ["MLP", "EnsembleLinear", "EnsembleMLP", "ensemble_input_layer"]


def _activation(factory: Callable[[], nn.Module]) -> nn.Module:
    """An activation after a layer. A ReLU works in place, since nobody else sees the output of that layer."""
    module = factory()
    if type(module) is nn.ReLU:
        module.inplace = True
    return module


class ResidualBlock(nn.Module):
    """``x + layers(x)``.

    Args:
        layers: modules that keep the shape of their input, applied in turn.
    """

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.layers(x)
        return out


@dataclass(frozen=True)
class Layers:
    """How the layers of one network (``num_nets=None``), or of an ensemble, follow each other.

    The arguments are those of :class:`MLP`.
    """

    num_nets: int | None
    activation: Callable[[], nn.Module]
    norm: NormName | None = None
    norm_place: Literal["after", "before"] = "after"
    input_norm: NormName | None = None
    head_norm: NormName | None = None
    norm_kwargs: dict[str, Any] | None = None
    dropout: float = 0.0
    num_blocks: int = 0
    expansion: int = 4
    bias: bool = True
    unit_rows: bool = False
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_norm(norm=self.norm, input_norm=self.input_norm, head_norm=self.head_norm)
        if self.norm_place not in ("after", "before"):
            raise ValueError(f"norm_place must be 'after' or 'before', got {self.norm_place!r}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        if self.num_blocks < 0 or self.expansion < 1:
            raise ValueError(
                f"num_blocks must not be negative and expansion not less than 1, got {self.num_blocks} and "
                f"{self.expansion}"
            )

    def _linear(self, fan_in: int, fan_out: int, bias: bool) -> nn.Module:
        new = {"device": self.device, "dtype": self.dtype}
        return make_linear(self.num_nets, fan_in, fan_out, bias=bias, unit_rows=self.unit_rows, **new)

    def _norm(
        self, name: NormName | None, width: int, activation: Callable[[], nn.Module] | None = None
    ) -> list[nn.Module]:
        if name is None:
            return [] if activation is None else [_activation(activation)]
        after = None if activation is None else functools.partial(_activation, activation)
        options = self.norm_kwargs or {}
        if name != self.norm:
            shared = {"momentum", "renorm_warmup", "r_max", "d_max"} if name.startswith("batch") else set()
            options = {key: value for key, value in options.items() if key in shared}
        new = {"device": self.device, "dtype": self.dtype, "unit_rows": self.unit_rows}
        return make_norm(name, self.num_nets, width, after, **new, **options)

    def _hidden(self, fan_in: int, fan_out: int, norm_first: bool = True) -> list[nn.Module]:
        """A linear layer with norm, dropout and activation."""
        before = self.norm if self.norm_place == "before" and norm_first else None
        after = self.norm if self.norm_place == "after" else None
        dropout = [nn.Dropout(self.dropout)] if self.dropout else []
        linear = self._linear(fan_in, fan_out, self.bias)
        return [*self._norm(before, fan_in), linear, *dropout, *self._norm(after, fan_out, self.activation)]

    def _block(self, width: int) -> ResidualBlock:
        inner = self.expansion * width
        first = self._hidden(width, inner)
        if self.norm_place == "after":
            return ResidualBlock(*first, *self._hidden(inner, width))
        return ResidualBlock(*first, *self._norm(self.norm, inner), self._linear(inner, width, self.bias))

    def build(self, in_features: int, out_features: int, num_cells: Sequence[int]) -> list[nn.Module]:
        """The modules from the input to the output.

        Raises:
            ValueError: residual blocks without a layer before them, which would make their width.
        """
        if self.num_blocks and not num_cells:
            raise ValueError("residual blocks have the width of the last of num_cells, which is empty")
        widths = [in_features, *num_cells]
        layers = self._norm(self.input_norm, in_features)
        hidden = len(num_cells) - (1 if self.num_blocks else 0)
        for i in range(hidden):
            layers += self._hidden(widths[i], widths[i + 1], norm_first=not (i == 0 and layers))
        if self.num_blocks:
            if self.norm_place == "before" and not (hidden == 0 and layers):
                layers += self._norm(self.norm, widths[hidden])
            layers.append(self._linear(widths[hidden], widths[-1], self.bias))
            layers += [self._block(widths[-1]) for _ in range(self.num_blocks)]
        head_norm = self.head_norm
        if head_norm is None and self.norm_place == "before" and (num_cells or not layers):
            head_norm = self.norm
        layers += self._norm(head_norm, widths[-1])
        return [*layers, self._linear(widths[-1], out_features, True)]


class MLP(nn.Sequential):
    """Linear layers with an activation between them; none after the last.

    ``forward(*inputs)`` concatenates its inputs, each ``[*batch, in_i]`` with the ``in_i`` adding up to
    ``in_features``, along the last dimension and returns ``[*batch, out_features]``.

    A hidden layer is linear, dropout, norm, activation, in this order (that of DroQ, Hiraoka et al., arXiv 2110.02034).
    With ``norm_place="before"`` the norm comes before each linear layer, the first and the last ones too (that of
    CrossQ, Bhatt et al., arXiv 1902.05605).

    With ``num_blocks``, the last of ``num_cells`` is the width of as many residual blocks. A linear layer leads to
    them, without activation. A block is ``x + hidden(hidden(x))``, and the first of its hidden layers is ``expansion``
    times as wide; with ``norm_place="before"`` it is ``x + linear(norm(hidden(x)))``.

    Args:
        in_features: width of the (concatenated) input.
        out_features: width of the output.
        num_cells: widths of the hidden layers; empty for a single linear layer.
        activation: factory of the activation modules.
        norm: norm of the hidden layers, "layer", "rms", "batch", "batch_renorm" (see :mod:`gpubuf.modules.norms`), or
            None.
        norm_place: "after" the linear layer and before the activation, or "before" the linear layer.
        input_norm: norm of the input, as ``norm``. With ``norm_place="before"`` it takes the place of the first norm.
        head_norm: norm before the last layer, as ``norm``.
        norm_kwargs: further arguments of the norms called ``norm``, such as ``eps``. A batch norm at the input or
            before the head takes ``momentum``, ``renorm_warmup``, ``r_max`` and ``d_max`` from here, too.
        dropout: probability that an output of a hidden linear layer is dropped.
        num_blocks: number of residual blocks.
        expansion: width within a residual block, as a multiple of its own.
        bias: give the hidden layers a bias. The last layer always has one.
        unit_rows: the rows of all weights have unit length and begin orthogonal, and scale and shift of a norm together
            have the length sqrt(width): see :meth:`normalize_weights`.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: an option is none of those above, or there are residual blocks, but no ``num_cells``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_cells: Sequence[int] = (256, 256),
        activation: Callable[[], nn.Module] = nn.ReLU,
        **options: Any,
    ) -> None:
        layers = Layers(None, activation, **options)
        super().__init__(*layers.build(in_features, out_features, num_cells))

    def forward(self, *inputs: Tensor) -> Tensor:
        # Asked here already: it is called for every action.
        output: Tensor = super().forward(inputs[0] if len(inputs) == 1 else joined(inputs))  # type: ignore[no-untyped-call]
        return output

    def normalize_weights(self) -> None:
        """Bring the weights to their length after a step of the optimiser, in place; see ``unit_rows``. No sync."""
        normalize_weights(self)


class EnsembleMLP(nn.Module):
    """``num_nets`` independent multilayer perceptrons that run together, one ``torch.baddbmm`` per layer.

    ``forward(*inputs)`` concatenates its inputs along the last dimension, ``[*batch, in_features]`` in all, gives
    the same to every net and returns ``[num_nets, *batch, out_features]``. With ``shared_input=False`` each net
    has its own input, ``[num_nets, *batch, in_features]``. Every net has its own norms, statistics and dropout.

    :class:`~gpubuf.objectives.SACLoss` recognises such a critic by its attribute ``ensemble_size``: any module that
    has one, and returns its nets along a new first dimension, is run as it is, without ``torch.vmap``.

    Args:
        num_nets: number of nets.
        in_features: width of the (concatenated) input.
        out_features: width of the output; the number of atoms of categorical critics.
        num_cells: widths of the hidden layers.
        activation: factory of the activation modules, elementwise.
        shared_input: whether all nets see the same input.
        **options: the keyword arguments of :class:`MLP`, from ``norm`` to ``dtype``.

    Raises:
        ValueError: there is no net, or as :class:`MLP`.
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
        **options: Any,
    ) -> None:
        super().__init__()
        if num_nets < 1:
            raise ValueError(f"an ensemble needs at least one net, got num_nets={num_nets}")
        self.ensemble_size = num_nets
        self.shared_input = shared_input
        layers = Layers(num_nets, activation, **options)
        self.layers = nn.Sequential(*layers.build(in_features, out_features, num_cells))

    def forward(self, *inputs: Tensor) -> Tensor:
        if self.shared_input:
            batch = inputs[0].shape[:-1]
            layers: list[Any] = list(self.layers._modules.values())
            first, *others = layers
            if runs_net_by_net(layers, inputs):
                x, others = net_by_net(layers, inputs), []
            elif isinstance(first, EnsembleLinear):
                x = ensemble_input_layer(inputs, first.weight, first.bias)
            else:
                x = first(flat_rows(joined(inputs)).expand(self.ensemble_size, -1, -1))
            for layer in others:
                x = layer(x)
        else:
            x = joined(inputs)
            if x.ndim < 2 or x.shape[0] != self.ensemble_size:
                raise ValueError(
                    f"with shared_input=False the first dimension of the input is the net: expected "
                    f"[{self.ensemble_size}, *batch, in_features], got {list(x.shape)}"
                )
            batch = x.shape[1:-1]
            x = self.layers(x if x.ndim == 3 else x.reshape(self.ensemble_size, -1, x.shape[-1]))
        return x if len(batch) == 1 else x.reshape(self.ensemble_size, *batch, -1)

    def normalize_weights(self) -> None:
        """Bring the weights to their length after a step of the optimiser, in place; see ``unit_rows``. No sync."""
        normalize_weights(self)
