"""Slices of every trajectory in turn."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpubuf.data.recording import refuse_in_capture
from gpubuf.data.samplers import torchrl_state
from gpubuf.data.samplers.base import Drawn
from gpubuf.data.samplers.saved_state import demand, is_count, positions_below
from gpubuf.data.samplers.slices import SliceSampler
from gpubuf.data.samplers.trajectory_index import TrajectoryIndex
from gpubuf.data.storage.placement import IndexBytes
from gpubuf.data.storage.tensor_storage import TensorStorage
from gpubuf.kernels.trajectories import Rule


class SliceSamplerWithoutReplacement(SliceSampler):
    """Every eligible trajectory once an epoch, one slice of it, which starts anywhere in it with equal probability.

    A batch has fewer slices than asked for if no more trajectories are left; then ``ran_out`` is set, and the next
    batch begins an epoch in another order. So does the first batch after a write. An epoch begins with a
    synchronisation: how many trajectories there are is known to the device alone.

    Args:
        drop_last: end the epoch before a batch that could not be filled.
        shuffle: False visits the trajectories in the order of the index.
        num_slices, slice_len, end_key, end_keys, traj_key, ends, trajectories, truncated_key, init_key, strict_length,
            compile, use_gpu, stack: as for :class:`SliceSampler`.
        replacement: accepted for compatibility.
    """

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        drop_last: bool = False,
        end_key: Any = None,
        end_keys: Sequence[Any] | None = None,
        traj_key: Any = None,
        ends: Tensor | None = None,
        trajectories: Tensor | None = None,
        truncated_key: Any = ("next", "truncated"),
        init_key: Any = "is_init",
        strict_length: bool = True,
        shuffle: bool = True,
        compile: bool | dict[str, Any] = False,
        use_gpu: torch.device | bool = False,
        stack: bool = False,
        replacement: bool = False,
    ) -> None:
        super().__init__(
            num_slices=num_slices,
            slice_len=slice_len,
            end_key=end_key,
            end_keys=end_keys,
            traj_key=traj_key,
            ends=ends,
            trajectories=trajectories,
            truncated_key=truncated_key,
            init_key=init_key,
            strict_length=strict_length,
            stack=stack,
        )
        self.drop_last, self.shuffle = drop_last, shuffle
        self._ranks: Tensor | None = None
        self._epoch: tuple[int, Rule] | None = None
        # How many trajectories there were in an epoch of TorchRL's, until the next batch tells whether they are there.
        self._restored: int | None = None

    def _choose_slices(
        self, storage: TensorStorage, index: TrajectoryIndex, n: int, length: int
    ) -> tuple[Tensor, Tensor, Tensor, dict[Any, Tensor]]:
        refuse_in_capture(
            "an epoch begins when the host says so: sample slices without replacement outside of the step"
        )
        rule = self._rule(length)
        index.use(rule)
        rng = self.random_state(storage.device)
        if self._restored is not None:
            self._go_on(storage, index)
        if self._ranks is None or self._epoch != (storage.written, rule):
            self._begin(storage, index)
        assert self._ranks is not None
        if self.drop_last and self._ranks.numel() < n:
            raise ValueError(
                f"a batch takes {n} trajectories, {self._ranks.numel()} are eligible, and drop_last=True forbids less"
            )
        ranks, left = self._ranks[:n], self._ranks[n:]
        chosen = index.draw(ranks.numel(), rng, ranks)
        ran_out = left.numel() < (n if self.drop_last else 1)
        # In one step: an interrupt may come at any call.
        self._ranks, self.ran_out = None if ran_out else left, ran_out
        return *chosen, {}

    def draw_batches(self, n: int, batches: int) -> Drawn:
        if not self.drop_last:
            raise ValueError("the last batch of an epoch may be shorter than the others: several need drop_last=True")
        return super().draw_batches(n, batches)

    def _begin(self, storage: TensorStorage, index: TrajectoryIndex) -> None:
        """Begin an epoch. Synchronises."""
        total = int(index.total.item())
        if total == 0:
            raise RuntimeError(index.nothing_eligible())
        self._ranks = self.order_of(total, storage.device, self.shuffle)
        self._epoch = (storage.written, index.rule)

    def _go_on(self, storage: TensorStorage, index: TrajectoryIndex) -> None:
        """Go on with an epoch that was restored, if there are as many trajectories as then. Synchronises."""
        same = int(index.total.item()) == self._restored
        self._epoch, self._restored = (storage.written, index.rule) if same else None, None

    def rebuild(self) -> None:
        with self.lock:
            super().rebuild()
            self._ranks = None

    def empty(self) -> None:
        super().empty()
        self._ranks = None

    def free(self) -> None:
        super().free()
        self._ranks = self._epoch = None

    def forget_storage(self) -> None:
        super().forget_storage()
        self._ranks = self._epoch = None

    def memory(self) -> IndexBytes:
        order = 0 if self._ranks is None else self._ranks.untyped_storage().nbytes()
        return IndexBytes(index=order) + super().memory()

    def move(self) -> None:
        super().move()
        if self._ranks is not None:
            self._ranks = self._ranks.to(self.storage.device)

    def state_dict(self) -> dict[str, Any]:
        # What was restored of TorchRL's has no epoch until a batch is drawn.
        left = None if self._ranks is None or self._epoch is None else self._ranks.clone()
        epoch = None if self._epoch is None else [self._epoch[0], *self._epoch[1]]
        return {**super().state_dict(), "ranks": left, "epoch": epoch, "ran_out": self.ran_out}

    def load_state_dict(self, state: dict[str, Any], order: Tensor | None = None) -> None:
        """Restore :meth:`state_dict`, or TorchRL's: what an epoch has left. TorchRL's has no random stream.

        An epoch of TorchRL's begins anew if there are more or less trajectories than there were.
        """
        self._restored = None
        if "_sample_list" in state:
            self._load_epoch(state, order)
            return
        super().load_state_dict(state, order)
        ranks, epoch, self.ran_out = state["ranks"], state["epoch"], state["ran_out"]
        if ranks is None or order is not None:
            # Rows that lie elsewhere now begin a new epoch.
            self._ranks = self._epoch = None
        else:
            written, *rule = epoch
            self._ranks, self._epoch = ranks.to(self.storage.device, copy=True), (written, Rule(*rule))

    def _load_epoch(self, state: dict[str, Any], order: Tensor | None) -> None:
        super().load_state_dict({}, order)
        epoch = torchrl_state.epoch_of(state)
        left, self.drop_last, self.ran_out = epoch["remaining"], bool(state["drop_last"]), epoch["ran_out"]
        begun = left is not None and left.numel() > 0 and order is None
        self._ranks = left.to(self.storage.device) if begun else None
        self._epoch, self._restored = None, epoch["size"] if begun else None

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Write the epoch into a folder, as TorchRL does. Synchronises."""
        with self.lock:
            total = 0 if self._ranks is None or self._index is None else int(self._index.total.item())
            torchrl_state.write_epoch(Path(path), self._ranks, total, self.drop_last, self.ran_out)

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Restore what :meth:`dumps` or TorchRL has written, after the storage has been restored. Synchronises.

        Raises:
            ValueError: the files are damaged, or there are none.
        """
        with self.lock:
            self.load_state_dict(torchrl_state.read_epoch(Path(path)))

    def check_state(self, state: dict[str, Any], capacity: int, size: int) -> None:
        super().check_state(state, capacity, size)
        ranks, epoch = state["ranks"], state["epoch"]
        demand(type(state["ran_out"]) is bool, "the checkpoint's epoch is damaged")
        if ranks is not None:
            # At most one trajectory a row.
            demand(positions_below(ranks, size), "the checkpoint's epoch is damaged")
            is_epoch = len(epoch) == 1 + len(Rule._fields) and all(is_count(int(n)) for n in epoch)
            demand(is_epoch, "its rule is damaged")


SliceSampler.without_replacement = SliceSamplerWithoutReplacement
