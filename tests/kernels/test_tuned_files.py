"""Tuned files: where they are looked for, and what in them is ignored. Nothing in a file leads to an error."""

from __future__ import annotations

import dataclasses
import functools
import logging

import pytest

from gpubuf.kernels import _tuned, config
from gpubuf.kernels.config import SPACES, BlockConfig, DrawConfig, RowsConfig
from tests.support.tuned_files import DEVICE, FILE, draw, point, write_file


@pytest.fixture(autouse=True)
def no_files_remembered():
    config.forget()
    yield
    config.forget()


@pytest.fixture
def write(tmp_path):
    """Writes the tuned file of a folder."""
    return functools.partial(write_file, tmp_path)


class TestFolders:
    def test_the_users_own_file_comes_first(self, tmp_path, monkeypatch, write):
        """Point by point: where the user's file has none that is near, the shipped one counts."""
        shipped = write({"sum_tree_draw": [draw(2), draw(64, 8, n=65536)]})
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


class TestIgnored:
    """What can't be used is ignored with one message, and the rule counts."""

    def refused(self, folder, caplog) -> str:
        """The one message."""
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="gpubuf"):
            for n in (256, 300, 256):
                assert config.tree_draw(32, n, DEVICE, folder) == config.tree_draw(32, n)
            assert config.tree_update(32, 256, DEVICE, folder) == config.tree_update(32, 256)
        assert len(caplog.records) == 1
        assert FILE in caplog.text
        return caplog.text

    def test_nothing_is_said_of_a_file_that_is_not_there(self, tmp_path, caplog):
        assert config.tree_draw(32, 256, DEVICE, tmp_path / "nowhere") == config.tree_draw(32, 256)
        assert not caplog.records

    def test_nothing_is_said_of_a_good_file(self, write, caplog):
        directory = write({"sum_tree_draw": [draw(2)]})
        assert config.tree_draw(32, 256, DEVICE, directory) == DrawConfig(2, 1)
        assert not caplog.records

    @pytest.mark.parametrize(
        "text",
        ["", "{", "[]", "3", "null", '{"device": 3}', "\0", "[" * 100_000, '{"format": 1, "points": {}}'],
        ids=lambda text: repr(text[:9]),
    )
    def test_damaged(self, tmp_path, caplog, text):
        (tmp_path / FILE).write_text(text)
        assert "can't be read" in (said := self.refused(tmp_path, caplog)) or "names no device" in said

    def test_read_once(self, write, caplog):
        folder = write({"sum_tree_draw": [draw(2)]})
        assert config.tree_draw(32, 256, DEVICE, folder) == DrawConfig(2, 1)
        (folder / FILE).write_text("")
        assert config.tree_draw(32, 200, DEVICE, folder) == DrawConfig(2, 1)

    def test_no_text_and_no_file(self, tmp_path, caplog):
        (tmp_path / FILE).write_bytes(b"\xff\xfe\x00")
        assert "can't be read" in self.refused(tmp_path, caplog)
        (tmp_path / FILE).unlink()
        (tmp_path / FILE).mkdir()
        config.forget()
        assert "can't be read" in self.refused(tmp_path, caplog)

    @pytest.mark.parametrize("points", [None, [], 3, "points"])
    def test_no_points(self, write, caplog, points):
        assert "no points" in self.refused(write(points), caplog)

    @pytest.mark.parametrize("points", [None, {}, 3, [[]]])
    def test_no_list_of_points(self, write, caplog, points):
        assert "sum_tree_draw" in self.refused(write({"sum_tree_draw": points}), caplog)

    def test_foreign(self, write, caplog):
        said = self.refused(write({"sum_tree_draw": [draw(2)]}, device="NVIDIA H100-80GB HBM3"), caplog)
        assert "is for 'NVIDIA H100-80GB HBM3', not for 'NVIDIA H100 80GB HBM3'" in said

    @pytest.mark.parametrize("number", [0, 2, None, "1", []])
    def test_another_format(self, write, caplog, number):
        assert "stale" in self.refused(write({"sum_tree_draw": [draw(2)]}, format=number), caplog)

    @pytest.mark.parametrize("stamps", [{}, {"sum_tree": "0" * 12}, {"sum_tree": None}])
    def test_other_kernels(self, write, caplog, stamps):
        said = self.refused(write({"sum_tree_draw": [draw(2)]}, kernels=stamps), caplog)
        assert "sum_tree_draw: stale" in said

    def test_only_the_kernels_that_changed_are_stale(self, write, caplog):
        stamps = {"sum_tree": _tuned.stamp("sum_tree"), "rows": "another"}
        rows = point({"tile": 128, "num_warps": 2}, n_bytes=1024)
        folder = write({"rows_copy": [rows], "sum_tree_draw": [draw(2)]}, kernels=stamps)
        assert config.tree_draw(32, 256, DEVICE, folder) == DrawConfig(2, 1)
        assert config.rows_copy(1024, DEVICE, folder) == config.rows_copy(1024)
        assert len(caplog.records) == 1

    @pytest.mark.parametrize("changed", ["td", "sac", "discrete_sac"])
    def test_losses_are_stale_after_a_change_of_any_family(self, write, caplog, changed):
        """The kernels of all three are launched by `loss_rows`."""
        points = {"loss_rows": [point({"block": 128, "num_warps": 2}, n=256)]}
        stamps = {family: _tuned.stamp(family) for family in ("td", "sac", "discrete_sac")}
        assert config.loss_rows(256, DEVICE, write(points, kernels=stamps)) == BlockConfig(128, 2)
        changed_stamps = stamps | {changed: "another"}
        assert config.loss_rows(256, DEVICE, write(points, kernels=changed_stamps)) == config.loss_rows(256)
        assert "loss_rows: stale" in caplog.text

    def test_an_operation_that_there_is_not(self, write, caplog):
        assert "no such operation" in self.refused(write({"transmogrify": [draw(2)]}), caplog)

    @pytest.mark.parametrize(
        "wrong",
        [
            None,
            [],
            {},
            {"sizes": {}, "config": {}},
            draw(3),
            draw(0),
            draw(-4),
            draw(2.0),
            draw(True),
            draw("2"),
            draw(None),
            draw(2, 32),
            draw(2, 3),
            draw(1024),
            draw(2**80),
            draw(2, fan_out=0),
            draw(2, fan_out=-32),
            draw(2, n=2**70),
            draw(2, n=True),
            draw(2, n=0.5),  # type: ignore[arg-type]
            point({"block_draws": 2}, fan_out=32, n=256),
            point({"block_draws": 2, "num_warps": 1, "more": 1}, fan_out=32, n=256),
            point({"block_draws": 2, "num_warps": 1}, n=256),
        ],
        ids=str,
    )
    def test_points_that_no_kernel_can_run(self, write, caplog, wrong):
        self.refused(write({"sum_tree_draw": [wrong]}), caplog)
        folder = write({"sum_tree_draw": [wrong, draw(2)]})
        assert config.tree_draw(32, 256, DEVICE, folder) == DrawConfig(2, 1), "the other points count"

    def test_tiles_of_rows(self, write, caplog):
        """The narrowest that the kernels can run, and one that they can't."""
        for tile in (8, 16):
            folder = write({"rows_copy": [point({"tile": tile, "num_warps": 2}, n_bytes=1024)]})
            config.forget()
            chosen = config.rows_copy(1024, DEVICE, folder)
            assert chosen == (RowsConfig(16, 2) if tile == 16 else config.rows_copy(1024))
        assert "a tile has at least 16 elements, not 8" in caplog.text

    @pytest.mark.parametrize(
        ("operation", "sizes", "good", "wrong"),
        [
            ("sum_tree", {"capacity": 100}, {"fan_out": 1024}, {"fan_out": 2048}),
            ("sum_tree", {"capacity": 100}, {"fan_out": 2}, {"fan_out": 1}),
            (
                "sum_tree_update",
                {"fan_out": 32, "n": 256},
                {"single_program": True, "block_entries": 256, "block_nodes": 512, "num_warps": 16},
                {"single_program": 1},
            ),
            (
                "sum_tree_update",
                {"fan_out": 32, "n": 256},
                {"single_program": True, "block_entries": 256, "block_nodes": 512, "num_warps": 16},
                {"block_nodes": 1024},
            ),
            (
                "trajectories_update",
                {"fan_out": 32, "n": 1, "envs": 1, "by_id": 0},
                {"block_envs": 0, "block_bytes": 2048, "block_weights": 64, "block_nodes": 16, "num_warps": 1},
                {"block_envs": 3},
            ),
            (
                "trajectories_update",
                {"fan_out": 32, "n": 1, "envs": 1, "by_id": 0},
                {"block_envs": 4, "block_bytes": 16, "block_weights": 64, "block_nodes": 16, "num_warps": 1},
                {"block_envs": -4},
            ),
            (
                "trajectories_update",
                {"fan_out": 32, "n": 1, "envs": 1, "by_id": 0},
                {"block_envs": 4, "block_bytes": 16, "block_weights": 64, "block_nodes": 16, "num_warps": 1},
                {"block_bytes": 4096},
            ),
            (
                "trajectories_draw",
                {"fan_out": 32, "n": 1, "slice_len": 4},
                {"block_slices": 8, "block_steps": 2048, "num_warps": 1},
                {"block_steps": 4096},
            ),
            ("loss_rows", {"n": 256}, {"block": 16384, "num_warps": 1}, {"block": 32768}),
        ],
    )
    def test_limits(self, operation, sizes, good, wrong):
        """Just inside, and just outside."""
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
