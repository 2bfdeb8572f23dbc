"""Around the kernels of transitions: their launches, and that the host never waits for the GPU."""

from __future__ import annotations

import pytest
import torch

from gpubuf.kernels import rows
from gpubuf.kernels.rows import _launch
from tests.support.fake_cuda import DataDependentOutputException, fake_cuda


def storage() -> dict[str, torch.Tensor]:
    """Tensors of a storage of 12 rows of two environments, on the GPU, of three fields."""
    links, owners = rows.new_links(12, 4, "cuda")
    return {
        "fields": torch.zeros(3, rows.FIELD, dtype=torch.int64, device="cuda"),
        "ring": rows.new_ring("cuda"),
        "ends": torch.zeros(2, dtype=torch.int64, device="cuda"),
        "links": links,
        "owners": owners,
        "noise": torch.zeros(3, dtype=torch.int64, device="cuda"),
        "rng": torch.zeros(3, dtype=torch.int64, device="cuda"),
    }


def sources(n: int) -> list[torch.Tensor]:
    return [torch.zeros(n, 3, device="cuda"), torch.zeros(n, 3, device="cuda"), torch.zeros(0, device="cuda")]


def every_operation(module: object, of: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """What all operations return."""
    fields, ring, shared = of["fields"], of["ring"], (2, of["links"], of["owners"])
    plain = module.extend(fields, sources(5), ring, 5, 12)
    index = module.extend(fields, sources(4), ring, 4, 12, *shared)
    module.write(fields, sources(4), ring, index, 12)
    module.relink(fields, sources(4), ring, index, 12, *shared)
    reading = (of["ends"], of["links"], of["noise"], 2, 3, 0.9)
    batch = module.gather(fields, ring, index, 12, 256, *reading, rows.BY_CHANCE, 3)
    drawn = module.sample(fields, ring, of["rng"], 6, 12, 512, *reading, rows.DOUBLED, 3)
    return [plain, index, *batch, *drawn]


SHAPES = [(5,), (4,), (256,), (4,), (512,), (12,), (12,)]


def test_operations_do_not_wait():
    """On fake CUDA tensors, where reading a value on the host raises."""
    with fake_cuda():
        found = every_operation(rows, storage())
    assert [tuple(x.shape) for x in found] == SHAPES
    assert {x.device.type for x in found} == {"cuda"}


def test_launchers_do_not_wait(monkeypatch):
    """A batch is one launch, and so is a write, but for shared observations: four, and three to give them again."""
    launched: list[str] = []
    monkeypatch.setattr(_launch, "launch", lambda kernel, *_, **__: launched.append(kernel.__name__))
    # A fake tensor has no address.
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda _: 4096)
    with fake_cuda():
        of = storage()
        found = every_operation(_launch, of)
        with pytest.raises(DataDependentOutputException):
            of["ring"][0].item()
    assert [tuple(x.shape) for x in found] == SHAPES
    again = ["compare", "assign", "aside"]
    expected = ["extend", "extend", *again, "write", *again, "compute", "compute"]
    assert launched == [f"rows_{name}_kernel" for name in expected]


def test_many_fields_take_several_launches(monkeypatch):
    """Of 130 fields each kernel that reads sources is launched twice, and the counters move in the last launch."""
    launched: list[tuple[str, int]] = []

    def record(kernel, _, *arguments, **constexprs):
        launched.append((kernel.__name__.split("_")[1], arguments[-1 if "RELINK" in constexprs else -2]))

    monkeypatch.setattr(_launch, "launch", record)
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda _: 4096)
    with fake_cuda():
        of = storage()
        fields = torch.zeros(130, rows.FIELD, dtype=torch.int64, device="cuda")
        given = [torch.zeros(4, 3, device="cuda")] * 130
        _launch.extend(fields, given, of["ring"], 4, 12, 2)
        plain, launched[:] = launched[:], []
        _launch.extend(fields, given, of["ring"], 4, 12, 2, of["links"], of["owners"])
    assert plain == [("extend", 0), ("extend", 4)]
    compared = [("compare", 0), ("compare", 1), ("assign", 4)]
    assert launched == [("extend", 0), ("extend", 0), *compared, ("aside", 0), ("aside", 4)]


@pytest.mark.parametrize("links", [False, True])
@pytest.mark.parametrize("n_bytes", [2**10, 2**24])
def test_programs_are_small(n_bytes, links):
    """One or two elements a thread: more would not fit the registers of some GPUs."""
    device = torch.device("cpu")
    for tile, warps in (
        _launch.batch_tile(n_bytes, device),
        _launch.write_tile(n_bytes, device),
        _launch.assign_tile(n_bytes, device),
        _launch.sample_tile(n_bytes, device, links, noise=False),
    ):
        assert 1 <= tile // (32 * warps) <= 2
