"""Systems that are not Linux, as a process sees them that has only what they have.

Each program runs in a process of its own in which the rest is blocked once torch is imported.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

MACOS = """
import os, select, torch, numba, tensordict, multiprocessing.util
for module, names in {os: "memfd_create posix_fallocate sched_getaffinity", select: "epoll"}.items():
    for name in names.split():
        vars(module).pop(name, None)
"""

WINDOWS = (
    MACOS
    + """
import ctypes, mmap, sys
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

USED = """
import gpubuf, warnings
from tensordict import TensorDict

def steps(n):
    after = {"observation": torch.randn(n, 3), "reward": torch.randn(n, 1)}
    after |= {key: torch.arange(n).remainder(7).eq(0).view(n, 1) for key in ("done", "terminated")}
    before = {"observation": torch.randn(n, 3), "action": torch.rand(n, 1)}
    return TensorDict({**before, "next": TensorDict(after, [n])}, [n])

for sampler in (gpubuf.RandomSampler(), gpubuf.PrioritizedSampler(100, 0.6, 0.4), gpubuf.SliceSampler(num_slices=8)):
    buffer = gpubuf.TensorDictReplayBuffer(storage=gpubuf.LazyTensorStorage(100), sampler=sampler, batch_size=32)
    for _ in range(5):
        buffer.extend(steps(30))
        batch = buffer.sample()
        batch["td_error"] = torch.rand(32)
        buffer.update_tensordict_priority(batch)
    for _ in range(2):
        buffer.save("kept")
    again = gpubuf.TensorDictReplayBuffer(storage=gpubuf.LazyTensorStorage(100), batch_size=32)
    if type(sampler) is gpubuf.RandomSampler:
        again.load("kept")
        assert (again[:]["action"] == buffer[:]["action"]).all()
"""

TRAINED = """
from gpubuf.__main__ import main
main("train --total-steps 300 --learning-starts 100 --eval-episodes 1 --device cpu --out run".split())
assert os.path.exists("run")
"""

REFUSED = """
for make, what in (
    (lambda: gpubuf.LazyMemmapStorage(10), "memory-mapped rows need Linux or macOS"),
    (lambda: gpubuf.ReplayBuffer(storage=gpubuf.LazyTensorStorage(10), writers=2).client(steps(2)), "need Linux"),
):
    try:
        make()
    except NotImplementedError as error:
        assert what in str(error), error
    else:
        raise AssertionError(what)
"""

MAPPED = """
buffer = gpubuf.ReplayBuffer(storage=gpubuf.LazyMemmapStorage(100, scratch_dir="rows"), batch_size=8)
buffer.extend(steps(150))
rows = buffer[:].clone()
del buffer
again = gpubuf.ReplayBuffer(storage=gpubuf.LazyMemmapStorage(100, scratch_dir="rows", existsok=True), batch_size=8)
assert len(again) == 100 and (again[:]["action"] == rows["action"]).all() and len(again.sample()) == 8
"""


@pytest.mark.parametrize(
    ("lacks", "program"),
    [(WINDOWS, USED + REFUSED), (WINDOWS, TRAINED), (MACOS, USED + MAPPED), (MACOS, TRAINED)],
    ids=["Windows", "training on Windows", "macOS", "training on macOS"],
)
def test_systems_that_lack_what_linux_has(lacks: str, program: str, tmp_path: Path):
    root = str(Path(__file__).parents[1])
    run = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", lacks + program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
