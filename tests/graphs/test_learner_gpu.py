"""A learner on a real GPU: its replays are eager updates, changes take effect, and nothing waits for the device."""

from __future__ import annotations

import pytest
import torch

from tests.support.learners import CHANGES, World, changed
from tests.support.waiting import no_waiting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["sac", "td3"])
def test_changes_take_effect(kind, change):
    """CASES 84: after a change the replays are what eager updates are, up to the rounding of cuBLAS."""
    due = changed(World(kind, "cuda", capture=False), CHANGES[change])
    world = World(kind, "cuda")
    found = changed(world, CHANGES[change])
    assert world.learner.captured
    # In float64, so that rounding leads to no other draw.
    for name in due:
        torch.testing.assert_close(found[name], due[name], rtol=1e-6, atol=1e-8, msg=name)


@pytest.mark.parametrize("change", ["nothing", "the learning rate", "a loaded optimiser state"])
def test_changes_of_another_optimiser(change):
    due = changed(World("sac", "cuda", ours=False, capture=False), CHANGES[change])
    world = World("sac", "cuda", ours=False)
    found = changed(world, CHANGES[change])
    assert world.learner.captured
    for name in due:
        torch.testing.assert_close(found[name], due[name], rtol=1e-6, atol=1e-8, msg=name)


@pytest.mark.parametrize("given", [False, True])
def test_updates_do_not_wait(given):
    """Replays, and the warm-up before them; the capture itself synchronises, in ``torch.cuda.graph``."""
    world = World("sac", "cuda")
    batch = (world.buffer.sample(),) if given else ()
    world.learner(*batch)
    with no_waiting():
        world.learner(*batch)
    for _ in range(3):
        world.learner(*batch)
    assert world.learner.captured
    with no_waiting():
        for _ in range(5):
            world.learner(*batch)


def test_an_optimiser_that_cannot_be_captured():
    """The learner says so once, and runs eagerly."""
    world = World("sac", "cuda", ours=False)
    for group in world.optimizer.param_groups:
        group["capturable"] = False
    for _ in range(3):
        world.learner()
    with pytest.warns(UserWarning, match="the learner runs eagerly"):
        world.learner()
    world.learner()
    assert not world.learner.captured
