"""What a key can't hold is refused, wherever numbers are converted into its dtype (CASES 66)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gpubuf import capture
from gpubuf.data.storage.schema import as_numbers, stored_as
from gpubuf.integrations.torchrl import LazyTensorStorage, RoundRobinWriter, TensorDictReplayBuffer
from tests.support.fake_cuda import fake_cuda
from tests.support.graph_recorder import RecordedCuda

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)
NUMBERS = [0, 1, -1, 2, 127, 128, 255, 256, 300, -129, 2**31, 2**53 + 1, 2**63 - 1, -(2**63)]
FLOATS = [0.0, -0.0, 1.0, 0.5, 255.4, 255.6, -0.4, 300.0, 1e19, 2.0**63, -(2.0**63), math.inf, -math.inf, math.nan]


def held(number: Any, dtype: torch.dtype) -> int | None:
    """A number as one of an integer dtype, or a flag, by Python; None: it has no room."""
    if dtype is torch.bool:
        return None if math.isnan(number) else number != 0
    limits = torch.iinfo(dtype)
    return int(number) if math.isfinite(number) and limits.min <= int(number) <= limits.max else None


@pytest.mark.parametrize("dtype", [*INTEGERS, torch.bool])
@pytest.mark.parametrize("source", [torch.int64, torch.float64, torch.float32, torch.uint64])
def test_integers_and_flags_hold_numbers_of_their_range(source, dtype):
    """Case 66: each number by itself, against Python's."""
    for number in NUMBERS if not source.is_floating_point else FLOATS:
        if source is torch.uint64:
            number = abs(number) + (2**63 - 1 if number > 300 else 0)
        given = torch.tensor([number], dtype=source)
        due = held(given.item(), dtype)
        if due is None:
            with pytest.raises(ValueError, match=f"key x holds {dtype}, which has no room for"):
                stored_as(given, dtype, "x")
            continue
        found = stored_as(given, dtype, "x")
        assert found.dtype is dtype
        assert found.item() == due


def test_floats_are_rounded_but_stay_finite():
    values = torch.tensor([0.1, 1e-30, math.inf, math.nan, 65504.0], dtype=torch.float64)
    assert torch.equal(stored_as(values, torch.float16, "x").isnan(), values.isnan())
    assert torch.equal(stored_as(values, torch.float32, "x")[:2], values[:2].float())
    assert torch.equal(stored_as(values[:2], torch.complex64, "x").real, values[:2].float())
    for large, dtype in ((1e39, torch.float32), (7e4, torch.float16), (1e39, torch.bfloat16)):
        with pytest.raises(ValueError, match="no room"):
            stored_as(torch.tensor([0.0, large], dtype=torch.float64), dtype, "x")
    with pytest.raises(ValueError, match=r"no room for torch\.complex64"):
        stored_as(torch.tensor([1j]), torch.float32, "x")
    assert as_numbers(0.1).item() == as_numbers([0.1])[0].item() == 0.1


def test_what_cannot_be_refused_is_cut_and_counted(monkeypatch):
    """As codecs do it: on a GPU, without a sync, and in captured and compiled code."""
    RecordedCuda().install(monkeypatch)
    buffer = buffer_of()
    given = torch.zeros(4)
    step = capture(lambda: buffer.set_("small", given) and given, warmup=1)
    for numbers in ([0.0] * 4, [1.0] * 4, [300.0, -7.0, math.nan, 4.0]):
        given.copy_(torch.tensor(numbers))
        step()
    assert buffer[:]["small"].tolist() == [255, 0, 0, 4]
    with pytest.raises(IndexError, match=r"3 rows .* numbers that their dtype has no room for"):
        buffer.storage.refresh()
    with fake_cuda():
        ring = torch.zeros(4, dtype=torch.int64, device="cuda")
        for source, dtype in ((torch.float32, torch.uint8), (torch.int64, torch.bool), (torch.float64, torch.float16)):
            found = stored_as(torch.zeros(5, 2, device="cuda", dtype=source), dtype, "x", ring)
            assert (found.dtype, found.device.type) == (dtype, "cuda")


def buffer_of() -> Any:
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(4), writer=RoundRobinWriter(track_generations=True), batch_size=4
    )
    numbers = torch.arange(4)
    names = {"small": torch.uint8, "long": torch.int64, "flag": torch.bool, "half": torch.float16, "x": torch.float64}
    buffer.extend(TensorDict({name: (numbers % 2).to(dtype) for name, dtype in names.items()}, [4]))
    return buffer


WRONG = [
    ("small", 300),
    ("small", -1),
    ("small", torch.tensor([1, 2, 3, 256])),
    ("small", [1.0, 2.0, 3.0, math.nan]),
    ("long", math.nan),
    ("long", torch.tensor([0.0, 1.0, 2.0, 1e19])),
    ("flag", math.nan),
    ("half", 1e6),
    ("x", torch.tensor([1j] * 4)),
]


@pytest.mark.parametrize(("key", "value"), WRONG)
def test_edits_refuse_what_a_key_cannot_hold(key, value):
    """Case 66: every way of writing a key; nothing is written, not the keys before it either."""
    buffer = buffer_of()
    before = buffer[:].clone()
    first = value if isinstance(value, (int, float)) else value[-1]
    for write in (
        lambda: buffer.set_(key, value),
        lambda: buffer.__setitem__(key, value),
        lambda: buffer.set_at_(key, value, slice(None)),
        lambda: buffer.set_at_(key, first, 2),
        lambda: buffer.update_({"long": torch.full((4,), 7), "small": torch.full((4,), 7), key: value}),
    ):
        with pytest.raises(ValueError, match=rf"key '?{key}'? holds .*, which has no room for"):
            write()
        assert (buffer[:] == before).all()
    if isinstance(value, list):
        columns = {name: before[name] for name in before.keys() if name not in ("index", "index_generation")}
        with pytest.raises(ValueError, match="has no room for"):
            buffer.extend_columns({**columns, key: value})
        assert (buffer[:] == before).all()


def test_numbers_of_python_lose_nothing():
    buffer = buffer_of()
    buffer.set_("x", 0.1)
    buffer.set_at_("x", [0.2, 0.3], [1, 2])
    assert buffer[:]["x"].tolist() == [0.1, 0.2, 0.3, 0.1]
    buffer.set_("small", torch.tensor([1.0, 2.0, 255.0, 0.0]))
    buffer.set_("flag", torch.tensor([0, 1, 2, 0]))
    assert buffer[:]["small"].tolist() == [1, 2, 255, 0]
    assert buffer[:]["flag"].tolist() == [False, True, True, False]
