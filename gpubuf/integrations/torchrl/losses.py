"""gpubuf's losses where TorchRL asks for its own: its updates of target parameters, and its trainers."""

from __future__ import annotations

from torchrl.objectives import LossModule

from gpubuf import objectives

# TorchRL's base class is an abstract one, which others may be declared instances of.
LossModule.register(objectives.LossModule)
