"""Networks and distributions that the losses know how to run fast."""

from gpubuf.modules.linear import UnitLinear
from gpubuf.modules.mlp import MLP, EnsembleLinear, EnsembleMLP, ResidualBlock
from gpubuf.modules.norms import BatchNorm, LayerNorm, RMSNorm, set_statistics
from gpubuf.modules.pixels import ENCODERS, Dueling, Encoded, PixelEncoder, make_dqn
from gpubuf.modules.sac import (
    GaussianParameters,
    SquashedGaussianParameters,
    TanhNormalActor,
    TanhNormalHead,
    make_fastsac_actor,
    make_fastsac_critic,
    make_flashsac_actor,
    make_flashsac_critic,
    make_sac_actor,
    make_sac_critic,
    tanh_normal_actor,
)
from gpubuf.modules.tanh_normal import TanhNormal
from gpubuf.modules.weight_norm import UnitWeight, normalize_rows, normalize_weights, unit_weights

__all__ = [
    "ENCODERS",
    "MLP",
    "BatchNorm",
    "Dueling",
    "Encoded",
    "EnsembleLinear",
    "EnsembleMLP",
    "GaussianParameters",
    "LayerNorm",
    "PixelEncoder",
    "RMSNorm",
    "ResidualBlock",
    "SquashedGaussianParameters",
    "TanhNormal",
    "TanhNormalActor",
    "TanhNormalHead",
    "UnitLinear",
    "UnitWeight",
    "make_dqn",
    "make_fastsac_actor",
    "make_fastsac_critic",
    "make_flashsac_actor",
    "make_flashsac_critic",
    "make_sac_actor",
    "make_sac_critic",
    "normalize_rows",
    "normalize_weights",
    "set_statistics",
    "tanh_normal_actor",
    "unit_weights",
]
