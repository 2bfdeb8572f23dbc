"""What every operation without state must do, checked on both backends against its definition in float64.

:class:`KernelContract` says what an operation takes, and the checks below run it. An operation is one row of
:data:`tests.contracts.losses.CONTRACTS`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from gpubuf.kernels import _registry
from tests.contracts import covering, pairwise
from tests.support.dispatched import Dispatched
from tests.support.fake_cuda import fake_cuda
from tests.support.precision import assert_no_worse

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16

Arguments = dict[str, Any]

ROUNDING = {F64: 4e-15, F32: 2e-6, F16: 1e-3, BF16: 8e-3}
"""What rounding of the result alone may cost, relative to the largest element."""


def numbers(*shape: int, seed: int = 0, size: float = 2.0) -> Tensor:
    """Normal float64 numbers that float32 has, too."""
    generator = torch.Generator().manual_seed(1000 * seed + sum(shape) + 7 * len(shape))
    return (torch.randn(shape, generator=generator) * size).double()


def computing(dtype: torch.dtype) -> torch.dtype:
    return F64 if dtype is F64 else F32


@dataclass(frozen=True)
class KernelContract:
    """An operation and its definition.

    Attributes:
        operation: what ``define`` returned, with its gradient.
        make: the arguments of a case, by the names of the schema, with float64 tensors.
        definition: the same outputs from the same arguments, with gradients by autograd; it may leave out the last.
        axes: the options of ``make`` and their values, from which cases are combined. A further axis is the dtype.
        leaves: arguments with gradients.
        roots: how many outputs, the first ones, are differentiable.
        wide: float arguments that no case narrows.
        dtypes: of all other float arguments.
        rows: by argument, the dimension along which its rows lie in a batch of one; empty: there is no mask.
        outputs: dtypes of the outputs that are not of the computing dtype: "given" for that of the arguments.
        coarse: factor of :data:`ROUNDING`.
        refused: changed arguments of the first case, and what the ValueError says.
        smooth: options of a small case without kinks, for finite differences; None: there is no gradient.
        opchecks: which of PyTorch's own checks apply.
        launches: launches of one call, at most.
    """

    operation: Any
    make: Callable[..., Arguments]
    definition: Callable[..., Any]
    axes: Mapping[str, Sequence[Any]]
    leaves: tuple[str, ...] = ()
    roots: int = 1
    wide: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = (F32, F64, BF16, F16)
    rows: Mapping[str, int] = field(default_factory=dict)
    outputs: Mapping[int, str] = field(default_factory=dict)
    coarse: float = 1.0
    refused: Sequence[tuple[Arguments, str]] = ()
    smooth: Arguments | None = None
    opchecks: tuple[str, ...] = ("test_schema", "test_autograd_registration", "test_faketensor")
    launches: int = 2

    @functools.cached_property
    def cases(self) -> list[Arguments]:
        """With every pair of values."""
        return self._chosen(pairwise)

    @functools.cached_property
    def few_cases(self) -> list[Arguments]:
        """With every value."""
        return self._chosen(covering)

    def _chosen(self, few: Callable[..., list[tuple[int, ...]]]) -> list[Arguments]:
        axes = {**self.axes, "dtype": self.dtypes}
        # Values need not be hashable: places are.
        places = itertools.product(*(range(len(values)) for values in axes.values()))
        chosen = few([*places], lambda case: [*enumerate(case)])
        return [{name: axes[name][i] for name, i in zip(axes, case, strict=True)} for case in chosen]

    def arguments(self, dtype: torch.dtype = F32, **options: Any) -> Arguments:
        """Those of a case, in order of the schema."""
        made = self.make(**options)
        return {argument.name: self.narrowed(argument.name, made[argument.name], dtype) for argument in self._schema}

    @property
    def _schema(self) -> Any:
        return self.operation._schema.arguments

    def narrowed(self, name: str, value: Any, dtype: torch.dtype) -> Any:
        floating = isinstance(value, Tensor) and value.is_floating_point() and name not in self.wide
        return value.to(dtype) if floating else value

    def run(self, arguments: Arguments) -> tuple[Any, ...]:
        return _tuple(self.operation(*arguments.values()))


def _tuple(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


Found = tuple[list[Tensor], list[Tensor]]


def differentiated(
    contract: KernelContract,
    arguments: Arguments,
    function: Callable[..., Any] | None = None,
    incoming: str = "each",
) -> Found:
    """(outputs, gradients by the leaves) under fixed incoming gradients, or under one that is expanded ("one").

    ``function`` takes the arguments by name; None: the operation.
    """
    leaves = [name for name in contract.leaves if arguments[name] is not None]
    own = {name: arguments[name].detach().requires_grad_() for name in leaves}
    given = {**arguments, **own}
    outputs = contract.run(given) if function is None else _tuple(function(**given))
    roots = outputs[: contract.roots]
    gradients = [
        torch.ones((), dtype=root.dtype, device=root.device).expand(root.shape)
        if incoming == "one"
        else torch.linspace(0.5, 2, root.numel(), device=root.device).reshape(root.shape).to(root.dtype)
        for root in roots
    ]
    grads = torch.autograd.grad(roots, list(own.values()), gradients) if own else ()
    return [output.detach() for output in outputs], list(grads)


def _same(one: Found, other: Found) -> bool:
    return all(torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


def _checked(contract: KernelContract, check: Callable[[Arguments, Arguments], None], pairs: bool = True) -> None:
    """Every case, with all pairs of values or with all values; a failure says in which one it was."""
    for case in contract.cases if pairs else contract.few_cases:
        try:
            check(case, contract.arguments(**case))
        except BaseException as error:
            error.add_note(f"in the case {case}")
            raise


def check_values(contract: KernelContract, pairs: bool) -> None:
    """No further from the float64 truth than plain PyTorch in the same dtype, in values and in gradients.

    Where nothing counts, a mean and its gradients are 0 by contract and NaN by the formula.
    """

    def check(case: Arguments, arguments: Arguments) -> None:
        given = case["dtype"]
        ours, grads = differentiated(contract, arguments)
        truth, plain = (
            differentiated(
                contract,
                {name: contract.narrowed(name, value, dtype) for name, value in arguments.items()},
                contract.definition,
            )
            for dtype in (F64, computing(given))
        )
        for i, output in enumerate(ours):
            assert output.dtype is (given if contract.outputs.get(i) == "given" else computing(given)), f"output {i}"
        leaves = [arguments[name] for name in contract.leaves if arguments[name] is not None]
        assert [grad.dtype for grad in grads] == [leaf.dtype for leaf in leaves]
        for i, (exact, near) in enumerate(zip((*truth[0], *truth[1]), (*plain[0], *plain[1]), strict=True)):
            got = ours[i] if i < len(truth[0]) else grads[i - len(truth[0])]
            tolerance = contract.coarse * ROUNDING[got.dtype]
            assert_no_worse(got, near.nan_to_num(0), exact.nan_to_num(0), tolerance)

    _checked(contract, check, pairs)


def check_mixed(contract: KernelContract) -> None:
    """The first argument and those with gradients in half precision, all others in float64: computed in float32."""
    case = contract.cases[0]
    principal = {*contract.leaves, contract._schema[0].name}
    arguments = {
        name: contract.narrowed(name, value, BF16 if name in principal else F64)
        for name, value in contract.arguments(**{**case, "dtype": F64}).items()
    }
    ours = differentiated(contract, arguments)
    exact = {name: contract.narrowed(name, value, F64) for name, value in arguments.items()}
    truth = differentiated(contract, exact, contract.definition)
    for found, true in zip(ours, truth, strict=True):
        for got, other in zip(found, true, strict=False):
            tolerance = contract.coarse * max(ROUNDING[got.dtype], ROUNDING[F32])
            assert_no_worse(got, other, other, tolerance)


def strided(tensor: Tensor) -> Tensor:
    """The same numbers in every second place of another tensor."""
    return tensor.unsqueeze(-1).repeat(*[1] * tensor.ndim, 2)[..., 0]


def check_strides(contract: KernelContract, pairs: bool) -> None:
    """Strided arguments and expanded gradients give, run after run, the bits of dense ones: sums have one order."""

    def check(case: Arguments, arguments: Arguments) -> None:
        moved = {n: strided(a) if isinstance(a, Tensor) and a.ndim else a for n, a in arguments.items()}
        assert _same(differentiated(contract, arguments, None, "one"), differentiated(contract, moved, None, "one"))

    _checked(contract, check, pairs)


def check_masks(contract: KernelContract, pairs: bool) -> None:
    """What a masked row holds, NaN too, reaches neither the loss nor a gradient; its own gradients are 0."""

    def check(case: Arguments, arguments: Arguments) -> None:
        mask = arguments["mask"]
        if mask is None or mask.ndim != 1:
            return
        masked = (~mask).nonzero().squeeze(-1)
        spoilt = dict(arguments)
        for name, dim in contract.rows.items():
            if spoilt[name] is not None:
                spoilt[name] = spoilt[name].index_fill(dim, masked, float("nan"))
        (loss, *_), grads = differentiated(contract, arguments)
        (same, *_), others = differentiated(contract, spoilt)
        assert torch.equal(loss, same)
        assert all(map(torch.equal, grads, others))
        for name, grad in zip(contract.leaves, grads, strict=True):
            if name in contract.rows:
                assert not grad.index_select(contract.rows[name], masked).any()

    _checked(contract, check, pairs)


def check_refused(contract: KernelContract) -> None:
    """ValueError states what was expected and what came."""
    plain = contract.arguments(**contract.cases[0])
    for changes, message in contract.refused:
        with pytest.raises(ValueError, match=message):
            contract.run({**plain, **changes})


def check_gradients(contract: KernelContract) -> None:
    """Finite differences in float64."""
    arguments = contract.arguments(F64, **(contract.smooth or {}))
    names = [name for name in contract.leaves if arguments[name] is not None]

    def function(*leaves: Tensor) -> tuple[Tensor, ...]:
        outputs = contract.run({**arguments, **dict(zip(names, leaves, strict=True))})
        return tuple(output for output in outputs if output.requires_grad)

    assert torch.autograd.gradcheck(function, [arguments[name].requires_grad_() for name in names])


def check_registration(contract: KernelContract) -> None:
    """Schema, fake tensors and autograd registration."""
    for case in contract.cases[:1]:
        arguments = contract.arguments(**case)
        for name in contract.leaves:
            if arguments[name] is not None:
                arguments[name].requires_grad_()
        torch.library.opcheck(contract.operation, tuple(arguments.values()), test_utils=contract.opchecks)


def _on_fake_gpu(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_on_fake_gpu, value))
    return torch.empty(value.shape, dtype=value.dtype, device="cuda") if isinstance(value, Tensor) else value


@contextlib.contextmanager
def _launches_noted() -> Iterator[list[Any]]:
    """The kernels that launchers would launch in this block."""
    from gpubuf.kernels._launching import Variant

    noted: list[Any] = []
    with mock.patch.object(Variant, "launch", lambda variant, *_: noted.append(variant.kernel)):
        yield noted


def check_no_sync(contract: KernelContract) -> None:
    """Launchers, forward and backward, read nothing on the host, and return what fake tensors promise."""
    # Fake tensors take their time: every few cases.
    for case in contract.cases[:: len(contract.cases) // 6]:
        with Dispatched() as noted:
            differentiated(contract, contract.arguments(**case))
        calls = [(operation, args) for operation, args in noted.calls if operation in _registry._implementations]
        assert calls
        for operation, args in calls:
            launcher = _registry._imported(_registry._implementations[operation][1])
            with _launches_noted() as launched, fake_cuda():
                given = tuple(map(_on_fake_gpu, args))
                found, promised = _tuple(launcher(*given)), _tuple(operation(*given))
            assert len(launched) <= contract.launches
            assert launched or 0 in (a.numel() for a in args if isinstance(a, Tensor)), operation
            assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in promised]


def check_gpu(contract: KernelContract) -> None:
    """A GPU agrees with the CPU, and its runs are equal to the bit."""

    def check(case: Arguments, arguments: Arguments) -> None:
        moved = {n: a.cuda() if isinstance(a, Tensor) else a for n, a in arguments.items()}
        ours, truth = (differentiated(contract, each) for each in (moved, arguments))
        tolerance = max(20 * contract.coarse * ROUNDING[case["dtype"]], 1e-5 if case["dtype"] is F32 else 0)
        # Not what only a backward reads, such as the factor of a mean: without rows nobody reads it.
        named = len(_tuple(contract.definition(**arguments)))
        for got, true in zip((*ours[0][:named], *ours[1]), (*truth[0][:named], *truth[1]), strict=True):
            torch.testing.assert_close(
                got.cpu(), true, rtol=tolerance, atol=tolerance * (1 + float(true.abs().max() if true.numel() else 0))
            )
        for _ in range(5):
            assert _same(ours, differentiated(contract, moved))

    _checked(contract, check)
