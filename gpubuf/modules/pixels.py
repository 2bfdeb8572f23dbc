"""Networks that see images: the convolutions of DQN, MinAtar and DrQ-v2, and the makers of value networks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from tensordict.utils import NestedKey
from torch import Tensor, nn

from gpubuf.modules.mlp import MLP

#: (channels, kernel, stride) of each convolution, by name, and what is subtracted of pixels in [0, 1].
ENCODERS: dict[str, tuple[Sequence[tuple[int, int, int]], float]] = {
    # Mnih et al., Nature 518, 2015; the same in CleanRL's dqn_atari.py.
    "nature": (((32, 8, 4), (64, 4, 2), (64, 3, 1)), 0.0),
    # Young and Tian, arXiv 1903.03176, for images of 10x10.
    "minatar": (((16, 3, 1),), 0.0),
    # Yarats et al., arXiv 2107.09645, drqv2.py.
    "drq": (((32, 3, 2), (32, 3, 1), (32, 3, 1), (32, 3, 1)), 0.5),
}


class PixelEncoder(nn.Module):
    """Convolutions with ReLU: images ``[*batch, C, H, W]`` to features ``[*batch, features]``.

    Bytes are divided by 255; floats are taken as they are, in [0, 1].

    Args:
        shape: of an image, C, H, W.
        layers: "nature", "minatar" or "drq" (:data:`ENCODERS`), or (channels, kernel, stride) of each convolution.
        centre: what is subtracted of pixels in [0, 1]; None: 0.5 for "drq", else 0.
        device: of the parameters.
        dtype: of the parameters.

    Attributes:
        shape: as given.
        features: numbers in the output.

    Raises:
        ValueError: there is no such name; the shape has other than three dimensions, or is too small for the kernels.

    "drq" begins orthogonal, with the gain of ReLU and biases of 0, as in its program; others as ``nn.Conv2d`` does.
    """

    def __init__(
        self,
        shape: Sequence[int],
        layers: str | Sequence[tuple[int, int, int]] = "nature",
        *,
        centre: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if isinstance(layers, str) and layers not in ENCODERS:
            raise ValueError(f"layers must be one of {list(ENCODERS)}, or the layers themselves, got {layers!r}")
        if len(shape) != 3:
            raise ValueError(f"an image has the shape [C, H, W], got {list(shape)}")
        chosen, usual = ENCODERS[layers] if isinstance(layers, str) else (layers, 0.0)
        self.shape, self.centre = tuple(shape), usual if centre is None else centre
        width, *sizes = self.shape
        parts: list[nn.Module] = []
        for channels, kernel, stride in chosen:
            if min(sizes) < kernel:
                raise ValueError(f"images of {list(shape)} are too small for the kernels of {list(chosen)}")
            parts += [nn.Conv2d(width, channels, kernel, stride, device=device, dtype=dtype), nn.ReLU(inplace=True)]
            width, sizes = channels, [(size - kernel) // stride + 1 for size in sizes]
        self.layers, self.features = nn.Sequential(*parts), width * math.prod(sizes)
        if layers == "drq":
            for part in parts[::2]:
                assert isinstance(part, nn.Conv2d)
                nn.init.orthogonal_(part.weight, nn.init.calculate_gain("relu"))
                nn.init.zeros_(part.bias)  # type: ignore[arg-type]

    def forward(self, image: Tensor) -> Tensor:
        batch = image.shape[:-3]
        like = next(self.layers.parameters()).dtype
        x = image.to(like).mul(1 / 255) if image.dtype is torch.uint8 else image.to(like)
        x = self.layers((x - self.centre if self.centre else x).reshape(-1, *self.shape))
        out: Tensor = x.reshape(*batch, self.features)
        return out


class Encoded(nn.Module):
    """A network that sees images through an encoder: ``network(trunk(encoder(image)), *others)``.

    The trunk, a linear layer with layer norm and tanh, belongs to this network alone. That is how DrQ-v2 (Yarats et
    al., arXiv 2107.09645) shares one encoder between actor and critics.

    Args:
        encoder: of the images, the first input.
        width: of the trunk's output.
        network: a function of that and the other inputs.
        learns: whether losses of this network train the encoder.
    """

    def __init__(self, encoder: PixelEncoder, width: int, network: nn.Module, learns: bool = True) -> None:
        super().__init__()
        like: Any = next(encoder.parameters())
        new = {"device": like.device, "dtype": like.dtype}
        trunk = (nn.Linear(encoder.features, width, **new), nn.LayerNorm(width, **new), nn.Tanh())
        self.encoder, self.trunk, self.network, self._learns = encoder, nn.Sequential(*trunk), network, learns

    def forward(self, image: Tensor, *others: Tensor) -> Any:
        x = self.encoder(image)
        return self.network(self.trunk(x if self._learns else x.detach()), *others)


class Dueling(nn.Module):
    """Values of actions as the value of the state, and how much better than the mean each is.

    ``Q = V + A - mean A`` (Wang et al., arXiv 1511.06581).

    Args:
        value: features ``[*batch, F]`` to ``[*batch, 1]``.
        advantage: features to ``[*batch, A]``.
    """

    def __init__(self, value: nn.Module, advantage: nn.Module) -> None:
        super().__init__()
        self.value, self.advantage = value, advantage

    def forward(self, x: Tensor) -> Tensor:
        advantage = self.advantage(x)
        out: Tensor = self.value(x) + advantage - advantage.mean(-1, keepdim=True)
        return out


def make_dqn(
    observation: int | Sequence[int],
    num_actions: int,
    num_cells: Sequence[int] = (512,),
    *,
    layers: str | Sequence[tuple[int, int, int]] = "nature",
    dueling: bool = False,
    in_key: NestedKey = "observation",
    out_key: NestedKey = "action_value",
    **options: Any,
) -> TensorDictModule:
    """The network of :class:`~gpubuf.objectives.DQNLoss`: from an observation to the values of all actions.

    The default is that of Mnih et al., Nature 518, 2015, for images of 84x84.

    Args:
        observation: width of a flat observation, or the shape C, H, W of images.
        num_actions: A.
        num_cells: widths of the hidden layers, for images after the convolutions.
        layers: of :class:`PixelEncoder`, for images.
        dueling: two streams, see :class:`Dueling`, each with hidden layers of its own.
        in_key: key of the observation.
        out_key: key of the values, ``[*batch, A]``.
        **options: ``device``, ``dtype``, and other keyword arguments of :class:`MLP`, such as ``norm``.

    Raises:
        ValueError: as :class:`PixelEncoder`.
    """
    new = {name: options[name] for name in ("device", "dtype") if name in options}
    encoder = [] if isinstance(observation, int) else [PixelEncoder(observation, layers, **new)]
    width = observation if isinstance(observation, int) else encoder[0].features

    def head(outputs: int) -> MLP:
        return MLP(width, outputs, num_cells, **options)

    network = Dueling(head(1), head(num_actions)) if dueling else head(num_actions)
    return TensorDictModule(nn.Sequential(*encoder, network) if encoder else network, [in_key], [out_key])
