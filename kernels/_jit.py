"""CPU kernels: machine code that a wheel brings along, or compiled by Numba at the first call and kept on disk by it.

Modules that are imported before a kernel runs don't import Numba, which takes half a second. They name their kernels:
:func:`named`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

logger = logging.getLogger("gpubuf.kernels")

# Seconds that a process compiles before it says so.
_SILENCE = 2.0

_lock = threading.RLock()
_spent = 0.0
_warned = False


class Kernel:
    """A CPU kernel. Its first call takes it from :func:`machine_code`, or else loads it from disk, or else compiles it.

    It takes addresses and counts, which are int64, and what its function annotates as float or bool. It returns such a
    number or nothing, runs without the GIL, divides as NumPy does, and raises only :exc:`MemoryError`.

    Attributes:
        name: its module below ``gpubuf.kernels`` and its function.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._function: Callable[..., Any] | None = None
        self._enter: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        return (self._enter or self.load())(*args)

    @property
    def function(self) -> Callable[..., Any]:
        """What is compiled, as Python."""
        if self._function is None:
            importlib.import_module(f"gpubuf.kernels.{self.name.rpartition('.')[0]}")
        assert self._function is not None, f"there is no kernel {self.name}"
        return self._function

    def load(self) -> Callable[..., Any]:
        """The entry that Python calls: the wheel's, or Numba's past its dispatcher."""
        with _lock:
            if self._enter is None:
                self._enter = getattr(machine_code(), self.name, None) or _compiled(self.function)
            return self._enter


_kernels: dict[str, Kernel] = {}


def named(name: str) -> Kernel:
    """The kernel of a name, such as ``"rows._numba_write.extend_rows"``; its module is imported at the first call."""
    return _kernels.setdefault(name, Kernel(name))


def kernel(function: Callable[..., Any]) -> Kernel:
    """A kernel of a function. Its parameters say the signature, not the arguments of a call: see :class:`Kernel`."""
    found = named(f"{function.__module__.removeprefix('gpubuf.kernels.')}.{function.__qualname__}")
    if found._function is not None:
        # A module that is imported anew.
        found = _kernels[found.name] = Kernel(found.name)
    found._function = function
    return found


def jit(function: Any = None, **options: Any) -> Any:
    """A helper of kernels, compiled once for its types and without the code that a call from Python needs.

    Numba would compile it anew for each constant that is passed to it. LLVM finds the constants where it inlines it,
    which ``forceinline`` asks for. Numba's own ``inline="always"`` copies a helper into its callers before types are
    known, and infers the types in each of them: that takes longer than everything else.
    """
    if function is None:
        return functools.partial(jit, **options)
    import numba

    unwrapped: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    helper: Any = numba.njit(**options, **unwrapped)(function)
    template = helper.get_call_template
    helper.get_call_template = lambda args, keywords: template(tuple(map(numba.types.unliteral, args)), keywords)

    # A call from Python (tests make them) finds no machine code here, and goes to a copy that it can enter.
    copy = functools.cache(lambda: numba.njit(**options)(function))
    helper._insert = lambda *_: None
    helper._compile_for_args = lambda *_: copy()
    return helper


@functools.cache
def source_stamp() -> str:
    """A hash of all files that kernels are compiled from. Numba looks at that of a kernel alone, not of its helpers."""
    found, root = hashlib.blake2b(digest_size=8), Path(__file__).parent
    for path in sorted(root.rglob("*.py")):
        if not path.stem.startswith(("_triton", "_launch")):
            found.update(path.read_bytes())
    return found.hexdigest()


@functools.cache
def machine_code() -> Any:
    """The extension that a wheel brings along: each kernel, compiled, is an attribute of its name.

    None where there is none, where it was compiled from other sources, or where this processor lacks what it needs.
    """
    try:
        found = importlib.import_module("gpubuf.kernels._machine_code")
    except ImportError:
        return None
    return found if found.runs_here and found.stamp == source_stamp() else None


def dispatcher_of(function: Callable[..., Any], cached: bool) -> Any:
    """Numba's dispatcher, with what it keeps on disk."""
    import numba

    dispatcher: Any = numba.njit(nogil=True, error_model="numpy", cache=cached)(function)
    if cached:
        dispatcher._cache._cache_file._source_stamp = source_stamp()
    return dispatcher


def signature_of(function: Callable[..., Any]) -> tuple[Any, ...]:
    """Numba's types of the arguments of a kernel; see :class:`Kernel`."""
    from numba import types

    kinds, found = {"float": types.float64, "bool": types.boolean}, function.__annotations__
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return tuple(kinds.get(getattr(found.get(name), "__name__", ""), types.int64) for name in names)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    from numba.core.errors import NumbaError

    signature = signature_of(function)
    problem: Exception | None = None
    # What is on disk may be broken after a loss of power: it is replaced. Or else there is no room for it.
    for cached in (True, True, False):
        try:
            dispatcher = dispatcher_of(function, cached)
            if cached and problem is not None:
                dispatcher._cache.flush()
            with _announced():
                dispatcher.compile(signature)
            break
        except NumbaError:
            raise
        except Exception as error:
            if not cached:
                raise
            problem = error
    if not cached:
        _warn(problem)
    entry: Callable[..., Any] = next(iter(dispatcher.overloads.values())).entry_point
    return entry


def _warn(problem: Exception | None) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"compiled CPU kernels can't be kept on disk, so that every process compiles them anew ({problem}): set "
            "NUMBA_CACHE_DIR to a folder that can be written to",
            RuntimeWarning,
            stacklevel=2,
        )


@contextlib.contextmanager
def _announced() -> Iterator[None]:
    """Log a line if this process has compiled for two seconds."""
    global _spent
    timer = threading.Timer(max(_SILENCE - _spent, 0.0), _announce)
    timer.daemon = True
    began = time.monotonic()
    if _spent < _SILENCE:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        _spent += time.monotonic() - began


def _announce() -> None:
    # A warning is printed without logging set up too, on a terminal and into a log.
    logger.warning("gpubuf compiles its CPU kernels, for some seconds; later they come from disk")
