"""Launches kernels, with less work on the host than ``kernel[grid](...)``, and makes launches functions of operations.

:func:`launch` is for any kernel. :func:`launcher` and :func:`launches` make the GPU's function of an operation that
:mod:`gpubuf.kernels._operations` declares.

At every launch Triton binds the arguments, decides what to specialise the kernel on, turns that and the options into a
text, looks the compiled kernel up by it, and takes the arguments apart. :func:`launch` lets Triton do this once for
each configuration. After that it calls the compiled kernel's own launcher.

It finds the compiled kernel by a key. The key says at least as much as Triton's own, so that two calls with one key
have one specialisation:

===============================  ======================================  ============================================
argument                         Triton specialises on                   the key has
===============================  ======================================  ============================================
tensor                           dtype, address divisible by 16          both, and the index of its device
``int``                          1, divisible by 16, its width           the value
``int``, not to be specialised   its width                               its bits from the 31st on, and so its width
anything else, such as a tuple   what ``native_specialize_impl`` says    that
constexpr                        the value, as text                      name, type and value
===============================  ======================================  ============================================

Constexprs and ``num_warps`` choose a :class:`Variant` of the kernel. Its key of a launch has the other arguments, the
current device and the settings of Triton that affect compilation. It enters the cache only after Triton itself has
launched with these arguments: a call that Triton refuses, with a tensor in host memory for example, is refused again.

Everything unusual goes through ``kernel[grid](...)``: the interpreter, GPUs of other makers (Triton looks at more
there), hooks, profilers, subclasses of tensors, and a ``JITFunction.run`` that somebody has replaced.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from types import NoneType
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import _disable_current_modes
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from gpubuf.kernels import config
from gpubuf.kernels._operations import declaration_of, dense, parameters_of, returned
from gpubuf.kernels._registry import device_name, pick

try:
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.compiler import CompiledKernel
except ImportError:  # A Triton with other insides, or without NVIDIA's backend.
    native_specialize_impl = CUDABackend = CudaLauncher = CompiledKernel = None

# Triton 3.4 has it in its language.
constexpr_function = getattr(triton, "constexpr_function", None) or vars(tl)["constexpr_function"]

KEPT = 1024
"""Variants kept, and configurations of each. There are more only if sizes change with every call."""

FP_FUSION = True
"""Whether the compiler may round a product and a sum once. Said at every launch: Triton changes its default in 3.10."""

ADDRESSES = 64
"""Addresses of what launches are given that are kept for each: an allocator gives the same ones again and again."""

_address = Tensor.data_ptr
_run = JITFunction.run if JITFunction.run.__module__ == JITFunction.__module__ else None


def jit_for_any_size(*unaligned: str) -> Callable[[Any], Any]:
    """``@triton.jit`` of a kernel that is compiled once for all sizes: Triton does not look at the value of any number.

    Numbers are all arguments that are neither pointers nor constexprs. Nor does Triton look at the alignment of the
    pointers called ``unaligned``.
    """

    def decorate(function: Any) -> Any:
        names = [name for name in inspect.signature(function).parameters if not name.endswith("_ptr")]
        numbers = [name for name in names if name not in function.__annotations__]
        return triton.jit(function, do_not_specialize=numbers, do_not_specialize_on_alignment=unaligned)

    return decorate


def all_registers(num_warps: int) -> int:
    """What a thread can have at most if a multiprocessor's registers are all for one program: for ``maxnreg``."""
    return min(255, 65536 // (32 * num_warps))


def cdiv(count: int, block: int) -> int:
    """How many blocks ``count`` takes, as ``triton.cdiv``, which takes a microsecond on the host."""
    return -(-count // block)


def encode_arguments(values: Sequence[int]) -> tuple[int, ...]:
    """``2 * value + 3`` of addresses or strides (0 or more), padded to a power of two by repeating the last.

    Triton compiles a variant for each combination of integers in a tuple that are 1 or multiples of 16, and can't
    compile those with a 1. These numbers are odd and at least 3. Address 0, of an empty tensor, is one of the values.
    """
    padding = (1 << (len(values) - 1).bit_length()) - len(values)
    return tuple([2 * value + 3 for value in (*values, *[values[-1]] * padding)])


class Launcher(NamedTuple):
    """Launches a compiled kernel without hooks: ``function(programs, 1, 1, stream, *between, arguments)``.

    ``arguments`` are all of the kernel, constexprs included: a tuple or, where ``apart`` is set, one by one.
    """

    function: Callable[..., None]
    between: tuple[Any, ...]
    apart: bool

    def tail(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """What comes after the stream."""
        return (*self.between, *arguments) if self.apart else (*self.between, arguments)


def launcher_of(made: Any) -> Launcher:
    """What launches a compiled kernel."""
    run, function, metadata = made.run, made.function, made.packed_metadata
    if type(run) is CudaLauncher and hasattr(run, "kernel_signature") and not _scratch(run):
        # Triton 3.7: what its launcher does for a kernel without scratch memory, which is 1 µs more than this.
        flags, described = (run.launch_cooperative_grid, run.launch_pdl), (run.arg_annotations, run.kernel_signature)
        # Five absent ones: metadata for hooks, two hooks, two scratch memories.
        return Launcher(run.launch, (function, *flags, metadata, None, None, None, None, None, *described), False)
    return Launcher(run, (function, metadata, None, None, None), True)


def _scratch(run: Any) -> int:
    return int(run.global_scratch_size) + int(run.profile_scratch_size)


def key_of(arguments: Sequence[Any], specialised: Sequence[bool]) -> tuple[list[Any], list[Any]]:
    """The key of a call, and its arguments in the form that a launcher takes at the least cost.

    Args:
        arguments: all that are not constexprs.
        specialised: for each of them, whether Triton specialises on its value.

    Returns:
        The key, and the arguments with addresses for tensors. Three entries of the key are about a tensor, one is about
        any other argument.
    """
    key: list[Any] = []
    values: list[Any] = []
    for argument, by_value in zip(arguments, specialised, strict=True):
        kind = type(argument)
        if kind is Tensor or kind is Parameter:
            address = argument.data_ptr()
            key += (argument.dtype, argument.get_device(), not address & 15)
            values.append(address)
        elif kind is int:
            key.append(argument if by_value else argument >> 31)
            values.append(argument)
        else:
            key.append(native_specialize_impl(CUDABackend, argument, False, by_value, True))
            values.append(argument)
    return key, values


def somebody_watches() -> Any:
    """Whether somebody has replaced Triton's launch, or has set a hook of it."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    # The hooks of launches are chains; an empty chain is none.
    return (
        JITFunction.run is not _run
        or getattr(enter, "calls", enter)
        or getattr(leave, "calls", leave)
        or runtime.add_stages_inspection_hook
    )


class Variant:
    """A kernel with its constexprs. A launch gives the other arguments.

    Attributes:
        kernel: a ``@triton.jit`` function, as it was decorated. Held, so that its ``id`` can't become that of another.
        constexprs: those of the kernel, all of them and in its order; another order is slower.
        num_warps, maxnreg: as of :func:`variant_of`.
        direct: whether launches can be taken over.
        specialised: for each argument that is not a constexpr, whether Triton specialises on its value.
        compiled: launchers and compiled kernels, which hold what their handles name, by key.
    """

    def __init__(self, kernel: Any, num_warps: int, maxnreg: int | None, constexprs: dict[str, Any]) -> None:
        self.kernel, self.num_warps, self.maxnreg, self.constexprs = kernel, num_warps, maxnreg, constexprs
        self.compiled: dict[Any, tuple[Launcher, Any]] = {}
        self.direct = type(kernel) is JITFunction and native_specialize_impl is not None
        if self.direct:
            plain = [param for param in kernel.params if not param.is_constexpr]
            self.specialised = tuple(not param.do_not_specialize for param in plain)
            # Constexprs come last. The type of an annotated argument is its annotation; no kernel here has any.
            self.direct = [param.name for param in kernel.params[len(plain) :]] == [*constexprs] and not any(
                param.annotation for param in plain
            )

    def launch(self, programs: int, arguments: tuple[Any, ...]) -> None:
        """Launch so many programs. Never waits for the GPU."""
        if _noting.calls is not None:
            _noting.calls.append(Call(self, programs, arguments))
            # The interpreter works by functions of torch, which are no others of the call.
            with launches_noted(None), _disable_current_modes():
                self.launch(programs, arguments)
            return
        if not self.direct or somebody_watches() or self.kernel.pre_run_hooks:
            self.launch_by_triton(programs, arguments)
            return
        device = driver.active.get_current_device()
        key, values = self.key(device, arguments)
        compiled = self.compiled.get(key)
        if compiled is None:
            made = self.launch_by_triton(programs, arguments)
            if type(made) is CompiledKernel and made.metadata.target.backend == "cuda":
                if len(self.compiled) >= KEPT:
                    self.compiled.clear()
                self.compiled[key] = launcher_of(made), made
            return
        launcher = compiled[0]
        launcher.function(programs, 1, 1, driver.active.get_current_stream(device), *launcher.tail(values))

    def key(self, device: int, arguments: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """What a launch on ``device`` is looked up by, and all arguments as a launcher takes them."""
        parts, values = key_of(arguments, self.specialised)
        settings = (self.kernel.debug, knobs.runtime.debug, knobs.compilation.instrumentation_mode)
        return (device, *settings, *parts), (*values, *self.constexprs.values())

    def launch_by_triton(self, programs: int, arguments: tuple[Any, ...]) -> Any:
        """The same, by way of Triton's own launcher. Returns the compiled kernel."""
        # AMD's backend knows no ``maxnreg``.
        limit = {} if self.maxnreg is None or torch.version.hip else {"maxnreg": self.maxnreg}
        options = {"num_warps": self.num_warps, "enable_fp_fusion": FP_FUSION, **limit}
        return self.kernel[(programs,)](*arguments, **options, **self.constexprs)


_variants: dict[Any, Variant] = {}


def variant_of(kernel: Any, num_warps: int, maxnreg: int | None, constexprs: dict[str, Any]) -> Variant:
    """The variant of a kernel, of which there is one for equal constexprs of equal types.

    Args:
        kernel, constexprs: as of :class:`Variant`.
        num_warps: warps of a program.
        maxnreg: registers that a thread may have on an NVIDIA GPU. Without it ptxas looks for fewer, so that more
            programs fit, and may spill some.
    """
    constants = constexprs.values()
    key = (id(kernel), num_warps, maxnreg, *constexprs, *map(type, constants), *constants)
    found = _variants.get(key)
    if found is None:
        found = Variant(kernel, num_warps, maxnreg, constexprs)
        # The key can't tell 0.0 from -0.0, and a NaN is never found again.
        if not any(isinstance(value, float) and (value == 0 or math.isnan(value)) for value in constants):
            if len(_variants) >= KEPT:
                _variants.clear()
            _variants[key] = found
    return found


def launch(
    kernel: Any, programs: int, *arguments: Any, num_warps: int = 4, maxnreg: int | None = None, **constexprs: Any
) -> None:
    """``kernel[(programs,)](*arguments, num_warps=num_warps, **constexprs)``; see :func:`variant_of`."""
    variant_of(kernel, num_warps, maxnreg, constexprs).launch(programs, arguments)


class Torch:
    """A function of torch that launches a kernel: among calls, in the place of a variant.

    Args:
        bound: from the arguments, of which the last one is the result, to a function that computes it again.
    """

    def __init__(self, bound: Callable[..., Callable[[], Any]]) -> None:
        self.bound = bound

    def launch(self, programs: int, arguments: tuple[Any, ...]) -> None:
        """Call the function."""
        self.bound(*arguments)()


class Call(NamedTuple):
    """A launch as it was asked for."""

    variant: Variant | Torch
    programs: int
    arguments: tuple[Any, ...]


class _Noting(threading.local):
    calls: list[Call] | None = None


_noting = _Noting()


@contextlib.contextmanager
def launches_noted(into: list[Call] | None) -> Iterator[None]:
    """Within it the launches of this thread are noted in a list besides, or, where it is None, nowhere."""
    outer, _noting.calls = _noting.calls, into
    try:
        yield
    finally:
        _noting.calls = outer


class Given(NamedTuple):
    """In the place of an argument of a call: the tensor of that number that a launch is given."""

    number: int


def with_arguments(calls: Iterable[Call], replacement: Callable[[Any], Any]) -> list[Call]:
    """The launches with other arguments, each the ``replacement`` of one."""
    return [Call(variant, programs, tuple(map(replacement, given))) for variant, programs, given in calls]


class Ready:
    """Launches whose arguments stay, but for tensors that each is given, ready to be repeated.

    Args:
        calls: the launches, which have run before.
        device: the number of the GPU that they are for; -1: that which is current (tensors are in host memory).
        given: tensors among the arguments, each in other memory, which are not held: a launch has others in their
            places, of the same dtypes and on the same device.
    """

    def __init__(self, calls: Sequence[Call], device: int, given: Sequence[Tensor] = ()) -> None:
        self._device = device
        places: dict[int, Any] = {each.data_ptr(): Given(number) for number, each in enumerate(given)}
        self._calls = with_arguments(
            calls, lambda each: places.get(each.data_ptr(), each) if isinstance(each, Tensor) else each
        )
        # The hooks of kernels may come later.
        self._hooks = [
            getattr(variant.kernel, "pre_run_hooks", ()) for variant, *_ in calls if type(variant) is Variant
        ]
        self._at: dict[tuple[int, ...], list[tuple[Any, ...]]] = {}

    def launch(self, *given: Tensor) -> None:
        """Launch them, in order, on the current stream."""
        device, addresses = self._device, tuple(map(_address, given))
        direct = self._at.get(addresses) or self._bound(given, addresses)
        if direct and not somebody_watches() and not any(self._hooks):
            current = driver.active.get_current_device()
            if device in (current, -1):
                stream = driver.active.get_current_stream(current)
                for function, programs, tail, _ in direct:
                    function() if tail is None else function(programs, 1, 1, stream, *tail)
                return
        with torch.cuda.device(device):
            for variant, programs, arguments in self._with(given):
                variant.launch(programs, arguments)

    def _with(self, given: Sequence[Tensor]) -> list[Call]:
        return with_arguments(self._calls, lambda each: given[each.number] if type(each) is Given else each)

    def _bound(self, given: Sequence[Tensor], addresses: tuple[int, ...]) -> list[tuple[Any, ...]]:
        """The launches with what is given at these addresses; none: one is not compiled for them."""
        found: list[tuple[Any, ...]] = []
        for variant, programs, arguments in self._with(given):
            if isinstance(variant, Torch):
                # There is no stream, and nothing after it.
                found.append((variant.bound(*arguments), 0, None, None))
                continue
            key, values = variant.key(max(self._device, 0), arguments) if variant.direct else (None, ())
            if key not in variant.compiled:
                return []
            launcher, compiled = variant.compiled[key]
            # Held: what the handles of launches name.
            found.append((launcher.function, programs, launcher.tail(values), compiled))
        if len(self._at) >= ADDRESSES:
            self._at.clear()
        self._at[addresses] = found
        return found


class Launch(NamedTuple):
    """A launch, prepared for all calls that differ in their tensors alone. ``numbers`` come after these."""

    variant: Variant
    programs: int
    numbers: tuple[int, ...]

    def __call__(self, tensors: tuple[Any, ...]) -> None:
        self.variant.launch(self.programs, tensors + self.numbers)


@dataclass(frozen=True)
class BlockPlan:
    """How a kernel covers rows or elements, a block of them in each program."""

    block: int
    programs: int
    num_warps: int


@dataclass(frozen=True)
class PartPlan:
    """How kernels cover ``[rows, width]`` numbers, whose rows are cut into parts where sums over rows are needed.

    Attributes:
        block_rows: rows that a program has at a time.
        block_width: elements of a row that a program has at a time.
        blocks: of rows or of elements, as the kernel says.
        parts: of the rows, a program each.
        part_rows: rows of each of these.
        num_warps: of a program.
    """

    block_rows: int
    block_width: int
    blocks: int
    parts: int
    part_rows: int
    num_warps: int


REAL = {torch.float32: tl.float32, torch.float64: tl.float64}

FINISH_BLOCK = 256
"""Partial sums that the finishing kernel of a loss adds at a time."""


class Prepared:
    """The launches of an operation, prepared once for all calls that differ in their tensors alone.

    Attributes:
        values: what the parameters of kernels may name: numbers, sizes and the plan's attributes by their names; by
            names that end in ``_ptr`` the places of tensors among arguments and results; and ``HAS_`` with the name of
            an optional argument in capitals.
    """

    def __init__(self, values: dict[str, Any], real: torch.dtype) -> None:
        self.values, self._real = values, real
        self._sums: tuple[int, ...] = ()
        self._halved = False
        self._launches: list[tuple[Launch, Callable[[tuple[Any, ...]], tuple[Any, ...]]]] = []

    def sums(self, *shape: int) -> int:
        """Have a new tensor of the computing dtype at each call, for sums of programs. Returns its place."""
        self._sums = shape
        return -1

    def halves(self) -> tuple[int, int]:
        """The places of both halves of that tensor, ``[2, ...]``."""
        self._halved = True
        return -3, -2

    def launch(self, kernel: Any, programs: int, num_warps: int, **more: Any) -> None:
        """Have a kernel launched on so many programs, with ``more`` values. Its pointers come before its numbers."""
        values = self.values | more
        places: list[int] = []
        numbers: list[int] = []
        constants: dict[str, Any] = {}
        for parameter in parameters_of(kernel.fn):
            known = parameter if parameter in values else parameter.lower()
            if known not in values:
                raise TypeError(
                    f"nothing is called {parameter}, as a parameter of {kernel.fn.__name__}: {list(values)}"
                )
            if kernel.fn.__annotations__.get(parameter) is tl.constexpr:
                constants[parameter] = values[known]
            else:
                (places if parameter.endswith("_ptr") else numbers).append(values[known])
        # No kernel has a single pointer: of one place an itemgetter gives no tuple.
        variant = variant_of(kernel, num_warps, None, constants)
        self._launches.append((Launch(variant, programs, (*numbers,)), itemgetter(*places)))

    def run(self, tensors: tuple[Any, ...]) -> bool:
        """Launch with these arguments and results of the operation. Returns whether there was anything to launch."""
        if self._sums:
            sums = tensors[-1].new_empty(self._sums, dtype=self._real)
            tensors += (*sums, sums) if self._halved else (sums,)
        for launch, take in self._launches:
            launch(take(tensors))
        return bool(self._launches)


@dataclass(frozen=True)
class Finish:
    """A kernel that adds the sums of all programs, where there are several.

    Attributes:
        kernel: its ``partial_ptr`` is where each program has left its sums, and ``count`` the number of programs.
        sums: of a program.
        always: whether there are sums also of rows that are not reduced.
    """

    kernel: Any
    sums: int
    always: bool = False


def launcher(
    operation: Any,
    kernel: Any,
    plan: Callable[..., Any],
    *,
    programs: Callable[..., int] | None = None,
    warps: str = "num_warps",
    finish: Finish | None = None,
) -> Callable[..., Any]:
    """The GPU's function of an operation: one launch, and one more to finish a reduction over several programs.

    Args:
        operation: what :func:`gpubuf.kernels._operations.declare` returned.
        kernel: the Triton kernel.
        plan: as of :func:`launches`.
        programs: a function of values by their names that returns the size of the grid; None: that of the plan.
        warps: which attribute of the plan says how many warps a program has.
        finish: what adds the sums of programs.
    """

    of_programs = [] if programs is None else parameters_of(programs)
    first_result = f"{declaration_of(operation).results[0]}_ptr"

    def prepare(to: Prepared, chosen: Any) -> None:
        values = to.values
        count = chosen.programs if programs is None else programs(*[values[name] for name in of_programs])
        if not count:
            return
        values["single"] = count == 1
        if finish is not None:
            values["partial_ptr"] = values[first_result] if count == 1 else to.sums(finish.sums * count)
        to.launch(kernel, count, getattr(chosen, warps))
        # Rows that are not reduced have the number 0.
        if finish is not None and count > 1 and (finish.always or values["reduction"]):
            to.launch(finish.kernel, 1, 2, count=count, BLOCK=FINISH_BLOCK)

    return launches(operation, plan)(prepare)


def launches(
    operation: Any, plan: Callable[..., Any], without_rows: float = 0.0
) -> Callable[[Callable[[Prepared, Any], None]], Callable[..., Any]]:
    """Decorates a function that prepares the launches of an operation, given a :class:`Prepared` and its plan.

    Args:
        operation: what :func:`gpubuf.kernels._operations.declare` returned.
        plan: a function of sizes, by their names, and the name of the device; returns a dataclass.
        without_rows: what results are then: nothing is launched.
    """
    declaration, schema = declaration_of(operation), operation._schema.arguments
    inputs, numbers = declaration.arguments, declaration.numbers
    tensors = [place for place, name in enumerate(inputs) if name in declaration.tensors]
    take_numbers = pick(inputs, numbers)
    # No kernel asks for the pointer of a number. A result may have the name of one, and comes later.
    places = {f"{name}_ptr": place for place, name in enumerate([*inputs, *declaration.results])}
    optional = [(a.name, place) for place, a in enumerate(schema) if isinstance(a.type, torch.OptionalType)]
    floats = [a.name for a in schema if isinstance(a.type, torch.FloatType)]
    of_plan = parameters_of(plan)[:-1]

    def decorate(function: Callable[[Prepared, Any], None]) -> Callable[..., Any]:
        @config.remembered
        def prepared(
            kinds: tuple[type, ...],
            given: tuple[Any, ...],
            sizes: tuple[tuple[str, int], ...],
            real: torch.dtype,
            device: torch.device,
        ) -> Prepared:
            values = {**places, **dict(zip(numbers, given, strict=True)), **dict(sizes), "REAL": REAL[real]}
            for name in floats:
                # A launch can't be looked up by a float that is zero, but by an integer.
                values[name] = values[name] or 0
            for name, place in optional:
                values[f"HAS_{name.upper()}"] = kinds[place] is not NoneType
                if kinds[place] is NoneType:
                    values[f"{name}_ptr"] = declaration.principal
            found = Prepared(values, real)
            if sizes[0][1]:
                chosen = plan(*[values[name] for name in of_plan], device_name(device))
                values.update(vars(chosen))
                function(found, chosen)
            return found

        def run(*args: Any) -> Any:
            args = declaration.complete(args)
            sizes = declaration.sizes(args)
            real = declaration.real(args)
            results = declaration.new_results(args, real)
            kinds = tuple(map(type, args))
            known = prepared(kinds, take_numbers(args), tuple(sizes.items()), real, results[0].device)
            for place in tensors:
                if args[place] is not None and not args[place].is_contiguous():
                    args = tuple(dense(each) if isinstance(each, Tensor) else each for each in args)
                    break
            if not known.run((*args, *results)):
                for result in results:
                    result.fill_(without_rows)
            return returned(results)

        return run

    return decorate
