"""Links in the API reference: the docstrings' ``:class:`Name``` and ``:meth:`name``` become links of the site.

A Griffe extension: mkdocstrings reads the sources with Griffe, and shows the docstrings that this leaves.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from griffe import Attribute, Class, Docstring, Extension, Function, Object, Parameters

sys.path.insert(0, str(Path(__file__).parent))
from hooks import ROLE, public_paths

PUBLIC = public_paths()
#: An argument of a docstring whose names go on in the next line, which Griffe does not join.
WRAPPED = re.compile(r"^( {4}(?:[*]{0,2}\w+, )*[*]{0,2}\w+,)\n +", re.MULTILINE)


def linked(docstring: str, owner: str | None, members: set[str], integration: bool) -> str:
    """The docstring with a link for every role that names something in the reference, and code for the others.

    Args:
        docstring: the text.
        owner: public path of the class that it belongs to.
        members: names of that class's members.
        integration: whether short names may be those of another library's classes.
    """

    def link(match: re.Match[str]) -> str:
        name = match[1]
        short = name.rpartition(".")[2] if name.startswith("gpubuf.") else name
        head, _, member = short.partition(".")
        if head in PUBLIC and (short != name or not integration):
            return f"[`{short}`][{PUBLIC[head]}{'.' + member if member else ''}]"
        if owner is not None and short in members:
            return f"[`{short}`][{owner}.{short}]"
        return f"`{short}`"

    return ROLE.sub(link, WRAPPED.sub(r"\1 ", docstring))


def taken_over(kind: Class, loader: Any) -> Docstring | None:
    """The docstring of a class that says ``__doc__ = other.Name.__doc__``."""
    own = kind.members.get("__doc__")
    other = str(own.value).removesuffix(".__doc__") if isinstance(own, Attribute) else ""
    if not other or str(own.value) == other:
        return None
    module, _, name = other.partition(".")
    found = loader.modules_collection[f"{kind.resolve(module)}.{name}" if name else kind.resolve(module)].docstring
    return found and again(found, kind)


def unwrapped(function: Function, loader: Any) -> None:
    """Show a function that says ``@functools.wraps(module.other)`` with the other one's arguments and docstring."""
    for decorator in function.decorators:
        other = re.fullmatch(r"functools\.wraps\((\w+)\.(\w+)\)", str(decorator.value))
        if other is not None:
            found = loader.modules_collection[f"{function.parent.resolve(other[1])}.{other[2]}"]
            function.parameters, function.returns = Parameters(*found.parameters), found.returns
            function.docstring = found.docstring and again(found.docstring, function)


def again(docstring: Docstring, kind: Object) -> Docstring:
    """The docstring as that of another object, read by the same parser."""
    options = {"parser": docstring.parser, "parser_options": docstring.parser_options}
    return Docstring(docstring.value, parent=kind, **options)


class Roles(Extension):
    """Rewrites the docstrings of every object that has one."""

    def on_object(self, *, obj: Object, loader: Any, **kwargs: Any) -> None:
        if obj.docstring is None and isinstance(obj, Class):
            obj.docstring = taken_over(obj, loader)
        if isinstance(obj, Function):
            unwrapped(obj, loader)
        if obj.docstring is None:
            return
        integration = obj.path.startswith("gpubuf.integrations.")
        owner = obj if isinstance(obj, Class) else obj.parent
        public = PUBLIC.get(owner.name) if isinstance(owner, Class) and not integration else None
        members = {name for name, member in owner.members.items() if member.docstring} if public and owner else set()
        obj.docstring.value = linked(obj.docstring.value, public, members, integration)
