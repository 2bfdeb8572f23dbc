"""Rows that are not all on the GPU: the ways that there are to bring a batch of them there."""

from __future__ import annotations

from typing import Any, ClassVar

from benchmarks.peers.libraries import Gpubuf, UnavailableError


class Placed(Gpubuf):
    """This library, its rows in one of its placements; a batch always comes out on the GPU."""

    placement: ClassVar[str]

    def load(self) -> None:
        if self.device != "cuda":
            raise UnavailableError("where rows lie beside a GPU can be compared only on a machine with one")
        super().load()

    def storage(self) -> Any:
        return self.storage_class(len(self.source), device=self.placement)


class OnGpu(Placed):
    """All rows in the GPU's memory."""

    name, title, placement = "gpubuf-cuda", "rows on the GPU", "cuda"


class Split(Placed):
    """Half of the rows on the GPU, the others in pinned host memory; one launch per batch."""

    name, title, placement = "gpubuf-split", "half the rows on the GPU", "split:50%"


class Pinned(Placed):
    """All rows in pinned host memory, which the GPU reads in the same launch."""

    name, title, placement = "gpubuf-pinned", "rows in pinned memory", "pinned"


class GatherAndCopy(Placed):
    """The usual way: the CPU gathers a batch from ordinary memory, and copies it to the GPU."""

    name, title, placement = "gpubuf-copy", "gathered by the CPU, copied", "cpu"

    def open(self) -> None:
        super().open()
        sample = self.sample
        self.sample = lambda n: sample(n).to("cuda", non_blocking=True)

    def rows(self, source: Any) -> Any:
        return source


PLACEMENTS: dict[str, type[Placed]] = {placed.name: placed for placed in (OnGpu, Split, Pinned, GatherAndCopy)}
#: The share of a batch's rows that crosses the bus.
OVER_THE_BUS = {"gpubuf-cuda": 0.0, "gpubuf-split": 0.5, "gpubuf-pinned": 1.0, "gpubuf-copy": 1.0}
