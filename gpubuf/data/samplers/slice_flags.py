"""The flags that a batch of slices carries: where each slice ends and begins, combined with the stored ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpubuf.data.storage.layout import Key, RowLayout, as_key, as_written


class SliceFlags:
    """Which flags to report, and where the stored ones are among the tensors of a gathered batch.

    Args:
        layout: of the rows.
        truncated_key: under which the last step of every slice is reported; ``"done"`` and ``"terminated"`` go beside
            it. None reports none of them.
        init_key: of stored flags that are set at the first step of every slice; None, or not stored: of none.
    """

    def __init__(self, layout: RowLayout, truncated_key: Any | None, init_key: Any | None) -> None:
        self.truncated: Any = None
        if truncated_key is not None:
            truncated = as_key(truncated_key)
            done: Key = (*truncated[:-1], "done")
            terminated: Key = (*truncated[:-1], "terminated")
            self.truncated, self.done, self.terminated = (as_written(key) for key in (truncated, done, terminated))
            self._truncated, self._done, self._terminated = (
                layout.position(key) for key in (truncated, done, terminated)
            )
        init = None if init_key is None else as_key(init_key)
        self._init = None if init is None else layout.position(init)
        self.init: Any = None if init is None or self._init is None else as_written(init)

    def entries(self, tensors: list[Tensor], last: Tensor, length: int, kept: Tensor | None) -> dict[Any, Tensor]:
        """The flags of a batch, by key.

        Args:
            tensors: the gathered rows, ``[n, ...]`` each, in the order of the layout. They are not changed.
            last: bool ``[n]``, set at the last step of every slice.
            length: steps of a slice.
            kept: which of the steps of slices of equal length are in the batch, int64 ``[n]``; None: all of them.
        """
        flags: dict[Any, Tensor] = {}
        if self.truncated is not None:
            done = None if self._done is None else tensors[self._done]
            truncated = last.unsqueeze(-1)
            like = tensors[self._truncated] if done is None and self._truncated is not None else done
            if like is not None and like.shape != truncated.shape:
                # Flags of several elements a row (agents) keep their shape: all of them see where the slice ends.
                truncated = last.view(-1, *[1] * (like.ndim - 1)).expand(like.shape).contiguous()
            flags[self.truncated] = truncated
            flags[self.done] = truncated.clone() if done is None else done | truncated
            terminated = torch.zeros_like(truncated) if self._terminated is None else tensors[self._terminated]
            flags[self.terminated] = terminated
        if self._init is not None:
            stored = tensors[self._init]
            started = stored.clone()
            if kept is None:
                started.view(-1, length, *stored.shape[1:]).select(1, 0).fill_(True)
            else:
                started |= (kept % length == 0).view(-1, *[1] * (stored.ndim - 1))
            flags[self.init] = started
        return flags
