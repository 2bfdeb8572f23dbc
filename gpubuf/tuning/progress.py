"""How far the tuning is: a bar on a terminal, a line for each point anywhere else."""

from __future__ import annotations

import sys

from gpubuf.progress import can_show, make_progress
from gpubuf.tuning.report import describe
from gpubuf.tuning.search import Reporter, Result
from gpubuf.tuning.shapes import Job


def choose_reporter() -> Reporter:
    """The bar where a person is looking on, and rich is installed."""
    return BarReporter() if can_show(sys.stdout) else PlainReporter()


class PlainReporter:
    """A line for each point, on standard error: standard output is for the table."""

    def start(self, n_jobs: int) -> None:
        self._n_jobs, self._done = n_jobs, 0

    def job(self, job: Job, n_candidates: int) -> None:
        pass

    def tried(self) -> None:
        pass

    def done(self, result: Result) -> None:
        self._done += 1
        chosen = "not tuned" if result.chosen is None else describe(result.chosen.config)
        tried = f"{len(result.trials)} of {len(result.trials) + len(result.rejected) + result.untried} timed"
        print(f"{self._done}/{self._n_jobs} {result.job}: {chosen} ({tried})", file=sys.stderr, flush=True)

    def stop(self) -> None:
        pass


class BarReporter:
    """A bar of configurations, with the point that is being tuned."""

    def __init__(self) -> None:
        self._progress = make_progress("{task.description}", "bar", "count", "elapsed", transient=True)

    def start(self, n_jobs: int) -> None:
        self._all = self._progress.add_task("points", total=n_jobs)
        self._one = self._progress.add_task("", total=None)
        self._progress.start()

    def job(self, job: Job, n_candidates: int) -> None:
        self._progress.reset(self._one, total=n_candidates, description=str(job))

    def tried(self) -> None:
        self._progress.advance(self._one)

    def done(self, result: Result) -> None:
        self._progress.advance(self._all)

    def stop(self) -> None:
        self._progress.stop()
