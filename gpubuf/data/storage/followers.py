"""Those who read a storage by address, and what the storage keeps for them beside its rows."""

from __future__ import annotations

import math
from typing import Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from gpubuf.data.storage import host_memory
from gpubuf.data.storage.end_bits import Breaks, EndBits, bitmap_bytes, compared_keys
from gpubuf.data.storage.placement import IndexBytes, depends_on_room
from gpubuf.data.storage.recipe import Recipe
from gpubuf.data.storage.ring import Ring
from gpubuf.data.storage.schema import Form


class Storage:
    """Base class of storages (the type that buffers accept)."""

    max_size: int
    ndim: int = 1


class Follower(Protocol):
    """Reads a storage by address: see :class:`gpubuf.data.storage.reader.Reader`."""

    recipe: Recipe

    @property
    def needs_ends(self) -> bool:
        """Whether it has to know where trajectories end."""

    def check_rows(self, form: Form) -> None:
        """Raise if rows of ``form`` lack what it needs."""

    def follow(self) -> None:
        """The storage was allocated, moved or freed."""


class Followed(Storage):
    """Lets a storage be followed.

    Attributes:
        breaks: where rows are not continued by the next ones, with ``ends="flags+continuity"``.
        end_bits: where trajectories end, if a follower needs that.
    """

    _form: Form | None
    _ring: Ring | None
    _shape: torch.Size
    table: Tensor

    def _begin_following(self, continuity: bool) -> None:
        self.breaks = Breaks() if continuity else None
        self.end_bits: EndBits | None = None
        # Weak, because they refer to the storage.
        self._followers = WeakSet[Follower]()

    def followed_by(self, follower: Follower) -> None:
        """Tell ``follower``, for as long as it exists, whenever the rows have got other addresses.

        Raises:
            ValueError: another one knows the ends of trajectories by other keys.
            KeyError: the rows lack what it needs.
        """
        if self._form is not None:
            follower.check_rows(self._form)
        if follower.needs_ends:
            self._keep_ends(follower.recipe)
        self._followers.add(follower)
        follower.follow()

    def _keep_ends(self, recipe: Recipe) -> None:
        if self.end_bits is not None and self.end_bits.serves(recipe):
            return
        if any(other.needs_ends for other in self._followers):
            raise ValueError("another buffer with the same storage tells the ends of trajectories by other keys")
        bits = EndBits(recipe, self.breaks)
        if self._form is not None and self._ring is not None:
            bits.allocate(self._form, self._shape, self.table)
            bits.rebuild(self._ring.counters)
        self.end_bits = bits

    def _tell_followers(self) -> None:
        for follower in self._followers:
            follower.follow()

    def check_rows(self, form: Form) -> None:
        """Raise if rows of ``form`` lack what a follower needs, or can't be compared.

        Raises:
            KeyError, ValueError: they do.
        """
        if self.breaks is not None:
            compared_keys(form.written.leaves, form.sources)
        for follower in self._followers:
            follower.check_rows(form)

    def rebuild(self) -> None:
        """Rows were changed in place: compute anew what is known about them. O(capacity). No host sync."""
        if self._ring is None:
            return
        if self.breaks is not None:
            self.breaks.rebuild(self._ring.counters)
        if self.end_bits is not None:
            self.end_bits.rebuild(self._ring.counters)

    def derived_bytes(self, requested: torch.device | str, shape: tuple[int, ...]) -> IndexBytes:
        """Bytes that a storage of ``shape`` keeps beside its rows; zero for placements that ignore free memory."""
        if not depends_on_room(requested):
            return IndexBytes()
        index = 0 if self.breaks is None else math.prod(shape)
        if self.end_bits is not None:
            index += bitmap_bytes(shape, "cuda" if host_memory.cuda_present() else "cpu")
        return IndexBytes(index=index)
