"""Flags of a batch of slices: where slices begin and end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpubuf.data.storage.layout import Key, RowLayout, as_key, as_written


def check_free(layout: RowLayout, keys: Sequence[Key], instead: str) -> None:
    """Raise if a batch of these rows can't have what the sampler says at ``keys``.

    Raises:
        ValueError: it would lie below a stored tensor, or in the place of stored ones.
    """
    for leaf in layout.leaves:
        for key in keys:
            common = min(len(key), len(leaf.key))
            if key != leaf.key and key[:common] == leaf.key[:common]:
                raise ValueError(
                    f"batches of slices have a flag at {as_written(key)!r}, but the rows have a tensor at {leaf.name}: "
                    f"{instead}"
                )


def _either(flags: Tensor, others: Tensor) -> Tensor:
    """Flags of any dtype, set where they or ``others`` (bool) are."""
    return (flags.bool() | others).to(flags.dtype)


class SliceFlags:
    """Which flags to report, and where the stored ones are among the tensors of a gathered batch.

    Args:
        layout: of the rows.
        truncated_key: under which the last step of every slice is reported; ``"done"`` and ``"terminated"`` go beside
            it. None reports none of them.
        init_key: of stored flags that are set at the first step of every slice; None, or not stored: of none.

    Attributes:
        layout: as given.

    Raises:
        ValueError: the rows have other data where a flag belongs.
    """

    def __init__(self, layout: RowLayout, truncated_key: Any | None, init_key: Any | None) -> None:
        self.layout = layout
        truncated = () if truncated_key is None else as_key(truncated_key)
        ends = [(*truncated[:-1], name) for name in (*truncated[-1:], "done", "terminated")] if truncated else []
        check_free(layout, ends, "give the sampler another truncated_key, or None")
        self._ends = [as_written(key) for key in ends]
        init = [] if init_key is None else [as_key(init_key)]
        # The positions of those that are stored, by key.
        found = {as_written(key): layout.position(key) for key in (*ends, *init)}
        self._stored = {key: position for key, position in found.items() if position is not None}
        self._inits = [as_written(key) for key in init if as_written(key) in self._stored]

    def entries(self, tensors: list[Tensor], last: Tensor, length: int, kept: Tensor | None) -> dict[Any, Tensor]:
        """The flags of a batch, by key.

        Args:
            tensors: the gathered rows, ``[n, ...]`` each, in the order of the layout. They are not changed.
            last: bool ``[n]``, set at the last step of every slice.
            length: steps of a slice.
            kept: which of the steps of slices of equal length are in the batch, int64 ``[n]``; None: all of them.
        """
        flags: dict[Any, Tensor] = {key: tensors[position] for key, position in self._stored.items()}
        for key in self._inits:
            flags[key] = started = flags[key].clone()
            if kept is None:
                started.view(-1, length, *started.shape[1:]).select(1, 0).fill_(True)
            else:
                flags[key] = _either(started, (kept % length == 0).view(-1, *[1] * (started.ndim - 1)))
        if self._ends:
            truncated, done, terminated = self._ends
            ended = last.unsqueeze(-1)
            like = flags.get(done, flags.get(truncated, ended))
            if like.shape != ended.shape:
                # Flags of several elements per row (agents) keep their shape: all of them see where the slice ends.
                ended = last.view(-1, *[1] * (like.ndim - 1)).expand(like.shape).contiguous()
            flags[truncated] = ended
            flags[done] = _either(flags[done], ended) if done in flags else ended.clone()
            if terminated not in flags:
                flags[terminated] = torch.zeros_like(ended)
        return flags
