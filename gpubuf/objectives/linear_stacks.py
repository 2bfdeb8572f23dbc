"""Runs stacked networks of linear layers and activations with one ``torch.baddbmm`` per layer, without vmap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gpubuf.modules.linear import ensemble_input_layer, ensemble_product
from gpubuf.modules.mlp import MLP
from gpubuf.modules.plain import hooked, is_plain

_ELEMENTWISE = (
    nn.CELU,
    nn.ELU,
    nn.GELU,
    nn.Hardswish,
    nn.Hardtanh,
    nn.Identity,
    nn.LeakyReLU,
    nn.Mish,
    nn.ReLU,
    nn.ReLU6,
    nn.SELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Softsign,
    nn.Tanh,
)


@dataclass(frozen=True)
class Linear:
    """The positions of a linear layer's parameters in the list of stacked tensors."""

    weight: int
    bias: int | None


@dataclass(frozen=True)
class LinearStack:
    """Layers of N networks, a linear one first, applied in order to inputs that the networks share."""

    layers: tuple[Linear | nn.Module, ...]

    def __call__(self, tensors: Sequence[Tensor], inputs: Sequence[Tensor]) -> Tensor:
        """``[N, *batch, out]`` of inputs ``[*batch, in_i]``, joined along the last dimension.

        Args:
            tensors: stacked parameters, weights ``[N, out, in]`` and biases ``[N, out]``.
            inputs: as above.
        """
        x: Tensor | None = None
        for layer in self.layers:
            if not isinstance(layer, Linear):
                x = layer(x)
                continue
            weight = tensors[layer.weight].transpose(1, 2)
            bias = None if layer.bias is None else tensors[layer.bias].unsqueeze(1)
            x = ensemble_input_layer(inputs, weight, bias) if x is None else ensemble_product(x, weight, bias)
        assert x is not None
        batch = inputs[0].shape[:-1]
        return x if len(batch) == 1 else x.reshape(x.shape[0], *batch, -1)


def linear_stack(network: Any, where: Sequence[tuple[str, ...]]) -> LinearStack | None:
    """``network`` as a :class:`LinearStack` over the parameters at ``where``; None if it is anything more.

    It must be a plain TensorDictModule with one output around an ``nn.Sequential`` (nested ones too) or an
    :class:`~gpubuf.modules.MLP` of ``nn.Linear`` layers and elementwise activations, without hooks; of these very
    types, since a subclass may do something else.
    """
    if not is_plain(network) or any(map(hooked, network.modules())):
        return None
    core = network.module
    if type(core) is not MLP and (type(core) is not nn.Sequential or len(network.in_keys) != 1):
        return None
    index = {path: i for i, path in enumerate(where)}
    layers: list[Linear | nn.Module] = []
    linear: set[int] = set()
    # An activation may stand in several places.
    for name, part in network.named_modules(remove_duplicate=False):
        if part is network or part is core or type(part) is nn.Sequential:
            continue
        path = tuple(name.split("."))
        if type(part) is nn.Linear and id(part) not in linear:
            linear.add(id(part))
            layers.append(Linear(index[(*path, "weight")], index.get((*path, "bias"))))
        elif type(part) in _ELEMENTWISE:
            layers.append(part)
        else:
            return None
    return LinearStack(tuple(layers)) if layers and isinstance(layers[0], Linear) else None
