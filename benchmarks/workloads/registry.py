"""Every workload by name, in the order in which they run, and the libraries by title."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from benchmarks.peers.libraries import LIBRARIES, PEERS, UnavailableError
from benchmarks.workloads import replay, sac, slices
from benchmarks.workloads.workload import Workload

#: The names of the libraries in tables, by their names in files of results; in the order of columns.
TITLES = {
    **{name: library.title for name, library in LIBRARIES.items()},
    "plain": "plain PyTorch",
}
REGISTRY: dict[str, Workload] = {
    **replay.WORKLOADS,
    **sac.WORKLOADS,
    **slices.SLICES,
}


def environment(library: str) -> str:
    """In which environment a library runs: a peer in its own, all of ours in ``gpubuf``."""
    return library if library in PEERS else "gpubuf"


class LastFilled:
    """The buffer that was filled last, for the next benchmark that begins with the same; one at a time in memory."""

    def __init__(self) -> None:
        self.contents: Hashable = None
        self.filled: Any = None
        self.refused: UnavailableError | None = None

    def get(self, workload: Workload, library: str, device: str) -> Any:
        """The buffer that the workload needs. The one before it is gone by then.

        Raises:
            UnavailableError: the library can't do it here; said again at every workload of these contents.
        """
        wanted = workload.contents(library)
        if self.contents != wanted:
            self.filled = self.refused = None
            self.contents = wanted
            try:
                self.filled = workload.fill(library, device)
            except UnavailableError as error:
                self.refused = error
            except BaseException:
                # Not half a buffer for the next: it fails by itself, and says why.
                self.contents = None
                raise
        if self.refused is not None:
            raise self.refused
        return self.filled
