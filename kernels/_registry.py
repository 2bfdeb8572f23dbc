"""Registration of operations, the switch that sends CPU tensors through Triton, and checks that families share.

An operation is defined once, with a schema and three implementations:

>>> op = define("twice(Tensor x) -> Tensor", "gpubuf.kernels.x", fake=...)  # doctest: +SKIP

The implementations are functions of ``x._cpu`` and ``x._launch``, imported at the first call. Importing gpubuf
therefore compiles nothing and probes no device, and loads Numba or Triton only when an operation needs it.

The checks of arguments read no values.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import math
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from gpubuf.kernels._jit import machine_code

NAMESPACE = "gpubuf"

# FRAGMENT, so that a module that is reloaded (or a test that defines its own operation) can share the namespace.
library = torch.library.Library(NAMESPACE, "FRAGMENT")

# Tests send every operation on CPU tensors through its Triton launcher: without a GPU, by Triton's interpreter.
_triton_on_cpu = False


@functools.cache
def compiled() -> bool:
    """Whether families that have a ``_numba.py`` do the CPU's work by it: the same as ``_cpu.py``, faster.

    It takes machine code of the wheel, or Numba.
    """
    return machine_code() is not None or importlib.util.find_spec("numba") is not None


def _imported(target: str) -> Callable[..., Any]:
    """The function named ``"module:function"``: of ``_numba.py`` in place of ``_cpu.py``, if it is :func:`compiled`."""
    module, _, name = target.partition(":")
    family, _, part = module.rpartition(".")
    if part == "_cpu" and compiled() and importlib.util.find_spec(f"{family}._numba"):
        module = f"{family}._numba"
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


class Backend:
    """The functions of a ``_cpu.py``, as its attributes. Each is imported when it is first asked for.

    Args:
        module: its name. ``_numba.py`` stands in for it where that is :func:`compiled`.
    """

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        # An attribute of its own from now on, which is found without a call.
        function = vars(self)[name] = _imported(f"{self._module}:{name}")
        return function


def _trusting(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` without the checks that it leaves out if it is told ``trusted=True``."""
    takes_it = "trusted" in inspect.signature(function).parameters
    return functools.partial(function, trusted=True) if takes_it else function


def _on_its_device(target: str, trusted: bool = False) -> Callable[..., Any]:
    """A launcher, imported at its first call, with the device of its first argument as the current one.

    Triton launches on the current device. Tensors in host memory change nothing.
    """
    launch: Callable[..., Any] | None = None

    def call(*args: Any) -> Any:
        nonlocal launch
        if launch is None:
            launch = _trusting(_imported(target)) if trusted else _imported(target)
        device = args[0].get_device()
        if device < 0 or device == torch.cuda.current_device():
            return launch(*args)
        with torch.cuda.device(device):
            return launch(*args)

    return call


def define(
    schema: str, family: str = "", *, cpu: str = "", cuda: str = "", fake: Callable[..., Any] = lambda *_: None
) -> Any:
    """Define ``gpubuf::<name>`` and return its overload, ready to be called.

    Args:
        schema: a ``torch.library`` schema without the namespace; mutated arguments are annotated.
        family: ``__name__`` of the package that has the backends. Their functions are called as the operation, without
            the name of the family: ``rows_gather`` is ``gather`` of ``rows/_cpu.py``, and of ``rows/_launch.py``, which
            serves CUDA and ROCm, and in tests CPU tensors.
        cpu, cuda: these functions, as ``"module:function"``, where they are elsewhere.
        fake: shape-only implementation, for ``FakeTensorMode`` and ``torch.compile``. Default: that of an operation
            which returns nothing.

    ``Library.impl`` takes 1.5 µs per call, ``torch.library.custom_op`` 10 µs.
    """
    name = schema.partition("(")[0]
    function = name.removeprefix(f"{family.rpartition('.')[2]}_")
    cpu, cuda = cpu or f"{family}._cpu:{function}", cuda or f"{family}._launch:{function}"
    on_gpu = _on_its_device(cuda)
    on_cpu: Callable[..., Any] | None = None

    # One call less than a function that forwards: the whole operation takes a few microseconds.
    def cpu_or_interpreter(*args: Any) -> Any:
        nonlocal on_cpu
        if _triton_on_cpu:
            return on_gpu(*args)
        if on_cpu is None:
            on_cpu = _imported(cpu)
        return on_cpu(*args)

    library.define(schema)
    library.impl(name, cpu_or_interpreter, "CPU")
    library.impl(name, on_gpu, "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    operation = getattr(getattr(torch.ops, NAMESPACE), name).default
    _implementations[operation] = cpu, cuda, on_gpu
    return operation


_implementations: dict[Any, tuple[str, str, Callable[..., Any]]] = {}
"""For each operation the names of its CPU function and of its launcher, and the launcher."""


def on_gpu(operation: Any) -> Callable[..., Any]:
    """What an operation does on a GPU, past the dispatcher."""
    return _implementations[operation][2]


def past_dispatcher(first: torch.Tensor) -> bool:
    """Whether the CPU twin of an operation on ``first`` and other plain tensors may be called directly.

    True if PyTorch's dispatcher has nothing to decide: in eager mode for plain tensors while no mode (fake tensors,
    tracing, a default device) is active. It would only box the arguments, which takes 2 to 6 µs of a call of 5 to 15.
    Do not ask for operations with gradients. The first argument stands for all of them.
    """
    if _triton_on_cpu or _compiling() or type(first) is not torch.Tensor or not first.is_cpu:
        return False
    return not (_modes() or _functions())


def runs_at_once(first: torch.Tensor) -> bool:
    """Whether operations on ``first`` run now, on a CPU or a GPU, while no mode of PyTorch changes what they do."""
    plain = type(first) is torch.Tensor and not _compiling() and not _modes() and not _functions()
    return plain and (first.is_cpu or first.is_cuda)


def launches_kernels(first: torch.Tensor) -> bool:
    """Whether operations on ``first`` launch Triton's kernels, rather than run on the CPU or on fake tensors."""
    return type(first) is torch.Tensor and (first.is_cuda or (_triton_on_cpu and first.is_cpu))


_compiling = torch.compiler.is_compiling
_is_neg, _is_conj, _is_zero = torch.Tensor.is_neg, torch.Tensor.is_conj, torch.Tensor._is_zerotensor
_modes, _functions = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory does not hold its values: conjugated or negated lazily, or zeros without memory."""
    return tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor()


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or a contiguous copy where its memory does not hold its values."""
    return tensor.clone(memory_format=torch.contiguous_format) if is_lazy(tensor) else tensor


def is_tensor(argument: Any) -> bool:
    """Whether an argument of a schema is a tensor, or a tensor or None."""
    kind = argument.type
    return isinstance(kind.getElementType() if isinstance(kind, torch.OptionalType) else kind, torch.TensorType)


def pick(names: Sequence[str], wanted: Sequence[str]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function that takes those wanted from the values of ``names``."""
    places = [names.index(name) for name in wanted]
    if len(places) > 1:
        return itemgetter(*places)
    # A slice of a tuple is a tuple.
    return itemgetter(slice(places[0], places[0] + 1) if places else slice(0))


def without_dispatch(operation: Any, *, given: Sequence[str] | None = (), trusted: bool = False) -> Callable[..., Any]:
    """``operation``, called past PyTorch's dispatcher if that has nothing to decide.

    Args:
        operation: what :func:`define` returned.
        given: names of the arguments that come from users: real tensors, or lists of any tensors. The CPU reads them by
            address, so that lazy ones are copied (:func:`in_memory`). The check takes 0.15 µs a tensor. None: all
            tensors, the first argument too.
        trusted: the caller vouches for dtypes, shapes, strides and devices of all arguments. A function that takes the
            keyword ``trusted`` then skips its checks.
    """
    twin: Callable[..., Any] | None = None
    target, launcher, on_gpu = _implementations[operation]
    if trusted:
        on_gpu = _on_its_device(launcher, trusted=True)
    # Counted from the second argument, as `call` has them.
    positions = {argument.name: i - 1 for i, argument in enumerate(operation._schema.arguments)}
    first_too = given is None
    if given is None:
        given = [argument.name for argument in operation._schema.arguments[1:] if is_tensor(argument)]
    lists = {argument.name for argument in operation._schema.arguments if isinstance(argument.type, torch.ListType)}
    rows = [positions[name] for name in given if name in lists]
    vectors = [positions[name] for name in given if name not in lists]

    def some_rows_are_lazy(args: tuple[Any, ...]) -> bool:
        for position in rows:
            tensors = args[position]
            if True in map(_is_neg, tensors) or True in map(_is_conj, tensors) or True in map(_is_zero, tensors):
                return True
        return False

    def copied(args: tuple[Any, ...]) -> list[Any]:
        out = list(args)
        for position in vectors:
            out[position] = None if out[position] is None else in_memory(out[position])
        for position in rows:
            out[position] = [in_memory(tensor) for tensor in out[position]]
        return out

    def call(first: torch.Tensor, *args: Any) -> Any:
        nonlocal twin
        # `past_dispatcher` spelled out.
        if _compiling():
            return operation(first, *args)
        # `is_lazy` spelled out: it is asked for every key of every write. What is real is not conjugated.
        for position in vectors:
            tensor = args[position]
            if tensor is not None and (tensor.is_neg() or tensor._is_zerotensor()):
                return call(first, *copied(args))
        if rows and some_rows_are_lazy(args):
            return call(first, *copied(args))
        if first_too and (first.is_neg() or first._is_zerotensor()):
            return call(in_memory(first), *args)
        if type(first) is not torch.Tensor or _modes() or _functions():
            return operation(first, *args)
        if not first.is_cpu or _triton_on_cpu:
            return on_gpu(first, *args) if first.is_cuda or first.is_cpu else operation(first, *args)
        if twin is None:
            twin = _trusting(_imported(target)) if trusted else _imported(target)
        return twin(first, *args)

    return call


def demand(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raise TypeError or ValueError unless ``tensor`` is contiguous, and of that dtype and shape."""
    if tensor.dtype is not dtype:
        raise TypeError(f"{name} must be {str(dtype).removeprefix('torch.')}, not {tensor.dtype}")
    if tensor.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, not {list(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, but has strides {tensor.stride()}")


def demand_int64(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise TypeError or ValueError unless ``tensor`` is contiguous, int64 and of that shape."""
    demand(name, tensor, torch.int64, shape)


def demand_dense(name: str, tensor: Tensor, dtype: torch.dtype, *shape: int) -> None:
    """As :func:`demand`, of a tensor that is read alike whatever its shape: it may have another of as many elements."""
    # One condition on the hot path; what is wrong is only looked for when something is.
    if tensor.dtype is not dtype or tensor.numel() != math.prod(shape) or not tensor.is_contiguous():
        demand(name, tensor, dtype, shape)


def length_of(name: str, vector: Tensor) -> int:
    """Number of entries; raise TypeError or ValueError unless it is a contiguous int64 vector."""
    if vector.dtype is not torch.int64 or vector.dim() != 1 or not vector.is_contiguous():
        demand_int64(name, vector, (vector.numel(),))
    return vector.numel()


def check_devices(first: Tensor, *others: Tensor | None) -> None:
    """Raise ValueError unless all tensors are on one device."""
    device = first.device
    # The set of devices is made for the message alone: it takes longer than the comparisons.
    for tensor in others:
        if tensor is not None and tensor.device != device:
            found = sorted({str(t.device) for t in (first, *others) if t is not None})
            raise ValueError(f"all tensors of an operation must be on one device, not on {found}")


@functools.lru_cache(maxsize=64)
def device_name(device: torch.device) -> str | None:
    """Name under which configurations are tuned; None for CPU tensors, which run through the interpreter."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None
