"""What each object tells the launch, and what it refuses."""

import math

import pytest
import torch
from tensordict import TensorDict

from gpubuf.data import Clip, LazyTensorStorage, Mirror, Normalize, RandomShift, RewardScale, TensorDictReplayBuffer
from gpubuf.data.processing.pipeline import Pipeline
from gpubuf.kernels.rows import BY_CHANCE, DOUBLED, OFF
from tests.support.processing_setup import bound, generator


def test_clip_mirror_and_shift_tell_the_launch():
    mirror = Mirror({"observation": ([2, 1, 0], [1, -1, 1]), "action": ([1, 0], -1)})
    pipeline = bound(Clip("observation", -2, 2), Clip(["observation"], high=1), mirror, RandomShift("pixels", 3))
    for key in (("observation",), ("next", "observation")):
        options = pipeline.options(key)
        assert (options["low"], options["high"]) == (-2, 1)
        assert {"permutation", "sign"} <= options.keys()
    assert pipeline.options(("pixels",)) == {"pad": 3, "height": 4, "width": 5, "pair": 0}
    assert (pipeline.mirror, pipeline.draws) == (BY_CHANCE, 3)
    assert pipeline.noise is not None
    assert bound(Mirror({"action": ([1, 0], -1)}, mode="double")).mirror == DOUBLED
    assert bound(Mirror({"action": ([1, 0], -1)}, mode="double")).draws == 0
    assert bound(Mirror({"action": ([1, 0], -1)})).draws == 1
    plain = bound(Clip("action", -1, 1))
    assert (plain.mirror, plain.draws, plain.noise) == (OFF, 0, None)


def test_the_stream_of_a_pipeline():
    torch.manual_seed(3)
    first, second = bound(RandomShift("pixels")), bound(RandomShift("pixels"))
    torch.manual_seed(3)
    again = bound(RandomShift("pixels"))
    assert torch.equal(first.noise, again.noise)
    assert not torch.equal(first.noise, second.noise)
    address = first.noise.data_ptr()
    first.set_rng(generator(7))
    second.set_rng(generator(7))
    assert torch.equal(first.noise, second.noise)
    assert first.noise.data_ptr() == address
    first.noise[1] = 12
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.noise, second.noise)


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
    rows = (torch.arange(height) + down).clamp(0, height - 1)
    columns = (torch.arange(width) + right).clamp(0, width - 1)
    return image[rows][:, columns]


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
        (lambda: Mirror({"a": ([0, 1], 1)}, mode="often"), "mode"),
        (lambda: RandomShift("a", 0), "pad"),
        (lambda: RandomShift("a", 1.5), "pad"),
        (lambda: RandomShift("a", 2**14), "pad must be a whole number of 1 to 16383, got 16384"),
        (lambda: Pipeline([Normalize("a"), Normalize(["b", "a"])]), "both"),
        (lambda: Pipeline([Normalize("a"), Normalize([("next", "a")])]), "both"),
        (lambda: Pipeline([RewardScale(0.9), Normalize([("next", "reward")])]), "both"),
        (lambda: Pipeline([Mirror({"a": ([0], 1)}), Mirror({"b": ([0], 1)})]), "one Mirror"),
        (lambda: Pipeline([RandomShift("a"), RandomShift("a")]), "both"),
        (lambda: bound(Normalize("nowhere")), "nowhere"),
        (lambda: bound(Normalize("pixels")), "fractions"),
        (lambda: bound(Mirror({"observation": ([0, 1], 1)})), "2 elements"),
        (lambda: bound(RandomShift("observation")), "images"),
        (lambda: bound(Clip("action", 1, 2), Clip("action", 3, 4)), "leave nothing"),
        (lambda: bound(Clip("depth"), data=depth(torch.uint16)), "can't compute with torch.uint16"),
        (lambda: bound(Mirror({"depth": ([1, 0, 3, 2], 1)}), data=depth(torch.complex64)), "torch.complex64"),
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
