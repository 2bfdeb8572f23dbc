"""When CPU kernels are compiled, where their machine code is kept, and how Python calls it."""

from __future__ import annotations

import errno
import importlib.util
import logging
import math
import os
import platform
import shutil
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from gpubuf.kernels import _jit, _machine_code

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
def raised(n):
    found = np.zeros(n)
    found[1:] += 1
    return found[1]

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
def source(tmp_path, monkeypatch):
    """A module with kernels, imported anew at each call; machine code in a folder that is empty at first."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kept"))
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
    names: list[str] = []

    def compile_and_note(function, symbol, *processor):
        names.append(function.__name__)
        return object_code(function, symbol, *processor)

    object_code = _jit.object_code
    monkeypatch.setattr(_jit, "object_code", compile_and_note)
    return names


def test_a_kernel_is_compiled_at_its_first_call_and_loaded_by_the_next_process(source, compiled):
    module = source()
    assert not compiled
    assert module.twice(21) == 42
    assert module.twice(-(2**40)) == -(2**41)
    assert compiled == ["twice"]
    assert source().twice(21) == 42
    assert compiled == ["twice"]


def test_a_change_of_any_source_compiles_again_and_deletes_the_old_code(source, compiled, tmp_path, monkeypatch):
    assert source().twice(21) == 42
    monkeypatch.setattr(_machine_code, "source_stamp", lambda: "another")
    assert source().twice(21) == 42
    assert compiled == ["twice", "twice"]
    (kept,) = (tmp_path / "kept" / "gpubuf").iterdir()
    assert "-another-" in kept.name


def test_the_stamp_covers_helpers_of_all_families():
    names = {path.relative_to(ROOT / "gpubuf" / "kernels").as_posix() for path in _machine_code.sources()}
    assert {"_primitives.py", "_jit.py", "philox/_cpu_kernels.py", "sum_tree/_cpu_node.py", "rows/_cpu.py"} <= names


@pytest.mark.parametrize("damage", [lambda code: code[:-9], lambda code: bytes(len(code)), lambda code: b""])
def test_a_broken_file_is_compiled_again(source, compiled, tmp_path, damage):
    assert source().twice(21) == 42
    (kept,) = (tmp_path / "kept" / "gpubuf").iterdir()
    kept.write_bytes(damage(kept.read_bytes()))
    for _ in range(2):
        assert source().twice(21) == 42
    assert compiled == ["twice", "twice"]


def test_arguments_and_results(source):
    module = source()
    assert (module.scaled(3, 0.5, False), module.scaled(3, 0.5, True), module.scaled(3, 2, 1)) == (1.5, -1.5, -6.0)
    assert module.nothing(1) is None
    assert module.inverse(0) == math.inf
    with pytest.raises(TypeError, match="takes 1 argument"):
        module.twice(1, 2)
    with pytest.raises(TypeError, match="integer"):
        module.twice(1.5)
    with pytest.raises(OverflowError):
        module.twice(2**63)
    with pytest.raises(TypeError):
        module.scaled(1, "a half", True)
    with pytest.raises(MemoryError):
        module.first_of(2**44)
    references = sys.getrefcount(None)
    for _ in range(1000):
        module.nothing(1)
    # Of a Python where None isn't immortal, each call takes a reference and gives it away.
    assert abs(sys.getrefcount(None) - references) < 500


def test_code_that_needs_numba_is_refused(source):
    """Its next process would call what isn't there."""
    with pytest.raises(RuntimeError, match="raised needs NRT_Allocate, which is not in every process"):
        source().raised(2)


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


def test_code_that_a_wheel_brings_runs_where_the_processor_has_what_it_needs(source, compiled, tmp_path, monkeypatch):
    module = source()
    processor = "x86-64-v3" if os.uname().machine == "x86_64" else ""
    code = _jit.object_code(module.twice.function, module.twice.symbol, processor)
    monkeypatch.setattr(_machine_code, "SHIPPED", tmp_path / "shipped")
    _machine_code.write(tmp_path / "shipped" / _machine_code.file_name(module.twice.name, "common"), code)
    for needs, expected in (("", []), ("a-feature-of-no-processor", ["twice"])):
        compiled.clear()
        monkeypatch.setattr(_machine_code, "PROCESSORS", {"common": needs})
        assert source().twice(21) == 42
        assert compiled == expected


def relocations(code: bytes) -> set[int]:
    """The types of all relocations of an ELF file of 64 bits: where its loader writes addresses, and how."""
    (sections,), (count,) = struct.unpack_from("<Q", code, 40), struct.unpack_from("<H", code, 60)
    headers = [struct.unpack_from("<IIQQQQIIQQ", code, sections + 64 * i) for i in range(count)]
    tables = [(start, size) for _, kind, _, _, start, size, *_ in headers if kind == 4]
    places = [start + 24 * i for start, size in tables for i in range(size // 24)]
    return {struct.unpack_from("<Q", code, place + 8)[0] & 0xFFFFFFFF for place in places}


@pytest.mark.skipif(platform.system() != "Linux" or platform.machine() != "x86_64", reason="asks of ELF on x86-64")
def test_machine_code_may_lie_far_from_what_it_calls(source):
    """Beside CUDA, LLVM ended the process: a distance of more than two gigabytes did not fit."""
    module = source()
    absolute, relative = 1, 24  # R_X86_64_64, R_X86_64_PC64
    for kernel in (module.twice, module.scaled, module.first_of, module.six_times):
        for processor in ("", *_machine_code.PROCESSORS):
            found = relocations(_jit.object_code(kernel.function, kernel.symbol, processor))
            assert found <= {absolute, relative}
            assert absolute in found


WITHOUT_NUMBA = """
import sys
sys.modules["numba"] = None
from gpubuf.kernels._machine_code import named
for name in sys.argv[1:]:
    named(name).load()
"""


@pytest.mark.slow
def test_all_machine_code_on_disk_is_loaded_without_numba():
    # LLVM ends the process if code refers to what is not there: all kernels, then.
    kernels = [kernel for kernel in _machine_code.kernels() if kernel.function.__module__.startswith("gpubuf.")]
    assert len(kernels) > 50
    for kernel in kernels:
        kernel.load()
    command = [sys.executable, "-c", WITHOUT_NUMBA, *(kernel.name for kernel in kernels)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


BESIDE_NUMBA = """
import numba
from gpubuf.kernels._machine_code import named
named("optim._cpu._count").load()
# Numba tells LLVM what it takes Python's names for.
assert numba.njit(lambda x: x + 1)(1) == 2
try:
    named("moments._cpu._returns")()
except TypeError:
    print("refused")
@numba.njit
def refuse():
    raise TypeError("by Numba")
try:
    refuse()
except TypeError as error:
    print(error)
"""


def test_errors_beside_functions_of_numbas():
    for name in ("optim._cpu._count", "moments._cpu._returns"):
        _machine_code.named(name).load()
    done = subprocess.run([sys.executable, "-c", BESIDE_NUMBA], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "refused\nby Numba\n"


FIRST_CALLS = """
import sys
import torch
from tensordict import TensorDict
import gpubuf
def rows(n):
    done = (torch.arange(n) % 5 == 4).unsqueeze(-1)
    return TensorDict({"x": torch.arange(n), "next": {"done": done, "reward": torch.ones(n, 1)}}, [n])
storage = lambda: gpubuf.LazyTensorStorage(8)
uniform = gpubuf.TensorDictReplayBuffer(storage=storage(), batch_size=2)
uniform.extend(rows(3))
assert sorted(set(uniform.sample(64)["x"].tolist())) == [0, 1, 2]
prioritized = gpubuf.TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=storage(), batch_size=2, n_steps=2)
prioritized.extend(rows(8))
batch = prioritized.sample()
batch["td_error"] = torch.rand(2)
prioritized.update_tensordict_priority(batch)
slices = gpubuf.TensorDictReplayBuffer(storage=storage(), sampler=gpubuf.SliceSampler(slice_len=2), batch_size=4)
slices.extend(rows(8))
assert slices.sample()["x"].shape == (4,)
print("numba" in sys.modules)
"""


@pytest.mark.slow
def test_a_process_that_finds_its_machine_code_imports_no_numba():
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", FIRST_CALLS], cwd=ROOT, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"


@pytest.mark.slow
def test_without_a_folder_to_write_to_the_first_write_compiles_in_memory_and_says_so_once(tmp_path):
    for package in ("gpubuf", "kernels"):
        ignored = shutil.ignore_patterns("__pycache__", "machine_code")
        shutil.copytree(ROOT / package, tmp_path / package, symlinks=True, ignore=ignored)
    # A file where a folder is needed keeps even root from writing there.
    (tmp_path / "kernels" / "__pycache__").touch()
    home = {"HOME": "/proc/nobody", "XDG_CACHE_HOME": "/proc/nobody", "PYTHONPATH": str(tmp_path)}
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"} | home
    command = [sys.executable, "-B", "-W", "always", "-c", FIRST_CALLS]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("set NUMBA_CACHE_DIR to a folder that can be written to") == 1


def test_a_full_disk_leaves_the_kernel_in_memory(source, compiled, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(_machine_code, "write", full)
    monkeypatch.setattr(_machine_code, "_warned", False)
    with pytest.warns(RuntimeWarning, match="No space left on device.*NUMBA_CACHE_DIR"):
        assert source().twice(21) == 42
    assert source().twice(21) == 42
    assert compiled == ["twice", "twice"]


def test_long_compilation_is_announced_once(monkeypatch):
    said = threading.Event()
    handler = logging.Handler()
    lines = []
    handler.emit = lambda record: (lines.append(record.getMessage()), said.set())
    monkeypatch.setattr(_machine_code, "_SILENCE", 0.01)
    monkeypatch.setattr(_machine_code, "_spent", 0.0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    _machine_code.logger.addHandler(handler)
    try:
        with _machine_code._announced(Path("/the/cache")):
            assert said.wait(60)
        with _machine_code._announced(Path("/the/cache")):
            pass
    finally:
        _machine_code.logger.removeHandler(handler)
    assert lines == [
        "gpubuf compiles its CPU kernels, which takes some seconds; the next process finds them in /the/cache"
    ]
