"""The choice of launch configurations: explicit, then tuned, then a rule; pure functions."""

from __future__ import annotations

import json

import pytest

from gpubuf.kernels import config

DEVICE = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def directory(tmp_path):
    """A folder with one tuned file."""
    points = {
        "device": DEVICE,
        "sum_tree": [
            {"sizes": {"capacity": 1_000}, "config": {"fan_out": 16}},
            {"sizes": {"capacity": 1_000_000}, "config": {"fan_out": 128}},
        ],
        "sum_tree_draw": [
            {"sizes": {"fan_out": 32, "n": 256}, "config": {"block_draws": 2, "num_warps": 1}},
            {"sizes": {"fan_out": 32, "n": 65536}, "config": {"block_draws": 64, "num_warps": 8}},
        ],
        "sum_tree_update": [
            {
                "sizes": {"fan_out": 64, "n": 512},
                "config": {"single_program": False, "block_entries": 128, "block_nodes": 8, "num_warps": 2},
            }
        ],
    }
    (tmp_path / "nvidia-h100-80gb-hbm3.json").write_text(json.dumps(points))
    return tmp_path


def test_slug():
    assert config.slug(DEVICE) == "nvidia-h100-80gb-hbm3"
    assert config.slug("AMD Instinct MI300X (VF)") == "amd-instinct-mi300x-vf"


def test_nearest_is_in_log_space():
    points = [{"sizes": {"n": n}, "config": {"n": n}} for n in (1, 100, 10_000)]
    for n, due in ((1, 1), (9, 1), (11, 100), (900, 100), (1100, 10_000), (10**9, 10_000), (0, 1)):
        assert config.nearest(points, {"n": n})["config"]["n"] == due
    assert config.nearest([], {"n": 1}) is None
    assert config.nearest(points, {"m": 1}) is None
    assert config.nearest(points, {"n": 10})["config"]["n"] == 1, "a tie goes to the first"


class TestFanOut:
    def test_explicit(self, directory):
        for device_type in ("cpu", "cuda"):
            assert config.tree_fan_out(1_000_000, device_type, DEVICE, 8, directory) == 8
        for wrong in (0, 1, 3, 48):
            with pytest.raises(ValueError, match=f"power of two of at least 2, but is {wrong}"):
                config.tree_fan_out(10, "cpu", explicit=wrong)

    def test_tuned(self, directory):
        assert config.tree_fan_out(900_000, "cuda", DEVICE, directory=directory) == 128
        assert config.tree_fan_out(2, "cuda", DEVICE, directory=directory) == 16
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
        assert config.tree_draw(32, 300, DEVICE, directory) == config.DrawConfig(2, 1)
        assert config.tree_draw(32, 10**6, DEVICE, directory) == config.DrawConfig(64, 8)

    def test_points_of_another_fan_out_do_not_count(self, directory):
        assert config.tree_draw(64, 300, DEVICE, directory) == config.tree_draw(64, 300)
        assert config.tree_update(32, 512, DEVICE, directory) == config.tree_update(32, 512)

    def test_tuned_update(self, directory):
        assert config.tree_update(64, 10_000, DEVICE, directory) == config.UpdateConfig(False, 128, 8, 2)

    @pytest.mark.parametrize("fan_out", [2, 16, 32, 64, 1024, 4096])
    @pytest.mark.parametrize("n", [1, 256, 1024, 1025, 10**7])
    def test_rules(self, fan_out, n):
        """Powers of two, as Triton needs, and tiles that fit the registers."""
        draw, update = config.tree_draw(fan_out, n), config.tree_update(fan_out, n)
        for value in (draw.block_draws, draw.num_warps, update.block_entries, update.block_nodes, update.num_warps):
            assert value > 0
            assert value & (value - 1) == 0
        assert draw.block_draws * fan_out <= max(512, fan_out)
        assert update.block_nodes * fan_out <= max(2048, fan_out)
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

    def test_fan_out_has_its_own_tuned_points(self, tmp_path):
        points = {"trajectories": [{"sizes": {"capacity": 100}, "config": {"fan_out": 128}}]}
        (tmp_path / "nvidia-h100-80gb-hbm3.json").write_text(json.dumps(points))
        assert config.index_fan_out(6400, 1, "cuda", DEVICE, directory=tmp_path) == 128
        assert config.tree_fan_out(100, "cuda", DEVICE, directory=tmp_path) == 16

    def test_tuned_launches(self, tmp_path):
        update = {"block_envs": 4, "block_words": 2, "block_weights": 8, "block_nodes": 1, "num_warps": 1}
        draw = {"block_slices": 2, "block_steps": 8, "num_warps": 1}
        points = {
            "trajectories_update": [{"sizes": {"fan_out": 32, "n": 1, "envs": 9}, "config": update}],
            "trajectories_draw": [{"sizes": {"fan_out": 32, "n": 64, "slice_len": 4}, "config": draw}],
        }
        (tmp_path / "nvidia-h100-80gb-hbm3.json").write_text(json.dumps(points))
        found = config.index_update(32, 2, 1, 8, False, DEVICE, tmp_path)
        assert found == config.IndexConfig(4, 2, 8, 1, 1)
        assert config.index_draw(32, 100, 5, DEVICE, tmp_path) == config.SliceConfig(2, 8, 1)
        assert config.index_draw(64, 100, 5, DEVICE, tmp_path) == config.index_draw(64, 100, 5)

    def test_span_holds_the_run(self):
        """One step changes its own bit and perhaps that of the step before; they must be two bits."""
        assert [config.index_span(n, 10) for n in (1, 2, 10)] == [2, 64, 64]
        assert config.index_span(1, 1) == 64

    @pytest.mark.parametrize("by_id", [False, True])
    @pytest.mark.parametrize("envs", [1, 3, 32, 33, 4096])
    @pytest.mark.parametrize(("n", "run_words"), [(1, 1), (1, 2), (64, 3), (4096, 66), (32000, 502), (10**6, 15627)])
    @pytest.mark.parametrize("fan_out", [2, 16, 64, 4096])
    def test_update_rules(self, fan_out, n, run_words, envs, by_id):
        """Powers of two; many environments stay side by side; no program has more than 512 words of bits."""
        chosen = config.index_update(fan_out, n, run_words, envs, by_id)
        for value in (chosen.block_words, chosen.block_weights, chosen.block_nodes, chosen.num_warps):
            assert value > 0
            assert value & (value - 1) == 0
        assert chosen.block_envs & (chosen.block_envs - 1) == 0
        assert chosen.block_envs * run_words <= 512
        assert chosen.block_envs == 0 or chosen.block_envs >= min(envs, 32)
        assert chosen.block_words * config.index_span(n, 10**7) <= 1024
        assert chosen.block_nodes * fan_out <= max(1024, fan_out)
        assert (chosen.block_envs > 0) == (run_words * min(1 << (envs - 1).bit_length(), 32) <= 512)

    @pytest.mark.parametrize("slice_len", [1, 4, 9, 1000])
    @pytest.mark.parametrize("n", [1, 512, 513, 10**6])
    def test_slice_rules(self, n, slice_len):
        for chosen in (config.index_draw(32, n, slice_len), config.index_slices(n, slice_len)):
            for value in (chosen.block_slices, chosen.block_steps, chosen.num_warps):
                assert value > 0
                assert value & (value - 1) == 0
            assert chosen.block_steps == max(8, min(64, 1 << (slice_len - 1).bit_length()))
            assert chosen.block_slices * chosen.block_steps <= 1024


def test_every_tuned_file_that_ships_is_usable():
    for path in config.TUNED.glob("*.json"):
        content = json.loads(path.read_text())
        assert path.stem == config.slug(content["device"])
        for point in content.get("sum_tree_draw", []):
            assert config.tree_draw(**point["sizes"], device_name=content["device"])
        for point in content.get("sum_tree_update", []):
            assert config.tree_update(**point["sizes"], device_name=content["device"])
        for point in content.get("sum_tree", []):
            assert config.tree_fan_out(point["sizes"]["capacity"], "cuda", content["device"])
        for point in content.get("trajectories_draw", []):
            assert config.index_draw(**point["sizes"], device_name=content["device"])
