"""What a terminal of 80 columns shows: no broken word, a bar to look at, paths on lines of their own."""

import io
import sys

import pytest

from gpubuf.cli import COMMANDS, main
from gpubuf.terminal import progress_bar, wrapped
from gpubuf.train.progress import LineReporter, Status

WIDTH = 80


def a_screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Standard output and error of a terminal, from this call on: pytest sets its own before a test."""
    written = io.StringIO()
    written.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", written)
    monkeypatch.setattr(sys, "stderr", written)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    return written


@pytest.mark.parametrize("words", ["saving", "loading", "moving to pinned"])
def test_a_bar_has_room(words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    with progress_bar(words, 1_234 << 30, True, binary=True) as advance:
        advance(1_023 << 30)
    last = capsys.readouterr().err.rstrip()
    assert len(last) <= WIDTH
    assert sum(last.count(cell) for cell in "━╸╺") >= 20


def test_the_line_of_a_run_is_cut_between_columns(monkeypatch: pytest.MonkeyPatch):
    screen = a_screen(monkeypatch)
    reporter = LineReporter()
    reporter.start(0, 2_048_000_000)
    reporter.update(Status(2_048_000_000, 1, -1234.5, -1111.1))
    line = screen.getvalue().rpartition("\x1b[K")[2]
    assert line == "step 2,048,000,000/2,048,000,000  return -1234.5  eval -1111.1  -/s  - left"
    reporter = LineReporter()
    reporter.start(0, 20_480_000_000_000)
    reporter.update(Status(20_480_000_000_000, 1, -1234.5, -1111.1))
    line = screen.getvalue().rpartition("\x1b[K")[2]
    assert line == "step 20,480,000,000,000/20,480,000,000,000  return -1234.5  eval -1111.1  -/s"


def test_words_and_paths_stay_whole(monkeypatch: pytest.MonkeyPatch):
    screen = a_screen(monkeypatch)
    words, path = "a sentence of many words " * 5, "  /a/path/that/is/longer/than/eighty/columns" * 3
    lines = wrapped(f"{words}\n{path}", screen).splitlines()
    assert all(len(line) < WIDTH for line in lines[:-1])
    assert " ".join(" ".join(lines[:-1]).split()) == words.strip()
    assert lines[-1] == path
    assert wrapped(words, io.StringIO()) == words


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits(monkeypatch: pytest.MonkeyPatch, command: str):
    screen = a_screen(monkeypatch)
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    assert [line for line in screen.getvalue().splitlines() if len(line) > WIDTH] == []


def test_errors_and_findings_fit(monkeypatch: pytest.MonkeyPatch):
    screen = a_screen(monkeypatch)
    main(["plan", "--spec", "pixels=84x84:uint8", "--spec", "next.pixels=84x84:uint8", "--capacity", "1e6"])
    main(["info"])
    with pytest.raises(SystemExit):
        main(["train", "--total", "1", "--a-long-option-that-there-is-not", "--another-one-that-there-is-not"])
    lines = screen.getvalue().splitlines()
    assert [line for line in lines if len(line) > WIDTH and not line.startswith("  ")] == []
