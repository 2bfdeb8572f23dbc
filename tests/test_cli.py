"""The gpubuf command: exit codes, messages, and what it shows on a terminal and elsewhere."""

import errno
import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest

import gpubuf
from gpubuf.cli import main
from gpubuf.commands import train as train_command
from gpubuf.train import progress
from gpubuf.train.config import defaults
from gpubuf.train.progress import LineReporter, Status
from tests.support import train_environments
from tests.support.train_environments import PREFIX

TINY = [
    *("--total-steps", "120", "--learning-starts", "40", "--batch-size", "8", "--hidden", "8", "--eval-episodes", "2"),
    *("--env", PREFIX + "Signalling-v0", "--eval-every", "0", "--log-every", "20"),
]


@pytest.fixture(autouse=True)
def no_signals_and_no_picture(monkeypatch):
    train_environments.signals_at.clear()
    train_environments.steps_taken = 0
    monkeypatch.setattr("gpubuf.train.run.draw_curve", lambda *_: None)


def refused(capsys, *arguments):
    """The message with which a command is refused, in one line and with exit code 2."""
    try:
        code = main(["train", *arguments])
    except SystemExit as error:  # argparse's own way out
        code = error.code
    captured = capsys.readouterr()
    assert code == 2
    assert "Traceback" not in captured.err
    line = captured.err.splitlines()[-1]
    assert line.startswith("gpubuf train: error: ")
    return line


def test_version_and_help_answer_without_importing_torch():
    code = (
        "import sys; from gpubuf.cli import main\n"
        "for arguments in (['--version'], ['--help'], ['train', '--help'], ['plan', '--help']):\n"
        "    try: main(arguments)\n"
        "    except SystemExit as error: assert error.code == 0\n"
        "assert main(['train', '--gamma', '2']) == 2\n"
        "assert not {'torch', 'gymnasium', 'matplotlib', 'rich', 'numba'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"gpubuf {gpubuf.__version__}" in done.stdout
    of_train = ("--env", "--prioritized", "--uniform", "--device", "--seed", "--total-steps", "--num-envs", "--out")
    for option in (*of_train, "--spec", "--capacity", "--budget", "--sampler", "--slices", "--envs"):
        assert option in done.stdout


def test_python_m_gpubuf_is_the_command():
    done = subprocess.run([sys.executable, "-m", "gpubuf", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"gpubuf {gpubuf.__version__}\n"
    done = subprocess.run([sys.executable, "-m", "gpubuf"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "COMMAND" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--env", "Pendlum-v1"], "unknown environment 'Pendlum-v1'"),
        (["--device", "cuda"], "there is no device cuda"),
        (
            ["--env", "torch/Pendlum"],
            "unknown environment 'torch/Pendlum'; in torch there are ['torch/Catch', 'torch/Pendulum']",
        ),
        (["--cuda-graph"], "--cuda-graph needs a CUDA device, the run is on cpu: say --no-cuda-graph"),
        (["--gamma", "1.5"], "gamma must be in [0, 1], got 1.5"),
        (["--gamma", "high"], "argument --gamma: invalid float value: 'high'"),
        (["--total-steps", "100"], "learning_starts must be below total_steps (100), got 1000"),
        (["--hidden", "64,x"], "expected widths such as 256,256, got '64,x'"),
        (["--prioritized", "--uniform"], "not allowed with argument"),
        (["--resume"], "--resume needs the folder of the run"),
        (["--resume", "a", "--out", "b"], "--resume a contradicts --out b"),
        (["--resume", "a", "--overwrite"], "--resume and --overwrite contradict each other"),
        (["--resume", "no/such/folder"], "holds no run"),
        (["--total", "100"], "unrecognized arguments: --total 100; did you mean --total-steps?"),
        (["--lr", "1e-3"], "did you mean --learning-rate?"),
        (["--hidden", "32", "32"], "a list is written with commas, as in --hidden 256,256"),
        (["--total-steps", "many"], "expected a whole number such as 10000, 1e4 or 10k, got 'many'"),
    ],
)
def test_what_cannot_be_done_is_said_with_exit_code_2(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    try:
        code: object = main(["train", *arguments])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_missing_packages_name_the_extra(capsys, monkeypatch):
    monkeypatch.setattr(train_command, "_NEEDED", ("gymnasium", "no_such_package"))
    assert refused(capsys).endswith('training needs no_such_package; pip install "gpubuf[train]"')


def test_environments_on_the_device_need_no_gymnasium(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    arguments = "--env torch/Pendulum --num-envs 4 --total-steps 40 --learning-starts 20 --hidden 8 --batch-size 8"
    assert main(["train", *arguments.split(), "--eval-episodes", "2", "--out", str(tmp_path / "run")]) == 0
    assert "evaluation over 2 episodes: mean return -" in capsys.readouterr().out
    assert "needs gymnasium" in refused(capsys, "--out", str(tmp_path / "other"))


def test_defaults_that_depend_on_the_environment_are_in_the_help(capsys):
    """Those of a thousand environments on the device, counted by the environment, are what the help says."""
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    n = 1024
    on_device, elsewhere = defaults("torch/Pendulum", n), defaults("Pendulum-v1")
    for name, words in train_command.ON_DEVICE.items():
        assert f"(default: {elsewhere[name]}; with torch/ environments {words})" in text
        if words.endswith("an environment if that is more"):
            assert on_device[name] == int(words.split()[0]) * n
            assert defaults("torch/Pendulum", 1)[name] == elsewhere[name]
    assert on_device["update_ratio"] * n == int(train_command.ON_DEVICE["update_ratio"].split()[0])
    assert defaults("torch/Pendulum")["num_envs"] == int(train_command.ON_DEVICE["num_envs"])
    assert on_device["eval_episodes"] == int(train_command.ON_DEVICE["eval_episodes"])
    assert train_command.ON_DEVICE.keys() == on_device.keys()


def test_train_interrupt_resume(capsys, tmp_path, monkeypatch):
    """Ctrl-C: exit code 130 and a run to go on with; the folder is named once more, or not at all."""
    monkeypatch.chdir(tmp_path)
    train_environments.signals_at[60] = [signal.SIGINT]
    assert main(["train", *TINY, "--out", "run"]) == 130
    assert "interrupted after 60 steps" in capsys.readouterr().out
    assert "already holds a run: --resume" in refused(capsys, *TINY, "--out", "run")
    assert "seed is 0 in the run, 5 was asked for" in refused(capsys, "--out", "run", "--resume", "--seed", "5")
    assert "prioritized is False in the run, True" in refused(capsys, "--resume", "run", "--prioritized")
    assert main(["train", "--resume", "run", "--seed", "0"]) == 0
    assert "evaluation over 2 episodes: mean return" in capsys.readouterr().out
    assert "the run in run is complete" in refused(capsys, "--resume", "run")
    assert main(["train", "--out", "run", "--resume", "--total-steps", "140", "--quiet"]) == 0
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == 140
    assert main(["train", *TINY, "--out", "run", "--overwrite", "--quiet", "--seed", "9"]) == 0
    assert json.loads((tmp_path / "run" / "result.json").read_text())["seed"] == 9


def test_a_second_interrupt_exits_at_once(capsys, tmp_path):
    train_environments.signals_at[60] = [signal.SIGINT, signal.SIGINT]
    assert main(["train", *TINY, "--out", str(tmp_path / "run")]) == 130
    assert "stopped at once" in capsys.readouterr().err
    assert not (tmp_path / "run" / "checkpoint.safetensors").exists()


def test_divergence_exits_with_1(capsys, tmp_path):
    """The run says so in one sentence. The loss, which else warns of NaN, says nothing: a warning is an error here."""
    arguments = [*TINY, "--env", PREFIX + "Infinite-v0", "--uniform", "--out", str(tmp_path / "run")]
    assert main(["train", *arguments]) == 1
    assert capsys.readouterr().err == (
        f"gpubuf train: training diverged: the policy's actions for {PREFIX}Infinite-v0 are NaN or infinite\n"
    )


@pytest.mark.parametrize("where", ["write", "fsync"])
def test_a_full_disk_exits_with_1_and_one_sentence(capsys, tmp_path, monkeypatch, where):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*{"write": ("gpubuf.train.metrics.JsonLines.write", full), "fsync": ("os.fsync", full)}[where])
    assert main(["train", *TINY, "--quiet", "--out", str(tmp_path / "run")]) == 1
    captured = capsys.readouterr()
    assert captured.err == "gpubuf train: [Errno 28] No space left on device\n"


def test_output_that_cannot_be_written_exits_with_1(capsys, monkeypatch):
    """On a full disk; nothing is tried again when the file is closed, as it is when a process ends."""
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["plan", "--spec", "x=3:int8", "--capacity", "3"]) == 1
    assert capsys.readouterr().err == "gpubuf plan: [Errno 28] No space left on device\n"


def test_a_reader_that_has_gone_is_no_message(capsys, monkeypatch):
    """As of ``gpubuf plan ... | head -1``."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["plan", "--spec", "x=3:int8", "--capacity", "3"]) == 1
    assert capsys.readouterr().err == ""


def test_a_log_gets_plain_lines(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["train", *TINY, "--out", str(tmp_path / "run")]) == 0
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert "\r" not in output
    lines = output.splitlines()
    assert len(lines) == 16
    assert lines[0] == "SAC on tests.support.train_environments:Signalling-v0, uniform replay, seed 0, in"
    assert lines[11].startswith("step 120/120  return -")
    assert "steps/s" in lines[11]
    assert lines[13].startswith("evaluation over 2 episodes: mean return -")
    assert lines[14] == "learning_curve.png, model.safetensors, checkpoint.safetensors are in"
    assert lines[1] == lines[15] == f"  {tmp_path / 'run'}"


def test_a_long_run_gets_a_line_a_minute(capsys, monkeypatch):
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    reporter = LineReporter()
    reporter.start(0, 1000)
    for step in range(1, 31):
        now = 10.0 * step
        reporter.update(Status(step, step, None, None))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == [f"{step}/1,000" for step in (6, 12, 18, 24, 30)]
    assert lines[0].endswith("  0.1 steps/s  2:45:40 left")


def test_random_steps_and_the_first_update_say_nothing_about_the_time_left(capsys, monkeypatch):
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    reporter = LineReporter()
    reporter.start(0, 100)
    # Ten steps at random in no time, an update that compiles for half a minute, and then a second a step.
    for step in range(1, 101):
        now = 0.001 * step if step <= 10 else 30.0 + step
        reporter.update(Status(step, max(0, step - 10), None, None))
    left = [line.rsplit("  ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    assert left == ["- left", *(f"0:0{seconds // 60}:{seconds % 60:02} left" for seconds in range(80, -1, -10))]


def test_a_terminal_gets_one_line(monkeypatch):
    written = io.StringIO()
    written.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", written)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "70")
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    reporter = LineReporter()
    reporter.start(0, 1000)
    for step in (499, 500, 501):
        now += 0.06
        reporter.update(Status(step, 1, -1234.5, -1111.1))
    reporter.message("a message")
    reporter.stop()
    # Nothing within a tenth of a second; and no more than fits, in whole columns.
    line = "step 500/1,000  return -1234.5  eval -1111.1  17/s  0:00:30 left"
    assert written.getvalue() == f"\r\x1b[K{line}\r\x1b[Ka message\n\n"
    monkeypatch.setenv("TERM", "dumb")
    written.truncate(0)
    LineReporter().message("plain")
    assert "\r" not in written.getvalue()


@pytest.mark.skipif(os.name != "posix", reason="signals between processes")
@pytest.mark.slow
def test_ctrl_c_in_a_process_of_its_own(tmp_path):
    """The real thing: SIGINT to the process, exit code 130, a checkpoint, and no traceback."""
    command = [sys.executable, "-m", "gpubuf", "train", "--total-steps", "1000000", "--hidden", "8", "--out", "run"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [*command, "--learning-starts", "999999", "--checkpoint-every", "200", "--buffer-size", "1000"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while not (tmp_path / "run" / "checkpoint.safetensors").exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)  # this machine may have no core to spare
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "interrupted after" in output
    assert "Traceback" not in errors
