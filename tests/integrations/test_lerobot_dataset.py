"""A data set that LeRobot's own writer made gives, loaded, what LeRobot's own dataset gives for each frame."""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from gpubuf.data import load_dataset
from tests.support.lerobot_dataset import CAMERAS, LENGTHS, written

PYTHON = Path(__file__).parents[2] / os.environ.get("PEERS", ".peers") / "lerobot" / "bin" / "python"
KEYS = {
    ("observation", "top"): CAMERAS[0],
    ("observation", "wrist"): CAMERAS[1],
    ("observation", "state"): "observation.state",
    "action": "action",
    "task": "task_index",
}


@pytest.mark.slow
@pytest.mark.parametrize("codec", LENGTHS)
def test_every_frame_is_the_one_that_lerobot_decodes(codec: str, tmp_path: Path):
    """Bit for bit, from two cameras, through several files, with the ends of episodes where LeRobot has them."""
    for package in ("av", "pyarrow"):
        pytest.importorskip(package)
    if (
        not PYTHON.exists()
        or subprocess.run([PYTHON, "-c", "import importlib.metadata as m; m.version('torchcodec')"]).returncode
    ):
        pytest.skip("LeRobot is not installed: make .peers/lerobot/.ready")
    source = tmp_path / "rows"
    read = written(PYTHON, source, codec)
    assert all(len(list(source.glob(f"videos/{camera}/*/*.mp4"))) > 1 for camera in CAMERAS)
    assert len(list(source.glob("data/*/*.parquet"))) > 1
    rows = load_dataset(source, device="cpu", keys=KEYS, next_observations=False).storage[:]
    for key, name in KEYS.items():
        np.testing.assert_array_equal(rows[key].numpy(), read[name], err_msg=name)
    ends = np.cumsum(LENGTHS[codec]) - 1
    assert np.flatnonzero(rows["next", "done"]).tolist() == ends.tolist()
    assert torch.equal(rows["next", "truncated"], rows["next", "done"])
    assert not rows["next", "terminated"].any()
    # With next observations, which the last row of an episode has not.
    chosen = np.setdiff1d(np.arange(len(read["action"])), ends)
    pairs = load_dataset(source, device="cpu", keys=KEYS).storage[:]
    for key in (key for key in KEYS if key[0] == "observation"):
        np.testing.assert_array_equal(pairs[key].numpy(), read[KEYS[key]][chosen])
        np.testing.assert_array_equal(pairs["next", *key].numpy(), read[KEYS[key]][chosen + 1])
