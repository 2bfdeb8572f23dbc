"""What each object tells the launch, and what it refuses.

The scale of rewards, against a loop over the steps, without a buffer.

Running statistics and normalisation, against plain torch, without a buffer.
"""

import copy
import math

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from gpubuf.data import Clip, LazyTensorStorage, Mirror, Normalize, RandomShift, RewardScale, TensorDictReplayBuffer
from gpubuf.data.processing.pipeline import Pipeline
from gpubuf.data.storage.layout import RowLayout
from tests.support.processing_setup import CPU, bound, close, generator, steps


def depth(dtype: torch.dtype) -> TensorDict:
    """Images of a dtype with which no kernel computes."""
    return TensorDict({"depth": torch.ones(1, 2, 2).to(dtype)}, [1])


@pytest.mark.parametrize("dtype", [torch.uint16, torch.complex64], ids=str)
def test_images_of_any_dtype_are_shifted(backend, dtype):
    """Depth in millimetres as uint16, for example: whole pixels, on both backends."""
    images = torch.arange(1, 49).reshape(4, 3, 4).to(dtype)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(4), process=[RandomShift("depth", 1)], batch_size=16)
    buffer.extend(TensorDict({"depth": images}, [4]))
    batch = buffer.sample()
    for image, row in zip(batch["depth"], batch["index"].tolist(), strict=True):
        places = [(y, x) for y in (-1, 0, 1) for x in (-1, 0, 1)]
        assert any(torch.equal(image, shifted(images[row], *place)) for place in places)


def shifted(image: torch.Tensor, down: int, right: int) -> torch.Tensor:
    """An image of which each pixel comes from so far down and to the right, or from the border."""
    height, width = image.shape
    rows = [min(max(y + down, 0), height - 1) for y in range(height)]
    columns = [min(max(x + right, 0), width - 1) for x in range(width)]
    return torch.stack([image[y, x] for y in rows for x in columns]).view(height, width)


# Transforms


def test_clip_and_mirror_change_a_copy():
    """Integers stay integers, twins go along, windows are mirrored as a whole; a name that is not there is an error."""
    data = steps(6)
    clipped = Clip(["observation", "pixels"], 0.5, 100.0)(data)
    assert torch.equal(clipped["next", "observation"], data["next", "observation"].clamp(0.5, 100))
    assert torch.equal(clipped["pixels"], data["pixels"].clamp(0, 100).clamp(min=0))
    assert clipped["pixels"].dtype is torch.uint8
    assert clipped["action"] is data["action"]
    assert torch.equal(data["observation"], steps(6)["observation"])
    mirror = Mirror({"observation": ([2, 0, 1], [1, -1, 2])})
    image = mirror.mirrored(data)
    due = data["next", "observation"][:, [2, 0, 1]] * torch.tensor([1.0, -1.0, 2.0])
    assert torch.equal(image["next", "observation"], due)
    assert torch.cat([data, image]).batch_size == (12,)
    windows = mirror(data.view(2, 3))
    rows = windows["observation"] == data.view(2, 3)["observation"]
    assert all(row.all() or not row.any() for row in rows)
    with pytest.raises(KeyError, match="nowhere"):
        Clip("nowhere")(data)


# Refusals


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Normalize([]), "list of keys"),
        (lambda: Normalize(["a", "a"]), "twice"),
        (lambda: Normalize("a", update="always"), "update"),
        (lambda: Normalize("a", eps=0), "eps"),
        (lambda: Normalize("a", until=0), "until"),
        (lambda: Normalize("a", clip=-1), "nothing lies"),
        (lambda: Clip("a", 1, 0), "nothing lies"),
        (lambda: Clip("a", math.nan), "nothing lies"),
        (lambda: RewardScale(1.5), "gamma"),
        (lambda: RewardScale(0.9, 0), "g_max"),
        (lambda: RewardScale(0.9, envs=0), "envs"),
        (lambda: Mirror({}), "needs a key"),
        (lambda: Mirror({"a": ([0, 0], 1)}), "permutation"),
        (lambda: Mirror({"a": ([1, 2], 1)}), "permutation"),
        (lambda: Mirror({"a": ([0.0, 1.0], 1)}), "permutation"),
        (lambda: Mirror({"a": ([0, 1], [1, 1, 1])}), "sign"),
        (lambda: Mirror({"a": ([0, 1], math.nan)}), "sign"),
        (lambda: Mirror({"a": ([0, 1], 1)}, mode="double"), r"torch.cat\(\[batch, mirror.mirrored\(batch\)\]\)"),
        (lambda: RandomShift("a", 0), "pad"),
        (lambda: RandomShift("a", 1.5), "pad"),
        (lambda: RandomShift("a", 2**14), "pad must be a whole number of 1 to 16383, got 16384"),
        (lambda: Pipeline([Normalize("a"), Normalize(["b", "a"])]), "both"),
        (lambda: Pipeline([Normalize("a"), Normalize([("next", "a")])]), "both"),
        (lambda: bound(*[RewardScale(0.9)] * 2), "comes twice"),
        (lambda: Pipeline([RandomShift("a"), RandomShift("a")]), "both"),
        (lambda: bound(Normalize("nowhere")), "nowhere"),
        (lambda: bound(Normalize("pixels")), "fractions"),
        (lambda: Mirror({"observation": ([0, 1], 1)})(steps(1)), "2 elements"),
        (lambda: bound(RandomShift("observation")), "images"),
        (lambda: bound(Normalize("depth"), data=depth(torch.float8_e5m2)), "torch.float8_e5m2"),
        (lambda: bound(RandomShift("depth"), data=depth(torch.complex128)), "up to 8 bytes"),
    ],
)
def test_refusals(make, text: str):
    with pytest.raises(ValueError, match=text):
        make()


def test_which_key():
    normalize = Normalize(["observation", "action"])
    with pytest.raises(ValueError, match="which of"):
        normalize.mean()
    with pytest.raises(RuntimeError, match="knows nothing yet"):
        normalize.mean("action")
    with pytest.raises(KeyError):
        normalize.mean("reward")


def loop_of_returns(rewards: Tensor, ends: Tensor, before: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    total, out = before.clone(), []
    for reward, end in zip(rewards, ends, strict=True):
        total = total + reward
        out.append(total)
        total = torch.where(end.unsqueeze(-1), 0.0, gamma * total)
    return torch.stack(out), total


@pytest.mark.parametrize("envs", [2, 4])
def test_reward_scale_of_several_environments(envs):
    """Rows [T, E], and rows of a storage of one dimension in which environments take turns."""
    data = TensorDict(
        {
            "next": {
                "reward": torch.randn(12, envs, 1, generator=generator()),
                "terminated": torch.rand(12, envs, 1, generator=generator(1)) < 0.2,
            }
        },
        [12, envs],
    )
    two, one = RewardScale(0.9), RewardScale(0.9, envs=envs)
    a, b = Pipeline((), [two]), Pipeline((), [one])
    a.bind(RowLayout(data, 2).leaves, envs, CPU)
    b.bind(RowLayout(data, 2).leaves, 1, CPU)
    for part in data.split(5):
        a.on_write(part, 2)
        b.on_write(part.reshape(-1), 1)
    assert torch.equal(two.factor(), one.factor())
    returns, _ = loop_of_returns(
        data["next", "reward"].double(),
        data["next", "terminated"].squeeze(-1),
        torch.zeros(envs, 1, dtype=torch.float64),
        0.9,
    )
    close(two.var(), returns.flatten(0, 1).var(0, correction=0))
    with pytest.raises(ValueError, match=f"{envs} environments, but 7 rows"):
        b.check_write(data.reshape(-1)[:7], 1)


def test_a_reward_that_is_not_finite_counts_as_zero():
    data = steps(4, ends=0)
    data["next", "reward"] = torch.tensor([[1.0], [math.nan], [math.inf], [2.0]])
    scale = RewardScale(0.5)
    bound(scale).on_write(data, 1)
    close(scale.mean(), torch.tensor([(1 + 0.5 + 0.25 + 2.125) / 4], dtype=torch.float64))


def test_reset_forgets_the_returns_alone():
    scale = RewardScale(0.5)
    pipeline = bound(scale)
    pipeline.on_write(steps(4, ends=0), 1)
    factor = scale.factor()
    scale.reset()
    assert torch.equal(scale.factor(), factor)
    assert not scale._returns["next", "reward"].any()


def test_reward_scale_needs_ends():
    data = steps(1).exclude(("next", "done"), ("next", "terminated"))
    with pytest.raises(ValueError, match="end_keys"):
        bound(RewardScale(0.9), data=data)
    with pytest.raises(ValueError, match="end_keys"):
        bound(RewardScale(0.9, end_keys=["flag"]))


# Moments


def test_a_batch_with_zero_variance():
    """Case 44: what equals the mean becomes 0, also after one row; clip bounds the rest."""
    normalize = Normalize("observation", clip=5)
    pipeline = bound(normalize)
    data = steps(1)
    data["observation"] = torch.full((1, 3), 0.1)
    for _ in range(3):
        pipeline.on_write(data, 1)
        assert normalize(data["observation"]).tolist() == [[0.0] * 3]
        assert normalize(torch.full((1, 3), 7.0)).tolist() == [[5.0] * 3]
    assert normalize.var().tolist() == [0, 0, 0]


def test_before_the_first_row_nothing_changes():
    normalize = Normalize("observation")
    bound(normalize)
    x = torch.randn(4, 3, generator=generator())
    assert torch.equal(normalize(x), x)


# Normalize


def test_until():
    normalize = Normalize("observation", until=10)
    pipeline = bound(normalize)
    for seed in range(5):
        pipeline.on_write(steps(4, seed=seed), 1)
    assert normalize.count().tolist() == [12] * 3


def test_addresses_stay_where_they_are():
    normalize, scale = Normalize("observation"), RewardScale(0.9)
    pipeline = bound(normalize, scale)
    before = pipeline.options(("observation",)), [tensor.data_ptr() for tensor in scale.tensors()]
    pipeline.on_write(steps(5), 1)
    state = pipeline.state_dict()
    pipeline.load_state_dict(state)
    normalize.merge(copy.deepcopy(normalize)).eval()
    pipeline.bind(RowLayout(steps(1), 1).leaves, 1, CPU)
    assert before == (pipeline.options(("observation",)), [tensor.data_ptr() for tensor in scale.tensors()])


def test_rewards_given_by_hand_count_as_written_ones():
    """``update`` learns what a write does. A state that was loaded stays as it is when its object learns more."""
    written, told = RewardScale(0.9), RewardScale(0.9)
    pipelines = [bound(scale) for scale in (written, told)]
    for pipeline in pipelines:
        pipeline.on_write(steps(6), 1)
    pipelines[0].on_write(steps(5, seed=1), 1)
    told.update(steps(5, seed=1))
    same = [scale.state_dict() for scale in (written, told)]
    assert torch.equal(same[0]["returns"]["0"], same[1]["returns"]["0"])
    assert written.count().tolist() == told.count().tolist()
    close(written.var(), told.var())
    fresh, loaded = RewardScale(0.9), told.state_dict()
    fresh.load_state_dict(loaded)
    bound(fresh).on_write(steps(4, seed=2), 1)
    assert torch.equal(loaded["returns"]["0"], same[1]["returns"]["0"])


def test_merge_of_two_ranks():
    ranks = [Normalize("observation"), Normalize("observation")]
    for number, normalize in enumerate(ranks):
        bound(normalize).on_write(steps(20 + number, seed=number), 1)
    rows = torch.cat([steps(20), steps(21, seed=1)])["observation"].double()
    by_state = copy.deepcopy(ranks[0]).merge(ranks[1].state_dict())
    ranks[0].merge(ranks[1])
    for merged_one in (by_state, ranks[0]):
        close(merged_one.mean(), rows.mean(0))
        close(merged_one.var(), rows.var(0, correction=0))
        assert torch.equal(merged_one.state_dict()["moments"]["0"]["peak"], rows.abs().amax(0))
    fresh = Normalize("observation").merge(ranks[1])
    close(fresh.mean(), ranks[1].mean())
    with pytest.raises(ValueError, match="keys"):
        ranks[0].merge(Normalize("action"))


def test_states_that_can_not_be_loaded():
    normalize = Normalize("observation")
    pipeline = bound(normalize)
    pipeline.on_write(steps(3), 1)
    good = pipeline.state_dict()
    wide = bound(Normalize("observation"), data=steps(1, width=5))
    with pytest.raises(ValueError, match="5 elements"):
        wide.load_state_dict(good)
    with pytest.raises(ValueError, match="processing"):
        bound(RandomShift("pixels")).load_state_dict(good)
    for damage in (
        {"count": torch.tensor([-1.0] * 3).double()},
        {"mean": torch.zeros(3)},
        {"m2": torch.zeros(2).double()},
    ):
        bad = copy.deepcopy(good)
        bad["steps"]["0"]["moments"]["0"].update(damage)
        with pytest.raises(ValueError, match=r"float64|lengths|negative"):
            pipeline.load_state_dict(bad)
    assert normalize.count().tolist() == [3] * 3
