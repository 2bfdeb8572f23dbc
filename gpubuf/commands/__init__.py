"""The commands of ``gpubuf``, a module each: ``add`` describes its options, ``run`` returns the exit code."""

from __future__ import annotations


def whole_number(text: str) -> int:
    """A whole number as people write it: 1000000, 1_000_000, 1e6 or 1M; argparse names the option."""
    times = {"k": 10**3, "m": 10**6, "g": 10**9}.get(text[-1:].lower(), 1)
    number = float(text if times == 1 else text[:-1]) * times
    if not number.is_integer():
        raise ValueError(text)
    return int(number) if times > 1 or "e" in text.lower() else int(text)


whole_number.__name__ = "whole number"  # argparse shows it: invalid whole number value: '1.5'
