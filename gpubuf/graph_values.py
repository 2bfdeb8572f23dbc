"""Arguments and results of a captured step: checks them, and copies arguments to where the graph reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase, is_non_tensor, is_tensorclass
from torch import Tensor

Map = Callable[[str, Tensor], Tensor]
"""From the place of a tensor, and the tensor, to its replacement."""

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional arguments and keyword arguments."""


class TensorKind(NamedTuple):
    """The properties of a tensor argument that must not change."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        return f"a tensor of shape {self.shape}, {self.dtype}, on {self.device}"


class Container(NamedTuple):
    """The properties of a container argument that must not change."""

    kind: type
    extent: tuple[Any, ...]

    def __str__(self) -> str:
        return f"a {self.kind.__name__} of {self.extent}"


class Constant:
    """An argument that becomes part of the graph."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Constant) or type(self.value) is not type(other.value):
            return False
        try:
            return self.value is other.value or bool(self.value == other.value)
        except (RuntimeError, ValueError):
            # Comparing arrays gives an array, not one answer.
            return False

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return repr(self.value)


def _is_tensordict(value: Any) -> bool:
    return isinstance(value, TensorDictBase) or is_tensorclass(value)


def _inside(value: Any) -> list[tuple[Any, Any]] | None:
    """The parts of a container by key, in an order that does not depend on how it was filled; None for no container."""
    if _is_tensordict(value) and not is_non_tensor(value):
        return sorted(((key, value.get(key)) for key in value.keys()), key=lambda item: item[0])
    if isinstance(value, dict):
        return sorted(value.items(), key=lambda item: repr(item[0]))
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    return None


def describe(value: Any, path: str, out: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Enter the fixed properties of ``value`` into ``out``, and its tensors into ``tensors``, by their places."""
    if isinstance(value, Tensor):
        tensors[path] = value
        out[path] = TensorKind(tuple(value.shape), value.dtype, value.device)
        return
    parts = _inside(value)
    if parts is None:
        out[path] = Constant(value.data if is_non_tensor(value) else value)
        return
    extent = tuple(value.batch_size) if _is_tensordict(value) else tuple(key for key, _ in parts)
    out[path] = Container(type(value), extent)
    for key, part in parts:
        describe(part, f"{path}[{key!r}]", out, tensors)


def mapped(value: Any, of_tensor: Map, path: str) -> Any:
    """``value`` in new containers, with ``of_tensor`` applied to each tensor."""
    if isinstance(value, Tensor):
        return of_tensor(path, value)
    if _is_tensordict(value):
        if is_non_tensor(value):
            return value

        def entry(key: Any, tensor: Tensor) -> Tensor:
            names = key if isinstance(key, tuple) else (key,)
            return of_tensor(path + "".join(f"[{name!r}]" for name in names), tensor)

        return value.named_apply(entry, nested_keys=True)
    if isinstance(value, dict):
        return {key: mapped(part, of_tensor, f"{path}[{key!r}]") for key, part in value.items()}
    if isinstance(value, list | tuple):
        parts = [mapped(part, of_tensor, f"{path}[{i}]") for i, part in enumerate(value)]
        if isinstance(value, list):
            return parts
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def _same(path: str, tensor: Tensor) -> Tensor:
    return tensor


def fresh(value: Any) -> Any:
    """``value`` in new containers, with the same tensors."""
    return value if isinstance(value, Tensor) else mapped(value, _same, "")


def _described(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    out: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for i, value in enumerate(args):
        describe(value, f"argument {i}", out, tensors)
    for name, value in kwargs.items():
        describe(value, name, out, tensors)
    return out, tensors


class Arguments:
    """The arguments of a step: their fixed properties at the first call, and the tensors in which a graph reads them.

    Attributes:
        devices: of the tensors among them.
        inputs: the tensors that the graph reads, by their places among the arguments.

    Raises:
        ValueError: a tensor among them requires gradients.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._kinds, tensors = _described(args, kwargs)
        for path, tensor in tensors.items():
            if tensor.requires_grad:
                raise ValueError(
                    f"{path} requires gradients, which would end at the graph's copy of it: detach it, or let the step "
                    "reach it by itself, as it does its networks"
                )
        self.inputs: dict[str, Tensor] = {}
        self.devices = {tensor.device for tensor in tensors.values()}

    def tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
        """The tensors among the arguments, checked against those of the first call.

        Raises:
            ValueError: an argument has changed; the message states both sides.
        """
        if not args and not kwargs and not self._kinds:
            return {}
        kinds, tensors = _described(args, kwargs)
        if kinds == self._kinds:
            return tensors
        for path in dict.fromkeys((*self._kinds, *kinds)):
            was, now = (found.get(path) for found in (self._kinds, kinds))
            if was != now:
                before, after = ("missing" if kind is None else str(kind) for kind in (was, now))
                fixed = isinstance(was, Constant) or isinstance(now, Constant)
                reason = "; what is no tensor is part of the graph, or reset() the step" if fixed else ""
                raise ValueError(f"{path} was {before} at the first call, now it is {after}{reason}")
        raise AssertionError("two different sets of arguments have a difference")

    def passed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The arguments as the step gets them: in copied containers, so that only the step sees what it adds."""
        return self._mapped(args, kwargs, _same)

    def static(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The arguments as the graph gets them: their tensors are in :attr:`inputs`, which :meth:`fill` overwrites."""
        if self.inputs:
            self.fill(args, kwargs)
        else:
            for path, tensor in self.tensors(args, kwargs).items():
                self.inputs[path] = tensor.clone(memory_format=torch.contiguous_format)
        return self._mapped(args, kwargs, lambda path, tensor: self.inputs[path])

    @staticmethod
    def _mapped(args: tuple[Any, ...], kwargs: dict[str, Any], of_tensor: Map) -> Call:
        return (
            tuple(mapped(value, of_tensor, f"argument {i}") for i, value in enumerate(args)),
            {name: mapped(value, of_tensor, name) for name, value in kwargs.items()},
        )

    def fill(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Copy the tensors among the arguments to where the graph reads them. No host sync.

        Raises:
            ValueError: as :meth:`tensors`.
        """
        tensors = self.tensors(args, kwargs)
        if tensors:
            torch._foreach_copy_(list(self.inputs.values()), [tensors[path] for path in self.inputs])


class Unchanged:
    """Makes sure that a step does not change its arguments in place: their owner would not see what a replay does."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self._versions = {path: tensor._version for path, tensor in tensors.items() if not tensor.is_inference()}

    def check(self) -> None:
        """Call it after the step.

        Raises:
            ValueError: the step has changed a tensor in place.
        """
        for path, version in self._versions.items():
            if self._tensors[path]._version != version:
                raise ValueError(f"the step changes {path} in place, which its caller would not see: return a tensor")


def _result(path: str, tensor: Tensor) -> Tensor:
    return tensor.detach()


def checked_results(value: Any) -> Any:
    """The results of a step, without gradients.

    Raises:
        ValueError: a replay could not bring one of them up to date.
    """
    kinds: dict[str, Any] = {}
    describe(value, "the result", kinds, {})
    for path, kind in kinds.items():
        if isinstance(kind, Constant) and kind.value is not None:
            raise ValueError(
                f"{path} is {kind.value!r}, a {type(kind.value).__name__}, which would be the same at every replay: a "
                "step returns tensors, TensorDicts, tuples, lists or dictionaries of them, or None"
            )
    return mapped(value, _result, "the result")


def devices_of(value: Any) -> set[torch.device]:
    """The devices of the tensors in ``value``."""
    tensors: dict[str, Tensor] = {}
    describe(value, "", {}, tensors)
    return {tensor.device for tensor in tensors.values()}
