"""Reads PTX as Triton writes it: one kernel, its basic blocks, and the source line of every instruction."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

_ENTRY = re.compile(r"\.visible \.entry (\w+)\((.*?)\)\s*\n\.(?:reqntid|maxntid) (\d+)", re.DOTALL)
_LOC = re.compile(r"\.loc\s+(\d+) (\d+)")
_GUARD = re.compile(r"@(!?)(%p\d+)\s+(.*)")
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")
_WITHOUT_RESULT = ("st", "red", "stmatrix", "cp", "wgmma", "bra", "brx", "ret", "bar", "barrier", "membar", "fence")
_REGISTER = re.compile(r"%[a-z]+\d+")


@dataclass(frozen=True)
class Instruction:
    """``@guard op.parts operands``; ``place`` is the line of the kernel that it comes from, ``rows/_triton.py:150``."""

    guard: str | None
    negated: bool
    parts: tuple[str, ...]
    operands: tuple[str, ...]
    place: str

    @property
    def op(self) -> str:
        return self.parts[0]

    @property
    def type(self) -> str:
        return self.parts[-1]

    @property
    def is_barrier(self) -> bool:
        return self.parts[0] in ("bar", "barrier") and "warp" not in self.parts

    @property
    def ends_block(self) -> bool:
        return self.op in ("bra", "brx", "ret") or self.is_barrier

    @property
    def copies(self) -> str:
        """Of what has to do with copies to shared memory: ``ca``, ``cg``, ``commit_group``, ``wait_group``."""
        return self.parts[2] if self.parts[:2] == ("cp", "async") else ""

    @property
    def newest(self) -> int:
        """How many groups of copies it does not wait for; -1 for not even those that are not closed."""
        return int(self.operands[0]) if self.operands else -1

    @property
    def flops(self) -> int:
        """Products and sums of a product of matrices, by all lanes of a warp."""
        shape = re.fullmatch(r"m(\d+)n(\d+)k(\d+)", self.parts[3]) if self.op == "mma" else None
        return 2 * math.prod(map(int, shape.groups())) if shape else 0

    @cached_property
    def written(self) -> list[str]:
        """Registers that it sets."""
        if self.op in _WITHOUT_RESULT:
            return []
        # The second result is that of the upper halves, or none that Triton uses.
        both = self.type in ("f16x2", "bf16x2")
        return _REGISTER.findall(self.operands[0] if both else self.operands[0].partition("|")[0])

    @cached_property
    def read(self) -> list[str]:
        """Registers whose values it uses, its guard too."""
        operands = self.operands if self.op in _WITHOUT_RESULT else self.operands[1:]
        registers = [name for operand in operands for name in _REGISTER.findall(operand)]
        return [*registers, *([self.guard] if self.guard else [])]


@dataclass
class Kernel:
    """A kernel. ``labels`` has the numbers of the blocks, ``tables`` the blocks that an indexed branch may go to."""

    name: str
    threads: int
    blocks: list[list[Instruction]]
    labels: dict[str, int]
    tables: dict[str, list[str]] = field(default_factory=dict)

    def successors(self, number: int) -> list[int]:
        last = self.blocks[number][-1]
        after = [number + 1] if number + 1 < len(self.blocks) else []
        if last.op == "bra":
            return [self.labels[last.operands[0]], *(after if last.guard else [])]
        if last.op == "brx":
            return [self.labels[label] for label in self.tables[last.operands[1]]]
        if last.op == "ret":
            return after if last.guard else []
        return after


def names(operand: str) -> list[str]:
    """The names in an operand: ``{%r1, %r2}`` or ``%r1``; ``_`` is of a value that is dropped."""
    return ["_" if name.strip() == "tmp" else name.strip() for name in operand.strip("{} ").split(",")]


def parse(ptx: str) -> Kernel:
    """Read one kernel."""
    entry = _ENTRY.search(ptx)
    if entry is None:
        raise ValueError("no kernel with a fixed number of threads in the PTX")
    files = dict(re.findall(r'\.file\s+(\d+) "([^"]*)"', ptx))
    kernel = Kernel(entry[1], int(entry[3]), [], {})
    block: list[Instruction] = []
    waiting: list[str] = []

    def end_block() -> None:
        nonlocal block
        if block:
            kernel.blocks.append(block)
            block = []

    for text, place in _statements(ptx[ptx.index("{", entry.end()) + 1 :], files):
        if text.endswith(":"):
            end_block()
            kernel.labels[text[:-1]] = len(kernel.blocks)
            waiting.append(text[:-1])
        elif text.startswith(".branchtargets"):
            kernel.tables[waiting[-1]] = names(text.removeprefix(".branchtargets"))
        else:
            instruction = _instruction(text, place)
            if instruction.is_barrier:
                end_block()
            block.append(instruction)
            if instruction.ends_block:
                end_block()
    end_block()
    return kernel


def _statements(body: str, files: dict[str, str]) -> Iterator[tuple[str, str]]:
    """(statement or label, place in the source) up to the end of the kernel."""
    place, rest = "?", ""
    for raw in body.splitlines():
        if raw.startswith("}"):
            return
        line = raw.partition("//")[0].strip()
        if found := _LOC.match(line):
            place = f"{files.get(found[1], '?').rpartition('/kernels/')[2]}:{found[2]}"
            continue
        if label := re.match(r"([$\w]+:)(?:\s+|$)", line):
            yield label[1], place
            line = line[label.end() :]
        *whole, rest = f"{rest} {line}".split(";")
        for statement in whole:
            text = " ".join(statement.split()).removeprefix("{ ")
            if text.startswith(".branchtargets") or (text and text[0] not in ".{}"):
                yield text, place
        rest = "" if rest.strip() in ("{", "}") else rest


def _instruction(text: str, place: str) -> Instruction:
    guard = _GUARD.match(text)
    op, _, rest = (guard[3] if guard else text).partition(" ")
    operands = tuple(operand.strip() for operand in _OPERAND.findall(rest))
    return Instruction(guard[2] if guard else None, bool(guard and guard[1]), tuple(op.split(".")), operands, place)
