"""`gpubuf tune` and `gpubuf info` on a real GPU."""

from __future__ import annotations

import pytest
import torch

from gpubuf.cli import main
from gpubuf.info import info
from gpubuf.kernels import _tuned, config
from gpubuf.kernels.config import SPACES, RowsConfig
from gpubuf.tuning.workloads import OPERATIONS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_tune_and_go_by_it(tmp_path, monkeypatch, capsys):
    """A quick tuning of a small buffer, into the user's folder; the choices are those of the file from then on."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["tune", "--capacity=10000", "--batch-size=256"]) == 0
    name = torch.cuda.get_device_name()
    path = tmp_path / "gpubuf" / "tuned" / f"{_tuned.slug(name)}.json"
    said = capsys.readouterr().out
    assert str(path) in said
    found = _tuned.read(path, SPACES, name)
    assert not found.problems
    assert found.points.keys() == set(OPERATIONS), said
    for operation, points in found.points.items():
        for point in points:
            assert config.tuned(operation, name, **point.sizes) == point.config
            assert all(entry["us"] > 0 for entry in point.measured.values())
    (file,) = [file for file in info().tuned if file.path == path]
    assert file.state == "yes"


def test_what_is_in_force_is_what_is_launched():
    """However a copy is cut up, the same rows come out."""
    from gpubuf import LazyTensorStorage

    storage = LazyTensorStorage(1000, device="cuda")
    storage.append(torch.arange(5000, device="cuda").view(1000, 5))
    index = torch.arange(999, -1, -1, device="cuda")
    expected = storage.plans.batch.gather(index)[0][0].clone()
    for made in (RowsConfig(128, 1), RowsConfig(1024, 8)):
        with config.using(rows_copy=made):
            assert storage.plans.batch.gather(index)[0][0].equal(expected)


def test_info():
    found = info()
    assert found.devices[0].name == torch.cuda.get_device_name(0)
    assert 0 < found.devices[0].free <= found.devices[0].total
    assert [check.works for check in found.checks] == [True, True], str(found)
