"""Compiles the CPU kernels at their first call, and keeps the machine code on disk if it can."""

import contextlib
import functools
import logging
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba
from numba.core.compiler_lock import global_compiler_lock
from numba.core.runtime.nrt import rtsys

logger = logging.getLogger("gpubuf.kernels")

# Seconds that a process compiles before it says so.
_SILENCE = 2.0

_spent = 0.0
_warned = False


@functools.cache
def source_stamp() -> tuple[Any, ...]:
    """Names, sizes and times of all files that CPU kernels may be compiled from: `_cpu*.py` and what they import."""
    others = ("_triton", "_launch")
    root = Path(__file__).parent
    files = (path for path in root.rglob("*.py") if not path.stem.startswith(others))
    # Relative, so that a copy of the folder that keeps times (`cp -a`, an image) brings its machine code along.
    return tuple((str(path.relative_to(root)), path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(files))


def kernel(function: Any = None, **options: Any) -> Any:
    """``numba.njit``, compiled at the first call, from the signature and not from the arguments of that call.

    The parameters say the signature: a float or a bool is annotated so, an address or a count, which are int64, is not.
    The kernel releases the GIL, and divides as NumPy does.

    A process compiles only the kernels that it uses, each in half a second to several seconds. Machine code on disk is
    used while no source of a CPU kernel has changed. Numba itself looks at the file of the function alone, and would go
    on with the old code of a helper in another file.
    """
    if function is None:
        return functools.partial(kernel, **options)
    kinds, found = {float: numba.float64, bool: numba.boolean, int: numba.int64}, function.__annotations__
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    signature = tuple(kinds[found.get(name, int)] for name in names)
    dispatcher = numba.njit(nogil=True, error_model="numpy", **options)(function)
    _keep_on_disk(dispatcher)

    def entry_point(*args: Any) -> Any:
        with global_compiler_lock:
            if not dispatcher.overloads:
                _compile(dispatcher, signature)
                dispatcher.disable_compile()
            return next(iter(dispatcher.overloads.values())).entry_point

    template = dispatcher.get_call_template

    def call_template(args: Any, keywords: Any) -> Any:
        entry_point()
        return template(args, keywords)

    # Numba uses the first at a call from Python, the second at a call from another kernel.
    dispatcher._compile_for_args = entry_point
    dispatcher.get_call_template = call_template
    return dispatcher


def jit(function: Any = None, **options: Any) -> Any:
    """A helper of kernels, compiled once for its types and without the code that a call from Python needs.

    Numba would compile it anew for each constant that is passed to it. LLVM finds the constants where it inlines it,
    which ``forceinline`` asks for. Numba's own ``inline="always"`` copies a helper into its callers before types are
    known, and infers the types in each of them: that takes longer than everything else.
    """
    if function is None:
        return functools.partial(jit, **options)
    unwrapped: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    helper: Any = numba.njit(**options, **unwrapped)(function)
    template = helper.get_call_template
    helper.get_call_template = lambda args, keywords: template(tuple(map(numba.types.unliteral, args)), keywords)

    # A call from Python (tests make them) finds no machine code here, and goes to a copy that it can enter.
    copy = functools.cache(lambda: numba.njit(**options)(function))
    helper._insert = lambda *_: None
    helper._compile_for_args = lambda *_: copy()
    return helper


def address_of(kernel: Any) -> int:
    """The address of a kernel's machine code, for :func:`gpubuf.kernels._primitives.call`; compiles it if need be.

    The kernel has the option ``no_cfunc_wrapper=False``.
    """
    kernel._compile_for_args()
    compiled = next(iter(kernel.overloads.values()))
    address: int = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_cfunc_wrapper_name)
    return address


def _keep_on_disk(dispatcher: Any) -> None:
    try:
        dispatcher.enable_caching()
    except RuntimeError as error:
        # "no locator available": files can be made neither beside the source nor in the home directory.
        _warn(error)
    else:
        cache = dispatcher._cache
        cache._cache_file._source_stamp = source_stamp()
        cache.load_overload = functools.partial(_load, cache)


def _load(cache: Any, signature: Any, context: Any) -> Any:
    """Load machine code without Numba's tables of types and functions, which take 0.15 s and serve its compiler alone.

    What the code may be linked to is its runtime.
    """
    rtsys.initialize(context)
    return cache._load_overload(signature, context)


def _compile(dispatcher: Any, signature: Any) -> None:
    with _announced(dispatcher.stats.cache_path):
        try:
            dispatcher.compile(signature)
        except OSError as error:
            # The disk is full, say, or the folder belongs to somebody else.
            _warn(error)
            dispatcher._cache.disable()
            dispatcher.compile(signature)


def _warn(error: Exception) -> None:
    """Say once why machine code is not kept."""
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"compiled CPU kernels can't be kept on disk, so that every process compiles them anew ({error}): set "
            "NUMBA_CACHE_DIR to a folder that can be written to",
            RuntimeWarning,
            stacklevel=2,
        )


@contextlib.contextmanager
def _announced(folder: str | None) -> Iterator[None]:
    """Log a line if this process has compiled for two seconds."""
    global _spent
    timer = threading.Timer(max(_SILENCE - _spent, 0.0), _announce, (folder,))
    timer.daemon = True
    began = time.monotonic()
    if _spent < _SILENCE:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        _spent += time.monotonic() - began


def _announce(folder: str | None) -> None:
    kept = "" if folder is None else f"; the next process finds them in {folder}"
    # A warning is printed even without logging set up, so it is one only if somebody watches the terminal.
    level = logging.WARNING if sys.stderr.isatty() else logging.INFO
    logger.log(level, "gpubuf compiles its CPU kernels, which takes some seconds%s", kept)
