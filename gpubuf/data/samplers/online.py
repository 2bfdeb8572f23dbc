"""Steps that no batch has had yet come first: as world models are trained, on what has just happened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gpubuf.data.arguments import check_count, component
from gpubuf.data.operation import ALONE, Alone, Operation
from gpubuf.data.recording import at_replays
from gpubuf.data.samplers.base import RandomState, Sampler
from gpubuf.data.samplers.slices import SliceSampler
from gpubuf.data.storage.placement import IndexBytes
from gpubuf.data.storage.plan import Recipe, RowPlan
from gpubuf.data.storage.storage import TensorStorage
from gpubuf.kernels.rows import SIZE, WRITTEN
from gpubuf.serialization import need

# Later than any row: the first window begins with the oldest one at the next draw.
_UNKNOWN = 2**62


class OnlineFirst(Sampler):
    """Windows of steps that no batch has had yet, the oldest first; then rows that another sampler draws.

    From the oldest step at the first draw on, also after ``empty()``, the steps of each environment are cut into
    windows of ``every`` steps, one after the other, across the ends of trajectories. Each is drawn by one row, as soon
    as all steps are stored that batches take around that: ``windows=Window(-64, 0, outside="cross")`` with ``every=64``
    are windows of 65 steps that share one with the next. A window that was overwritten before its turn is left out. How
    many there are is known on the device, so that a captured draw takes those that have come since the last replay. No
    host sync.

    Batches have ``"online"``, bool ``[n]``: whether a row is that of such a window. Its importance weight is 1.

    Args:
        sampler: draws the other rows. Its priorities and its random stream are the buffer's.
        every: steps from the drawn row of a window to that of the next one of its environment, at least 1.

    Raises:
        ValueError: ``every`` is below 1; the sampler draws slices, epochs or new steps; or, in a buffer, windows have
            ``outside="skip"``.
        TypeError: ``sampler`` is no sampler, or has a ``process_group``.
    """

    row_tensors = ("_served",)

    def __init__(self, sampler: Sampler, every: int) -> None:
        super().__init__()
        check_count(every, "every")
        self.rest: Sampler = component(sampler, Sampler)
        if self.rest.shards is not None:
            raise TypeError("OnlineFirst takes no sampler with a process_group: each rank has windows of its own")
        if self.rest.epoch_as or isinstance(self.rest, (SliceSampler, OnlineFirst)):
            raise ValueError(f"OnlineFirst takes a sampler that draws any number of single rows, got {self.rest!r}")
        self.every = every
        self.has_priorities = self.rest.has_priorities  # type: ignore[misc]
        #: Windows of all environments, numbered side by side, that batches have had or will not have; and the number of
        #: the first one's row, or ``_UNKNOWN``. int64 ``[2]``.
        self._served: Tensor | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.rest!r}, every={self.every})"

    # Binding

    def bind(self, storage: TensorStorage, operation: Operation | Alone = ALONE) -> None:
        # Unbinds both from another storage first.
        super().bind(storage, operation)
        self.rest.bind(storage, operation)

    def unbind(self) -> None:
        self.rest.unbind()
        super().unbind()

    def as_bound(self) -> Callable[[], None]:
        put_back, put_rest_back = super().as_bound(), self.rest.as_bound()

        def put_both_back() -> None:
            # This one unbinds both first.
            put_back()
            put_rest_back()

        return put_both_back

    def read_from(self, reader: RowPlan) -> None:
        self.rest.read_from(reader)
        super().read_from(reader)

    def check_recipe(self, recipe: Recipe) -> None:
        """Raise for windows that stay within a trajectory, and for what the other sampler refuses.

        Raises:
            ValueError: so it is.
        """
        if recipe.whole:
            raise ValueError(
                f"an {type(self).__name__} cuts steps into windows across the ends of trajectories: those that have "
                "outside='skip' need a RandomSampler or PrioritizedSampler"
            )
        self.rest.check_recipe(recipe)

    # Sampling

    def choose(self, n: int) -> tuple[Tensor, dict[Any, Tensor]]:
        """Positions int64 ``[n]``, with ``"online"`` and what the other sampler says. No host sync."""
        others, info = self.rest.choose(n)
        (served, start), written, oldest = self._served_windows(), *self._rows()
        torch.minimum(start, oldest, out=start)
        recipe, envs, apart = self.reader.recipe, self.storage.rows.envs, self._apart
        # Rounded up: the first window that is stored as a whole.
        begin = (oldest - start + (recipe.past * envs + apart - 1)).div(apart, rounding_mode="floor") * envs
        begin = torch.maximum(served, begin)
        window = begin + torch.arange(n, device=others.device)
        row = (window + start).add_(window.div(envs, rounding_mode="floor"), alpha=apart - envs)
        online = row < written - recipe.offsets[-1] * envs
        torch.add(begin, online.sum(), out=served)
        if "priority_weight" in info:
            info = {**info, "priority_weight": torch.where(online, 1.0, info["priority_weight"])}
        return torch.where(online, row.remainder_(self.storage.max_size), others), {**info, "online": online}

    @property
    def _apart(self) -> int:
        """Rows from a window to the next one of its environment."""
        return self.every * self.storage.rows.envs

    def _served_windows(self) -> Tensor:
        if self._served is None:
            at_replays().refuse("the first draw begins to count windows: sample once before")
            self._served = torch.zeros(2, dtype=torch.int64, device=self.storage.device)
            self._served[1].fill_(_UNKNOWN)
        at_replays().holds(self, "_served")
        return self._served

    def _rows(self) -> tuple[Tensor, Tensor]:
        """How many rows were written, and before the oldest stored one: int64 ``[]`` each."""
        counters = self.storage.ring.counters
        return counters[WRITTEN], counters[WRITTEN] - counters[SIZE]

    def _windows(self) -> tuple[Tensor, Tensor]:
        """How many windows were stored as a whole, those of all environments, and rows from the first one's on.

        int64 ``[]`` each.
        """
        written, oldest = self._rows()
        rows, envs = written - torch.minimum(self._served_windows()[1], oldest), self.storage.rows.envs
        complete = rows - self.reader.recipe.offsets[-1] * envs
        return -(-complete).div(self._apart, rounding_mode="floor") * envs, rows

    def can_sample(self, storage: TensorStorage, batch_size: int) -> bool:
        return self.rest.can_sample(storage, batch_size)

    def random_state(self, device: torch.device | str) -> RandomState:
        return self.rest.random_state(device)

    @property
    def random(self) -> RandomState | None:
        return self.rest.random

    def set_rng(self, generator: torch.Generator | None) -> None:
        self.rest.set_rng(generator)

    # Priorities

    @property
    def default_priority(self) -> Tensor | float:
        return self.rest.default_priority

    def reduce(self, priority: Tensor, n: int, masks: Sequence[Tensor] = ()) -> Tensor:
        return self.rest.reduce(priority, n, masks)

    def check_priority(self, priority: Tensor) -> None:
        self.rest.check_priority(priority)

    def update_priority(
        self, index: Any, priority: Any, *, storage: TensorStorage | None = None, generation: Tensor | None = None
    ) -> None:
        self.rest.update_priority(index, priority, storage=storage, generation=generation)

    def mark_update(self, index: Any, *, storage: TensorStorage | None = None) -> None:
        self.rest.mark_update(index, storage=storage)

    # State

    def index_bytes(self, shape: tuple[int, ...], device_type: str) -> IndexBytes:
        return self.rest.index_bytes(shape, device_type)

    def memory(self) -> IndexBytes:
        return super().memory() + self.rest.memory()

    def empty(self) -> None:
        super().empty()
        if self._served is not None:
            self._served[0].zero_()
            self._served[1].fill_(_UNKNOWN)

    def state_dict(self) -> dict[str, Any]:
        left, after = None, None
        if self._has_rows:
            windows, rows = self._windows()
            left, after = int(windows - self._served_windows()[0]), int(rows % self._apart) // self.storage.rows.envs
        return {"type": type(self).__name__, "rest": self.rest.state_dict(), "left": left, "after": after}

    def load_state_dict(self, state: dict[str, Any], order: Tensor | None = None) -> None:
        self.rest.load_state_dict(state["rest"], order)
        if state["left"] is not None:
            served, start = self._served_windows()
            # Positions, and the count of rows, may be others now: what is left is not, nor how the newest were cut.
            after = state.get("after", 0) * self.storage.rows.envs
            start.copy_(-(after - self._rows()[0]).remainder(self._apart))
            served.copy_(self._windows()[0] - state["left"])

    def check_state(self, state: dict[str, Any], capacity: int, size: int) -> None:
        own = type(self).__name__
        need(state["type"] == own, f"the checkpoint is of a buffer with a {state['type']}, this buffer has a {own}")
        self.rest.check_state(state["rest"], capacity, size)
        for count in (state["left"], state.get("after")):
            need(count is None or type(count) is int, "the checkpoint doesn't say how many windows are left")
