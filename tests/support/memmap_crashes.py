"""Kill processes that write to mapped files, and look at what they leave. Run by tests/data/test_memmap_crashes.py.

``python -m tests.support.memmap_crashes FOLDER KILLS SEED`` kills forks at random times, half of them in writes.
:func:`stops` ends forks at each point of each kind of write: between any two of its parts, and in the middle of rows,
where Python stands in for the kernels. After each of them the folder must open, with every row
whole and in order. All keys of a row can be told from its number and its version.
"""

from __future__ import annotations

import ctypes
import os
import random
import re
import select
import shutil
import signal
import sys
import time
import warnings
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch.utils._python_dispatch import TorchDispatchMode

from gpubuf import LazyMemmapStorage, SliceSampler, TensorDictReplayBuffer
from gpubuf.data.storage import memmap_files, plan
from gpubuf.integrations.edits import set_keys
from gpubuf.kernels.rows import ENTRY, ROW_BYTES, ROW_STRIDE, SIZE, WRITTEN

EPISODE = 10


def transitions(n: int, first: int = 0, version: int = 0, width: int = 3) -> TensorDict:
    number = torch.arange(first, first + n)
    values = number[:, None] * 1000.0 + version + torch.zeros(width, dtype=torch.float64)
    done = (number[:, None] + 1) % EPISODE == 0
    following = TensorDict({"number": number + 1, "reward": torch.ones(n, 1), "done": done}, [n])
    return TensorDict({"number": number, "version": number * 0 + version, "values": values, "next": following}, [n])


def opened(folder: Path) -> LazyMemmapStorage:
    """The storage in a folder, whose rows are whole and in order; rows that a warning names are written again."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        storage = LazyMemmapStorage.open(folder)
    size = len(storage)
    for warning in caught:
        write_again(
            storage, [int(position) for position in re.findall(r"-?\d+", str(warning.message).split("index, ")[1])]
        )
    if not size:
        return storage
    rows = storage[torch.arange(storage.written - size, storage.written) % storage.max_size]
    number, version, width = rows["number"], rows["version"], rows["values"].shape[1]
    assert torch.equal(number, torch.arange(number[0], number[0] + size)), f"the order is {number.tolist()}"
    due = torch.cat([transitions(1, int(n), int(v), width) for n, v in zip(number[:64], version[:64], strict=True)])
    assert (rows[:64] == due).all(), "a row is torn"
    assert torch.equal(rows["values"], (number * 1000.0 + version)[:, None].expand(-1, width)), "a row is torn"
    assert torch.equal(rows["next", "number"], number + 1), "a row is torn"
    return storage


def write_again(storage: LazyMemmapStorage, named: list[int]) -> None:
    """Write rows whose index a warning names anew. By index all kinds of writes leave the numbers of rows alone."""
    for position in named:
        row = storage[[position]]
        storage[[position]] = transitions(1, int(row["number"]), width=row["values"].shape[1])


def windows_hold_together(folder: Path) -> None:
    """No slice of the reopened rows, and no window of several steps, joins rows that do not follow each other."""
    buffer = TensorDictReplayBuffer(storage=opened(folder), sampler=SliceSampler(slice_len=4), batch_size=64)
    if len(buffer) < 2 * EPISODE:
        return
    number = buffer.sample()["number"].view(-1, 4)
    assert torch.equal(number, number[:, :1] + torch.arange(4))
    assert (number // EPISODE == number[:, :1] // EPISODE).all()
    buffer = TensorDictReplayBuffer(storage=buffer.storage, n_steps=3, batch_size=64)
    batch = buffer.sample()
    assert torch.equal(batch["next", "number"], batch["number"] + batch["steps_to_next_obs"].view(-1))
    assert ((batch["next", "number"] - 1) // EPISODE == batch["number"] // EPISODE).all()


# Kinds of writes


def extend(n: int) -> Callable[[TensorDictReplayBuffer], None]:
    def write(buffer: TensorDictReplayBuffer) -> None:
        buffer.extend(transitions(n, next_number(buffer), width=width_of(buffer)))

    return write


def next_number(buffer: TensorDictReplayBuffer) -> int:
    newest = (buffer.storage.written - 1) % buffer.storage.max_size
    return int(buffer.storage[[newest]]["number"]) + 1 if len(buffer) else 0


def width_of(buffer: TensorDictReplayBuffer) -> int:
    return buffer.storage.layout.leaves[buffer.storage.layout.position(("values",))].shape[0]


def columns(buffer: TensorDictReplayBuffer) -> None:
    row = transitions(1, next_number(buffer), width=width_of(buffer))[0]
    buffer.add_columns({key: value.numpy() for key, value in row.items(True, True)})


def newer(buffer: TensorDictReplayBuffer) -> tuple[torch.Tensor, TensorDict]:
    """Three rows of next versions, and where they are."""
    index = torch.randperm(len(buffer))[:3]
    rows = buffer.storage[index]
    return index, torch.cat(
        [transitions(1, int(row["number"]), int(row["version"]) + 1, width_of(buffer)) for row in rows]
    )


def assign(buffer: TensorDictReplayBuffer) -> None:
    index, rows = newer(buffer)
    buffer.storage[index] = rows


def update(buffer: TensorDictReplayBuffer) -> None:
    index, rows = newer(buffer)
    generation = buffer.storage.generations(index)
    buffer.update_if_present(index, rows.select("version", "values"), generation=generation)


def set_in_place(buffer: TensorDictReplayBuffer) -> None:
    number = buffer.storage[:]["number"]
    rows = torch.cat([transitions(1, int(n), 5, width_of(buffer)) for n in number])
    set_keys(buffer, dict(rows.select("version", "values").items()), slice(None), whole=True)


def empty(buffer: TensorDictReplayBuffer) -> None:
    buffer.empty()


def load(buffer: TensorDictReplayBuffer) -> None:
    other = TensorDictReplayBuffer(storage=LazyMemmapStorage(buffer.storage.max_size))
    other.extend(transitions(25, 500, 7, width_of(buffer)))
    buffer.load_state_dict({**buffer.state_dict(), "_storage": other.storage.state_dict()})


# Killed at random times


def write_for_ever(folder: Path, report: int, seed: int) -> None:
    """In the process that is to be killed."""
    chance = random.Random(seed)
    buffer = TensorDictReplayBuffer(storage=opened(folder))
    kinds = [extend(1), extend(7), extend(200), columns, assign, update]
    while True:
        for kind in [chance.choice(kinds)] * 20:
            kind(buffer)
        os.write(report, b".")


def forked(work: Callable[[], None]) -> int:
    process = os.fork()
    if process == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(1)
    return process


def noted(folder: Path) -> int:
    """What a process says that it is writing."""
    return int(torch.from_file(str(folder / memmap_files.COUNTERS_FILE), size=5, dtype=torch.int64)[4])


def stopped_at_random(process: int, folder: Path, chance: random.Random) -> bool:
    """Stop a process that writes to a folder. Returns whether it is within a write."""
    time.sleep(chance.uniform(0, 0.01))
    os.kill(process, signal.SIGSTOP)
    _, status = os.waitpid(process, os.WUNTRACED)
    assert os.WIFSTOPPED(status), "the process ended by itself"
    return noted(folder) != memmap_files.IDLE


def kills(root: Path, n: int, seed: int) -> None:
    chance, within = random.Random(seed), 0
    folders = {}
    for name, capacity, width, written in (("small", 64, 3, 64), ("large", 256, 4_000, 256), ("filling", 10**6, 3, 8)):
        folders[name] = root / name
        buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(capacity, scratch_dir=root / name))
        buffer.extend(transitions(written, width=width))
    del buffer
    for number in range(n):
        folder = folders[("small", "large", "filling")[number % 3]]
        reports, report = os.pipe()
        process = forked(lambda folder=folder, report=report, number=number: write_for_ever(folder, report, number))
        os.close(report)
        select.select([reports], [], [])
        writing = stopped_at_random(process, folder, chance)
        # Every other one is killed within a write, however busy the machine is.
        while not writing and number % 2 == 0:
            os.kill(process, signal.SIGCONT)
            writing = stopped_at_random(process, folder, chance)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(reports)
        within += writing
        opened(folder)
        windows_hold_together(folder)
    print(f"{n} kills, {within} of them within a write")


# Stopped at every point


class Steps:
    """Ends the process at its ``stop``-th step."""

    def __init__(self, stop: int) -> None:
        self.stop, self.taken = stop, 0

    def __call__(self) -> None:
        self.taken += 1
        if self.taken == self.stop:
            os._exit(STOPPED)

    def around(self, module: Any, name: str) -> None:
        original = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self()
            result = original(*args, **kwargs)
            self()
            return result

        setattr(module, name, call)


STOPPED = 9


class EveryOperation(TorchDispatchMode):
    """A step before each of PyTorch's operations that change memory."""

    def __init__(self, step: Steps) -> None:
        super().__init__()
        self.step = step

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            self.step()
        return func(*args, **(kwargs or {}))


def copy_rows(table: torch.Tensor, addresses: list[int], positions: list[int], step: Steps) -> None:
    """What the kernels do, with a step in the middle of the first and the last row of each key."""
    for entry, source in zip(table.tolist(), addresses, strict=True):
        address, row_bytes, stride = entry[0], entry[ROW_BYTES], entry[ROW_STRIDE]
        for i, position in enumerate(positions):
            if position >= 0:
                half, target = row_bytes // 2, address + position * stride
                ctypes.memmove(target, source + i * row_bytes, half)
                if i in (0, len(positions) - 1):
                    step()
                ctypes.memmove(target + half, source + i * row_bytes + half, row_bytes - half)


def slow_kernels(step: Steps) -> None:
    """Put slow ones in the place of the kernels."""

    def write_at_cursor(table: torch.Tensor, addresses: list[int], ring: torch.Tensor, n: int, capacity: int) -> Any:
        index = (ring[WRITTEN] + torch.arange(n)) % capacity
        step()
        copy_rows(table, addresses, [-1] * max(n - capacity, 0) + index[-capacity:].tolist(), step)
        step()
        ring[WRITTEN] += n
        step()
        ring[SIZE] = min(int(ring[SIZE]) + n, capacity)
        step()
        return index

    def slow_extend(table: torch.Tensor, sources: Any, ring: torch.Tensor, n: int, capacity: int) -> Any:
        sources = [source.contiguous() for source in sources]
        return write_at_cursor(table, [source.data_ptr() for source in sources], ring, n, capacity)

    def slow_write(
        table: torch.Tensor,
        sources: Any,
        ring: torch.Tensor,
        index: torch.Tensor,
        capacity: int,
        generation: Any = None,
    ) -> None:
        sources = [source.contiguous() for source in sources]
        step()
        copy_rows(table, [source.data_ptr() for source in sources], index.tolist(), step)
        step()

    class SlowExtend:
        def __init__(self, table: Any, sources: Any, ring: Any, n: int, capacity: int, keeps_index: bool) -> None:
            self.described = array("q", [x for source in sources for x in (source.data_ptr(), -1, source.nbytes)])
            self.where = table, ring, n, capacity

        def __call__(self) -> Any:
            table, ring, n, capacity = self.where
            assert table.shape[1] == ENTRY
            return write_at_cursor(table, list(self.described[::3]), ring, n, capacity)

    plan._extend, plan._write, plan._update = slow_extend, slow_write, slow_write
    plan._prepared = SlowExtend
    for name in ("_noted", "__exit__"):
        step.around(memmap_files.Counters, name)


def stopped_everywhere(work: Callable[[Steps], None], check: Callable[[], None]) -> int:
    """Do ``work`` in a new process each time, which ends after one step, after two, and so on, until it is done."""
    stop = 0
    while True:
        stop += 1
        _, status = os.waitpid(forked(lambda stop=stop: work(Steps(stop))), 0)
        code = os.waitstatus_to_exitcode(status)
        assert code in (0, STOPPED), f"stopped at {stop}: {code}"
        check()
        if code == 0:
            return stop - 1


def held(folder: Path) -> list[tuple[int, int]]:
    """The numbers and versions of the rows, oldest first."""
    storage = opened(folder)
    if not len(storage):
        return []
    rows = storage[torch.arange(storage.written - len(storage), storage.written) % storage.max_size]
    return list(zip(rows["number"].tolist(), rows["version"].tolist(), strict=True))


def after_rows(before: list[Any], after: list[Any]) -> list[Any]:
    """The rows that a write has added, also those that it replaced itself."""
    return list(range(before[-1][0] + 1, after[-1][0] + 1))


#: Kinds of writes that stand for the others.
FEW = ("extend beyond", "add columns", "update", "load")


def stops(root: Path, which: str) -> None:
    template, folder, capacity = root / "template", root / "rows", 40
    kinds = {
        "extend": (extend(3), 55),
        "extend across the seam": (extend(3), 79),
        "extend by more rows than there is room for": (extend(43), 55),
        "extend while there is room": (extend(3), 5),
        "extend until it is full": (extend(3), 37),
        "extend beyond": (extend(3), 38),
        "add columns": (columns, 55),
        "assign": (assign, 55),
        "update": (update, 55),
        "set in place": (set_in_place, 12),
        "empty": (empty, 55),
        "load": (load, 55),
    }
    for name, (kind, written) in kinds.items():
        if which == "few" and name not in FEW:
            continue
        shutil.rmtree(template, ignore_errors=True)
        buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(capacity, scratch_dir=template))
        for first in range(0, written, 11):
            buffer.extend(transitions(min(11, written - first), first))
        del buffer
        before, found = held(template), list[Any]()

        def work(step: Steps, kind: Any = kind, name: str = name) -> None:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(template, folder)
            torch.manual_seed(0)
            buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage.open(folder))
            slow_kernels(step)
            if name in ("empty", "load"):
                with EveryOperation(step):
                    kind(buffer)
            else:
                kind(buffer)

        points = stopped_everywhere(work, lambda found=found: found.append(held(folder)))
        windows_hold_together(folder)
        after = found[-1]
        assert after != before
        known = [before, after, []] if name == "load" else [before, after]
        if name.startswith(("extend", "add")):
            # The oldest rows, whose places it took, are gone.
            known.append(before[max(0, len(before) + len(after_rows(before, after)) - capacity) :])
        strange = [(stop, rows) for stop, rows in enumerate(found, 1) if rows not in known]
        assert not strange, f"{name}: stopped at {strange[0][0]} of {points}, {strange[0][1]}"
        assert before in found
        assert points >= 4
        print(f"{name}: {points} points")
    recovery(root)
    if which == "all":
        first_write(root)


def recovery(root: Path) -> None:
    """Ended while rows are dropped: who opens next finds the others, or none."""
    torn, folder = root / "torn", root / "again"
    buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(40, scratch_dir=torn))
    buffer.extend(transitions(55))
    del buffer
    before, found = held(torn), list[Any]()

    def tear(step: Steps) -> None:
        slow_kernels(step)
        extend(3)(TensorDictReplayBuffer(storage=LazyMemmapStorage.open(torn)))

    _, status = os.waitpid(forked(lambda: tear(Steps(6))), 0)
    assert os.waitstatus_to_exitcode(status) == STOPPED

    shutil.copytree(torn, root / "turned")
    # What came before the oldest row is gone: it is not the first one of an episode.
    turned = LazyMemmapStorage.open(root / "turned")
    assert turned.written > len(turned)

    def work(step: Steps) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(torn, folder)
        with EveryOperation(step):
            LazyMemmapStorage.open(folder)

    points = stopped_everywhere(work, lambda: found.append(held(folder)))
    assert found[-1] == before[3:]
    assert all(rows in (before[3:], []) for rows in found)
    assert [] in found
    print(f"recovery: {points} points")


def first_write(root: Path) -> None:
    """Ended while the files are made: there is no storage, or one of whole rows, and a program can begin again."""
    folder = root / "first"

    def begin() -> TensorDictReplayBuffer:
        return TensorDictReplayBuffer(storage=LazyMemmapStorage(40, scratch_dir=folder, existsok=True))

    def work(step: Steps) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        slow_kernels(step)
        for name in ("create_file", "write_json", "map_file"):
            step.around(memmap_files, name)
        begin().extend(transitions(3))

    def check() -> None:
        if (folder / "gpubuf.json").exists():
            assert len(opened(folder)) in (0, 3)
        buffer = begin()
        buffer.extend(transitions(3, len(buffer)))
        assert len(opened(folder)) in (3, 6)

    print(f"first write: {stopped_everywhere(work, check)} points")


if __name__ == "__main__":
    torch.set_num_threads(1)
    kills(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
