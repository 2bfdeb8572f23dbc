"""Operations that are one kernel: their declarations, how each backend runs them, and their gradients.

Losses, norms and distributions compute some tensors from others. What such an operation takes, checks and returns is
said once, by :func:`declare`, in the ``__init__.py`` of its family. A backend then adds what computes them: ``_cpu.py``
the formulas in PyTorch (``plain`` of ``_plain.py``), ``_launch.py`` a Triton kernel and how it is cut into programs
(``launcher`` of ``_launching.py``).

Their parameters get what has their name:

* the arguments of the operation, by the names in the schema, and of a kernel its results;
* its ``sizes``;
* the attributes of the plan, on a GPU: ``block``, ``num_warps`` and so on.

Of a Triton kernel ``x_ptr`` is the tensor ``x``, a compile-time ``WIDTH`` is ``width``, ``HAS_X`` says whether ``x`` is
given, and ``REAL`` is the computing dtype. An absent argument is some other tensor, which the kernel does not read.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gpubuf.kernels._registry import define, is_tensor, library, pick, without_dispatch


@functools.cache
def parameters_of(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


@functools.lru_cache(maxsize=128)
def vector(n: int, dtype: torch.dtype) -> Tensor:
    """A tensor ``[n]`` without memory: a model for ``torch.empty_like``, which takes half the time of ``torch.empty``.

    Between the updates of networks it takes much less: storages allocate batches so, and its code is in the caches.
    """
    model = torch.empty(n, dtype=dtype, device="cpu")
    model.untyped_storage().resize_(0)
    return model


def returned(results: list[Tensor]) -> Any:
    """Results as an operation returns them."""
    return tuple(results) if len(results) > 1 else results[0]


class Declaration:
    """What is said once about an operation.

    Attributes:
        arguments, results: names, as the schema has them.
        numbers: the arguments that are not tensors.
        tensors: the arguments that are tensors, or may be.
        principal: the place of the first argument that decides on the computing dtype.
    """

    def __init__(
        self,
        schema: Any,
        checks: Sequence[Callable[..., None]],
        sizes: Callable[..., dict[str, int]],
        results: Callable[..., Sequence[Any]] | None,
        real: Sequence[str],
    ) -> None:
        self.arguments = [argument.name for argument in schema.arguments]
        self.results = [result.name for result in schema.returns]
        self.tensors = {argument.name for argument in schema.arguments if is_tensor(argument)}
        self.numbers = [argument.name for argument in schema.arguments if not is_tensor(argument)]
        self._defaults = tuple(argument.default_value for argument in schema.arguments)
        self._checks = [(check, pick(self.arguments, parameters_of(check))) for check in checks]
        self._sizes, self._sizes_of = sizes, pick(self.arguments, parameters_of(sizes))
        like = [name.removeprefix("grad_") for name in self.results]
        self._results, self._results_of = results, pick(self.arguments, parameters_of(results) if results else like)
        self._real_of, self.principal = pick(self.arguments, real), self.arguments.index(real[0])

    def result_kinds(self, args: tuple[Any, ...], real: torch.dtype) -> list[tuple[Sequence[int], torch.dtype]]:
        """Shape and dtype of each result, of all arguments and the computing dtype."""
        given = self._results_of(args)
        found: Sequence[Any] = self._results(*given) if self._results else given
        return [(each.shape, each.dtype) if isinstance(each, Tensor) else (each, real) for each in found]

    def new_results(self, args: tuple[Any, ...], real: torch.dtype) -> list[Tensor]:
        """Results without values."""
        # PyTorch takes in a tuple faster than a torch.Size.
        new = args[self.principal].new_empty
        return [new((*shape,), dtype=dtype) for shape, dtype in self.result_kinds(args, real)]

    def fake(self, *args: Any) -> Any:
        """What the operation is to a compiler."""
        args = self.complete(args)
        return returned(self.new_results(args, self.real(args)))

    def complete(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """All arguments: a dispatcher leaves out what has its default value."""
        return args if len(args) == len(self._defaults) else args + self._defaults[len(args) :]

    def sizes(self, args: tuple[Any, ...]) -> dict[str, int]:
        """The sizes that all arguments say, the number of rows first; ValueError unless they fit each other."""
        for check, taken in self._checks:
            check(*taken(args))
        return self._sizes(*self._sizes_of(args))

    def real(self, args: tuple[Any, ...]) -> torch.dtype:
        """The computing dtype."""
        # As computing_dtype, which takes longer to call.
        tensors: tuple[Tensor, ...] = self._real_of(args)
        for tensor in tensors:
            if tensor.dtype is torch.float64:
                return torch.float64
        return torch.float32


_declared: dict[Any, Declaration] = {}


def declare(
    schema: str,
    family: str,
    *,
    checks: Sequence[Callable[..., None]] = (),
    sizes: Callable[..., dict[str, int]],
    results: Callable[..., Sequence[Any]] | None = None,
    real: str,
) -> Any:
    """:func:`gpubuf.kernels._registry.define` of an operation that is one kernel.

    Args:
        schema: its results have names.
        family: ``__name__`` of the package that has the backends.
        checks: functions that take arguments of the operation by their names, and raise ValueError unless these fit
            each other.
        sizes: takes arguments by their names. Returns the sizes that kernels take, the number of rows first.
        results: takes arguments by their names. Returns for every result its shape in the computing dtype, or a tensor
            of the same shape and dtype. None: the results are gradients, each like its argument.
        real: names of the arguments that decide on the computing dtype, with spaces between them.
    """
    parsed = torch._C.parse_schema(f"gpubuf::{schema}")
    declaration = Declaration(parsed, checks, sizes, results, real.split())
    operation = define(schema, family, fake=declaration.fake)
    _declared[operation] = declaration
    return operation


def declaration_of(operation: Any) -> Declaration:
    """What :func:`declare` was told."""
    return _declared[operation]


def computing_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any of ``tensors`` is float64, else float32: what float16 and bfloat16 are computed in, too."""
    for tensor in tensors:
        if tensor.dtype is torch.float64:
            return torch.float64
    return torch.float32


def direct(op: Any) -> Callable[..., Any]:
    """``op`` without its gradient, called past PyTorch's dispatcher where that has nothing to decide.

    Lazy tensors (:func:`~gpubuf.kernels._registry.is_lazy`) are copied first, as the dispatcher would do. Users may
    pass them, and so may autograd, as gradients.
    """
    return without_dispatch(op, given=None)


def past_functorch(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` without its Python, which serves transforms of torch.func: for calls that never are in one."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def _once(name: str, backward: Callable[..., Any]) -> Callable[..., Any]:
    """``backward``, whose gradients refuse to be differentiated: as constants they would give a wrong result."""

    def gradient(ctx: Any, *grads: Tensor | None) -> Any:
        found = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return found
        # They depend on all of these: autograd skips what no path leads through.
        sources = [each for each in (*grads, *ctx.saved_tensors) if each is not None and each.requires_grad]
        tensors = [each for each in found if each is not None]
        refusing = torch._C._functions.DelayedError(
            f"{name} has no gradient of its gradient: write what you differentiate twice in PyTorch's own operations",
            len(tensors) + len(sources),
        )
        left = iter(refusing(*tensors, *sources) if tensors and sources else tensors)
        return tuple(None if each is None else next(left) for each in found)

    return gradient


def differentiable(op: Any, backward: Any, composed: Callable[..., Tensor] | None = None) -> Callable[..., Any]:
    """Register the gradient of ``op`` by its first result, or by several, as the schemas say it.

    It takes a third of the time per call of what ``torch.library.register_autograd`` makes.

    Args:
        op: the overload of an operation whose results have names.
        backward: that of its gradient. An argument ``grad`` is the gradient of the first result, ``grad_x`` that of
            result x. All others are arguments or results of ``op``, or are called ``with_x`` and say whether the
            gradient of x is needed. Its results are called ``grad_x``, after an argument of ``op``. Other results of
            ``op`` have no gradient.
        composed: takes the arguments of ``op``, and returns its first result, made of PyTorch's operations. They give
            the gradient while gradients are enabled, so that it can be differentiated. None: that raises RuntimeError.

    Returns:
        ``op``, called past PyTorch's dispatcher where that has nothing to decide. Give all arguments, by position.
    """
    declaration, made = declaration_of(op), declaration_of(backward).results
    inputs, outputs, numbers = declaration.arguments, declaration.results, declaration.numbers
    taken = declaration_of(backward).arguments
    grads = ["grad" if "grad" in taken and i == 0 else f"grad_{name}" for i, name in enumerate(outputs)]
    constant = pick(grads, [grad for grad in grads if grad not in taken])
    # A context keeps tensors apart from other arguments.
    tensors = [name for name in inputs if name in declaration.tensors]
    kept = [name for name in outputs if name in taken]
    names = [*tensors, *kept, *numbers]
    save = pick([*inputs, *(f"{name} out" for name in outputs)], [*tensors, *(f"{name} out" for name in kept)])
    rest, given, sources = pick(inputs, numbers), pick(names, inputs), pick(inputs, tensors)
    order = pick([*names, *grads, *(f"with_{name}" for name in inputs)], taken)
    straight, gradient, nothing = direct(op), direct(backward), (None,) * len(inputs)

    @functools.cache
    def by_input(needs: tuple[bool, ...]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
        """Takes the gradients of inputs that need one, else None, from those that are made and None."""
        wanted = [f"grad_{name}" if need else "" for name, need in zip(inputs, needs, strict=True)]
        return pick([*made, ""], [name if name in made else "" for name in wanted])

    def forward(ctx: Any, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            output = straight(*args)
        results = output if type(output) is tuple else (output,)
        ctx.save_for_backward(*save((*args, *results)))
        ctx.constants = rest(args)
        ctx.mark_non_differentiable(*constant(results))
        ctx.set_materialize_grads(False)
        return output

    def by_arguments(ctx: Any, *given_grads: Tensor | None) -> Any:
        for grad in given_grads:
            if grad is not None:
                break
        else:
            return nothing
        needs, values = ctx.needs_input_grad, (*ctx.saved_tensors, *ctx.constants)
        if composed is not None and torch.is_grad_enabled():
            arguments = given(values)
            return _composed_gradient(composed(*arguments), given_grads[0], arguments)
        found = gradient(*order((*values, *given_grads, *needs)))
        return by_input(needs)((*found, None) if type(found) is tuple else (found, None))

    by_op = by_arguments if composed is not None else _once(op.name(), by_arguments)
    function: Any = type(
        f"{op.name()}_gradient",
        (torch.autograd.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(by_op)},
    )
    apply = past_functorch(function)

    def by_dispatcher(*args: Any) -> Any:
        args = declaration.complete(args)
        if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in sources(args)):
            return function.apply(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args) if torch._C._are_functorch_transforms_active() else straight(*args)

    library.impl(op.name().partition("::")[2], by_dispatcher, "Autograd")

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return op(*args)
        if torch.is_grad_enabled():
            for tensor in sources(args):
                if tensor is not None and tensor.requires_grad:
                    return apply(*args)
        return straight(*args)

    return call


def _composed_gradient(y: Tensor, grad: Tensor | None, arguments: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
    """Gradients of ``y`` that have gradients themselves; None for arguments that need none."""
    needed = [isinstance(a, Tensor) and a.requires_grad for a in arguments]
    given = [argument for argument, need in zip(arguments, needed, strict=True) if need]
    found = iter(torch.autograd.grad(y, given, grad, create_graph=True))
    return tuple(next(found) if need else None for need in needed)


library.define("snapshot(Tensor x) -> Tensor")
library.impl("snapshot", torch.clone, "CompositeExplicitAutograd")

snapshot = torch.ops.gpubuf.snapshot.default
"""A copy of ``x`` as it is now, without gradient, that a compiled backward reads too.

Inductor computes a plain copy anew in the backward, and there finds what the forward has since written into ``x``.
What no compiler can see into is saved.
"""


@functools.partial(torch.library.register_vmap, "gpubuf::snapshot", lib=library)
def _snapshot_vmap(_: Any, dims: tuple[int | None], x: Tensor) -> tuple[Tensor, int | None]:
    return snapshot(x), dims[0]


def dense(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """``tensor`` itself if it is contiguous and of ``dtype`` (None: any), else a copy that is."""
    if dtype is not None and tensor.dtype is not dtype:
        tensor = tensor.to(dtype)
    return tensor if tensor.is_contiguous() else tensor.contiguous()
