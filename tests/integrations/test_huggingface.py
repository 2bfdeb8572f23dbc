"""Rows of a buffer as a data set of Hugging Face, and back."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from gpubuf import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from gpubuf.integrations.huggingface import HuggingFaceDatasetAdapter

N = 14


def rows(first: int, n: int) -> TensorDict:
    t = torch.arange(first, first + n)
    following = {"observation": torch.rand(n, 3), "done": (t % 4 == 3)[:, None], "reward": t[:, None].double()}
    others = {"half": torch.rand(n, 2).half(), "count": t.to(torch.int32), "id": t}
    pixels = torch.randint(256, (n, 3, 4, 5), dtype=torch.uint8)
    return TensorDict({"observation": torch.rand(n, 3), "pixels": pixels, "next": following, **others}, [n])


def test_rows_come_back(tmp_path: Path):
    """Keys, dtypes, shapes and bits, also through a folder; and into a buffer."""
    datasets = pytest.importorskip("datasets", reason="Hugging Face's datasets is not installed")
    given = rows(0, N)
    buffer = TensorDictReplayBuffer(10, batch_size=4)
    buffer.extend(given)
    adapter = HuggingFaceDatasetAdapter(batch_size=4)
    made = buffer.export(adapter)
    assert isinstance(made, datasets.Dataset)
    assert made[0]["next"].keys() == {"observation", "done", "reward"}
    assert made.features["pixels"].length == 3
    made.save_to_disk(tmp_path / "rows")
    for dataset in (made, datasets.load_from_disk(tmp_path / "rows")):
        found = adapter.from_external(dataset)
        assert len(found) == 10
        assert found[3]["pixels"].shape == (3, 4, 5)
        batch = found.__getitems__(range(10))
        assert (batch == given[4:]).all()
        for key, value in given.items(True, True):
            assert batch[key].dtype is value.dtype
        other = ReplayBuffer(10)
        other.extend(batch)
        assert (other[:] == given[4:]).all()


def test_text_comes_back():
    pytest.importorskip("datasets", reason="Hugging Face's datasets is not installed")
    buffer = ReplayBuffer(LazyTensorStorage(10))
    buffer.extend(TensorDict({"x": torch.rand(3, 1), "text": NonTensorStack("open", "close", "open it")}, [3]))
    adapter = HuggingFaceDatasetAdapter()
    made = buffer.export(adapter)
    assert made["text"][:] == ["open", "close", "open it"]
    assert adapter.from_external(made)[1]["text"] == "close"


def test_rows_of_others_are_read():
    """Lists of variable length that all have one, and an order of rows that is not that of the file."""
    datasets = pytest.importorskip("datasets", reason="Hugging Face's datasets is not installed")
    adapter = HuggingFaceDatasetAdapter()
    made = datasets.Dataset.from_dict({"x": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "y": [[1], [2, 3], [4]]})
    found = adapter.from_external(made.remove_columns("y").select([2, 0]))
    assert torch.equal(found.__getitems__([0, 1])["x"], torch.tensor([[5.0, 6.0], [1.0, 2.0]]).double())
    with pytest.raises(ValueError, match="y: rows have different lengths"):
        adapter.from_external(made).__getitems__(range(3))
    # On average they have one length.
    for uneven in ([[1, 2], [3, 4, 5, 6]], [[], [1, 2]], [[1, 2, 3], None, [4, 5, 6]], [[[1, 2]], [[3], [4]]]):
        found = adapter.from_external(datasets.Dataset.from_dict({"y": uneven}))
        with pytest.raises(ValueError, match="y: rows have different lengths"):
            found.__getitems__(range(len(uneven)))


@pytest.mark.parametrize("value", [torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(2, 3, 0)])
def test_what_arrow_has_no_column_for(value):
    pytest.importorskip("datasets", reason="Hugging Face's datasets is not installed")
    dataset: Any = [TensorDict({"next": {"x": each}}, []) for each in value]
    with pytest.raises(ValueError, match=r"next\.x: Arrow has no columns of torch"):
        HuggingFaceDatasetAdapter().to_external(dataset)


def test_datasets_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    buffer = ReplayBuffer(10)
    buffer.extend(rows(0, 4))
    with pytest.raises(ImportError, match="pip install datasets"):
        buffer.export(HuggingFaceDatasetAdapter())
