"""The study of adapters: its registry, its tables, and a small buffer that it times."""

import importlib

from benchmarks.measure.results import Run
from benchmarks.studies.adapters import stable_baselines
from benchmarks.studies.adapters.registry import ADAPTERS
from benchmarks.studies.adapters.section import adapters_section, rows_of
from gpubuf.integrations import cleanrl

FOUND = {
    "theirs": {"bytes": 3 << 20, "calls": {"add": 10.0, "sample 256": 100.0}},
    "gpubuf": {"bytes": 700, "calls": {"add": 5.0}},
}


def test_every_adapter_has_its_buffers():
    """Modules import without the programs, which their functions import."""
    for adapter in ADAPTERS.values():
        module, _, name = adapter.contenders.partition(":")
        assert callable(getattr(importlib.import_module(module), name))


def test_tables():
    head, rows = rows_of("title", FOUND)
    assert head == ["title", "add, µs", "sample 256, µs", "memory"]
    assert rows == [["theirs", "10.0", "100", "3.00 MiB"], ["gpubuf", "5.00 (0.50x)", "", "700 bytes"]]
    assert "No run" in adapters_section("sb3", {})
    machine = {
        "device": {"name": "x", "kind": "cpu"},
        "versions": {},
        "python_version": "3",
        "threads": 1,
        "load_before": 0,
        "cores": 2,
    }
    run = Run("r.json", {"datetime": "2026-11-22", "machine_info": machine, "adapters": {"sb3": FOUND}})
    assert "| gpubuf | 5.00 (0.50x) |" in adapters_section("sb3", {"adapters": run})
    assert "No run" in adapters_section("cleanrl", {"adapters": run})


def test_a_full_buffer_is_timed():
    space, action = stable_baselines.BOX, stable_baselines.ACTION
    steps = stable_baselines.steps_of(space, 2, 20)
    made = stable_baselines.contender(cleanrl.ReplayBuffer(600, space, action, "cpu", 2), steps)
    for call in made.calls.values():
        call()
    assert made.n_bytes >= 600 * 4 * (17 + 6 + 17 + 2)
