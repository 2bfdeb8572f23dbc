"""The choice of launch configurations: explicit, then tuned, then a rule. Nothing in a tuned file leads to an error."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from typing import Any

import pytest

from gpubuf.kernels import _tuned, config
from gpubuf.kernels.config import SPACES, BlockConfig, DrawConfig, IndexConfig, RowsConfig, SliceConfig, UpdateConfig
from tests.support.tuned_files import DEVICE, FILE, draw, point, write_file


@pytest.fixture(autouse=True)
def no_files_remembered():
    config.forget()
    yield
    config.forget()


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes the only tuned file."""
    monkeypatch.setattr(config, "user_folder", lambda: tmp_path)
    return functools.partial(write_file, tmp_path)


ONE_STEP = {"block_envs": 1, "block_bytes": 2, "block_weights": 8, "block_nodes": 1, "num_warps": 1}


@pytest.fixture
def tuned_file(write):
    update = {"single_program": False, "block_entries": 128, "block_nodes": 8, "num_warps": 2}
    slices = {"block_slices": 2, "block_steps": 8, "num_warps": 1}
    write(
        {
            "rows_copy": [point({"tile": 2 ** (n // 5 + 5), "num_warps": 2}, n_bytes=2**n) for n in (10, 30)],
            "sum_tree": [point({"fan_out": 16}, capacity=1_000), point({"fan_out": 128}, capacity=1_000_000)],
            "sum_tree_draw": [draw(2), draw(64, 8, n=65536)],
            "sum_tree_update": [point(update, fan_out=64, n=512)],
            "trajectories": [point({"fan_out": 128}, words=100)],
            "trajectories_update": [point(ONE_STEP, fan_out=32, n=1, envs=1, by_id=0)],
            "trajectories_draw": [point(slices, fan_out=32, n=64, slice_len=4)],
            "tanh_normal_sample": [point({"block": 64, "num_warps": 2}, n=256, width=6)],
            "tanh_normal_backward": [point({"block": 128, "num_warps": 2}, n=1536)],
            "loss_rows": [point({"block": 256, "num_warps": 8}, n=256)],
        }
    )


#: What is asked for; what the file above says, None where none of its points counts.
FROM_THE_FILE = [
    (config.tree_fan_out, (900_000, "cuda"), 128),
    (config.tree_fan_out, (400, "cuda"), 16),
    (config.tree_fan_out, (10**9, "cuda"), None),
    (config.tree_fan_out, (900_000, "cpu"), None),
    (config.index_fan_out, (6400, 1, "cuda"), 128),
    (config.index_fan_out, (10**6, 1, "cuda"), None),
    (config.tree_draw, (32, 300), DrawConfig(2, 1)),
    (config.tree_draw, (32, 10**6), DrawConfig(64, 8)),
    (config.tree_draw, (32, 10**7), None),
    (config.tree_draw, (64, 300), None),
    (config.tree_update, (64, 5_000), UpdateConfig(False, 128, 8, 2)),
    (config.tree_update, (32, 512), None),
    (config.rows_copy, (1500,), RowsConfig(128, 2)),
    (config.rows_copy, (2**28,), RowsConfig(2048, 2)),
    (config.index_update, (32, 2, 1, 2, False), IndexConfig(1, 2, 8, 1, 1)),
    (config.index_update, (32, 2, 1, 2, True), None),
    # For millions of steps, which one program would do alone, it would take seconds.
    (config.index_update, (32, 10**8, 10**8 // 64, 1, False), None),
    (config.index_draw, (32, 100, 5), SliceConfig(2, 8, 1)),
    (config.index_draw, (64, 100, 5), None),
    (config.tanh_normal_sample, (256, 6), BlockConfig(64, 2)),
    (config.tanh_normal_backward, (1000,), BlockConfig(128, 2)),
    (config.loss_rows, (300,), BlockConfig(256, 8)),
]


def test_a_tuned_point_near_enough_goes_before_the_rule(tuned_file):
    """On its device; of another fan-out, or out of reach, it does not count."""
    for choose, sizes, due in FROM_THE_FILE:
        rule = choose(*sizes, "another device")
        assert choose(*sizes, DEVICE) == (rule if due is None else due), (choose.__name__, sizes)
        assert rule not in (due, None)


POINTS = tuple(_tuned.Point({"n": n, "m": m}, (n, m)) for n, m in ((1, 1), (4, 16), (16, 1)))


@pytest.mark.parametrize(
    ("sizes", "exact", "due"),
    [
        ((0, 1), (), (1, 1)),
        ((2, 2), (), (1, 1)),
        ((4, 1), (), (1, 1)),  # as near to the last one: the first counts
        ((4, 8), (), (4, 16)),
        ((9, 1), (), (16, 1)),
        ((256, 1), (), (16, 1)),
        ((257, 1), (), None),
        ((10**30, 1), (), None),
        ((1, 1000), (), None),
        ((1, 16), ("m",), (4, 16)),
        ((4, 15), ("m",), None),
    ],
)
def test_the_nearest_in_log_space(sizes, exact, due):
    found = _tuned.nearest(POINTS, dict(zip("nm", sizes, strict=True)), exact)
    assert (None if found is None else found.config) == due


def test_the_reach_of_a_point():
    """Sixteen times as much or as little; nothing counts as one."""
    for one, other, near in ((1, 16, True), (1, 17, False), (0, 16, True), (0, 17, False)):
        for size, asked in ((one, other), (other, one)):
            found = _tuned.nearest([_tuned.Point({"n": size}, 7)], {"n": asked})
            assert (found is not None) == near
    assert _tuned.nearest([], {"n": 1}) is None


def powers_of_two(*values: int) -> bool:
    return all(value > 0 and value & (value - 1) == 0 for value in values)


#: Sizes, and the fields of the configuration. Tiles are powers of two, as Triton needs, and fit the registers.
RULES: dict[Any, dict[tuple[Any, ...], Any]] = {
    config.rows_copy: {(2**20,): (256, 4), (2**20 + 1,): (512, 4), (2**22 - 1,): (512, 4), (2**22,): (1024, 4)},
    config.tree_update: {
        (2, 64): (True, 64, 64, 4),
        (64, 1): (True, 64, 32, 4),
        (64, 65): (True, 128, 64, 8),
        (2, 256): (True, 256, 256, 8),
        (2, 257): (True, 1024, 256, 8),
        (32, 1024): (True, 1024, 256, 8),
        (256, 1025): (False, 32, 1, 1),
        (2, 2**14): (False, 32, 8, 1),
        (2, 2**14 + 1): (False, 256, 32, 4),
        (1024, 2**14 + 1): (False, 256, 1, 4),
        # In graphs a launch costs the host nothing: updates take several of them earlier.
        (2, 256, None, True): (True, 256, 256, 8),
        (2, 257, None, True): (False, 32, 8, 1),
    },
    config.tree_draw: {(2, 512): (4, 1), (2, 513): (16, 1), (64, 513): (8, 4), (512, 1): (1, 4)},
    # Many environments stay side by side; no program has more than 512 words of bits.
    config.index_update: {
        (2, 1, 1, 1): (1, 32, 32, 4, 1),
        (2, 1, 1, 33): (32, 128, 128, 512, 4),
        (128, 1, 95, 1): (1, 32, 32, 1, 1),
        (2, 1, 96, 1): (1, 128, 128, 512, 4),
        (2, 2, 16, 1): (1, 128, 128, 128, 4),
        (2, 1, 502, 2): (0, 128, 128, 512, 4),
        (2, 1, 512, 1): (1, 128, 128, 512, 4),
        (2, 1, 513, 1): (0, 128, 128, 512, 4),
    },
    # A lane reads a byte of flags, but the one flag of a single step; identifiers tell that of the step before.
    config.index_span: {(1, False): 1, (1, True): 8, (2, False): 8},
    # Issue 23: four slices a program made eight warps for 32 slices, each of more than three times the work.
    config.index_draw: {(2, 4096, 1): (1, 8, 1), (2, 4097, 1): (16, 8, 1), (512, 4097, 65): (1, 64, 2)},
    config.index_slices: {(1, 1): (32, 8, 1), (1, 9): (16, 16, 1), (1, 65): (4, 64, 1)},
    config.tanh_normal_sample: {(0, 1): (1, 1), (0, 4000): (4096, 8), (2, 1000): (1024, 4)},
    config.tanh_normal_backward: {(1,): (512, 4)},
    config.loss_rows: {(0,): (32, 1), (65,): (128, 2), (10**6,): (1024, 16)},
    config.atom_rows: {(0, 4000): (1, 8), (2, 1000): (1, 4), (33, 1): (32, 1)},
    config.moments_tile: {(2, 1): (2, 1, 1), (257, 5): (256, 8, 8), (4096, 1): (2048, 1, 8)},
    config.norm_rows: {(0, 1): (1, 1), (2, 4000): (1, 8), (257, 1): (512, 2)},
    config.norm_columns: {(0, 33): (1, 32, 1), (33, 5): (64, 8, 2), (33, 17): (32, 32, 4)},
}


class TestRules:
    @pytest.mark.parametrize(
        ("capacity", "due"), [(1, 16), (16, 16), (17, 32), (33, 64), (65, 16), (10**6, 32), (6 * 10**8, 64)]
    )
    def test_fan_out(self, capacity, due):
        """As shallow as with 64 children a node, and no wider than that takes."""
        assert config.tree_fan_out(capacity, "cuda") == due
        levels = [next(n for n in range(1, 40) if width**n >= capacity) for width in (due, 64, due // 2)]
        assert levels[0] == levels[1]
        assert due == 16 or levels[2] > levels[1]
        # The trajectory index has one leaf for each word of 64 steps.
        assert config.index_fan_out(64 * capacity, 1, "cuda") == due
        assert config.tree_fan_out(capacity, "cpu") == config.index_fan_out(capacity, 4, "cpu") == 16

    def test_fan_outs_of_ones_own(self):
        for device in ("cpu", "cuda"):
            assert config.tree_fan_out(1_000_000, device, DEVICE, 8) == 8
        assert config.index_fan_out(10, 1, "cuda", explicit=2) == 2
        assert config.index_fan_out(65, 100, "cuda") == config.tree_fan_out(200, "cuda")
        for wrong in (0, 1, 3, 48):
            with pytest.raises(ValueError, match=f"power of two of at least 2, but is {wrong}"):
                config.tree_fan_out(10, "cpu", explicit=wrong)

    @pytest.mark.parametrize("fan_out", [2, 16, 32, 64, 1024, 4096])
    def test_trees(self, fan_out):
        """In graphs a launch costs the host nothing: there updates take several of them earlier."""
        for n in (1, 256, 257, 1024, 1025, 10**7):
            draw, update = config.tree_draw(fan_out, n), config.tree_update(fan_out, n)
            assert powers_of_two(draw.block_draws, draw.num_warps)
            assert powers_of_two(update.block_entries, update.block_nodes, update.num_warps)
            assert draw.block_draws * fan_out <= max(512, fan_out)
            assert update.block_nodes * fan_out <= max(1024 * update.num_warps, fan_out)
            assert update.single_program == (n <= 1024)
            in_graph = config.tree_update(fan_out, n, in_graph=True)
            assert in_graph == config.tree_update(fan_out, n if n <= 256 else max(n, 1025))

    @pytest.mark.parametrize(("n", "run_words"), [(1, 1), (1, 2), (64, 3), (4096, 66), (32000, 502), (10**6, 15627)])
    def test_updates_of_the_index(self, n, run_words):
        """Many environments stay side by side; no program has more than 512 words of bits."""
        for fan_out, envs, by_id in itertools.product((2, 16, 64, 4096), (1, 3, 32, 33, 4096), (False, True)):
            chosen = config.index_update(fan_out, n, run_words, envs, by_id)
            assert powers_of_two(chosen.block_bytes, chosen.block_weights, chosen.block_nodes, chosen.num_warps)
            assert chosen.block_envs & (chosen.block_envs - 1) == 0
            assert chosen.block_envs * run_words <= 512
            assert chosen.block_envs == 0 or chosen.block_envs >= min(envs, 32)
            assert chosen.block_bytes * config.index_span(n, by_id) <= 1024
            assert chosen.block_nodes * fan_out <= max(1024, fan_out)
            assert (chosen.block_envs > 0) == (run_words * min(1 << (envs - 1).bit_length(), 32) <= 512)

    @pytest.mark.parametrize("slice_len", [1, 4, 9, 1000])
    def test_slices(self, slice_len):
        for n in (1, 512, 513, 10**6):
            for chosen in (config.index_draw(32, n, slice_len), config.index_slices(n, slice_len)):
                assert powers_of_two(chosen.block_slices, chosen.block_steps, chosen.num_warps)
                assert chosen.block_steps == max(8, min(64, 1 << (slice_len - 1).bit_length()))
                assert chosen.block_slices * chosen.block_steps <= 1024

    def test_by_value(self):
        """At both sides of every bound that a rule has."""
        for choose, rules in RULES.items():
            for sizes, due in rules.items():
                found = choose(*sizes)
                assert (dataclasses.astuple(found) if dataclasses.is_dataclass(found) else found) == due, (
                    choose,
                    sizes,
                )


def test_launches_in_a_graph():
    assert not config.in_graph()
    with config.launches_in_graph():
        assert config.in_graph()
    assert not config.in_graph()


class TestUsing:
    def test_before_files_and_rules_until_left(self, tuned_file):
        forced, rule = DrawConfig(8, 4), config.tree_draw(32, 256)
        with config.using(sum_tree_draw=forced):
            assert config.tree_draw(32, 256) == config.tree_draw(32, 256, DEVICE) == forced
            with config.using(sum_tree_draw=DrawConfig(1, 1), loss_rows=BlockConfig(32, 1)):
                assert config.tree_draw(32, 256) == DrawConfig(1, 1)
            assert config.tree_draw(32, 256) == forced
            assert config.loss_rows(300) != BlockConfig(32, 1)
        assert config.tree_draw(32, 256) == rule

    def test_by_rule(self, tuned_file):
        """Neither files nor what is in force around it; but what is said inside."""
        rule = config.tree_draw(32, 256)
        with config.using(sum_tree_draw=DrawConfig(8, 4)):
            assert config.tree_draw(32, 256, DEVICE) == DrawConfig(8, 4)
            with config.by_rule():
                assert config.tree_draw(32, 256, DEVICE) == rule
                with config.using(sum_tree_draw=DrawConfig(1, 2)):
                    assert config.tree_draw(32, 256, DEVICE) == DrawConfig(1, 2)
                assert config.tree_draw(32, 256, DEVICE) == rule
            assert config.tree_draw(32, 256) == DrawConfig(8, 4)
        assert config.tree_draw(32, 256, DEVICE) == DrawConfig(2, 1)

    def test_left_by_an_error(self):
        with pytest.raises(RuntimeError), config.using(loss_rows=BlockConfig(32, 1)):
            raise RuntimeError
        assert config.loss_rows(300) != BlockConfig(32, 1)


# Tuned files: where they are looked for, and what in them is ignored


class TestFolders:
    def test_the_users_file(self, tmp_path, monkeypatch):
        """Point by point: where it has none that is near, the rule counts."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        own = tmp_path / "cache" / "gpubuf" / "tuned"
        write_file(own, {"sum_tree_draw": [draw(4, 2)]})
        assert config.tree_draw(32, 256, DEVICE) == DrawConfig(4, 2)
        assert config.tree_draw(32, 65536, DEVICE) == config.tree_draw(32, 65536)

    @pytest.mark.parametrize("cache", ["", "relative/folder"])
    def test_below_the_home_folder_without_a_cache_folder(self, monkeypatch, cache, tmp_path):
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
        monkeypatch.setenv("HOME", str(tmp_path))
        assert _tuned.user_folder() == tmp_path / ".cache" / "gpubuf" / "tuned"

    def test_no_home(self, monkeypatch):
        def none():
            raise RuntimeError("no home")

        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(_tuned.Path, "home", none)
        assert _tuned.user_folder() is None
        assert config.tree_draw(32, 256, DEVICE) == config.tree_draw(32, 256)


class TestIgnored:
    """What can't be used is ignored with one message, and the rule counts."""

    def refused(self, caplog) -> str:
        """The one message."""
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="gpubuf"):
            for n in (256, 300, 256):
                assert config.tree_draw(32, n, DEVICE) == config.tree_draw(32, n)
            assert config.tree_update(32, 256, DEVICE) == config.tree_update(32, 256)
        assert len(caplog.records) == 1
        assert FILE in caplog.text
        return caplog.text

    def test_nothing_is_said_of_no_file_and_a_good_one_is_read_once(self, write, caplog):
        assert config.tree_draw(32, 256, DEVICE) == config.tree_draw(32, 256)
        folder = write({"sum_tree_draw": [draw(2)]})
        assert config.tree_draw(32, 256, DEVICE) == DrawConfig(2, 1)
        (folder / FILE).write_text("")
        assert config.tree_draw(32, 200, DEVICE) == DrawConfig(2, 1)
        assert not caplog.records

    @pytest.mark.parametrize("text", [None, b"", b"{", b"[]", b'{"device": 3}', b"[" * 100_000, b"\xff\xfe\x00"])
    def test_damaged(self, write, tmp_path, caplog, text):
        (tmp_path / FILE).mkdir() if text is None else (tmp_path / FILE).write_bytes(text)
        assert "can't be used" in self.refused(caplog)

    @pytest.mark.parametrize(
        ("points", "changes", "said"),
        [
            *((points, {}, "can't be used") for points in (None, [], 3, "points")),
            *(({"sum_tree_draw": points}, {}, "can't be used") for points in (None, 3, [[]])),
            (
                {"sum_tree_draw": [draw(2)]},
                {"device": "NVIDIA H100-80GB HBM3"},
                "is for 'NVIDIA H100-80GB HBM3', not for 'NVIDIA H100 80GB HBM3'",
            ),
            *(({"sum_tree_draw": [draw(2)]}, {"format": number}, "its format") for number in (0, 2, None, "1", [])),
            ({"sum_tree_draw": [draw(2)]}, {"kernels": {}}, "sum_tree_draw: stale"),
            ({"transmogrify": [draw(2)]}, {}, "transmogrify: stale"),
        ],
    )
    def test_points_that_do_not_count(self, write, caplog, points, changes, said):
        write(points, **changes)
        assert said in self.refused(caplog)

    @pytest.mark.parametrize("changed", ["td", "sac", "discrete_sac"])
    def test_only_the_kernels_that_changed_are_stale(self, write, caplog, changed):
        """The kernels of three families are launched by `loss_rows`."""
        points = {"loss_rows": [point({"block": 128, "num_warps": 2}, n=256)], "sum_tree_draw": [draw(2)]}
        stamps = {family: _tuned.stamp(family) for family in ("td", "sac", "discrete_sac", "sum_tree")}
        write(points, kernels=stamps)
        assert config.loss_rows(256, DEVICE) == BlockConfig(128, 2)
        write(points, kernels=stamps | {changed: "another"})
        assert config.loss_rows(256, DEVICE) == config.loss_rows(256)
        assert config.tree_draw(32, 256, DEVICE) == DrawConfig(2, 1)
        assert "loss_rows: stale" in caplog.text

    @pytest.mark.parametrize(
        "wrong",
        [
            *(None, [], {}, {"sizes": {}, "config": {}}),
            *map(draw, (3, 0, -4, 2.0, True, "2", None, 1024, 2**80)),
            *(draw(2, 32), draw(2, 3), draw(2, fan_out=0), draw(2, fan_out=-32)),
            *(draw(2, n=2**70), draw(2, n=True), draw(2, n=0.5)),  # type: ignore[arg-type]
            point({"block_draws": 2}, fan_out=32, n=256),
            point({"block_draws": 2, "num_warps": 1, "more": 1}, fan_out=32, n=256),
            point({"block_draws": 2, "num_warps": 1}, n=256),
        ],
        ids=str,
    )
    def test_points_that_no_kernel_can_run(self, write, caplog, wrong):
        write({"sum_tree_draw": [wrong]})
        self.refused(caplog)


LARGEST: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "rows_copy": ({"n_bytes": 1024}, {"tile": 16, "num_warps": 2}),
    "sum_tree": ({"capacity": 100}, {"fan_out": 1024}),
    "trajectories": ({"words": 100}, {"fan_out": 2}),
    "sum_tree_update": (
        {"fan_out": 32, "n": 256},
        {"single_program": True, "block_entries": 256, "block_nodes": 512, "num_warps": 16},
    ),
    "trajectories_update": (
        {"fan_out": 32, "n": 1, "envs": 1, "by_id": 0},
        {"block_envs": 0, "block_bytes": 2048, "block_weights": 64, "block_nodes": 16, "num_warps": 1},
    ),
    "trajectories_draw": (
        {"fan_out": 32, "n": 1, "slice_len": 4},
        {"block_slices": 8, "block_steps": 2048, "num_warps": 1},
    ),
    "loss_rows": ({"n": 256}, {"block": 16384, "num_warps": 1}),
    "atom_rows": ({"n": 256, "atoms": 33}, {"block": 256, "num_warps": 1}),
    "norm_rows": ({"n": 256, "width": 1}, {"block": 16384, "num_warps": 1}),
}
"""Per operation: sizes, and a configuration at the limit of what kernels can run."""


@pytest.mark.parametrize(
    ("operation", "wrong"),
    [
        ("rows_copy", {"tile": 8}),
        ("sum_tree", {"fan_out": 2048}),
        ("trajectories", {"fan_out": 1}),
        ("sum_tree_update", {"single_program": 1}),
        ("sum_tree_update", {"block_nodes": 1024}),
        ("trajectories_update", {"block_envs": 3}),
        ("trajectories_update", {"block_envs": -4}),
        ("trajectories_update", {"block_bytes": 4096}),
        ("trajectories_draw", {"block_steps": 4096}),
        ("loss_rows", {"block": 32768}),
        ("atom_rows", {"block": 512}),
        ("norm_rows", {"block": 32768}),
    ],
)
def test_limits(operation, wrong):
    """Just inside, and just outside."""
    sizes, good = LARGEST[operation]
    assert _tuned.invalid(SPACES[operation], sizes, good) == ""
    assert _tuned.invalid(SPACES[operation], sizes, good | wrong) != ""


def test_the_stamp_is_that_of_the_kernels_arguments(tmp_path, monkeypatch):
    """Another compile-time argument or kernel changes it; comments and helpers don't. Every family has kernels."""
    nothing = _tuned.stamp("no such family")
    assert nothing not in {_tuned.stamp(family) for space in SPACES.values() for family in space.families}

    def stamp(text: str) -> str:
        (tmp_path / "family" / "_triton.py").write_text(text)
        _tuned.stamp.cache_clear()
        return _tuned.stamp("family")

    (tmp_path / "family").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(_tuned, "__file__", str(tmp_path / "_tuned.py"))
        kernel = "def copy_kernel(\n    x_ptr,\n    BLOCK: tl.constexpr,\n):\n    pass\n"
        first = stamp(kernel)
        assert stamp('"""Comment."""\n' + kernel.replace("pass", "x = 1")) == first
        assert stamp("def helper(\n    WIDE: tl.constexpr,\n):\n    pass\n" + kernel) == first
        assert stamp(kernel.replace("BLOCK", "TILE")) != first
        assert stamp(kernel.replace("copy", "move")) != first
        assert stamp(kernel.replace("):", "    MORE: tl.constexpr,\n):")) != first
    _tuned.stamp.cache_clear()


def test_spaces_are_well_formed():
    for space in SPACES.values():
        assert set(space.exact) <= set(space.sizes)
        assert set(space.free) <= {field.name for field in dataclasses.fields(space.config)}
    assert _tuned.slug("AMD Instinct MI300X (VF)") == "amd-instinct-mi300x-vf"
