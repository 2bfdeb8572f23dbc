"""FastTD3's and holosoma's rings: ours gives the rows of holosoma's, and the n-step return where that does not."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gpubuf.integrations import fasttd3, holosoma
from tests.support import holosoma_ring
from tests.support.holosoma_ring.steps import ACT, CRITIC, ENVS, GAMMA, OBS, STEPS, WRITTEN, ends, positions, step_of
from tests.support.records import read, tensors

RECORDED = read(holosoma_ring)
PATHS = [pytest.param({}, id="plain"), pytest.param({"share_next": True}, id="shared")]


def filled(written: int, n_steps: int, *, alone: bool = False, **options: Any) -> holosoma.SimpleReplayBuffer:
    ring = holosoma.SimpleReplayBuffer(ENVS, STEPS, OBS, ACT, CRITIC, n_steps=n_steps, gamma=GAMMA, **options)
    for step in range(written):
        ring.extend(step_of(step, alone=alone))
    return ring


def batch_at(ring: fasttd3.SimpleReplayBuffer, steps: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> TensorDict:
    """The batch of ``steps`` of each environment."""
    drawn = (steps * ring.n_env + torch.arange(ring.n_env).unsqueeze(1)).reshape(-1)
    monkeypatch.setattr(ring.buffer.sampler, "choose", lambda n: (drawn, {}))
    return ring.sample(steps.numel())


def age_order(written: int) -> torch.Tensor:
    """For each step of the ring the number of the step that it holds."""
    newest = written - 1
    return torch.tensor([newest - (newest - place) % STEPS for place in range(STEPS)])


def crosses_newest(written: int, n_steps: int, *, reaches: bool = False) -> torch.Tensor:
    """Rows of a batch of all steps whose window would go beyond the newest row, bool ``[E * T]``; or ``reaches`` it."""
    late = age_order(written) > written - n_steps - reaches
    return late.expand(ENVS, -1).reshape(-1)


@pytest.mark.parametrize("options", PATHS)
@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("n_steps", [1, 3])
def test_batches_are_those_of_holosoma(n_steps, written, options, monkeypatch):
    """Keys, dtypes, shapes and bits, but for windows that holosoma takes beyond the newest row, and marks there."""
    theirs = tensors(RECORDED[f"{n_steps} steps, {written} written"])
    ours = batch_at(filled(written, n_steps, **options), positions(written, n_steps), monkeypatch).flatten_keys(".")
    assert set(ours.keys()) == set(theirs)
    full = written >= STEPS and n_steps > 1
    for key, value in theirs.items():
        same = torch.ones(ours.numel(), dtype=torch.bool)
        if full:
            same = ~crosses_newest(written, n_steps, reaches=key == "next.truncations")
        assert ours[key].dtype == value.dtype, key
        assert ours[key].shape == value.shape, key
        assert torch.equal(ours[key][same], value[same]), key


def window(written: int, first: int, env: int, n_steps: int, *, alone: bool = False) -> list[int]:
    """The steps of a transition, by the definition."""
    steps = [first]
    while len(steps) < n_steps and steps[-1] + 1 < written:
        dones, truncations = ends(steps[-1], alone=alone)
        if dones[env] or truncations[env]:
            break
        steps.append(steps[-1] + 1)
    return steps


@pytest.mark.parametrize("alone", [False, True], ids=["", "truncations alone"])
@pytest.mark.parametrize("written", WRITTEN)
def test_every_row_gives_the_n_step_return(written, alone, monkeypatch):
    """Cases 36 and 37. holosoma adds rewards from beyond the newest row, and behind a truncation that is not done."""
    stored = age_order(written) if written >= STEPS else torch.arange(written)
    batch = batch_at(filled(written, 3, alone=alone), torch.arange(len(stored)), monkeypatch)
    rows = batch.reshape(ENVS, len(stored))
    for env in range(ENVS):
        for place, first in enumerate(stored.tolist()):
            steps, row = window(written, first, env, 3, alone=alone), rows[env, place]
            last = step_of(steps[-1], alone=alone)[env]
            rewards = [step_of(step)["next", "rewards"][env] for step in steps]
            assert row["next", "rewards"] == sum(GAMMA**j * reward for j, reward in enumerate(rewards))
            assert row["next", "effective_n_steps"] == len(steps)
            for name in ("observations", "critic_observations", "dones", "truncations"):
                assert torch.equal(row["next", name], last["next", name]), name


def test_the_newest_steps_are_drawn_before_the_ring_is_full():
    """Case 38."""
    ring = filled(5, 3)
    numbers = ring.sample(400)["observations"][:, 0]
    assert set((numbers % 100).tolist()) == {0, 1, 2, 3, 4}


def test_a_batch_has_as_many_rows_of_each_environment():
    """The first rows are those of the first environment."""
    batch = filled(13, 1).sample(2000)
    environment = (batch["observations"][:, 0] / 100).floor().reshape(ENVS, 2000)
    assert torch.equal(environment, torch.arange(float(ENVS)).unsqueeze(1).expand(-1, 2000))


@pytest.mark.parametrize(("n_steps", "share_next"), [(1, False), (3, True)])
def test_playground_mode_keeps_the_observation_in_that_of_the_critic(n_steps, share_next):
    """The batches are those of a ring that has both, in less memory."""
    rings = [
        fasttd3.SimpleReplayBuffer(
            ENVS, STEPS, OBS, ACT, CRITIC, True, playground, n_steps, GAMMA, share_next=share_next
        )
        for playground in (False, True)
    ]
    batches = []
    for ring in rings:
        for step in range(13):
            ring.extend(step_of(step))
        torch.manual_seed(0)
        batches.append(ring.sample(16))
    whole, parts = (ring.buffer.storage.nbytes for ring in rings)
    assert parts < whole
    assert set(batches[0].keys(True, True)) == set(batches[1].keys(True, True))
    assert all(torch.equal(batches[0][key], batches[1][key]) for key in batches[0].keys(True, True))


def test_playground_mode_refuses_another_beginning():
    ring = fasttd3.SimpleReplayBuffer(ENVS, STEPS, OBS, ACT, CRITIC, True, True)
    step = step_of(0)
    step["critic_observations"][1, 0] += 1
    with pytest.raises(ValueError, match="must begin with observations"):
        ring.extend(step)
    assert ring.ptr == 0


def test_without_observations_of_the_critic():
    """FastTD3's default: they are neither stored nor in the batch."""
    ring = fasttd3.SimpleReplayBuffer(ENVS, STEPS, OBS, ACT, OBS)
    ring.extend(step_of(0))
    batch = ring.sample(2)
    assert "critic_observations" not in batch.keys()
    assert "critic_observations" not in batch["next"].keys()
    assert batch.shape == (2 * ENVS,)


def test_flags_and_numbers_of_other_dtypes_are_converted():
    ring = holosoma.SimpleReplayBuffer(ENVS, STEPS, OBS, ACT, CRITIC)
    step = step_of(3)
    other = step.clone()
    other["next", "dones"] = step["next", "dones"].bool()
    other["next", "truncations"] = step["next", "truncations"].float()
    other["observations"] = step["observations"].double()
    ring.extend(other)
    batch = ring.sample(1)
    assert torch.equal(batch["next", "dones"], step["next", "dones"])
    assert torch.equal(batch["next", "truncations"], step["next", "truncations"])
    assert torch.equal(batch["observations"], step["observations"])


def test_a_missing_key_is_refused():
    ring = holosoma.SimpleReplayBuffer(ENVS, STEPS, OBS, ACT, CRITIC)
    with pytest.raises(KeyError, match="truncations"):
        ring.extend(step_of(0).exclude(("next", "truncations")))


def test_shared_observations_take_half_the_memory():
    sizes = [filled(1, 3, **option).buffer.storage for option in ({}, {"share_next": True, "next_capacity": ENVS})]
    rows = STEPS * ENVS
    both, once = (storage.nbytes for storage in sizes)
    width = 4 * (OBS + CRITIC)
    assert both == rows * (2 * width + 4 * ACT + 4 + 2)
    assert once == both - rows * width + 2 * ENVS * width
