"""The arguments and public members of classes, as plain data that two libraries can be compared by."""

from __future__ import annotations

import enum
import inspect
from typing import Any, TypedDict

REQUIRED = "required"


class Member(TypedDict, total=False):
    """A method, a property or an attribute. Only methods have arguments."""

    kind: str
    args: dict[str, str]
    passes_on: bool  # whether it takes any keyword


class Name(TypedDict, total=False):
    """A public name. Only classes have bases and members; a class's arguments are those of its constructor."""

    kind: str
    area: str
    bases: list[str]
    args: dict[str, str]
    members: dict[str, Member]


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
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {
        name: default_of(parameter)
        for name, parameter in parameters.items()
        if parameter.kind in plain and name not in ("self", "cls")
    }


def constructor(cls: type) -> dict[str, str]:
    """The arguments of a constructor, with those of the base's where it passes ``**kwargs`` on."""
    found: dict[str, str] = {}
    for base in cls.__mro__:
        own = vars(base).get("__init__")
        if own is None or base is object:
            continue
        for name, default in arguments(own).items():
            found.setdefault(name, default)
        kinds = [parameter.kind for parameter in inspect.signature(own).parameters.values()]
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            break
    return found


def member(cls: type, name: str) -> Member:
    """What a class has under ``name``."""
    found = inspect.getattr_static(cls, name)
    if isinstance(found, (staticmethod, classmethod)):
        found = found.__func__
    if inspect.isfunction(found):
        kinds = [parameter.kind for parameter in inspect.signature(found).parameters.values()]
        more: Member = {"passes_on": True} if inspect.Parameter.VAR_KEYWORD in kinds else {}
        return {"kind": "method", "args": arguments(found), **more}
    return {"kind": "property" if isinstance(found, property) else "attribute"}


def public_members(cls: type, package: str) -> dict[str, Member]:
    """All that the classes of ``package`` among a class's bases define, without names that begin with ``_``."""
    names = {
        name
        for base in cls.__mro__
        if base.__module__.partition(".")[0] == package
        for name in (*vars(base), *getattr(base, "__annotations__", ()))
        if not name.startswith("_")
    }
    return {name: member(cls, name) for name in sorted(names) if hasattr(cls, name)}


def described(value: Any, package: str, bases: set[str]) -> Name:
    """A class with its members, a function with its arguments, or another value."""
    if isinstance(value, type):
        above = [base.__name__ for base in value.__mro__[1:] if base.__name__ in bases]
        return {
            "kind": "class",
            "bases": above,
            "args": constructor(value),
            "members": public_members(value, package),
        }
    if inspect.isfunction(value):
        return {"kind": "function", "args": arguments(value)}
    return {"kind": "value"}
