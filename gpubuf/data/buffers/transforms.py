"""Transforms: what happens to a batch on its way out of the buffer, and on its way in."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from gpubuf.data.storages.layout import Data


class _Step(nn.Module):
    """One transform, with the direction in which it applies.

    A module keeps its parameters and buffers in the state of the buffer. An object with an ``inv`` method (as
    TorchRL's transforms have) also applies on the way in; ``invert=True`` applies a plain callable only then.
    """

    def __init__(self, transform: Callable[[Data], Data], invert: bool) -> None:
        super().__init__()
        if not callable(transform):
            raise TypeError(f"a transform must be callable, got {type(transform).__name__}")
        self.transform = transform
        self.invert = invert

    def forward(self, data: Data) -> Data:
        return data if self.invert else self.transform(data)

    def inv(self, data: Data) -> Data:
        if self.invert:
            return self.transform(data)
        inverse = getattr(self.transform, "inv", None)
        return data if inverse is None else inverse(data)


class Compose(nn.Module):
    """Transforms in order: first to last on sampled batches, last to first on written ones.

    Args:
        *transforms: callables from a batch to a batch, or modules.
    """

    def __init__(self, *transforms: Callable[[Data], Data]) -> None:
        super().__init__()
        self.steps = nn.ModuleList()
        for transform in transforms:
            self.append(transform)

    def append(self, transform: Callable[[Data], Data], *, invert: bool = False) -> None:
        """Add a transform behind the others."""
        self.insert(len(self.steps), transform, invert=invert)

    def insert(self, index: int, transform: Callable[[Data], Data], *, invert: bool = False) -> None:
        """Add a transform before the one at ``index``."""
        self.steps.insert(index, _Step(transform, invert))

    def __len__(self) -> int:
        # Past nn.Module.__getattr__, which is slow: every sample asks.
        return len(self._modules["steps"]._modules)  # type: ignore[union-attr]

    def forward(self, data: Data) -> Data:
        """Transform a sampled batch."""
        for step in self.steps:
            data = step(data)
        return data

    def inv(self, data: Data) -> Data:
        """Transform a batch about to be written. ``data`` is a shallow copy of the caller's."""
        for step in reversed(self.steps):
            data = step.inv(data)  # type: ignore[operator]
        return data
