"""Case 54: an operation that is interrupted is either done or not done, and nobody waits for it for ever."""

from __future__ import annotations

import copy
import functools
import gc
import random
import signal
import threading
import warnings
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from gpubuf import (
    LazyTensorStorage,
    MultiStepTransform,
    ReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from gpubuf.data import moving
from gpubuf.data.storage import placement
from tests.support.interrupted_buffers import CAPACITY, SAMPLERS, check, check_goes_on, is_free, steps, written
from tests.support.interrupts import interrupted
from tests.support.placements import Machine


def new_buffer(sampler: str, n: int, prefetch: int | None = None) -> TensorDictReplayBuffer:
    """``prefetch``: with rows in pinned memory, on a :class:`Machine`, so that a batch is ahead."""
    torch.manual_seed(0)
    storage = LazyTensorStorage(CAPACITY, device="pinned" if prefetch else "cpu")
    buffer = TensorDictReplayBuffer(storage=storage, sampler=SAMPLERS[sampler](), batch_size=8, prefetch=prefetch)
    if n:
        buffer.extend(steps(0, n))
        buffer.sample()
    return buffer


#: Some of the places; at night all of them. ``test_buffer_contract.py`` interrupts every kind of buffer.
pace = pytest.mark.parametrize("pace", [7, pytest.param(1, marks=pytest.mark.nightly)])


@pace
@pytest.mark.parametrize(("filled", "stride"), [(0, 11), (45, 2)], ids=["first write", "over the seam"])
def test_a_write_that_is_interrupted_anywhere(filled, stride, pace):
    """Case 54: all of a write with its priorities, or nothing of it; the sampler knows of all rows that are there."""
    outcomes = set()

    def interrupt(place: int) -> bool:
        """Whether the operation went on as far as ``place``."""
        buffer = new_buffer("prioritized slices", filled)
        write = functools.partial(buffer.extend, steps(filled, 11, 3.0), update_priority=True)
        if not interrupted(write, place):
            return False
        outcomes.add(written(buffer))
        check(buffer)
        if written(buffer) > filled:
            rows = torch.arange(filled, filled + 11) % CAPACITY
            torch.testing.assert_close(buffer.sampler.tree.leaves[rows], torch.full((11,), 3.0**0.7))
        check_goes_on(buffer)
        return True

    place = 0
    while interrupt(place):
        place += stride * pace
    assert place > 100
    # The rows of a first write are there for its last few places only.
    while not interrupt(place):
        place -= 1
    assert outcomes == {filled, filled + 11}


@pace
@pytest.mark.parametrize("name", ["update_priority", "mark_update"])
@pytest.mark.parametrize("sampler", ["prioritized", "prioritized slices"])
def test_what_changes_priorities_is_interrupted_anywhere(sampler, name, pace):
    """Case 54: the buffer is consistent afterwards."""
    arguments = [torch.tensor([0, 3, 44])] + ([torch.tensor([5.0, 6.0, 7.0])] if name == "update_priority" else [])
    place = 0
    while interrupted(functools.partial(getattr(buffer := new_buffer(sampler, 45), name), *arguments), place):
        assert len(buffer) == 45
        check(buffer)
        check_goes_on(buffer)
        place += pace * 2
    assert place > 10


@pace
@pytest.mark.parametrize("sampler", ["prioritized", "prioritized slices"])
def test_a_change_of_alpha_is_interrupted_anywhere(monkeypatch, sampler, pace):
    """Case 54: all priorities have the old exponent or all have the new one, and the sampler says which."""
    # Several parts, so that some of them are done when the interrupt comes.
    monkeypatch.setattr("gpubuf.data.samplers.sum_tree.CHUNK", 16)
    priority = 1.0 + torch.arange(45.0)

    def prepared():
        buffer = new_buffer(sampler, 45)
        buffer.update_priority(torch.arange(45), priority)
        return buffer

    place, outcomes = 0, set()
    while interrupted(functools.partial(setattr, (buffer := prepared()).sampler, "alpha", 1.4), place):
        # The next operation finishes the change.
        buffer.sample()
        alpha = buffer.sampler.alpha
        outcomes.add(alpha)
        tree = buffer.sampler.tree
        assert alpha == tree.alpha == tree.scalars[0]
        torch.testing.assert_close(tree.leaves[:45], priority**alpha)
        check(buffer)
        check_goes_on(buffer)
        place += pace * (1 if sampler == "prioritized" else 7)
    assert place > 30
    assert outcomes == {0.7, 1.4}


@pace
@pytest.mark.parametrize("name", ["set_storage", "set_sampler", "set_writer", "append_transform"])
@pytest.mark.parametrize("sampler", ["prioritized", "prioritized slices"])
def test_a_change_of_parts_that_is_interrupted_anywhere(sampler, name, pace):
    """Case 54: the buffer has the part before, with all that it knew of the rows, or the new one."""
    priority = 1.0 + torch.arange(45.0)
    new = {"set_storage": lambda: LazyTensorStorage(CAPACITY), "set_sampler": SAMPLERS[sampler]}
    new |= {"set_writer": TensorDictRoundRobinWriter, "append_transform": lambda: lambda batch: batch}
    place, changed = 0, set()
    while True:
        buffer = new_buffer(sampler, 45)
        buffer.update_priority(torch.arange(45), priority)
        storage, chooses = buffer.storage, buffer.sampler
        if not interrupted(functools.partial(getattr(buffer, name), new[name]()), place, lines=True):
            break
        changed.add((buffer.storage is not storage, buffer.sampler is not chooses))
        assert len(buffer) == (45 if buffer.storage is storage else 0)
        if changed == {(False, False)}:
            torch.testing.assert_close(buffer.sampler.tree.leaves[:45], priority**0.7)
        check_goes_on(buffer)
        # No other sampler listens to the rows, and this one does.
        assert buffer.storage.followers.samplers == [buffer.sampler]
        place += pace
    assert place > 20
    assert (False, False) in changed


def test_a_way_of_reading_that_is_interrupted_anywhere():
    """Case 54: who asks for several steps again, with the interrupt still at hand, gets them up to every end."""
    done = torch.tensor([[True], [False], [True], [False]])
    rows = TensorDict({"next": {"reward": torch.ones(4, 1), "done": done}}, [4])
    for place in range(0, 5000, 2):
        buffer = ReplayBuffer(storage=LazyTensorStorage(8))
        buffer.extend(rows)
        interrupt = interrupted(functools.partial(buffer.append_transform, MultiStepTransform(2, 0.5)), place)
        again = ReplayBuffer(storage=buffer.storage, n_steps=2, gamma=0.5)
        batch, info = again.sample(32, return_info=True)
        assert torch.equal(batch["steps_to_next_obs"].flatten(), torch.tensor([1, 2, 1, 1])[info["index"]])
        if interrupt is None:
            return
    raise AssertionError("there are more calls than the test looks at")


def test_a_new_sampler_serves_the_storage_or_is_not_there():
    """Case 54: interrupts after all that ``set_sampler`` changes."""
    place, left = 400, 12
    while left:
        buffer = new_buffer("prioritized", 45)
        change = functools.partial(buffer.set_sampler, SAMPLERS["prioritized slices"]())
        if interrupted(change, place):
            left -= 1
            assert buffer.sampler.storage is buffer.storage
            check_goes_on(buffer)
        place -= 1


@pytest.mark.parametrize("recount", [True, False])
def test_an_interrupted_empty_counts_as_it_was_told(recount):
    """Case 54: ``write_count`` begins again at 0, or goes on."""
    outcomes, place = set(), 0
    while True:
        buffer = new_buffer("prioritized", 45)
        if not interrupted(functools.partial(buffer.empty, recount), place):
            break
        outcomes.add((len(buffer), buffer.write_count))
        place += 3
    assert outcomes == {(45, 45), (0, 0 if recount else 45)}


@pace
@pytest.mark.parametrize("sampler", ["prioritized", "prioritized slices"])
def test_a_free_that_is_interrupted_anywhere(sampler, pace):
    """Case 54: the rows are all there, or all gone, for the samplers of both buffers with the storage."""
    place, lengths = 0, set()
    while True:
        buffer = new_buffer(sampler, 45)
        other = TensorDictReplayBuffer(storage=buffer.storage, sampler=SAMPLERS["slices"](), batch_size=8)
        other.sample()
        if not interrupted(buffer.free, place, lines=True):
            break
        lengths.add(len(buffer))
        buffer.extend(steps(written(buffer), 14))
        for each in (buffer, other):
            assert max(int(each.sample()["index"].max()) for _ in range(8)) < len(buffer)
        check(buffer)
        place += pace
    assert place > 20
    assert lengths == {0, 45}


@pace
@pytest.mark.parametrize("sampler", ["uniform", "prioritized slices"])
def test_a_move_that_is_interrupted_anywhere(monkeypatch, sampler, pace):
    """Case 54: the whole buffer is in one place or in the other, with all rows.

    The other device is the CPU by another name, "cpu:0".
    """
    monkeypatch.setattr(placement, "named", torch.device)
    monkeypatch.setattr(moving, "CHUNK_BYTES", 64)
    place, outcomes = 0, set()
    rows = new_buffer(sampler, 45)[:]

    def interrupt(place: int) -> bool:
        buffer = new_buffer(sampler, 45)
        if not interrupted(functools.partial(buffer.to, "cpu:0"), place):
            return False
        assert is_free(buffer)
        outcomes.add(str(buffer.storage.rows_device))
        assert (buffer[:] == rows).all()
        check(buffer)
        check_goes_on(buffer)
        return True

    while interrupt(place):
        place += 3 * pace
    assert place > 50
    # It has moved at the last few places only.
    while not interrupt(place):
        place -= 1
    assert outcomes == {"cpu", "cpu:0"}


#: Operations of a buffer: those that are interrupted, and those that must not wait afterwards.
OPERATIONS = {
    "sample": lambda buffer, folder: buffer.sample(),
    "another size": lambda buffer, folder: buffer.sample(4),
    "next": lambda buffer, folder: buffer.next(),
    "extend": lambda buffer, folder: buffer.extend(steps(written(buffer), 3)),
    "add": lambda buffer, folder: buffer.add(steps(written(buffer), 1)[0]),
    "rows": lambda buffer, folder: buffer[:],
    "set rows": lambda buffer, folder: buffer.__setitem__(slice(0, 2), buffer[:2].clone()),
    "update_priority": lambda buffer, folder: buffer.update_priority(torch.arange(3), torch.ones(3)),
    "state_dict": lambda buffer, folder: buffer.state_dict(),
    "load_state_dict": lambda buffer, folder: buffer.load_state_dict(copy.deepcopy(buffer.state_dict())),
    "save": lambda buffer, folder: buffer.save(folder),
    "load": lambda buffer, folder: buffer.load(folder),
    "copy": lambda buffer, folder: copy.deepcopy(buffer).sample(),
    "set_rng": lambda buffer, folder: buffer.set_rng(torch.Generator().manual_seed(1)),
    "to": lambda buffer, folder: buffer.to("cpu").to("pinned"),
    "empty": lambda buffer, folder: (buffer.empty(), buffer.extend(steps(0, 45))),
}


def check_nothing_waits(buffer: TensorDictReplayBuffer, folder: Path, names: Iterable[str], during: str) -> None:
    """Every operation ends, in another thread than the one that was interrupted."""
    now, failures = ["begin"], list[BaseException]()

    def run():
        try:
            for now[0] in names:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    OPERATIONS[now[0]](buffer, folder)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), f"{now[0]} waits, after an interrupt in {during}"
    assert not failures, f"{now[0]} after an interrupt in {during}: {failures}"


@pytest.mark.parametrize("lines", [False, True], ids=["signals", "lines"])
@pytest.mark.parametrize("sampler", ["uniform", "prioritized slices"])
def test_nothing_waits_after_a_sample_that_was_interrupted(monkeypatch, sampler, lines, tmp_path):
    """Case 63: with the interrupt kept, as ``sys.last_exc`` does, and with it the frames that it came through."""
    Machine().install(monkeypatch, work_on_cpu=True)
    quick = [name for name in OPERATIONS if name not in ("save", "load", "copy", "next")]
    buffer, place, kept = new_buffer(sampler, 45, 2), 0, []
    while (interrupt := interrupted(buffer.sample, place, lines=lines)) is not None:
        kept.append(interrupt)
        check_nothing_waits(buffer, tmp_path, quick, f"place {place}")
        buffer.sample()
        place += 4
    assert place > 40
    check_nothing_waits(buffer, tmp_path, OPERATIONS, "a sample")


# CPython tells of an interrupt in a finaliser, and goes on.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("n", [pytest.param(40, marks=pytest.mark.slow), pytest.param(1500, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_interrupts_at_random(monkeypatch, sampler, n, tmp_path):
    """Case 63: in all operations, at random places, each followed by every other operation."""
    Machine().install(monkeypatch, work_on_cpu=True)
    generator, interrupts, kept = random.Random(0), 0, deque(maxlen=50)
    places = dict.fromkeys(OPERATIONS, 100)
    buffer = new_buffer(sampler, 45, 2)
    buffer.save(tmp_path)
    while interrupts < n:
        name = generator.choice(["sample"] * 4 + list(OPERATIONS))
        place, lines = generator.randrange(places[name]), generator.random() < 0.5
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            interrupt = interrupted(functools.partial(OPERATIONS[name], buffer, tmp_path), place, lines=lines)
        if interrupt is None:
            places[name] = max(place, 10)
            continue
        interrupts, places[name] = interrupts + 1, places[name] + 10
        kept.append(interrupt)
        rest = [other for other in OPERATIONS if other != "load"]
        generator.shuffle(rest)
        check_nothing_waits(buffer, tmp_path, ["extend", *rest, "save", "load"], f"{name}, place {place}")


# A file that was being opened is closed by who collects it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pace
@pytest.mark.parametrize("lines", [False, True], ids=["signals", "lines"])
def test_nothing_waits_after_a_save_that_was_interrupted(tmp_path, lines, pace):
    """Case 63: the lock of the folder is given back."""
    buffer, place, kept = new_buffer("uniform", 45), 0, deque(maxlen=50)
    while interrupt := interrupted(lambda: buffer.save(tmp_path), place, lines=lines):
        kept.append(interrupt)
        check_nothing_waits(buffer, tmp_path, ["save"], f"save, place {place}")
        place += 7 * pace
    assert place > 500
    check_nothing_waits(buffer, tmp_path, ["load", "sample"], "save")
    # Files that were left open are closed here, not within another test.
    kept.clear()
    del interrupt
    gc.collect()


@pytest.mark.parametrize("rounds", [500, pytest.param(4000, marks=pytest.mark.nightly)])
def test_signals_at_random_times(rounds):
    """Case 54: many real ones, in a loop that writes, samples and sets priorities, beside a second thread."""
    buffer = new_buffer("prioritized slices", 45)
    generator, interrupts, stop = random.Random(0), 0, threading.Event()

    def strike(*_):
        raise KeyboardInterrupt

    def read():
        while not stop.is_set():
            buffer.sample()

    before = signal.signal(signal.SIGALRM, strike)
    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(rounds):
            start = written(buffer)
            try:
                signal.setitimer(signal.ITIMER_REAL, generator.uniform(1e-6, 6e-4))
                buffer.extend(steps(start, 3, 2.0))
                batch = buffer.sample()
                buffer.update_tensordict_priority(batch.set("td_error", torch.ones(8)))
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupts += 1
                assert buffer.write_count == written(buffer)
                assert written(buffer) in (start, start + 3)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        stop.set()
        reader.join()
    assert interrupts > rounds // 4
    check(buffer)
    check_goes_on(buffer)
