"""What every kernel, loss, buffer, checkpoint and adapter must do: tables of cases, and what is checked for each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")

#: Marks of few cases of a test, and of the rest, whose first ones are slow already.
QUICK_AND_SLOW, SLOW_AND_NIGHTLY = ((), pytest.mark.slow), (pytest.mark.slow, pytest.mark.nightly)


def covering(cases: Sequence[Case], features: Callable[[Case], Iterable[Hashable]]) -> list[Case]:
    """Few of ``cases``, in which every feature occurs that occurs in all of them."""
    found = [(case, set(features(case))) for case in cases]
    missing = set().union(*(of_case for _, of_case in found))
    chosen = []
    while missing:
        case, covered = max(found, key=lambda each: len(each[1] & missing))
        chosen.append(case)
        missing -= covered
    return chosen


def pairwise(cases: Sequence[Case], features: Callable[[Case], Sequence[Hashable]]) -> list[Case]:
    """Few of ``cases``, in which every pair of features of one case occurs that occurs in all of them."""
    return covering(cases, lambda case: itertools.combinations(features(case), 2))


def each_option(
    contracts: Sequence[Any],
    *others: Iterable[Any],
    suits: Callable[..., bool] = lambda *case: True,
    marks: tuple[Any, Any] = QUICK_AND_SLOW,
) -> list[Any]:
    """Contracts, or contracts times the values of others, for ``pytest.mark.parametrize``.

    Quick runs have few of them, in which every option of a contract occurs with every value of the others. The rest
    is slow. ``marks``: other ones of these few, and of the rest.
    """
    cases = [case for case in itertools.product(contracts, *others) if suits(*case)]
    few = covering(cases, lambda case: [(option, *case[1:]) for option in case[0].options])
    return [pytest.param(*case, marks=marks[case not in few]) for case in cases]


def first_quick(values: Iterable[Any], n: int = 1, marks: tuple[Any, Any] = QUICK_AND_SLOW) -> list[Any]:
    """Values for ``pytest.mark.parametrize``, such as seeds: all but the first ``n`` are slow, or as ``marks`` say."""
    return [pytest.param(value, marks=marks[i >= n]) for i, value in enumerate(values)]


def on_both(cases: Iterable[Any], quick: Callable[[Any], bool], gate: Sequence[Any] = ()) -> list[Any]:
    """Cases on both backends, for ``pytest.mark.parametrize`` with ``indirect=["backend"]``.

    Through Triton's interpreter all are slow but ``quick`` ones. The gates run them all the same, or those of ``gate``.
    """
    slow = [pytest.mark.slow, pytest.mark.interpreted]
    return [
        pytest.param(
            backend,
            *(case if isinstance(case, tuple) else (case,)),
            marks=[pytest.mark.gate] * (case in gate) + slow * (backend == "triton" and not quick(case)),
        )
        for case in cases
        for backend in ("numba", "triton")
    ]
