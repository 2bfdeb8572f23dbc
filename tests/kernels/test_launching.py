"""Launches past Triton's binding of arguments: the same as Triton's own, or left to it."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction, create_function_from_signature

from gpubuf.kernels import _launching
from gpubuf.kernels._launching import Variant, cdiv, jit_for_any_size, key_of, launch

ROOT = Path(__file__).parents[2]

#: Triton before 3.6 specialises in Python, and all its launches go by Triton.
direct = pytest.mark.skipif(_launching.native_specialize_impl is None, reason="no launch is direct with this Triton")


def _memory(dtype, offset):
    """A tensor whose address has that remainder by 16."""
    raw = torch.empty(64, dtype=torch.uint8)
    start = -raw.data_ptr() % 16 + offset
    return raw[start : start + 16].view(dtype)


DTYPES = (torch.uint8, torch.bool, torch.int64, torch.float32, torch.float64, torch.bfloat16)
TENSORS = [_memory(dtype, offset) for dtype in DTYPES for offset in (0, 8)]
INTEGERS = [0, 1, 2, 15, 16, 17, 32, -1, -16, -17]
INTEGERS += [sign * 2**power + by for power in (31, 32, 40) for by in (-16, -1, 0, 1, 16) for sign in (1, -1)]
INTEGERS += [2**63 - 1, 2**63, 2**63 + 16, 2**64 - 1, -(2**63)]
OTHERS = [True, False, None, 0.0, 1.0, -0.0, 16.0, torch.nn.Parameter(torch.zeros(4)), torch.empty(0)]
TUPLES = [(1, 2), (1, 3), (16, 2), (2, 16), (3, 5), (3, 2**40), (2**31, 5), (3, 5, 7), ((3,), 5), ()]
VALUES = [*TENSORS, *INTEGERS, *OTHERS, *TUPLES]


def _plain(x):
    pass


def _binder(**options):
    """Triton's own specialisation of the argument of a kernel."""
    kernel = JITFunction(_plain, **options)
    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    return kernel, create_function_from_signature(kernel.signature, kernel.params, backend)


@direct
@pytest.mark.parametrize(
    "options", [{}, {"do_not_specialize": ["x"]}, {"do_not_specialize_on_alignment": ["x"]}], ids=lambda o: "".join(o)
)
def test_arguments_with_the_same_key_have_triton_s_same_specialisation(options):
    kernel, bind = _binder(**options)
    specialised = Variant(kernel, 4, None, {}).specialised
    found = [(tuple(key_of([value], specialised)[0]), bind(value)[1]) for value in VALUES]
    shared = 0
    for (a, of_a), (b, of_b) in itertools.combinations(found, 2):
        if a == b:
            shared += 1
            assert of_a == of_b
    assert shared, "some of them must have the same key, or this shows nothing"


@direct
def test_a_key_is_read_from_left_to_right_in_one_way():
    rng = np.random.default_rng(0)
    by_value, by_width = (_binder(**options)[1] for options in ({}, {"do_not_specialize": ["x"]}))
    seen = {}
    for _ in range(20_000):
        first, second, third = (VALUES[i] for i in rng.integers(len(VALUES), size=3))
        key = tuple(key_of([first, second, third], (True, False, True))[0])
        own = [by_value(first)[1], by_width(second)[1], by_value(third)[1]]
        assert seen.setdefault(key, own) == own


@direct
def test_addresses_stand_for_tensors():
    x = TENSORS[0]
    assert key_of([x, 7, None], (True, True, True))[1] == [x.data_ptr(), 7, None]


def test_a_kernel_for_any_size_is_specialised_on_no_number(monkeypatch):
    monkeypatch.setattr(triton, "jit", JITFunction)

    @jit_for_any_size("index_ptr")
    def kernel(rows_ptr, index_ptr, n, envs, block: triton.language.constexpr):
        pass

    by_value = {param.name: not param.do_not_specialize for param in kernel.params}
    assert by_value == {"rows_ptr": True, "index_ptr": True, "n": False, "envs": False, "block": True}
    assert [param.name for param in kernel.params if param.do_not_specialize_on_alignment] == ["index_ptr"]


@pytest.mark.parametrize(("count", "block"), [(0, 4), (1, 4), (4, 4), (5, 4), (2**40 + 1, 2**20)])
def test_cdiv_is_triton_s(count, block):
    assert cdiv(count, block) == triton.cdiv(count, block)


def test_the_interpreter_launches_by_itself(monkeypatch):
    called = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **options: called.append((grid, args, options))

    kernel = Kernel()
    monkeypatch.setattr(_launching, "_variants", {})
    for _ in range(2):
        launch(kernel, 3, 1, 2, num_warps=8, BLOCK=4)
    assert called == [((3,), (1, 2), {"num_warps": 8, "enable_fp_fusion": True, "BLOCK": 4})] * 2


def launched(what: str) -> dict[str, Any]:
    """What came of ``python -m tests.gates.launch_without_gpu``."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    del environment["TRITON_INTERPRET"]
    command = [sys.executable, "-m", "tests.gates.launch_without_gpu", what]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    at_driver, at_launcher = found["launches"]
    assert at_driver == at_launcher > 0
    return found


@direct
@pytest.mark.slow
def test_every_kernel_is_launched_as_triton_does():
    """Directly the second time, with the same arguments at the launcher."""
    found = launched("kernels")
    assert found["differing"] == found["slow"] == []
    assert len(found["kernels"]) > 50


@pytest.fixture(scope="module")
def fallbacks():
    if _launching.native_specialize_impl is None:
        pytest.skip("no launch is direct with this Triton")
    return launched("fallbacks")


def test_launches_that_are_given_a_tensor_are_those_of_the_general_way(fallbacks):
    """At addresses that came before and others, some of which have another alignment."""
    assert fallbacks["given"] == {"differing": 0, "by Triton": 0, "kept": True}


@pytest.mark.parametrize(
    "name", ["misaligned", "dtype", "one", "not divisible", "integer factor", "bool factor", "warps", "constexpr"]
)
def test_another_specialisation_is_another_function(fallbacks, name):
    assert fallbacks["first"] == [1, 0, 0]
    assert fallbacks[name] == [1, 0, 1]
    functions = fallbacks["functions"]
    assert [other for other, function in functions.items() if function == functions[name]] == [name]


def test_what_goes_by_triton(fallbacks):
    """Constexprs that are equal and differ, or come in another order; launches that hooks hear; a replaced ``run``."""
    assert fallbacks["zero"] == fallbacks["nan"] == [1, 1]
    assert fallbacks["order of constexprs"] == 1
    assert fallbacks["hooks"] == [1, 1, 1]
    assert fallbacks["heard"] == 3
    assert fallbacks["replaced run"] == "run"


def test_what_is_launched_directly(fallbacks):
    """After all of that; parameters and subclasses of tensors, too. Only so many configurations are kept."""
    assert fallbacks["after all"] == 0
    assert fallbacks["parameter"] == fallbacks["subclass"] == [1, 0]
    assert 0 < fallbacks["kept"] <= 4
