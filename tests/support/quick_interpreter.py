"""Triton's interpreter, without the half of its time that it spends on preparing ``triton.language`` and on types.

And without NumPy's warnings of infinities and NaNs, which processors compute in silence.

The interpreter replaces the functions of ``triton.language`` before each launch, and again before each call of a jitted
function by another, by looking through all of its names. Here the replacements are found once, and stay until the last
launch ends. It also makes a type for each value, and lists of its sizes: here those of one type are made once.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np


class _Replacements:
    """Replaces the functions of ``triton.language`` while something is launched, in any thread."""

    def __init__(self, find: Callable[[Any], Any], modules: dict[str, ModuleType]) -> None:
        # The interpreter looks for them in the globals of a function. Triton's own functions have others than ours.
        self._find = functools.partial(find, SimpleNamespace(__globals__=modules))
        self._lock = threading.Lock()
        self._launches = 0
        self._found: list[tuple[Any, str, Any]] | None = None
        self._scope: Any = None

    def begin(self, _: Any) -> _Replacements:
        """At the beginning of a launch: what stands in for the interpreter's own scope."""
        with self._lock:
            self._launches += 1
            if self._launches == 1:
                self._replace()
        return self

    def restore(self) -> None:
        """At the end of a launch."""
        with self._lock:
            self._launches -= 1
            if self._launches == 0:
                self._scope.restore()

    def _replace(self) -> None:
        if self._found is None:
            self._scope = self._find()
            self._found = [(holder, name, vars(holder)[name]) for holder, name, _ in self._scope._changes]
            return
        for holder, name, value in self._found:
            self._scope.set_attr(holder, name, value)


def _made_once(core: ModuleType, numpy_type: Callable[[Any], Any]) -> tuple[Callable[..., Any], ...]:
    """Constructors of types of blocks and of values, and the function that gives NumPy's type for Triton's."""
    make_type, make_value = core.block_type.__init__, core.tensor.__init__
    types: dict[Any, dict[str, Any]] = {}
    sizes: dict[Any, tuple[Any, Any]] = {}
    numpy_types: dict[str, Any] = {}

    def block_type(self: Any, element: Any, shape: Any) -> None:
        key = element.name, *[size.value if isinstance(size, core.constexpr) else size for size in shape]
        if key not in types:
            make_type(self, element, shape)
            types[key] = vars(self)
        vars(self).update(types[key])

    def tensor(self: Any, handle: Any, kind: Any) -> None:
        key = (*kind.shape.values,) if kind.is_block() else ()
        if key not in sizes:
            make_value(self, handle, kind)
            sizes[key] = self.numel, self.shape
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.numel, self.shape = sizes[key]

    def numpy_type_of(kind: Any) -> Any:
        # Not all types can be keys.
        if kind.name not in numpy_types:
            numpy_types[kind.name] = numpy_type(kind)
        return numpy_types[kind.name]

    return block_type, tensor, numpy_type_of


@contextlib.contextmanager
def quick_interpreter() -> Iterator[None]:
    """Use it for all launches in here. Versions of Triton other than those it was written for run as they are."""
    try:
        import triton
    except ImportError:
        yield
        return
    if not triton.__version__.startswith(("3.7.", "3.9.")) or not triton.knobs.runtime.interpret:
        yield
        return
    from triton import language
    from triton.runtime import interpreter

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        """A jitted function that is called by another."""
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    launch = interpreter.GridExecutor.__call__

    def in_silence(self: Any, *args: Any, **kwargs: Any) -> Any:
        with np.errstate(all="ignore"):
            return launch(self, *args, **kwargs)

    replacements = _Replacements(interpreter._patch_lang, {"tl": language, "core": language.core})
    make_type, make_value, numpy_type = _made_once(language.core, interpreter._get_np_dtype)
    with (
        mock.patch.object(language.core.block_type, "__init__", make_type),
        mock.patch.object(language.core.tensor, "__init__", make_value),
        mock.patch.object(interpreter, "_get_np_dtype", numpy_type),
        mock.patch.object(interpreter, "_patch_lang", replacements.begin),
        mock.patch.object(interpreter.InterpretedFunction, "__call__", call),
        mock.patch.object(interpreter.GridExecutor, "__call__", in_silence),
    ):
        yield
