"""Transforms: what happens to a batch on its way out of the buffer, and on its way in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

from torch import nn

from gpubuf.data.storage.layout import Data


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

    def inv(self, data: Data) -> Data | None:
        if self.invert:
            return self.transform(data)
        inverse = getattr(self.transform, "inv", None)
        return data if inverse is None else inverse(data)


class Compose(nn.Module):
    """Transforms in order: first to last on sampled batches, last to first on written ones.

    It can be indexed and iterated, and gives the objects that you gave it. A slice is a new Compose of the same
    objects.

    Args:
        *given: callables from a batch to a batch, or modules; or one list of them. A Compose among them gives its own
            transforms.
        transforms: a list of them, instead.

    Raises:
        TypeError: a transform can't be called.
    """

    def __init__(self, *given: Any, transforms: Sequence[Callable[[Data], Data]] | None = None) -> None:
        super().__init__()
        if transforms is None:
            transforms = given[0] if len(given) == 1 and isinstance(given[0], list) else given
        elif given:
            raise TypeError("give transforms one by one, or a list of them, not both")
        self.steps = nn.ModuleList()
        for transform in transforms:
            self.append(transform)

    def append(self, transform: Callable[[Data], Data], *, invert: bool = False) -> None:
        """Add a transform behind the others."""
        self.insert(len(self.steps), transform, invert=invert)

    def insert(self, index: int, transform: Callable[[Data], Data], *, invert: bool = False) -> None:
        """Add a transform before the one at ``index``; a negative one counts from the end.

        Raises:
            ValueError: there are not so many.
        """
        n = len(self)
        if not -n <= index <= n:
            raise ValueError(f"the index must be in [-{n}, {n}], got {index}")
        index += n if index < 0 else 0
        for step in transform.steps if isinstance(transform, Compose) and not invert else [_Step(transform, invert)]:
            self.steps.insert(index, step)
            index += 1

    def pop(self, index: int = -1) -> Any:
        """Remove the transform at ``index``, the last one by default, and return it."""
        return self.steps.pop(index).transform

    @property
    def transforms(self) -> list[Any]:
        """The transforms, as they were given."""
        return [step.transform for step in self.steps]

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> Compose: ...

    def __getitem__(self, index: int | slice) -> Any:
        if not isinstance(index, slice):
            return self.transforms[index]
        part = Compose()
        part.steps.extend(list(self.steps)[index])
        return part

    def __iter__(self) -> Iterator[Any]:
        return iter(self.transforms)

    def __len__(self) -> int:
        # Past nn.Module.__getattr__, which is slow: every sample asks.
        return len(self._modules["steps"]._modules)  # type: ignore[union-attr]

    def forward(self, data: Data) -> Data:
        """Transform a sampled batch."""
        for step in self.steps:
            data = step(data)
        return data

    def inv(self, data: Data) -> Data | None:
        """Transform a batch about to be written. ``data`` is a shallow copy of the caller's.

        None: a transform has returned None, which keeps the rows for later. There is nothing to write yet.
        """
        written: Data | None = data
        for step in reversed(self.steps):
            written = step.inv(written)  # type: ignore[operator]
            if written is None:
                break
        return written
