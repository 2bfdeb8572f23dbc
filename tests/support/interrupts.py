"""Interrupts at every place at which CPython looks for them, one after the other."""

from __future__ import annotations

import dis
import functools
import gc
import itertools
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import gpubuf

# Where Ctrl-C may strike: in gpubuf itself, and in what it is made of.
_FILES = (
    str(Path(gpubuf.__file__).parent),
    str(Path(gpubuf.__file__).parents[1] / "kernels"),
    "contextlib.py",
    "threading.py",
    "queue.py",
    str(Path("concurrent", "futures")),
)


@functools.cache
def _after_calls(code: CodeType) -> frozenset[int]:
    """The instructions before which to interrupt: those that follow a call, where CPython looks for signals.

    It does so as a part of the call. A tracer interrupts the next instruction, which must have the same handler.
    """
    table = dis._parse_exception_table(code)  # type: ignore[attr-defined]

    def handler(offset: int) -> int | None:
        return next((entry.target for entry in table if entry.start <= offset < entry.end), None)

    pairs = itertools.pairwise(dis.get_instructions(code))
    return frozenset(
        after.offset
        for call, after in pairs
        if call.opname.startswith("CALL") and handler(call.offset) == handler(after.offset)
    )


def interrupted(
    operation: Callable[[], Any], place: int, *, lines: bool = False, since: Callable[[], bool] | None = None
) -> KeyboardInterrupt | None:
    """Run ``operation``, and send SIGINT at the place of this number, if it has so many.

    No garbage is collected meanwhile: an interrupt in a finalizer of another object would go unseen.

    Args:
        operation: what to interrupt.
        place: how many places it goes past.
        lines: count the beginnings of lines: also those at which CPython doesn't look, such as the end of a ``with``.
        since: count the places where this holds; None: all.

    Returns:
        The interrupt. Whoever keeps it keeps the frames that it came through, as an interactive Python does.
    """
    left = place

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if event == "call":
            if not any(part in frame.f_code.co_filename for part in _FILES):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = not lines, lines
        elif event != ("line" if lines else "opcode") or not (lines or frame.f_lasti in _after_calls(frame.f_code)):
            return trace
        left -= since is None or since()
        if left < 0:
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)
        return trace

    before, collecting = sys.gettrace(), gc.isenabled()
    gc.disable()
    sys.settrace(trace)
    try:
        operation()
    except KeyboardInterrupt as interrupt:
        return interrupt
    finally:
        sys.settrace(before)
        if collecting:
            gc.enable()
    return None
