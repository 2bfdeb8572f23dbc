"""When CPU kernels are compiled, where they are kept, and how Python calls them."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("numba")
import numba

from gpubuf.kernels import _jit
from gpubuf.kernels._primitives import exp_below_700, log_of_normal

ROOT = Path(__file__).parents[2]

SOURCE = """
import numpy as np
from numba import carray
from gpubuf.kernels._jit import jit, kernel
from gpubuf.kernels._primitives import as_i64

@kernel
def twice(x):
    return 2 * x

@kernel
def scaled(x, factor: float, negative: bool):
    return -factor * x if negative else factor * x

@kernel
def nothing(x):
    pass

@kernel
def first_of(n):
    return np.empty(n)[0]

@kernel
def inverse(x: float):
    return 1.0 / x

@kernel
def wait(flag, count, limit):
    # The store may be to the flag for all that the compiler knows: it reads that anew.
    flags, counts = carray(as_i64(flag), 1), carray(as_i64(count), 1)
    for i in range(limit):
        counts[0] = i
        if flags[0] != 0:
            return i
    return -1

@jit(forceinline=True)
def times(x, factor):
    return factor * x

@kernel
def six_times(x):
    return times(times(x, 2), 3)
"""


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The folder in which Numba keeps what it compiles, empty at first."""
    monkeypatch.setattr(numba.core.config, "CACHE_DIR", str(tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.fixture
def source(tmp_path, kept):
    """A module with kernels, imported anew at each call."""
    path = tmp_path / "cached_kernel.py"
    path.write_text(SOURCE)

    def imported():
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return imported


@pytest.fixture
def compiled(monkeypatch):
    """The names of what is compiled from here on."""
    from numba.core.dispatcher import _FunctionCompiler

    names: list[str] = []
    compile_it = _FunctionCompiler.compile

    def compile_and_note(self, args, return_type):
        names.append(self.py_func.__name__)
        return compile_it(self, args, return_type)

    monkeypatch.setattr(_FunctionCompiler, "compile", compile_and_note)
    return names


def test_a_kernel_is_compiled_at_its_first_call_and_loaded_by_the_next_process(source, compiled):
    module = source()
    assert not compiled
    assert module.twice(21) == 42
    assert module.twice(-(2**40)) == -(2**41)
    assert compiled == ["twice"]
    assert source().twice(21) == 42
    assert compiled == ["twice"]


def test_a_change_of_any_source_compiles_again(source, compiled, monkeypatch):
    """Numba alone looks at the file of the kernel, and not at those of its helpers."""
    assert source().twice(21) == 42
    monkeypatch.setattr(_jit, "source_stamp", lambda: "another")
    assert source().twice(21) == 42
    assert compiled == ["twice", "twice"]


@pytest.mark.parametrize("ending", ["nbi", "nbc"])
@pytest.mark.parametrize("damage", [lambda code: code[:-9], lambda code: bytes(len(code)), lambda code: b""])
def test_a_broken_file_is_compiled_again(source, compiled, kept, damage, ending):
    assert source().twice(21) == 42
    (file,) = kept.rglob(f"*.{ending}")
    file.write_bytes(damage(file.read_bytes()))
    for _ in range(2):
        assert source().twice(21) == 42
    assert compiled == ["twice", "twice"]


def test_arguments_and_results(source):
    module = source()
    assert (module.scaled(3, 0.5, False), module.scaled(3, 0.5, True), module.scaled(3, 2, 1)) == (1.5, -1.5, -6.0)
    assert module.nothing(1) is None
    assert module.inverse(0) == math.inf
    with pytest.raises(TypeError, match="expected 1 argument"):
        module.twice(1, 2)
    with pytest.raises(OverflowError):
        module.twice(2**64)
    with pytest.raises(TypeError):
        module.scaled(1, "a half", True)
    with pytest.raises(MemoryError):
        module.first_of(2**44)


def test_other_threads_run_beside_a_kernel(source):
    module, flag, count = source(), torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    module.wait(flag.data_ptr(), count.data_ptr(), 1)
    with ThreadPoolExecutor(1) as executor:
        # It ends by itself after some seconds, so that the test fails and does not hang.
        waiting = executor.submit(module.wait, flag.data_ptr(), count.data_ptr(), 10**10)
        while count.item() == 0 and not waiting.done():
            time.sleep(0)
        flag.fill_(1)
    assert waiting.result() > 0


def test_a_helper_is_compiled_once_for_all_constants_and_can_be_called_from_python(source):
    module = source()
    assert module.times(7, 3) == 21
    assert not module.times.overloads
    assert module.six_times(7) == 42
    assert [[str(argument) for argument in arguments] for arguments in module.times.overloads] == [["int64", "int64"]]
    assert module.times(7.5, 2) == 15.0


@pytest.mark.slow
def test_without_a_folder_to_write_to_a_process_compiles_in_memory_and_says_so_once(tmp_path):
    for package in ("gpubuf", "kernels"):
        shutil.copytree(ROOT / package, tmp_path / package, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    # A file where a folder is needed keeps even root from writing there.
    for folder in (path for path in (tmp_path / "kernels").rglob("*") if path.is_dir()):
        (folder / "__pycache__").touch()
    home = {"HOME": "/proc/nobody", "XDG_CACHE_HOME": "/proc/nobody", "PYTHONPATH": str(tmp_path)}
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"} | home
    program = "import torch, gpubuf; b = gpubuf.ReplayBuffer(9); b.extend(torch.arange(3)); b.sample(2)"
    done = subprocess.run(
        [sys.executable, "-B", "-W", "always", "-c", program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("set NUMBA_CACHE_DIR to a folder that can be written to") == 1


def test_a_full_disk_leaves_the_kernel_in_memory(source, compiled, monkeypatch):
    from numba.core.caching import IndexDataCacheFile

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(IndexDataCacheFile, "save", full)
    monkeypatch.setattr(IndexDataCacheFile, "flush", full)
    monkeypatch.setattr(_jit, "_warned", False)
    with pytest.warns(RuntimeWarning, match="No space left on device.*NUMBA_CACHE_DIR"):
        assert source().twice(21) == 42
    assert source().twice(21) == 42


def test_long_compilation_is_announced_once(monkeypatch):
    said = threading.Event()
    handler = logging.Handler()
    lines = []
    handler.emit = lambda record: (lines.append(record.getMessage()), said.set())
    monkeypatch.setattr(_jit, "_SILENCE", 0.01)
    monkeypatch.setattr(_jit, "_spent", 0.0)
    _jit.logger.addHandler(handler)
    try:
        with _jit._announced():
            assert said.wait(60)
        with _jit._announced():
            pass
    finally:
        _jit.logger.removeHandler(handler)
    assert lines == ["gpubuf compiles its CPU kernels, for some seconds; later they come from disk"]


@numba.njit(error_model="numpy")
def elementary(x, out, which):
    for i in range(x.size):
        if which == 0:
            out[i] = exp_below_700(x[i])
        else:
            out[i] = log_of_normal(x[i])


def test_elementary_functions():
    """Within four units in the last place of NumPy's, over the whole range that each is for."""
    generator = np.random.default_rng(0)
    cases = {
        np.exp: np.concatenate(
            [generator.uniform(-708, 700, 10_000), -(10 ** generator.uniform(-300, 1, 5000)), [0.0]]
        ),
        np.log: np.concatenate([10 ** generator.uniform(-307, 308, 5000), generator.uniform(0.5, 2, 5000), [1.0]]),
    }
    for which, (function, x) in enumerate(cases.items()):
        out, truth = np.empty_like(x), function(x)
        elementary(x, out, which)
        assert (np.abs(out - truth) <= 4 * np.spacing(np.abs(truth))).all(), function
    edges = np.array([-np.inf, -1e4, np.nan])
    out = np.empty_like(edges)
    elementary(edges, out, 0)
    assert out[0] == out[1] == 0
    assert np.isnan(out[2])
