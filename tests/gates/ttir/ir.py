"""TTIR text, as the compiler prints it with locations, into a tree of operations."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

_NESTED = r"(?:[^()]|\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))*"
_LOC = re.compile(rf"\s*loc\((?P<loc>{_NESTED})\)\s*$")
_RESULT = re.compile(r"^(%[\w.$-]+(?::\d+)?(?:, %[\w.$-]+(?::\d+)?)*) = (.*)$")
_NAME = re.compile(r'^"?([a-z_]+\.[a-z_.0-9]+)"?(.*)$')
_VALUE = re.compile(r"%[\w.$-]+(?:#\d+)?")


@dataclass(frozen=True)
class Type:
    """``shape`` is None for a scalar; ``elem`` is i1 .. i64, f16, bf16, f32, f64, or ptr:<element>."""

    shape: tuple[int, ...] | None
    elem: str

    @property
    def bits(self) -> int:
        return 64 if self.is_pointer else int(re.sub(r"\D", "", self.elem))

    @property
    def is_pointer(self) -> bool:
        return self.elem.startswith("ptr:")

    @property
    def is_integer(self) -> bool:
        return self.elem[0] == "i"

    def of(self, elem: str) -> Type:
        return replace(self, elem=elem)

    def pointee(self) -> Type:
        return self.of(parse_type(self.elem.removeprefix("ptr:")).elem)


def parse_type(text: str) -> Type:
    """A scalar, a pointer or a tensor of these."""
    text = text.strip()
    found = re.fullmatch(r"tensor<((?:\d+x)*)(.+)>", text)
    if found:
        return Type(tuple(int(n) for n in found[1].split("x") if n), parse_type(found[2]).elem)
    found = re.fullmatch(r"!tt\.ptr<(.+?)(?:, \d+)?>", text)
    if found:
        return Type(None, "ptr:" + found[1])
    if re.fullmatch(r"i\d+|f16|bf16|f32|f64", text):
        return Type(None, text)
    raise ValueError(f"unknown type {text!r}")


def split_top(text: str, separator: str = ",") -> list[str]:
    """``text`` cut at separators that no bracket encloses."""
    parts, depth, start, i = [], 0, 0, 0
    while i < len(text):
        c = text[i]
        if c in "([{<":
            depth += 1
        elif c in ")]}" or (c == ">" and text[i - 1] != "-"):
            depth -= 1
        elif depth == 0 and text.startswith(separator, i):
            parts.append(text[start:i].strip())
            start = i + len(separator)
        i += 1
    rest = text[start:].strip()
    return [*parts, rest] if rest or parts else []


def closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at ``start``."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    raise ValueError(f"unbalanced: {text}")


@dataclass
class Region:
    args: list[tuple[str, Type]] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)


@dataclass
class Op:
    """``text`` is what follows the name; of an operation with regions, without these."""

    name: str
    results: list[str]
    text: str
    regions: list[Region] = field(default_factory=list)
    loc: str = ""

    @property
    def signature(self) -> str:
        """What follows the last `` : ``."""
        return split_top(self.text, " : ")[-1]

    @property
    def type(self) -> Type:
        return parse_type(self.signature)

    @property
    def operands(self) -> list[str]:
        """The values before the types."""
        return _VALUE.findall(split_top(self.text, " : ")[0])

    @property
    def mentioned(self) -> list[str]:
        return _VALUE.findall(self.text)


@dataclass
class Function:
    name: str
    args: list[tuple[str, Type]]
    body: Region


Place = tuple[str, int]
"""A file and a line."""


class Locations:
    """``#locN`` to the places that it names, innermost call first."""

    def __init__(self, lines: list[str]) -> None:
        found = [re.fullmatch(r"(#loc\d*) = loc\((.*)\)", line) for line in lines]
        self._text = {match[1]: match[2] for match in found if match}

    def places(self, loc: str) -> tuple[Place, ...]:
        loc = loc.strip()
        if loc.startswith("#"):
            return self.places(self._text[loc]) if loc in self._text else ()
        found = re.fullmatch(r'"(.*)":(\d+):\d+(?: to .*)?', loc)
        if found:
            return ((found[1], int(found[2])),)
        found = re.fullmatch(r"callsite\((.*) at (#loc\d*)\)", loc)
        if found:
            return self.places(found[1]) + self.places(found[2])
        found = re.fullmatch(r'"[^"]*"\((.*)\)', loc)
        if found:
            return self.places(found[1])
        found = re.fullmatch(r"fused(?:<.*>)?\[(.*)\]", loc)
        return self.places(split_top(found[1])[0]) if found else ()


def _parameters(line: str) -> list[tuple[str, Type]]:
    """The arguments in the first parentheses of a line."""
    start = line.find("(")
    found = []
    for part in split_top(line[start + 1 : closing(line, start)]) if start >= 0 else []:
        text = re.sub(r"\s*\{.*\}\s*$", "", _LOC.sub("", part))
        name, _, kind = text.partition(":")
        found.append((name.strip(), parse_type(kind)))
    return found


def _parse_op(line: str) -> Op:
    """An operation on one line, or the head of one with regions, which ends in a brace."""
    loc = ""
    found = None if line.endswith("{") else _LOC.search(line)
    if found:
        loc, line = found["loc"], line[: found.start()]
    results: list[str] = []
    found = _RESULT.match(line)
    if found:
        for part in found[1].split(", "):
            name, _, count = part.partition(":")
            results += [f"{name}#{i}" for i in range(int(count))] if count else [name]
        line = found[2]
    found = _NAME.match(line)
    if not found:
        raise ValueError(f"can't parse {line!r}")
    return Op(found[1], results, found[2].strip().removesuffix("{").strip(), loc=loc)


def parse(text: str) -> tuple[Function, Locations]:
    """The one function of a module, and the places of its operations."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    function: Function | None = None
    regions: list[Region] = []
    open_ops: list[Op] = []

    def open_region() -> None:
        regions.append(Region())
        open_ops[-1].regions.append(regions[-1])

    for line in lines:
        if line.startswith(("#", "module", "//")):
            continue
        if line.startswith("tt.func"):
            if function is not None:
                raise ValueError("more than one function: calls that are not inlined are not supported")
            function = Function(line[line.index("@") + 1 : line.index("(")], _parameters(line), Region())
            regions.append(function.body)
        elif line.startswith("^"):
            regions[-1].args = _parameters(line)
        elif line.startswith("}"):
            if not open_ops:
                continue  # of the function, or of the module
            regions.pop()
            rest = line[1:].strip()
            if rest.endswith("{"):  # } else {, } do {, }, {
                open_region()
                continue
            op = open_ops.pop()
            found = _LOC.search(rest)
            if found:
                op.loc, rest = found["loc"], rest[: found.start()]
            op.text += " " + rest
        else:
            op = _parse_op(line)
            regions[-1].ops.append(op)
            if line.endswith("{"):
                open_ops.append(op)
                open_region()
    if function is None:
        raise ValueError("no function")
    _rename_apart(function)
    return function, Locations([line for line in lines if line.startswith("#loc")])


def _rename_apart(function: Function) -> None:
    """Give every value a name of its own: the printer uses one again in regions side by side."""
    taken = {name for name, _ in function.args}

    def fresh(name: str) -> str:
        base, n = name, 0
        while name in taken:
            n += 1
            name = f"{base}.r{n}"
        taken.add(name)
        return name

    def visit(region: Region, scope: dict[str, str]) -> None:
        for op in region.ops:
            inner = dict(scope)

            def bind(found: re.Match[str], inner: dict[str, str] = inner) -> str:
                inner[found[1]] = fresh(found[1])
                return f"<def>{inner[found[1]][1:]} = "

            # The head of a loop binds values of its own: `%i = %low`, `iter_args(%x = %start)`.
            head = re.sub(r"(%[\w.$-]+) = ", bind, op.text) if op.regions else op.text
            op.text = re.sub(r"%[\w.$-]+", lambda m: scope.get(m[0], m[0]), head).replace("<def>", "%")
            for part in op.regions:
                own = dict(inner)
                for i, (name, kind) in enumerate(part.args):
                    own[name] = fresh(name)
                    part.args[i] = own[name], kind
                visit(part, own)
            new = {base: fresh(base) for base in dict.fromkeys(r.partition("#")[0] for r in op.results)}
            scope.update(new)
            op.results = [new[r.partition("#")[0]] + "".join(r.partition("#")[1:]) for r in op.results]

    visit(function.body, {name: name for name, _ in function.args})
