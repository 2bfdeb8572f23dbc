"""Frames of videos, each decoded once, in several threads."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpubuf.data.loading.recording import needed

#: Frames that a task decodes at least: to enter a video costs little, and many tasks leave few threads idle at a
#: piece's end. A video that can't be entered nearly so often is decoded by threads of FFmpeg's.
LEAST = 4

Frames = Iterator[Any]


class VideoFile:
    """The frames of a file, in order. PyAV decodes them, without Python's lock.

    A video can be entered at a key frame that no frame after it in the file is shown before. A task ends where the
    next one enters. The last one of a call may end between such frames: it stays open, and the next call goes on.

    Args:
        path: of the file.

    Attributes:
        times: when its frames are shown, in seconds, ``[frames]``.

    Raises:
        ImportError: PyAV is missing.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._open = path, needed("av").open
        with self._open(str(path)) as container:
            packets = [(p.pts, p.dts, p.is_keyframe) for p in container.demux(video=0) if p.pts is not None]
            unit = float(container.streams.video[0].time_base)
        shown = np.array([pts for pts, _, _ in packets])
        self._shown = np.sort(shown)
        self.times = self._shown * unit
        later = np.append(np.minimum.accumulate(shown[::-1])[::-1][1:], np.iinfo(np.int64).max)
        enters = {pts: dts for (pts, dts, key), least in zip(packets, later, strict=True) if key and pts < least}
        self._decoded_at = list(enters.values())
        self._entries = np.searchsorted(self._shown, list(enters))
        self._threads = 1 if len(packets) <= 16 * LEAST * len(enters) else 0
        self._idle: list[Any] = []
        self._open_at: tuple[int, Frames] = (-1, iter(()))

    def tasks(self, start: int, out: npt.NDArray[np.uint8]) -> list[Callable[[], None]]:
        """What decodes the frames from ``start`` on into ``out``, uint8 ``[n, 3, H, W]``.

        Raises:
            ValueError: there are not as many frames.
        """
        stop, cuts = start + len(out), [start]
        if stop > len(self.times):
            raise ValueError(f"{self._path} has {len(self.times)} frames, and frame {stop - 1} is asked for")
        for entry in self._entries[(self._entries > start) & (self._entries < stop)].tolist():
            if entry - cuts[-1] >= LEAST and stop - entry >= LEAST:
                cuts.append(entry)
        (at, frames), self._open_at = self._open_at, (-1, iter(()))
        tasks: list[Callable[[], None]] = []
        for low, high in itertools.pairwise([*cuts, stop]):
            run = frames if low == at else self._run(low, high)
            tasks.append(functools.partial(self._decode, low, run, out[low - start : high - start]))
        return tasks

    def _decode(self, start: int, run: Frames, out: npt.NDArray[np.uint8]) -> None:
        for number, into in enumerate(out, start):
            frame = next(run, None)
            if frame is None:
                # The run ended at an entry that this task goes past.
                run = self._run(number, start + len(out))
                frame = next(run)
            if frame.pts != self._shown[number]:
                raise ValueError(f"{self._path} is damaged: frame {number} can't be decoded")
            # Planar, as it is stored: green, blue, red.
            for channel, plane in zip((1, 2, 0), frame.reformat(format="gbrp").planes, strict=True):
                lines = np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)
                into[channel] = lines[: into.shape[1], : into.shape[2]]
        stop = start + len(out)
        if stop not in self._entries:
            self._open_at = stop, run
        else:
            # It is over, and leaves its container to the next one.
            next(run, None)

    def _run(self, start: int, stop: int) -> Frames:
        """The frames from ``start`` to the first entry that is not before ``stop``."""
        entry = int(np.searchsorted(self._entries, start, "right")) - 1
        end = int(np.searchsorted(self._entries, stop))
        until = self._shown[self._entries[end]] if end < len(self._entries) else None
        try:
            container = self._idle.pop()
        except IndexError:
            container = self._open(str(self._path))
        stream = container.streams.video[0]
        if not stream.codec_context.is_open:
            stream.thread_type, stream.codec_context.thread_count = "AUTO", self._threads
        container.seek(self._decoded_at[entry], stream=stream)
        first = self._shown[start]
        for packet in container.demux(stream):
            if packet.pts is None or packet.pts == until:
                break
            if packet.pts >= self._shown[self._entries[entry]]:
                yield from (frame for frame in packet.decode() if frame.pts >= first)
        yield from (frame for frame in stream.codec_context.decode(None) if frame.pts >= first)
        self._idle.append(container)
