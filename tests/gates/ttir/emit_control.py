"""Handlers of control flow and of reductions."""

from __future__ import annotations

import re

from tests.gates.ttir.emit_values import number_in
from tests.gates.ttir.emitter import Emitter, UnsupportedError, handles
from tests.gates.ttir.ir import Op, Region, Type, closing, parse_type, split_top

_UFUNCS = {
    "arith.addi": "np.add",
    "arith.addf": "np.add",
    "arith.muli": "np.multiply",
    "arith.mulf": "np.multiply",
    "arith.maxsi": "np.maximum",
    "arith.minsi": "np.minimum",
    "arith.maxnumf": "np.fmax",
    "arith.minnumf": "np.fmin",
    "arith.maximumf": "np.maximum",
    "arith.minimumf": "np.minimum",
    "arith.andi": "np.bitwise_and",
    "arith.ori": "np.bitwise_or",
    "arith.xori": "np.bitwise_xor",
}


@handles("tt.return")
def leave(e: Emitter, op: Op) -> None:
    e.emit("return")


def _assign(e: Emitter, names: list[str], values: list[str]) -> None:
    if names:
        e.emit(f"{', '.join(names)} = {', '.join(values)}")


def _block(e: Emitter, region: Region) -> list[str]:
    """Emit a region but for its terminator, whose operands are returned as Python names."""
    last = region.ops[-1] if region.ops else None
    if last is None or not last.name.endswith((".yield", ".condition")):
        e.region(region)
        return []
    e.region(Region(region.args, region.ops[:-1]))
    return e.names(last.operands)


def _types(text: str) -> list[Type]:
    """Of ``-> (i32, f32)`` or ``-> i32``, the types; none without an arrow."""
    _, arrow, after = text.partition("->")
    after = after.strip()
    if after.startswith("("):
        after = after[1 : closing(after, 0)]
    return [parse_type(part) for part in split_top(after)] if arrow else []


def _pairs(text: str) -> list[tuple[str, str]]:
    """Of ``%a = %b, %c = %d``, the names in pairs."""
    return [(name, value) for name, _, value in (part.partition(" = ") for part in split_top(text))]


@handles("scf.for")
def for_loop(e: Emitter, op: Op) -> None:
    head = re.match(r"(%\S+) = (%\S+) to (%\S+) step (%\S+)", op.text)
    if head is None:
        raise UnsupportedError(f"scf.for {op.text}")
    induction, low, high, step = head.groups()
    rest = op.text[head.end() :]
    found = re.search(r"iter_args\((.*?)\) (?=->)", rest)
    pairs = _pairs(found[1]) if found else []
    kinds = _types(rest[found.end() :]) if found else []
    carried = [e.define(name, kind) for (name, _), kind in zip(pairs, kinds, strict=True)]
    _assign(e, carried, e.names([value for _, value in pairs]))
    i = e.define(induction, e.types[low])
    e.emit(f"for {i} in m.range({e.name(low)}, {e.name(high)}, {e.name(step)}):")
    e.indent += 1
    _assign(e, carried, _block(e, op.regions[0]))
    e.emit("pass")
    e.indent -= 1
    _assign(e, [e.define(r, k) for r, k in zip(op.results, kinds, strict=True)], carried)


@handles("scf.if")
def branch(e: Emitter, op: Op) -> None:
    kinds = _types(op.text)
    results = e.names(op.results)
    e.emit(f"if {e.name(op.operands[0])}:")
    for number, region in enumerate(op.regions):
        if number:
            e.emit("else:")
        e.indent += 1
        _assign(e, results, _block(e, region))
        e.emit("pass")
        e.indent -= 1
    for result, kind in zip(op.results, kinds, strict=True):
        e.define(result, kind)


@handles("scf.while")
def while_loop(e: Emitter, op: Op) -> None:
    # Without carried values it prints as `scf.while : () -> ()`.
    head = re.match(r"\((?P<pairs>.*?)\) : \((?P<types>.*)\) (?=->)|: \(\) (?=->)", op.text)
    if head is None:
        raise UnsupportedError(f"scf.while {op.text}")
    pairs = _pairs(head["pairs"] or "")
    kinds = [parse_type(part) for part in split_top(head["types"] or "")]
    before, body = op.regions
    carried = [e.define(name, kind) for (name, _), kind in zip(pairs, kinds, strict=True)]
    _assign(e, carried, e.names([value for _, value in pairs]))
    results = e.names(op.results)
    e.emit("while True:")
    e.indent += 1
    condition, *passed = _block(e, before)
    _assign(e, results, passed)
    e.emit(f"if not {condition}:")
    e.emit("    break")
    _assign(e, [e.define(name, kind) for name, kind in body.args], results)
    _assign(e, carried, _block(e, body))
    e.indent -= 1
    for result, kind in zip(op.results, _types(op.text[head.end() :]), strict=True):
        e.define(result, kind)


# Reductions


def _ufunc(op: Op) -> str:
    """The NumPy function that combines two elements, if it is one."""
    region = op.regions[0]
    inner = region.ops[:-1]
    if len(inner) == 1 and len(region.args) == 2 and inner[0].name in _UFUNCS:
        (a, kind), (b, _) = region.args
        of_bits = kind.elem == "bf16" or (kind.elem == "i1" and inner[0].name in ("arith.addi", "arith.muli"))
        if sorted(inner[0].operands) == sorted([a, b]) and not of_bits:
            return _UFUNCS[inner[0].name]
    return ""


def _combine(e: Emitter, op: Op) -> str:
    """Emit the function that combines two elements, of arrays here. Returns its name."""
    region = op.regions[0]
    name = f"combine_{len(e.lines)}"
    e.emit(f"def {name}({', '.join(e.define(a, kind) for a, kind in region.args)}):")
    e.indent += 1
    e.combining = True
    e.region(Region([], region.ops[:-1]))
    e.combining = False
    e.emit(f"return ({', '.join(e.names(region.ops[-1].operands))},)")
    e.indent -= 1
    return name


@handles("tt.reduce", "tt.scan")
def fold(e: Emitter, op: Op) -> None:
    inputs = re.findall(r"%[\w.$-]+(?:#\d+)?", op.text[: op.text.index(")")])
    kinds = _types(op.signature)
    values = [f"ar.whole({e.name(v)}, {e.types[v].shape})" for v in inputs]
    name = op.name.removeprefix("tt.")
    how = [str(number_in(op, "axis"))] + ([str("reverse = true" in op.text)] if name == "scan" else [])
    ufunc = _ufunc(op)
    if ufunc:
        e.emit(f"folded = [ar.{name}_ufunc({', '.join([values[0], *how, ufunc])})]")
    else:
        combine = _combine(e, op)
        e.emit(f"folded = ar.{name}([{', '.join(values)}], {', '.join([*how, combine])})")
    for number, (result, kind) in enumerate(zip(op.results, kinds, strict=True)):
        e.emit(f"{e.define(result, kind)} = folded[{number}]")
