"""The studies of writers: a short history with kills, a checker that finds what is planted, and rates."""

import multiprocessing
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.studies import writers
from tests.support.writer_histories import (
    FAULTS,
    History,
    Seen,
    example,
    logged,
    new_buffer,
    planted,
    run_history,
    violations,
    write,
    wrong_samples,
)


def history_of_threads(folder: Path, fault: str | None, seconds: float, *, clean: bool = False) -> History:
    """Two writers that are threads of this process, and a learner that samples, and closes the buffer.

    ``clean``: when they have ended.
    """
    wrong = list[str]()
    with planted(fault):
        # Who writes to a buffer that was closed waits for room in the end.
        buffer = new_buffer(2, 20.0 if fault is None else 1.0)
        until = time.monotonic() + seconds

        def stopped() -> bool:
            # Long after the end of those that hear of the close.
            return time.monotonic() > until + (0.0 if clean else 0.2)

        clients = [buffer.client(example()) for _ in range(2)]
        threads = [
            threading.Thread(target=write, args=(client, number, str(folder / f"writer_{number}.log"), stopped))
            for number, client in enumerate(clients)
        ]
        for thread in threads:
            thread.start()
        while time.monotonic() < until or (clean and any(thread.is_alive() for thread in threads)):
            if len(buffer):
                wrong += wrong_samples(Seen.of(buffer.sample()))
        buffer.writers.close()
        for thread in threads:
            thread.join()
        stored = Seen.of(buffer[:])
    submitted, acknowledged = logged(folder)
    return History(submitted, acknowledged, stored, wrong)


@pytest.mark.filterwarnings("ignore:rows of writers were dropped")
@pytest.mark.parametrize("clean", [False, True])
def test_a_history_without_faults_has_no_violations(clean: bool, tmp_path: Path):
    """Cases 80, 82: of writers who have ended exactly what was acknowledged is stored, else a last batch may be."""
    history = history_of_threads(tmp_path, None, 0.5, clean=clean)
    assert violations(history) == []
    stored, kept, submitted = len(history.stored.numbers), sum(history.kept.values()), sum(history.submitted.values())
    assert 50 < kept <= stored <= submitted <= kept + 2 * 20
    assert stored == kept == submitted or not clean


@pytest.mark.filterwarnings("ignore:rows of writers were dropped")
@pytest.mark.parametrize("fault", FAULTS)
def test_the_checker_finds_planted_faults(fault: str, tmp_path: Path):
    assert violations(history_of_threads(tmp_path, fault, 0.7))


def test_the_checker_finds_each_violation():
    """Of a history of two writers with one thing wrong at a time."""

    def found(numbers: list[int], *, torn: int | None = None, submitted: int = 4, kept: int = 3) -> str:
        whole = np.arange(len(numbers)) != (-1 if torn is None else torn)
        stored = Seen(np.zeros(len(numbers), np.int64), np.array(numbers, np.int64), whole)
        return " ".join(violations(History({0: submitted}, {0: kept}, stored)))

    assert found([0, 1, 2]) == found([0, 1, 2, 3]) == ""
    assert "row 1 of writer 0 is torn" in found([0, 1, 2], torn=1)
    assert "row 1 is where row 2 belongs (1 rows are there twice)" in found([0, 1, 1])
    assert "row 2 is where row 1 belongs" in found([0, 2, 1])
    assert "row 3 is where row 2 belongs (0 rows" in found([0, 1, 3])
    assert "has submitted 4 rows, 5 are stored" in found([0, 1, 2, 3, 4])
    assert found([0, 1, 2], submitted=3) == ""
    assert "has submitted 3 rows, 4 are stored" in found([0, 1, 2, 3], submitted=3)
    assert "3 rows were acknowledged, 2 are stored" in found([0, 1], submitted=3)
    assert "3 rows were acknowledged, 2 are stored" in found([0, 1])
    assert "3 rows were acknowledged, 0 are stored" in found([])


@pytest.mark.slow
def test_a_short_history_with_kills(tmp_path: Path):
    """Writers and the learner are killed; the long form is ``python -m tests.support.writer_histories``."""
    history = run_history(tmp_path, writers=2, seconds=2.5, pause=0.8, seed=6)
    assert violations(history) == []
    assert history.kills["writers"] >= 1
    assert history.kills["learners"] >= 1
    # The last ones have ended by themselves.
    assert sum(history.kept[writer] == history.submitted[writer] > 0 for writer in history.kept) >= 1
    assert len(history.stored.numbers) > 100


@pytest.mark.slow
@pytest.mark.parametrize("name", writers.CONTENDERS)
def test_rates_in_short(name: str, monkeypatch: pytest.MonkeyPatch):
    """Rows arrive from one process, and no faster than they are to beside updates."""
    if name == "memmap":
        pytest.importorskip("torchrl")
    monkeypatch.setattr(writers, "TURNS", 2)
    monkeypatch.setattr(writers, "multiprocessing", multiprocessing.get_context("spawn"))
    found = writers.contend(name, 180, 1)
    assert found["rows/s"] > 0
    assert found["learner us/row"] > 0
    assert all(each > 0 for each in found["updates"])
    # A writer that is late catches up.
    assert 0 < found["paced rows/s"] < 4 * writers.PACE
