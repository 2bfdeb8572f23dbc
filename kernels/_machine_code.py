"""CPU kernels as machine code: compiled once, kept on disk, and loaded from there without Numba.

To import Numba and to load what it keeps takes half a second. An object file is loaded by LLVM alone, and every kernel
has an entry in it that Python calls. :mod:`gpubuf.kernels._jit` compiles what is not on disk.

Modules that are imported before a kernel runs don't import Numba either. They name their kernels: :func:`named`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import logging
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from gpubuf.kernels._tuned import user_folder

logger = logging.getLogger("gpubuf.kernels")

# Seconds that a process compiles before it says so.
_SILENCE = 2.0
_DIGEST_BYTES = 16
# How Python calls a C function with an array of arguments, in its own headers.
_METH_FASTCALL = 0x80

_lock = threading.RLock()
_spent = 0.0
_warned = False


#: Makes an object file of a function and the name of its entry.
Compiler = Callable[[Callable[..., Any], str], bytes]


class Kernel:
    """A CPU kernel. It is loaded at its first call, or compiled where no machine code is on disk.

    It takes addresses and counts, which are int64, and what its function annotates as float or bool. It runs without
    the GIL, and raises only :exc:`MemoryError`.

    Attributes:
        name: its module below ``gpubuf.kernels`` and its function; kernels of one function have more, to be different.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._function: Callable[..., Any] | None = None
        self._compiler: Compiler | None = None
        self._enter: Callable[..., Any] | None = None
        self._address = 0

    def __call__(self, *args: Any) -> Any:
        return (self._enter or self.load())(*args)

    @property
    def function(self) -> Callable[..., Any]:
        """What is compiled, as Python."""
        if self._function is None:
            importlib.import_module(f"gpubuf.kernels.{self.name.rpartition('.')[0]}")
        assert self._function is not None, f"there is no kernel {self.name}"
        return self._function

    @property
    def address(self) -> int:
        """That of the machine code, for :func:`gpubuf.kernels._primitives.call`."""
        self.load()
        return self._address

    def load(self) -> Callable[..., Any]:
        """The entry that Python calls."""
        with _lock:
            if self._enter is None:
                code = _kept(self.name)
                if code is None:
                    code = self._compile()
                self._enter, self._address = _loaded(code, self.symbol)
            return self._enter

    @property
    def symbol(self) -> str:
        """The name of its entry in the object file."""
        return "gpubuf_" + re.sub(r"\W", "_", self.name)

    def _compile(self) -> bytes:
        with _announced(folders()[0]):
            function = self.function
            assert self._compiler is not None
            code = self._compiler(function, self.symbol)
        _keep(self.name, code)
        return code


_kernels: dict[str, Kernel] = {}


def named(name: str) -> Any:
    """The kernel of a name, such as ``"rows._cpu_write.extend_rows"``; its module is imported to compile it only."""
    return _kernels.setdefault(name, Kernel(name))


def of_function(name: str, function: Callable[..., Any], compiler: Compiler) -> Kernel:
    """The same of a function, when its module is imported, and of what makes an object file of it."""
    kernel = _kernels.get(name)
    if kernel is None or kernel._function is not None:
        kernel = _kernels[name] = Kernel(name)
    kernel._function, kernel._compiler = function, compiler
    return kernel


def kernels() -> list[Kernel]:
    """All kernels; imports their modules."""
    root = Path(__file__).parent
    for path in root.rglob("_cpu*.py"):
        importlib.import_module(".".join(("gpubuf.kernels", *path.relative_to(root).with_suffix("").parts)))
    return list(_kernels.values())


# On disk


#: Machine code that comes with a wheel: ``make dist`` compiles it for the processors of :data:`PROCESSORS`.
SHIPPED = Path(__file__).parent / "machine_code"

#: What a processor must have to run shipped code, by LLVM's name for all that have it, the fastest first.
PROCESSORS = {"x86-64-v4": "avx512f avx512bw avx512cd avx512dq avx512vl", "x86-64-v3": "avx2 bmi bmi2 f16c fma lzcnt"}


def folders() -> list[Path]:
    """Where a user's machine code is looked for; it is written to the first of them that can be written to."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    if chosen:
        return [Path(chosen) / "gpubuf"]
    user = user_folder()
    return [Path(__file__).parent / "__pycache__", *([] if user is None else [user.parent / "kernels"])]


def sources() -> list[Path]:
    """All files that CPU kernels may be compiled from: `_cpu*.py`, and what they import."""
    root = Path(__file__).parent
    return sorted(path for path in root.rglob("*.py") if not path.stem.startswith(("_triton", "_launch")))


@functools.cache
def source_stamp() -> str:
    """A hash of :func:`sources`: a copy of the folder finds the same machine code."""
    root = Path(__file__).parent
    return _hash(*(part for path in sources() for part in (path.relative_to(root).as_posix(), path.read_bytes())))


@functools.cache
def _machine_stamp() -> str:
    """A hash of this processor and of LLVM."""
    import llvmlite
    from llvmlite import binding

    features = binding.get_host_cpu_features().flatten()
    return _hash(llvmlite.__version__, binding.get_process_triple(), binding.get_host_cpu_name(), features)


def _hash(*parts: str | bytes) -> str:
    found = hashlib.blake2b(digest_size=8)
    for part in parts:
        found.update(part.encode() if isinstance(part, str) else part)
        found.update(b"\0")
    return found.hexdigest()


def file_name(name: str, processor: str) -> str:
    """The file of a kernel, for a processor of :data:`PROCESSORS` or exactly that of a stamp."""
    return f"{name}-{source_stamp()}-{processor}-{sys.platform}.o"


def write(path: Path, code: bytes) -> None:
    """Write a file that is whole whenever it has its name, also if another process writes it too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    temporary.write_bytes(hashlib.blake2b(code, digest_size=_DIGEST_BYTES).digest() + code)
    temporary.replace(path)


def _places(name: str) -> Iterator[Path]:
    from llvmlite import binding

    for folder in folders():
        yield folder / file_name(name, _machine_stamp())
    if SHIPPED.exists():
        has = binding.get_host_cpu_features()
        for processor, needs in PROCESSORS.items():
            if all(has.get(feature) for feature in needs.split()):
                yield SHIPPED / file_name(name, processor)


def _kept(name: str) -> bytes | None:
    for path in _places(name):
        with contextlib.suppress(OSError):
            data = path.read_bytes()
            digest, code = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
            # LLVM ends the process if a file is broken, after a loss of power say.
            if hashlib.blake2b(code, digest_size=_DIGEST_BYTES).digest() == digest:
                return code
    return None


def _keep(name: str, code: bytes) -> None:
    problem: OSError | None = None
    for folder in folders():
        try:
            write(folder / file_name(name, _machine_stamp()), code)
            for old in folder.glob(f"{name}-*"):
                if source_stamp() not in old.name:
                    old.unlink(missing_ok=True)
            return
        except OSError as error:
            problem = problem or error
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"compiled CPU kernels can't be kept on disk, so that every process compiles them anew ({problem}): set "
            "NUMBA_CACHE_DIR to a folder that can be written to",
            RuntimeWarning,
            stacklevel=2,
        )


# In memory


class _Method(ctypes.Structure):
    """A ``PyMethodDef``."""

    _fields_ = (("name", ctypes.c_char_p), ("call", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p))


# Of the whole process: code that Python may still call must not go.
_alive: list[Any] = []


def _loaded(code: bytes, symbol: str) -> tuple[Callable[..., Any], int]:
    """The function that Python calls, and the address of that which compiled code calls."""
    from llvmlite import binding

    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), target_machine(binding))
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    method = _Method(symbol.encode(), engine.get_function_address(symbol), _METH_FASTCALL, None)
    _alive.append((engine, method))
    new = ctypes.pythonapi.PyCFunction_NewEx
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    return new(ctypes.addressof(method), None, None), engine.get_function_address(f"{symbol}_plain")


def target_machine(binding: Any, processor: str = "") -> Any:
    """LLVM's target machine of exactly this processor, or of one of :data:`PROCESSORS`.

    Its code has addresses of 64 bits. The parts of an object file, Python and the C library may lie far apart in a
    process, as they do beside CUDA, and LLVM ends the process where a distance does not fit 32 bits.
    """
    _initialize(binding)
    target = binding.Target.from_default_triple()
    return target.create_target_machine(
        cpu=processor or binding.get_host_cpu_name(),
        features="" if processor else binding.get_host_cpu_features().flatten(),
        opt=3,
        reloc="static" if target.name.startswith("x86") else "default",
        codemodel="jitdefault",
        jit=True,
    )


@functools.cache
def amd_with_avx512() -> str:
    """LLVM's name of this processor if it is AMD's and PyTorch uses its AVX-512, which MKL does not; else empty."""
    from llvmlite.binding import get_host_cpu_name

    name: str = get_host_cpu_name()
    return name if torch.backends.cpu.get_cpu_capability() == "AVX512" and name.startswith("znver") else ""


#: What machine code may call or read: of Python, and of the C library.
_PYTHON = (
    *("PyLong_AsLongLong", "PyLong_FromLongLong", "PyFloat_AsDouble", "PyFloat_FromDouble", "PyObject_IsTrue"),
    *("PyBool_FromLong", "PyErr_SetString", "PyErr_Occurred", "PyErr_NoMemory", "Py_IncRef"),
    *("_Py_NoneStruct", "PyEval_SaveThread", "PyEval_RestoreThread"),
)
#: TypeError itself. Python's own name for it is that of a pointer to it, and Numba gives LLVM another meaning of that.
TYPE_ERROR = "gpubuf_type_error"
_C = ("malloc", "free", "memcpy", "memmove", "memset", "sqrt", "sqrtf")


@functools.cache
def _initialize(binding: Any) -> None:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    for library, names in ((ctypes.pythonapi, _PYTHON), (ctypes.CDLL("ucrtbase" if os.name == "nt" else None), _C)):
        for name in names:
            binding.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
    binding.add_symbol(TYPE_ERROR, id(TypeError))


# What takes long


@contextlib.contextmanager
def _announced(folder: Path) -> Iterator[None]:
    """Log a line if this process has compiled for two seconds."""
    global _spent
    timer = threading.Timer(max(_SILENCE - _spent, 0.0), _announce, (folder,))
    timer.daemon = True
    began = time.monotonic()
    if _spent < _SILENCE:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        _spent += time.monotonic() - began


def _announce(folder: Path) -> None:
    # A warning is printed even without logging set up, so it is one only if somebody watches the terminal.
    level = logging.WARNING if sys.stderr.isatty() else logging.INFO
    kept = f"; the next process finds them in {folder}"
    logger.log(level, "gpubuf compiles its CPU kernels, which takes some seconds%s", kept)
