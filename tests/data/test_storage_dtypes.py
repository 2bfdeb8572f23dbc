"""Keys that are stored in other dtypes than they are written in."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tensordict import TensorDict
from torch import Tensor

import gpubuf
from gpubuf import cli
from gpubuf.data import (
    Codec,
    LazyTensorStorage,
    SliceSampler,
    TensorDictReplayBuffer,
    TensorStorage,
)
from tests.support.moved_buffers import episodes
from tests.support.transitions import same, transitions

#: For `transitions` of numbers below 250: every number has the same value in these.
LOSSLESS: dict[Any, torch.dtype | Codec] = {
    "observation": torch.bfloat16,
    "action": torch.float32,
    "pixels": Codec(torch.float16, scale=0.5, offset=3.0),
    ("next", "reward"): torch.float16,
    ("next", "step"): torch.int16,
    ("next", "done"): torch.uint8,
}

#: Bytes of a row of `transitions` then.
LOSSLESS_BYTES = 6 + 4 + 14 + 6 + 2 + 1 + 2

CAPACITY = 60


def buffer(sampler=None, ndim: int = 1, size: int = CAPACITY, n_steps: int = 1, **options) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(size, ndim=ndim, **options),
        sampler=sampler,
        n_steps=n_steps,
        batch_size=8,
        generator=torch.Generator().manual_seed(3),
    )


def of_one_key(values: Tensor) -> TensorDict:
    return TensorDict({"x": values}, values.shape[:1])


# What is stored


@pytest.mark.parametrize("way", ["extend", "write"])
def test_integers_out_of_range_are_refused(way):
    """Case 41: at the write, and nothing is written. The buffer goes on."""
    made = buffer(dtypes={"x": torch.uint8})
    start = of_one_key(torch.tensor([3.0, 4.0, 5.0]))
    made.extend(start)
    write = made.extend if way == "extend" else functools.partial(made.storage.write, torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"key 'x': .* out of its range"):
        write(of_one_key(torch.tensor([1.0, 255.6])))
    assert len(made) == made.write_count == 3
    assert made[:]["x"].tolist() == [3, 4, 5]
    made.extend(start)
    assert made[:]["x"].tolist() == [3, 4, 5, 3, 4, 5]


def test_fractions_are_not_rounded_to_zero_and_one():
    """Images in [0, 1] stored as uint8 would be black and white: it is said at the first write."""
    images = TensorDict({"pixels": torch.rand(4, 3, 8, 8)}, [4])
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8, dtypes={"pixels": torch.uint8}), batch_size=2)
    with pytest.raises(ValueError, match=r"'pixels' has fractions in \[-1, 1\].*Codec\(torch.uint8, scale=1 / 255\)"):
        buffer.extend(images)
    assert not buffer.initialized
    # Whole numbers, and others that are meant to be rounded.
    buffer.extend(TensorDict({"pixels": images["pixels"] * 255}, [4]))
    kept = LazyTensorStorage(8, dtypes={"pixels": Codec(torch.uint8, scale=1 / 255)})
    kept.append(images)
    assert torch.allclose(kept[:4]["pixels"], images["pixels"], atol=0.5 / 255 + 1e-6)


def test_a_codec_with_an_offset(backend):
    angle = torch.linspace(-torch.pi, torch.pi, 50)
    made = buffer(dtypes={"x": Codec(torch.int16, scale=torch.pi / 32767, offset=0.0)})
    made.extend(of_one_key(angle))
    assert (made[:]["x"] - angle).abs().max() <= torch.pi / 32767
    shifted = buffer(dtypes={"x": Codec(torch.uint8, scale=2.0, offset=-100.0)})
    shifted.extend(of_one_key(torch.arange(-100.0, 100.0, 4.0)))
    assert shifted.storage.columns[0].whole[:4].tolist() == [0, 2, 4, 6]
    assert torch.equal(shifted[:]["x"], torch.arange(-100.0, 100.0, 4.0))


def test_flags_written_as_numbers_are_stored_as_flags(backend):
    """They tell where trajectories end, as flags do."""
    data = transitions(30)
    plain = buffer(SliceSampler(slice_len=4))
    plain.extend(data)
    flags = buffer(SliceSampler(slice_len=4), dtypes={("next", "done"): torch.bool})
    flags.extend(data.clone().set(("next", "done"), data["next", "done"].to(torch.int64)))
    assert flags.storage.nbytes == plain.storage.nbytes
    for _ in range(3):
        one, other = plain.sample(), flags.sample()
        assert torch.equal(one["next", "step"], other["next", "step"])
        assert other["next", "done"].dtype is torch.int64
        assert torch.equal(one["next", "done"].long(), other["next", "done"])


@pytest.mark.parametrize(
    ("dtypes", "arguments"),
    [
        ({("next", "done"): Codec(torch.uint8, scale=1.0, offset=-1.0)}, {"end_key": ("next", "done")}),
        ({("next", "done"): Codec(torch.uint8, scale=100.0)}, {"end_key": ("next", "done")}),
        ({"episode": torch.bfloat16}, {"traj_key": "episode"}),
        ({"episode": Codec(torch.int32, scale=10.0)}, {"traj_key": "episode"}),
    ],
)
def test_ends_of_trajectories_must_be_told_by_what_is_stored(dtypes, arguments):
    made = buffer(SliceSampler(slice_len=2, **arguments), dtypes=dtypes)
    with pytest.raises(ValueError, match="tells where trajectories end"):
        made.extend(episodes(20))
    assert not made.initialized
    # So does a sampler that comes later.
    later = buffer(dtypes=dtypes)
    later.extend(episodes(20))
    later.set_sampler(SliceSampler(slice_len=2, **arguments))
    with pytest.raises(ValueError, match="tells where trajectories end"):
        later.sample()
    if "end_key" in arguments:
        several = buffer(dtypes=dtypes, n_steps=3)
        with pytest.raises(ValueError, match="tells where trajectories end"):
            several.extend(episodes(20))
    fine = buffer(SliceSampler(slice_len=2, traj_key="episode"), dtypes={"episode": torch.int16})
    fine.extend(episodes(20))
    assert len(fine.sample()) == 8


# Options


def test_a_root_key_stands_for_the_next_one_too():
    made = LazyTensorStorage(5, dtypes={"observation": torch.bfloat16, ("next", "reward"): torch.float32})
    made.append(transitions(3))
    stored = {leaf.key: leaf.dtype for leaf in made.layout.leaves}
    assert stored["observation",] is stored["next", "observation"] is torch.bfloat16
    assert stored["next", "reward"] is torch.float32
    assert stored["action",] is torch.float64
    own = LazyTensorStorage(5, dtypes={"observation": torch.bfloat16, ("next", "observation"): torch.float16})
    own.append(transitions(3))
    assert {leaf.key: leaf.dtype for leaf in own.layout.leaves}["next", "observation"] is torch.float16


def test_keys_that_are_not_there():
    for options in ({"dtypes": {"reward": torch.float16}}, {"batch_dtypes": {("next", "x"): torch.float16}}):
        made = LazyTensorStorage(5, **options)
        with pytest.raises(ValueError, match=r"the batch has .*'observation'.*\('next', 'reward'\)"):
            made.append(transitions(3))
        assert not made.initialized


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Codec(torch.float8_e4m3fn), ValueError, "A100"),
        (lambda: Codec(torch.complex64), ValueError, "can't be converted"),
        (lambda: Codec("uint8"), TypeError, "torch.dtype"),
        (lambda: Codec(torch.uint8, scale=0.0), ValueError, "scale"),
        (lambda: Codec(torch.uint8, offset=float("nan")), ValueError, "finite"),
        (lambda: Codec(torch.bool, scale=2.0), ValueError, "flags"),
        (lambda: LazyTensorStorage(5, dtypes={"x": torch.float8_e5m2}), ValueError, "A100"),
        (lambda: LazyTensorStorage(5, batch_dtypes={"x": torch.uint16}), ValueError, "can't be converted"),
        (lambda: LazyTensorStorage(5, batch_dtypes={"x": Codec(torch.uint8)}), TypeError, "torch.dtype"),
        (lambda: LazyTensorStorage(5, dtypes={"x": 3}), TypeError, "torch.dtype"),
    ],
)
def test_dtypes_that_cannot_be(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_what_is_written_can_not_be_converted_either():
    made = LazyTensorStorage(5, dtypes={"x": torch.float32})
    with pytest.raises(ValueError, match=r"key 'x': torch\.complex64 can't be converted"):
        made.append(of_one_key(torch.zeros(3, dtype=torch.complex64)))
    # Beside others it is stored as it is.
    beside = LazyTensorStorage(5, dtypes={"y": torch.float16})
    data = TensorDict({"x": torch.randn(3, dtype=torch.complex64), "y": torch.ones(3)}, [3])
    beside.append(data)
    assert same(beside[:], data)


# Memory


def test_a_million_frames(capsys):
    """Frames that are given as floats, and stored as bytes: a quarter of the memory, by the plan and by the storage."""
    options = {"dtypes": {"pixels": Codec(torch.uint8, scale=1 / 255)}}
    frames = TensorDict({"pixels": torch.rand(2, 84, 84, 4)}, [2])
    small = LazyTensorStorage(10, **options)
    small.append(frames)
    million = gpubuf.plan(frames, 1_000_000, **options)
    assert million.rows == small.nbytes // 10 * 1_000_000 == 84 * 84 * 4 * 1_000_000
    assert gpubuf.plan(frames, 1_000_000).rows == 4 * million.rows
    command = ["plan", "--spec", "pixels=84x84x4:float32", "--capacity", "1000000", "--stored-as", "pixels=uint8"]
    cli.main(command)
    assert "28,224" in capsys.readouterr().out


def test_the_text_says_how_keys_are_stored():
    made = LazyTensorStorage(5, dtypes={"observation": torch.bfloat16})
    made.append(transitions(3))
    assert "'observation': [3] torch.float32 as torch.bfloat16" in repr(made)
    assert "'action': [1] torch.float64," in repr(made)


def test_a_storage_of_tensors_that_are_there_has_no_options():
    with pytest.raises(TypeError):
        TensorStorage(transitions(4), dtypes={"observation": torch.bfloat16})


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


def lossless(dtypes=LOSSLESS, **options) -> TensorDictReplayBuffer:
    return buffer(dtypes=dtypes, **options)


# States and checkpoints


def test_files_hold_what_is_stored(tmp_path):
    """The file says in which dtypes, and the rows take no more room than in memory."""
    source = lossless(size=4000)
    source.extend(transitions(200).expand(20, 200).reshape(4000))
    size = source.save(tmp_path / "saved")
    (path,) = (tmp_path / "saved").glob("state-*")
    with safe_open(path, framework="pt") as file:
        prefix = "_storage.rows."
        names = [name for name in file.keys() if name.startswith(prefix)]
        dtypes = {name.removeprefix(prefix): file.get_slice(name).get_dtype() for name in names}
    assert dtypes == {
        "observation": "BF16",
        "action": "F32",
        "pixels": "F16",
        "next.observation": "BF16",
        "next.reward": "F16",
        "next.done": "U8",
        "next.step": "I16",
    }
    assert 4000 * LOSSLESS_BYTES < size < 4000 * LOSSLESS_BYTES + 8000


OTHERS = {
    "plain": None,
    "another dtype": LOSSLESS | {"observation": torch.float16},
    "another scale": LOSSLESS | {"pixels": Codec(torch.float16, scale=0.25, offset=3.0)},
    "one key more": LOSSLESS | {("next", "observation"): torch.float16},
}


@pytest.mark.parametrize(
    ("other", "way", "fresh"),
    [(other, "state" if number % 2 else "checkpoint", number < 2) for number, other in enumerate(OTHERS)],
)
def test_a_storage_with_other_dtypes_refuses(tmp_path, way, fresh, other):
    """With both sides in the text, and the buffer is as it was."""
    source, target = lossless(), lossless(dtypes=OTHERS[other])
    source.extend(transitions(75))
    if not fresh:
        target.extend(transitions(9))
    for giver, taker in ((source, target), (target, source)):
        if not giver.storage.initialized:
            continue
        before = taker[:].clone() if taker.storage.initialized else None
        if way == "checkpoint":
            giver.save(tmp_path / "saved")
        with pytest.raises(ValueError, match=r"the rows are stored in another way: .* there, .* in this storage"):
            taker.load(tmp_path / "saved") if way == "checkpoint" else taker.load_state_dict(giver.state_dict())
        assert taker.storage.initialized == (before is not None)
        if before is not None:
            assert same(taker[:], before)
    target.extend(transitions(3, 20))
    assert same(target[-3:], transitions(3, 20))


@pytest.mark.parametrize(
    "damage",
    [
        lambda form: None,
        lambda form: "text",
        lambda form: [],
        lambda form: {"key": 1},
        lambda form: form[1:],
        lambda form: form + form,
        lambda form: [form[0] | {"key": [3]}, *form[1:]],
        lambda form: [form[0] | {"key": []}, *form[1:]],
        lambda form: [form[0] | {"key": ["next"]}, *form[1:]],
        lambda form: [form[0] | {"written": "float99"}, *form[1:]],
        lambda form: [form[0] | {"written": ["float32"]}, *form[1:]],
        lambda form: [form[0] | {"shape": [-1]}, *form[1:]],
        lambda form: [form[0] | {"shape": [10**15]}, *form[1:]],
        lambda form: [form[0] | {"shape": 3}, *form[1:]],
        lambda form: [form[0] | {"scale": 2.0}, *form[1:]],
        lambda form: [{name: value for name, value in form[0].items() if name != "stored"}, *form[1:]],
        lambda form: [5, *form[1:]],
        lambda form: [form[3], form[0], *form[4:], form[1], form[2]],
    ],
)
@pytest.mark.parametrize("fresh", [True, False])
def test_a_state_that_says_nonsense(damage, fresh):
    source, target = lossless(), lossless()
    source.extend(transitions(20))
    state = source.state_dict()
    state["_storage"]["form"] = damage(state["_storage"]["form"])
    if not fresh:
        target.extend(transitions(4, 30))
    with pytest.raises(ValueError, match=r"what was written|stored in another way|the batch"):
        target.load_state_dict(state)
    assert len(target) == (0 if fresh else 4)
    target.load_state_dict(source.state_dict())
    assert same(source[:], target[:])
