"""The tensors of an optimiser's step, in the form that the kernels take: buckets of one dtype, with their tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpubuf.kernels._registry import is_lazy
from gpubuf.kernels.optim import DTYPES, MAX_ENTRIES, address, entry, moment_dtype, tiles_of


@dataclass(frozen=True)
class UnitRows:
    """The rows of a weight along ``dim`` have length ``norm`` after each step."""

    dim: int
    norm: float


@dataclass
class Place:
    """One entry of a bucket.

    Attributes:
        param: the parameter, or a tensor that is only the source of a target.
        group: its parameter group; None if it is only a source.
        target: follows it, or None.
        rows: their length, or None.
        moments: first and second moment; None if it is only a source.
    """

    param: Tensor
    group: int | None
    target: Tensor | None = None
    rows: UnitRows | None = None
    moments: tuple[Tensor, Tensor] | None = None


@dataclass
class Bucket:
    """Up to 64 entries of one dtype: one launch, or one compiled call.

    Attributes:
        places: the entries; those that are only sources come last.
        optimised: the parameters with a group, in order; the first of ``params``.
        groups: the group of each of them.
        params, moments, targets: what the operation writes.
        averages: for each entry, whether it has a target.
        steps: float32 ``[E]``.
        table, tiles, ticket, aligned, unit_rows: see :data:`gpubuf.kernels.optim.adamw`.
        addresses: of parameters and targets, to see whether one was moved.
    """

    places: list[Place]
    device: torch.device
    optimised: list[Tensor] = field(init=False)
    groups: list[int] = field(init=False)
    others: list[None] = field(init=False)

    def __post_init__(self) -> None:
        places = self.places
        self.optimised = [place.param for place in places if place.group is not None]
        self.groups = [place.group for place in places if place.group is not None]
        self.others = [None] * (len(places) - len(self.optimised))
        self.params = [place.param.detach() for place in places]
        self.moments = [moment for place in places for moment in place.moments or ()]
        self.targets = [place.target.detach() for place in places if place.target is not None]
        self.averages = [place.target is not None for place in places]
        self.stays = [False] * len(places)
        # Elements of each parameter, and -1 if it is not contiguous.
        self.contiguous = [param.numel() if param.is_contiguous() else -1 for param in self.optimised]
        self.device_index = self.optimised[0].get_device() if self.optimised else -1
        self.dtype = places[0].param.dtype
        entries = [
            entry(p, place.moments, place.target, place.group or 0, *_unit(place))
            for p, place in zip(self.params, places, strict=True)
        ]
        self.unit_rows = any(place.rows is not None for place in places)
        self.aligned = not any(address & 15 for each in entries for address in each[:4])
        # Not waited for: CUDA has read memory that is not pinned when the call returns.
        self.table = torch.tensor(entries, dtype=torch.int64, device="cpu").to(self.device, non_blocking=True)
        self.tiles = torch.tensor(tiles_of(entries), dtype=torch.int64, device="cpu").to(self.device, non_blocking=True)
        self.ticket = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.steps = torch.zeros(len(places), dtype=torch.float32, device=self.device)

    def gradients(self, chosen: frozenset[int] | None) -> list[Tensor | None]:
        """One for each entry, with its parameter's strides; None where there is none, or the group is not chosen."""
        if chosen is None:
            found = [param.grad for param in self.optimised]
        else:
            found = [
                param.grad if group in chosen else None
                for param, group in zip(self.optimised, self.groups, strict=True)
            ]
        dtype, device = self.dtype, self.device_index
        for i, grad in enumerate(found):
            # What a kernel reads by address has to be what the parameter is; the commonest case is asked for first.
            if grad is not None and not (
                grad.dtype is dtype
                and grad.is_contiguous()
                and grad.numel() == self.contiguous[i]
                and grad.get_device() == device
                and not grad.is_neg()
            ):
                found[i] = _as_parameter(grad, self.optimised[i])
        return [*found, *self.others] if self.others else found

    def moving(self, chosen: frozenset[int] | None, targets: bool) -> list[bool]:
        """For each entry, whether its target moves: those of other groups stay where they are."""
        if not targets:
            return self.stays
        if chosen is None:
            return self.averages
        return [place.target is not None and (place.group is None or place.group in chosen) for place in self.places]


def _unit(place: Place) -> tuple[int | None, float]:
    return (None, 1.0) if place.rows is None else (place.rows.dim, place.rows.norm)


def _as_parameter(grad: Tensor, param: Tensor) -> Tensor:
    """The gradient with the parameter's strides: itself, or a copy."""
    if grad.layout is not torch.strided:
        raise RuntimeError("gpubuf.optim.AdamW does not support sparse gradients")
    if grad.shape != param.shape or grad.dtype is not param.dtype or grad.device != param.device:
        raise ValueError(
            f"a gradient must be like its parameter: expected {param.dtype} {list(param.shape)} on {param.device}, got "
            f"{grad.dtype} {list(grad.shape)} on {grad.device}"
        )
    if same_layout(grad, param) and not is_lazy(grad):
        return grad
    return torch.empty_strided(param.shape, param.stride(), dtype=grad.dtype, device=grad.device).copy_(grad)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements lie side by side, in any order of the dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Whether two dense tensors have the same elements at the same distance from their addresses."""
    if a.shape != b.shape or a.dtype is not b.dtype or a.device != b.device:
        return False
    return all(x == y or size == 1 for x, y, size in zip(a.stride(), b.stride(), a.shape, strict=True))


def check_parameter(param: Tensor, device: torch.device) -> None:
    """Raise TypeError or ValueError unless the step can work on ``param``."""
    if param.dtype not in DTYPES:
        raise TypeError(f"parameters must be float32, float64 or bfloat16, got {param.dtype}")
    if param.device != device:
        raise ValueError(f"all parameters must be on one device, got {device} and {param.device}")
    if not is_dense(param):
        raise ValueError(f"parameters must be dense, got strides {param.stride()} for shape {list(param.shape)}")


def new_moments(param: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors of zeros with the parameter's strides; float32 for bfloat16 parameters."""
    dtype = moment_dtype(param.dtype)
    first, second = (
        torch.empty_strided(param.shape, param.stride(), dtype=dtype, device=param.device).zero_() for _ in range(2)
    )
    return first, second


def make_buckets(places: Sequence[Place], device: torch.device) -> list[Bucket]:
    """As few buckets as possible. Entries that are only sources come last in each of them."""
    ordered = sorted(places, key=lambda place: place.group is None)
    buckets = []
    for dtype in dict.fromkeys(place.param.dtype for place in ordered):
        alike = [place for place in ordered if place.param.dtype is dtype]
        buckets += [Bucket(alike[i : i + MAX_ENTRIES], device) for i in range(0, len(alike), MAX_ENTRIES)]
    return buckets


def arrange(places: list[Place], pairs: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> list[Bucket]:
    """The buckets of some parameters and of pairs (target, source), in the order of their launches.

    A target belongs to the entry of its source if that is a parameter. Other sources have entries of their own: in
    later buckets if they share memory with a parameter, as the programs of a launch run in any order.
    """
    by_identity = {id(place.param): place for place in places}
    by_address = {address(place.param): place for place in places if address(place.param)}
    memory = {place.param.untyped_storage()._cdata for place in places}
    apart: list[Place] = []
    later: list[Place] = []
    for target, source in pairs:
        place = by_identity.get(id(source)) or by_address.get(address(source))
        if place is not None and place.target is None and same_layout(place.param, source):
            place.target = target
        else:
            shared = source.untyped_storage()._cdata in memory
            (later if shared else apart).append(Place(source, None, target))
    return [*make_buckets([*places, *apart], device), *make_buckets(later, device)]
