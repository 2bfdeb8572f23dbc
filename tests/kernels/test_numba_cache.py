"""When CPU kernels are compiled, and where their machine code is kept."""

from __future__ import annotations

import errno
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gpubuf.kernels import _jit

SOURCE = """
from gpubuf.kernels._jit import kernel

@kernel
def twice(x):
    return 2 * x
"""


def imported(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load(path: Path):
    module = imported(path)
    assert module.twice(21) == 42
    return sum(module.twice.stats.cache_hits.values())


def test_a_change_of_any_source_compiles_again(tmp_path, monkeypatch):
    path = tmp_path / "cached_kernel.py"
    path.write_text(SOURCE)
    assert load(path) == 0
    assert load(path) == 1
    before = _jit.source_stamp()
    monkeypatch.setattr(_jit, "source_stamp", lambda: (*before, "another helper"))
    assert load(path) == 0


def test_the_stamp_covers_helpers_of_other_families():
    names = {name for name, *_ in _jit.source_stamp()}
    assert {"_primitives.py", "philox/_cpu.py", "sum_tree/_cpu.py"} <= names


ROOT = Path(__file__).parents[2]

FIRST_WRITE = """
import torch
from tensordict import TensorDict
from gpubuf import LazyTensorStorage, ReplayBuffer
buffer = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=2)
buffer.extend(TensorDict({"x": torch.arange(3)}, [3]))
assert sorted(set(buffer.sample(64)["x"].tolist())) == [0, 1, 2]
"""


@pytest.mark.slow
def test_without_a_folder_to_write_to_the_first_write_compiles_in_memory_and_says_so_once(tmp_path):
    for package in ("gpubuf", "kernels"):
        shutil.copytree(ROOT / package, tmp_path / package, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    # A file where a folder is needed keeps even root from writing there.
    for folder in [tmp_path / "kernels", *(tmp_path / "kernels").iterdir()]:
        if folder.is_dir():
            (folder / "__pycache__").touch()
    home = {"HOME": "/proc/nobody", "XDG_CACHE_HOME": "/proc/nobody", "PYTHONPATH": str(tmp_path)}
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"} | home
    command = [sys.executable, "-B", "-W", "always", "-c", FIRST_WRITE]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("set NUMBA_CACHE_DIR to a folder that can be written to") == 1


EVERY_KERNEL = """
import importlib
from pathlib import Path
import gpubuf.kernels

root, loaded = Path(gpubuf.kernels.__file__).parent, 0
for path in sorted(root.rglob("_cpu*.py")):
    names = path.relative_to(root).with_suffix("").parts
    for value in vars(importlib.import_module(".".join(("gpubuf.kernels", *names)))).values():
        # Helpers have no code of their own.
        if hasattr(value, "stats") and value.stats.cache_path and not value.overloads:
            value._compile_for_args()
            loaded += sum(value.stats.cache_hits.values())
print(loaded)
"""

WITHOUT_COMPILER = """
from numba.core.base import BaseContext
BaseContext.refresh = None
"""


@pytest.mark.slow
def test_machine_code_on_disk_is_loaded_without_numbas_compiler():
    # LLVM ends the process if code refers to what is not there: all kernels, then.
    for program in (EVERY_KERNEL, WITHOUT_COMPILER + EVERY_KERNEL):
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 25


def test_a_full_disk_leaves_the_kernel_in_memory(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile.save", full)
    monkeypatch.setattr(_jit, "_warned", False)
    path = tmp_path / "cached_kernel.py"
    path.write_text(SOURCE)
    with pytest.warns(RuntimeWarning, match="No space left on device.*NUMBA_CACHE_DIR"):
        assert load(path) == 0
    assert load(path) == 0


def test_a_kernel_is_compiled_at_its_first_call_and_from_its_signature(tmp_path):
    path = tmp_path / "cached_kernel.py"
    path.write_text(SOURCE + SOURCE.replace("twice", "twice_again"))
    module = imported(path)
    assert not module.twice.overloads
    assert module.twice(True) == 2
    assert [[str(argument) for argument in arguments] for arguments in module.twice.overloads] == [["int64"]]
    assert not module.twice_again.overloads


HELPER = """
from gpubuf.kernels._jit import jit, kernel

@jit(forceinline=True)
def times(x, factor):
    return factor * x

@kernel
def six_times(x):
    return times(times(x, 2), 3)
"""


def test_a_helper_is_compiled_once_for_all_constants_and_can_be_called_from_python(tmp_path):
    path = tmp_path / "cached_kernel.py"
    path.write_text(HELPER)
    module = imported(path)
    assert module.times(7, 3) == 21
    assert not module.times.overloads
    assert module.six_times(7) == 42
    assert [[str(argument) for argument in arguments] for arguments in module.times.overloads] == [["int64", "int64"]]
    assert module.times(7.5, 2) == 15.0


def test_long_compilation_is_announced_once(monkeypatch):
    said = threading.Event()
    handler = logging.Handler()
    lines = []
    handler.emit = lambda record: (lines.append(record.getMessage()), said.set())
    monkeypatch.setattr(_jit, "_SILENCE", 0.01)
    monkeypatch.setattr(_jit, "_spent", 0.0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    _jit.logger.addHandler(handler)
    try:
        with _jit._announced("/the/cache"):
            assert said.wait(60)
        with _jit._announced("/the/cache"):
            pass
    finally:
        _jit.logger.removeHandler(handler)
    assert lines == [
        "gpubuf compiles its CPU kernels, which takes some seconds; the next process finds them in /the/cache"
    ]
