"""Machine code on disk belongs to the sources of all CPU kernels, not only to the file of its function."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from gpubuf.kernels import _pointers

SOURCE = """
from gpubuf.kernels._pointers import OPTIONS, jit

@jit("int64(int64)", **OPTIONS)
def twice(x):
    return 2 * x
"""


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.twice(21) == 42
    return sum(module.twice.stats.cache_hits.values())


def test_a_change_of_any_source_compiles_again(tmp_path, monkeypatch):
    path = tmp_path / "cached_kernel.py"
    path.write_text(SOURCE)
    assert load(path) == 0
    assert load(path) == 1
    before = _pointers.source_stamp()
    monkeypatch.setattr(_pointers, "source_stamp", lambda: (*before, "another helper"))
    assert load(path) == 0


def test_the_stamp_covers_helpers_of_other_families():
    names = {
        Path(name).relative_to(Path(_pointers.__file__).parent).as_posix() for name, *_ in _pointers.source_stamp()
    }
    assert {"_pointers.py", "philox/_numba.py", "sum_tree/_node.py", "sum_tree/_numba.py"} <= names
