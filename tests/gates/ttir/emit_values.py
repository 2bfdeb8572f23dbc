"""Handlers of operations without memory: constants, arithmetic, casts, comparisons, shapes."""

from __future__ import annotations

import re
import struct
from typing import Any

import numpy as np

from tests.gates.ttir import arithmetic
from tests.gates.ttir.emitter import HANDLERS, Emitter, UnsupportedError, handles
from tests.gates.ttir.ir import Op, Type, parse_type, split_top

BINARY = {
    "arith.addi": "{0} + {1}",
    "arith.subi": "{0} - {1}",
    "arith.muli": "{0} * {1}",
    "arith.andi": "{0} & {1}",
    "arith.ori": "{0} | {1}",
    "arith.xori": "{0} ^ {1}",
    "arith.shli": "ar.shl({0}, {1})",
    "arith.shrsi": "ar.shrs({0}, {1})",
    "arith.shrui": "ar.shru({0}, {1})",
    "arith.divsi": "ar.divs({0}, {1})",
    "arith.remsi": "ar.rems({0}, {1})",
    "arith.divui": "ar.divu({0}, {1})",
    "arith.remui": "ar.remu({0}, {1})",
    "tt.mulhiui": "ar.mulhiu({0}, {1})",
    "arith.maxsi": "np.maximum({0}, {1})",
    "arith.minsi": "np.minimum({0}, {1})",
    "arith.maxui": "np.maximum(ar.unsigned({0}), ar.unsigned({1})).view({0}.dtype)",
    "arith.minui": "np.minimum(ar.unsigned({0}), ar.unsigned({1})).view({0}.dtype)",
    "arith.addf": "{0} + {1}",
    "arith.subf": "{0} - {1}",
    "arith.mulf": "{0} * {1}",
    "arith.divf": "{0} / {1}",
    "arith.remf": "np.fmod({0}, {1})",
    "arith.maxnumf": "np.fmax({0}, {1})",
    "arith.minnumf": "np.fmin({0}, {1})",
    "arith.maximumf": "np.maximum({0}, {1})",
    "arith.minimumf": "np.minimum({0}, {1})",
}
# Of truth values the arithmetic is that of bits.
BINARY_OF_BITS = BINARY | {"arith.addi": "{0} ^ {1}", "arith.subi": "{0} ^ {1}", "arith.muli": "{0} & {1}"}

FUNCTIONS = {
    **{f"math.{name}": f"np.{name}" for name in ("exp", "exp2", "log", "log2", "log1p", "sqrt", "floor", "ceil")},
    **{f"math.{name}": f"np.{name}" for name in ("cos", "sin", "tanh")},
    **{"math.absf": "np.abs", "math.absi": "np.abs", "math.erf": "ar.erf", "math.rsqrt": "ar.rsqrt"},
    "arith.negf": "np.negative",
}

COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def numbers(e: Emitter, op: Op, elem: str) -> list[str]:
    """The operands to compute with: those of bfloat16 as float32."""
    return [f"ar.cast_float({name}, 'bf16', 'f32')" if elem == "bf16" else name for name in e.names(op.operands)]


def computed(e: Emitter, op: Op, template: str) -> None:
    """A result of operands that all have its type; of bfloat16 it is rounded once."""
    text = template.format(*numbers(e, op, op.type.elem))
    e.result(op, f"ar.cast_float({text}, 'f32', 'bf16')" if op.type.elem == "bf16" else text)


def binary(e: Emitter, op: Op) -> None:
    computed(e, op, (BINARY_OF_BITS if op.type.elem == "i1" else BINARY)[op.name])


def function(e: Emitter, op: Op) -> None:
    computed(e, op, FUNCTIONS[op.name] + "({0})")


HANDLERS.update(dict.fromkeys(BINARY, binary))
HANDLERS.update(dict.fromkeys(FUNCTIONS, function))


@handles("math.fma")
def fma(e: Emitter, op: Op) -> None:
    computed(e, op, "{0} * {1} + {2}")


# Constants


def _literal(text: str, elem: str) -> Any:
    if elem == "i1":
        return np.bool_(text in ("true", "1", "-1"))
    if elem.startswith("i"):
        return arithmetic.integer(int(text, 0), elem)
    dtype = arithmetic.DTYPES[elem]
    if text.startswith("0x"):
        return np.frombuffer(struct.pack("<Q", int(text, 16))[: dtype.itemsize], dtype)[0]
    if elem == "bf16":
        return arithmetic.cast_float(np.float64(text), "f64", elem)
    return dtype.type(float(text))


@handles("arith.constant")
def constant(e: Emitter, op: Op) -> None:
    if op.text in ("true", "false"):
        e.result(op, e.constant(np.bool_(op.text == "true")), Type(None, "i1"))
        return
    text = re.sub(r"^\{.*?\}\s*", "", op.text)
    value, kind = split_top(text, " : ")[-2], op.type
    if kind.shape is None:
        e.result(op, e.constant(_literal(value, kind.elem)), kind)
        return
    inner = re.fullmatch(r"dense<(.*)>", value)
    if inner is None or inner[1].startswith('"'):
        raise UnsupportedError(f"constant {text}")
    if inner[1].startswith("["):
        items = [_literal(x, kind.elem) for x in re.findall(r"[\w.+-]+", inner[1])]
        array = np.array(items, arithmetic.DTYPES[kind.elem]).reshape(kind.shape)
    else:
        array = np.full((1,) * len(kind.shape), _literal(inner[1], kind.elem), arithmetic.DTYPES[kind.elem])
    e.result(op, e.constant(array), kind)


@handles("tt.make_range")
def make_range(e: Emitter, op: Op) -> None:
    bounds = dict(re.findall(r"(start|end) = (-?\d+)", op.text))
    e.result(op, e.constant(np.arange(int(bounds["start"]), int(bounds["end"]), dtype=np.int32)))


@handles("tt.get_program_id")
def program_id(e: Emitter, op: Op) -> None:
    e.result(op, f"np.int32(pid[{'xyz'.index(op.text[0])}])", Type(None, "i32"))


@handles("tt.get_num_programs")
def num_programs(e: Emitter, op: Op) -> None:
    e.result(op, f"np.int32(grid[{'xyz'.index(op.text[0])}])", Type(None, "i32"))


# Casts


def cast_types(op: Op) -> tuple[Type, Type]:
    source, target = split_top(op.signature.replace(" -> ", " to "), " to ")
    return parse_type(source), parse_type(target)


def cast(e: Emitter, op: Op, text: str) -> None:
    """A result that is ``text`` of the operand; a pointer comes from where the operand did."""
    a = op.operands[0]
    e.result(op, text.format(e.name(a)), cast_types(op)[1], e.roots.get(a))


@handles("arith.extsi", "arith.extui", "arith.trunci", "arith.fptosi")
def convert_integer(e: Emitter, op: Op) -> None:
    cast(e, op, f"ar.{op.name.partition('.')[2]}({{}}, {e.dtype(cast_types(op)[1].elem)})")


@handles("arith.sitofp", "arith.uitofp")
def to_float(e: Emitter, op: Op) -> None:
    source, target = cast_types(op)
    sign = "-" if source.elem == "i1" and op.name == "arith.sitofp" else ""
    number = "ar.unsigned({})" if op.name == "arith.uitofp" else "{}"
    through = "f32" if target.elem == "bf16" else target.elem
    text = f"{sign}{number}.astype({e.dtype(through)})"
    cast(e, op, text if through == target.elem else f"ar.cast_float({text}, {through!r}, {target.elem!r})")


@handles("arith.extf", "arith.truncf", "tt.fp_to_fp")
def convert_float(e: Emitter, op: Op) -> None:
    source, target = cast_types(op)
    cast(e, op, f"ar.cast_float({{}}, {source.elem!r}, {target.elem!r})")


@handles("tt.bitcast", "arith.bitcast")
def bitcast(e: Emitter, op: Op) -> None:
    target = cast_types(op)[1]
    cast(e, op, "{}" if target.is_pointer else f"{{}}.view({e.dtype(target.elem)})")


# Comparison, selection


@handles("arith.cmpi")
def compare_integers(e: Emitter, op: Op) -> None:
    predicate = op.text.split(",")[0].strip()
    a, b = e.names(op.operands)
    if predicate[0] == "u":
        a, b = f"ar.unsigned({a})", f"ar.unsigned({b})"
    sign = COMPARISONS[predicate if predicate in COMPARISONS else predicate[1:]]
    e.result(op, f"{a} {sign} {b}", op.type.of("i1"))


@handles("arith.cmpf")
def compare_floats(e: Emitter, op: Op) -> None:
    predicate = op.text.split(",")[0].strip()
    a, b = numbers(e, op, op.type.elem)
    unordered = f"(np.isnan({a}) | np.isnan({b}))"
    if predicate in ("ord", "uno"):
        text = unordered if predicate == "uno" else f"~{unordered}"
    else:
        text = f"({a} {COMPARISONS[predicate[1:]]} {b})"
        if predicate[0] == "u" and predicate != "une":
            text += f" | {unordered}"
        elif predicate == "one":
            text += f" & ~{unordered}"
    e.result(op, text, op.type.of("i1"))


@handles("arith.select")
def select(e: Emitter, op: Op) -> None:
    condition, a, b = op.operands
    kind = parse_type(split_top(op.signature)[-1])
    sources = e.roots.get(a), e.roots.get(b)
    roots = None if sources[0] is None or sources[1] is None else sources[0] | sources[1]
    c, x, y = e.names(op.operands)
    scalar = e.types[condition].shape is None and not e.combining
    e.result(op, f"{x} if {c} else {y}" if scalar else f"np.where({c}, {x}, {y})", kind, roots)


# Shapes


@handles("tt.splat")
def splat(e: Emitter, op: Op) -> None:
    target = cast_types(op)[1]
    cast(e, op, f"np.full({(1,) * len(target.shape or ())}, {{}}, {e.dtype(target.elem)})")


@handles("tt.unsplat")
def unsplat(e: Emitter, op: Op) -> None:
    cast(e, op, "{}.reshape(-1)[0]")


@handles("tt.broadcast")
def broadcast(e: Emitter, op: Op) -> None:
    cast(e, op, "{}")


def number_in(op: Op, attribute: str) -> int:
    found = re.search(rf"{attribute} = (-?\d+)", op.text)
    if found is None:
        raise UnsupportedError(f"{op.name} without {attribute}: {op.text}")
    return int(found[1])


@handles("tt.expand_dims")
def expand_dims(e: Emitter, op: Op) -> None:
    cast(e, op, f"np.expand_dims({{}}, {number_in(op, 'axis')})")


@handles("tt.reshape")
def reshape(e: Emitter, op: Op) -> None:
    source, target = cast_types(op)
    # Nobody may rely on the order then.
    order = ".ravel()[::-1]" if "allow_reorder" in op.text else ""
    cast(e, op, f"ar.whole({{}}, {source.shape}){order}.reshape({target.shape})")


@handles("tt.trans")
def transpose(e: Emitter, op: Op) -> None:
    found = re.search(r"array<i32: ([\d, ]+)>", op.text)
    if found is None:
        raise UnsupportedError(f"{op.name} {op.text}")
    cast(e, op, f"{{}}.transpose({tuple(int(x) for x in found[1].split(','))})")


@handles("tt.split")
def split(e: Emitter, op: Op) -> None:
    (a,) = e.names(op.operands)
    source, target = cast_types(op)
    for number, result in enumerate(op.results):
        e.emit(f"{e.define(result, target)} = ar.whole({a}, {source.shape})[..., {number}]")


@handles("tt.join")
def join(e: Emitter, op: Op) -> None:
    a, b = e.names(op.operands)
    source, target = cast_types(op)
    pair = f"ar.whole({a}, {source.shape}), ar.whole({b}, {source.shape})"
    e.result(op, f"np.stack([{pair}], -1)", target)


@handles("tt.gather")
def gather(e: Emitter, op: Op) -> None:
    source, index = op.operands
    kinds = e.types[source], e.types[index]
    texts = [f"ar.whole({e.name(v)}, {kind.shape})" for v, kind in zip((source, index), kinds, strict=True)]
    target = parse_type(op.signature.rpartition(" -> ")[2])
    e.result(op, f"np.take_along_axis({', '.join(texts)}, {number_in(op, 'axis')})", target)


@handles("tt.dot")
def dot(e: Emitter, op: Op) -> None:
    kinds = [parse_type(part) for part in split_top(op.signature.partition(" -> ")[0], " * ")]
    factors = [f"ar.whole({e.name(v)}, {kind.shape})" for v, kind in zip(op.operands, kinds, strict=False)]
    if kinds[0].elem == "bf16":
        factors = [f"ar.cast_float({factor}, 'bf16', 'f32')" for factor in factors]
    found = re.search(r"inputPrecision = (\w+)", op.text)
    how = found[1] if found else "ieee"
    e.has_products = True
    target = parse_type(op.signature.partition(" -> ")[2])
    e.result(op, f"product({', '.join(factors)}, {e.name(op.operands[2])}, {how!r})", target)
