"""Translates basic blocks of PTX to Python functions in NumPy, over all lanes that are in the block.

A block is a function of ``(m, lanes)``: the machine, and the lanes that execute it, ``None`` for all. It returns the
number of the block that comes next, for all of them or for each. Values are arrays with an element per lane, or scalars
that all lanes have; none is changed in place.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.gates.ptx import arithmetic
from tests.gates.ptx.parse import Instruction, Kernel, names
from tests.gates.ptx.trips import Trips
from tests.support import floats

DONE = 1 << 28
"""The block that comes after the last one."""

_BITS = {"p": "b1", "rs": "u2", "r": "u4", "rd": "u8", "f": "u4", "fd": "u8", "h": "u2"}
_KINDS = {"s": "i", "u": "u", "b": "u", "f": "f"}
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">"}
_COMPARE["hs"] = ">="
_ROUNDING = {"rzi": "np.trunc", "rmi": "np.floor", "rni": "np.rint", "rpi": "np.ceil"}
_LOGIC = {"and": "&", "or": "|", "xor": "^"}
EXCHANGES = ("shfl", "vote", "redux", "ldmatrix", "stmatrix", "mma")
_SPECIAL = {
    f"%{name}.{axis}": f"m.{name}({i}, lanes)"
    for name in ("tid", "ctaid", "nctaid", "ntid")
    for i, axis in enumerate("xyz")
}
_PURE = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "neg": "-{0}", "not": "~{0}", "and": "{0} & {1}", "or": "{0} | {1}",
    "xor": "{0} ^ {1}", "abs": "np.abs({0})", "sqrt": "np.sqrt({0})", "ex2": "np.exp2({0}.astype('f8')).astype('f4')",
    "lg2": "np.log2({0}.astype('f8')).astype('f4')", "copysign": "np.copysign({1}, {0})", "tanh": "np.tanh({0})",
    "rsqrt": "(1 / np.sqrt({0})).astype({0}.dtype)", "fma": "fused({0}, {1}, {2})",
}  # fmt: skip
"""Operations whose operands and result all have the instruction's type."""


def dtype_of(kind: str) -> str:
    """NumPy's name of a PTX type."""
    if kind.startswith("bf16") or "x2" in kind:
        return {"bf16": "u2", "f32x2": "u8"}.get(kind, "u4")
    return "b1" if kind == "pred" else f"{_KINDS[kind[0]]}{int(kind[1:]) // 8}"


def _space(instruction: Instruction) -> str:
    """``"global"`` or ``"shared"``, which Triton 3.9 writes as ``shared::cta``."""
    space = next((part.partition("::")[0] for part in instruction.parts if part.startswith(("global", "shared"))), None)
    if space is None:
        raise NotImplementedError(".".join(instruction.parts))
    return space


def bits_of(register: str) -> str:
    """The unsigned dtype of a register, or bool."""
    found = re.match(r"%([a-z]+)\d+$", register)
    if found is None:
        raise NotImplementedError(f"register {register}")
    return _BITS[found[1]]


class NotExecutedError(NotImplementedError):
    """An instruction that only a device executes."""


@dataclass
class Program:
    """A translated kernel.

    Attributes:
        blocks: a function per basic block, None for one that is a barrier.
        registers: those that live beyond a block have a number each.
        trips: what its warps wait for.
        exchanges: blocks in which lanes of a warp exchange values: they begin there together.
        places: how many instructions of each block come from which line of source.
    """

    kernel: Kernel
    blocks: list[Callable[..., Any] | None]
    registers: dict[str, int]
    trips: Trips
    exchanges: set[int]
    places: list[Counter[str]]
    source: str


def translate(kernel: Kernel) -> Program:
    """Translate all blocks of a kernel."""
    flow = _Flow(kernel)
    numbers = {name: i for i, name in enumerate(sorted(set().union(*flow.live_in)))}
    namespace: dict[str, Any] = {"np": np, "DONE": DONE, **vars(floats), **vars(arithmetic)}
    constants: dict[tuple[str, int], str] = {}
    sources = []
    for number, block in enumerate(kernel.blocks):
        if not block[0].is_barrier:
            sources.append(_Block(kernel, number, flow, numbers, constants).source())
    for (dtype, bits), name in constants.items():
        namespace[name] = np.array(bits, f"u{dtype[1:]}").view(dtype)[()] if dtype != "b1" else np.bool_(bits)
    source = "\n".join(sources)
    exec(compile(source, f"<{kernel.name}.ptx>", "exec"), namespace)
    blocks = [namespace.get(f"block_{number}") for number in range(len(kernel.blocks))]
    places = [Counter(instruction.place for instruction in block) for block in kernel.blocks]
    exchanges = {number for number, block in enumerate(kernel.blocks) if any(i.op in EXCHANGES for i in block)}
    return Program(kernel, blocks, numbers, Trips(kernel), exchanges, places, source)


class _Flow:
    """Which registers a block uses from before it, which it sets, and which live into it.

    ``unset`` are those that something reads and nothing sets.
    """

    def __init__(self, kernel: Kernel) -> None:
        count = len(kernel.blocks)
        self.after = [kernel.successors(number) for number in range(count)]
        self.used, self.written = zip(*map(self._uses, kernel.blocks), strict=True)
        self.unset = set().union(*self.used) - set().union(*self.written)
        self.live_in: list[set[str]] = [set() for _ in range(count)]
        changed = True
        while changed:
            changed = False
            for number in reversed(range(count)):
                live = self.used[number] | (self.live_out(number) - self.written[number])
                if live != self.live_in[number]:
                    self.live_in[number], changed = live, True

    def live_out(self, number: int) -> set[str]:
        return set().union(*(self.live_in[after] for after in self.after[number] if after < len(self.live_in)))

    @staticmethod
    def _uses(block: list[Instruction]) -> tuple[set[str], set[str]]:
        used: set[str] = set()
        written: set[str] = set()
        for instruction in block:
            # What a guarded instruction does not set stays as it was.
            used.update(name for name in instruction.read if name not in written)
            if instruction.guard:
                used.update(name for name in instruction.written if name not in written)
            written.update(instruction.written)
        return used, written


@dataclass
class _Block:
    """Translates one block. ``values`` has the names of variables by register and dtype."""

    kernel: Kernel
    number: int
    flow: _Flow
    numbers: dict[str, int]
    constants: dict[tuple[str, int], str]
    values: dict[str, dict[str, str]] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    guard: str | None = None
    variables: int = 0

    def source(self) -> str:
        block = self.kernel.blocks[self.number]
        for name in sorted(self.flow.used[self.number]):
            self._set(name, f"m.read({self.numbers[name]}, lanes)", bits_of(name))
        end = ""
        for instruction in block:
            if instruction.op in ("bra", "brx", "ret"):
                end = self._end(instruction)
            else:
                self._instruction(instruction)
        for name in sorted(self.flow.live_out(self.number) & self.flow.written[self.number]):
            value = self._value(name, bits_of(name))
            self._line(f"m.keep({self.numbers[name]}, lanes, {value})")
        self._line(f"return {end or self._after()}")
        return "\n    ".join([f"def block_{self.number}(m, lanes):", *self.lines])

    def _after(self) -> str:
        return str(self.number + 1) if self.number + 1 < len(self.kernel.blocks) else "DONE"

    def _line(self, text: str) -> None:
        self.lines.append(text)

    # Values

    def _set(self, name: str, expression: str, dtype: str) -> None:
        """Let a register have a value, in all lanes of the block."""
        self.variables += 1
        variable = f"v{self.variables}"
        self._line(f"{variable} = {expression}")
        self.values[name] = {dtype: variable}

    def _constant(self, dtype: str, bits: int) -> str:
        size = 8 * int(dtype[1:]) if dtype != "b1" else 1
        key = dtype, bits & ((1 << size) - 1)
        return self.constants.setdefault(key, f"c{len(self.constants)}")

    def _value(self, operand: str, dtype: str) -> str:
        """An expression for an operand as a dtype: its bits, of which a narrower one has the lower."""
        if operand in _SPECIAL:
            return _SPECIAL[operand] if dtype == "u4" else f"{_SPECIAL[operand]}.astype({dtype!r})"
        if operand[0] == "%":
            return self._register(operand, dtype)
        if parameter := re.fullmatch(r"\w+_param_(\d+)", operand):
            # As if each were 8 bytes behind the one before.
            return self._constant(dtype, 8 * int(parameter[1]))
        if operand == "global_smem":
            return self._constant(dtype, 0)
        if operand[:2].lower() in ("0f", "0d"):
            bits = int(operand[2:], 16)
            if operand[1] in "fF" and dtype == "f8":
                bits = struct.unpack("<Q", struct.pack("<d", struct.unpack("<f", struct.pack("<I", bits))[0]))[0]
            return self._constant(dtype, bits)
        return self._constant(dtype, int(operand.rstrip("U"), 0))

    def _register(self, name: str, dtype: str) -> str:
        known = self.values[name]
        if dtype not in known:
            own, variable = next(iter(known.items()))
            if own == "b1" or dtype == "b1":
                raise NotImplementedError(f"{name} as {dtype}")
            if own[1:] != dtype[1:]:
                variable = f"{self._register(name, bits_of(name))}.astype('u{dtype[1:]}')"
            self.variables += 1
            self._line(f"v{self.variables} = {variable}.view({dtype!r})")
            known[dtype] = f"v{self.variables}"
        return known[dtype]

    def _write(self, name: str, expression: str, dtype: str) -> None:
        """Give a register the result of an instruction, where its guard holds."""
        if name == "_":
            return
        size = bits_of(name)[1:]
        if size != dtype[1:]:
            dtype = f"{dtype[0] if dtype[0] in 'iu' else 'u'}{size}"
            expression = f"({expression}).astype({dtype!r})"
        if self.guard:
            expression = f"np.where({self.guard}, {expression}, {self._value(name, dtype)})"
        self._set(name, expression, dtype)

    # Instructions

    def _begin(self, instruction: Instruction) -> None:
        if "relu" in instruction.parts:
            raise NotImplementedError(".".join(instruction.parts))
        self.guard = None
        if instruction.guard:
            self.guard = ("~" if instruction.negated else "") + self._value(instruction.guard, "b1")
        # The halves of a register may be put together though nobody reads one of them.
        unset = self.flow.unset.intersection(instruction.read)
        if instruction.op != "mov" or len(unset) == len(set(instruction.read)):
            for name in sorted(unset):
                self._line(f"m.unset({name!r}, {instruction.place!r})")

    def _end(self, instruction: Instruction) -> str:
        self._begin(instruction)
        if instruction.op == "brx":
            blocks = [self.kernel.labels[label] for label in self.kernel.tables[instruction.operands[1]]]
            return f"m.choose({blocks}, {self._value(instruction.operands[0], 'u4')})"
        target = "DONE" if instruction.op == "ret" else str(self.kernel.labels[instruction.operands[0]])
        return f"m.branch({self.guard}, {target}, {self._after()})" if self.guard else target

    def _instruction(self, instruction: Instruction) -> None:
        self._begin(instruction)
        special: Callable[[Instruction], None] | None = getattr(self, f"_{instruction.op}", None)
        if special is not None:
            special(instruction)
        elif instruction.op in _PURE:
            self._result(instruction, _PURE[instruction.op])
        elif instruction.op not in ("bar", "barrier", "membar", "fence"):
            raise NotImplementedError(" ".join([".".join(instruction.parts), *instruction.operands]))

    def _result(self, instruction: Instruction, template: str, dtype: str = "") -> None:
        """Write what an expression gives of operands that have the instruction's type."""
        if len(set(re.findall(r"{\d}", template))) != len(instruction.operands) - 1:
            raise NotImplementedError(" ".join([".".join(instruction.parts), *instruction.operands]))
        if instruction.type in ("bf16", "f16") and instruction.parts[-2] == "f32":
            # Of sm_100 and later: all operands but the last one are narrower than the result.
            *narrow, last = instruction.operands[1:]
            values = [f"{self._number(operand, instruction.type)}.astype('f4')" for operand in narrow]
            self._write(instruction.operands[0], template.format(*values, self._value(last, "f4")), "f4")
            return
        own = dtype_of(instruction.type)
        if own[0] == "i" and instruction.op in ("add", "sub", "neg", "not"):
            own = f"u{own[1:]}"
        if instruction.type.startswith("bf16") or "x2" in instruction.type:
            operands = "abc"[: len(instruction.operands) - 1]
            function = f"lambda {', '.join(operands)}: {template.format(*operands)}"
            kind = instruction.type.replace("s", "i")
            template = f"packed({function}, {kind!r}, {', '.join(f'{{{k}}}' for k in range(len(operands)))})"
        values = [self._value(operand, own) for operand in instruction.operands[1:]]
        self._write(instruction.operands[0], template.format(*values), dtype or own)

    def _mov(self, instruction: Instruction) -> None:
        target, source = instruction.operands
        dtype = dtype_of(instruction.type)
        if target[0] == "{":
            parts = names(target)
            width = int(dtype[1:]) // len(parts)
            for k, part in enumerate(parts):
                shift = self._constant(dtype, 8 * width * k)
                self._write(part, f"({self._value(source, dtype)} >> {shift}).astype('u{width}')", f"u{width}")
        elif source[0] == "{":
            parts = names(source)
            width = int(dtype[1:]) // len(parts)
            pieces = [
                f"({self._value(part, f'u{width}')}.astype({dtype!r}) << {self._constant(dtype, 8 * width * k)})"
                for k, part in enumerate(parts)
            ]
            self._write(target, " | ".join(pieces), dtype)
        elif source in self.values and not self.guard and bits_of(source) == bits_of(target):
            self.values[target] = dict(self.values[source])
        else:
            self._write(target, self._value(source, dtype), dtype)

    def _selp(self, instruction: Instruction) -> None:
        target, yes, no, condition = instruction.operands
        dtype = dtype_of(instruction.type)
        values = self._value(condition, "b1"), self._value(yes, dtype), self._value(no, dtype)
        self._write(target, "np.where({}, {}, {})".format(*values), dtype)

    def _setp(self, instruction: Instruction) -> None:
        comparison, kind = instruction.parts[1], instruction.type
        for place, target in enumerate(instruction.written):
            left, right = (self._number(operand, kind, place) for operand in instruction.operands[1:3])
            if comparison in ("num", "nan"):
                test = f"(np.isnan({left}) | np.isnan({right}))"
                test = f"~{test}" if comparison == "num" else test
            elif comparison not in _COMPARE:
                test = f"(({left} {_COMPARE[comparison[:-1]]} {right}) | np.isnan({left}) | np.isnan({right}))"
            else:
                test = f"({left} {_COMPARE[comparison]} {right})"
                if comparison == "ne" and kind[0] in "fb" and kind not in ("b16", "b32", "b64"):
                    test = f"({test} & ~np.isnan({left}) & ~np.isnan({right}))"
            if instruction.parts[2] in _LOGIC:
                test = f"{test} {_LOGIC[instruction.parts[2]]} {self._value(instruction.operands[3], 'b1')}"
            self._write(target, test, "b1")

    def _number(self, operand: str, kind: str, place: int = 0) -> str:
        """An operand, or one half of it, as what its type says, bfloat16 as float32."""
        value = self._value(operand, dtype_of(kind))
        if kind in ("f16x2", "bf16x2"):
            return f"half({value}, {place}, {kind!r})"
        return f"bfloat16_to_float32({value})" if kind == "bf16" else value

    def _shl(self, instruction: Instruction) -> None:
        target, value, count = instruction.operands
        dtype = dtype_of(instruction.type)
        left = instruction.op == "shl"
        if count[0] != "%" and int(count, 0) < 8 * int(dtype[1:]):
            shifted = f"{self._value(value, dtype)} {'<<' if left else '>>'} {self._constant(dtype, int(count, 0))}"
        else:
            name = "shift_left" if left else "shift_right"
            shifted = f"{name}({self._value(value, dtype)}, {self._value(count, 'u4')})"
        self._write(target, shifted, dtype)

    _shr = _shl

    def _bfe(self, instruction: Instruction) -> None:
        target, value, position, length = instruction.operands
        dtype = dtype_of(instruction.type)
        values = self._value(value, dtype), self._value(position, "u4"), self._value(length, "u4")
        self._write(target, "extract({}, {}, {})".format(*values), dtype)

    def _prmt(self, instruction: Instruction) -> None:
        self._result(instruction, "permute({0}, {1}, {2})")

    def _popc(self, instruction: Instruction) -> None:
        target, source = instruction.operands
        value = self._value(source, dtype_of(instruction.type))
        self._write(target, f"np.bitwise_count({value}).astype('u4')", "u4")

    def _cvt(self, instruction: Instruction) -> None:
        target, *sources = instruction.operands
        to, source = instruction.parts[-2:]
        if to in ("bf16x2", "f16x2"):
            high, low = (self._narrow(self._value(operand, "f4"), to[:-2]) for operand in sources)
            self._write(target, f"({high}.astype('u4') << {self._constant('u4', 16)}) | {low}.astype('u4')", "u4")
            return
        value = self._number(sources[0], source)
        if to == "tf32":
            self._write(target, f"rounded({value})", "f4")
            return
        rounding = next((_ROUNDING[part] for part in instruction.parts if part in _ROUNDING), None)
        if to == "bf16":
            self._write(target, self._narrow(value, to), "u2")
        elif source[0] in "fb" and to[0] in "su":
            self._write(target, f"float_to_integer({value}, {rounding}, {dtype_of(to)!r})", dtype_of(to))
        else:
            self._write(target, f"{rounding or ''}({value}).astype({dtype_of(to)!r})", dtype_of(to))

    @staticmethod
    def _narrow(value: str, to: str) -> str:
        return f"float32_to_bfloat16({value})" if to == "bf16" else f"{value}.astype('f2').view('u2')"

    def _mul(self, instruction: Instruction) -> None:
        dtype = dtype_of(instruction.type)
        if "wide" in instruction.parts:
            wide = f"{dtype[0]}{2 * int(dtype[1:])}"
            sum_of = f" + {self._value(instruction.operands[3], wide)}" if instruction.op == "mad" else ""
            a, b = (f"{self._value(operand, dtype)}.astype({wide!r})" for operand in instruction.operands[1:3])
            self._write(instruction.operands[0], f"{a} * {b}{sum_of}", wide)
            return
        product = "multiply_high({0}, {1})" if "hi" in instruction.parts else "{0} * {1}"
        self._result(instruction, product + (" + {2}" if instruction.op == "mad" else ""))

    _mad = _mul

    def _div(self, instruction: Instruction) -> None:
        if instruction.type[0] == "f":
            self._result(instruction, "{0} / {1}")
        else:
            self._result(instruction, "divide({0}, {1})" if instruction.op == "div" else "remainder({0}, {1})")

    _rem = _div

    def _min(self, instruction: Instruction) -> None:
        name = {"min": "minimum", "max": "maximum"}[instruction.op]
        if "f" in instruction.type and "NaN" not in instruction.parts:
            name = f"f{instruction.op}"
        pair = f"np.{name}({{0}}, {{1}})"
        # That for sm_100 and later may have three operands.
        self._result(instruction, pair if len(instruction.operands) == 3 else f"np.{name}({pair}, {{2}})")

    _max = _min

    def _rcp(self, instruction: Instruction) -> None:
        approximate = instruction.type == "f64" and "approx" in instruction.parts
        self._result(instruction, "reciprocal_of_high_half({0})" if approximate else "{0}.dtype.type(1) / {0}")

    # Memory and other lanes

    def _address(self, operand: str) -> str:
        found = re.match(r"\[\s*(%\w+|global_smem)\s*(?:\+\s*(-?\d+))?\s*\]$", operand)
        if found is None:
            raise NotImplementedError(f"address {operand}")
        if found[1] == "global_smem" or bits_of(found[1]) == "u8":
            base = self._value(found[1], "i8")
        else:
            base = f"{self._value(found[1], 'u4')}.astype('i8')"
        return f"{base} + {self._constant('i8', int(found[2]))}" if int(found[2] or 0) else base

    def _assign(self, targets: list[str], call: str, dtype: str) -> None:
        """Write the arrays that a call gives for several registers."""
        self.variables += 1
        found = f"v{self.variables}"
        self._line(f"{found} = {call}")
        for k, target in enumerate(targets):
            self._write(target, f"{found}[{k}]", dtype)

    def _ld(self, instruction: Instruction) -> None:
        targets, dtype = names(instruction.operands[0]), dtype_of(instruction.type)
        if instruction.parts[1] == "param":
            number = re.match(r"\[\w+_param_(\d+)\]$", instruction.operands[1])
            place = number[1] if number else f"({self._address(instruction.operands[1])}) // 8"
            self._write(targets[0], f"m.parameter({place}, {dtype!r})", dtype)
            return
        call = f"m.load_{_space(instruction)}(lanes, {self._address(instruction.operands[1])}, "
        self._assign(targets, f"{call}{self.guard}, {dtype!r}, {len(targets)}, {instruction.place!r})", dtype)

    def _st(self, instruction: Instruction) -> None:
        size = dtype_of(instruction.type)[1:]
        values = ", ".join(self._value(name, f"u{size}") for name in names(instruction.operands[1]))
        address = self._address(instruction.operands[0])
        call = f"m.store_{_space(instruction)}(lanes, {address}, {self.guard}, {size}, "
        self._line(f"{call}[{values}], {instruction.place!r})")

    def _atom(self, instruction: Instruction) -> None:
        if _space(instruction) == "shared":
            raise NotImplementedError(".".join(instruction.parts))
        operands = instruction.operands if instruction.op == "atom" else ("_", *instruction.operands)
        action = next(part for part in instruction.parts if part in ("add", "min", "max", "exch", "cas", *_LOGIC))
        dtype = dtype_of(instruction.type)
        address, targets = self._address(operands[1]), names(operands[0])
        for k, given in enumerate(zip(*map(names, operands[2:]), strict=True)):
            values = ", ".join(self._value(operand, dtype) for operand in given)
            place = f"{address} + {self._constant('i8', k * int(dtype[1:]))}" if k else address
            call = f"m.atomic(lanes, {place}, {self.guard}, {action!r}, [{values}], {dtype!r}, {instruction.place!r})"
            self._assign([targets[k % len(targets)]], f"{call},", dtype)

    _red = _atom

    def _shfl(self, instruction: Instruction) -> None:
        target, value, b, c, mask = instruction.operands
        values = self._value(value, "u4"), self._value(b, "i4"), self._value(c, "i4"), self._value(mask, "u4")
        call = "m.shuffle(lanes, {}, {!r}, {}, {}, {}, {}, {!r})"
        value, b, c, mask = values
        self._write(target, call.format(value, instruction.parts[2], b, c, mask, self.guard, instruction.place), "u4")

    def _vote(self, instruction: Instruction) -> None:
        target, predicate, mask = instruction.operands
        value = ("~" if predicate[0] == "!" else "") + self._value(predicate.lstrip("!"), "b1")
        action = instruction.parts[2]
        call = f"m.vote(lanes, {value}, {action!r}, {self._value(mask, 'u4')}, {self.guard}, {instruction.place!r})"
        self._write(target, call, "u4" if action == "ballot" else "b1")

    def _redux(self, instruction: Instruction) -> None:
        target, value, mask = instruction.operands
        dtype = dtype_of(instruction.type)
        action, place = instruction.parts[2], instruction.place
        values = f"{self._value(value, dtype)}, {action!r}, {self._value(mask, 'u4')}"
        self._write(target, f"m.reduce(lanes, {values}, {self.guard}, {place!r})", dtype)

    def _ldmatrix(self, instruction: Instruction) -> None:
        targets = names(instruction.operands[0])
        address, turned = self._address(instruction.operands[1]), "trans" in instruction.parts
        self._assign(targets, f"m.load_matrix(lanes, {address}, {len(targets)}, {turned}, {instruction.place!r})", "u4")

    def _stmatrix(self, instruction: Instruction) -> None:
        values = ", ".join(self._value(name, "u4") for name in names(instruction.operands[1]))
        address = self._address(instruction.operands[0])
        self._line(f"m.store_matrix(lanes, {address}, [{values}], {instruction.place!r})")

    def _mma(self, instruction: Instruction) -> None:
        kind = instruction.parts[7]
        if instruction.parts[4:6] != ("row", "col") or kind not in ("tf32", "bf16", "f16", "f64"):
            raise NotImplementedError(".".join(instruction.parts))
        a, b, c = (
            [self._value(name, bits_of(name)) for name in names(operand)] for operand in instruction.operands[1:]
        )
        call = f"m.multiply(lanes, [{', '.join(a)}], [{', '.join(b)}], [{', '.join(c)}], {kind!r}, {self.guard}, "
        self._assign(names(instruction.operands[0]), f"{call}{instruction.place!r})", f"u{8 if kind == 'f64' else 4}")

    def _wgmma(self, instruction: Instruction) -> None:
        name = ".".join(instruction.parts)
        raise NotExecutedError(f"{name} is not executed here, only on a device: compile for sm_80 or sm_120")

    def _cp(self, instruction: Instruction) -> None:
        what = instruction.copies
        if what == "commit_group":
            self._line("m.commit(lanes)")
        elif what in ("wait_group", "wait_all"):
            self._line(f"m.arrive(lanes, {instruction.newest})")
        elif what in ("ca", "cg"):
            target, source = map(self._address, instruction.operands[:2])
            size, read = int(instruction.operands[2], 0), self._value(instruction.operands[-1], "u4")
            call = f"m.copy(lanes, {target}, {source}, {self.guard}, {size}, {read}, {instruction.place!r})"
            self._line(call)
        else:
            raise NotExecutedError(f"{'.'.join(instruction.parts)} is not executed here, only on a device")
