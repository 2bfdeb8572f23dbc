"""Rows that share their observations as full rows, and back: for states that storages of another kind or size load."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from gpubuf.data.storage.layout import Data, Key, Pieces, RowLayout
from gpubuf.data.storage.schema import NEXT_KEY, Form, Options, described
from gpubuf.data.storage.sharing import Sharing
from gpubuf.kernels.rows import LOST


class Repeated:
    """An iterable that begins anew each time, from a function that returns an iterator."""

    def __init__(self, begin: Callable[[], Iterator[tuple[int, Data]]]) -> None:
        self._begin = begin

    def __iter__(self) -> Iterator[tuple[int, Data]]:
        return self._begin()


class SharedState(NamedTuple):
    """What a state says about observations stored once.

    Attributes:
        keys: the shared keys, at the root.
        slots: number of entries.
        links, owners: as in :mod:`gpubuf.kernels.rows`.
        entries: of each key, ``[used, ...]``: those that were ever taken.
        pending: of each key, ``[envs, ...]``.
    """

    keys: tuple[Key, ...]
    slots: int
    links: Tensor
    owners: Tensor
    entries: tuple[Tensor, ...]
    pending: tuple[Tensor, ...]

    @classmethod
    def of(cls, state: dict[str, Any]) -> SharedState | None:
        """That of a storage's state; None if its rows are full."""
        raw = state.get("sharing")
        if raw is None:
            return None
        keys = tuple(tuple(key) for key in raw["keys"])
        entries, pending = ([raw[name][str(i)] for i in range(len(keys))] for name in ("entries", "pending"))
        return cls(keys, raw["slots"], raw["links"], raw["owners"], tuple(entries), tuple(pending))

    def state_dict(self) -> dict[str, Any]:
        """The inverse of :meth:`of`."""
        numbered = ({str(i): tensor for i, tensor in enumerate(tensors)} for tensors in (self.entries, self.pending))
        entries, pending = numbered
        return {
            "keys": [list(key) for key in self.keys],
            "slots": self.slots,
            "links": self.links,
            "owners": self.owners,
            "entries": entries,
            "pending": pending,
        }


class Span(NamedTuple):
    """The steps of a ring that pieces of rows are from.

    Attributes:
        envs: rows a step.
        steps: of the ring.
        newest: the newest step; -1 if nothing is stored.
    """

    envs: int
    steps: int
    newest: int

    @classmethod
    def of(cls, state: dict[str, Any]) -> Span:
        """That of a storage's state."""
        steps, *rest = state["shape"]
        envs = math.prod(rest)
        return cls(envs, steps, (state["written"] // envs - 1) % steps if state["size"] else -1)


def saved_sharing(sharing: Sharing) -> dict[str, Any]:
    """What the state of a storage that shares says about it: views, not copies. Synchronises."""
    used = min(int(sharing.owners[-1]), sharing.slots)
    entries = tuple(side[:used] for side in sharing.sides)
    pending = tuple(side[sharing.slots :] for side in sharing.sides)
    return SharedState(sharing.keys, sharing.slots, sharing.links, sharing.owners, entries, pending).state_dict()


# From shared rows to full ones


def full_state(state: dict[str, Any], ndim: int) -> dict[str, Any]:
    """A state whose rows have all their next observations; the same one if they have.

    Raises:
        ValueError: while the rows are read: a next observation is lost.
    """
    shared = SharedState.of(state)
    if shared is None:
        return state
    pieces, span = Pieces.of(state["rows"], ndim), Span.of(state)

    def each() -> Iterator[tuple[int, Data]]:
        for start, part, following in with_successors(pieces.parts, shared.keys):
            yield start, _completed(part, next_of(start, following, shared, span), shared.keys)

    none = [value_of(pieces.example, key)[:0] for key in shared.keys]
    rows = Pieces(_completed(pieces.example[:0], none, shared.keys), Repeated(each))
    full = {name: value for name, value in state.items() if name != "sharing"} | {"rows": rows}
    return {**full, "form": [_with_own_column(entry) for entry in state["form"]]}


def _with_own_column(entry: dict[str, Any]) -> dict[str, Any]:
    """The description of a key, if no column were shared."""
    return {**entry, "column": [NEXT_KEY, *entry["column"]], "follows": False} if entry["follows"] else entry


def value_of(data: Data, key: Key) -> Tensor:
    """The tensor of a key of a batch."""
    found: Tensor = data.get(key)
    return found


def with_successors(parts: Iterable[tuple[int, Data]], keys: Sequence[Key]) -> Iterator[tuple[int, Data, list[Tensor]]]:
    """Every piece, and for each key its values one step later, ``[steps of the piece, ...]``: of the last step of all
    the first one follows.
    """
    held: tuple[int, Data] | None = None
    first: list[Tensor] = []
    for start, part in parts:
        now = [value_of(part, key)[:1] for key in keys]
        if held is None:
            first = now
        else:
            yield *held, _one_later(held[1], keys, now)
        held = start, part
    if held is not None:
        yield *held, _one_later(held[1], keys, first)


def _one_later(part: Data, keys: Sequence[Key], following: list[Tensor]) -> list[Tensor]:
    return [
        torch.cat([(own := value_of(part, key))[1:], last.to(own.device)])
        for key, last in zip(keys, following, strict=True)
    ]


def next_of(start: int, following: list[Tensor], shared: SharedState, span: Span) -> list[Tensor]:
    """The next observations of a piece, from those of the rows behind.

    Raises:
        ValueError: some are lost.
    """
    steps = following[0].shape[0]
    links = shared.links[start * span.envs : (start + steps) * span.envs]
    found = list[Tensor]()
    newest = span.newest - start
    inside = 0 <= newest < steps
    if inside:
        links = links.clone()
        links[newest * span.envs : (newest + 1) * span.envs] = 0
    if bool((links == LOST).any()):
        raise ValueError("some next observations are lost: there was no room for them aside (next_capacity)")
    aside = (links > 0).nonzero().squeeze(-1)
    entry = links[aside].long() - 1
    for coming, entries, pending in zip(following, shared.entries, shared.pending, strict=True):
        rest = coming.shape[len(coming.shape) - (pending.ndim - 1) :]
        if inside:
            coming[newest].view(-1, *rest).copy_(pending)
        coming.view(-1, *rest)[aside.to(coming.device)] = entries[entry.to(entries.device)].to(coming.device)
        found.append(coming)
    return found


def _completed(part: Data, values: list[Tensor], keys: Sequence[Key]) -> Data:
    full = part.copy()
    coming = full.get(NEXT_KEY, None)
    if coming is not None:
        full.set(NEXT_KEY, coming.copy())
    for key, value in zip(keys, values, strict=True):
        full.set((NEXT_KEY, *key), value)
    return full


# From full rows to shared ones


def shared_state(state: dict[str, Any], keys: Sequence[Key], ndim: int, ignored: frozenset[str]) -> dict[str, Any]:
    """A state of full rows without the next observations of ``keys``; ``ignored`` root keys are not stored."""
    pieces = Pieces.of(state["rows"], ndim)

    def each() -> Iterator[tuple[int, Data]]:
        for start, part in pieces.parts:
            yield start, _without(part, keys)

    saved = state.get("form") or described(Form.of(RowLayout(pieces.example, ndim, ignored), Options()))
    shared = {(NEXT_KEY, *key) for key in keys}
    form = [
        {**entry, "column": entry["column"][1:], "follows": True} if tuple(entry["column"]) in shared else entry
        for entry in saved
    ]
    return {**state, "rows": Pieces(_without(pieces.example, keys), Repeated(each)), "form": form}


def _without(part: Data, keys: Sequence[Key]) -> Data:
    if isinstance(part, Tensor):
        return part
    full = part if isinstance(part, TensorDict) else part.to_tensordict()
    return full.exclude(*((NEXT_KEY, *key) for key in keys))


def not_continued(pieces: Pieces, keys: Sequence[Key], span: Span) -> int:
    """How many full rows have next observations that are not those of the row behind, told apart by bytes.

    The newest step is left out: its next observations are pending.
    """
    count = 0
    for start, part, following in with_successors(pieces.parts, keys):
        differ = torch.zeros(following[0].shape[0] * span.envs, dtype=torch.bool)
        for key, later in zip(keys, following, strict=True):
            coming = value_of(part, (NEXT_KEY, *key))
            differ |= (as_bytes(coming, len(differ)) != as_bytes(later, len(differ))).any(1).cpu()
        newest = span.newest - start
        if newest >= 0:
            differ[newest * span.envs : (newest + 1) * span.envs] = False
        count += int(differ.sum())
    return count


def as_bytes(tensor: Tensor, n: int) -> Tensor:
    """A tensor as uint8 ``[n, bytes]``."""
    return tensor.reshape(n, -1).contiguous().view(torch.uint8)
