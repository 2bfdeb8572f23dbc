"""Frame stacks: taken apart where rows are written, so that each frame is stored once, and given back by windows."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from gpubuf.data.operation import Operation
from gpubuf.data.processing.base import as_keys
from gpubuf.data.recording import at_replays, host_can_read
from gpubuf.data.storage.containers import Data, numpy_dtype
from gpubuf.data.storage.host_memory import to_device
from gpubuf.data.storage.layout import Key, as_written
from gpubuf.data.storage.plan import Recipe, RowPlan, position_of
from gpubuf.data.storage.rows import Rows
from gpubuf.data.storage.schema import END_NAMES, NEXT_KEY, default_ends
from gpubuf.data.storage.storage import TensorStorage
from gpubuf.data.storage.windows import Window
from gpubuf.kernels.rows import FAULTS, WRITTEN

Padding = Literal["reset", "zero"]
_DUE = "a row after an end has padding before its newest frame, any other one the next stack of the row before it"


#: Which rows of a write have other stacks than are due, bool ``[T, E]``; the step that the first is of; and the key.
_Differing = tuple[Tensor, int, Key]


class FrameStack:
    """Stacked observations, of which a buffer keeps the newest frames alone: an eighth of the memory for four frames.

    It is a transform (``transform=FrameStack(["pixels"])``). Write the stacks as your environment gives them:
    Gymnasium's ``FrameStackObservation``, Stable-Baselines3's ``VecFrameStack``, TorchRL's ``CatFrames``. Each row
    keeps its newest frame, and a batch has the stacks again, bit for bit, as :class:`Window` makes them; with
    ``n_steps`` the next stack is that of the last step. Rows whose older frames were overwritten are not drawn.
    Indexing gives single frames.

    Every write is compared with the frames that are stored, in the order of time and by environment:

    * A row that begins an episode has its newest frame and the padding. It is the first of all, of those after
      ``empty()``, or one after an end: a flag, a ``traj_key``, ``end_trajectories()``, or a load, unless that was told
      ``end_trajectories=False``.
    * The stack of any other row is the next stack of the row before it.
    * The next stack of a row is its stack, moved on by one new frame.

    What differs is refused, and nothing is written: the error names the first row. What lies on a GPU can't be looked
    at without a wait: there rows are written with their newest frames and counted, and the next call that synchronises
    (``save``, ``state_dict``) raises. Of rows on the host for a storage on a GPU this holds for the first step of a
    write, which is compared with rows there. A step that is captured in a graph can't write stacks (CaptureError), and
    stored rows can't be overwritten (TypeError).

    Args:
        keys: the stacked keys at the root, one or a list.
        frames: of a stack.
        dim: the dimension of a row along which they are stacked, oldest first: its size is ``frames`` times that of one
            frame.
        padding: what stands before the first frame of an episode: ``"reset"`` that frame again, ``"zero"`` zeros.
        next_too: whether the same keys under "next" are stacks as well. These are stored once: name the keys in
            ``share_next`` of the storage.

    Raises:
        TypeError: ``frames`` is no whole number.
        ValueError: there are fewer than two frames, or ``padding`` is unknown; in a buffer: it has writers in other
            processes, other windows of these keys, room for fewer steps than frames, or converts them (``dtypes``,
            ``batch_dtypes``).
    """

    def __init__(
        self, keys: Any, frames: int = 4, *, dim: int = 0, padding: Padding = "reset", next_too: bool = True
    ) -> None:
        if isinstance(frames, bool) or not isinstance(frames, int):
            raise TypeError(f"frames must be a whole number, got {frames!r}")
        if frames < 2:
            raise ValueError(f"a stack has two frames or more, got {frames}")
        if padding not in get_args(Padding):
            raise ValueError(f"padding must be one of {get_args(Padding)}, got {padding!r}")
        self.keys = as_keys(keys)
        self.frames, self.dim, self.padding, self.next_too = frames, dim, padding, next_too
        self._owner: Callable[[], Any] = lambda: None
        self._storage: Any = None
        self._reader: Any = None
        self._recipe, self._time_dim = Recipe(), 0
        # How a step on the host is looked at, as long as the rows are where they are.
        self._looks: list[_Look] = []
        self._placed: Any = None
        # How many rows of the first write a GPU refuses: before it there is nowhere to count them.
        self._unseen: list[Tensor] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """Without the buffer: a copy of that attaches its own."""
        options: dict[str, Any] = {"dim": self.dim, "padding": self.padding, "next_too": self.next_too}
        return functools.partial(type(self), list(self.keys), self.frames, **options), ()

    @property
    def windows(self) -> dict[Key, Window]:
        """The windows that make stacks of frames, by key."""
        window = Window(1 - self.frames, 0, outside="repeat" if self.padding == "reset" else "zero", join=0)
        return dict.fromkeys([each for key in self.keys for each in self.pair(key)], window)

    def pair(self, key: Key) -> list[Key]:
        """A key, and its next one."""
        return [key, (NEXT_KEY, *key)] if self.next_too else [key]

    # In a buffer

    def added_to(self, recipe: Recipe) -> Recipe:
        """``recipe`` with the windows of the stacks.

        Raises:
            ValueError: it has windows of these keys.
        """
        taken = [as_written(key) for key in self.windows if recipe.window_of(key) is not None]
        if taken:
            raise ValueError(f"{self!r} makes the windows of {taken}, and windows has these, too")
        return replace(recipe, windows={**dict(recipe.windows), **self.windows})

    def attach(self, operation: Operation, storage: TensorStorage, recipe: Recipe, time_dim: int) -> None:
        """Compare writes with the rows of the storage of a buffer, whose batches are made by ``recipe``.

        Raises:
            ValueError: the rows can't be stacks: see the class. Or it is that of another buffer.
        """
        if self._owner() not in (None, operation):
            raise ValueError(f"{self!r} is part of another buffer: make one for each")
        options = storage.allocation.options
        converted = [as_written(key) for key in self.windows if key in options.keys or key[1:] in options.keys]
        if converted:
            raise ValueError(f"{self!r} gives stacks back bit for bit: take {converted} out of dtypes and batch_dtypes")
        if storage.marks.by_writers:
            raise ValueError(f"{self!r} compares rows in their order, which those of several writers don't have")
        self._owner = weakref.ref(operation)
        self._storage, self._recipe, self._time_dim = storage, recipe, time_dim
        self._reader = storage.readers.of(replace(recipe, n_steps=1, processing=None))

    def __repr__(self) -> str:
        keys = [as_written(key) for key in self.keys]
        return f"FrameStack({keys}, {self.frames}, dim={self.dim}, padding={self.padding!r})"

    # Reading

    def __call__(self, data: Data) -> Data:
        """Put the frames of a batch along their dimension: views."""
        self._count()
        for key in self.windows if self.dim else ():
            value = _get(data, key)
            if value is not None:
                layout = self._storage.written_layout
                _set(data, key, self._along(value, len(layout.leaves[layout.position(key)].shape)))
        return data

    def _count(self) -> None:
        """Count the rows that a GPU refuses with the faults of the storage."""
        while self._unseen and self._storage.initialized:
            self._storage.ring.counters[FAULTS].add_(self._unseen.pop().to(self._storage.device))

    def _along(self, value: Tensor, dims: int | None = None) -> Tensor:
        """``value`` with its frames along their dimension, where they are along the first of ``dims``."""
        dims = value.dim() - 1 if dims is None else dims
        return value.movedim(-dims, self.dim - dims * (self.dim >= 0))

    def read(self, key: Key, index: Tensor) -> Tensor:
        """The stacks of a key at flat positions, int64 ``[n]``, whatever ``n_steps`` is. No host sync.

        Of the oldest rows of a full ring, whose older frames are gone, they begin with padding.
        """
        stacks: Tensor = self._reader.gather_key(self._reader.layout.position(key), index)
        return self._along(stacks)

    # Writing

    def inv(self, data: Data) -> Data:
        """Leave the newest frame of each stack of a batch that is about to be written: views. ``data`` changes.

        Raises:
            ValueError: what is given is no stack.
        """
        at_replays().refuse("stacks are compared with the rows before them: write them outside of the captured step")
        ndim, stacks = self._storage.ndim, dict[Key, Tensor]()
        for key in self.windows:
            value = _get(data, key)
            dims = 0 if value is None else value.dim() - ndim
            dim = self.dim + dims * (self.dim < 0)
            if value is None or not 0 <= dim < dims or value.shape[ndim + dim] % self.frames:
                found = "nothing" if value is None else f"the shape {tuple(value.shape)}"
                raise ValueError(f"{self!r}: expected stacks under {as_written(key)!r}, got {found}")
            value = value.movedim(ndim + dim, ndim)
            size = value.shape[ndim] // self.frames
            _set(data, key, value.narrow(ndim, (self.frames - 1) * size, size))
            stacks[key] = self._steps(value)
        if next(iter(stacks.values())).numel():
            self._compare(stacks, data)
        return data

    def newest_of(self, columns: Sequence[Any]) -> list[Any] | None:
        """One step, an array on the host for each key that is written, with newest frames in place of stacks: views.

        None: :meth:`inv` is to look at it. Something is no stack, or is where this does not look.
        """
        rows, reader = self._storage.rows, self._reader
        if self._placed is not reader.placed:
            self._looks, self._placed = self._found_looks(rows, reader), reader.placed
        ring, found = rows.ring, [*columns]
        first = (ring.cursor or ring.capacity) - rows.envs
        for look in self._looks:
            if not look.finds(found, first, self._storage.readers.end_bits.at(first // rows.envs)):
                return None
        return found if self._looks else None

    def _found_looks(self, rows: Rows, reader: RowPlan) -> list[_Look]:
        """Those of all keys; none where :meth:`inv` looks at all that comes."""
        if rows.device.type != "cpu" or self._recipe.traj_key is not None or rows.shape[0] < self.frames:
            return []
        try:
            return [_Look(self, key, rows, reader) for key in self.keys]
        except TypeError:  # NumPy lacks the dtype.
            return []

    def _steps(self, value: Tensor) -> Tensor:
        """A tensor of a batch as ``[T, E, ...]``."""
        ndim = self._storage.ndim
        return value.unsqueeze(1) if ndim == 1 else value.transpose(0, self._time_dim).flatten(1, ndim - 1)

    def _compare(self, stacks: dict[Key, Tensor], data: Data) -> None:
        """Raise a ValueError unless these stacks, ``[T, E, F * C, ...]``, are those that will be read."""
        steps, envs = next(iter(stacks.values())).shape[:2]
        if -(-self._storage.max_size // envs) < self.frames:
            raise ValueError(f"{self!r} needs room for {self.frames} steps, got {self._storage.max_size} rows")

        def given(key: Key) -> Tensor | None:
            return None if (value := _get(data, key)) is None else self._steps(value)

        told, found = self._told(given, (steps, envs)), list[_Differing]()
        before, begins = self._before(stacks, told[:1])
        for key in self.keys:
            leads = self.pair(key)[-1]
            stack, coming, own = stacks[key], stacks[leads], before[leads]
            (first,) = to_device([stack[:1]], own.device)
            found.append((self._differ(first, own, begins), 0, key))
            if steps > 1:
                found.append((self._differ(stack[1:], coming[:-1], self._after(told[:-1], told[1:])), 1, key))
            if self.next_too:
                size = stack.shape[2] // self.frames
                found.append((_unlike(coming[:, :, :-size], stack[:, :, size:]), 0, leads))
        self._refuse(found)

    def _told(self, get: Callable[[Key], Tensor | None], lead: tuple[int, ...]) -> Tensor:
        """What tells the ends of episodes, ``[*lead, K]``: flags, or identifiers.

        Raises:
            ValueError: nothing does.
        """
        recipe = self._recipe
        if recipe.traj_key is not None and (number := get(recipe.traj_key)) is not None:
            return number.reshape(*lead, -1)
        keys = recipe.end_keys or default_ends(lambda key: get(key) is not None)
        flags = [flag.reshape(*lead, -1).ne(0) for key in keys if (flag := get(key)) is not None]
        if not flags:
            told = list(map(as_written, keys)) or [as_written((NEXT_KEY, name)) for name in END_NAMES]
            raise ValueError(f"{self!r} needs the ends of episodes, and the batch has none of {told}")
        return torch.cat(flags, -1)

    def _after(self, before: Tensor, now: Tensor) -> Tensor:
        """Whether rows begin an episode, from what is told of those before them and of themselves: bool ``[T, E]``."""
        return (before if self._recipe.traj_key is None else before != now).any(-1)

    def _before(self, stacks: dict[Key, Tensor], told: Tensor) -> tuple[dict[Key, Tensor], Tensor]:
        """The stacks of the newest row of each environment, ``[1, E, ...]``, and whether the rows after them, of which
        ``told`` is known, begin an episode. Without rows these do, and the stacks are any.
        """
        storage, reader = self._storage, self._reader
        if not storage.ring.size:
            begins = torch.ones(told.shape[:2], dtype=torch.bool, device=told.device)
            return {key: stack[:1] for key, stack in stacks.items()}, begins
        counters, envs, marks = storage.ring.counters, storage.rows.envs, storage.marks
        which = torch.arange(envs, device=counters.device)
        newest = torch.remainder(counters[WRITTEN] - envs + which, storage.max_size)
        tensors, _ = reader.gather(newest)
        rows = {leaf.key: tensor.unsqueeze(0) for leaf, tensor in zip(reader.layout.leaves, tensors, strict=True)}
        for key, stack in stacks.items():
            due, got = ((tuple(each.shape[1:]), each.dtype) for each in (rows[key], stack))
            if got != due:
                raise ValueError(f"{as_written(key)!r}: expected stacks of all environments {due}, got {got}")
        begins = self._after(self._told(rows.get, (1, envs)), *to_device([told], counters.device))
        return rows, begins | marks.memory[newest].bool() if marks.kept else begins

    def _differ(self, stack: Tensor, before: Tensor, begins: Tensor) -> Tensor:
        """Which stacks ``[T, E, F * C, ...]`` neither begin an episode nor follow those ``before``: bool ``[T, E]``."""
        size = stack.shape[2] // self.frames
        frame = stack[:, :, -size:]
        padding = [frame if self.padding == "reset" else torch.zeros_like(frame)] * (self.frames - 1)
        # Without next stacks any frame may come.
        due = before if self.next_too else torch.cat([before[:, :, size:], frame], 2)
        first = begins.view(*begins.shape, *[1] * (stack.dim() - 2))
        return _unlike(stack, torch.where(first, torch.cat([*padding, frame], 2), due))

    def _refuse(self, found: list[_Differing]) -> None:
        """Raise for the first row that differs; what only a GPU can tell is to be counted there."""
        wrong, unseen = list[tuple[int, int, int]](), list[Tensor]()
        for number, (rows, start, _) in enumerate(found):
            if not host_can_read(rows):
                unseen.append(rows.sum())
            elif bool(rows.any()):
                step, env = rows.nonzero()[0].tolist()
                wrong.append((start + step, env, number))
        if not wrong:
            self._unseen += unseen
            self._count()
            return
        step, env, number = min(wrong)
        rows, _, key = found[number]
        where = f"row {step}" + (f" of environment {env}" if rows.shape[1] > 1 else "")
        due = "it is not that of its row, moved on by one frame" if key[0] == NEXT_KEY else _DUE
        raise ValueError(
            f"{where}: {as_written(key)!r} is no stack that {self!r} can give back, and nothing is written: {due}. "
            "Call end_trajectories() where an episode is left without a flag"
        )


class _Look:
    """How the stacks of a key, and of its next one, are found in arrays of one step on the host, and compared.

    Args:
        stack: says what is due.
        key: one of its keys.
        rows: where they are now: on the CPU.
        reader: reads them.
    """

    def __init__(self, stack: FrameStack, key: Key, rows: Rows, reader: RowPlan) -> None:
        layout, step, pair, what = rows.schema.written, tuple(rows.shape[1:]), stack.pair(key), "there are stacks of"
        self._stack, self._places = stack, [position_of(layout, each, what) for each in pair]
        leaf = layout.leaves[self._places[0]]
        self._size, *rest = leaf.shape
        self._frame, self._shape = (*step, *leaf.shape), (rows.envs, stack.frames * self._size, *rest)
        # Of an array [*E, ...]: the axes that bring its frames to the front, its shape, and its dtype.
        self._axes = [*range(len(self._frame))]
        self._axes.insert(len(step), self._axes.pop(len(step) + stack.dim % len(leaf.shape)))
        moved = (*step, *self._shape[1:])
        self._given, self._dtype = tuple(moved[axis] for axis in np.argsort(self._axes)), numpy_dtype(leaf.dtype)
        # The stack of the newest row of each environment that leads to the next row's.
        self._read, index, due = reader.prepared_gather(position_of(reader.layout, pair[-1], what), rows.envs)
        self._which, self._newest, self._due = np.arange(rows.envs), index.numpy(), due.numpy()

    def finds(self, columns: list[Any], first: int, ends: np.ndarray) -> bool:
        """Put the newest frames of the key, and of its next one, into the columns of a step: views.

        False: they are no stacks, or no such arrays; some may have changed.

        Args:
            columns: of a step.
            first: the position of the first of the newest rows.
            ends: which of them end an episode: not 0, ``[E]``.
        """
        stacks, size, next_too = list[np.ndarray](), self._size, self._stack.next_too
        for place in self._places:
            value = columns[place]
            if type(value) is not np.ndarray or value.shape != self._given or value.dtype != self._dtype:
                return False
            stack = value.transpose(self._axes).reshape(self._shape)
            columns[place] = stack[:, -size:].reshape(self._frame)
            stacks.append(stack)
        own, coming = stacks[0], stacks[-1]
        np.add(self._which, first, self._newest)
        self._read()
        due = self._due
        if not next_too:
            due = np.concatenate([due[:, size:], own[:, -size:]], 1)
        if np.count_nonzero(ends):
            begins = ends != 0
            due[begins] = np.concatenate([own[begins, -size:]] * self._stack.frames, 1)
            if self._stack.padding == "zero":
                due[begins, :-size] = 0
        moves_on = not next_too or coming[:, :-size].tobytes() == own[:, size:].tobytes()
        return moves_on and own.tobytes() == due.tobytes()


def _unlike(one: Tensor, two: Tensor) -> Tensor:
    """Which rows ``[T, E, ...]`` of two tensors differ in a bit: NaN are compared, too."""
    differ = one.contiguous().view(torch.uint8) != two.contiguous().view(torch.uint8)
    return differ.flatten(2).any(2)


def _parent(data: Any, key: Key) -> Any:
    for name in key[:-1]:
        data = None if data is None else data.get(name, None)
    return data


def _get(data: Any, key: Key) -> Any:
    """The value of a batch, TensorDict or dict, under a key; None: there is none."""
    parent = None if isinstance(data, Tensor) else _parent(data, key)
    return None if parent is None else parent.get(key[-1], None)


def _set(data: Any, key: Key, value: Tensor) -> None:
    parent = _parent(data, key)
    (parent.__setitem__ if isinstance(parent, dict) else parent.set)(key[-1], value)
