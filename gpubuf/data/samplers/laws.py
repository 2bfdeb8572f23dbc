"""Laws by which rows are drawn with other probabilities than the same for all: by age or environment, in closed form.

The *rank* of a row counts the rows that were written after it: 0 is the newest one, ``N - 1`` the oldest of ``N`` that
may be drawn. The rows of a step of several environments follow each other. A law makes a rank of one uniform, in the
launch that copies the rows. Nothing is stored per row.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from gpubuf.data.arguments import check_count
from gpubuf.data.recording import at_replays
from gpubuf.kernels.rows import BALANCED, GEOMETRIC, LINEAR, RECENT, Reading


class Law:
    """Base class of laws.

    Attributes:
        code: which of the laws in :mod:`gpubuf.kernels.rows` it is.
        numbers: what that needs, float64. It changes in place, so that captured graphs see it.
    """

    code: ClassVar[int]

    def __init__(self, *numbers: float) -> None:
        self.numbers = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        # The last result of `reading`, and what it was of.
        self._known: tuple[Any, tuple[Any, ...] | None] = (None, None)

    def check(self, envs: int) -> None:
        """Raise a ValueError unless rows of so many environments can be drawn."""

    def reading(self, reading: tuple[Any, ...], device: torch.device) -> tuple[Any, ...]:
        """A :class:`gpubuf.kernels.rows.Reading` on ``device``, or its first entries, with this law."""
        if self.numbers.device != device:
            # CUDA has read memory that is not pinned when the call returns.
            self.numbers = self.numbers.to(device, non_blocking=self.numbers.is_cpu)
        of, found = self._known
        if of is not reading or found is None or found[-1] is not self.numbers:
            found = tuple(Reading(*reading)._replace(law=self.code, numbers=self.numbers))
            self._known = reading, found
        return found


class Geometric(Law):
    """Each row is drawn ``decay`` times as often as the one after it: with probability ``decay ** rank / sum``.

    Args:
        decay: in (0, 1).

    Raises:
        ValueError: it is not.
    """

    code = GEOMETRIC

    def __init__(self, decay: float) -> None:
        if not 0 < decay < 1:
            raise ValueError(f"decay must be in (0, 1), got {decay}")
        self.decay = decay
        super().__init__(math.log(decay), 0.0)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.decay})"


class Linear(Law):
    """The probability of a row is in proportion to ``N - rank``: the oldest has 1, the newest N parts."""

    code = LINEAR

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Newest(Law):
    """Uniform among the newest rows.

    Args:
        count: how many; of fewer rows all are drawn.

    Raises:
        TypeError: it is no number.
        ValueError: it is no whole number of at least 1.
    """

    code = RECENT

    def __init__(self, count: int) -> None:
        check_count(count, "count")
        self.count = count
        super().__init__(-math.inf, float(count))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.count})"


class EmphasizeRecent(Law):
    """Emphasizing recent experience: later updates of an episode draw among fewer, newer rows.

    The k-th of K updates draws uniformly among the newest ``max(N * eta ** (1000 * k / K), least)`` rows. Set
    :attr:`progress` to ``k / K`` before each.

    Reference: Wang and Ross, "Boosting Soft Actor-Critic: Emphasizing Recent Experience without Forgetting the Past",
    2019.

    Args:
        eta: in (0, 1]; 0.994 to 0.999 in the paper. 1 is uniform.
        least: c_min, so many rows are left to draw from, at least 1.

    Raises:
        ValueError: a number is out of range.
    """

    code = RECENT

    def __init__(self, eta: float = 0.996, least: int = 5000) -> None:
        if not 0 < eta <= 1 or least < 1:
            raise ValueError(f"eta must be in (0, 1] and least at least 1, got eta={eta} and least={least}")
        self.eta, self.least = eta, least
        super().__init__(0.0, float(least))

    @property
    def progress(self) -> Tensor:
        """``k / K``: float64, 0-dim. Set it to a number or a 0-dim tensor on the buffer's device, which graphs see."""
        return self.numbers[0] / (1000 * math.log(self.eta)) if self.eta < 1 else self.numbers[0]

    @progress.setter
    def progress(self, value: float | Tensor) -> None:
        scale = 1000 * math.log(self.eta)
        if isinstance(value, Tensor):
            self.numbers[0].copy_(value.detach().reshape(()) * scale)
        else:
            at_replays().refuse("progress is set to a number, which would stay: set it to a tensor on the device")
            self.numbers[0].fill_(value * scale)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(eta={self.eta}, least={self.least})"


class Balanced(Law):
    """Each task as often as any other, whichever number of environments it has, and each row of a task equally often.

    For storages ``[T, E]`` where an environment writes rows of one task: draws a task uniformly, then one of its
    environments, then a step, all from one uniform. With as many environments for each task that is what a uniform draw
    does.

    Rows of a task that are anywhere in a storage have no closed form: each write would have to update how many rows
    every task has, and how to find the n-th of them. Give each task a buffer of its own instead, and draw from all of
    them by a :class:`MixedReplayBuffer`: tasks are balanced in every batch, and no task overwrites rows of another.

    Args:
        tasks: the task of each environment, a number or a name; ``[E]``, or more dimensions if the storage has more. A
            tensor on a GPU is waited for.

    Raises:
        ValueError: there is none; or, at a draw, the storage has another number of environments.
    """

    code = BALANCED

    def __init__(self, tasks: Sequence[Hashable] | Tensor) -> None:
        tasks = tasks.reshape(-1).tolist() if isinstance(tasks, Tensor) else list(tasks)
        if not tasks:
            raise ValueError("tasks are those of the environments, of which there is at least one")
        counts = Counter(tasks)
        number = {task: k for k, task in enumerate(counts)}
        by_task = sorted(range(len(tasks)), key=lambda env: number[tasks[env]])
        super().__init__(len(counts), *itertools.accumulate(counts.values(), initial=0), *by_task)
        self._n_tasks, self._envs = len(counts), len(tasks)

    def check(self, envs: int) -> None:
        if envs != self._envs:
            raise ValueError(f"{self} can't draw rows of {envs} environments: give it the task of each")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._n_tasks} tasks of {self._envs} environments)"
