"""Plants a fault in the source of a function of the kernels, to see that a test notices."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction


def _replace_source(function: JITFunction, source: str) -> None:
    """All functions that call this one are other ones then."""
    function._unsafe_update_src(source)
    for name, module in [*sys.modules.items()]:
        if name.startswith("gpubuf.kernels."):
            for each in vars(module).values():
                if isinstance(each, JITFunction):
                    each.hash = None


@contextlib.contextmanager
def planted(function: str, before: str, after: str, number: int = 0) -> Iterator[None]:
    """Replace an occurrence of some text in the source of ``module:function``, below gpubuf.kernels.

    The function is one of Triton's, compiled or interpreted, or plain Python.
    """
    module, _, name = function.partition(":")
    home = importlib.import_module(f"gpubuf.kernels.{module}")
    found: Any = getattr(home, name)
    plain = getattr(found, "fn", found)
    source = re.split(r"^(?=def )", inspect.getsource(plain), maxsplit=1, flags=re.MULTILINE)[-1]
    parts = source.split(before)
    assert len(parts) > number + 1, f"plant another fault: {function} has no {before!r} any more"
    changed = before.join(parts[: number + 1]) + after + before.join(parts[number + 1 :])
    if isinstance(found, JITFunction):
        _replace_source(found, changed)
        try:
            yield
        finally:
            _replace_source(found, source)
    elif isinstance(found, InterpretedFunction):
        with (
            mock.patch.object(found.rewriter, "_prepare_source", return_value=changed),
            mock.patch.dict(found.rewritten_fn),
        ):
            found.rewritten_fn.pop(plain, None)
            yield
    else:
        namespace: dict[str, Any] = {}
        exec(changed, vars(home), namespace)
        code, found.__code__ = found.__code__, namespace[name].__code__
        try:
            yield
        finally:
            found.__code__ = code
