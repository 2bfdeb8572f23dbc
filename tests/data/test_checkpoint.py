"""Checkpoint files: what goes in comes out, a damaged or foreign file is refused, and a failed save changes nothing."""

import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tensordict import TensorDict

from gpubuf import serialization
from gpubuf.serialization import load, save


def assert_same(actual, expected):
    assert type(actual) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        for key in expected:
            assert_same(actual[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for a, e in zip(actual, expected, strict=True):
            assert_same(a, e)
    elif isinstance(expected, float) and math.isnan(expected):
        assert math.isnan(actual)
    else:
        assert actual == expected


BASE = torch.arange(10)
STATES = {
    "plain values": {
        "storage": {"next": {"reward": torch.randn(5, 1)}, "index": torch.arange(5)},
        "step": 2**70,
        "beta": 0.1 + 0.2,
        "limits": [float("inf"), -float("inf"), float("nan"), -0.0],
        "name": "Grüße",
        "nothing": None,
        "flag": True,
        "betas": (0.9, (0.999, [])),
        "empty": {},
    },
    "keys that are no names": {
        "state": {0: {"step": torch.tensor(3.0)}, 1: {}},
        "$tensor": "x",
        "$tuple": [1],
        "mixed": {None: 1, 1.5: 2},
    },
    "paths that read alike": {
        "a.b": torch.tensor(1),
        "a": {"b": torch.tensor(2)},
        "#crc32": torch.tensor(3),
        "": torch.tensor(4),
    },
    "tensors that share memory": {"whole": BASE, "part": BASE[2:5], "again": BASE},
}


@pytest.mark.parametrize("what", STATES)
@pytest.mark.parametrize("chunk", [16, 1 << 22])
def test_what_is_saved_returns_with_its_types(tmp_path, what, chunk, monkeypatch):
    """Also where a tensor is written in several pieces."""
    monkeypatch.setattr(serialization, "_CHUNK_BYTES", chunk)
    save(tmp_path / "state", STATES[what])
    assert_same(load(tmp_path / "state"), STATES[what])


def raw(tensor):
    # First as bytes where that needs no copy: some dtypes can't be copied in another order.
    return (tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor).contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("dtype", sorted(serialization.NAMES, key=str), ids=str)
def test_every_dtype_shape_and_stride(tmp_path, dtype):
    numbers = torch.randint(0, 2 if dtype is torch.bool else 256, (6, 4 * dtype.itemsize), dtype=torch.uint8)
    base = numbers.view(dtype)
    state = {"strided": base.T, "scalar": base[0, 0], "none": base[:0], "row": base[1]}
    save(tmp_path / "state", state)
    loaded = load(tmp_path / "state")
    for name, tensor in state.items():
        assert loaded[name].dtype == dtype
        assert loaded[name].shape == tensor.shape
        assert torch.equal(raw(loaded[name]), raw(tensor))
        assert loaded[name].data_ptr() % tensor.element_size() == 0


def test_tensordicts_return_as_tensordicts(tmp_path):
    rows = TensorDict({"a": torch.zeros(4, 2), "next": TensorDict({"b": torch.arange(8).view(4, 2)}, [4, 2])}, [4])
    save(tmp_path / "state", {"rows": rows, "none": TensorDict({}, [3])})
    loaded = load(tmp_path / "state")
    assert isinstance(loaded["rows"], TensorDict)
    assert loaded["rows"].batch_size == (4,)
    assert loaded["rows"]["next"].batch_size == (4, 2)
    assert (loaded["rows"] == rows).all()
    assert loaded["none"].batch_size == (3,)


def test_a_parameter_is_saved_as_its_values(tmp_path):
    save(tmp_path / "state", {"weight": torch.nn.Parameter(torch.ones(2))})
    assert_same(load(tmp_path / "state"), {"weight": torch.ones(2)})


def test_it_is_a_safetensors_file_with_dotted_names(tmp_path):
    save(tmp_path / "state", {"optimizer": {"state": {0: [torch.ones(2)]}}})
    with safe_open(tmp_path / "state", framework="pt") as file:
        assert set(file.keys()) == {"optimizer.state.0.0", "#crc32"}


def test_a_loaded_tensor_outlives_the_replacement_of_its_file(tmp_path):
    """And the file is left alone by those who write to the tensor."""
    save(tmp_path / "state", {"a": torch.full((1000,), 7.0)})
    load(tmp_path / "state")["a"].fill_(1)
    loaded = load(tmp_path / "state")
    save(tmp_path / "state", {"a": torch.zeros(1)})
    assert torch.equal(loaded["a"], torch.full((1000,), 7.0))


@pytest.mark.parametrize(
    ("state", "place"),
    [
        ({"a": {"b": object()}}, "a.b"),
        ({"a": [torch.zeros(1), {1}]}, "a.1"),
        ({"a": torch.zeros(2, dtype=torch.uint8).view(torch.bits8)}, "a"),
        ({"a": {(1, 2): 3}}, "a"),
    ],
)
def test_what_cannot_be_saved_is_named_and_nothing_is_written(tmp_path, state, place):
    save(tmp_path / "state", {"before": 1})
    with pytest.raises(TypeError, match=f"cannot save {place}:"):
        save(tmp_path / "state", state)
    assert load(tmp_path / "state") == {"before": 1}


def test_a_save_that_fails_on_the_way_leaves_the_previous_one(tmp_path, monkeypatch):
    save(tmp_path / "state", {"before": 1})

    def broken(tensor):
        yield memoryview(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(serialization, "_chunks", broken)
    with pytest.raises(OSError, match="no space"):
        save(tmp_path / "state", {"a": torch.zeros(100)})
    assert load(tmp_path / "state") == {"before": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_every_truncation_is_noticed(tmp_path):
    save(tmp_path / "state", {"a": torch.arange(4), "b": [1, None]})
    content = (tmp_path / "state").read_bytes()
    for length in range(len(content)):
        (tmp_path / "cut").write_bytes(content[:length])
        with pytest.raises(ValueError, match="damaged"):
            load(tmp_path / "cut")


def test_every_flipped_bit_is_noticed(tmp_path):
    save(tmp_path / "state", {"a": torch.arange(4), "b": [1, None]})
    content = bytearray((tmp_path / "state").read_bytes())
    for place in range(len(content)):
        content[place] ^= 1 << (place % 8)
        (tmp_path / "flipped").write_bytes(content)
        with pytest.raises(ValueError, match=r"damaged|not a (gpubuf )?checkpoint|version"):
            load(tmp_path / "flipped")
        content[place] ^= 1 << (place % 8)


def test_foreign_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        load(Path(tmp_path / "nowhere"))
    save_file({"a": torch.zeros(2)}, tmp_path / "plain", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="not a gpubuf checkpoint"):
        load(tmp_path / "plain")
    torch.save({"a": 1}, tmp_path / "pickle")
    with pytest.raises(ValueError, match="not a checkpoint"):
        load(tmp_path / "pickle")
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="not a checkpoint"):
        load(tmp_path / "empty")


def test_other_versions_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(serialization, "_VERSION", "99")
    save(tmp_path / "state", {})
    monkeypatch.undo()
    with pytest.raises(ValueError, match="version 99"):
        load(tmp_path / "state")


@pytest.mark.parametrize(
    "tree", ['{"a":{"$tensor":"gone"}}', "[1]", "{", '{"$tensordict":{}}', '{"$dict":[1]}', '{"$float":"x"}']
)
def test_a_tree_that_makes_no_sense_is_refused(tmp_path, monkeypatch, tree):
    monkeypatch.setattr(serialization.json, "dumps", _dumps_tree_as(tree))
    save(tmp_path / "state", {"a": 1})
    monkeypatch.undo()
    with pytest.raises(ValueError, match="damaged: its tree"):
        load(tmp_path / "state")


def _dumps_tree_as(tree):
    original = serialization.json.dumps
    return lambda value, **options: tree if "__metadata__" not in value else original(value, **options)
