"""Uniform sampling, with replacement and without it."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpubuf.data.arguments import component
from gpubuf.data.recording import at_replays, current
from gpubuf.data.samplers.base import Drawn, RandomState, Sampler
from gpubuf.data.samplers.laws import Law
from gpubuf.data.samplers.shards import Shards
from gpubuf.data.samplers.slices import SliceSampler
from gpubuf.data.storage.end_bits import Signal
from gpubuf.data.storage.layout import RowLayout
from gpubuf.data.storage.placement import IndexBytes
from gpubuf.data.storage.plan import Recipe, RowPlan
from gpubuf.data.storage.storage import TensorStorage
from gpubuf.kernels.trajectories import Rule


class SamplerWithoutReplacement(Sampler):
    """Every row once an epoch.

    A permutation is used up batch by batch, and a new one drawn when it has ended (which sets ``ran_out``) or when the
    number of stored rows changes.

    Args:
        drop_last: end the epoch before a batch that could not be filled. Otherwise the last batch of an epoch is
            what remains, and may be shorter than asked for.
        shuffle: False visits the rows in storage order.
        replacement: accepted for compatibility.
    """

    row_tensors = ("_left",)
    drawn_state = ("_left", "_of")
    epoch_as = ("remaining", "size")

    def __init__(self, drop_last: bool = False, shuffle: bool = True, *, replacement: bool = False) -> None:
        super().__init__()
        self.drop_last, self.shuffle = drop_last, shuffle

    def __repr__(self) -> str:
        return f"{type(self).__name__}(drop_last={self.drop_last}, shuffle={self.shuffle})"

    def check_recipe(self, recipe: Recipe) -> None:
        """Raise for windows that leave rows out: an epoch has every row.

        Raises:
            ValueError: they do.
        """
        if recipe.past or recipe.whole:
            raise ValueError(
                f"a {type(self).__name__} draws every row, also those whose windows reach what was overwritten: "
                "windows that look back, or have outside='skip', need a RandomSampler or PrioritizedSampler"
            )

    def choose(self, n: int) -> tuple[Tensor, dict[Any, Tensor]]:
        """The next rows of the epoch. No host sync.

        Raises:
            ValueError: ``drop_last`` is set and fewer than ``n`` rows are stored.
        """
        at_replays().refuse(
            "the host decides which rows of an epoch come next: sample without replacement outside of the step"
        )
        size = len(self.storage)
        return self.next_of_epoch(n, size, lambda: size), {}

    def choose_batches(self, n: int, batches: int) -> tuple[Tensor, dict[Any, Tensor]]:
        """The next rows. A batch that an epoch can't fill goes on with the next one; with ``drop_last`` it is left out.

        ``ran_out`` says whether an epoch has ended in any of them.
        """
        found, need, ran_out = list[Tensor](), n * batches, False
        while need > 0:
            rows, _ = self.choose(n if self.drop_last else need)
            found.append(rows)
            need -= rows.numel()
            ran_out |= self.ran_out
        self.ran_out = ran_out
        return torch.cat(found), {}

    def can_sample(self, storage: TensorStorage, batch_size: int) -> bool:
        return len(storage) >= (batch_size if self.drop_last else 1)

    def index_bytes(self, shape: tuple[int, ...], device_type: str) -> IndexBytes:
        return IndexBytes(index=8 * math.prod(shape))


class _WholeWindows(SliceSampler):
    """Rows that have so many steps before and after them, drawn uniformly: as slices of all of these steps.

    Args:
        recipe: says how many, and which steps must not have been overwritten.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.before, after = recipe.whole or (0, 0)
        self.past = recipe.past
        super().__init__(slice_len=self.before + 1 + after, truncated_key=None, init_key=None)

    def _new_rule(self, length: int) -> Rule:
        return Rule(length, length, by_transition=True, past=max(self.past - self.before, 0))

    def _signal(self, storage: TensorStorage) -> Signal:
        """Where windows end."""
        assert storage.readers.end_bits
        return storage.readers.end_bits.signal

    def check_rows(self, layout: RowLayout, ndim: int) -> None:
        """The recipe's are checked."""

    def rows(self, n: int, random: RandomState) -> Tensor:
        """Positions, int64 ``[n]``. One launch, no host sync."""
        length = self.slice_len or 1
        return self.trajectory_index.draw(n, random)[0].view(n, length)[:, self.before].contiguous()


class RandomSampler(Sampler):
    """Rows drawn uniformly, with replacement, in the launch that copies them.

    With windows (docs/windows.md) that look back, the oldest steps are not drawn once rows were overwritten. Windows
    with ``outside="skip"`` take an index of the trajectories, which every write keeps up to date: rows are drawn by one
    launch, and copied by another.

    Args:
        law: how often rows of each age are drawn: :class:`Geometric`, :class:`Linear`, :class:`Newest` or
            :class:`EmphasizeRecent` of :mod:`gpubuf.data.samplers.laws`; or of each task: :class:`Balanced`. None: all
            rows equally often.
        replacement: False makes a :class:`SamplerWithoutReplacement` of the other arguments.
        process_group: ranks that hold a shard each. Every batch then has ``"priority_weight"``, float32: the number of
            rows of this rank's shard, divided by the mean of the ranks' (docs/scale.md). One all-gather of 24 bytes per
            rank and draw, no host sync with NCCL. Of one rank all weights are 1.

    Raises:
        TypeError: ``law`` is none; or ``process_group`` is none, or this process is not one of its ranks.
        ValueError: there are a law and a process group: weights of ranks are those of uniform draws.
    """

    without_replacement = SamplerWithoutReplacement
    drawn_state = ()
    settings = ("law",)

    def __init__(
        self, *, law: Law | None = None, replacement: bool = True, process_group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__()
        self.require_replacement(replacement)
        if law is not None and process_group is not None:
            raise ValueError("law and process_group exclude each other: weights of ranks are those of uniform draws")
        self.law: Law | None = None if law is None else component(law, Law)
        self.shards = Shards.of(process_group)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'' if self.law is None else f'law={self.law}'})"

    def check_recipe(self, recipe: Recipe) -> None:
        """Raise for a law with windows that must be whole, of which the trajectory index draws each equally often.

        Raises:
            ValueError: so it is.
        """
        if recipe.whole and self.law is not None:
            raise ValueError(f"law={self.law} can't be used with windows that have outside='skip'")

    # Draws rows whose windows are whole; None: all rows are drawn.
    _whole: _WholeWindows | None = None

    def read_from(self, reader: RowPlan) -> None:
        super().read_from(reader)
        self._whole = None
        if reader.recipe.whole is not None:
            self._whole = _WholeWindows(reader.recipe)
            self._whole.bind(self.storage)

    def unbind(self) -> None:
        super().unbind()
        self._whole = None

    def index_bytes(self, shape: tuple[int, ...], device_type: str) -> IndexBytes:
        own = super().index_bytes(shape, device_type)
        return own + self._whole.index_bytes(shape, device_type) if self._whole else own

    def memory(self) -> IndexBytes:
        return super().memory() + (self._whole.memory() if self._whole else IndexBytes())

    def _weights(self, n: int) -> dict[Any, Tensor]:
        """The info of ``n`` rows."""
        if not self.shards:
            return {}
        mass = self._whole.trajectory_index.total if self._whole else self.reader.count_drawn()
        return {"priority_weight": self.shards.weights(mass, n)}

    def _checked(self, law: Law) -> Law:
        # The first write decides how many environments there are.
        law.check(self.storage.rows.envs)
        return law

    def choose(self, n: int) -> tuple[Tensor, dict[Any, Tensor]]:
        """Positions, with equal probabilities or by the law. No host sync.

        Raises:
            RuntimeError: no window is whole (CPU).
        """
        storage, info = self.storage, self._weights(n)
        random = self.random_state(storage.device)
        if self._whole:
            return self._whole.rows(n, random), info
        return self.reader.draw(random.state, n, self.law and self._checked(self.law)), info

    def draw(self, n: int) -> Drawn:
        """Choose and gather in one launch. No host sync."""
        if self._whole:
            return super().draw(n)
        # Past calls where there is nothing to do: every sample comes here.
        info = self._weights(n) if self.shards else {}
        random = self._random
        if not random or current.recording:
            random = self.random_state(self.reader.device)
        law = self.law and self._checked(self.law)
        tensors, index, generation = self.reader.sample_uniform(random.state, n, law)
        return Drawn(tensors, index, generation, info)

    def can_sample(self, storage: TensorStorage, batch_size: int) -> bool:
        """Whether there are rows to draw. Synchronises where windows must be whole."""
        return super().can_sample(storage, batch_size) and (
            not self._whole or int(self._whole.trajectory_index.total) > 0
        )
