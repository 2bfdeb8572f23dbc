"""The choice of launch configurations: explicit, then tuned, then a rule; pure functions."""

from __future__ import annotations

import functools

import pytest

from gpubuf.kernels import _tuned, config
from gpubuf.kernels.config import BlockConfig, DrawConfig, IndexConfig, RowsConfig, SliceConfig, UpdateConfig
from tests.support.tuned_files import DEVICE, draw, point, write_file


@pytest.fixture(autouse=True)
def no_files_remembered():
    config.forget()
    yield
    config.forget()


@pytest.fixture
def write(tmp_path):
    """Writes the tuned file of a folder."""
    return functools.partial(write_file, tmp_path)


@pytest.fixture
def directory(write):
    """A folder with one tuned file."""
    update = {"single_program": False, "block_entries": 128, "block_nodes": 8, "num_warps": 2}
    return write(
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
    def test_explicit(self, directory):
        for device_type in ("cpu", "cuda"):
            assert config.tree_fan_out(1_000_000, device_type, DEVICE, 8, directory) == 8
        for wrong in (0, 1, 3, 48):
            with pytest.raises(ValueError, match=f"power of two of at least 2, but is {wrong}"):
                config.tree_fan_out(10, "cpu", explicit=wrong)

    def test_tuned(self, directory):
        assert config.tree_fan_out(900_000, "cuda", DEVICE, directory=directory) == 128
        assert config.tree_fan_out(400, "cuda", DEVICE, directory=directory) == 16
        assert config.tree_fan_out(10**9, "cuda", DEVICE, directory=directory) == 64, "out of reach"
        assert config.tree_fan_out(900_000, "cuda", "another device", directory=directory) == 32
        assert config.tree_fan_out(900_000, "cpu", DEVICE, directory=directory) == 16

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
    def test_tuned_draw(self, directory):
        assert config.tree_draw(32, 300, DEVICE, directory) == DrawConfig(2, 1)
        assert config.tree_draw(32, 10**6, DEVICE, directory) == DrawConfig(64, 8)
        assert config.tree_draw(32, 10**7, DEVICE, directory) == config.tree_draw(32, 10**7), "out of reach"

    def test_points_of_another_fan_out_do_not_count(self, directory):
        assert config.tree_draw(64, 300, DEVICE, directory) == config.tree_draw(64, 300)
        assert config.tree_update(32, 512, DEVICE, directory) == config.tree_update(32, 512)

    def test_tuned_update(self, directory):
        assert config.tree_update(64, 5_000, DEVICE, directory) == UpdateConfig(False, 128, 8, 2)

    def test_tuned_rows(self, directory):
        assert config.rows_copy(1500, DEVICE, directory) == RowsConfig(128, 2)
        assert config.rows_copy(2**28, DEVICE, directory) == RowsConfig(2048, 2)
        assert config.rows_copy(1500, "another", directory) == config.rows_copy(1500)

    def test_tuned_blocks(self, directory):
        assert config.tanh_normal_sample(256, 6, DEVICE, directory) == BlockConfig(64, 2)
        assert config.tanh_normal_backward(1000, DEVICE, directory) == BlockConfig(128, 2)
        assert config.loss_rows(300, DEVICE, directory) == BlockConfig(256, 8)
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
        folder = write({"trajectories": [point({"fan_out": 128}, words=100)]})
        assert config.index_fan_out(6400, 1, "cuda", DEVICE, directory=folder) == 128
        assert config.tree_fan_out(100, "cuda", DEVICE, directory=folder) == 16

    def test_tuned_launches(self, write):
        update = {"block_envs": 0, "block_bytes": 2, "block_weights": 8, "block_nodes": 1, "num_warps": 1}
        draw = {"block_slices": 2, "block_steps": 8, "num_warps": 1}
        folder = write(
            {
                "trajectories_update": [point(update, fan_out=32, n=1, envs=9, by_id=0)],
                "trajectories_draw": [point(draw, fan_out=32, n=64, slice_len=4)],
            }
        )
        assert config.index_update(32, 2, 1, 8, False, DEVICE, folder) == IndexConfig(0, 2, 8, 1, 1)
        assert config.index_update(32, 2, 1, 8, True, DEVICE, folder) == config.index_update(32, 2, 1, 8, True)
        assert config.index_draw(32, 100, 5, DEVICE, folder) == SliceConfig(2, 8, 1)
        assert config.index_draw(64, 100, 5, DEVICE, folder) == config.index_draw(64, 100, 5)

    def test_a_rebuild_is_out_of_reach_of_single_steps(self, write):
        """A configuration for one step makes one program do all: for millions of steps that would take seconds."""
        update = {"block_envs": 1, "block_bytes": 16, "block_weights": 16, "block_nodes": 1, "num_warps": 1}
        folder = write({"trajectories_update": [point(update, fan_out=32, n=1, envs=1, by_id=0)]})
        assert config.index_update(32, 1, 1, 1, False, DEVICE, folder).block_envs == 1
        assert config.index_update(32, 10**8, 10**8 // 64, 1, False, DEVICE, folder).block_envs == 0

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
    def test_before_files_and_rules_until_left(self, directory):
        forced, rule = DrawConfig(8, 4), config.tree_draw(32, 256)
        with config.using(sum_tree_draw=forced):
            assert config.tree_draw(32, 256) == config.tree_draw(32, 256, DEVICE, directory) == forced
            with config.using(sum_tree_draw=DrawConfig(1, 1), loss_rows=BlockConfig(32, 1)):
                assert config.tree_draw(32, 256) == DrawConfig(1, 1)
            assert config.tree_draw(32, 256) == forced
            assert config.loss_rows(300) != BlockConfig(32, 1)
        assert config.tree_draw(32, 256) == rule

    def test_by_rule(self, directory):
        """Neither files nor what is in force around it; but what is said inside."""
        rule = config.tree_draw(32, 256)
        with config.using(sum_tree_draw=DrawConfig(8, 4)):
            with config.by_rule():
                assert config.tree_draw(32, 256, DEVICE, directory) == rule
                with config.using(sum_tree_draw=DrawConfig(1, 2)):
                    assert config.tree_draw(32, 256, DEVICE, directory) == DrawConfig(1, 2)
                assert config.tree_draw(32, 256, DEVICE, directory) == rule
            assert config.tree_draw(32, 256) == DrawConfig(8, 4)
        assert config.tree_draw(32, 256, DEVICE, directory) == DrawConfig(2, 1)

    def test_left_by_an_error(self):
        with pytest.raises(RuntimeError), config.using(loss_rows=BlockConfig(32, 1)):
            raise RuntimeError
        assert config.loss_rows(300) != BlockConfig(32, 1)
