"""Networks and distributions that the losses know how to run fast."""

from gpubuf.modules.mlp import MLP, EnsembleLinear, EnsembleMLP
from gpubuf.modules.sac import GaussianParameters, TanhNormalActor, TanhNormalHead, make_sac_actor, make_sac_critic
from gpubuf.modules.tanh_normal import TanhNormal

__all__ = [
    "MLP",
    "EnsembleLinear",
    "EnsembleMLP",
    "GaussianParameters",
    "TanhNormal",
    "TanhNormalActor",
    "TanhNormalHead",
    "make_sac_actor",
    "make_sac_critic",
]
