"""What the committed runs of ``python -m benchmarks.studies.training`` have to show."""

import pytest

from benchmarks.measure.results import newest_runs

RUN = newest_runs()["training"]
RESULTS = RUN.data["training"]


def test_three_seeds_of_each_mode_reach_the_goal():
    """A mean evaluation return of at least -250 on Pendulum-v1, prioritized and uniform."""
    returns = {(r["prioritized"], r["seed"]): r["mean_return"] for r in RESULTS if r["env"] == "Pendulum-v1"}
    assert set(returns) == {(mode, seed) for mode in (True, False) for seed in (0, 1, 2)}
    assert min(returns.values()) >= -250


def test_halfcheetah_rises():
    """20 000 steps are the beginning of learning there: the last episodes return more than the first."""
    cheetah = [r for r in RESULTS if r["env"] == "HalfCheetah-v5"]
    if not cheetah:
        pytest.skip(f"{RUN.source} was written without MuJoCo")
    assert cheetah[0]["steps"] == 20_000
    returns = [episode["return"] for episode in cheetah[0]["episodes_in_training"]]
    assert sum(returns[-5:]) > sum(returns[:5])
