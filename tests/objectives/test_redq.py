"""REDQLoss: subsets of critics, and DroQ."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict.nn import TensorDictModule

from gpubuf.modules import EnsembleMLP, make_sac_critic
from gpubuf.objectives import REDQLoss, SACLoss
from tests.contracts.objectives import CLASSES
from tests.support.losses_setup import agree
from tests.support.sac_setup import (
    ACTION,
    CELLS,
    KEYS,
    OBSERVATION,
    VALUE,
    gradients,
    linear_critic,
    make_actor,
    make_batch,
    normalised_critic,
    run_loss,
    total,
)

CRITICS = {
    "ensemble": lambda n: make_sac_critic(OBSERVATION, ACTION, CELLS, num_nets=n, dtype=torch.float64),
    "replicated": lambda n: linear_critic(),
    "vmap": lambda n: [normalised_critic() for _ in range(n)],
}


def test_subsets_are_drawn_anew_and_uniformly():
    """Each critic is the smallest of its subset as often as the draw says: every subset of two of four, equally."""
    loss, batch = CLASSES["REDQLoss"].loss(nets=4), make_batch(2)
    state = batch["next"].clone().set("action", batch["action"])
    every = SACLoss._next_values(loss, state, torch.Size([2])).squeeze(-1)
    torch.manual_seed(0)
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(600):
        values = loss._next_values(state, torch.Size([2])).squeeze(-1)
        subset = tuple(sorted(int((every == value).all(-1).nonzero()) for value in values))
        counts[subset] = counts.get(subset, 0) + 1
    assert len(counts) == 6
    # chi-square, 5 degrees of freedom, one in a million
    assert sum((n - 100) ** 2 / 100 for n in counts.values()) < 38


@pytest.mark.parametrize("shape", [(6,), (3, 2)])
@pytest.mark.parametrize("delayed", [True, False])
def test_only_the_subset_is_run(shape, delayed):
    """The same numbers as of all networks, for each kind of critics; an ensemble that we know runs M of N."""
    options = {"norm": "layer", "dtype": torch.float64}
    network = EnsembleMLP(5, OBSERVATION + ACTION, 1, CELLS, **options)
    known = lambda n: TensorDictModule(network, KEYS, VALUE)  # noqa: E731
    batch, subset = make_batch(*shape), torch.tensor([4, 1, 3])
    for make in (*CRITICS.values(), known):
        loss = REDQLoss(make_actor(), make(5), num_qvalue_nets=5, sub_sample_len=3, delay_qvalue=delayed)
        with torch.no_grad():
            every = loss._critics.target(batch, "state_action_value")
            found = loss._critics.target_subset(batch, "state_action_value", subset)
        torch.testing.assert_close(found, every[subset])
        assert not found.requires_grad
    assert loss._critics._subset.module.module.ensemble_size == 3
    assert network.ensemble_size == 5
    run_loss(copy.deepcopy(loss), batch, 0)


def test_droq():
    """Dropout and layer norm: each network and each pass its own noise, and none in evaluation mode."""
    torch.manual_seed(0)
    network = EnsembleMLP(2, OBSERVATION + ACTION, 1, (32, 32), norm="layer", dropout=0.1, dtype=torch.float64)
    critics = TensorDictModule(network, KEYS, VALUE)
    loss = REDQLoss(make_actor(), critics, num_qvalue_nets=2, sub_sample_len=2, target_entropy=-2.0)
    batch = make_batch(16)
    out = run_loss(loss, batch, 0)
    assert not torch.equal(out["loss_qvalue"], run_loss(loss, batch, 1)["loss_qvalue"])
    found = gradients(loss, total(out))
    assert all(gradient.isfinite().all() and gradient.abs().max() > 0 for gradient in found.values())
    network.eval()
    agree(loss, batch)

    optimizer = torch.optim.Adam(loss.qvalue_network_params.parameters(), lr=3e-3)
    network.train()
    values = []
    for _ in range(60):
        optimizer.zero_grad()
        value = loss(batch)["loss_qvalue"]
        value.backward()
        optimizer.step()
        values.append(float(value.detach()))
    assert sum(values[-10:]) < 0.6 * sum(values[:10])
