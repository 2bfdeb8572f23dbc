"""Tells TensorBoard and Weights & Biases of a run, record by record: ``gpubuf train --track``."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpubuf.train.config import TrainConfig, UsageError
from gpubuf.train.progress import Reporter


class Tracker(Reporter):
    """Sends the numbers of every record as ``kind/name``, such as ``update/loss_qvalue``, at the step of the record.

    Args:
        folder: of the run.

    Raises:
        UsageError: the other program is not installed.
    """

    #: What is imported.
    package: str

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        if importlib.util.find_spec(self.package) is None:
            raise UsageError(f"tracking needs {self.package}: pip install {self.package}")
        self.folder = Path(folder)

    def record(self, record: Mapping[str, Any]) -> None:
        kind, step = record["kind"], record["step"]
        numbers = {f"{kind}/{name}": value for name, value in record.items() if isinstance(value, float | int)}
        del numbers[f"{kind}/step"]
        self.send(numbers, step)

    def send(self, numbers: Mapping[str, float], step: int) -> None:
        """Numbers by their names, at a step of the training."""
        raise NotImplementedError

    def message(self, text: str) -> None:
        """Messages are for a terminal."""


class TensorBoard(Tracker):
    """Event files in the folder of the run. What a resumed run records again replaces what it recorded before."""

    package = "tensorboard"
    _writer: Any = None

    def start(self, step: int, total: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self.folder), purge_step=step + 1 if step else None)

    def send(self, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases(Tracker):
    """A run of the project ``gpubuf``, or of ``WANDB_PROJECT``, under the name of the folder; ``WANDB_MODE=offline``
    works. A resumed run goes on in it: its name there is kept in ``wandb_id.txt``.
    """

    package = "wandb"
    _run: Any = None

    def start(self, step: int, total: int) -> None:
        import wandb

        kept = self.folder / "wandb_id.txt"
        if step == 0 or not kept.exists():
            kept.write_text(uuid.uuid4().hex[:8])
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "gpubuf"),
            name=self.folder.resolve().name,
            id=kept.read_text(),
            resume="allow",
            dir=self.folder,
            config=dataclasses.asdict(TrainConfig.read(self.folder)),
        )

    def send(self, numbers: Mapping[str, float], step: int) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


#: By the name that ``--track`` takes.
TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
