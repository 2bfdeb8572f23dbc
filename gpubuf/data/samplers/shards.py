"""Shards: every rank of a process group draws from rows of its own, weighted as in one buffer of all rows.

docs/scale.md derives the formula.
"""

from __future__ import annotations

from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from gpubuf.data.arguments import describe_type

_LEAST, _LARGEST = 1, 2
# By its name from torch 2.13 on, where the other one warns.
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def gathered(own: Tensor, process_group: dist.ProcessGroup) -> Tensor:
    """``own``, ``[n]``, of every rank: ``[W, n]``, the same bits on each. One all-gather."""
    every = own.new_empty(process_group.size() * own.numel())
    _all_gather(every, own, group=process_group)
    return every.view(-1, own.numel())


class Shards:
    """The ranks of a group, each of which holds a shard: rows that it alone writes and draws.

    Rank r of W draws row i with probability ``q_i / S_r``, where one buffer of all rows would with ``q_i / S`` (``S_r``
    is the sum over its shard, ``S`` that over all shards). Every draw is multiplied by ``W * S_r / S``. The mean over
    ranks of what is computed from their batches then has the expectation that one buffer gives:
    ``1 / W * sum_r sum_i (q_i / S_r) * (W * S_r / S) * g_i = sum_i (q_i / S) * g_i``.

    Args:
        process_group: the group. This process is one of its ranks. Its collectives run in the order in which batches
            are drawn, on the thread that draws them: a buffer that prefetches needs a group that nothing else uses.

    Raises:
        TypeError: it is none, or this process is not one of its ranks.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        if not isinstance(process_group, dist.ProcessGroup):
            raise TypeError(
                "process_group must be a torch.distributed.ProcessGroup of which this process is a rank (such as "
                f"torch.distributed.group.WORLD after init_process_group()), got {describe_type(process_group)}"
            )
        self.process_group = process_group
        self.size, self.rank = process_group.size(), process_group.rank()

    @classmethod
    def of(cls, process_group: dist.ProcessGroup | None) -> Self | None:
        """The shards of a group; of None, None."""
        return None if process_group is None else cls(process_group)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copies share the group, which can't be copied."""
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a sampler with a process_group can't be pickled: make it in the process that is the rank")

    def correction(self, mass: Tensor, least: Tensor, beta: Tensor, largest: Tensor) -> Tensor:
        """What the importance weights of this rank's draws are multiplied by. One all-gather of 24 bytes per rank.

        No host sync with NCCL. All ranks call it, equally often and in the same order.

        Args:
            mass: ``S_r``, the sum of what this rank draws in proportion to: 0-dim, of any real dtype.
            least: the smallest weight in this shard, by which its importance weights are normalised: float64, 0-dim.
            beta: their exponent, float64, 0-dim.
            largest: the largest priority given here, float64, 0-dim. It becomes that of all ranks, in place: a new row
                gets the priority that it would have in one buffer.

        Returns:
            ``W * S_r / S``, times ``(least / smallest least) ** -beta``: float64, 0-dim. Of one rank 1.0.

        Raises:
            RuntimeError: a rank has nothing to draw (on the CPU; all ranks raise). On a GPU its factor is 0.
        """
        factor, every = self._share(mass, least, largest)
        largest.copy_(every[:, _LARGEST].amax())
        return factor * (least / every[:, _LEAST].amin()) ** -beta

    def weights(self, mass: Tensor, n: int) -> Tensor:
        """The weights of ``n`` draws that are otherwise all 1: :meth:`correction`, float32 ``[n]``."""
        one = torch.ones((), dtype=torch.float64, device=mass.device)
        return self._share(mass, one, one)[0].float().repeat(n)

    def _share(self, mass: Tensor, least: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
        """``W * S_r / S``, and what all ranks say."""
        mass = mass.double()
        every = self._gathered(mass, least, largest)
        return self.size * mass / every[:, 0].sum(), every

    def draw_nothing(self, requested: torch.device | str) -> None:
        """Called by a rank that holds no row, in place of :meth:`correction`, so that the others need not wait.

        ``requested``: where its rows are to be; the others gather there.
        """
        on_gpu = str(requested) != "cpu" and "nccl" in str(dist.get_backend_config(self.process_group))
        nothing = torch.zeros((), dtype=torch.float64, device="cuda" if on_gpu else "cpu")
        self._gathered(nothing, nothing, nothing - 1)

    def _gathered(self, *numbers: Tensor) -> Tensor:
        """The numbers of each rank, float64 ``[W, 3]``: the same bits on every rank."""
        every = gathered(torch.stack(numbers), self.process_group)
        if type(every) is Tensor and every.is_cpu:
            empty = (~(every[:, 0] > 0)).nonzero().flatten().tolist()
            if empty:
                raise RuntimeError(
                    f"of {self.size} ranks those numbered {empty} have no row that can be drawn: a batch needs a shard "
                    "with such rows on every rank"
                )
        return every
