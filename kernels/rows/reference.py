"""The definition of the rows operations: plain indexing, one row at a time. Slow, and read by tests only."""

from torch import Tensor


class Ring:
    """``keys`` are tensors ``[capacity, ...]``; ``written`` rows were written so far, of which ``size`` are there."""

    def __init__(self, keys: list[Tensor], capacity: int, written: int = 0) -> None:
        self.keys, self.capacity = [key.clone() for key in keys], capacity
        self.written, self.size = written, min(written, capacity)

    def generation(self, position: int) -> int:
        """How often the row at a position has been written."""
        return len(range(position % self.capacity, self.written, self.capacity))

    def gather(self, index: list[int]) -> tuple[list[Tensor], list[int]]:
        return [key[index] for key in self.keys], [self.generation(position) for position in index]

    def sample(self, uniforms: list[float]) -> list[int]:
        """The positions that these uniforms draw."""
        return [min(int(uniform * self.size), self.size - 1) for uniform in uniforms]

    def extend(self, batch: list[Tensor], n: int) -> list[int]:
        """Write ``n`` rows at the cursor; where they lie."""
        index = [(self.written + i) % self.capacity for i in range(n)]
        self.write(batch, index)
        self.written += n
        self.size = min(self.size + n, self.capacity)
        return index

    def write(self, batch: list[Tensor], index: list[int], generation: list[int] | None = None) -> None:
        """Row after row, so that the last one wins where a position is named twice; those written since are skipped."""
        for key, rows in zip(self.keys, batch, strict=True):
            for i, position in enumerate(index):
                if generation is None or generation[i] == self.generation(position):
                    key[position] = rows[i]
