"""Every buffer of tests/contracts/buffers.py: its checkpoints are loaded as a whole, or refused, or found as they were.

What is damaged, cut short, interrupted, or fails late never leaves a buffer or a folder in between.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import random
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpubuf import serialization
from gpubuf.data.checkpoints import files, restore
from gpubuf.data.storage import host_memory
from gpubuf.data.storage.layout import Pieces
from gpubuf.data.storage.storage import TensorStorage
from tests.contracts import each_option, first_quick
from tests.contracts.buffers import STEPS, BufferContract, contracts
from tests.contracts.checkpoints import (
    FILE_BYTES,
    FailedError,
    Target,
    break_part,
    change_files,
    change_meaning,
    change_tree,
    cut_short,
    places,
    reseal,
    state_bytes,
)
from tests.support.interrupts import interrupted

each = pytest.mark.parametrize("contract", each_option(contracts()), ids=str)
prioritized = BufferContract(sampler="prioritized slices", generations=True)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=r"rows continue along|the rows of \d+ env|Got conflicting|batch_size="
        )
        yield


@each
@pytest.mark.parametrize("n", [60, pytest.param(1000, marks=pytest.mark.nightly)])
def test_changed_bytes(contract: BufferContract, n: int, tmp_path: Path):
    """Whatever byte of whatever file was changed: refused, unless the files say the same all the same."""
    target, chance, n_refused = Target(tmp_path / "c", contract), random.Random(1), 0
    for _ in range(n):
        change_files(target, chance)
        refused = bool(target.refused())
        assert refused or state_bytes(target.buffer) == target.after
        target.put_back(loaded=not refused)
        n_refused += refused
    assert n_refused > 0.7 * n


@each
@pytest.mark.parametrize("n", [60, pytest.param(1000, marks=pytest.mark.nightly)])
def test_changed_meaning(contract: BufferContract, n: int, tmp_path: Path):
    """Fields that no save has written, with all checksums right: refused, or loaded as a whole."""
    target, chance, n_refused = Target(tmp_path / "c", contract), random.Random(2), 0
    content = target.manifest["content"]
    parts = [content["rows"], *content["tensors"]]
    names = [content["state"]["name"], *(file["name"] for part in parts for file in part["files"][:1])]
    fields = [(None, place) for place in range(len(places(content)))]
    for name in names:
        fields += [(name, place) for place in range(len(places(serialization.load(target.folder / name))))]
    for file, place in chance.choices(fields, k=n):
        change_meaning(target.folder, file, lambda tree, place=place: change_tree(tree, place, chance))
        if refused := bool(target.refused()):
            n_refused += 1
        else:
            target.buffer._batches.batch_size = None
            # What an epoch says may have become untrue, and objects others; but no sample may read outside of the rows.
            with contextlib.suppress(RuntimeError, ValueError, IndexError, KeyError, AttributeError, TypeError):
                target.buffer.sample(4)
        target.put_back(loaded=not refused)
    assert 0.2 * n < n_refused < n


@pytest.mark.parametrize("contract", each_option(contracts(lambda contract: contract.storage != "list")), ids=str)
def test_a_save_writes_what_has_changed(contract: BufferContract, tmp_path: Path):
    contract = replace(contract, steps=200)
    buffer, model = contract.filled(205)
    first = buffer.save(tmp_path, file_bytes=FILE_BYTES)
    assert first.bytes == first.bytes_written
    assert first.files == first.files_written == len(list(tmp_path.iterdir()))
    assert buffer.save(tmp_path, file_bytes=FILE_BYTES).files_written <= 2
    other = contract.new()
    for each in (buffer, other):
        # One that was loaded goes on from the files.
        each.extend(model.write(1))
        update = each.save(tmp_path, file_bytes=FILE_BYTES)
        assert update.bytes_written < first.bytes_written / 2
        assert update.bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
        other.load(tmp_path)
        model.check_rows(other)


@pytest.mark.parametrize("contract", [BufferContract(sampler="prioritized"), *contracts(lambda c: c.envs == 2)[-1:]])
def test_cut_short_before_every_step(contract: BufferContract, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The old checkpoint is there, or, from the moment the manifest is in place, the new one; the next save works."""
    buffer, model = contract.filled()
    buffer.save(tmp_path, file_bytes=FILE_BYTES)
    outcomes, fails = list[bool](), True
    while fails:
        before = copy.deepcopy(model)
        buffer.extend(model.write(4))
        with monkeypatch.context() as patched:
            fails = cut_short(patched, len(outcomes), lambda: buffer.save(tmp_path, file_bytes=FILE_BYTES))
        other = contract.new()
        other.load(tmp_path)
        outcomes.append(other.write_count == buffer.write_count)
        (model if outcomes[-1] else before).check_rows(other)
        buffer.save(tmp_path, file_bytes=FILE_BYTES)
        other.load(tmp_path)
        model.check_rows(other)
        named = {file.name for file in files.read_manifest(tmp_path, files.Manifest).files}
        assert {path.name for path in tmp_path.iterdir()} == {*named, files.MANIFEST}
    assert len(outcomes) > 12
    assert outcomes == sorted(outcomes)
    assert outcomes[0] is False


@pytest.mark.parametrize(("contract", "late"), each_option(contracts(), [False, True]), ids=str)
def test_a_part_that_fails_leaves_the_buffer_as_it_was(contract: BufferContract, late: bool, tmp_path: Path):
    """Also a part of the user's own, with what it keeps itself, and the memory of the rows, and the next batches."""
    target = Target(tmp_path / "c", contract)
    for name, method in (
        ("sampler", "load_state_dict"),
        ("writer", "load_state_dict"),
        ("transform", "load_state_dict"),
    ):
        buffer, part = target.buffer, getattr(target.buffer, name)
        mend = break_part(part, method, late=late)
        at = [tensor.data_ptr() for tensor in buffer.storage.row_tensors] if contract.storage != "list" else []
        with pytest.raises(FailedError):
            buffer.load(tmp_path / "c")
        assert state_bytes(buffer) == target.before
        assert [value.tolist() for value in part.history] == [[0.0, 0.0]]
        if at:
            assert [tensor.data_ptr() for tensor in buffer.storage.row_tensors] == at
        mend()
        buffer.load(tmp_path / "c")
        assert state_bytes(buffer) == target.after
        empty = contract.new()
        break_part(getattr(empty, name), method, late=late)
        with pytest.raises(FailedError):
            empty.load(tmp_path / "c")
        assert len(empty) == 0
        # Files that were made for the rows of a load stay, without rows.
        assert empty.write_count == 0 or contract.storage == "memmap"
        target.put_back(loaded=True)


def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """None for a copy of the rows."""
    monkeypatch.setattr(host_memory, "free", lambda device=None: host_memory.Free(10))


def check_empty(buffer: Any, contract: BufferContract) -> None:
    assert len(buffer) == 0
    with pytest.raises(RuntimeError, match="empty"):
        buffer.sample()
    _, model = contract.filled()
    buffer.extend(contract.written(model.write(STEPS)))
    assert len(buffer) == contract.capacity
    assert len(buffer.sample()) > 0


def test_without_room_for_a_copy_the_buffer_is_left_empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    target = Target(tmp_path / "c", prioritized)
    break_part(target.buffer.sampler, "load_state_dict", late=True)
    little_room(monkeypatch)
    with pytest.raises(FailedError) as raised:
        target.buffer.load(tmp_path / "c")
    assert raised.value.__notes__ == ["the rows were being replaced: the buffer is empty now"]
    check_empty(target.buffer, prioritized)


@pytest.mark.parametrize("room", [True, False])
@pytest.mark.parametrize("times", [0, 1, 2])
def test_signals_between_rows(monkeypatch: pytest.MonkeyPatch, caplog: Any, room: bool, times: int, tmp_path: Path):
    """Without room to remember the buffer one waits until the load is done, a second one and an error do not."""
    target, handler = Target(tmp_path / "c", prioritized), signal.getsignal(signal.SIGINT)
    buffer, (saved, _) = target.buffer, prioritized.filled()
    state = saved.state_dict()
    rows = state["_storage"]["rows"]
    if not room:
        little_room(monkeypatch)

    def parts() -> Iterator[tuple[int, Any]]:
        yield 0, rows[:5]
        if not times:
            raise FailedError
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)
        yield 5, rows[5:]

    state["_storage"]["rows"] = Pieces(rows, parts)
    with pytest.raises(KeyboardInterrupt if times else FailedError) as raised:
        buffer.load_state_dict(state)
    assert signal.getsignal(signal.SIGINT) is handler
    assert ("waits until the buffer is whole" in caplog.text) == (times > 0 and not room)
    if room:
        assert state_bytes(buffer) == target.before
    elif times == 1:
        assert buffer[:]["number"].tolist() == rows["number"].tolist()
    else:
        assert raised.value.__notes__ == ["the rows were being replaced: the buffer is empty now"]
        check_empty(buffer, prioritized)


def test_a_second_signal_waits_until_the_buffer_is_put_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """It does not stop what the first one made necessary."""
    target, load, loads = Target(tmp_path / "c", prioritized), TensorStorage.load_state_dict, list[Any]()

    def interrupted_load(storage: TensorStorage, state: dict[str, Any]) -> Any:
        loads.append(load(storage, state))
        signal.raise_signal(signal.SIGINT)
        return loads[-1]

    monkeypatch.setattr(TensorStorage, "load_state_dict", interrupted_load)
    with pytest.raises(KeyboardInterrupt):
        target.buffer.load(tmp_path / "c")
    assert len(loads) == 2
    assert state_bytes(target.buffer) == target.before


def test_a_handler_that_was_asked_for_during_a_load_waits_no_longer():
    """As one of a program that calls the one from before it."""
    with restore.together():
        before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        before(signal.SIGINT, None)


# CPython tells of an interrupt while it closes a generator, and goes on.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "pace", [390, pytest.param(150, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("lines", first_quick([False, True]))
@pytest.mark.parametrize(
    ("contract", "room"),
    [
        (prioritized, True),
        (prioritized, False),
        (BufferContract(sampler="without replacement"), True),
        (BufferContract(share_next=True, transform=True, narrow=True), True),
        (BufferContract(storage="list", sampler="prioritized"), True),
    ],
)
def test_a_load_that_is_interrupted_anywhere(
    monkeypatch: pytest.MonkeyPatch, contract: BufferContract, room: bool, lines: bool, pace: int, tmp_path: Path
):
    """CASES 54: all is as it was, down to the next batches; or all is that of the checkpoint."""
    target, outcomes, place = Target(tmp_path / "c", contract), set[bool](), 0
    if not room:
        little_room(monkeypatch)
    pickle.loads(target.origin).load(tmp_path / "c")
    while interrupted(functools.partial(target.buffer.load, tmp_path / "c"), place, lines=lines):
        now = state_bytes(target.buffer)
        assert now in (target.before, target.after)
        outcomes.add(now == target.after)
        if now == target.after:
            target.put_back(loaded=True)
        place += pace
    assert place > 400
    assert False in outcomes
    assert state_bytes(target.buffer) == target.after


def test_a_new_buffer_copies_no_rows(monkeypatch: pytest.MonkeyPatch):
    copies = list[int]()
    monkeypatch.setattr(restore, "copied", lambda data, device: copies.append(len(data)) or data.clone())
    buffer, state = prioritized.new(), prioritized.filled()[0].state_dict()
    buffer.load_state_dict(state)
    assert copies == []
    buffer.load_state_dict(state)
    assert copies == [STEPS]


# What the manifest may name


OUTSIDE = ("../out.safetensors", "/tmp/out.safetensors", "sub/rows.safetensors", "..", "")


@pytest.mark.parametrize(
    ("entry", "value", "text"),
    [
        *(("name", name, "is not the name of a file in a checkpoint") for name in OUTSIDE),
        *(("size", size, "expected a int") for size in (-1, 2**63, 1.5, True, "7")),
    ],
)
def test_no_file_outside_of_the_folder_is_named_and_sizes_are_counts(entry: str, value: Any, text: str, tmp_path: Path):
    target = Target(tmp_path / "c", BufferContract())
    content = copy.deepcopy(target.manifest["content"])
    content["state"][entry] = value
    reseal(target.folder, content)
    assert text in target.refused()


def test_links_versions_and_formats(tmp_path: Path):
    target = Target(tmp_path / "c", BufferContract())
    name = target.manifest["content"]["state"]["name"]
    shutil.move(target.folder / name, tmp_path / "elsewhere")
    (target.folder / name).symlink_to(tmp_path / "elsewhere")
    assert "not a regular file" in target.refused()
    target.put_back(loaded=False)
    for change, text in (
        ({"version": 2}, "is of version 2; this release of gpubuf reads version 1"),
        ({"format": "torchrl"}, "its format is 'torchrl', not 'gpubuf-checkpoint'"),
    ):
        (target.folder / files.MANIFEST).write_text(files.json.dumps(target.manifest | change))
        assert text in target.refused()
    (target.folder / files.MANIFEST).write_text("[" * 100_000)
    assert "is damaged" in target.refused()


def test_rows_that_are_not_described(tmp_path: Path):
    """They were a RuntimeError and TypeErrors; or links that lead out of the rows."""
    target = Target(tmp_path / "c", BufferContract(share_next=True, narrow=True))

    def refused(change: Callable[[Any], Any], part: str = "form") -> str:
        def replace(state: Any) -> None:
            state["_storage"][part] = change(state["_storage"][part])

        change_meaning(target.folder, target.manifest["content"]["state"]["name"], replace)
        text = target.refused()
        target.put_back(loaded=False)
        return text

    assert "tensors where it describes the rows" in refused(lambda form: [{**form[0], "stored": torch.arange(3)}])
    for part in (None, {"follows": None}, {"column": None}):
        changed = refused(lambda form, part=part: [*form[:-1], part and {**form[-1], **part}])
        assert "does not say what was written" in changed
    assert "does not say what was written" in refused(lambda form: None)
    assert "state and its rows contradict each other" in refused(lambda initialized: False, "initialized")
    for name, change, text in (
        ("links", lambda links: links.fill_(100), "links lead nowhere"),
        ("links", lambda links: links.fill_(-100), "links lead nowhere"),
        ("links", lambda links: links.roll(1), "contradict each other"),
        ("owners", lambda owners: owners.index_fill(0, torch.tensor([0]), 99), "owners are no rows"),
        ("slots", lambda slots: 0, "room for 0 next observations"),
        ("keys", lambda keys: [["no", "such"], *keys[1:]], r"can't share ('no', 'such')"),
        ("keys", lambda keys: [keys[1], keys[1]], "shares a key twice"),
    ):
        changed = refused(lambda raw, name=name, change=change: {**raw, name: change(raw[name])}, "sharing")
        assert text in changed, (name, changed)
    written, capacity = (target.manifest["content"][name] for name in ("written", "capacity"))
    for place in {*range(capacity)} - {(written - 1) % capacity}:

        def mislead(links: Any, place: int = place) -> Any:
            return links.index_fill(0, torch.tensor([place]), links[place] % 7 + 1)

        changed = refused(lambda raw, mislead=mislead: {**raw, "links": mislead(raw["links"])}, "sharing")
        assert "links and owners contradict each other" in changed
    # The first key is shared. From the third on they are under "next".
    for keys in ([["next", "observation"]], [["next", "observation", "part"]], [["next"], ["a"], ["b"], ["c"]]):

        def rename(content: Any, keys: list[list[str]] = keys) -> None:
            for leaf, key in zip(content["rows"]["leaves"][2:], keys, strict=False):
                leaf["key"] = key

        change_meaning(target.folder, None, rename)
        assert "can't share ('observation',)" in target.refused()
        target.put_back(loaded=False)


def test_a_batch_size_that_no_buffer_could_have():
    buffer, _ = BufferContract().filled()
    for size in (2**31, 0, -1, 1.5, True, "6"):
        with pytest.raises(ValueError, match="batch"):
            buffer.load_state_dict({**buffer.state_dict(), "_batch_size": size})


events: list[tuple[str, Any]] | None = None


def audit(event: str, arguments: tuple[Any, ...]) -> None:
    if events is not None and event in ("open", "exec", "pickle.find_class", "subprocess.Popen", "os.system"):
        events.append((event, arguments[0]))


def test_loading_runs_no_code_and_reads_no_other_file(tmp_path: Path):
    target = Target(tmp_path / "c", prioritized)
    target.buffer.load(target.folder)
    sys.addaudithook(audit)

    def heard(action: Callable[[], object]) -> set[Path]:
        global events
        events = []
        try:
            action()
        finally:
            seen, events = events, None
        assert {event for event, _ in seen} == {"open"}
        return {Path(path) for _, path in seen}

    # A load asks for free memory, to keep what the buffer held.
    machine = heard(host_memory.free)
    opened = heard(lambda: target.buffer.load(target.folder))
    assert machine < opened
    assert {path.parent for path in opened - machine - {target.folder}} == {target.folder}
    assert torch.is_tensor(target.buffer[:]["number"])
