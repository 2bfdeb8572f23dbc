"""``gpubuf.plan`` and ``gpubuf plan``: what a buffer takes, beside what it then took."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

import gpubuf
from gpubuf.cli import main
from gpubuf.data import Window
from gpubuf.data.storage import host_memory
from gpubuf.data.storage.placement import SPLIT_STEPS
from gpubuf.planning import SAMPLERS, parse_bytes, parse_entry
from tests.support.placements import GIB, Machine

SPEC = {"pixels": "3x84x84:uint8", "action": ((6,), torch.float32), ("next", "reward"): ":float64"}


def test_keys_and_rows():
    made = gpubuf.plan(SPEC, 1000)
    found = {key.name: (key.shape, key.dtype, key.row_bytes, key.n_bytes) for key in made.keys}
    assert found == {
        "pixels": ((3, 84, 84), torch.uint8, 21168, 21168000),
        "action": ((6,), torch.float32, 24, 24000),
        "next.reward": ((), torch.float64, 8, 8000),
    }
    assert made.row_bytes == 21200
    assert made.rows == 21_200_000
    assert made.fit("cpu").host_bytes == made.rows + made.counters
    with pytest.raises(KeyError, match="tpu"):
        made.fit("tpu")


@pytest.mark.parametrize("share_next", [False, True])
def test_a_buffer_fits_until_a_byte_is_missing(monkeypatch, share_next):
    """Wherever it is, it takes the same rows and counters."""

    def planned(device, host):
        Machine(host=host, device=device).install(monkeypatch)
        spec = {"x": "5:float32", ("next", "x"): "5:float32"}
        return gpubuf.plan(spec, 100_000, sampler="prioritized", share_next=share_next)

    made = planned(GIB, GIB)
    index, near_index, rows = made.fit("cpu").index.total, made.fit("cuda").index.total, made.rows
    aside = rows - made.row_bytes * made.capacity
    room = near_index + aside + rows // 3
    split = planned(room, GIB).fit("split")
    near = split.device_bytes - made.counters
    assert 0 <= room - near < SPLIT_STEPS * made.row_bytes
    for fit in (*made.fits, split):
        assert fit.device_bytes + fit.host_bytes == rows + made.counters + fit.index.total
    places = [("cuda", rows + near_index, 0), ("pinned", near_index, rows), ("cpu", None, rows + index)]
    for place, device, host in (*places, ("split", near, split.host_bytes)):
        found = planned(device, host)
        assert found.fit(place).fits
        assert found.auto == place
        assert not (device and planned(device - 1, host).fit(place).fits)
        assert not (host and planned(device, host - 1).fit(place).fits)
    assert planned(near_index + aside, GIB).fit("split").fits
    assert not planned(near_index + aside - 1, GIB).fit("split").fits


@pytest.mark.parametrize(
    ("sampler", "device", "envs", "share_next"),
    [
        *((sampler, None, 12, False) for sampler in SAMPLERS),
        ("prioritized", GIB, 1, False),
        ("prioritized", None, 12, True),
    ],
)
def test_the_largest_capacity_for_a_budget(monkeypatch, sampler, device, envs, share_next):
    """It fits, and one more step doesn't; asked for the capacity, the same plan comes out."""
    Machine(device=device).install(monkeypatch)
    kind = "cpu" if device is None else "cuda"
    spec = {"x": "5:float32"} | ({("next", "x"): "5:float32"} if share_next else {})
    options = {"sampler": sampler, "envs": envs, "share_next": share_next}

    def total(capacity):
        fit = gpubuf.plan(spec, capacity, **options).fit(kind)
        return fit.device_bytes + fit.host_bytes

    # The first budget is the least that there can be.
    for budget in (total(envs), 30_000, 1_234_567, 5 * GIB):
        made = gpubuf.plan(spec, budget=budget, **options)
        assert made.capacity % envs == 0
        assert total(made.capacity) <= budget < total(made.capacity + envs)
        assert made.budget == budget
        assert made.fits == gpubuf.plan(spec, made.capacity, **options).fits


def test_nothing_is_allocated(monkeypatch):
    def refuse(*arguments, **keywords):
        raise AssertionError("allocated")

    monkeypatch.setattr("gpubuf.data.storage.column.allocate", refuse)
    monkeypatch.setattr(host_memory, "pinned", refuse)
    monkeypatch.setattr(torch, "zeros", refuse)
    made = gpubuf.plan(SPEC, 10**9, sampler="prioritized-slices")
    assert made.rows > 10**13


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((SPEC,), TypeError, "either capacity or budget"),
        ((SPEC, 0), ValueError, "at least 1"),
        (({}, 3), ValueError, "no keys"),
        ((3, 3), TypeError, "example batch or a mapping"),
        (({"x": "3"}, 3), ValueError, "KEY=SHAPE:DTYPE"),
        (({"x": "3:float31"}, 3), ValueError, "no dtype 'float31'"),
        (({"x": 3}, 3), ValueError, "expected 'SHAPE:DTYPE'"),
        (({"x": ((-1,), torch.int8)}, 3), ValueError, "lengths of at least 0"),
        (({"x": ((1,), "int8")}, 3), ValueError, r"torch\.dtype"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        gpubuf.plan(*arguments)


def test_bad_options():
    with pytest.raises(ValueError, match="sampler must be one of"):
        gpubuf.plan(SPEC, 3, sampler="random")
    with pytest.raises(TypeError, match="expected a sampler"):
        gpubuf.plan(SPEC, 3, sampler=dict)
    with pytest.raises(ValueError, match="not one step of 4 row"):
        gpubuf.plan(SPEC, budget="40kB".replace("k", "K"), envs=4)
    with pytest.raises(ValueError, match="without end"):
        gpubuf.plan({"x": "0:int8"}, budget=1000)
    with pytest.raises(ValueError, match="envs"):
        gpubuf.plan(SPEC, 3, envs=0)


def test_entries():
    assert parse_entry("next.pixels=3x84x84:uint8") == (("next", "pixels"), torch.uint8, (3, 84, 84))
    assert parse_entry("done=:bool") == (("done",), torch.bool, ())
    for text in ("x", "x=3", "=3:int8", "x=3y3:int8", "x=-3:int8", "x=3:nn", "x=3:"):
        with pytest.raises(ValueError, match=r"KEY=SHAPE:DTYPE|no dtype"):
            parse_entry(text)


def test_budgets():
    sizes = {7: 7, "7": 7, "7B": 7, "1.5KiB": 1536, "24 GiB": 24 * GIB, "2GB": 2 * 10**9, "3M": 3 * 10**6}
    assert {text: parse_bytes(text) for text in sizes} == sizes
    for text in ("", "GiB", "-3", "0", 0, -1, "3 XB", "3iB", "1e9"):
        with pytest.raises(ValueError, match="number of bytes"):
            parse_bytes(text)


# The command

ARGUMENTS = ["plan", "--spec", "observation=17:float32", "--spec", "next.reward=1:float32"]


def test_the_command(monkeypatch, capsys):
    Machine(device=None).install(monkeypatch)
    assert main([*ARGUMENTS, "--capacity", "1000000", "--sampler", "prioritized", "--slices"]) == 0
    out = capsys.readouterr().out
    for said in ("observation", "next.reward", "1,000,000 rows", "68.66 MiB", "no GPU", 'would choose "cpu"'):
        assert said in out


def test_the_command_plans_for_a_budget_and_says_when_nothing_fits(monkeypatch, capsys):
    Machine(host=GIB, device=None).install(monkeypatch)
    assert main([*ARGUMENTS, "--budget", "100MiB", "--envs", "8"]) == 0
    assert f"{gpubuf.plan({'x': '18:float32'}, budget=100 * 2**20 - 16, envs=8).capacity:,} rows" in (
        capsys.readouterr().out
    )
    assert main([*ARGUMENTS, "--capacity", "1000000000"]) == 1
    assert "fits nowhere" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--spec", "x=3", "--capacity", "3"], "expected KEY=SHAPE:DTYPE"),
        (["--spec", "x=3:int8", "--spec", "x=4:int8", "--capacity", "3"], "a key is given twice"),
        (
            ["--spec", "next=3:int8", "--spec", "next.reward=1:float32", "--capacity", "3"],
            "next can't be a tensor of its own and hold next.reward, too",
        ),
        (["--spec", "x=3:int8"], "one of the arguments --capacity --budget is required"),
        (["--capacity", "3"], "the following arguments are required: --spec"),
        (["--spec", "x=3:int8", "--capacity", "3", "--sampler", "best"], "invalid choice: 'best'"),
    ],
)
def test_bad_specs_exit_with_2(capsys, arguments, message):
    try:
        code = main(["plan", *arguments])
    except SystemExit as error:  # argparse's own way out
        code = error.code
    captured = capsys.readouterr()
    assert code == 2
    assert "Traceback" not in captured.err
    assert captured.err.splitlines()[-1].startswith("gpubuf plan: error: ")
    assert message in captured.err


def test_a_plan_names_what_could_be_stored_once(monkeypatch, capsys):
    """Issue 45, B16: with ``--share-next`` there is nothing left to say."""
    Machine(host=GIB, device=None).install(monkeypatch)
    arguments = ["plan", "--spec", "observation=310:float32", "--spec", "next.observation=310:float32", "--capacity"]
    for capacity, code in (("1000", 0), ("100000000", 1)):
        assert main([*arguments, capacity]) == code
        out = capsys.readouterr().out
        assert "share_next=True would store once: observation." in out
        assert ("observations stored once, by share_next=True" in out) == bool(code)
    assert main([*arguments, "1000", "--share-next"]) == 0
    assert "share_next" not in capsys.readouterr().out
    assert "share_next" not in str(gpubuf.plan({"observation": "3:float32", ("next", "reward"): "1:float32"}, 10))


def test_the_command_with_observations_stored_once(capsys):
    entries = ["observation=310:float32", "next.observation=310:float32", "next.reward=1:float32"]
    arguments = [part for entry in entries for part in ("--spec", entry)]
    assert main(["plan", *arguments, "--capacity", "80000", "--share-next", "--next-capacity", "100"]) == 0
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if line.startswith("next.observation"))
    assert "122.3 KiB" in line


def test_writers_take_queues_and_a_byte_per_row():
    """What a plan says of writers is what a buffer takes: shared memory, and a byte for each row."""
    rows = TensorDict({"a": torch.zeros(1, 3), "b": torch.zeros(1, 2, dtype=torch.int64)}, [1])
    alone, made = (gpubuf.plan(rows, 1000, writers=writers) for writers in (0, gpubuf.Writers(3)))
    buffer = gpubuf.ReplayBuffer(gpubuf.LazyTensorStorage(1000), writers=3)
    queues = buffer.client(rows)._queues
    assert made.queues == sum(column.nbytes for columns in queues.columns for column in columns) == 3 * 4096 * 28
    buffer.extend(rows)
    assert made.fit("cpu").index.index - alone.fit("cpu").index.index == 1000 == buffer.memory().index
    assert "Writers in other processes take 336 KiB of shared memory" in str(made)
    assert "shared memory" not in str(alone)


@pytest.mark.parametrize(
    ("name", "window"),
    [
        *((name, Window(-3, 0)) for name in ("uniform", "prioritized", "slices")),
        *((name, Window(0, 3, outside="cross")) for name in ("uniform", "prioritized", "slices")),
        ("prioritized", Window(-3, 2, outside="skip")),
    ],
)
def test_windows_take_the_bits_of_ends(name, window):
    """And, where priorities choose among rows, those of the rows that have their steps."""
    rows = TensorDict({"a": torch.zeros(1, 3), "next": {"done": torch.zeros(1, 1, dtype=torch.bool)}}, [1])
    sampler = {
        "uniform": gpubuf.RandomSampler(),
        "prioritized": gpubuf.PrioritizedSampler(1000, 0.7, 0.5),
        "slices": gpubuf.SliceSampler(slice_len=2),
    }[name]
    made = gpubuf.plan(rows, 1000, sampler=sampler, windows={"a": window})
    buffer = gpubuf.ReplayBuffer(gpubuf.LazyTensorStorage(1000), sampler=sampler, windows={"a": window}, batch_size=4)
    buffer.extend(rows.expand(30).clone())
    buffer.sample()
    index = made.fit("cpu").index
    assert (index.tree, index.index) == (buffer.memory().tree, buffer.memory().index)
