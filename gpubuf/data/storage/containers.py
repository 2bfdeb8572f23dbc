"""The containers that a batch may be made of: dicts, tuples, lists and named tuples of tensors, nested."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase, is_tensorclass
from torch import Tensor

Names = tuple[str, ...]


def is_data(value: Any) -> bool:
    """Whether ``value`` is a tensor, a TensorDict or a tensorclass."""
    return isinstance(value, (Tensor, TensorDictBase)) or is_tensorclass(value)


def is_container(value: Any) -> bool:
    """Whether ``value`` is a dict, a tuple or a list."""
    return isinstance(value, (dict, tuple, list)) and not is_data(value)


@dataclass(frozen=True)
class Container:
    """A container, and what it is made of.

    Attributes:
        kind: dict, OrderedDict, tuple, list, or the class of a named tuple.
        keys: of a dict: its keys; else the numbers of the entries.
        parts: what lies there: another container, or None for a tensor, a TensorDict or a tensorclass.
    """

    kind: type
    keys: tuple[Any, ...]
    parts: tuple[Container | None, ...]

    @property
    def is_dict(self) -> bool:
        """Whether entries are found by key."""
        return issubclass(self.kind, dict)

    @property
    def names(self) -> list[Names]:
        """Where each entry lies, as a key of nested TensorDicts: keys and fields as text, numbers in sequences."""
        own = getattr(self.kind, "_fields", None) or tuple(map(str, self.keys))
        found: list[Names] = []
        for name, part in zip(own, self.parts, strict=True):
            found += [(name,)] if part is None else [(name, *below) for below in part.names]
        return found

    def values(self, data: Any) -> list[Any]:
        """The tensors, TensorDicts and tensorclasses of a batch, in the order of :attr:`names`.

        Raises:
            ValueError: the batch has another structure; the text states both.
        """
        found: list[Any] = []
        self._walk(data, (), found)
        return found

    def _walk(self, data: Any, path: Names, found: list[Any]) -> None:
        if type(data) is not self.kind and not self._is_alike(type(data)):
            raise ValueError(
                f"the storage holds a {self.kind.__name__} {_place(path)}, the batch has a {type(data).__name__} there"
            )
        if self.is_dict and data.keys() != set(self.keys):
            missing, extra = [k for k in self.keys if k not in data], [k for k in data if k not in self.keys]
            raise ValueError(f"the batch's keys differ from the storage's: missing {missing}, extra {extra}")
        if len(data) != len(self.keys):
            raise ValueError(f"the storage holds {len(self.keys)} entries {_place(path)}, the batch has {len(data)}")
        for key, part in zip(self.keys, self.parts, strict=True):
            if part is None:
                found.append(data[key])
            else:
                part._walk(data[key], (*path, str(key)), found)

    def _is_alike(self, kind: type) -> bool:
        """Whether ``kind`` is a named tuple of the same name and fields: a loaded one has a class of its own."""
        fields = getattr(self.kind, "_fields", None)
        return fields is not None and (kind.__name__, getattr(kind, "_fields", ())) == (self.kind.__name__, fields)

    def built(self, values: Iterator[Any]) -> Any:
        """The container, filled with ``values`` in the order of :attr:`names`."""
        parts = [next(values) if part is None else part.built(values) for part in self.parts]
        if self.is_dict:
            return self.kind(zip(self.keys, parts, strict=True))
        return self.kind(*parts) if hasattr(self.kind, "_fields") else self.kind(parts)

    # In a state

    def described(self) -> dict[str, Any]:
        """The container as plain values, for files."""
        fields = getattr(self.kind, "_fields", None)
        return {
            "kind": "namedtuple" if fields is not None else self.kind.__name__,
            "name": self.kind.__name__,
            "keys": list(self.keys if fields is None else fields),
            "parts": [None if part is None else part.described() for part in self.parts],
        }


_KINDS: dict[str, type] = {kind.__name__: kind for kind in (dict, OrderedDict, tuple, list)}


def structure_of(data: Any, path: Names = ()) -> Container | None:
    """The containers of a batch; None for what is none.

    Raises:
        TypeError: a container, a key or a value has a type that can't be stored.
        ValueError: two keys of a dict have the same text.
    """
    if is_data(data):
        return None
    kind = type(data)
    named = issubclass(kind, tuple) and hasattr(kind, "_fields")
    if kind not in _KINDS.values() and not named:
        raise TypeError(
            f"only tensors, TensorDicts and tensorclasses can be stored, and dicts, tuples and lists of them; "
            f"{_place(path)} is a {kind.__name__}. A ListStorage takes any object"
        )
    keys = tuple(data) if isinstance(data, dict) else tuple(range(len(data)))
    for key in keys:
        if type(key) not in (str, int):
            raise TypeError(f"the keys of a dict are text or integers, got {key!r} {_place(path)}")
    if len(set(map(str, keys))) < len(keys):
        raise ValueError(f"two keys {_place(path)} have the same text: {list(keys)}")
    return Container(kind, keys, tuple(structure_of(data[key], (*path, str(key))) for key in keys))


def read_structure(saved: Any) -> Container | None:
    """The inverse of :meth:`Container.described`. A named tuple gets a class of its own.

    Raises:
        ValueError: ``saved`` is something else.
    """
    if saved is None:
        return None
    try:
        kind, name, keys, parts = (saved[entry] for entry in ("kind", "name", "keys", "parts"))
        if len(keys) != len(parts) or len(set(map(str, keys))) < len(keys) or {*map(type, keys)} - {str, int}:
            raise ValueError(f"{keys!r} are no keys")
        made = namedtuple(str(name), keys) if kind == "namedtuple" else _KINDS[kind]
        if not issubclass(made, dict):
            keys = range(len(parts))
        return Container(made, tuple(keys), tuple(read_structure(part) for part in parts))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the state does not say how the rows are structured: {error!r}") from None


def first_of(data: Any) -> Any:
    """The first tensor, TensorDict or tensorclass in ``data``; ``data`` itself where there is none."""
    if is_data(data) or not is_container(data):
        return data
    for value in data.values() if isinstance(data, dict) else data:
        found = first_of(value)
        if is_data(found):
            return found
    return data


def _place(path: Names) -> str:
    return f"at {path!r}" if path else "at the root"
