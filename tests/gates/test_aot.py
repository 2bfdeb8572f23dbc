"""Every kernel compiles to machine code for eight targets, within the register file of NVIDIA's, aligned or not."""

import ast
import importlib
import inspect
from pathlib import Path

import pytest

import gpubuf.kernels
from tests.gates.aot.compiler import GATES, OTHERS, TARGETS, Compiled, compile_in_subprocess, demanding
from tests.gates.aot.operations import all_specs, specs_of

triton = pytest.importorskip("triton")
TRITON = tuple(map(int, triton.__version__.split(".")[:2]))

#: Bytes that a thread may spill, by kernel: none, but for the few of Triton 3.6 that docs/performance.md explains.
SPILLS: dict[str, int] = {}
if TRITON == (3, 6):
    SPILLS = {
        "batch_norm_activation_backward_kernel": 24,
        "norm_activation_backward_kernel": 32,
        "rows_extend_kernel": 16,
        "rows_sample_kernel": 24,
        "trajectories_update_envs_kernel": 32,
    }


def is_triton_jit(decorator: ast.expr) -> bool:
    return ast.unparse(decorator).partition("(")[0] in ("triton.jit", "jit", "jit_for_any_size")


def kernels_in_the_tree() -> set[str]:
    """``"module:function"`` of every ``*_kernel`` that ``@triton.jit`` decorates under ``gpubuf.kernels``."""
    found = set()
    root = Path(gpubuf.kernels.__path__[0])
    for path in root.rglob("*.py"):
        module = ".".join(["gpubuf.kernels", *path.relative_to(root).with_suffix("").parts])
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                assert any(map(is_triton_jit, node.decorator_list)), f"{module}:{node.name} is a kernel in name only"
                found.add(f"{module}:{node.name}")
    return found


def test_every_kernel_has_a_spec():
    """No kernel escapes the gate, and no spec outlives its kernel."""
    kernels, specs = kernels_in_the_tree(), all_specs()
    assert len(kernels) >= 1
    assert kernels == {spec.kernel for spec in specs}
    (most,) = (spec for spec in demanding(specs, 1) if "sum_tree_draw" in spec.kernel)
    assert most.constexprs["HAS_ELIGIBLE"]
    assert most.constexprs["STRATIFIED"]


def test_constexprs_are_passed_in_the_order_of_the_kernel():
    """In another one, every launch takes Triton's own path, which is slower."""
    for spec in all_specs():
        module, _, name = spec.kernel.partition(":")
        parameters = list(inspect.signature(getattr(importlib.import_module(module), name).fn).parameters)
        assert parameters == [*spec.signature, *spec.constexprs], spec.kernel


COUNTS = {"n", "count", "total", "rows", "n_rows", "n_others", "n_signals", "n_keys"}


def test_no_kernel_is_compiled_again_for_another_number_of_rows():
    """Triton would compile 1, multiples of 16 and all others each for themselves: in the middle of a training run."""
    seen = 0
    for kernel in kernels_in_the_tree():
        module, _, name = kernel.partition(":")
        source = Path(*module.split(".")[1:]).with_suffix(".py")
        tree = ast.parse((Path(gpubuf.kernels.__path__[0]).parent / source).read_text())
        (found,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
        named = ast.unparse(found.decorator_list[0])
        sizes = {argument.arg for argument in found.args.args} & COUNTS
        assert named.startswith("jit_for_any_size") or not [size for size in sizes if f"'{size}'" not in named], kernel
        seen += len(sizes)
    assert seen >= len(kernels_in_the_tree())


def check(results: list[Compiled], target: str) -> None:
    """All compile; on NVIDIA no register is spilled, on AMD no loop is irreducible (Case 49)."""
    failed = [f"{r.spec}: {r.error}" for r in results if r.error]
    assert not failed, f"{target} refused:\n" + "\n".join(failed)
    assert all(r.registers > 0 for r in results)
    if target.startswith("sm_"):
        over = [r for r in results if r.spill_bytes > SPILLS.get(r.spec.partition("(")[0], 0)]
        spilled = [f"{r.spec}: {r.spill_bytes} bytes, {r.registers} registers" for r in over]
        assert not spilled, f"spills on {target}:\n" + "\n".join(spilled)
    irreducible = [r.spec for r in results if r.irreducible]
    assert not irreducible, f"loops on {target} that may never end:\n" + "\n".join(irreducible)


@pytest.mark.slow
@pytest.mark.parametrize("target", [target for target in (*TARGETS, *OTHERS) if target != "sm_100"])
def test_every_kernel_compiles(target: str):
    """The most demanding spec of each. What fits sm_90 fits sm_100, as a rule, which has its turn at night."""
    results = compile_in_subprocess(target, most=1)
    assert len(results) == len(demanding(all_specs(), 1))
    assert {r.spec.partition("(")[0] for r in results} == {kernel.partition(":")[2] for kernel in kernels_in_the_tree()}
    check(results, target)


@pytest.mark.nightly
@pytest.mark.parametrize("target", [*GATES, "gfx1100"])
def test_every_spec_compiles(target: str):
    """Case 49: gfx1100 finds more loops. Only the trajectory index has some as long as what it has read says."""
    specs = "trajectories" if target == "gfx1100" else "all"
    results = compile_in_subprocess(target, specs)
    assert len(results) == len(all_specs() if specs == "all" else specs_of(specs))
    check(results, target)


@pytest.mark.slow
def test_the_gate_refuses_what_it_should():
    """A spill is seen, and so are code that only the interpreter accepts and an irreducible loop (Case 49)."""
    spilling, changing_type, _ = compile_in_subprocess("sm_80", "tests.gates.faulty_kernels")
    assert not spilling.error
    assert spilling.spill_bytes > 0
    assert "total" in changing_type.error
    *_, irreducible = compile_in_subprocess("gfx942", "tests.gates.faulty_kernels")
    # Triton 3.9 compiles the planted loop without a guard.
    assert irreducible.irreducible > 0 or TRITON >= (3, 9)
