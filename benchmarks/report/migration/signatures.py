"""The arguments and public members of classes, as plain data that two libraries can be compared by."""

from __future__ import annotations

import enum
import inspect
from typing import Any

REQUIRED = "required"

Entry = dict[str, Any]
"""A name: its ``kind``; ``args`` with their defaults, and ``passes_on`` if a method takes any keyword.

A class has ``bases`` and ``members`` as well, which are such entries by name.
"""


def default_of(parameter: inspect.Parameter) -> str:
    """The default of an argument, in words that do not depend on the process."""
    value = parameter.default
    if value is inspect.Parameter.empty:
        return REQUIRED
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, type) or callable(value):
        return str(getattr(value, "__name__", type(value).__name__))
    text = repr(value)
    return type(value).__name__ if " at 0x" in text else text


def arguments(function: Any) -> dict[str, str]:
    """Argument names with their defaults, without ``self``, ``*args`` and ``**kwargs``."""
    return {
        name: default_of(parameter)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) and name not in ("self", "cls")
    }


def passes_on(function: Any) -> bool:
    """Whether it takes any keyword."""
    parameters = inspect.signature(function).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def constructor(cls: type) -> dict[str, str]:
    """The arguments of a constructor, with those of the base's where it passes ``**kwargs`` on."""
    found: dict[str, str] = {}
    for base in cls.__mro__:
        own = vars(base).get("__init__")
        if own is None or base is object:
            continue
        found |= {name: default for name, default in arguments(own).items() if name not in found}
        if not passes_on(own):
            break
    return found


def member(cls: type, name: str) -> Entry:
    """What a class has under ``name``."""
    found = inspect.getattr_static(cls, name)
    if isinstance(found, (staticmethod, classmethod)):
        found = found.__func__
    if inspect.isfunction(found):
        return {"kind": "method", "args": arguments(found), **({"passes_on": True} if passes_on(found) else {})}
    return {"kind": "property" if isinstance(found, property) else "attribute"}


def public_members(cls: type, package: str) -> dict[str, Entry]:
    """All that the classes of ``package`` among a class's bases define, without names that begin with ``_``."""
    names = {
        name
        for base in cls.__mro__
        if base.__module__.partition(".")[0] == package
        for name in (*vars(base), *getattr(base, "__annotations__", ()))
        if not name.startswith("_")
    }
    return {name: member(cls, name) for name in sorted(names) if hasattr(cls, name)}


def described(value: Any, package: str, bases: set[str]) -> Entry:
    """A class with its members, a function with its arguments, or another value."""
    if isinstance(value, type):
        above = [base.__name__ for base in value.__mro__[1:] if base.__name__ in bases]
        return {"kind": "class", "bases": above, "args": constructor(value), "members": public_members(value, package)}
    return {"kind": "function", "args": arguments(value)} if inspect.isfunction(value) else {"kind": "value"}
