"""Buffers whose parts are made at their first use: ``delayed_init=True``.

Such a buffer has none of its attributes yet, and is of a class that notices when one is asked for. It then makes its
parts, and becomes a buffer like any other, which knows nothing of the delay and loses no time by it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

_ARGUMENTS = "_delayed_arguments"
_lock = threading.RLock()


def may_be_delayed(init: Callable[..., None]) -> Callable[..., None]:
    """Decorates the constructor of a buffer: with ``delayed_init=True`` its work is done at the buffer's first use."""

    @functools.wraps(init)
    def begin(self: Any, *, delayed_init: bool | None = None, **arguments: Any) -> None:
        if delayed_init is None:
            # As in TorchRL: a factory is for parts that can't be made yet.
            delayed_init = arguments.get("transform_factory") is not None and arguments.get("transform") is None
        if not delayed_init:
            init(self, **arguments)
            return
        vars(self)[_ARGUMENTS] = init, arguments
        kind: Any = type(self)
        self.__class__ = _delayed(kind)

    return begin


def _part(name: str) -> property:
    """A part, which the class of the buffer itself has an attribute for: Python would find that."""

    def read(self: Any) -> Any:
        return getattr(_built(self), name)

    def assign(self: Any, part: Any) -> None:
        setattr(_built(self), name, part)

    return property(read, assign)


class _Delayed:
    """The class of a buffer without parts, before its own."""

    _storage, _sampler, _writer = _part("_storage"), _part("_sampler"), _part("_writer")

    @property
    def initialized(self) -> bool:
        """Whether the storage has been allocated: not before it is there."""
        return False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            # Python looks for methods of many protocols, which no part has.
            raise AttributeError(name)
        return getattr(_built(self), name)

    def __getstate__(self) -> Any:
        return _built(self).__getstate__()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _built(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _built(self).__deepcopy__(memo)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(delayed_init=True)"


@functools.cache
def _delayed(kind: type) -> type:
    return type(kind.__name__, (_Delayed, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def _built(buffer: Any) -> Any:
    """The buffer with its parts. If they can't be made, it stays as it is, and the next use tries again."""
    with _lock:
        if isinstance(buffer, _Delayed):
            own = vars(buffer)
            before = dict(own)
            init, arguments = own.pop(_ARGUMENTS)
            delayed = type(buffer)
            buffer.__class__ = delayed.__mro__[2]
            try:
                init(buffer, **arguments)
            except BaseException:
                own.clear()
                own.update(before)
                buffer.__class__ = delayed
                raise
            # What the constructors of subclasses have set since is theirs.
            own.update({name: value for name, value in before.items() if name != _ARGUMENTS})
    return buffer
