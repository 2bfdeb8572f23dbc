"""docs/migration.md says what is so: every name of TorchRL's, compared with gpubuf as it is imported here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest

import gpubuf.data
from benchmarks.report.migration import page
from benchmarks.report.migration.signatures import arguments, constructor, public_members
from tests.support import torchrl_stand_in

RENDER = "python -m benchmarks.report.migration"
PROBES = {name: reason.probe for name, reason in page.reasons().items() if reason.probe}


def test_the_page_is_up_to_date():
    assert page.PAGE.read_text() == page.render(), f"docs/migration.md is stale: {RENDER}"


def test_no_reason_is_stale():
    """A reason that names what exists no more, or that calls missing what is here."""
    assert page.stale_reasons() == [], f"mend benchmarks/report/migration/reasons.toml, then {RENDER}"


def test_every_difference_has_a_reason():
    assert page.unexplained() == [], f"add to benchmarks/report/migration/reasons.toml, then {RENDER}"


@pytest.mark.parametrize("name", PROBES)
def test_an_argument_is_accepted_at_its_default_only(name: str):
    with pytest.raises(NotImplementedError):
        eval(PROBES[name], {each: getattr(gpubuf.data, each) for each in gpubuf.data.__all__})


def test_every_name_is_on_the_page():
    text = page.PAGE.read_text()
    assert [name for name in page.recorded()["names"] if f"`{name}`" not in text] == []
    assert set(re.findall(r"^\| `\w+` \| (\w+) \|", text, re.MULTILINE)) <= set(page.STATES)


@pytest.mark.skipif(not torchrl_stand_in.installed(), reason="needs TorchRL")
def test_the_record_is_torchrls():
    # In a process of its own, for TorchRL changes some of its functions when they are used.
    program = "import json; from benchmarks.report.migration.record import recorded; print(json.dumps(recorded()))"
    told = subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, capture_output=True, text=True)
    assert json.loads(told.stdout.splitlines()[-1]) == page.recorded()


# Comparing


class Base:
    def __init__(self, a: int, b: float = 1.5, **named: Any) -> None: ...

    def same(self, x: int) -> None: ...

    @property
    def value(self) -> int:
        return 0


class Derived(Base):
    def __init__(self, c: str = "c", *args: Any, **named: Any) -> None: ...

    def own(self, *, x: type = int) -> None: ...

    def _private(self) -> None: ...


def test_arguments_and_members():
    assert arguments(Base.same) == {"x": "required"}
    assert constructor(Derived) == {"c": "'c'", "a": "required", "b": "1.5"}
    found = public_members(Derived, __name__.partition(".")[0])
    assert found == {
        "own": {"kind": "method", "args": {"x": "int"}},
        "same": {"kind": "method", "args": {"x": "required"}},
        "value": {"kind": "property"},
    }


#: As TorchRL's, for the class above.
THEIRS: page.Name = {
    "kind": "class",
    "area": "storages",
    "bases": [],
    "args": {"a": "required", "b": "2", "gone": "None"},
    "members": {
        "same": {"kind": "method", "args": {"y": "required"}},
        "value": {"kind": "property"},
        "lost": {"kind": "method", "args": {"x": "1"}},
    },
}


def test_a_class_item_by_item():
    written = {"Base.lost": page.Reason("missing", "Not needed.")}
    found = page.compared("Base", THEIRS, Base, written)
    assert found.state == "different"
    assert "(a)" in found.same
    assert {".same", ".value"} <= set(found.same)
    assert found.others[".lost"].why == "Not needed."
    assert found.others["(gone)"].state == "missing"
    assert ".lost(x)" not in found.others
