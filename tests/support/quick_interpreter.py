"""Triton's interpreter, without the third of its time that it spends on preparing ``triton.language``.

And without NumPy's warnings of infinities and NaNs, which processors compute in silence.

The interpreter replaces the functions of ``triton.language`` before each launch, and again before each call of a jitted
function by another, by looking through all of its names. Here the replacements are found once, and stay until the last
launch ends.
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
    with (
        mock.patch.object(interpreter, "_patch_lang", replacements.begin),
        mock.patch.object(interpreter.InterpretedFunction, "__call__", call),
        mock.patch.object(interpreter.GridExecutor, "__call__", in_silence),
    ):
        yield
