"""The contract of samplers, which choose the rows of a batch, and their random streams.

docs/extending.md shows how to write a sampler.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from gpubuf.data.arguments import Missing, describe_type, warn
from gpubuf.data.operation import ALONE, Alone, Operation
from gpubuf.data.recording import at_replays, current
from gpubuf.data.samplers.shards import Shards
from gpubuf.data.storage.follower import Followers
from gpubuf.data.storage.layout import RowLayout
from gpubuf.data.storage.placement import IndexBytes
from gpubuf.data.storage.plan import Recipe, RowPlan
from gpubuf.data.storage.storage import TensorStorage
from gpubuf.kernels import philox
from gpubuf.kernels._registry import without_dispatch
from gpubuf.serialization import need

_uniform = without_dispatch(philox.uniform)


class RandomState:
    """The state of a Philox4x32-10 stream, as a tensor that the kernels advance.

    The same seed gives the same variates on every device. A CUDA graph that was captured with this state draws
    new numbers at every replay, and sees :meth:`manual_seed` and :meth:`load_state_dict`, which work in place.

    Args:
        seed: any 64-bit seed. None draws one from ``generator``, so that ``torch.manual_seed`` makes a run
            repeatable.
        generator: a seed is drawn from it; None is torch's global CPU generator.
        device: the state lives there, and draws happen there.

    Attributes:
        state: int64 ``[3]`` = (seed, offset, scratch); see :mod:`gpubuf.kernels.philox`.

    Raises:
        ValueError: both a seed and a generator are given.
    """

    def __init__(
        self, seed: int | None = None, generator: torch.Generator | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self.state: Tensor
        if seed is not None:
            if generator is not None:
                raise ValueError("give a seed or a generator to draw one from, not both")
            self.state = philox.new_state(seed, device)
            return
        origin = "cpu" if generator is None else generator.device
        drawn = torch.empty((), dtype=torch.int64, device=origin).random_(generator=generator)
        # Copied as a tensor: the host need not know the seed, so that this never synchronises with a GPU. Nor does the
        # host wait for the copy: CUDA has read memory that is not pinned when the call returns.
        self.state = torch.zeros(3, dtype=torch.int64, device=device)
        self.state[philox.SEED].copy_(drawn, non_blocking=True)

    @property
    def device(self) -> torch.device:
        """The device of the state."""
        return self.state.device

    def uniform(self, n: int) -> Tensor:
        """``n`` uniforms in [0, 1), float64 ``[n]`` on :attr:`device`, of 53 random bits each. No host sync.

        Raises:
            ValueError: ``n`` is negative.
        """
        drawn: Tensor = _uniform(self.state, n)
        return drawn

    def manual_seed(self, seed: int) -> RandomState:
        """Start the stream of ``seed``, in place, and return self."""
        self.state.copy_(philox.new_state(seed, "cpu"))
        return self

    def to(self, device: torch.device | str) -> RandomState:
        """This stream on ``device``: self if it is there, else a copy that goes on from the same point."""
        # CUDA has read memory that is not pinned when the call returns.
        moved = self.state.to(device, non_blocking=self.state.is_cpu)
        if moved is self.state:
            return self
        copy = object.__new__(type(self))
        copy.state = moved
        return copy

    def state_dict(self) -> dict[str, Any]:
        """A copy of the state."""
        return {"state": self.state.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the point at which ``state`` was taken, in place.

        Raises:
            KeyError: ``state`` has no ``"state"``.
            TypeError: the state is not int64.
            ValueError: the state has another shape than ``[3]``.
        """
        philox.check_state(state["state"])
        self.state.copy_(state["state"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}(device={str(self.device)!r})"


def is_count(value: Any, at_least: int = 0) -> bool:
    """Whether ``value`` is an int of at least so much, which fits into int64."""
    return type(value) is int and at_least <= value < 2**63


def is_tensor(value: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    """Whether ``value`` is a tensor of this dtype and shape."""
    return isinstance(value, Tensor) and value.dtype is dtype and tuple(value.shape) == shape


def positions_below(value: Any, bound: int) -> bool:
    """Whether ``value`` is an int64 vector of positions below ``bound``."""
    if not isinstance(value, Tensor) or value.dtype is not torch.int64 or value.dim() != 1:
        return False
    return bool(((value >= 0) & (value < bound)).all())


UNBOUND = "the sampler belongs to no buffer yet: give it to one, or call bind(storage)"


class _NoStorage(Missing):
    """What a sampler serves that belongs to no buffer."""

    initialized = computed = False

    def __init__(self) -> None:
        super().__init__(UNBOUND)
        self.followers = Followers()

    def __reduce__(self) -> str:
        """Copies are it."""
        return "NO_STORAGE"


NO_STORAGE = cast("TensorStorage", _NoStorage())
_NO_READER = cast("RowPlan", Missing(UNBOUND))


class Drawn(NamedTuple):
    """The result of a draw: gathered rows, where they lie, and the info about each of them."""

    tensors: list[Tensor]
    positions: Tensor  # int64 [n], flat
    generation: Tensor  # int64 [n]
    info: dict[Any, Tensor]
    batch_size: tuple[int, ...] = ()  # of tensors and info; (): it is [n]

    def in_batches(self, batches: int) -> Drawn:
        """The same rows as ``batches`` batches of one size.

        Raises:
            RuntimeError: they are too few.
        """
        shape = own = self.batch_size or self.positions.shape
        if shape[0] % batches:
            raise RuntimeError(f"{batches} batches were asked for, but {shape[0]} rows can't be cut into so many")
        shape = (batches, shape[0] // batches, *shape[1:])
        tensors = [tensor.view(*shape, *tensor.shape[len(own) :]) for tensor in self.tensors]
        info = {key: value.reshape(*shape, *value.shape[len(own) :]) for key, value in self.info.items()}
        return Drawn(tensors, self.positions, self.generation, info, shape)


class Sampler:
    """Base class of samplers. A sampler of your own overrides :meth:`choose`.

    A buffer calls :meth:`bind` once, and from then on :meth:`draw` for every batch. The storage calls :meth:`on_write`
    after every write, by whichever buffer, and says what else happens to the rows. A sampler serves one storage at a
    time: that of its buffer, until that is gone or has another sampler. Its next buffer begins with a tree, an index
    and an epoch of its own; the random stream goes on.

    Attributes:
        has_priorities: declares that the sampler has a use for priorities: those that come with a write reach
            :meth:`on_write`, those of an update :meth:`update_priority`, and samples carry ``"index_generation"``, by
            which a priority that returns too late is recognised.
        follows_trajectories: whether it draws by where trajectories end.
        ran_out: whether an epoch has ended with the last batch; iteration over the buffer stops there.
        operation: that of the sampler's buffer, for methods that users call on the sampler itself.
        storage: what the sampler serves. If that is nothing yet, its attributes raise a RuntimeError.
        reader: what :meth:`draw` reads rows from: a plan of the storage, which knows how batches are made of rows.
    """

    has_priorities: ClassVar[bool] = False
    follows_trajectories: ClassVar[bool] = False
    ran_out: bool = False
    #: Attributes that hold a tensor about the rows, or None.
    row_tensors: ClassVar[tuple[str, ...]] = ()
    #: Attributes that hold what is known about the rows, or None: objects with ``to(device)``, which is called when the
    #: rows have moved, and ``nbytes``. A graph uses them as they are.
    parts: ClassVar[tuple[str, ...]] = ()
    #: The class that ``replacement=False`` stands for.
    without_replacement: ClassVar[type[Sampler] | None] = None
    #: The attributes that a draw replaces, apart from the random stream: what is to be put back where a batch that was
    #: drawn ahead is thrown away. None: a draw can't be taken back, and none is made ahead.
    drawn_state: ClassVar[tuple[str, ...] | None] = None
    #: Attributes besides :attr:`parts` that a user may set, also those of an attribute, and that change how rows are
    #: drawn. None: it is not known, and a GPU does not repeat a draw, but each is asked for.
    settings: ClassVar[tuple[str, ...] | None] = None
    #: Of samplers without replacement: the names in a state of what is left of the epoch, and of what it is of.
    epoch_as: ClassVar[tuple[str, ...]] = ()
    #: Whether an epoch ends before a batch that could not be filled, and whether its order is a random one.
    drop_last: bool = False
    shuffle: bool = True
    operation: Operation | Alone = ALONE
    storage: TensorStorage = NO_STORAGE
    reader: RowPlan = _NO_READER
    #: The ranks that draw with this one, if there are any.
    shards: Shards | None = None
    # For samplers whose constructor does not call that of this class.
    _random: RandomState | None = None
    _generator: torch.Generator | None = None
    # What is left of the epoch, int64; and what it is an epoch of: another one begins when that changes.
    _left: Tensor | None = None
    _of: Any = None

    def __new__(cls, *args: Any, replacement: bool = True, **named: Any) -> Any:
        """An instance; of :attr:`without_replacement` if ``replacement`` is False and the class has one."""
        other = vars(cls).get("without_replacement")
        if replacement or not other:
            return super().__new__(cls)
        # Python calls the constructor of what is an instance of this class, too.
        return object.__new__(other) if issubclass(other, cls) else other(*args, **named)

    def __init_subclass__(cls, **named: Any) -> None:
        """A class that chooses rows in a way of its own says itself what that changes."""
        super().__init_subclass__(**named)
        own = vars(cls)
        if "drawn_state" not in own and {"choose", "draw"} & own.keys():
            cls.drawn_state = None
        if "settings" not in own and {"choose", "choose_batches", "draw", "draw_batches"} & own.keys():
            cls.settings = None

    def __init__(self) -> None:
        # Also in the instance: compiled code depends on where an attribute is.
        self.ran_out, self.storage, self.reader = False, NO_STORAGE, _NO_READER
        self._random = self._generator = self._left = self._of = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def require_replacement(self, replacement: bool) -> None:
        """Raise unless ``replacement`` is True.

        Raises:
            TypeError: it is False.
        """
        if not replacement:
            raise TypeError(
                f"{type(self).__name__} has no without-replacement variant: leave replacement=False out, or use "
                "SamplerWithoutReplacement or SliceSamplerWithoutReplacement"
            )

    def __getstate__(self) -> dict[str, Any]:
        """All but the operation of the buffer, which gives a copy its own."""
        return {name: value for name, value in vars(self).items() if name != "operation"}

    # Binding

    @property
    def _has_rows(self) -> bool:
        """Whether the storage, if there is one, is allocated."""
        return self.storage.initialized

    def bind(self, storage: TensorStorage, operation: Operation | Alone = ALONE) -> None:
        """Serve ``storage`` from now on. With another storage than before, all data about rows is forgotten.

        Args:
            storage: the storage.
            operation: that of the buffer that the sampler becomes part of.

        Raises:
            TypeError: the storage is not tensor-backed.
            ValueError: the sampler can't serve it, or serves a buffer with another storage that is still in use.
        """
        if not isinstance(storage, TensorStorage):
            raise TypeError(f"gpubuf's samplers need a TensorStorage, got {describe_type(storage)}")
        other = storage is not self.storage
        if other and operation is not self.operation and self.operation.in_use:
            raise ValueError(
                f"this {type(self).__name__} serves a buffer with another storage: give each buffer a sampler "
                "of its own, or give the other one a new sampler by set_sampler()"
            )
        self.check_storage(storage)
        if other:
            self.forget_storage()
            reader = storage.readers.of(Recipe())
            self.unbind()
            self.storage, self.reader = storage, reader
        storage.followers.join(self)
        self.operation = operation

    def unbind(self) -> None:
        """Serve no buffer any more. Rows that are there when it is bound again count as new."""
        self.storage.followers.leave(self)
        self.storage, self.reader, self.operation = NO_STORAGE, _NO_READER, ALONE

    def as_bound(self) -> Callable[[], None]:
        """What puts the sampler back to where it is bound now, with all that it knows of the rows there."""
        return functools.partial(self._put_back, dict(vars(self)))

    def _put_back(self, known: dict[str, Any]) -> None:
        self.unbind()
        vars(self).update(known)
        if self.storage is not NO_STORAGE:
            self.storage.followers.join(self)

    def read_from(self, reader: RowPlan) -> None:
        """Called by the buffer: read rows from ``reader``, which reads the storage, from now on."""
        self.reader = reader

    def check_recipe(self, recipe: Recipe) -> None:
        """Called before the sampler is to read by ``recipe``: raise if it can't."""

    def check_storage(self, storage: TensorStorage) -> None:
        """Called before the sampler is bound: raise if it can't serve ``storage``."""

    def forget_storage(self) -> None:
        """Called when another storage replaces the one so far, and by :meth:`free`: release all data about its rows."""
        for name in (*self.parts, *self.row_tensors, "_of"):
            setattr(self, name, None)

    def _known(self, names: Sequence[str]) -> dict[str, Any]:
        """The attributes among these that are not None."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def check_rows(self, layout: RowLayout, ndim: int) -> None:
        """Called before the first rows are written: raise if they lack what the sampler needs."""

    # Sampling

    def choose(self, n: int) -> tuple[Tensor, dict[Any, Tensor]]:
        """Choose ``n`` rows of :attr:`storage`, which has some. This is what a sampler of your own overrides.

        Returns:
            Flat positions, int64 ``[n]`` on the storage's device, and a dict of info about each row: tensors of ``n``
            entries by key. A buffer of TensorDicts writes them into the batch.
        """
        raise NotImplementedError(f"{type(self).__name__} overrides neither choose(n) nor draw(n)")

    def draw(self, n: int) -> Drawn:
        """Choose ``n`` rows and gather them. Override it if one launch does both."""
        positions, info = self.choose(n)
        tensors, generation = self.reader.gather(positions)
        return Drawn(tensors, positions, generation, info)

    def draw_batches(self, n: int, batches: int) -> Drawn:
        """``batches`` batches of ``n`` rows, chosen and gathered at once."""
        if type(self).draw is not Sampler.draw:
            return self.draw(n * batches).in_batches(batches)
        positions, info = self.choose_batches(n, batches)
        tensors, generation = self.reader.gather(positions)
        return Drawn(tensors, positions, generation, info).in_batches(batches)

    def choose_batches(self, n: int, batches: int) -> tuple[Tensor, dict[Any, Tensor]]:
        """As :meth:`choose`, the rows of ``batches`` batches of ``n``, one batch after the other.

        Override it where that is something else than one large batch.
        """
        return self.choose(n * batches)

    def _serve(self, storage: TensorStorage) -> None:
        """Bind to ``storage``, unless the sampler serves it already."""
        if storage is not self.storage:
            self.bind(storage)

    def can_sample(self, storage: TensorStorage, batch_size: int) -> bool:
        """Whether a batch of ``batch_size`` rows can be drawn from ``storage`` now."""
        self._serve(storage)
        return len(storage) > 0

    def random_state(self, device: torch.device | str) -> RandomState:
        """The random stream, created at its first use: seeded by ``set_rng``, else by torch's global generator."""
        if not self._random:
            at_replays().refuse(
                "the sampler draws for the first time, which seeds its random stream: sample once before"
            )
            self._random = RandomState(generator=self._generator, device=device)
        # `at_replays()` spelled out: every sample comes here.
        if current.recording:
            current.recording.holds(self, "_random", "reader")
        return self._random

    @property
    def random(self) -> RandomState | None:
        """The random stream; None before its first use."""
        return self._random

    def next_of_epoch(self, n: int, of: Any, count: Callable[[], int]) -> Tensor:
        """The next ``n`` numbers of the epoch of ``of``, or what is left of it. No host sync, but in ``count``.

        Args:
            n: how many.
            of: what the epoch is of: each of so many things once, then all of them again.
            count: how many there are; called where an epoch begins.

        Raises:
            ValueError: :attr:`drop_last` is set and there are fewer than ``n``.
        """
        left = self._left if self._of == of else None
        if left is None or (self.drop_last and left.numel() < n):
            left = self._order_of(count())
        if self.drop_last and left.numel() < n:
            raise ValueError(
                f"The batch size ({n}) is greater than the storage capacity in use, {left.numel()} rows or "
                "trajectories that can be drawn, and drop_last=True forbids repeats"
            )
        ran_out = left.numel() - n < (n if self.drop_last else 1)
        # At the end, in one step: an interrupt may come at any call.
        self._left, self._of, self.ran_out = None if ran_out else left[n:], of, ran_out
        return left[:n]

    def _order_of(self, n: int) -> Tensor:
        """``range(n)``, int64 ``[n]``, shuffled by the random stream if :attr:`shuffle` is set. No host sync."""
        device = self.storage.device
        if not self.shuffle:
            return torch.arange(n, device=device)
        # Sorting independent uniforms gives every order the same probability, and the same order on every device.
        return self.random_state(device).uniform(n).argsort()

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Start a new random stream, seeded by ``generator`` (None: by torch's global one)."""
        self._generator, self._random = generator, None

    # Writing

    @property
    def listens_to_writes(self) -> bool:
        """Whether :meth:`on_write` is overridden."""
        return type(self).on_write is not Sampler.on_write

    def on_write(self, positions: Tensor, priority: Tensor | None) -> None:
        """Called once for every write, with the flat positions of its surviving rows.

        Args:
            positions: int64 ``[n]``.
            priority: float32 ``[n]`` if the batch came with priorities and the sampler has a use for them, else None.
        """

    # Priorities

    @property
    def default_priority(self) -> Tensor | float:
        """Priority of the next new row."""
        return 1.0

    def reduce(self, priority: Tensor, n: int, masks: Sequence[Tensor] = ()) -> Tensor:
        """A priority of more dimensions than the batch, as one number for each of ``n`` rows: the largest.

        ``masks``: which elements have a priority, for samplers that have any.
        """
        return priority.reshape(n) if priority.numel() == n else priority.reshape(n, -1).amax(-1)

    def check_priority(self, priority: Tensor) -> None:
        """Called with the priorities of a write, before anything is written: raise if they can't be used."""

    def update_priority(
        self, index: Any, priority: Any, *, storage: TensorStorage | None = None, generation: Tensor | None = None
    ) -> None:
        """Warns: this sampler has no priorities."""
        warn(f"update_priority() was called on a {type(self).__name__}, which has no priorities")

    def mark_update(self, index: Any, *, storage: TensorStorage | None = None) -> None:
        """Rows were written elsewhere: nothing to do without priorities."""

    def on_end(self) -> None:
        """Called after the newest rows were marked as ends of their trajectories."""

    def depends_on(self, keys: Collection[int]) -> bool:
        """Whether the sampler has derived data from any of these stored keys (positions in the layout)."""
        return False

    def rows_changed(self) -> None:
        """Called after rows were changed in place: compute anew what is derived from them."""

    # The life of the rows

    def empty(self) -> None:
        """Forget everything about the rows."""
        self.ran_out, self._left, self._of = False, None, None

    def mend(self) -> None:
        """Compute anew all data derived from rows or priorities: an operation that changed it was interrupted."""
        self.rows_changed()

    def free(self) -> None:
        """Forget everything about the rows, and release its memory."""
        self.empty()
        self.forget_storage()

    def move(self) -> None:
        """Follow the storage to another device: called after its rows are in their new place. May synchronise."""
        for name, value in self._known(("_random", *self.parts, *self.row_tensors)).items():
            setattr(self, name, value.to(self.storage.device))

    # Memory

    def index_bytes(self, shape: tuple[int, ...], device_type: str) -> IndexBytes:
        """Bytes that the sampler needs for a storage of ``shape`` (``[rows]`` or ``[steps, envs]``) to come."""
        return IndexBytes()

    def memory(self) -> IndexBytes:
        """Bytes that the sampler takes now."""
        # A tensor may be a view of the rest of a larger one.
        tensors = sum(each.untyped_storage().nbytes() for each in self._known(self.row_tensors).values())
        return IndexBytes(index=tensors + sum(part.nbytes for part in self._known(self.parts).values()))

    @property
    def random_bytes(self) -> int:
        """Bytes of the random state, once there is one."""
        return self.random.state.nbytes if self.random else 0

    # State

    def state_dict(self) -> dict[str, Any]:
        """What the sampler needs to go on with the same batches, also with a seed not used yet. Synchronises."""
        if self._generator and self._has_rows:
            self.random_state(self.storage.device)
        state = {"type": type(self).__name__, "random": self._random and self._random.state_dict()}
        if not self.epoch_as:
            return state
        # What was restored of TorchRL's is an epoch of nothing until a batch is drawn.
        left = None if self._left is None or self._of is None else self._left.clone()
        return {**state, **dict(zip(self.epoch_as, (left, self._of), strict=True)), "ran_out": self.ran_out}

    def load_state_dict(self, state: dict[str, Any], order: Tensor | None = None) -> None:
        """Restore :meth:`state_dict`, after the storage has been restored.

        Args:
            state: the state.
            order: None if every row is back at its position. Otherwise the rows lie from position 0 on, and this is the
                old position of each, int64 ``[size]`` on the CPU, as :meth:`TensorStorage.load_state_dict` returns it.
        """
        if state.get("random"):
            self.random_state(self.storage.device).load_state_dict(state["random"])
        if self.epoch_as:
            left, of = (state[name] for name in self.epoch_as)
            self.ran_out = state["ran_out"]
            # Rows that lie elsewhere now begin a new epoch.
            there = left is not None and order is None
            self._left, self._of = (left.to(self.storage.device, copy=True), of) if there else (None, None)

    def check_state(self, state: dict[str, Any], capacity: int, size: int) -> None:
        """Raise unless ``state``, which was read from files, can be loaded.

        Args:
            state: the state.
            capacity: of the storage that it was saved with.
            size: how many rows that held.

        Raises:
            ValueError: it can't.
        """
        own = type(self).__name__
        need(state["type"] == own, f"the checkpoint is of a buffer with a {state['type']}, this buffer has a {own}")
        random = state["random"]
        if random is not None:
            is_state = isinstance(random, dict) and is_tensor(random["state"], torch.int64, (3,))
            need(is_state, "the checkpoint's random state is not int64 [3]")
        if self.epoch_as:
            left, of = (state[name] for name in self.epoch_as)
            counts = of if isinstance(of, list) else [0 if of is None else of]
            usable = type(state["ran_out"]) is bool and all(is_count(int(count)) for count in counts)
            # Of trajectories there is at most one a row.
            need(usable and (left is None or positions_below(left, size)), "the checkpoint's epoch is damaged")


def require_rows(storage: TensorStorage, shards: Shards | None = None) -> None:
    """Raise if there is nothing to sample; with ``shards``, on all ranks that sample now.

    Raises:
        RuntimeError: the storage is empty.
    """
    if len(storage) == 0:
        if shards:
            shards.draw_nothing(storage.allocation.device)
        raise RuntimeError("Cannot sample from an empty storage: write rows first")
