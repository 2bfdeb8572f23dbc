"""Names that the compiler does not carry through a loop, though Python does."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from triton.compiler.code_generator import CodeGenerator, flatten_values_to_ir
from triton.language.core import base_value

Found = Callable[[str, int, str], None]
"""Told the file, the line and the names of an alias."""


def _handles(value: Any) -> list[Any]:
    return list(flatten_values_to_ir([value])) if isinstance(value, base_value) else []


def watch_aliases(found: Found) -> Callable[[], None]:
    """Report names that enter a loop as another one and become it there, of all that is compiled from now on.

    Triton carries a name through a loop if its value after the body is another one than before the loop. In
    ``below = start`` and then, in the loop, ``below = start; start += 1`` both values are that of ``start`` before the
    loop: ``below`` is not carried, and keeps that value for ever. Returns a function that ends the watch.
    """
    original = CodeGenerator._find_carries

    def find_carries(
        self: CodeGenerator, node: ast.For | ast.While, liveins: dict[str, Any], *args: Any, **kw: Any
    ) -> Any:
        entering = {name: _handles(value) for name, value in liveins.items()}
        result = original(self, node, liveins, *args, **kw)
        carried = result[0]
        stored = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        for name in stored & entering.keys() - set(carried):
            for other in carried:
                if entering[name] and entering[name] == entering[other]:
                    found(self.file_name, self.begin_line + node.lineno, f"{name} enters the loop as {other}")
        return result

    CodeGenerator._find_carries = find_carries

    def restore() -> None:
        CodeGenerator._find_carries = original

    return restore
