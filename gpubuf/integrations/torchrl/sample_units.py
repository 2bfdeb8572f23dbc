"""Sample units that TorchRL's buffers take, and gpubuf's."""

from __future__ import annotations

from torchrl.data import replay_buffers as theirs

from gpubuf import data
from gpubuf.integrations.torchrl.joining import Joined


class SampleUnit(Joined, data.SampleUnit, theirs.SampleUnit):
    """:class:`gpubuf.data.SampleUnit`, which is also TorchRL's: the base of units of your own."""


class Transition(Joined, data.Transition, theirs.Transition):
    """:class:`gpubuf.data.Transition`, which is also TorchRL's."""


class Sequence(Joined, data.Sequence, theirs.Sequence):
    """:class:`gpubuf.data.Sequence`, which is also TorchRL's. It needs a storage of this module."""
