"""The buffers that ``gpubuf.data`` exports: those of the core, with what only programs for TorchRL ask of a buffer."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Self

import torch

from gpubuf.data import tensordict_buffers as core
from gpubuf.data.buffer import ReplayBuffer as CoreBuffer
from gpubuf.data.samplers.base import Sampler
from gpubuf.data.updates import ConditionalUpdateResult, finished_future
from gpubuf.torchrl.samplers import ConsumingSampler, PrioritizedSampler, RandomSampler
from gpubuf.torchrl.storages import LazyTensorStorage, ListStorage

_HERE = "the buffer works in the process that makes it; with shared=True, processes that write get a client()"
_INSTEAD = {
    "service_backend": _HERE,
    "service_backend_options": _HERE,
    "transport": _HERE,
    "transport_options": _HERE,
    "checkpointer": "save() and dumps() need none: leave it out",
    "collate_fns": "give one collate_fn, for batches of all buffers",
}
_ARGUMENTS = "_delayed_arguments"

SHARED_WRITERS = 4
"""Places for writers of a buffer that is made with ``shared=True``."""

_building = threading.RLock()


class _Assigned:
    """A part that TorchRL's users assign, for want of a setter: ``buffer._storage = other`` calls the setter.

    There is no ``__get__``: reading the attribute costs what it costs anyway.
    """

    def __init__(self, setter: str) -> None:
        self._setter = setter

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __set__(self, owner: Any, part: Any) -> None:
        if "_batches" in vars(owner):
            getattr(owner, self._setter)(part)
        else:
            # The constructor.
            vars(owner)[self._name] = part


class ReplayBuffer(CoreBuffer):
    """:class:`gpubuf.data.buffer.ReplayBuffer`, with the arguments and calls that only programs for TorchRL use.

    Args:
        storage, **parts: as for the core's class.
        delayed_init: make the parts at the first use of the buffer, and call functions that return parts only then.
            Default: True with a ``transform_factory``. Errors in the parts are then raised at the first use.
        transform_factory: a function that returns the transform; excludes ``transform``.
        compilable: accepted for compatibility: every operation can be compiled.
        shared: True is ``writers=4``: processes may write, by a :meth:`client` each.
        checkpointer, service_backend*, transport*: accepted at their defaults; out of scope.

    Raises:
        NotImplementedError: an argument that is out of scope was set.
    """

    _default_storage, _default_objects = LazyTensorStorage, ListStorage
    _default_sampler, _consuming_sampler = RandomSampler, ConsumingSampler
    _prioritized_sampler = PrioritizedSampler
    _storage: Any = _Assigned("_replace_storage")
    _sampler: Any = _Assigned("set_sampler")
    _writer: Any = _Assigned("set_writer")
    _is_shut = False

    def __init__(
        self,
        storage: Any = None,
        *,
        delayed_init: bool | None = None,
        transform_factory: Callable[[], Callable[[Any], Any]] | None = None,
        checkpointer: Any = None,
        compilable: bool | None = None,
        shared: bool = False,
        service_backend: str = "direct",
        service_backend_options: Any = None,
        transport: str = "auto",
        transport_options: Any = None,
        **parts: Any,
    ) -> None:
        parts["storage"] = storage
        if delayed_init is None:
            # As in TorchRL: a factory is for parts that can't be made yet.
            delayed_init = transform_factory is not None and parts.get("transform") is None
        if shared and parts.get("writers") is None:
            parts["writers"] = SHARED_WRITERS
        refuse_out_of_scope(
            checkpointer=checkpointer,
            service_backend=service_backend,
            service_backend_options=service_backend_options,
            transport=transport,
            transport_options=transport_options,
        )
        if delayed_init:
            vars(self)[_ARGUMENTS] = transform_factory, parts
            kind: Any = type(self)
            self.__class__ = _delayed(kind)
        else:
            self._build(transform_factory, parts)

    def _build(self, transform_factory: Callable[[], Callable[[Any], Any]] | None, parts: dict[str, Any]) -> None:
        transform = given_transform(parts.get("transform"), transform_factory)
        super().__init__(**{**parts, "transform": transform})

    @property
    def service_backend(self) -> str:
        """``"direct"``: the buffer works in this process."""
        return "direct"

    @property
    def is_alive(self) -> bool:
        """Whether the buffer was not shut down."""
        return not self._is_shut

    def start(self) -> Self:
        """The buffer itself, which needs no start.

        Raises:
            RuntimeError: it was shut down.
        """
        if self._is_shut:
            raise RuntimeError("a buffer that was shut down can't be started again: make a new one")
        return self

    def client(self, example: Any = None, *, place: int | None = None) -> Any:
        """With ``writers`` or ``shared=True`` what a writer in another process has: see the core's class.

        Without, as TorchRL has it, the buffer itself: it is in this process.
        """
        here = self.writers is None and self.storage.owner is None
        return self if here else super().client(example, place=place)

    def share(self, shared: bool = True) -> Self:
        """The buffer itself, if it is as ``shared`` says.

        Raises:
            NotImplementedError: ``shared`` is True, and the buffer was made without.
        """
        if shared and self.writers is None:
            raise NotImplementedError(
                "a buffer is shared from its beginning: make it with shared=True, and pass processes its client()"
            )
        return self

    def synchronize(self) -> None:
        """Accepted for compatibility: a call on a buffer is done when it returns."""

    def shutdown(self, timeout: float | None = None) -> None:
        """Mark the buffer as shut down. One that is dropped gives its memory back.

        Args:
            timeout: accepted for compatibility.
        """
        self._is_shut = True

    def submit_update_if_present(self, **arguments: Any) -> Future[ConditionalUpdateResult | None]:
        """:meth:`update_if_present`, with a future of its result.

        The update is made before this returns: on a GPU it is launched, and nothing waits for it.

        Args:
            **arguments: those of :meth:`update_if_present`.
        """
        return finished_future(self.update_if_present, **arguments)

    def dumps(self, path: Any, **options: Any) -> Any:
        """:meth:`save`, by TorchRL's name."""
        return self.save(path, **options)

    dump = dumps

    def loads(self, path: Any, **options: Any) -> None:
        """:meth:`load`, by TorchRL's name."""
        self.load(path, **options)


class TensorDictReplayBuffer(ReplayBuffer, core.TensorDictReplayBuffer):
    """:class:`gpubuf.data.tensordict_buffers.TensorDictReplayBuffer`, with what programs for TorchRL ask of it.

    Args:
        **parts: as for the core's class, and as for :class:`ReplayBuffer`.
    """


class PrioritizedReplayBuffer(ReplayBuffer, core.PrioritizedReplayBuffer):
    """:class:`gpubuf.data.tensordict_buffers.PrioritizedReplayBuffer`, with what programs for TorchRL ask of it.

    Args:
        **parts: as for the core's class, and as for :class:`ReplayBuffer`.
        dtype, sampler_device: accepted for compatibility.
        sync: accepted as True; ``shared=True`` has other processes write.
    """

    def __init__(
        self,
        storage: Any = None,
        *,
        dtype: torch.dtype = torch.float,
        sampler_device: torch.device | str | None = None,
        sync: bool = True,
        **parts: Any,
    ) -> None:
        require_sync(sync)
        super().__init__(storage, **parts)

    @property
    def prioritized_sampler(self) -> Sampler:
        """The sampler, under TorchRL's name."""
        return self.sampler


class TensorDictPrioritizedReplayBuffer(TensorDictReplayBuffer, core.TensorDictPrioritizedReplayBuffer):
    """The core's class of this name, with what programs for TorchRL ask of it.

    Args:
        **parts: as for the core's class, and as for :class:`ReplayBuffer`.
        sampler_device: accepted for compatibility.
        sync: accepted as True; ``shared=True`` has other processes write.
    """

    def __init__(
        self,
        storage: Any = None,
        *,
        sampler_device: torch.device | str | None = None,
        sync: bool = True,
        **parts: Any,
    ) -> None:
        require_sync(sync)
        super().__init__(storage, **parts)

    prioritized_sampler = PrioritizedReplayBuffer.prioritized_sampler


def _describe(kind: Any) -> None:
    """Let ``help()`` show all arguments of a class, and the documentation of the core's before its own."""
    parameters: dict[str, inspect.Parameter] = {}
    for base in sorted(kind.__mro__, key=lambda base: base.__module__ == __name__):
        if "__init__" in vars(base) and base is not object:
            for name, parameter in inspect.signature(base.__init__).parameters.items():
                if name == "storage" or parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                    parameters.setdefault(name, parameter)
    kind.__signature__ = inspect.Signature(list(parameters.values()))
    kind.__doc__ = f"{inspect.getdoc(kind.__bases__[-1])}\n\n{inspect.getdoc(kind)}"


for _kind in (ReplayBuffer, TensorDictReplayBuffer, PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer):
    _describe(_kind)


def require_sync(sync: bool) -> None:
    """Raise NotImplementedError for TorchRL's ``sync=False``."""
    if not sync:
        raise NotImplementedError(
            "sync=False (writers in other processes) is not supported by gpubuf: leave it out, make the buffer with "
            "shared=True, and pass processes its client()"
        )


def refuse_out_of_scope(**arguments: Any) -> None:
    """Raise for an argument of TorchRL's that was set and has no counterpart here.

    Raises:
        NotImplementedError: there is one.
    """
    for name, value in arguments.items():
        if value and value not in ("direct", "auto"):
            raise NotImplementedError(f"{name}={value!r} is not supported by gpubuf: {_INSTEAD[name]}")


def given_transform(transform: Any, factory: Callable[[], Any] | None) -> Any:
    """A transform given as it is, or by a function that returns it.

    Raises:
        TypeError: both are given.
    """
    if factory is None:
        return transform
    if transform is not None:
        raise TypeError("transform and transform_factory exclude each other")
    return factory()


# Buffers whose parts are made at their first use


class _Delayed:
    """The class of a buffer without parts, before its own: who asks for more than is there makes them."""

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__")
        if name in ("__class__", "__dict__"):
            return object.__getattribute__(self, name)
        if name == "initialized":
            return False
        # What the constructors of subclasses have set is there.
        return own[name] if name in own else getattr(_built(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("_storage", "_sampler", "_writer", "priority_key"):
            _built(self)
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(delayed_init=True)"


@functools.cache
def _delayed(kind: type) -> type:
    return type(kind.__name__, (_Delayed, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def _built(buffer: Any) -> Any:
    """The buffer with its parts. If they can't be made, it stays as it is, and the next use tries again."""
    with _building:
        if isinstance(buffer, _Delayed):
            own = vars(buffer)
            before = dict(own)
            arguments = own.pop(_ARGUMENTS)
            delayed = type(buffer)
            buffer.__class__ = delayed.__mro__[2]
            try:
                buffer._build(*arguments)
            except BaseException:
                own.clear()
                own.update(before)
                buffer.__class__ = delayed
                raise
            # What the constructors of subclasses have set since is theirs.
            own.update({name: value for name, value in before.items() if name != _ARGUMENTS})
    return buffer
