"""How often warps wait for global memory, one time after the other: what latency costs a kernel."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.gates.ptx.parse import Instruction, Kernel


class Trips:
    """Counts the waits of warps that issue in order.

    A warp goes on behind its loads until an instruction needs what one of them brings. All that it has asked for by
    then arrives together: one trip. Atomics whose results are used are loads in this sense, and so are copies to shared
    memory, for whose groups it waits.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._blocks = kernel.blocks
        self._loads = [any(_is_load(i) or i.copies for i in block) for block in kernel.blocks]
        #: What a warp may be waiting for, by number; nothing at first.
        self._sets: list[frozenset[str]] = [frozenset()]
        self._after: dict[tuple[int, int], tuple[int, int]] = {}

    def count(self, block: int, trips: np.ndarray, pending: np.ndarray, warps: Any) -> None:
        """Add to ``trips`` what some warps wait for in a block; ``pending`` has the number of each one's loads."""
        now = pending[warps]
        if not self._loads[block] and not now.any():
            return
        which = np.arange(trips.size)[warps]
        for number in set(now.tolist()):
            waits, after = self._step(block, number)
            chosen = which[now == number]
            trips[chosen] += waits
            pending[chosen] = after

    def _step(self, block: int, number: int) -> tuple[int, int]:
        if (block, number) not in self._after:
            waits, asked = 0, set(self._sets[number])
            for instruction in self._blocks[block]:
                if instruction.copies == "commit_group":
                    asked = {_older(name) for name in asked}
                elif instruction.copies and "wait" not in instruction.copies:
                    asked.add(_COPIES[0])
                waited = _COPIES[instruction.newest + 1 :] if "wait" in instruction.copies else instruction.read
                if asked.intersection(waited):
                    waits += 1
                    asked.clear()
                if _is_load(instruction):
                    asked.update(instruction.written)
                else:
                    asked.difference_update(instruction.written)
            after = frozenset(asked)
            if after not in self._sets:
                self._sets.append(after)
            self._after[block, number] = waits, self._sets.index(after)
        return self._after[block, number]


_COPIES = [f"copies of group {age}" for age in range(10)]
"""That are under way, by how many groups have been closed since they began; the last of them stand for older ones."""


def _older(name: str) -> str:
    return _COPIES[min(_COPIES.index(name) + 1, len(_COPIES) - 1)] if name in _COPIES else name


def _is_load(instruction: Instruction) -> bool:
    return instruction.op in ("ld", "atom") and "global" in instruction.parts and bool(instruction.written)
