"""The simulation of shards: its formulas against draws, and what must be exact."""

from __future__ import annotations

import torch

from benchmarks.studies import shards as study


def test_the_factor_gives_the_law_of_one_buffer():
    generator = torch.Generator().manual_seed(0)
    for sigma in study.SIGMAS:
        without, with_it, variance = study.skew(16, sigma, generator)
        assert with_it < 1e-12
        assert without > 0.01
        assert variance > 1
    assert study.stale(16, 0, generator) < 1e-12 < study.stale(16, 1, generator)


def test_the_variance_is_that_of_draws():
    """The second moment of weighted draws from shards over that of draws from one buffer, drawn."""
    generator = torch.Generator().manual_seed(1)
    q = study.weights(4, 1.0, generator)
    factor, n = study.factors(q), 400_000
    own = [torch.multinomial(each, n, replacement=True, generator=generator) for each in q]
    shards = torch.stack([(row[i] ** -study.BETA * f) ** 2 for row, i, f in zip(q, own, factor, strict=True)]).mean()
    flat = q.flatten()
    one = (flat[torch.multinomial(flat, n, replacement=True, generator=generator)] ** (-2 * study.BETA)).mean()
    _, _, due = study.skew(4, 1.0, torch.Generator().manual_seed(1))
    torch.testing.assert_close(float(shards / one), due, rtol=0.02, atol=0)


def test_no_rank_waits_for_itself():
    assert abs(study.waiting(1, torch.Generator().manual_seed(0))) < 1e-12
    assert 0 < study.waiting(8, torch.Generator().manual_seed(0)) < study.waiting(64, torch.Generator().manual_seed(0))
