"""Makes docs/pendulum.gif: some of the 4096 pendulums of a run, and its learning curve.

    python docs/animation.py

It trains as ``gpubuf train --env torch/Pendulum --num-envs 4096`` does, on a GPU, or in some minutes on a CPU. The
policies that the run saves at its evaluations drive the pendulums, from the same beginnings each time.
"""

import tempfile
from pathlib import Path

import torch
from gpubuf.train import Policy, TrainConfig, load_policy, train
from gpubuf.train.algorithms import MODEL_FILE
from gpubuf.train.metrics import METRICS_FILE, read
from gpubuf.train.progress import LineReporter, Status
from gpubuf.train.torch_environments import TORCH_ENVIRONMENTS
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from PIL import Image

COMMAND = "gpubuf train --env torch/Pendulum --num-envs 4096"
EVERY = 50 * 4096
ROWS, COLUMNS = 4, 8
#: Evaluations whose policies are shown, and the steps that they are shown for, of which every fourth is a frame.
STAGES, STEPS, STRIDE = (0, 1, 2, 3, -1), 100, 4


class Keeper(LineReporter):
    """Shows the run, and keeps its policy whenever a new one has been saved."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._file, self._seen = folder / MODEL_FILE, 0
        self.policies: list[Policy] = []

    def update(self, status: Status) -> None:
        super().update(status)
        if (
            self._file.exists()
            and (saved := self._file.stat().st_mtime_ns) != self._seen
        ):
            self._seen = saved
            self.policies.append(load_policy(self._file))


def swings(policy: Policy) -> list[torch.Tensor]:
    """Observations ``[E, 3]`` of the frames: cosine, sine and speed of each pendulum's angle, which is 0 above."""
    envs = TORCH_ENVIRONMENTS["torch/Pendulum"](ROWS * COLUMNS, 1, "cpu")
    observation, frames = envs.reset(), []
    for step in range(STEPS):
        if step % STRIDE == 0:
            frames.append(observation)
        with torch.no_grad():
            observation = envs.step(
                policy(observation) / envs.largest_action
            ).observation
    return frames


def picture(
    observation: torch.Tensor, curve: list[tuple[int, float]], shown: int
) -> Image.Image:
    """A frame: the pendulums, and the curve as far as the evaluation that is shown."""
    figure = Figure(figsize=(8, 3.2), dpi=80, layout="constrained")
    figure.suptitle(f"$ {COMMAND}", family="monospace", fontsize=10)
    swinging, learning = figure.subplots(1, 2)
    place = (
        torch.cartesian_prod(torch.arange(ROWS), torch.arange(COLUMNS)).flip(1) * 2.2
    )
    ends = place + observation[:, [1, 0]]
    lines = torch.stack([place, ends], 1).numpy()
    swinging.add_collection(
        LineCollection(lines, colors="tab:blue", linewidths=3, capstyle="round")
    )
    swinging.plot(*place.T, ".", color="black", markersize=3)
    swinging.set(
        xlim=(-1.2, 2.2 * COLUMNS - 1), ylim=(-1.2, 2.2 * ROWS - 1), aspect="equal"
    )
    swinging.axis("off")
    steps, returns = zip(*curve, strict=True)
    learning.plot(steps[: shown + 1], returns[: shown + 1], ".-", color="tab:orange")
    learning.set(
        xlim=(0, steps[-1] * 1.05),
        ylim=(min(returns) * 1.1, 0),
        xlabel="environment steps",
    )
    learning.set_title(
        f"step {steps[shown]:,}: mean return {returns[shown]:.0f}", fontsize=10
    )
    learning.grid(alpha=0.3)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    image = Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba())
    return image.convert("RGB").quantize(24, dither=Image.Dither.NONE)


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    keeper = Keeper(folder)
    settings = {"env": "torch/Pendulum", "num_envs": 4096, "checkpoint_every": EVERY}
    train(TrainConfig.from_mapping(settings), folder, reporter=keeper)
    records = read(folder / METRICS_FILE)
    curve = [
        (each["step"], each["mean_return"])
        for each in records
        if each["kind"] == "evaluation"
    ]
    policies = [*keeper.policies[: len(curve) - 1], load_policy(folder)]
    frames = [
        picture(frame, curve, stage % len(curve))
        for stage in STAGES
        for frame in swings(policies[stage % len(curve)])
    ]
    out = Path(__file__).with_name("pendulum.gif")
    frames[0].save(
        out,
        save_all=True,
        append_images=frames[1:],
        duration=100,
        loop=0,
        optimize=True,
    )
    print(f"{out}: {len(frames)} frames, {out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
