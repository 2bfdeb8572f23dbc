"""Prefixes, other dtypes, observations stored once and n-step transitions, all in one buffer."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from gpubuf.data import (
    Codec,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    SliceSampler,
    TensorDictReplayBuffer,
)
from tests.support.transitions import same

SAMPLERS = {
    "uniform": RandomSampler,
    "prioritized": lambda: PrioritizedSampler(40, 0.6, 0.4),
    "slices": lambda: SliceSampler(slice_len=3),
}


def rows(n: int, start: int, envs: int) -> TensorDict:
    """Episodes of five steps of each environment: observations that go on, but for the last step's."""
    step = torch.arange(start, start + n // envs)
    number = (step + 100 * torch.arange(envs).unsqueeze(-1)).float().reshape(-1, 1)
    ends = (step % 5 == 4).expand(envs, -1).reshape(-1, 1)
    critic = number + torch.arange(7.0) / 4
    coming = critic + 1 + 50 * ends
    data = TensorDict(
        {
            "observation": critic[:, :3].clone(),
            "critic_observation": critic,
            "action": number.half().float(),
            "next": {
                "observation": coming[:, :3].clone(),
                "critic_observation": coming,
                "reward": number % 8,
                "done": ends.long(),
            },
        },
        [n],
    )
    return data if envs == 1 else data.view(envs, n // envs)


@pytest.mark.parametrize("batch_dtypes", [None, {"observation": torch.float64, "critic_observation": torch.float16}])
@pytest.mark.parametrize("dtypes", [None, {"critic_observation": torch.float16, ("next", "done"): torch.bool}])
@pytest.mark.parametrize("share_next", [False, True])
@pytest.mark.parametrize(
    ("sampler", "envs", "n_steps"),
    [
        ("uniform", 1, 1),
        ("uniform", 2, 1),
        ("uniform", 1, 3),
        ("prioritized", 2, 1),
        ("prioritized", 2, 3),
        ("slices", 1, 1),
    ],
)
def test_batches_are_those_of_a_plain_storage(sampler, envs, n_steps, share_next, dtypes, batch_dtypes):
    def buffer(**options) -> TensorDictReplayBuffer:
        return TensorDictReplayBuffer(
            storage=LazyTensorStorage(40, ndim=1 if envs == 1 else 2, batch_dtypes=batch_dtypes, **options),
            sampler=SAMPLERS[sampler](),
            batch_size=12,
            n_steps=n_steps,
            generator=torch.Generator().manual_seed(3),
        )

    options = {"prefixes": {"observation": "critic_observation"}, "dtypes": dtypes, "share_next": share_next}
    plain, both = buffer(), buffer(**options)
    start = 0
    for n in (20, 12, 30):
        for each in (plain, both):
            each.extend(rows(n, start, envs))
        start += n // envs
        assert same(plain[:], both[:])
        assert same(plain.sample(), both.sample())
    assert both.storage.nbytes < plain.storage.nbytes
    restored = buffer(**options)
    restored.load_state_dict(both.state_dict())
    assert same(both[:], restored[:])
    assert same(both.sample(), restored.sample())


def test_pixels_written_as_integers_come_out_scaled(backend):
    """Case 41: a codec lies between floating-point numbers and what is stored."""
    pixels = torch.randint(0, 256, (6, 2, 3), dtype=torch.uint8)
    storage = LazyTensorStorage(
        8, dtypes={"pixels": Codec(torch.uint8, scale=1 / 255)}, batch_dtypes={"pixels": torch.float32}
    )
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=32)
    buffer.extend(TensorDict({"pixels": pixels}, [6]))
    assert torch.equal(buffer[:]["pixels"], pixels)
    batch = buffer.sample()
    torch.testing.assert_close(batch["pixels"], pixels[batch["index"]].float() / 255)
    buffer[torch.tensor([1])] = TensorDict({"pixels": pixels[:1]}, [1])
    assert torch.equal(buffer[1]["pixels"], pixels[0])
