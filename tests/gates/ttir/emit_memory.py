"""Handlers of operations on memory: pointers, loads, stores, atomics, barriers."""

from __future__ import annotations

import re

import numpy as np

from tests.gates.ttir import arithmetic
from tests.gates.ttir.emit_values import cast
from tests.gates.ttir.emitter import Emitter, MemoryOp, UnsupportedError, handles
from tests.gates.ttir.ir import Op, Type, parse_type, split_top


@handles("tt.addptr")
def add_pointer(e: Emitter, op: Op) -> None:
    kind = parse_type(split_top(op.signature)[0])
    size = max(kind.pointee().bits // 8, 1)
    a, b = e.names(op.operands)
    e.result(op, f"{a} + {b}.astype(np.int64) * {size}", kind, e.roots.get(op.operands[0]))


@handles("tt.int_to_ptr")
def pointer_of_integer(e: Emitter, op: Op) -> None:
    cast(e, op, "{}")
    e.roots[op.results[0]] = None
    found = re.search(r"tt\.divisibility = dense<(\d+)>", op.text)
    if found:
        hint = MemoryOp(-1, "hint", (), True, "i64", np.dtype(np.int64), None, e.locations.places(op.loc))
        e.emit(f"m.hint({e.name(op.results[0])}, {found[1]}, {e.constant(hint)})")


@handles("tt.ptr_to_int")
def integer_of_pointer(e: Emitter, op: Op) -> None:
    cast(e, op, "{}")


def _memory_op(e: Emitter, op: Op, kind: str, pointee: Type) -> MemoryOp:
    dtype = np.dtype(np.uint8) if pointee.elem == "i1" else arithmetic.dtype_of(pointee.elem)
    made = MemoryOp(
        len(e.memory_ops), kind, pointee.shape or (), pointee.shape is None, pointee.elem, dtype,
        e.roots.get(op.operands[0]), e.locations.places(op.loc),
    )  # fmt: skip
    e.memory_ops.append(made)
    return made


def _call(e: Emitter, made: MemoryOp, op: Op) -> str:
    """The machine's method, with three operands: pointer, then value and mask, or mask and default."""
    names = e.names(op.operands) + ["None"] * (3 - len(op.operands))
    return f"m.{made.kind}(OPS[{made.number}], {', '.join(names)})"


def _leader_only(e: Emitter, ssa: str) -> bool:
    """Whether all that depends on a scalar is what scalar stores and atomics write."""
    todo, done = [ssa], set()
    while todo:
        for op in e.users(todo.pop()):
            if id(op) in done or op.name == "tt.store":
                continue
            done.add(id(op))
            scalar = not op.regions and "tensor<" not in op.text
            if not scalar or not (op.name.startswith("arith.") or op.name in ("tt.addptr", "tt.bitcast")):
                return False
            todo += op.results
    return True


@handles("tt.load")
def load(e: Emitter, op: Op) -> None:
    if "boundaryCheck" in op.text or "isVolatile = true" in op.text:
        raise UnsupportedError(op.text)
    kind = op.type.pointee()
    made = _memory_op(e, op, "load", kind)
    made.leader_only = made.scalar and _leader_only(e, op.results[0])
    e.result(op, _call(e, made, op), kind)


@handles("tt.store")
def store(e: Emitter, op: Op) -> None:
    e.emit(_call(e, _memory_op(e, op, "store", op.type.pointee()), op))


@handles("tt.atomic_rmw")
def atomic(e: Emitter, op: Op) -> None:
    action, ordering, scope = (part.strip() for part in op.text.split(",")[:3])
    kind = parse_type(op.signature.rpartition(" -> ")[2])
    made = _memory_op(e, op, "atomic", kind)
    made.action, made.ordering = action, ordering if scope in ("gpu", "sys") else "relaxed"
    made.used = bool(e.users(op.results[0]))
    e.result(op, _call(e, made, op), kind)


@handles("ttg.barrier", "gpu.barrier")
def barrier(e: Emitter, op: Op) -> None:
    what = re.sub(r"\{.*\}", "", op.text).strip()
    # Of flavours, only one that covers global memory orders what is looked at here.
    if what in ("", "all") or "global" in what:
        e.emit("m.barrier()")
