"""What every workload of the registry has: sizes, the libraries that are asked, and how to fill, check and time it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

#: Rows of a buffer that takes gigabytes and minutes to fill.
HUGE = 50_000_000


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One workload of the registry; a class for each kind.

    Attributes:
        name: the group of its benchmarks, and the key in files of results.
        title: for people.
        libraries: who is asked to do it; who can't says so.
        capacity: rows of the buffer.
        batch: rows of a batch.
        row_bytes: bytes of a row.
        quick: part of a quick run.
        devices: where it makes sense.
    """

    name: str
    title: str
    libraries: tuple[str, ...]
    capacity: int
    batch: int
    row_bytes: int
    quick: bool = True
    devices: tuple[str, ...] = ("cpu", "cuda")

    @property
    def huge(self) -> bool:
        """Whether it takes gigabytes and minutes."""
        return self.capacity >= HUGE

    def fill(self, library: str, device: str) -> Any:
        """What :meth:`prepare` gets. It raises UnavailableError where that can't be."""

    def prepare(self, filled: Any, library: str, device: str) -> Callable[[], object]:
        """Check what is filled against the oracle, and return the call to time."""
        raise NotImplementedError

    def contents(self, library: str) -> Hashable:
        """Equal for two workloads that can share a filled buffer."""
        return self.name, library
