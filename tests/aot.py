"""Ahead-of-time compilation of every kernel, for targets that this machine does not have.

Each family lists its kernels in ``tests/aot_specs/<family>.py`` as ``SPECS``, a list of :class:`AotSpec`;
``tests/test_aot.py`` compiles them all in subprocesses (a process that runs the interpreter cannot compile) and
fails on register spills, and fails if a ``*_kernel`` in ``kernels/`` has no spec.

``python -m tests.aot [TARGET ...]`` prints registers, spills and shared memory of every kernel.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


@dataclass(frozen=True)
class AotSpec:
    """One specialisation of one kernel.

    Attributes:
        kernel: ``"module:function"`` of a ``@triton.jit`` function.
        signature: type of every run-time argument, e.g. ``{"x_ptr": "*fp32", "n": "i32", "srcs": ("*u8", "*u8")}``.
        constexprs: value of every ``tl.constexpr`` argument.
        num_warps: as the launcher chooses it for this specialisation.
    """

    kernel: str
    signature: dict[str, Any]
    constexprs: dict[str, Any] = field(default_factory=dict)
    num_warps: int = 4

    def __str__(self) -> str:
        constants = ", ".join(f"{name}={value}" for name, value in self.constexprs.items())
        return f"{self.kernel.partition(':')[2]}({constants}) on {self.num_warps} warps"


@dataclass(frozen=True)
class Compiled:
    """What became of one spec on one target.

    ``spill_bytes`` counts stores and loads. ``irreducible`` counts the loops, on AMD targets, that the compiler had to
    guard because they are entered in more than one place: around a barrier such a loop may never end. ``error`` is
    empty on success.
    """

    spec: str
    target: str
    registers: int = 0
    spill_bytes: int = 0
    shared_bytes: int = 0
    irreducible: int = 0
    error: str = ""


def all_specs() -> list[AotSpec]:
    """The specs of every family in ``tests/aot_specs/``, each once: different launches may share one."""
    from tests import aot_specs

    modules = [f"{aot_specs.__name__}.{found.name}" for found in pkgutil.iter_modules(aot_specs.__path__)]
    specs = [spec for module in sorted(modules) for spec in importlib.import_module(module).SPECS]
    return list({repr(spec): spec for spec in specs}.values())


def compile_in_subprocess(target: str, specs: str = "all") -> list[Compiled]:
    """Compile specs in a process that is free of the interpreter.

    Args:
        target: one of :data:`TARGETS`, or another one by such a name.
        specs: ``"all"``, or the name of a module that has ``SPECS``.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.aot", "--json", "--specs", specs, target],
        env=environment,
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        raise RuntimeError(f"compiling for {target} ended with code {run.returncode}:\n{run.stderr}")
    return [Compiled(**result) for result in json.loads(run.stdout.splitlines()[-1])]


def _ptxas_resources(ptx: str, arch: int) -> tuple[int, int]:
    """(registers, bytes of spill stores and loads) that ``ptxas -v`` reports."""
    from triton import knobs

    ptxas = (knobs.nvidia.ptxas_blackwell if arch >= 100 else knobs.nvidia.ptxas).path
    gpu = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert gpu is not None, "PTX without a .target line"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        # the optimisation flag is the one that Triton passes
        command = [ptxas, "-v", "--regAllocOptLevel=2", f"--gpu-name={gpu[1]}", source, "-o", Path(folder, "cubin")]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    assert len(spills) >= 2, f"ptxas reported no spill counts:\n{log}"
    return max(int(n) for n in re.findall(r"Used (\d+) registers", log)), sum(map(int, spills))


def _amdgcn_resources(assembly: str) -> tuple[int, int]:
    """(vector registers, bytes of spills) from the metadata of an AMD kernel."""
    counts = {name: int(value) for name, value in re.findall(r"\.(vgpr_count|[sv]gpr_spill_count):\s*(\d+)", assembly)}
    return counts["vgpr_count"], 4 * (counts["vgpr_spill_count"] + counts["sgpr_spill_count"])


def _compile(spec: AotSpec, target: str) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, _, name = spec.kernel.partition(":")
    kernel = getattr(importlib.import_module(module), name)
    # in the kernel's own order, which is what the compiler goes by
    missing = [a for a in kernel.arg_names if a not in spec.signature and a not in spec.constexprs]
    extra = [a for a in (*spec.signature, *spec.constexprs) if a not in kernel.arg_names]
    if missing or extra:
        raise ValueError(f"the spec of {spec.kernel} lacks {missing} and names {extra}, which the kernel has not")
    signature = {a: "constexpr" if a in spec.constexprs else spec.signature[a] for a in kernel.arg_names}
    source = ASTSource(kernel, signature=signature, constexprs=spec.constexprs)
    if target.startswith("sm_"):
        arch = int(target.removeprefix("sm_"))
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": spec.num_warps})
        registers, spills = _ptxas_resources(compiled.asm["ptx"], arch)
        irreducible = 0
    else:
        lanes = 64 if target.startswith("gfx9") else 32
        compiled = triton.compile(source, target=GPUTarget("hip", target, lanes), options={"num_warps": spec.num_warps})
        registers, spills = _amdgcn_resources(compiled.asm["amdgcn"])
        irreducible = compiled.asm["amdgcn"].count("%irr.guard")
    return Compiled(str(spec), target, registers, spills, compiled.metadata.shared, irreducible)


def compile_specs(specs: Iterable[AotSpec], target: str) -> list[Compiled]:
    """Compile in this process; a failure is a result, so that one report names them all."""
    results = []
    for spec in specs:
        try:
            results.append(_compile(spec, target))
        except Exception as error:
            results.append(Compiled(str(spec), target, error=f"{type(error).__name__}: {error}"))
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.aot", description="compile every kernel, no GPU needed")
    parser.add_argument("targets", nargs="*", default=TARGETS, help=f"default: {' '.join(TARGETS)}")
    parser.add_argument("--specs", default="all", help="a module with SPECS instead of tests/aot_specs/")
    parser.add_argument("--json", action="store_true", help="print the results as one line of JSON")
    options = parser.parse_args(arguments)
    specs = all_specs() if options.specs == "all" else importlib.import_module(options.specs).SPECS
    results = [result for target in options.targets for result in compile_specs(specs, target)]
    if options.json:
        print(json.dumps([asdict(result) for result in results]))
        return
    print(f"{'target':8} {'registers':>9} {'spills':>7} {'shared':>7}  kernel")
    for r in results:
        print(f"{r.target:8} {r.registers:9} {r.spill_bytes:7} {r.shared_bytes:7}  {r.spec} {r.error}")


if __name__ == "__main__":
    main()
