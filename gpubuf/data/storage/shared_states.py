"""The state of a storage that stores observations once, and states of storages that don't, or do so in another way."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gpubuf.data.storage.layout import Data, Key, Pieces, RowLayout
from gpubuf.data.storage.linking import (
    SharedState,
    Span,
    full_state,
    not_continued,
    saved_sharing,
    shared_state,
    value_of,
)
from gpubuf.data.storage.saved_rows import SavedRows
from gpubuf.data.storage.schema import NEXT_KEY, Form, written_leaves
from gpubuf.data.storage.shared_rows import shared_columns
from gpubuf.data.storage.sharing import Sharing, entries_of

CHUNK_BYTES = 1 << 26
"""Bytes of next observations that are linked at a time."""


class SharedStates(SavedRows):
    """Saves and restores rows that store observations once, and loads states of other storages into such a one."""

    def state_dict(self) -> dict[str, Any]:
        """See :class:`SavedRows`. The rows lack the next observations that are stored once: ``"sharing"`` has those
        that are not in the row behind, and says which these are.
        """
        state = super().state_dict()
        return state if self.sharing is None else {**state, "sharing": saved_sharing(self.sharing)}

    def load_state_dict(self, state: dict[str, Any]) -> Tensor | None:
        """See :class:`SavedRows`. Rows of storages that share other keys, or none, or have room for more or fewer next
        observations, are taken too.

        Raises:
            ValueError: as there, or there is no room for so many next observations that are not in the row behind.
        """
        if not state["initialized"]:
            return super().load_state_dict(state)
        self.check_state(state)
        order = super().load_state_dict(self._translated(state))
        sharing, shared = self.sharing, SharedState.of(state)
        if sharing is not None and self._continues(state):
            assert shared is not None
            sharing.restore(shared.links, shared.owners, shared.entries, shared.pending)
        elif sharing is not None:
            self._link(sharing, full_state(state, self.ndim))
        if sharing is not None and self.breaks is not None:
            # Links are flags of theirs.
            self.rebuild()
        return order

    def check_state(self, state: dict[str, Any]) -> None:
        """Check that there is room for the next observations of a state that are not in the row behind.

        Raises:
            ValueError: there is none, or a key is missing.
        """
        if not self._share_next or self._continues(state):
            return
        full, keys = full_state(state, self.ndim), self._keys_for(state)
        pieces = Pieces.of(full["rows"], self.ndim)
        for key in keys:
            if value_of(pieces.example, key) is None or value_of(pieces.example, (NEXT_KEY, *key)) is None:
                raise ValueError(f"the rows of the state don't have {key!r} both at the root and under 'next'")
        count, room = not_continued(pieces, keys, Span.of(full)), self._slots_for(state)
        if count > room:
            raise ValueError(
                f"{count} of the {state['size']} rows of the state are not continued by the row behind, and there is "
                f"room aside for the next observations of {room}: give the storage a larger next_capacity"
            )

    def form_for(self, state: dict[str, Any]) -> Form:
        """See :class:`SavedRows`."""
        return super().form_for(self._translated(state))

    def _translated(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state with the rows as this storage stores them."""
        if self._continues(state):
            return state
        full = full_state(state, self.ndim)
        if not self._share_next:
            return full
        return shared_state(full, self._keys_for(state), self.ndim, self.ignored_keys)

    def _continues(self, state: dict[str, Any]) -> bool:
        """Whether links and entries of a state can be taken over as they are."""
        shared = SharedState.of(state)
        if shared is None or not self._share_next or self._keys_for(state) != shared.keys:
            return False
        return (self._shape_for(state), self._slots_for(state)) == (tuple(state["shape"]), shared.slots)

    def _shape_for(self, state: dict[str, Any]) -> tuple[int, ...]:
        return tuple(self._shape) if self.initialized else self.full_shape(tuple(state["shape"]))

    def _slots_for(self, state: dict[str, Any]) -> int:
        shape = self._shape_for(state)
        return entries_of(math.prod(shape), math.prod(shape[1:]), self._next_capacity)

    def _keys_for(self, state: dict[str, Any]) -> tuple[Key, ...]:
        """The keys that this storage shares, or would share if it took the rows of a state."""
        if self.sharing is not None:
            return self.sharing.keys
        state = full_state(state, self.ndim)
        layout = RowLayout(Pieces.of(state["rows"], self.ndim).example, self.ndim, self.ignored_keys)
        form = self.form_like(layout.with_leaves(written_leaves(state["form"])) if "form" in state else layout)
        return tuple(leaf.key for leaf in shared_columns(form).values())

    def _link(self, sharing: Sharing, state: dict[str, Any]) -> None:
        """Give all rows the next observations that the full rows of a state have, the oldest ones first."""
        sharing.forget()
        span = Span.of(state)
        oldest = (state["written"] // span.envs) % span.steps if state["size"] == state["max_size"] else 0
        # Rows of another capacity lie from position 0 on, the oldest first.
        turn = 0 if self.max_size == state["max_size"] else oldest
        row_bytes = sum(leaf.row_bytes for leaf in sharing.leaves.values())
        chunk = max(1, CHUNK_BYTES // (row_bytes * span.envs))
        parts = Pieces.of(state["rows"], self.ndim).parts
        for low, high in ((oldest, span.steps), (0, oldest)):
            for start, part in parts:
                steps = range(start, start + part.shape[0])
                first, last = max(steps.start, low), min(steps.stop, high)
                for at in range(first, last, chunk):
                    until = min(at + chunk, last)
                    self._link_steps(sharing, part[at - start : until - start], (at - turn) % span.steps)

    def _link_steps(self, sharing: Sharing, part: Data, step: int) -> None:
        envs = self._envs
        n = part.shape[0] * envs
        sources = [value_of(part, (NEXT_KEY, *key)) for key in sharing.keys]
        local = [t.reshape(n, *t.shape[self.ndim :]).to(self._device).contiguous() for t in sources]
        index = (step * envs + torch.arange(n, device=self._device)) % self.max_size
        self._relink(self._raw_fields, local, index)
