"""A run in its folder: begins or resumes it, finishes or stops it cleanly, and writes everything to disk."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import signal
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from gpubuf.serialization import load, replace, save
from gpubuf.train.algorithms import MODEL_FILE
from gpubuf.train.config import CONFIG_FILE, TrainConfig, UsageError
from gpubuf.train.metrics import CURVE_FILE, METRICS_FILE, JsonLines, check_lines, draw_curve, read
from gpubuf.train.progress import Reporter
from gpubuf.train.trainer import Trainer

CHECKPOINT_FILE = "checkpoint.safetensors"
RESULT_FILE = "result.json"

_FILES = (CONFIG_FILE, CHECKPOINT_FILE, MODEL_FILE, METRICS_FILE, CURVE_FILE, RESULT_FILE)

# Smaller matrix products finish before a second thread wakes up.
_ONE_THREAD_WORK = 1 << 25
_MOST_THREADS = 8


@dataclass(frozen=True)
class TrainResult:
    """The outcome of a run, or of the part of it that has just ended.

    Attributes:
        folder: The folder of the run.
        steps: Transitions collected since the run began.
        returns: Of the episodes of the final evaluation; empty if the run was interrupted.
        seconds: Training time since the run began, with the evaluations for the curve.
        signal: The signal that interrupted the run, or None.
    """

    folder: Path
    steps: int
    returns: tuple[float, ...]
    seconds: float
    signal: int | None

    @property
    def mean_return(self) -> float:
        """The mean of ``returns``; NaN if the run was interrupted."""
        return statistics.fmean(self.returns) if self.returns else float("nan")


def train(
    config: TrainConfig,
    folder: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    reporter: Reporter | Sequence[Reporter] = (),
) -> TrainResult:
    """Train an agent, and write metrics, curve, model and checkpoint into ``folder``.

    SIGINT and SIGTERM end the run after the current step, and save everything; a second signal ends it at once. An
    error, of the environment for example, is raised once everything up to the last whole step is saved. Seeds PyTorch's
    global random generator. During the run it sets PyTorch's number of threads, and with ``config.tf32`` on a GPU
    ``torch.set_float32_matmul_precision("high")``. On a CPU denormal numbers are 0 in this process meanwhile
    (``torch.set_flush_denormal``).

    Args:
        config: What to train on, and how.
        folder: The folder to write to; made if it doesn't exist.
        overwrite: Replace the run in ``folder``, if there is one.
        reporter: Shows the progress, or several that do; by default only messages are printed.

    Raises:
        UsageError: The environment, the device or the folder can't be used. Nothing was written.
        NotFiniteError: A loss, an observation or a reward became infinite or NaN. A run whose losses did is not saved.
    """
    path = Path(folder)
    device = _resolve_device(config.device)
    if not overwrite and holds_run(path):
        raise UsageError(f"{path} already holds a run: --resume it, --overwrite it, or choose another folder")
    with _settings_of_pytorch(config, device):
        run = _Run(config, path, device, reporter)
        run.begin()
        return run.finish()


def resume(
    folder: str | os.PathLike[str],
    changes: Mapping[str, Any] | None = None,
    *,
    reporter: Reporter | Sequence[Reporter] = (),
) -> TrainResult:
    """Continue the run in ``folder`` from its checkpoint, as if it had never stopped.

    On the CPU the metrics are those of a run without the interruption, byte for byte, if all randomness of the
    environment comes from its ``np_random``.

    Args:
        folder: The folder of the run, or the checkpoint in it.
        changes: Settings stated again. Only those in `config.CHANGEABLE_ON_RESUME` may differ from the run's.
        reporter: As for `train`.

    Raises:
        UsageError: There is no checkpoint, it is damaged, the run is complete, or ``changes`` contradict it. Nothing
            was changed.
        NotFiniteError: As for `train`.
    """
    path = Path(folder)
    if path.name == CHECKPOINT_FILE:
        path = path.parent
    stored = TrainConfig.read(path)
    config = stored.resumed_with(changes or {})
    device = _resolve_device(config.device)
    try:
        checkpoint = load(path / CHECKPOINT_FILE)
    except FileNotFoundError:
        raise UsageError(f"{path} cannot be resumed: it was stopped before its first checkpoint") from None
    except ValueError as error:
        raise UsageError(str(error)) from None
    with _settings_of_pytorch(config, device):
        run = _Run(config, path, device, reporter)
        run.restore(checkpoint)
        return run.finish()


def holds_run(folder: Path) -> bool:
    """Whether ``folder`` holds a run."""
    return any((folder / name).exists() for name in _FILES)


def free_folder(config: TrainConfig) -> Path:
    """A folder under ``runs/`` that is named after the run and holds none yet."""
    mode = "prioritized" if config.prioritized else "uniform"
    environment = config.env.replace("/", "-").replace(":", "-")
    algorithm = "" if config.algo == "sac" else f"{config.algo}-"
    name = f"{environment}-{algorithm}{mode}-seed{config.seed}"
    folders = (Path("runs", name if number == 1 else f"{name}-{number}") for number in itertools.count(1))
    return next(folder for folder in folders if not holds_run(folder))


class _Run:
    """One run and its files, from `begin` or `restore` to `finish`."""

    def __init__(
        self, config: TrainConfig, folder: Path, device: torch.device, reporter: Reporter | Sequence[Reporter]
    ) -> None:
        self._config = config
        self._folder = folder
        self._reporters = (tuple(reporter) or (Reporter(),)) if isinstance(reporter, Sequence) else (reporter,)
        self._trainer = Trainer(config, device, self._record)
        self._metrics: JsonLines | None = None
        self._seconds = 0.0

    def begin(self) -> None:
        """Claim the folder for a new run."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for name in _FILES:
                (self._folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise UsageError(f"cannot write to {self._folder}: {error}") from None
        self._open(0)

    def restore(self, checkpoint: dict[str, Any]) -> None:
        """Continue the run from ``checkpoint``."""
        try:
            state, seconds = checkpoint["trainer"], checkpoint["seconds"]
            step, lines = state["step"], checkpoint["lines"][METRICS_FILE]
        except (KeyError, TypeError) as error:
            raise UsageError(f"the checkpoint in {self._folder} does not fit this run: it lacks {error}") from None
        if (self._folder / RESULT_FILE).exists() and step >= self._config.total_steps:
            raise UsageError(
                f"the run in {self._folder} is complete, with {step:,} steps; ask for more of them to go on"
            )
        try:
            check_lines(self._folder / METRICS_FILE, lines)
        except ValueError as error:
            raise UsageError(str(error)) from None
        lost = self._trainer.load_state_dict(state)
        self._seconds = seconds
        self._open(lines)
        (self._folder / RESULT_FILE).unlink(missing_ok=True)
        if lost:
            self._tell(
                "message",
                f"{len(lost)} open episode(s) could not be played again and begin anew: the run goes on, but not "
                "exactly as it would have",
            )

    def _open(self, lines: int) -> None:
        try:
            self._metrics = JsonLines(self._folder / METRICS_FILE, keep=lines)
            replace(self._folder / CONFIG_FILE, [self._config.to_json().encode()])
        except BaseException:
            self._close()
            raise

    def _close(self) -> None:
        self._trainer.close()
        if self._metrics is not None:
            self._metrics.close()
        self._tell("close")

    def _tell(self, method: str, *arguments: Any) -> None:
        """Call a method of each reporter."""
        for reporter in self._reporters:
            getattr(reporter, method)(*arguments)

    def _record(self, record: dict[str, Any]) -> None:
        assert self._metrics is not None
        self._metrics.write(record)
        self._tell("record", record)

    def finish(self) -> TrainResult:
        """Train until the end or an interruption, evaluate, and write all remaining files."""
        trainer = self._trainer
        began = time.monotonic()
        try:
            with _Interruption() as interruption:
                try:
                    self._train(interruption)
                except (Exception, SystemExit) as error:
                    self._seconds += time.monotonic() - began
                    self._save_after(error)
                    raise
                self._seconds += time.monotonic() - began
                self._save()
                final = None
                if not interruption.requested() and trainer.step >= self._config.total_steps:
                    final = trainer.final_evaluation(interruption.requested)
                if final is not None:
                    self._record(final)
                    self._write_result(final)
                draw_curve(read(self._folder / METRICS_FILE), self._title(), self._folder / CURVE_FILE)
            result = TrainResult(
                folder=self._folder,
                steps=trainer.step,
                returns=() if final is None else tuple(final["returns"]),
                seconds=self._seconds,
                signal=None if final is not None else interruption.signal,
            )
            self._tell("message", _summary(result))
            return result
        finally:
            self._close()

    def _train(self, interruption: _Interruption) -> None:
        trainer, config = self._trainer, self._config
        self._tell("message", f"{self._title()}, in\n  {self._folder}")
        self._tell("start", trainer.step, config.total_steps)
        try:
            while trainer.step < config.total_steps and not interruption.requested():
                before = trainer.step
                trainer.advance()
                self._tell("update", trainer.status())
                if trainer.checkpoint_due(before):
                    self._save()
        finally:
            self._tell("stop")

    def _save(self) -> None:
        assert self._metrics is not None
        lines = {METRICS_FILE: self._metrics.lines}
        state = {"trainer": self._trainer.state_dict(), "lines": lines, "seconds": self._seconds}
        save(self._folder / CHECKPOINT_FILE, state)
        self._trainer.save_model(self._folder / MODEL_FILE)

    def _save_after(self, error: BaseException) -> None:
        """Save a run that an error ends, if it is worth going on with."""
        try:
            self._save()
        except Exception as refused:
            error.add_note(f"the run was not saved: {refused}")
        else:
            # A reporter may be what failed.
            with suppress(Exception):
                self._tell("message", f"an error after {self._trainer.step:,} steps; {_going_on(self._folder)}")

    def _write_result(self, final: dict[str, Any]) -> None:
        returns = final["returns"]
        result = {
            **{name: getattr(self._config, name) for name in ("env", "algo", "prioritized", "seed")},
            "steps": self._trainer.step,
            "episodes": len(returns),
            "mean_return": final["mean_return"],
            "std_return": statistics.pstdev(returns),
            "timing": {
                "seconds": round(self._seconds, 1),
                "steps_per_second": round(self._trainer.step / self._seconds, 1),
                "torch_threads": torch.get_num_threads(),
            },
        }
        replace(self._folder / RESULT_FILE, [(json.dumps(result, indent=2) + "\n").encode()])

    def _title(self) -> str:
        mode = "prioritized" if self._config.prioritized else "uniform"
        return f"{self._trainer.agent.title} on {self._config.env}, {mode} replay, seed {self._config.seed}"


def _summary(result: TrainResult) -> str:
    rate = result.steps / result.seconds if result.seconds else 0.0
    steps = f"{result.steps:,} steps in {result.seconds:.0f} s ({rate:.0f} steps/s)"
    if result.signal is not None:
        return f"interrupted after {steps}; {_going_on(result.folder)}"
    return (
        f"{steps}\n"
        f"evaluation over {len(result.returns)} episode{'s' * (len(result.returns) != 1)}: mean return "
        f"{result.mean_return:.1f} "
        f"(from {min(result.returns):.1f} to {max(result.returns):.1f})\n"
        f"{CURVE_FILE}, {MODEL_FILE}, {CHECKPOINT_FILE} are in\n  {result.folder}"
    )


def _going_on(folder: Path) -> str:
    return f"saved, go on with\n  gpubuf train --resume {shlex.quote(str(folder))}"


class _Interruption:
    """SIGINT and SIGTERM as a request to stop, while it is entered; the second one raises KeyboardInterrupt.

    Without effect in other threads than the main one.
    """

    signal: int | None = None

    def __enter__(self) -> _Interruption:
        main = threading.current_thread() is threading.main_thread()
        numbers = (signal.SIGINT, signal.SIGTERM) if main else ()
        self._before = {number: signal.signal(number, self._handle) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def requested(self) -> bool:
        return self.signal is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number


def _resolve_device(name: str) -> torch.device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        device = torch.device({"auto": "cuda" if count else "cpu"}.get(name, name))
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= count:
        raise UsageError(f"there is no device {name}: PyTorch {torch.__version__} sees {count} CUDA device(s)")
    return device


@contextmanager
def _settings_of_pytorch(config: TrainConfig, device: torch.device) -> Iterator[None]:
    """Set PyTorch's number of threads for the run, and TF32 on a GPU, and restore both.

    On a CPU denormal numbers are 0 in the meantime.
    """
    before, on_cpu = torch.get_num_threads(), device.type == "cpu"
    tf32 = config.tf32 and not on_cpu
    precision = torch.get_float32_matmul_precision() if tf32 else ""
    if tf32:
        torch.set_float32_matmul_precision("high")
    torch.set_num_threads(config.threads or (default_threads(config) if on_cpu else before))
    # Moments of units that learn no more end among them, with which a step takes several times as long.
    torch.set_flush_denormal(on_cpu)
    try:
        yield
    finally:
        if tf32:
            torch.set_float32_matmul_precision(precision)
        torch.set_flush_denormal(False)
        torch.set_num_threads(before)


def default_threads(config: TrainConfig) -> int:
    """One thread for small networks, which several would slow down; else the number of cores, at most eight."""
    work = config.batch_size * max(config.hidden) ** 2
    return 1 if work <= _ONE_THREAD_WORK else min(_MOST_THREADS, os.cpu_count() or 1)
