"""Transforms of batches, in order, and TorchRL's MultiStepTransform."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from gpubuf.data.arguments import describe_type
from gpubuf.data.processing.pipeline import Pipeline
from gpubuf.data.processing.statistics import RunningStatistics
from gpubuf.data.recording import at_replays
from gpubuf.data.stacks import FrameStack
from gpubuf.data.storage.containers import Data, device_of
from gpubuf.data.storage.layout import Key, as_key
from gpubuf.data.storage.placement import AUTO
from gpubuf.data.storage.plan import STEPS_KEY, Recipe
from gpubuf.data.storage.schema import END_NAMES, NEXT_KEY
from gpubuf.data.storage.storage import TensorStorage


class _Step(nn.Module):
    """One transform, with the direction in which it applies.

    A module keeps its parameters and buffers in the state of the buffer. An object with an ``inv`` method (as
    TorchRL's transforms have) also applies on the way in; ``invert=True`` applies a plain callable only then.
    """

    def __init__(self, transform: Callable[[Data], Data], invert: bool) -> None:
        super().__init__()
        if not callable(transform):
            raise TypeError(f"a transform must be callable, got {type(transform).__name__}")
        self.transform = transform
        self.invert = invert

    def forward(self, data: Data) -> Data:
        return data if self.invert else self.transform(data)

    def inv(self, data: Data) -> Data | None:
        if self.invert:
            return self.transform(data)
        inverse = getattr(self.transform, "inv", None)
        return data if inverse is None else inverse(data)


class Compose(nn.Module):
    """Transforms in order: first to last on sampled batches, last to first on written ones.

    It can be indexed and iterated, and gives the objects that you gave it. A slice is a new Compose of the same
    objects.

    Args:
        *given: callables from a batch to a batch, or modules; or one list of them. A Compose among them gives its own
            transforms.
        transforms: a list of them, instead.

    Raises:
        TypeError: a transform can't be called.
    """

    def __init__(self, *given: Any, transforms: Sequence[Callable[[Data], Data]] | None = None) -> None:
        super().__init__()
        if transforms is None:
            transforms = given[0] if len(given) == 1 and isinstance(given[0], list) else given
        elif given:
            raise TypeError("give transforms one by one, or a list of them, not both")
        self.steps = nn.ModuleList()
        self._note()
        for transform in transforms:
            self.append(transform)

    def _note(self) -> None:
        """Note what every sample and every write asks."""
        #: Whether there is none.
        self.is_empty = not len(self.steps)
        stacks = stacks_of(self)
        #: The frame stacks, where there is nothing else; None: batches alone can be written.
        self.stacks = stacks if len(stacks) == len(self.steps) else None

    def append(self, transform: Callable[[Data], Data], *, invert: bool = False) -> None:
        """Add a transform after the others."""
        self.insert(len(self.steps), transform, invert=invert)

    def insert(self, index: int, transform: Callable[[Data], Data], *, invert: bool = False) -> None:
        """Add a transform before the one at ``index``; a negative one counts from the end.

        Raises:
            ValueError: there are not so many.
        """
        n = len(self)
        if not -n <= index <= n:
            raise ValueError(f"the index must be in [-{n}, {n}], got {index}")
        index += n if index < 0 else 0
        for step in transform.steps if isinstance(transform, Compose) and not invert else [_Step(transform, invert)]:
            self.place(index, step)
            index += 1

    def place(self, index: int, step: nn.Module) -> None:
        """Add a step of another Compose, with the transform in it and its direction, before the one at ``index``."""
        self.steps.insert(index, step)
        self._note()

    def pop(self, index: int = -1) -> Any:
        """Remove the transform at ``index``, the last one by default, and return it."""
        step: Any = self.steps.pop(index)
        self._note()
        return step.transform

    @property
    def transforms(self) -> list[Any]:
        """The transforms, as they were given."""
        return [step.transform for step in self.steps]

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> Compose: ...

    def __getitem__(self, index: int | slice) -> Any:
        if not isinstance(index, slice):
            return self.transforms[index]
        part = Compose()
        for step in list(self.steps)[index]:
            part.place(len(part), step)
        return part

    def __iter__(self) -> Iterator[Any]:
        return iter(self.transforms)

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def has_inverse(self) -> bool:
        """Whether anything is done to a batch about to be written."""
        return any(step.invert or hasattr(step.transform, "inv") for step in self.steps)

    def forward(self, data: Data) -> Data:
        """Transform a sampled batch."""
        for step in self.steps:
            data = step(data)
        return data

    def inv(self, data: Data) -> Data | None:
        """Transform a batch about to be written. ``data`` is a shallow copy of the caller's.

        None: a transform has returned None, which keeps the rows for later. There is nothing to write yet.
        """
        written: Data | None = data
        for step in reversed(self.steps):
            written = step.inv(written)  # type: ignore[operator]
            if written is None:
                break
        return written


_MASK_KEY = "mask"


class MultiStepTransform(nn.Module):
    """Makes transitions of several steps. Arguments are those of TorchRL's transform of this name.

    Given to a buffer it sets ``n_steps``, ``gamma``, ``reward_keys`` and ``end_keys`` of the buffer: rows are stored as
    they are, and a batch is made of them when it is drawn. So is TorchRL's own object. Differences from what TorchRL
    stores: every row can be drawn, also the newest ones; flags are those of the last step, so that a window that ends
    in a terminal state does not bootstrap; and there are no keys ``"gamma"``, ``"nonterminal"`` and
    ``"original_reward"``.

    With ``write_time=True`` rows are changed before they are stored. A row waits until ``n_steps - 1`` rows after it
    have come, so that the last ones of a run are never stored. The rows that wait are part of the buffer's state.

    Args:
        n_steps: steps of a transition, 1 .. 64.
        gamma: the discount, in [0, 1].
        reward_keys: keys of the rewards, under ``"next"``. Default: ``["reward"]``.
        done_key: the flag, under ``"next"``, that ends a trajectory. Default: any of ``"done"``, ``"terminated"`` and
            ``"truncated"``.
        done_keys: several such flags, instead.
        mask_key: accepted at its default: rows of a buffer are all valid.
        write_time: see above. Rows come in order of time along the last batch dimension, from the same environments.

    Raises:
        TypeError, ValueError: as for the arguments of :class:`ReplayBuffer`.
        NotImplementedError: ``mask_key`` is given.
    """

    def __init__(
        self,
        n_steps: int,
        gamma: float,
        *,
        reward_keys: Sequence[Any] | None = None,
        done_key: Any = None,
        done_keys: Sequence[Any] | None = None,
        mask_key: Any = None,
        write_time: bool = False,
    ) -> None:
        super().__init__()
        self.n_steps, self.gamma = n_steps, gamma
        self.reward_keys, self.done_key, self.done_keys, self.mask_key = reward_keys, done_key, done_keys, mask_key
        self.write_time = write_time
        self._recipe = _recipe(self, Recipe())
        # The rows that wait, as "waiting", once there are any.
        self._kept: dict[str, TensorDict] = {}

    def forward(self, data: Data) -> Data:
        """A batch on its way out: as it is."""
        return data

    def inv(self, data: TensorDictBase) -> TensorDictBase:
        """The rows whose steps are there now, as transitions of ``n_steps`` steps; the others wait.

        Raises:
            KeyError: a key is missing.
        """
        if not self.write_time:
            return data
        at_replays().refuse("MultiStepTransform(write_time=True) keeps rows on the host's account: n_steps= does not")
        recipe = self._recipe
        dim, kept = data.batch_dims - 1, self._kept.values()
        total: Any = torch.cat([*(rows.to(data.device) for rows in kept), data], dim) if kept else data
        length, ahead = total.batch_size[dim], recipe.n_steps - 1
        made = max(length - ahead, 0)
        out = _multi_step(total, made, recipe)
        self._kept = {"waiting": total[..., made:].clone()}
        return out

    def get_extra_state(self) -> dict[str, Any]:
        """The rows that wait."""
        return dict(self._kept)

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore :meth:`get_extra_state`.

        Raises:
            ValueError: it is something else.
        """
        waiting = state.get("waiting") if isinstance(state, dict) else None
        if state != {} and not (isinstance(waiting, TensorDict) and waiting.batch_dims):
            raise ValueError(f"the state of a MultiStepTransform has no rows that wait: {describe_type(state)}")
        self._kept = {"waiting": waiting.clone()} if isinstance(waiting, TensorDict) else {}


def multi_step_of(transform: Any, recipe: Recipe) -> Recipe | None:
    """``recipe`` with the steps of a MultiStepTransform, ours or TorchRL's; None if ``transform`` is something else.

    Raises:
        TypeError: the recipe has several steps already.
    """
    if type(transform).__name__ != MultiStepTransform.__name__ or getattr(transform, "write_time", False):
        return None
    if recipe.n_steps > 1:
        raise TypeError(f"give either n_steps or a MultiStepTransform: n_steps is {recipe.n_steps} already")
    return _recipe(transform, recipe)


def without_multi_steps(transform: Any, recipe: Recipe) -> tuple[Any, Recipe]:
    """A transform without the MultiStepTransforms in it, or None if nothing is left, and ``recipe`` with their steps.

    They are in it if it is one, or a Compose of which one is a part.

    Raises:
        TypeError: the recipe has several steps already.
    """
    if not isinstance(transform, Compose):
        own = multi_step_of(transform, recipe)
        return (transform, recipe) if own is None else (None, own)
    rest = Compose()
    for step in transform.steps:
        own = multi_step_of(step.transform, recipe)
        if own is None:
            rest.place(len(rest), step)
        else:
            recipe = own
    return rest if len(rest) else None, recipe


def with_statistics(pipeline: Pipeline, transform: Any) -> Pipeline:
    """``pipeline`` with the running statistics of a transform: it is one, or a Compose of which one is a part."""
    found = _found(transform, RunningStatistics)
    return pipeline.with_statistics(found) if found else pipeline


def with_stacks(recipe: Recipe, transform: Any) -> Recipe:
    """``recipe`` with the windows of the frame stacks of a transform, as :func:`with_statistics` finds them."""
    for stack in stacks_of(transform):
        recipe = stack.added_to(recipe)
    return recipe


def stacks_of(transform: Any) -> list[FrameStack]:
    """The frame stacks of a transform."""
    return _found(transform, FrameStack)


def _found(transform: Any, kind: type) -> list[Any]:
    """The parts of a transform of one kind, that apply to batches."""
    compose = isinstance(transform, Compose)
    given = [step.transform for step in transform.steps if not step.invert] if compose else [transform]
    return [each for each in given if isinstance(each, kind)]


def _recipe(transform: Any, recipe: Recipe) -> Recipe:
    """``recipe`` with the steps of a transform. TorchRL's has the defaults of its keys filled in."""
    if transform.mask_key not in (None, _MASK_KEY):
        raise NotImplementedError(f"mask_key={transform.mask_key!r} is not supported by gpubuf: store valid rows only")
    end_keys = transform.done_keys
    if end_keys is None or set(map(as_key, end_keys)) == {(name,) for name in END_NAMES}:
        end_keys = None if transform.done_key in (None, "done") else [transform.done_key]
    rewards = transform.reward_keys
    return Recipe(
        transform.n_steps,
        transform.gamma,
        None if rewards is None else [_under_next(key) for key in rewards],
        None if end_keys is None else [_under_next(key) for key in end_keys],
        processing=recipe.processing,
    )


def _under_next(key: Any) -> Key:
    names = as_key(key)
    return names if names[0] == NEXT_KEY else (NEXT_KEY, *names)


def _multi_step(total: TensorDictBase, made: int, recipe: Recipe) -> TensorDictBase:
    """The first ``made`` rows of ``total``, whose last dimension is time, as transitions of several steps."""
    if made == 0 or recipe.n_steps == 1:
        out = total[..., :made]
        return out.set(STEPS_KEY, torch.ones(*out.batch_size, 1, dtype=torch.int64, device=device_of(out)))
    time = total.batch_dims - 1
    storage = TensorStorage(total.transpose(0, time), device=AUTO, ndim=total.batch_dims)
    shape = (made, *storage.shape[1:])
    reader = storage.readers.of(recipe)
    tensors, _ = reader.gather(torch.arange(math.prod(shape), device=storage.device))
    tensors = [tensor.view(*shape, *tensor.shape[1:]) for tensor in tensors]
    out = reader.layout.assemble(tensors, shape, storage.device)
    return out.transpose(0, time)  # type: ignore[no-any-return]
