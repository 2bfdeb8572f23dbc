"""What all tests of training share."""

from __future__ import annotations

import pytest


@pytest.fixture
def picture() -> None:
    """The run draws its learning curve."""


@pytest.fixture(autouse=True)
def no_picture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others don't: it takes longer than the run."""
    if "picture" not in request.fixturenames:
        monkeypatch.setattr("gpubuf.train.run.draw_curve", lambda *arguments: None)
