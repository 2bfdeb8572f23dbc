"""Off-policy learning in rsl_rl 5, and the replay buffer of rsl_rl_flashsac.

A configuration of rsl_rl names the algorithm: ``"class_name": "gpubuf.integrations.rsl_rl:FastSAC"``, or ``SAC``,
``FlashSAC``, ``FastTD3``. rsl_rl's own ``OnPolicyRunner`` runs it, and so do runners that derive from it, as those of
mjlab and Isaac Lab; :class:`OffPolicyRunner` is one that also checks the configuration. docs/integrations/rsl_rl.md has
configurations to copy.

Buffers are importable without rsl_rl. The other names need it: ``pip install rsl-rl-lib``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gpubuf.integrations.rsl_rl.buffers import MemoryEfficientTorchUniformBuffer, TorchUniformBuffer

if TYPE_CHECKING:
    from gpubuf.integrations.rsl_rl.algorithms import SAC, FastSAC, FastTD3, FlashSAC
    from gpubuf.integrations.rsl_rl.runner import OffPolicyRunner

__all__ = [
    "SAC",
    "FastSAC",
    "FastTD3",
    "FlashSAC",
    "MemoryEfficientTorchUniformBuffer",
    "OffPolicyRunner",
    "TorchUniformBuffer",
]

_MODULES = {"OffPolicyRunner": "runner", **dict.fromkeys(("SAC", "FastSAC", "FastTD3", "FlashSAC"), "algorithms")}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "rsl_rl":
            raise
        raise ModuleNotFoundError(f"{name} needs rsl_rl: pip install rsl-rl-lib", name="rsl_rl") from None
    return getattr(module, name)
