"""Ahead-of-time compilation of every kernel, for targets that this machine does not have.

What is compiled is what launchers launch: :mod:`tests.gates.aot.operations` runs every operation on tensors without
memory, and records it. ``tests/gates/test_aot.py`` compiles all of it in subprocesses (a process that runs the
interpreter cannot compile) and fails on register spills, and fails if a ``*_kernel`` in ``kernels/`` is never launched.

A kernel is compiled as the JIT specialises it for tensors that torch's allocator gives: pointers, and the sizes that
may be specialised, are multiples of 16. On a target whose name ends in ``:unaligned`` nothing is known of them: this is
what views at odd addresses and odd sizes run.

``python -m tests.gates.aot [TARGET ...]`` prints for every kernel the registers, spills, shared memory, barriers,
atomics that order memory, and the bytes that a thread moves in one access to global memory.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from tests.gates.aot import operations
from tests.gates.aot.spec import AotSpec

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")

OTHERS = ("sm_89", "sm_120", "gfx1100", "gfx1201")
"""GPUs for work stations. The most demanding spec of each kernel is compiled for them."""

SHARED_KIB = {"sm_80": 163, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99}
"""Shared memory that a program may have on NVIDIA's; on AMD's it has 64 KiB."""

UNALIGNED = ":unaligned"

GATES = (*TARGETS, f"sm_90{UNALIGNED}")
"""The targets that the tests compile for. Only one is compiled without alignment too, to save time."""


@dataclass(frozen=True)
class Compiled:
    """The result of compiling one spec for one target.

    Attributes:
        spec: as text.
        target: as it was given, with :data:`UNALIGNED` or without.
        registers: of a thread.
        spill_bytes: of spill stores and loads, together; on AMD, of the memory that a thread has for them.
        shared_bytes: shared memory of a program.
        irreducible: loops, on AMD targets, that the compiler had to guard because they are entered in more than one
            place: around a barrier such a loop may never end.
        barriers: instructions in which the warps of a program wait for each other.
        ordered: atomics that order other accesses to memory: each waits for those under way.
        loads: bytes that a thread moves in one load from global memory, with the number of such instructions.
        stores: likewise.
        error: empty on success.
    """

    spec: str
    target: str
    registers: int = 0
    spill_bytes: int = 0
    shared_bytes: int = 0
    irreducible: int = 0
    barriers: int = 0
    ordered: int = 0
    loads: dict[str, int] = field(default_factory=dict)
    stores: dict[str, int] = field(default_factory=dict)
    error: str = ""


def compile_in_subprocess(target: str, specs: str = "all", most: int = 0) -> list[Compiled]:
    """Compile specs in a process that is free of the interpreter.

    Args:
        target: one of :data:`GATES` or :data:`OTHERS`, or another one by such a name.
        specs: as the option ``--specs``.
        most: as the option ``--most``.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.gates.aot", "--json", "--specs", specs, "--most", str(most), target],
        env=environment,
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        raise RuntimeError(f"compiling for {target} ended with code {run.returncode}:\n{run.stderr}")
    return [Compiled(**result) for result in json.loads(run.stdout.splitlines()[-1])]


_PTX_ACCESS = re.compile(r"\b(ld|st)\.[\w.:]*?\bglobal\b[\w.:]*?(?:\.v([248]))?\.[bsuf](8|16|32|64|128)\b")
_AMD_ACCESS = re.compile(r"\b(?:global|flat|buffer)_(load|store)_(\w+)")
_AMD_BYTES = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "short": 2, "ushort": 2, "sshort": 2}


def _by_width(widths: Iterable[int]) -> dict[str, int]:
    return {str(width): count for width, count in sorted(Counter(widths).items(), reverse=True)}


def _ptxas_resources(ptx: str, log: str) -> dict[str, Any]:
    """Registers and spills from the log of ``ptxas -v``, barriers and accesses from the code."""
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    assert len(spills) >= 2, f"ptxas reported no spill counts:\n{log}"
    accesses = [(kind, int(vector or 1) * int(bits) // 8) for kind, vector, bits in _PTX_ACCESS.findall(ptx)]
    return {
        "registers": max(int(n) for n in re.findall(r"Used (\d+) registers", log)),
        "spill_bytes": sum(map(int, spills)),
        "barriers": len(re.findall(r"\bbar(?:rier)?\.sync\b", ptx)),
        "ordered": len(re.findall(r"\b(?:atom|red)\.[\w.]*\b(?:acq_rel|acquire|release)\b", ptx)),
        "loads": _by_width(width for kind, width in accesses if kind == "ld"),
        "stores": _by_width(width for kind, width in accesses if kind == "st"),
    }


def _amdgcn_resources(assembly: str) -> dict[str, Any]:
    """The same of an AMD kernel, from its metadata and code. Its fences are apart from atomics, and not counted.

    Scalar registers spill into lanes of vector registers, not to memory: only a thread's private memory is counted.
    """
    names = r"\.(vgpr_count|private_segment_fixed_size):\s*(\d+)"
    counts = {name: int(value) for name, value in re.findall(names, assembly)}
    accesses = [(kind, _AMD_BYTES.get(what.split("_")[0], 1)) for kind, what in _AMD_ACCESS.findall(assembly)]
    return {
        "registers": counts["vgpr_count"],
        "spill_bytes": counts["private_segment_fixed_size"],
        "irreducible": assembly.count("%irr.guard"),
        "barriers": len(re.findall(r"\bs_barrier\b", assembly)),
        "loads": _by_width(width for kind, width in accesses if kind == "load"),
        "stores": _by_width(width for kind, width in accesses if kind == "store"),
    }


def alignments(kernel: Any, signature: dict[str, Any]) -> dict[tuple[int, ...], list[list[Any]]]:
    """The attributes that the JIT gives to arguments that are multiples of 16, by their place."""
    found: dict[tuple[int, ...], list[list[Any]]] = {}
    for place, parameter in enumerate(kernel.params):
        kind = signature[parameter.name]
        if parameter.do_not_specialize or parameter.do_not_specialize_on_alignment:
            continue
        if isinstance(kind, str) and (kind[0] == "*" or kind in ("i32", "i64")):
            found[(place,)] = [["tt.divisibility", 16]]
        # Numbers in tuples are codes of addresses, and odd.
        for i, each in enumerate(kind if isinstance(kind, tuple) else ()):
            if each[0] == "*":
                found[(place, i)] = [["tt.divisibility", 16]]
    return found


def assembly(spec: AotSpec, target: str) -> tuple[str, dict[str, Any], str]:
    """PTX or AMD assembly of one spec, the compiler's metadata, and the log of ``ptxas -v`` for an NVIDIA target.

    Triton's own pipeline, with its choice of a ``ptxas`` and of options, which differ between its versions. AMD's last
    stage says nothing, and is left out.
    """
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend

    from gpubuf.kernels._launching import FP_FUSION

    name, _, unaligned = target.partition(":")
    module, _, function = spec.kernel.partition(":")
    kernel = getattr(importlib.import_module(module), function)
    # in the kernel's own order, which is what the compiler goes by
    missing = [a for a in kernel.arg_names if a not in spec.signature and a not in spec.constexprs]
    extra = [a for a in (*spec.signature, *spec.constexprs) if a not in kernel.arg_names]
    if missing or extra:
        raise ValueError(f"the spec of {spec.kernel} lacks {missing} and names {extra}, which the kernel has not")
    constexprs = spec.constexprs
    if not name.startswith("sm_") and constexprs.get("TILES", ("",))[0] in ("tf32", "tf32x3"):
        # A launcher on AMD's GPUs asks for no TF32, which some of them lack.
        constexprs = {**constexprs, "TILES": ("ieee", *constexprs["TILES"][1:])}
    signature = {a: "constexpr" if a in spec.constexprs else spec.signature[a] for a in kernel.arg_names}
    attributes = {} if unaligned else alignments(kernel, signature)
    source = ASTSource(kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    if name.startswith("sm_"):
        gpu = GPUTarget("cuda", int(name.removeprefix("sm_")), 32)
    else:
        gpu = GPUTarget("hip", name, 64 if name.startswith("gfx9") else 32)
    backend = make_backend(gpu)
    given = {"num_warps": spec.num_warps, "enable_fp_fusion": FP_FUSION}
    if spec.maxnreg is not None and gpu.backend == "cuda":
        given["maxnreg"] = spec.maxnreg
    options = backend.parse_options(given)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    codegen = backend.get_codegen_implementation(options)
    # Triton 3.6 is the first that asks for the target.
    wanted = [gpu] if "target" in inspect.signature(source.make_ir).parameters else []
    code = source.make_ir(*wanted, options, codegen, backend.get_module_map(), context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    metadata: dict[str, Any] = {"target": gpu, **options.__dict__}
    *before, last = stages.values()
    for stage in before:
        code = stage(code, metadata)
    log = ""
    if gpu.backend == "cuda":
        run = subprocess.run

        def logged(command: list[str], **given: Any) -> Any:
            nonlocal log
            result = run(command, **given)
            if "-v" in command:
                log += Path(given["stderr"].name).read_text()
            return result

        # Not every Triton can print the log.
        with mock.patch.object(subprocess, "run", logged):
            last(code, metadata)
    return code, metadata, log


def _compile(spec: AotSpec, target: str) -> Compiled:
    code, metadata, log = assembly(spec, target)
    # Triton asks for the limit when it loads the code, and ptxas does not know what a launch adds.
    limit = 1024 * SHARED_KIB.get(target.removesuffix(UNALIGNED), 64)
    if metadata["shared"] > limit:
        raise ValueError(f"{metadata['shared']} bytes of shared memory, where {target} has {limit}")
    found = _ptxas_resources(code, log) if target.startswith("sm_") else _amdgcn_resources(code)
    return Compiled(str(spec), target, shared_bytes=metadata["shared"], **found)


def compile_specs(specs: Iterable[AotSpec], target: str) -> list[Compiled]:
    """Compile in this process; a failure is a result, so that one report names them all."""
    results = []
    for spec in specs:
        try:
            results.append(_compile(spec, target))
        except Exception as error:
            results.append(Compiled(str(spec), target, error=f"{type(error).__name__}: {error}"))
    return results


COLUMNS = ("registers", "spills", "shared", "barriers", "ordered", "loads", "stores")


def columns(result: Compiled) -> tuple[str, ...]:
    """A kernel's line of the report, as :data:`COLUMNS`; accesses as ``bytes x number``."""
    widths = (" ".join(f"{width}x{count}" for width, count in found.items()) for found in (result.loads, result.stores))
    numbers = (result.registers, result.spill_bytes, result.shared_bytes, result.barriers, result.ordered)
    return (*map(str, numbers), *widths)


def report(results: Sequence[Compiled]) -> str:
    """A line for every kernel on every target."""
    lines = [("target", *COLUMNS, "kernel"), *((r.target, *columns(r), f"{r.spec} {r.error}".strip()) for r in results)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)][:-1]
    return "\n".join("  ".join((*map(str.ljust, line, widths), line[-1])) for line in lines)


def _named_specs(name: str) -> list[AotSpec]:
    if name == "all":
        return operations.all_specs()
    found: list[AotSpec] = (
        operations.specs_of(name) if name in operations.FAMILIES else importlib.import_module(name).SPECS
    )
    return found


def demanding(specs: Sequence[AotSpec], most: int) -> list[AotSpec]:
    """The ``most`` specs of each kernel that ask for most: large blocks for their warps, branches, float64."""

    def asks(spec: AotSpec) -> float:
        sizes: list[int] = [value for value in spec.constexprs.values() if type(value) is int and value > 0]
        flags = sum(value is True for value in spec.constexprs.values())
        wide: int = sum(kind == "*fp64" for kind in spec.signature.values())
        return math.log2(math.prod(sizes) / spec.num_warps) + flags + wide

    by_kernel: dict[str, list[AotSpec]] = {}
    for spec in specs:
        by_kernel.setdefault(spec.kernel, []).append(spec)
    return [spec for group in by_kernel.values() for spec in sorted(group, key=asks, reverse=True)[:most]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gates.aot", description="compile every kernel, no GPU needed"
    )
    parser.add_argument("targets", nargs="*", default=GATES, help=f"default: {' '.join(GATES)}")
    parser.add_argument("--specs", default="all", help="one family, such as td, or a module with SPECS; default: all")
    parser.add_argument(
        "--most", type=int, default=0, help="only so many specs of each kernel, the most demanding ones"
    )
    parser.add_argument("--json", action="store_true", help="print the results as one line of JSON")
    options = parser.parse_args(arguments)
    specs = _named_specs(options.specs)
    if options.most:
        specs = demanding(specs, options.most)
    results = [result for target in options.targets for result in compile_specs(specs, target)]
    print(json.dumps([asdict(result) for result in results]) if options.json else report(results))
