"""What every kernel, loss, buffer, checkpoint and adapter must do: tables of cases, and what is checked for each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

Case = TypeVar("Case")


def pairwise(cases: Sequence[Case], features: Callable[[Case], Sequence[Hashable]]) -> list[Case]:
    """Few of ``cases``, in which every pair of features of one case occurs that occurs in all of them."""
    found = [(case, set(itertools.combinations(features(case), 2))) for case in cases]
    missing = set().union(*(pairs for _, pairs in found))
    chosen = []
    while missing:
        case, covered = max(found, key=lambda each: len(each[1] & missing))
        chosen.append(case)
        missing -= covered
    return chosen
