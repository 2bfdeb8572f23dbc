"""The commands of ``gpubuf``, a module each: its docstring is the help, ``add`` gives it options, ``run`` returns the
exit code."""

from __future__ import annotations

import argparse


def whole_number(text: str) -> int:
    """A whole number as people write it: 1000000, 1_000_000, 1e6 or 1M."""
    times = {"k": 10**3, "m": 10**6, "g": 10**9}.get(text[-1:].lower(), 1)
    try:
        number = float(text if times == 1 else text[:-1]) * times
        if not number.is_integer():
            raise ValueError(text)
        return int(number) if times > 1 or "e" in text.lower() else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number such as 10000, 1e4 or 10k, got {text!r}") from None
