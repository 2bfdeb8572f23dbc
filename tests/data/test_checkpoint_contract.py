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
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gpubuf import serialization
from gpubuf.data.checkpoints import files
from tests.contracts import each_option, first_quick
from tests.contracts.buffers import STEPS, BufferContract, contracts
from tests.contracts.checkpoints import (
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
    (name,) = (file["name"] for file in content["files"])
    fields = [(None, place) for place in range(len(places(content)))]
    fields += [(name, place) for place in range(len(places(serialization.load(target.folder / name))))]
    for file, place in chance.choices(fields, k=n):
        change_meaning(target.folder, file, lambda tree, place=place: change_tree(tree, place, chance))
        if refused := bool(target.refused()):
            n_refused += 1
        else:
            target.buffer.parts.batches.batch_size = None
            # What an epoch says may have become untrue, and objects others; but no sample may read outside of the rows.
            with contextlib.suppress(RuntimeError, ValueError, IndexError, KeyError, AttributeError, TypeError):
                target.buffer.sample(4)
        target.put_back(loaded=not refused)
    assert n_refused > 0.2 * n


@pytest.mark.parametrize("contract", [BufferContract(sampler="prioritized"), *contracts(lambda c: c.envs == 2)[-1:]])
def test_cut_short_before_every_step(contract: BufferContract, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The old checkpoint is there, or, from the moment the manifest is in place, the new one; the next save works."""
    buffer, model = contract.filled()
    buffer.save(tmp_path)
    outcomes, fails = list[bool](), True
    while fails:
        before = copy.deepcopy(model)
        buffer.extend(model.write(4))
        with monkeypatch.context() as patched:
            fails = cut_short(patched, len(outcomes), lambda: buffer.save(tmp_path))
        other = contract.new()
        other.load(tmp_path)
        outcomes.append(other.write_count == buffer.write_count)
        (model if outcomes[-1] else before).check_rows(other)
        buffer.save(tmp_path)
        other.load(tmp_path)
        model.check_rows(other)
        named = {file.name for file in files.read_manifest(tmp_path, files.BUFFER).files}
        assert {path.name for path in tmp_path.iterdir()} == {*named, files.MANIFEST}
    assert len(outcomes) > 8
    assert outcomes == sorted(outcomes)
    assert outcomes[0] is False


@pytest.mark.parametrize(("contract", "late"), each_option(contracts(), [False, True]), ids=str)
def test_a_part_that_fails_leaves_the_buffer_empty(contract: BufferContract, late: bool, tmp_path: Path):
    """A part of the user's own. The memory of the rows stays, and the next load finds everything in order."""
    target = Target(tmp_path / "c", contract)
    for name in ("sampler", "writer", "transform"):
        buffer, part = target.buffer, getattr(target.buffer, name)
        mend = break_part(part, "load_state_dict", late=late)
        at = [tensor.data_ptr() for tensor in buffer.storage.columns.parts] if contract.storage != "list" else []
        with pytest.raises(FailedError) as raised:
            buffer.load(tmp_path / "c", end_trajectories=False)
        assert raised.value.__notes__ == ["the contents were being replaced: the buffer is empty now"]
        check_empty(buffer)
        if at:
            assert [tensor.data_ptr() for tensor in buffer.storage.columns.parts] == at
        mend()
        buffer.load(tmp_path / "c", end_trajectories=False)
        assert state_bytes(buffer) == target.after
        empty = contract.new()
        break_part(getattr(empty, name), "load_state_dict", late=late)
        with pytest.raises(FailedError):
            empty.load(tmp_path / "c", end_trajectories=False)
        check_empty(empty)
        target.put_back(loaded=True)


def check_empty(buffer: Any) -> None:
    """It says so, and takes rows like any other."""
    assert len(buffer) == 0
    with pytest.raises(RuntimeError, match="empty"):
        buffer.sample()


def check_goes_on(buffer: Any, contract: BufferContract) -> None:
    check_empty(buffer)
    _, model = contract.filled()
    buffer.extend(contract.written(model.write(STEPS)))
    assert len(buffer) == contract.capacity
    assert len(buffer.sample()) > 0


# CPython tells of an interrupt while it closes a generator, and goes on.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "pace", [230, pytest.param(150, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("lines", first_quick([False, True]))
@pytest.mark.parametrize(
    "contract",
    [
        prioritized,
        BufferContract(sampler="without replacement"),
        BufferContract(share_next=True, transform=True, narrow=True),
        BufferContract(storage="list", sampler="prioritized"),
    ],
)
def test_a_load_that_is_interrupted_anywhere(contract: BufferContract, lines: bool, pace: int, tmp_path: Path):
    """CASES 54: all is as it was, down to the next batches; or the buffer is empty; or all is as in the checkpoint."""
    target, outcomes, place = Target(tmp_path / "c", contract), dict[str, int](), 0
    pickle.loads(target.origin).load(tmp_path / "c", end_trajectories=False)
    while interrupted(
        functools.partial(target.buffer.load, tmp_path / "c", end_trajectories=False), place, lines=lines
    ):
        now = state_bytes(target.buffer)
        found = {target.before: "before", target.after: "after"}.get(now, "empty")
        outcomes[found] = place
        if found == "empty":
            check_goes_on(target.buffer, contract)
        if found != "before":
            target.put_back(loaded=True)
        place += pace
    assert place > 400
    assert outcomes.keys() >= {"before", "empty"}
    assert sorted(outcomes, key=outcomes.__getitem__) == [x for x in ("before", "empty", "after") if x in outcomes]
    assert state_bytes(target.buffer) == target.after


# What the manifest may name


OUTSIDE = ("../out.safetensors", "/tmp/out.safetensors", "sub/rows.safetensors", "..", "")


@pytest.mark.parametrize(
    ("entry", "value", "text"),
    [
        *(("name", name, "is not the name of a file in a checkpoint") for name in OUTSIDE),
        *(("size", size, "expected a count") for size in (-1, 2**63, 1.5, True, "7")),
    ],
)
def test_no_file_outside_of_the_folder_is_named_and_sizes_are_counts(entry: str, value: Any, text: str, tmp_path: Path):
    target = Target(tmp_path / "c", BufferContract())
    content = copy.deepcopy(target.manifest["content"])
    content["files"][0][entry] = value
    reseal(target.folder, content)
    assert text in target.refused()


def test_links_versions_and_formats(tmp_path: Path):
    target = Target(tmp_path / "c", BufferContract())
    name = target.manifest["content"]["files"][0]["name"]
    shutil.move(target.folder / name, tmp_path / "elsewhere")
    (target.folder / name).symlink_to(tmp_path / "elsewhere")
    assert "not a regular file" in target.refused()
    target.put_back(loaded=False)
    for change, text in (
        ({"version": 1}, "is of version 1; this release of gpubuf reads version 2"),
        ({"format": "torchrl"}, "its format is 'torchrl'"),
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

        change_meaning(target.folder, target.manifest["content"]["files"][0]["name"], replace)
        text = target.refused()
        target.put_back(loaded=False)
        return text

    assert "tensors where it describes the rows" in refused(lambda form: [{**form[0], "stored": torch.arange(3)}])
    for part in (None, {"follows": None}, {"column": None}):
        changed = refused(lambda form, part=part: [*form[:-1], part and {**form[-1], **part}])
        assert "does not say what was written" in changed
    assert "does not say what was written" in refused(lambda form: None)
    written, capacity = target.saved.storage.written, target.saved.storage.max_size
    for place in {*range(capacity)} - {(written - 1) % capacity}:

        def mislead(links: Any, place: int = place) -> Any:
            return links.index_fill(0, torch.tensor([place]), links[place] % 7 + 1)

        changed = refused(lambda raw, mislead=mislead: {**raw, "links": mislead(raw["links"])}, "sharing")
        assert "links and owners contradict each other" in changed
    # A key that is shared has no next value in the rows.
    for key in (("next", "observation"), ("next", "observation", "part"), ("next",)):

        def add(rows: Any, key: Any = key) -> Any:
            return rows.exclude("next").set(key, rows["observation"])

        assert "can't share ('observation',)" in refused(add, "rows")


@pytest.mark.parametrize("storage", ["tensor", "memmap"])
def test_rows_that_are_others(storage: str, tmp_path: Path):
    target = Target(tmp_path / "c", BufferContract(storage=storage))
    for others in (
        lambda rows: rows.exclude("number"),
        lambda rows: rows.clone().set("more", rows["number"]),
        lambda rows: rows.float(),
        lambda rows: rows[:-1],
        lambda rows: rows.unsqueeze(1),
        lambda rows: [rows[:3], rows[3:].exclude("number")],
        lambda rows: [rows[:3], rows[2:]],
        lambda rows: [],
        lambda rows: {**rows},
        lambda rows: "rows",
        lambda rows: torch.zeros(len(rows)),
    ):

        def change(state: Any, others: Any = others) -> None:
            state["_storage"]["rows"] = others(state["_storage"]["rows"])

        change_meaning(target.folder, target.manifest["content"]["files"][0]["name"], change)
        assert target.refused()
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

    opened = heard(lambda: target.buffer.load(target.folder))
    assert {path.parent for path in opened - {target.folder}} == {target.folder}
    assert torch.is_tensor(target.buffer[:]["number"])
