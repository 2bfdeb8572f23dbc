"""Systems that are not Linux, as a process sees them that has only what they have."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: Run once torch is there, before gpubuf.
MACOS = """
import multiprocessing.util, os, select, sys, torch, numba, tensordict
sys.modules["triton"] = None
for module, names in {os: "memfd_create posix_fallocate sched_getaffinity", select: "epoll"}.items():
    for name in names.split():
        vars(module).pop(name, None)
"""

WINDOWS = (
    MACOS
    + """
import ctypes, mmap
for name in ("fcntl", "resource", "termios", "tty", "pwd", "grp"):
    sys.modules[name] = None
for module, names in {
    os: "register_at_fork fork getppid geteuid getuid O_NOFOLLOW O_CLOEXEC O_NONBLOCK",
    mmap: "MAP_PRIVATE MAP_SHARED MADV_WILLNEED",
}.items():
    for name in names.split():
        vars(module).pop(name, None)
opened, loaded, mapped = os.open, ctypes.CDLL.__init__, mmap.mmap

def only_files(path, *args, **named):
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", path)
    return opened(path, *args, **named)

def only_named(self, name, *args, **named):
    if name is None:
        raise TypeError("bad argument type for built-in operation")
    loaded(self, name, *args, **named)

class Mapping(mapped):
    def __new__(cls, file, n_bytes, tagname=None, access=mmap.ACCESS_DEFAULT, offset=0):
        return mapped.__new__(cls, file, n_bytes, access=access, offset=offset)

os.open, ctypes.CDLL.__init__, mmap.mmap = only_files, only_named, Mapping
"""
)

RUN = "import runpy\nsys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"


@pytest.mark.parametrize(("lacks", "part"), [(WINDOWS, "refused"), (MACOS, "mapped")], ids=["Windows", "macOS"])
def test_systems_that_lack_what_linux_has(lacks: str, part: str, tmp_path: Path):
    """Buffers, priorities, slices, checkpoints and training on a CPU work, and the rest says what it needs."""
    smoke = str(ROOT / "tests/support/smoke.py")
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", lacks + RUN, smoke, part]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
