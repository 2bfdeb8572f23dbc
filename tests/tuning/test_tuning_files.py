"""What `gpubuf tune` writes, and shows."""

from __future__ import annotations

import dataclasses
import json

import pytest

from gpubuf.kernels import _tuned, config
from gpubuf.kernels._spaces import SPACES, BlockConfig, DrawConfig
from gpubuf.tuning.files import caveat, path_for, save
from gpubuf.tuning.report import HEADING, Limits, notes, table
from gpubuf.tuning.search import Result
from gpubuf.tuning.shapes import Job
from gpubuf.tuning.timing import UnusableError
from tests.support.tuning_setup import BLOCK, DRAW, FakeTimer, draw_seconds, tuned


class TestFiles:
    DEVICE = "Some GPU 80GB"

    def results(self, seconds=None, todo=(DRAW,)) -> list[Result]:
        return tuned(list(todo), FakeTimer(seconds or draw_seconds(DrawConfig(8, 1))))

    def test_what_is_written_is_what_is_chosen(self, tmp_path):
        """Also by a choice made before: saving makes the process read the file anew."""
        folder = tmp_path / "new" / "folder"
        assert config.tree_draw(32, 256, self.DEVICE, folder) == DrawConfig(4, 1)
        path = save(folder, self.DEVICE, self.results(), {"date": "today"})
        assert path == path_for(folder, self.DEVICE) == folder / "some-gpu-80gb.json"
        assert config.tree_draw(32, 256, self.DEVICE, folder) == DrawConfig(8, 1)
        found = _tuned.read(path, SPACES, self.DEVICE)
        assert not found.problems
        assert found.made == {"date": "today"}
        (point,) = found.points["sum_tree_draw"]
        assert point.measured["one"] == {"us": 1e6, "us_by_rule": 5e6, "bytes": 100, "launches": 1}
        assert [other.name for other in folder.iterdir()] == [path.name], "no temporary file is left"
        assert path.stat().st_mode & 0o777 == 0o644

    def test_points_for_other_sizes_stay(self, tmp_path):
        save(tmp_path, self.DEVICE, self.results(), {})
        more = Job("sum_tree_draw", 10**6, {"n": 4096}, "sum_tree")
        save(tmp_path, self.DEVICE, self.results(lambda made: 1.0, (more, BLOCK)), {})
        assert config.tree_draw(32, 256, self.DEVICE, tmp_path) == DrawConfig(8, 1)
        assert config.loss_rows(256, self.DEVICE, tmp_path) == BlockConfig(256, 4)
        points = _tuned.read(path_for(tmp_path, self.DEVICE), SPACES).points["sum_tree_draw"]
        assert [point.sizes["n"] for point in points] == [256, 4096]
        assert all(point.measured for point in points)

    def test_points_for_the_same_sizes_are_replaced(self, tmp_path):
        save(tmp_path, self.DEVICE, self.results(), {})
        save(tmp_path, self.DEVICE, self.results(draw_seconds(DrawConfig(2, 1))), {})
        assert config.tree_draw(32, 256, self.DEVICE, tmp_path) == DrawConfig(2, 1)

    @pytest.mark.parametrize("before", ["", '{"format": 0, "device": "Some GPU 80GB", "points": {}}', "[]"])
    def test_a_file_that_can_not_be_used_is_replaced(self, tmp_path, before):
        path_for(tmp_path, self.DEVICE).write_text(before)
        save(tmp_path, self.DEVICE, self.results(), {})
        assert config.tree_draw(32, 256, self.DEVICE, tmp_path) == DrawConfig(8, 1)

    def test_what_was_not_tuned_is_not_written(self, tmp_path):
        def never(made):
            raise UnusableError("no")

        path = save(tmp_path, self.DEVICE, self.results(never), {})
        assert json.loads(path.read_text())["points"] == {}

    def test_caveats(self, tmp_path, monkeypatch):
        own, shipped = tmp_path / "cache" / "gpubuf" / "tuned", tmp_path / "shipped"
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr(_tuned, "TUNED", shipped)
        own.mkdir(parents=True)
        assert caveat(own / "a.json") == ""
        assert caveat(shipped / "a.json") == ""
        assert f"reads tuned files from {own} and {shipped} only" in caveat(tmp_path / "a.json")
        (own / "a.json").touch()
        assert caveat(own / "a.json") == ""
        assert f"{own / 'a.json'} comes first" in caveat(shipped / "a.json")


class TestReport:
    def test_table(self):
        results = tuned([DRAW, BLOCK], FakeTimer(lambda made: 2e-6 if made == DrawConfig(4, 1) else 1e-6))
        lines = table(results, Limits(copy=1e9, launch=0.25e-6))
        assert lines[0] == HEADING
        assert lines[1] == ("sum_tree_draw", "one", "block_draws 8, num_warps 1", "1.00", "2.00", "100", "10.0", "25")
        assert lines[2][:3] == ("", "two", "")
        assert len(lines) == 5
        assert {len(line) for line in lines} == {len(HEADING)}

    def test_what_is_not_known_is_not_shown(self):
        def seconds(made):
            if made == DrawConfig(4, 1):
                raise UnusableError("spills")
            return 1.0

        class Silent(FakeTimer):
            def time(self, calls):
                return dataclasses.replace(super().time(calls), launches=None)

        lines = table(tuned([DRAW], Silent(seconds)), Limits(1.0, 1.0))
        assert lines[1][4] == lines[1][7] == ""

    def test_what_was_not_tuned_is_named(self):
        def never(made):
            raise UnusableError("does not compile")

        results = tuned([DRAW], FakeTimer(never))
        assert table(results, Limits(1.0, 1.0))[1][:3] == ("sum_tree_draw", "sum_tree_draw (n 256)", "not tuned")
        (note,) = notes(results)
        assert note.startswith("sum_tree_draw (n 256): block_draws 4, num_warps 1; ")
        assert note.endswith(": does not compile")

    def test_what_there_was_no_time_for(self):
        (result,) = tuned([BLOCK], FakeTimer(lambda made: 1.0), budget=-1.0)
        assert notes([result]) == ["loss_rows (n 256): 4 configurations not tried for want of time"]
