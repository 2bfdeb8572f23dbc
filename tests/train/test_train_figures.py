"""What the committed runs of ``python -m benchmarks.studies.learning`` have to show."""

from benchmarks.measure.results import newest_runs

RESULTS = newest_runs()["learning"].data["learning"]


def test_three_seeds_of_each_mode_reach_the_goal():
    """A mean evaluation return of at least -250 on Pendulum-v1, prioritized and uniform."""
    returns = {(r["curve"], r["seed"]): r["mean_return"] for r in RESULTS if r["env"] == "Pendulum-v1"}
    modes = ("sac, prioritized", "sac, uniform")
    assert set(returns) >= {(mode, seed) for mode in modes for seed in (0, 1, 2)}
    assert min(returns.values()) >= -250


def test_halfcheetah_rises():
    """Every run with SAC returns more at its end than at its first evaluation."""
    cheetah = [r for r in RESULTS if r["env"] == "HalfCheetah-v5" and r["curve"].startswith("sac")]
    assert cheetah
    assert all(r["mean_return"] > r["points"][0][1] for r in cheetah)
