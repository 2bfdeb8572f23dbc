"""What `gpubuf tune` writes, and shows."""

from __future__ import annotations

import pytest

from gpubuf.kernels import _tuned, config
from gpubuf.kernels.config import SPACES, DrawConfig, RowsConfig
from gpubuf.tuning.operations import Job
from gpubuf.tuning.report import HEADING, caveat, notes, path_for, save, table
from gpubuf.tuning.search import Result
from tests.support.tuning_setup import COPY, DRAW, FakeTimer, draw_seconds, never, tuned


class TestFiles:
    DEVICE = "Some GPU 80GB"

    @pytest.fixture
    def folder(self, tmp_path, monkeypatch):
        """The only folder that is looked into."""
        monkeypatch.setattr(config, "folders", lambda: [tmp_path / "new" / "folder"])
        return tmp_path / "new" / "folder"

    def results(self, seconds=None, todo=(DRAW,)) -> list[Result]:
        return tuned(list(todo), FakeTimer(seconds or draw_seconds(DrawConfig(8, 1))))

    def test_what_is_written_is_what_is_chosen(self, folder):
        """Also by a choice made before: saving makes the process read the file anew."""
        assert config.tree_draw(32, 256, self.DEVICE) == DrawConfig(4, 1)
        path = save(folder, self.DEVICE, self.results(), {"date": "today"})
        assert path == path_for(folder, self.DEVICE) == folder / "some-gpu-80gb.json"
        assert config.tree_draw(32, 256, self.DEVICE) == DrawConfig(8, 1)
        found = _tuned.read(path, SPACES, self.DEVICE)
        assert not found.problems
        assert found.made == {"date": "today"}
        (point,) = found.points["sum_tree_draw"]
        assert point.measured["one"] == {"us": 1e6, "us_by_rule": 5e6, "launches": 1}
        assert [other.name for other in folder.iterdir()] == [path.name], "no temporary file is left"
        assert path.stat().st_mode & 0o777 == 0o644

    def test_points_for_other_sizes_stay(self, folder):
        save(folder, self.DEVICE, self.results(), {})
        more = Job("sum_tree_draw", DRAW.sizes | {"n": 4096})
        save(folder, self.DEVICE, self.results(lambda made: 1.0, (more, COPY)), {})
        assert config.tree_draw(32, 256, self.DEVICE) == DrawConfig(8, 1)
        assert config.rows_copy(2**21, self.DEVICE) == RowsConfig(512, 4)
        points = _tuned.read(path_for(folder, self.DEVICE), SPACES).points["sum_tree_draw"]
        assert [point.sizes["n"] for point in points] == [256, 4096]
        assert all(point.measured for point in points)

    @pytest.mark.parametrize("before", ["", '{"format": 0, "device": "Some GPU 80GB", "points": {}}', "[]"])
    def test_a_file_that_can_not_be_used_is_replaced(self, folder, before):
        folder.mkdir(parents=True)
        path_for(folder, self.DEVICE).write_text(before)
        save(folder, self.DEVICE, self.results(), {})
        assert config.tree_draw(32, 256, self.DEVICE) == DrawConfig(8, 1)

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
        results = tuned([DRAW, COPY], FakeTimer(lambda made: 2e-6 if made == DrawConfig(4, 1) else 1e-6))
        lines = table(results)
        assert lines[0] == HEADING
        assert lines[1] == ("sum_tree_draw", "one", "block_draws 8, num_warps 1", "1.00", "2.00", "1")
        assert lines[2][:3] == ("", "two", "")
        assert len(lines) == 5
        assert {len(line) for line in lines} == {len(HEADING)}

    def test_what_was_not_tuned_is_named(self):
        results = tuned([DRAW], FakeTimer(never))
        assert table(results)[1][:3] == ("sum_tree_draw", str(DRAW), "not tuned")
        (note,) = notes(results)
        assert note.startswith("sum_tree_draw (capacity 1,000,000, fan_out 32, n 256): block_draws 4, num_warps 1; ")
        assert note.endswith(": does not compile")
