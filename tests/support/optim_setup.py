"""Buckets of an optimiser's step for tests, the same as entries of the definition, and a small network."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor, nn

from gpubuf.kernels import optim
from tests.kernels.reference.optim import Entry, Rule
from tests.kernels.reference.optim import adamw as reference_step
from tests.support.precision import assert_no_worse


@dataclass(frozen=True)
class Form:
    """What an entry is.

    Attributes:
        shape: of the parameter.
        target: whether it has one.
        unit: the dimension of rows of length ``norm``, or None.
        norm: that length.
        group: row of the hyperparameters.
        source: whether it is only the source of its target.
        transposed: whether the last two dimensions are stored the other way round.
    """

    shape: tuple[int, ...]
    target: bool = True
    unit: int | None = None
    norm: float = 1.0
    group: int = 0
    source: bool = False
    transposed: bool = False


def hyper(rules: Sequence[Rule]) -> Tensor:
    """The hyperparameters of all groups."""
    rows = []
    for rule in rules:
        *values, max_norm = astuple(rule)
        logarithms = [math.log2(beta) if beta else -math.inf for beta in (rule.beta1, rule.beta2)]
        rows.append([*values, *logarithms, max_norm])
    return torch.tensor(rows, dtype=torch.float64)


class Step:
    """A bucket, and the definition's idea of it in ``dtype`` and in the same dtype's arithmetic."""

    def __init__(
        self, forms: Sequence[Form], dtype: torch.dtype, rules: Sequence[Rule] = (Rule(),), seed: int = 0
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.forms, self.rules, self.dtype = forms, list(rules), dtype
        self.params = [self.normal(form) for form in forms]
        self.real = optim.moment_dtype(dtype)
        self.moments = [
            None if form.source else (self.normal(form).to(self.real), self.normal(form).to(self.real).square())
            for form in forms
        ]
        self.targets = [self.normal(form) if form.target else None for form in forms]
        self.steps = torch.arange(len(forms), dtype=torch.float32)
        entries = [
            optim.entry(p, m, t, form.group, form.unit, form.norm)
            for p, m, t, form in zip(self.params, self.moments, self.targets, forms, strict=True)
        ]
        self.table, self.tiles = torch.tensor(entries), torch.tensor(optim.tiles_of(entries))
        self.ticket = torch.zeros(1, dtype=torch.int64)
        self.hyper = hyper(rules)
        self.expected = {kind: self._entries(kind) for kind in (self.real, torch.float64)}

    def normal(self, form: Form) -> Tensor:
        shape = form.shape
        if form.transposed:
            return self.numbers((*shape[:-2], shape[-1], shape[-2])).transpose(-1, -2)
        return self.numbers(shape)

    def numbers(self, shape: Sequence[int]) -> Tensor:
        return torch.randn(tuple(shape), generator=self.generator, dtype=torch.float64).to(self.dtype)

    def _entries(self, kind: torch.dtype) -> list[Entry]:
        made = []
        for i, form in enumerate(self.forms):
            first, second = self.moments[i] or (None, None)
            param = self.params[i] if kind is self.real else self.params[i].double()
            target = None if self.targets[i] is None else self.targets[i].to(param.dtype)
            entry = Entry(param, first, second, target, form.unit, form.norm, step=i)
            entry = copy.deepcopy(entry)
            if first is not None:
                entry.exp_avg, entry.exp_avg_sq = entry.exp_avg.to(kind), entry.exp_avg_sq.to(kind)
            made.append(entry)
        return made

    def gradients(self, *missing: int) -> list[Tensor | None]:
        """Random ones; None for sources and for ``missing``."""
        return [None if form.source or i in missing else self.normal(form) for i, form in enumerate(self.forms)]

    def arguments(self, grads: list[Tensor | None], averages: list[bool] | None = None, norm: Tensor | None = None):
        return (
            self.table,
            self.tiles,
            self.hyper,
            grads,
            [target is not None for target in self.targets] if averages is None else averages,
            norm,
            self.steps,
            self.ticket,
            self.params,
            [moment for pair in self.moments for moment in pair or ()],
            [target for target in self.targets if target is not None],
            False,
            any(form.unit is not None for form in self.forms),
        )

    def run(self, grads: list[Tensor | None], averages: list[bool] | None = None, norm: float | None = None) -> None:
        """One step of both."""
        optim.adamw(*self.arguments(grads, averages, None if norm is None else torch.tensor(norm)))
        for entries in self.expected.values():
            for i, (entry, form) in enumerate(zip(entries, self.forms, strict=True)):
                moves = self.targets[i] is not None and (averages is None or averages[i])
                reference_step(entry, self.rules[form.group], grads[i], moves, norm)

    def check(self, tolerance: float) -> None:
        """Nobody is further from the float64 truth than plain PyTorch is in the same dtype, plus the tolerance."""
        for i, (plain, truth) in enumerate(zip(self.expected[self.real], self.expected[torch.float64], strict=True)):
            pairs = [(self.params[i], plain.param, truth.param), (self.targets[i], plain.target, truth.target)]
            if self.moments[i] is not None:
                first, second = self.moments[i]
                pairs += [(first, plain.exp_avg, truth.exp_avg), (second, plain.exp_avg_sq, truth.exp_avg_sq)]
            for ours, theirs, exact in pairs:
                if ours is not None:
                    assert_no_worse(ours, theirs, exact, tolerance)
            assert self.steps[i] == truth.step, i
        assert self.ticket.item() == 0


def network(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """A small network with weights, biases and scales."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 16), nn.SiLU(), nn.LayerNorm(16), nn.Linear(16, 2)).to(dtype)


def backward(net: nn.Module, seed: int) -> None:
    """Give it the gradients of a batch that only the seed decides."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 5, generator=generator, dtype=torch.float64).to(next(net.parameters()).dtype)
    net.zero_grad()
    net(x).square().mean().backward()
