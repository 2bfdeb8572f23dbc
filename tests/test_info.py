"""`gpubuf info`: what is said of a machine, with a GPU and without."""

from __future__ import annotations

import json
import sysconfig
from types import SimpleNamespace

import pytest
import torch

from gpubuf import info as module
from gpubuf.cli import main
from gpubuf.data.storage import host_memory
from gpubuf.data.storage.placement import readable
from gpubuf.info import info, tuned_files, why_no_gpu
from tests.support.tuned_files import DEVICE, FILE, content, draw, write_file

NO_GPU = not torch.cuda.is_available()


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """The user's folder, alone in a list, and empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return [tmp_path / "cache" / "gpubuf" / "tuned"]


@pytest.mark.skipif(not NO_GPU, reason="there is a GPU")
def test_without_a_gpu(capsys, folders):
    """The table says why nothing was tried, and the JSON has the same."""
    assert main(["info"]) == 0
    said = capsys.readouterr().out
    for text in (f"torch               {torch.__version__}", "no GPU", "not tried", "none", "GiB", "CPU"):
        assert text in said
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"] == torch.__version__
    assert found["no_gpu"] == why_no_gpu()
    assert f"torch {torch.__version__}" in found["no_gpu"]
    assert (found["devices"], found["folders"]) == ([], [str(folder) for folder in folders])
    assert 0 < found["host"][0] <= found["host"][1]
    tried = {check["name"]: (check["works"], check["why"]) for check in found["checks"]}
    assert tried == dict.fromkeys(["CUDA graphs", "gathers from pinned memory"], (None, found["no_gpu"]))
    assert {check["name"] for check in found["needs"]} == {"a C compiler", "Python.h"}
    assert set(found["caches"]) == {"CPU", "Triton"}
    assert not any(text.startswith("unknown") for text in found["caches"].values())


class TestWhatTheFirstLaunchNeeds:
    """Triton compiles a piece of C at the first launch: without a compiler or Python's headers there is none."""

    @pytest.fixture(autouse=True)
    def machine(self, tmp_path, monkeypatch):
        self.programs, self.include = tmp_path / "bin", tmp_path / "include"
        for folder in (self.programs, self.include):
            folder.mkdir()
        monkeypatch.setenv("PATH", str(self.programs))
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setattr(sysconfig, "get_paths", lambda *scheme: {"include": str(self.include)})

    def program(self, name: str) -> None:
        (self.programs / name).touch(mode=0o755)

    def found(self) -> dict[str, str]:
        return {check.name: check.why for check in info().needs}

    @pytest.mark.parametrize("compiler", ["gcc", "clang"])
    def test_all_there(self, compiler):
        self.program(compiler)
        (self.include / "Python.h").touch()
        assert self.found() == {"a C compiler": "", "Python.h": ""}
        assert [check.works for check in info().needs] == [True, True]

    def test_nothing_there(self, capsys):
        found = self.found()
        assert "neither gcc nor clang" in found["a C compiler"]
        assert f"{self.include} has no Python.h" in found["Python.h"]
        assert main(["info"]) == 0
        assert "the first launch needs" in capsys.readouterr().out

    def test_a_compiler_of_the_users_choice(self, monkeypatch):
        monkeypatch.setenv("CC", "icx")
        self.program("gcc")
        assert "CC is 'icx'" in self.found()["a C compiler"]
        self.program("icx")
        assert self.found()["a C compiler"] == ""


@pytest.mark.parametrize(
    ("built", "said"),
    [((None, None), "is built without CUDA"), (("13.0", None), "finds no GPU"), ((None, "7"), "finds")],
)
def test_why_there_is_no_gpu(monkeypatch, built, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name, version in zip(("cuda", "hip"), built, strict=True):
        monkeypatch.setattr(torch.version, name, version)
    assert said in why_no_gpu()


@pytest.fixture
def gpu(monkeypatch):
    """A machine with one GPU, on which nothing that is tried works."""

    def fail(*_):
        raise RuntimeError("CUDA error: initialization error\nfor debugging ...")

    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132, gcnArchName="")
    for name, fake in {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_name": lambda device=None: DEVICE,
        "get_device_properties": lambda device=None: properties,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(host_memory, "device_memory", lambda device=None: (60 * 2**30, 80 * 2**30))
    monkeypatch.setattr(module, "_try_graph", fail)
    monkeypatch.setattr(module, "_try_pinned_gather", lambda: None)
    return properties


class TestWithGpu:
    def test_device_and_what_works(self, gpu):
        found = info()
        assert found.no_gpu == ""
        (device,) = found.devices
        assert (device.name, device.capability, device.processors) == (DEVICE, "sm_90", 132)
        graphs, pinned = found.checks
        assert (graphs.works, graphs.why) == (False, "RuntimeError: CUDA error: initialization error")
        assert (pinned.works, pinned.why) == (True, "")
        assert f"132         {readable(60 * 2**30)}" in str(found)

    def test_amd(self, gpu, monkeypatch):
        monkeypatch.setattr(torch.version, "hip", "7.0")
        gpu.gcnArchName = "gfx942:sramecc+:xnack-"
        assert info().devices[0].capability == "gfx942"

    def test_tuned_files_in_use(self, gpu, folders, capsys):
        write_file(folders[0], {"sum_tree_draw": [draw(2)]}, made={"date": "2026-11-21"})
        (file,) = info().tuned
        assert (file.path, file.device, file.date, file.points, file.state) == (
            folders[0] / FILE,
            DEVICE,
            "2026-11-21",
            1,
            "yes",
        )
        assert main(["info"]) == 0
        assert "2026-11-21  1       yes" in capsys.readouterr().out


POINTS = {"sum_tree_draw": [draw(2)]}


def states(devices=(DEVICE,)) -> list[str]:
    return [file.state for file in tuned_files(set(devices))]


def test_the_users_tuned_file(folders):
    assert states() == []
    write_file(folders[0], POINTS)
    assert states() == ["yes"]
    assert states([]) == ["no: for a device that is not here"]
    write_file(folders[0], {})
    assert states() == ["no: it has no points"]


@pytest.mark.parametrize(
    ("points", "more", "state"),
    [
        (POINTS, {"format": 0}, "no: it can't be used: ValueError: its format is 0"),
        (POINTS, {"kernels": {}}, "no: sum_tree_draw: stale"),
        ({"sum_tree_draw": [draw(2), draw(3)]}, {}, "no: it can't be used: ValueError: of a point"),
    ],
    ids=["another format", "other kernels", "a point that can't be"],
)
def test_tuned_files_that_are_not_used_as_they_are(folders, points, more, state):
    write_file(folders[0], points, **more)
    (found,) = states()
    assert found.startswith(state)
    assert ("power of two, not 3" in found) == (not more)


@pytest.mark.parametrize(
    ("name", "text", "state"),
    [("broken", "{", "no: it can't be used"), ("other", json.dumps(content(POINTS)), "no: it is not named after its")],
)
def test_files_that_are_no_tuned_files(folders, name, text, state):
    folders[0].mkdir(parents=True)
    (folders[0] / f"{name}.json").write_text(text)
    (file,) = tuned_files({DEVICE})
    assert file.state.startswith(state)
    assert (file.device == "") == (name == "broken")


@pytest.mark.gpu
@pytest.mark.skipif(NO_GPU, reason="needs a CUDA device")
def test_what_is_tried_on_a_gpu_works():
    assert [(check.works, check.why) for check in info().checks] == [(True, "")] * 2


def test_what_is_not_installed_is_said(monkeypatch):
    monkeypatch.setattr(module, "PACKAGES", ("torch", "no-such-package"))
    found = module._versions()
    assert found["no-such-package"] is None
    assert found["torch"] == torch.__version__


def test_the_version_of_torch_says_what_it_is_built_for(monkeypatch):
    """Its package may be called 2.11.0."""
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    assert module._versions()["torch"] == "2.11.0+cu130"


def test_a_cache_that_can_not_be_found_is_no_error():
    def fail():
        raise ImportError("no numba")

    assert module._of(fail) == "unknown (ImportError: no numba)"
