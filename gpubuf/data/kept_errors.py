"""Errors of draws, kept until somebody asks for the batch."""

from __future__ import annotations

import traceback


def forget_locals(error: BaseException) -> None:
    """Empty the functions that an error has come through.

    They refer to the buffer, whose queue keeps the error until its batch is asked for: neither would be freed before
    garbage is collected.
    """
    seen: set[int] = set()
    chain: list[BaseException | None] = [error]
    while chain:
        one = chain.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            chain += [one.__cause__, one.__context__]
