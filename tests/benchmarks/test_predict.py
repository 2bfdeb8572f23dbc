"""The prediction of kernel times: its parts, by hand."""

from __future__ import annotations

import pytest

from benchmarks.studies import predict
from benchmarks.studies.predict import Call, random_bytes


@pytest.mark.parametrize(("width", "expected"), [(1, 32), (4, 32), (24, 48), (32, 32), (33, 64), (68, 96), (192, 192)])
def test_a_random_row_moves_whole_sectors(width, expected):
    assert random_bytes(width) == pytest.approx(expected, rel=0.01)


def test_rows_of_the_benchmarks_read_twice_their_bytes():
    assert sum(map(random_bytes, predict.WIDTHS)) == pytest.approx(336)
    assert predict.read(1) == pytest.approx(336 + 166)


def test_the_longer_of_bytes_and_instructions_counts():
    base = Call("x", 2, 3.0, 0, 0).seconds
    assert base == pytest.approx(2 * predict.LAUNCH + 3 * predict.TRIP)
    assert Call("x", 2, 3.0, 4.1e6, 1).seconds - base == pytest.approx(1e-6)
    assert Call("x", 2, 3.0, 1, predict.ISSUE).seconds - base == pytest.approx(1)


def test_the_table_has_every_call_once():
    names = [call.name for call in predict.calls()]
    assert len(names) == len(set(names))
    text = predict.prediction_table()
    assert all(f"| {name} |" in text for name in names)
    assert all(call.seconds > call.launches * predict.LAUNCH for call in predict.calls())
