"""The tool that plants faults: what it changes, and that tests notice one fault and miss another."""

import ast
from pathlib import Path

import pytest

from tests.support import mutations
from tests.support.mutations import AREAS, drawn, faults_in, noticed

SOURCE = """
def area(width, height=1):
    'The area.'
    if not width >= 0:
        raise ValueError
    return width * height
"""
TEST = """
from shapes import area

def test_area():
    assert area(3, 2) == 6
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(AREAS, "shapes", (("shapes.py",), ("test_*.py",)))
    (tmp_path / "shapes.py").write_text(SOURCE)
    (tmp_path / "test_shapes.py").write_text(TEST)
    return tmp_path


def test_faults_of_a_file(project: Path):
    found = {(fault.before, fault.after) for fault in faults_in("shapes", project / "shapes.py", project)}
    assert found == {
        ("not width >= 0", "bool(width >= 0)"),
        ("width >= 0", "width > 0"),
        ("0", "1"),
        ("width * height", "(width) + (height)"),
    }


def test_tests_notice(project: Path):
    """A product that became a sum is noticed. That 0 is no width any more is not: no test asks for it."""
    by_change = {fault.after: fault for fault in faults_in("shapes", project / "shapes.py", project)}
    assert noticed(by_change["(width) + (height)"], project, 60) is True
    assert noticed(by_change["width > 0"], project, 60) is False
    assert (project / "shapes.py").read_text() == SOURCE


def test_what_is_drawn():
    """Of every area there are faults and tests; the same seed draws the same; what is planted is Python."""
    assert drawn(["share_next"], 5, 0) == drawn(["share_next"], 5, 0) != drawn(["share_next"], 5, 1)
    chosen = drawn(list(AREAS), 5, 0)
    assert {fault.area for fault in chosen} == AREAS.keys()
    for fault in chosen:
        source = (mutations.ROOT / fault.file).read_bytes()
        ast.parse(source[: fault.start] + fault.after.encode() + source[fault.end :])
        assert any(path for pattern in AREAS[fault.area][1] for path in mutations.ROOT.glob(pattern))
