"""Case 67. Whatever a buffer takes it can save: every dtype of PyTorch in every container, or refused at the write."""

import re
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, tensorclass
from torch import Tensor

from gpubuf import LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer, TensorStorage, serialization

# Before PyTorch 2.9 no tensor of this dtype can be copied.
LACKING = {torch.float4_e2m1fn_x2} if torch.__version__ < (2, 9) else set()
DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)} - LACKING, key=str)
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")


def values(dtype: torch.dtype, n: int) -> Tensor:
    """Random bytes as ``n`` rows of three numbers."""
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (n, 3 * dtype.itemsize), dtype=torch.uint8)
    return raw.view(dtype)


def bits(value: Any) -> Tensor:
    return value.resolve_conj().contiguous().reshape(-1).view(torch.uint8)


@tensorclass
class Row:
    a: Tensor


Pair = namedtuple("Pair", "x y")

CONTAINERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "TensorDict": (lambda t: TensorDict({"n": {"a.b": t}}, [len(t)]), lambda rows: rows["n", "a.b"]),
    "one number": (lambda t: TensorDict({"a": t[:, 0]}, [len(t)]), lambda rows: rows["a"]),
    "tensor": (lambda t: t, lambda rows: rows),
    "tensorclass": (lambda t: Row(a=t, batch_size=[len(t)]), lambda rows: rows.get("a")),
    "tuple": (lambda t: (t, {"b": [t]}), lambda rows: rows[1]["b"][0]),
    "named tuple": (lambda t: Pair(t, t), lambda rows: rows.y),
}


def refused(dtype: torch.dtype) -> bool:
    return dtype not in serialization.NAMES


def test_what_is_refused():
    """Dtypes that PyTorch itself can't calculate with, or that mean nothing without a scale."""
    names = {re.match("[a-z]+", str(dtype).removeprefix("torch."))[0] for dtype in DTYPES if refused(dtype)}
    assert names <= {"qint", "quint", "bits", "int", "uint", "bcomplex"}
    assert all(not refused(dtype) for dtype in (torch.complex32, torch.complex64, torch.complex128, torch.uint16))


@pytest.mark.parametrize("container", CONTAINERS)
def test_every_dtype_is_saved_or_refused_at_the_write(container: str, tmp_path: Path):
    """In memory and in files in turn."""
    made, read = CONTAINERS[container]
    for number, dtype in enumerate(DTYPES):
        path = tmp_path / str(number)
        try:
            given = values(dtype, 11)
        except RuntimeError:
            assert refused(dtype)  # PyTorch can't make it
            continue
        mapped = number % 2 == len(container) % 2
        storage = LazyMemmapStorage(8, scratch_dir=path / "rows") if mapped else LazyTensorStorage(8)
        buffer = ReplayBuffer(storage=storage, batch_size=4)
        if refused(dtype):
            with pytest.raises(TypeError, match=rf"the dtype {dtype}, which can't be saved"):
                buffer.extend(made(given))
            assert len(buffer) == 0
            continue
        for part in (given[:5], given[5:]):
            buffer.extend(made(part))
        buffer.sample()
        buffer.save(path / "c")
        others = [ReplayBuffer(storage=LazyTensorStorage(8), batch_size=4) for _ in range(2)]
        others[0].load(path / "c")
        others[1].load_state_dict(buffer.state_dict())
        if mapped:
            others.append(ReplayBuffer(storage=LazyMemmapStorage.open(path / "rows"), batch_size=4))
        due = bits(read(buffer.storage[torch.arange(8)]))
        for other in others:
            found = read(other.storage[torch.arange(8)])
            assert found.dtype is dtype, (dtype, container)
            assert torch.equal(bits(found), due), (dtype, container)


def test_storages_of_the_users_own_tensors(tmp_path: Path):
    with pytest.raises(TypeError, match="can't be saved"):
        TensorStorage(TensorDict({"a": torch.zeros(4, 3, dtype=torch.uint8).view(torch.bits8)}, [4]))
    buffer = ReplayBuffer(storage=TensorStorage(TensorDict({"a": values(torch.complex64, 8)}, [8])))
    buffer.save(tmp_path)
    other = ReplayBuffer(storage=LazyTensorStorage(8))
    other.load(tmp_path)
    assert torch.equal(bits(other.storage[:]["a"]), bits(buffer.storage[:]["a"]))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype is other.dtype and torch.equal(bits(one), bits(other))
    if isinstance(one, np.ndarray):
        return type(other) is np.ndarray and one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if isinstance(one, (list, tuple)):
        return type(one).__name__ == type(other).__name__ and all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return type(one) is type(other) and (one == other or one != one)


OBJECTS = [
    1, 2**70, -0.5, float("nan"), float("inf"), True, None, "text", b"\x00\xff", 1 + 2j, complex("nan-infj"),
    [1, [2, ()]], {"a": 1, 2: None, None: [b""]}, Pair(1, "y"), np.arange(6).reshape(2, 3), np.float32(2.5),
    np.bool_(True), np.array([1 + 2j], dtype=np.complex64), torch.tensor(3 - 1j), torch.rand(3).bfloat16(),
    values(torch.complex32, 2),    torch.tensor([1 + 2j]).conj(),
]  # fmt: skip


def test_objects(tmp_path: Path):
    buffer = ReplayBuffer(storage=ListStorage(100), batch_size=4)
    buffer.extend(OBJECTS)
    buffer.save(tmp_path)
    other = ReplayBuffer(storage=ListStorage(100), batch_size=4)
    other.load(tmp_path)
    found = other.storage[:]
    assert [one for one, again in zip(OBJECTS, found, strict=True) if not same(one, again)] == []
