"""Something of every row of a window is written back to where the row is, and nowhere else."""

from __future__ import annotations

import random

import pytest
import torch
from tensordict import TensorDict

from gpubuf.data import LazyTensorStorage, PrioritizedSampler, RandomSampler, TensorDictReplayBuffer, Window

APART = 10_000


def steps(start: int, n: int, envs: int) -> TensorDict:
    number = torch.arange(start, start + n) + APART * torch.arange(envs).unsqueeze(1)
    done = (number % 7 == 6).unsqueeze(-1)
    given = TensorDict({"number": number, "latent": torch.zeros(envs, n, 2), "next": {"done": done}}, [envs, n])
    return given if envs > 1 else given[0]


@pytest.mark.parametrize("outside", ["cross", "repeat", "zero"])
@pytest.mark.parametrize("envs", [1, 3])
@pytest.mark.parametrize("prioritized", [False, True])
def test_latents_return_to_the_rows_that_are_still_there(outside: str, envs: int, prioritized: bool):
    """CASES 79: a latent that comes late does not reach the row that has taken the place."""
    chance, room = random.Random(envs), 20
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(room * envs, ndim=1 + (envs > 1)),
        sampler=PrioritizedSampler(room * envs, 0.6, 0.4) if prioritized else RandomSampler(),
        windows=Window(-3, 2, outside=outside, mask="padded", rows="window"),
        generator=torch.Generator().manual_seed(0),
    )
    due, written = dict[int, float](), 0
    for turn in range(1, 60):
        n = chance.choice((1, 2, 5, room + 3))
        buffer.extend(steps(written, n, envs))
        written += n
        batch = buffer.sample(4)
        index, generation = batch["window", "index"], batch["window", "index_generation"]
        padded = index.lt(0) if envs == 1 else index.lt(0).all(-1)
        assert torch.equal(padded, batch["padded"])
        rows = buffer[index[~padded]]
        assert torch.equal(rows["number"], batch["number"][~padded])
        late = chance.choice((0, 0, 1, 7))
        if late:
            buffer.extend(steps(written, late, envs))
            written += late
        latent = torch.full((*padded.shape, 2), float(turn))
        buffer.update_if_present(index, TensorDict({"latent": latent}, padded.shape), generation=generation)
        due |= dict.fromkeys(batch["number"][~padded].tolist(), float(turn))
        stored = buffer[:]
        numbers, latents = stored["number"].reshape(-1).tolist(), stored["latent"].reshape(-1, 2)
        assert torch.equal(latents[:, 0], torch.tensor([due.get(number, 0.0) for number in numbers]))
        assert torch.equal(latents[:, 0], latents[:, 1])


def test_columns_have_the_rows_of_windows_too():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(12), windows={"number": Window(0, 3, rows="of_number")})
    buffer.extend(steps(0, 9, 1))
    columns = buffer.sample_columns(5)
    index = columns["of_number", "index"]
    assert torch.equal(index.amax(1), columns["number"].amax(1))
    assert columns["of_number", "index_generation"].shape == (5, 4)
