"""A machine whose CUDA graphs are recordings of the CPU."""

import pytest

from tests.support.graph_recorder import RecordedCuda


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> RecordedCuda:
    return RecordedCuda().install(monkeypatch)
