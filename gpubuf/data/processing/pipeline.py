"""What the launch does to the batches of a buffer, and the statistics that learn from its writes, as one object."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from gpubuf.data.operation import Operation
from gpubuf.data.processing.augment import RandomShift
from gpubuf.data.processing.base import Process
from gpubuf.data.processing.statistics import Normalize
from gpubuf.data.samplers.base import RandomState, is_tensor
from gpubuf.data.storage.containers import Data
from gpubuf.data.storage.end_bits import OWN, Streams
from gpubuf.data.storage.layout import Key, Leaf, as_written
from gpubuf.serialization import need


class Pipeline:
    """The objects of a buffer, in whatever order they were given: a number is normalised after it has been decoded, and
    images are shifted as they are read.

    Args:
        process: those whose work the launch does.
        statistics: those that are transforms of batches, and only learn here.

    Attributes:
        process: as given.
        steps: all of them.
        draws: random numbers per row of a batch.
        learns: whether any of them looks at what is written.
        random: their stream, once the buffer has rows; None if ``draws`` is 0.

    Raises:
        TypeError: something else is in ``process``.
        ValueError: two of them do the same to a key, or one comes twice.
    """

    def __init__(self, process: Iterable[Process], statistics: Iterable[Process] = ()) -> None:
        self.process = tuple(process)
        self.steps = (*self.process, *statistics)
        taken: dict[tuple[type, Key], Process] = {}
        for step in self.process:
            if not isinstance(step, (Normalize, RandomShift)):
                raise TypeError(f"process takes Normalize and RandomShift: give {step!r} as transform=")
            for key in step.serves():
                other = taken.setdefault((type(step), key), step)
                if other is not step:
                    raise ValueError(f"both {other!r} and {step!r} serve {as_written(key)!r}: one of them can")
        if len(set(map(id, self.steps))) < len(self.steps):
            raise ValueError(f"an object comes twice among {list(self.steps)}")
        self.random: RandomState | None = None
        self._generator: torch.Generator | None = None
        self._options: dict[Key, dict[str, Any]] = {}
        self._pairs = 0
        self._learning = [step for step in self.steps if type(step).on_write is not Process.on_write]
        self.learns = bool(self._learning)
        self._checking = [step for step in self._learning if type(step).check_write is not Process.check_write]

    @classmethod
    def of(cls, steps: Iterable[Process] | Process) -> Self:
        """The objects as users give them, as one."""
        return cls((steps,) if isinstance(steps, Process) else steps)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.steps)

    def with_statistics(self, steps: Iterable[Process]) -> Pipeline:
        """These objects, and transforms that learn as well. The random stream goes on."""
        other = Pipeline(self.process, (*self.steps[len(self.process) :], *steps))
        other.random, other._generator = self.random, self._generator
        return other

    # Binding

    def attach(self, operation: Operation) -> None:
        """Let methods that users call on the objects be operations of their buffer."""
        for step in self.steps:
            step.operation = operation

    def check(self, leaves: Sequence[Leaf]) -> None:
        """Raise a ValueError unless batches of these leaves, with the dtypes of the batch, can be processed."""
        for step in self.steps:
            step.check(leaves)

    def bind(self, leaves: Sequence[Leaf], envs: int, device: torch.device) -> None:
        """Have all state on ``device``, for rows of these leaves. What is there goes on. May synchronise.

        A buffer calls it when it has allocated its rows, and again after they have moved; then :meth:`options` gives
        new addresses.
        """
        self.check(leaves)
        self._options, self._pairs = {leaf.key: {} for leaf in leaves}, 0
        for step in self.steps:
            step.bind(leaves, envs, device)
        for step in self.process:
            for leaf, origin in step.served_leaves(leaves):
                self._options[leaf.key] |= step.options_of(leaf, origin.key)
        for found in self._options.values():
            if "pad" in found:
                found["pair"] = self._pairs
                self._pairs += 1
        if self.draws:
            own = self.random or RandomState(generator=self._generator, device=device)
            self.random = own.to(device)

    # For the launch

    @property
    def draws(self) -> int:
        """Uniforms of a row of the batch: a pair for each image key."""
        return 2 * self._pairs

    @property
    def noise(self) -> Tensor | None:
        """The random state, int64 ``[3]``."""
        return self.random.state if self.random else None

    def options(self, key: Key) -> dict[str, Any]:
        """Attributes of :class:`gpubuf.kernels.rows.Field` for a key of the batch: valid until :meth:`bind`."""
        return self._options.get(key, {})

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Start a new random stream, seeded by ``generator`` (None: by torch's global one)."""
        self._generator = generator
        if self.random:
            # In place: a captured graph draws from it.
            self.random.state.copy_(RandomState(generator=generator, device=self.random.device).state)

    # Writing

    def check_write(self, data: Data, ndim: int) -> None:
        """Raise a ValueError, before anything is written, if a batch can't be learnt from."""
        for step in self._checking:
            step.check_write(data, ndim)

    def on_write(self, data: Data, ndim: int, stored: Tensor | None = None, streams: Streams = OWN) -> None:
        """A batch of these streams was written, of which the writer kept some rows. See :meth:`Process.on_write`."""
        for step in self._learning:
            step.streams = streams
            step.on_write(data, ndim, stored)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        own = self.random.state.nbytes if self.random else 0
        return own + sum(tensor.nbytes for step in self.steps for tensor in step.tensors())

    # State

    def state_dict(self) -> dict[str, Any]:
        """The state of all objects, in their order, and of the random stream. Synchronises."""
        states = {str(number): step.state_dict() for number, step in enumerate(self.steps)}
        types = [type(step).__name__ for step in self.steps]
        return {"types": types, "steps": states, "random": self.random.state_dict() if self.random else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`, in place."""
        self.check_state(state)
        for number, step in enumerate(self.steps):
            step.load_state_dict(state["steps"][str(number)])
        if state["random"]:
            self.random = self.random or RandomState(seed=0)
            self.random.load_state_dict(state["random"])

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise a ValueError unless ``state``, which was read from files, can be loaded."""
        own = [type(step).__name__ for step in self.steps]
        if list(state["types"]) != own:
            raise ValueError(f"the state is that of the processing {state['types']}, this buffer has {own}")
        for number, step in enumerate(self.steps):
            step.check_state(state["steps"][str(number)])
        random = state["random"]
        usable = random is None or is_tensor(random["state"], torch.int64, (3,))
        need(usable, "the random state of the processing is not int64 [3]")
