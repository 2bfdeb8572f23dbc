"""Keys that are the first elements of others, and have no memory of their own."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

import gpubuf
from gpubuf.data import Codec, LazyTensorStorage, TensorDictReplayBuffer
from tests.support.transitions import same

PREFIXES = {"observation": "critic_observation"}


def rows(n: int, start: int = 0) -> TensorDict:
    """Rows whose observation is the beginning of what the critic sees."""
    number = torch.arange(start, start + n).float().unsqueeze(-1)
    critic, coming = number + torch.arange(7.0) / 8, number + 1 + torch.arange(7.0) / 8
    return TensorDict(
        {
            "observation": critic[:, :3].clone(),
            "critic_observation": critic,
            "next": {
                "observation": coming[:, :3].clone(),
                "critic_observation": coming,
                "reward": number,
                "done": number % 5 == 4,
            },
        },
        [n],
    )


def buffer(ndim: int = 1, sampler=None, **options) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(40, ndim=ndim, **options),
        sampler=sampler,
        batch_size=8,
        generator=torch.Generator().manual_seed(3),
    )


def test_bytes():
    short = buffer(prefixes=PREFIXES)
    short.extend(rows(9))
    short.sample()
    assert short.storage.nbytes == 40 * (28 + 28 + 4 + 1)
    made = gpubuf.plan(rows(2), 40, prefixes=PREFIXES)
    taken = short.memory()
    assert (made.rows, made.counters) == (taken.rows, taken.counters)
    assert {key.name: key.row_bytes for key in made.keys} == {
        "observation": 0,
        "critic_observation": 28,
        "next.observation": 0,
        "next.critic_observation": 28,
        "next.reward": 4,
        "next.done": 1,
    }
    assert "'observation': [3] torch.float32 in 'critic_observation'" in repr(short.storage)


@pytest.mark.parametrize("key", ["observation", ("next", "observation")])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("way", ["extend", "write"])
def test_another_beginning_is_refused(key, first, way):
    """Nothing is written, and the buffer goes on."""
    if first and way == "write":
        pytest.skip("there is nothing to overwrite before the first write")
    made = buffer(prefixes=PREFIXES)
    if not first:
        made.extend(rows(5))
    wrong = rows(4, 10)
    wrong[key] = wrong[key].clone()
    wrong[key][2, 1] += 1
    name = repr(key)
    with pytest.raises(ValueError, match="first elements of") as error:
        made.extend(wrong) if way == "extend" else made.storage.write(torch.arange(4), wrong)
    assert name in str(error.value)
    assert len(made) == (0 if first else 5)
    made.extend(rows(3, 5))
    assert same(made[:], rows(3, 5) if first else rows(8))


def test_bits_are_compared():
    """NaN in both is the same; zero and minus zero are not."""
    made = buffer(prefixes=PREFIXES)
    data = rows(3)
    for key in ("observation", "critic_observation"):
        data[key][1, 2] = float("nan")
    made.extend(data)
    assert made[:]["observation"][1, 2].isnan()
    for key, value in (("observation", 0.0), ("critic_observation", -0.0)):
        data[key][1, 2] = value
    with pytest.raises(ValueError, match="first elements"):
        made.extend(data)


def test_a_prefix_is_not_written_back_on_its_own():
    made = buffer(prefixes=PREFIXES)
    made.extend(rows(10))
    latent = TensorDict({"observation": torch.zeros(2, 3)}, [2])
    with pytest.raises(ValueError, match="first elements of 'critic_observation': write that one"):
        made.update_if_present(torch.tensor([0, 1]), latent, generation=torch.ones(2, dtype=torch.int64))


def test_rows_of_several_dimensions():
    """The first dimension is that of which a prefix has a part: frames of a stack, say."""
    stack = torch.arange(5 * 4 * 2 * 3.0).view(5, 4, 2, 3)
    data = TensorDict({"frame": stack[:, :1].clone(), "stack": stack}, [5])
    made = LazyTensorStorage(6, prefixes={"frame": "stack"})
    made.append(data)
    assert same(made[:], data)
    assert made.nbytes == 6 * 96


def test_small_keys_in_a_record():
    """A prefix reads a key that lies beside others."""
    data = TensorDict({"a": torch.rand(5, 2), "b": torch.rand(5, 1), "c": torch.rand(5, 1)}, [5])
    data["first"] = data["a"][:, :1].clone()
    made = LazyTensorStorage(6, prefixes={"first": "a"})
    made.append(data)
    assert same(made[:], data)
    assert made.table[:, 4].tolist() == [16, 16, 16]


def test_a_prefix_has_a_dtype_in_batches():
    dtypes = {"critic_observation": Codec(torch.int16, 1 / 8)}
    made = buffer(prefixes=PREFIXES, dtypes=dtypes, batch_dtypes={"observation": torch.float16})
    data = rows(20)
    made.extend(data)
    batch = made.sample()
    assert batch["observation"].dtype is batch["next", "observation"].dtype is torch.float16
    assert batch["critic_observation"].dtype is torch.float32
    assert torch.equal(batch["observation"], data["observation"][batch["index"]].half())
    assert same(made[:], data)


def test_without_the_other_under_next():
    """A rule for a root key holds under "next" where both keys are there."""
    data = rows(5)
    del data["next", "critic_observation"]
    made = LazyTensorStorage(6, prefixes=PREFIXES)
    made.append(data)
    assert same(made[:], data)
    assert made.nbytes == 6 * (28 + 12 + 4 + 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefixes": {"observation": "state"}}, "names 'state', the batch has"),
        ({"prefixes": {"action": "critic_observation"}}, "names 'action', the batch has"),
        ({"prefixes": {"critic_observation": "observation"}}, "can't be a prefix of 'observation'"),
        ({"prefixes": {("next", "done"): "critic_observation"}}, "can't be a prefix of"),
        ({"prefixes": {"a": "b", "b": "c"}}, "'b' can't be a prefix itself"),
        ({"prefixes": {"a": "a"}}, "'a' can't be a prefix itself"),
        ({"prefixes": PREFIXES, "dtypes": {"observation": torch.float16}}, "no dtype of its own"),
    ],
)
def test_prefixes_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        LazyTensorStorage(5, **options).append(rows(3))
