"""The commands of ``gpubuf``, a module each: ``add`` describes its options, ``run`` returns the exit code."""

from __future__ import annotations


def whole_number(text: str) -> int:
    """A whole number as people write it: 1000000, 1_000_000 or 1e6. For argparse, whose message names the option."""
    number = float(text)
    if not number.is_integer():
        raise ValueError(text)
    return int(number) if "e" in text.lower() else int(text)


whole_number.__name__ = "whole number"  # argparse shows it: invalid whole number value: '1.5'
