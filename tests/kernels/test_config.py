"""The choice of launch configurations: explicit, then tuned, then a rule. Nothing in a tuned file leads to an error."""

from __future__ import annotations

import dataclasses
import functools
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
    monkeypatch.setattr(config, "folders", lambda: [tmp_path])
    return functools.partial(write_file, tmp_path)


@pytest.fixture
def tuned_file(write):
    update = {"single_program": False, "block_entries": 128, "block_nodes": 8, "num_warps": 2}
    write(
        {
            "rows_copy": [point({"tile": 2 ** (n // 5 + 5), "num_warps": 2}, n_bytes=2**n) for n in (10, 30)],
            "sum_tree": [point({"fan_out": 16}, capacity=1_000), point({"fan_out": 128}, capacity=1_000_000)],
            "sum_tree_draw": [draw(2), draw(64, 8, n=65536)],
            "sum_tree_update": [point(update, fan_out=64, n=512)],
            "tanh_normal_sample": [point({"block": 64, "num_warps": 2}, n=256, width=6)],
            "tanh_normal_backward": [point({"block": 128, "num_warps": 2}, n=1536)],
            "loss_rows": [point({"block": 256, "num_warps": 8}, n=256)],
        }
    )


def test_slug():
    assert _tuned.slug(DEVICE) == "nvidia-h100-80gb-hbm3"
    assert _tuned.slug("AMD Instinct MI300X (VF)") == "amd-instinct-mi300x-vf"


class TestNearest:
    POINTS = tuple(_tuned.Point({"n": n}, n) for n in (1, 100, 10_000))

    def found(self, n: int) -> int | None:
        point = _tuned.nearest(self.POINTS, {"n": n})
        return None if point is None else point.config

    def test_in_log_space(self):
        due_of = {0: 1, 1: 1, 9: 1, 11: 100, 900: 100, 1100: 10_000, 160_000: 10_000, 160_001: None, 10**30: None}
        assert {n: self.found(n) for n in due_of} == due_of
        assert _tuned.nearest([], {"n": 1}) is None

    def test_a_tie_goes_to_the_first(self):
        assert self.found(10) == 1

    def test_all_sizes_count(self):
        points = [_tuned.Point({"n": n, "m": m}, (n, m)) for n, m in ((1, 1), (4, 16), (16, 1))]
        for sizes, due in (((2, 2), (1, 1)), ((4, 8), (4, 16)), ((9, 1), (16, 1)), ((1, 1000), None)):
            found = _tuned.nearest(points, dict(zip("nm", sizes, strict=True)))
            assert (None if found is None else found.config) == due

    def test_some_must_be_equal(self):
        points = [_tuned.Point({"n": n, "m": m}, (n, m)) for n, m in ((1, 1), (4, 2))]
        assert _tuned.nearest(points, {"n": 1, "m": 2}, exact=("m",)).config == (4, 2)  # type: ignore[union-attr]
        assert _tuned.nearest(points, {"n": 1, "m": 3}, exact=("m",)) is None


class TestFanOut:
    def test_explicit(self, tuned_file):
        for device_type in ("cpu", "cuda"):
            assert config.tree_fan_out(1_000_000, device_type, DEVICE, 8) == 8
        for wrong in (0, 1, 3, 48):
            with pytest.raises(ValueError, match=f"power of two of at least 2, but is {wrong}"):
                config.tree_fan_out(10, "cpu", explicit=wrong)

    def test_tuned(self, tuned_file):
        assert config.tree_fan_out(900_000, "cuda", DEVICE) == 128
        assert config.tree_fan_out(400, "cuda", DEVICE) == 16
        assert config.tree_fan_out(10**9, "cuda", DEVICE) == 64, "out of reach"
        assert config.tree_fan_out(900_000, "cuda", "another device") == 32
        assert config.tree_fan_out(900_000, "cpu", DEVICE) == 16

    @pytest.mark.parametrize(
        ("capacity", "due"), [(1, 16), (16, 16), (17, 32), (33, 64), (65, 16), (10**6, 32), (6 * 10**8, 64)]
    )
    def test_rule(self, capacity, due):
        """As shallow as with 64 children a node, and no wider than that takes."""
        fan_out = config.tree_fan_out(capacity, "cuda")
        assert fan_out == due

        def depth(width):
            levels = 1
            while width**levels < capacity:
                levels += 1
            return levels

        assert depth(fan_out) == depth(64)
        assert fan_out == 16 or depth(fan_out // 2) > depth(64)


class TestLaunches:
    def test_tuned_draw(self, tuned_file):
        assert config.tree_draw(32, 300, DEVICE) == DrawConfig(2, 1)
        assert config.tree_draw(32, 10**6, DEVICE) == DrawConfig(64, 8)
        assert config.tree_draw(32, 10**7, DEVICE) == config.tree_draw(32, 10**7), "out of reach"

    def test_points_of_another_fan_out_do_not_count(self, tuned_file):
        assert config.tree_draw(64, 300, DEVICE) == config.tree_draw(64, 300)
        assert config.tree_update(32, 512, DEVICE) == config.tree_update(32, 512)

    def test_tuned_update(self, tuned_file):
        assert config.tree_update(64, 5_000, DEVICE) == UpdateConfig(False, 128, 8, 2)

    def test_tuned_rows(self, tuned_file):
        assert config.rows_copy(1500, DEVICE) == RowsConfig(128, 2)
        assert config.rows_copy(2**28, DEVICE) == RowsConfig(2048, 2)
        assert config.rows_copy(1500, "another") == config.rows_copy(1500)

    def test_tuned_blocks(self, tuned_file):
        assert config.tanh_normal_sample(256, 6, DEVICE) == BlockConfig(64, 2)
        assert config.tanh_normal_backward(1000, DEVICE) == BlockConfig(128, 2)
        assert config.loss_rows(300, DEVICE) == BlockConfig(256, 8)
        assert config.loss_rows(300) == BlockConfig(512, 8)

    @pytest.mark.parametrize(
        ("n_bytes", "tile"),
        [(0, 256), (1, 256), (2**20, 256), (2**20 + 1, 512), (2**22 - 1, 512), (2**22, 1024), (2**40, 1024)],
    )
    def test_rows_rule(self, n_bytes, tile):
        assert config.rows_copy(n_bytes) == RowsConfig(tile, 4)

    @pytest.mark.parametrize("fan_out", [2, 16, 32, 64, 1024, 4096])
    @pytest.mark.parametrize("n", [1, 256, 1024, 1025, 10**7])
    def test_rules(self, fan_out, n):
        """Powers of two, as Triton needs, and tiles that fit the registers."""
        draw, update = config.tree_draw(fan_out, n), config.tree_update(fan_out, n)
        for value in (draw.block_draws, draw.num_warps, update.block_entries, update.block_nodes, update.num_warps):
            assert value > 0
            assert value & (value - 1) == 0
        assert draw.block_draws * fan_out <= max(512, fan_out)
        assert update.block_nodes * fan_out <= max(1024 * update.num_warps, fan_out)
        assert update.single_program == (n <= 1024)

    def test_updates_in_graphs_take_several_launches_earlier(self):
        """There a launch costs the host nothing. The configurations are those of larger eager batches."""
        assert not config.in_graph()
        with config.launches_in_graph():
            assert config.in_graph()
        assert not config.in_graph()
        assert config.tree_update(32, 256, in_graph=True) == config.tree_update(32, 256)
        for n in (257, 1024, 1025, 10**7):
            assert config.tree_update(32, n, in_graph=True) == config.tree_update(32, max(n, 1025))

    def test_configurations_are_values(self):
        assert len({config.tree_draw(32, 256), config.tree_draw(32, 200)}) == 1
        with pytest.raises(AttributeError):
            config.tree_draw(32, 256).num_warps = 3  # type: ignore[misc]


class TestIndex:
    """The trajectory index."""

    def test_fan_out_is_that_of_a_tree_over_words(self):
        assert config.index_fan_out(10**6, 1, "cuda") == config.tree_fan_out(15625, "cuda")
        assert config.index_fan_out(65, 100, "cuda") == config.tree_fan_out(200, "cuda")
        assert config.index_fan_out(10**6, 4, "cpu") == 16
        assert config.index_fan_out(10, 1, "cuda", explicit=4) == 4
        with pytest.raises(ValueError, match="power of two"):
            config.index_fan_out(10, 1, "cuda", explicit=5)

    def test_fan_out_has_its_own_tuned_points(self, write):
        write({"trajectories": [point({"fan_out": 128}, words=100)]})
        assert config.index_fan_out(6400, 1, "cuda", DEVICE) == 128
        assert config.tree_fan_out(100, "cuda", DEVICE) == 16

    def test_tuned_launches(self, write):
        update = {"block_envs": 0, "block_bytes": 2, "block_weights": 8, "block_nodes": 1, "num_warps": 1}
        draw = {"block_slices": 2, "block_steps": 8, "num_warps": 1}
        write(
            {
                "trajectories_update": [point(update, fan_out=32, n=1, envs=9, by_id=0)],
                "trajectories_draw": [point(draw, fan_out=32, n=64, slice_len=4)],
            }
        )
        assert config.index_update(32, 2, 1, 8, False, DEVICE) == IndexConfig(0, 2, 8, 1, 1)
        assert config.index_update(32, 2, 1, 8, True, DEVICE) == config.index_update(32, 2, 1, 8, True)
        assert config.index_draw(32, 100, 5, DEVICE) == SliceConfig(2, 8, 1)
        assert config.index_draw(64, 100, 5, DEVICE) == config.index_draw(64, 100, 5)

    def test_a_rebuild_is_out_of_reach_of_single_steps(self, write):
        """A configuration for one step makes one program do all: for millions of steps that would take seconds."""
        update = {"block_envs": 1, "block_bytes": 16, "block_weights": 16, "block_nodes": 1, "num_warps": 1}
        write({"trajectories_update": [point(update, fan_out=32, n=1, envs=1, by_id=0)]})
        assert config.index_update(32, 1, 1, 1, False, DEVICE).block_envs == 1
        assert config.index_update(32, 10**8, 10**8 // 64, 1, False, DEVICE).block_envs == 0

    def test_span(self):
        """A lane reads a byte of flags, but the one flag of a single step; identifiers tell that of the step before."""
        assert [config.index_span(n, False) for n in (1, 2, 10)] == [1, 8, 8]
        assert config.index_span(1, True) == 8

    @pytest.mark.parametrize("by_id", [False, True])
    @pytest.mark.parametrize("envs", [1, 3, 32, 33, 4096])
    @pytest.mark.parametrize(("n", "run_words"), [(1, 1), (1, 2), (64, 3), (4096, 66), (32000, 502), (10**6, 15627)])
    @pytest.mark.parametrize("fan_out", [2, 16, 64, 4096])
    def test_update_rules(self, fan_out, n, run_words, envs, by_id):
        """Powers of two; many environments stay side by side; no program has more than 512 words of bits."""
        chosen = config.index_update(fan_out, n, run_words, envs, by_id)
        for value in (chosen.block_bytes, chosen.block_weights, chosen.block_nodes, chosen.num_warps):
            assert value > 0
            assert value & (value - 1) == 0
        assert chosen.block_envs & (chosen.block_envs - 1) == 0
        assert chosen.block_envs * run_words <= 512
        assert chosen.block_envs == 0 or chosen.block_envs >= min(envs, 32)
        assert chosen.block_bytes * config.index_span(n, by_id) <= 1024
        assert chosen.block_nodes * fan_out <= max(1024, fan_out)
        assert (chosen.block_envs > 0) == (run_words * min(1 << (envs - 1).bit_length(), 32) <= 512)

    def test_slices_are_drawn_side_by_side(self):
        """Issue 23: four slices a program made eight warps for 32 slices, each of more than three times the work."""
        assert [config.index_draw(32, n, 8).block_slices for n in (1, 32, 4096, 4097)] == [1, 1, 1, 16]

    @pytest.mark.parametrize("slice_len", [1, 4, 9, 1000])
    @pytest.mark.parametrize("n", [1, 512, 513, 10**6])
    def test_slice_rules(self, n, slice_len):
        for chosen in (config.index_draw(32, n, slice_len), config.index_slices(n, slice_len)):
            for value in (chosen.block_slices, chosen.block_steps, chosen.num_warps):
                assert value > 0
                assert value & (value - 1) == 0
            assert chosen.block_steps == max(8, min(64, 1 << (slice_len - 1).bit_length()))
            assert chosen.block_slices * chosen.block_steps <= 1024


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
    def test_the_users_own_file_comes_first(self, tmp_path, monkeypatch):
        """Point by point: where the user's file has none that is near, the shipped one counts."""
        shipped = write_file(tmp_path / "shipped", {"sum_tree_draw": [draw(2), draw(64, 8, n=65536)]})
        monkeypatch.setattr(_tuned, "TUNED", shipped)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        assert config.tree_draw(32, 256, DEVICE) == DrawConfig(2, 1)
        own = tmp_path / "cache" / "gpubuf" / "tuned"
        write_file(own, {"sum_tree_draw": [draw(4, 2)]})
        assert config.tree_draw(32, 256, DEVICE) == DrawConfig(4, 2)
        assert config.tree_draw(32, 65536, DEVICE) == DrawConfig(64, 8)

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
        assert _tuned.folders() == [_tuned.TUNED]
        assert config.tree_draw(32, 256, "no such device") == config.tree_draw(32, 256)


GOOD = {"sum_tree_draw": [draw(2)]}
LARGEST: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "sum_tree": ({"capacity": 100}, {"fan_out": 1024}),
    "sum_tree_update": (
        {"fan_out": 32, "n": 256},
        {"single_program": True, "block_entries": 256, "block_nodes": 512, "num_warps": 16},
    ),
    "trajectories_update": (
        {"fan_out": 32, "n": 1, "envs": 1, "by_id": 0},
        {"block_envs": 4, "block_bytes": 16, "block_weights": 64, "block_nodes": 16, "num_warps": 1},
    ),
    "trajectories_draw": (
        {"fan_out": 32, "n": 1, "slice_len": 4},
        {"block_slices": 8, "block_steps": 2048, "num_warps": 1},
    ),
    "loss_rows": ({"n": 256}, {"block": 16384, "num_warps": 1}),
}
"""Per operation: sizes, and the largest configuration."""


class TestIgnored:
    """What can't be used is ignored with one message, and the rule counts."""

    @pytest.fixture(autouse=True)
    def only_folder(self, tmp_path, monkeypatch):
        monkeypatch.setattr(config, "folders", lambda: [tmp_path])

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

    @pytest.mark.parametrize(
        "text",
        [b"", b"{", b"[]", b"3", b"null", b'{"device": 3}', b"\0", b"[" * 100_000, b'{"format": 1, "points": {}}',
         b"\xff\xfe\x00"],
        ids=lambda text: repr(text[:9]),
    )  # fmt: skip
    def test_damaged(self, tmp_path, caplog, text):
        (tmp_path / FILE).write_bytes(text)
        assert "can't be read" in (said := self.refused(caplog)) or "names no device" in said

    def test_no_file(self, tmp_path, caplog):
        (tmp_path / FILE).mkdir()
        assert "can't be read" in self.refused(caplog)

    @pytest.mark.parametrize(
        ("points", "changes", "said"),
        [
            *((points, {}, "no points") for points in (None, [], 3, "points")),
            *(({"sum_tree_draw": points}, {}, "sum_tree_draw") for points in (None, {}, 3, [[]])),
            (
                GOOD,
                {"device": "NVIDIA H100-80GB HBM3"},
                "is for 'NVIDIA H100-80GB HBM3', not for 'NVIDIA H100 80GB HBM3'",
            ),
            *((GOOD, {"format": number}, "stale") for number in (0, 2, None, "1", [])),
            *((GOOD, {"kernels": of}, "sum_tree_draw: stale") for of in ({}, {"sum_tree": "0" * 12}, {"sum_tree": 0})),
            ({"transmogrify": [draw(2)]}, {}, "no such operation"),
        ],
    )
    def test_points_that_do_not_count(self, write, caplog, points, changes, said):
        write(points, **changes)
        assert said in self.refused(caplog)

    def test_only_the_kernels_that_changed_are_stale(self, write, caplog):
        stamps = {"sum_tree": _tuned.stamp("sum_tree"), "rows": "another"}
        rows = point({"tile": 128, "num_warps": 2}, n_bytes=1024)
        write({"rows_copy": [rows], "sum_tree_draw": [draw(2)]}, kernels=stamps)
        assert config.tree_draw(32, 256, DEVICE) == DrawConfig(2, 1)
        assert config.rows_copy(1024, DEVICE) == config.rows_copy(1024)
        assert len(caplog.records) == 1

    @pytest.mark.parametrize("changed", ["td", "sac", "discrete_sac"])
    def test_losses_are_stale_after_a_change_of_any_family(self, write, caplog, changed):
        """The kernels of all three are launched by `loss_rows`."""
        points = {"loss_rows": [point({"block": 128, "num_warps": 2}, n=256)]}
        stamps = {family: _tuned.stamp(family) for family in ("td", "sac", "discrete_sac")}
        write(points, kernels=stamps)
        assert config.loss_rows(256, DEVICE) == BlockConfig(128, 2)
        write(points, kernels=stamps | {changed: "another"})
        assert config.loss_rows(256, DEVICE) == config.loss_rows(256)
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
        write({"sum_tree_draw": [wrong, draw(2)]})
        assert config.tree_draw(32, 256, DEVICE) == DrawConfig(2, 1), "the other points count"

    def test_tiles_of_rows(self, write, caplog):
        """The narrowest that the kernels can run, and one that they can't."""
        for tile in (8, 16):
            write({"rows_copy": [point({"tile": tile, "num_warps": 2}, n_bytes=1024)]})
            config.forget()
            chosen = config.rows_copy(1024, DEVICE)
            assert chosen == (RowsConfig(16, 2) if tile == 16 else config.rows_copy(1024))
        assert "a tile has at least 16 elements, not 8" in caplog.text

    @pytest.mark.parametrize(
        ("operation", "wrong"),
        [
            ("sum_tree", {"fan_out": 2048}),
            ("sum_tree", {"fan_out": 1}),
            ("sum_tree_update", {"single_program": 1}),
            ("sum_tree_update", {"block_nodes": 1024}),
            ("trajectories_update", {"block_envs": 3}),
            ("trajectories_update", {"block_envs": -4}),
            ("trajectories_update", {"block_bytes": 4096}),
            ("trajectories_draw", {"block_steps": 4096}),
            ("loss_rows", {"block": 32768}),
        ],
    )
    def test_limits(self, operation, wrong):
        """Just inside, and just outside."""
        sizes, good = LARGEST[operation]
        assert _tuned.invalid(SPACES[operation], sizes, good) == ""
        assert _tuned.invalid(SPACES[operation], sizes, good | wrong) != ""


def test_the_stamp_is_that_of_the_kernels_arguments(tmp_path, monkeypatch):
    """Another compile-time argument or kernel changes it; comments and helpers don't."""

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


@pytest.mark.parametrize("family", sorted({family for space in SPACES.values() for family in space.families}))
def test_every_family_has_kernels(family):
    """The stamp of none is that of an empty text."""
    assert _tuned.stamp(family) != _tuned.stamp("no such family")


@pytest.mark.parametrize("operation", SPACES)
def test_spaces_are_well_formed(operation):
    space = SPACES[operation]
    fields = {field.name for field in dataclasses.fields(space.config)}
    assert set(space.exact) <= set(space.sizes)
    assert set(space.free) <= fields


def test_every_tuned_file_that_ships_is_usable():
    for path in _tuned.TUNED.glob("*.json"):
        found = _tuned.read(path, SPACES)
        assert path.stem == _tuned.slug(found.device)
        assert found.n_points
        assert not found.problems
