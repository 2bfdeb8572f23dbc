"""Wheels and sdist hold what they should: a checkout without symlinks would silently lose the kernels.

They are built here, or are those of the folder that GPUBUF_DIST names: `make dist` tests what it has built.
"""

import hashlib
import json
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gpubuf.info import info
from gpubuf.kernels import _jit

ROOT = Path(__file__).parent.parent
#: An sdist has the kernels where the link leads, and neither link nor folder at the top.
CHECKOUT = (ROOT / "kernels").exists()
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs")


BUILT = os.environ.get("GPUBUF_DIST")
#: The environment of `make dist` has tools that the tests have not.
TOOLS = os.pathsep.join([str(ROOT / ".release" / "bin"), os.environ["PATH"]])
LINUX_X86 = (sys.platform, platform.machine()) == ("linux", "x86_64")


def build(source: Path, *what: str, **variables: str) -> None:
    """Build into ``source/dist`` with the tools installed here: no isolation, so no network."""
    command = [sys.executable, "-m", "build", "--no-isolation", *what, str(source)]
    run = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def run_away(python: str | Path, program: str, cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a program where the checkout can't be imported."""
    # -P: the working directory is no place to import from
    return subprocess.run([python, "-P", "-c", program], env=env, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source tree, with the wheel for all systems and the sdist in ``dist/``.

    A copy, because setuptools leaves build/ behind, and puts what it finds there into the next wheel.
    """
    copy = tmp_path_factory.mktemp("tree") / "gpubuf"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=LEFT_OUT)
    for hidden in (".ci", ".github", ".gitignore", ".pre-commit-config.yaml"):
        (shutil.copytree if (ROOT / hidden).is_dir() else shutil.copy)(ROOT / hidden, copy / hidden)
    if CHECKOUT:
        shutil.copytree(ROOT / ".editable", copy / ".editable", symlinks=True)
    if BUILT:
        (copy / "dist").mkdir()
        for file in (*ROOT.joinpath(BUILT).glob("*none-any.whl"), *ROOT.joinpath(BUILT).glob("*.tar.gz")):
            shutil.copy(file, copy / "dist")
    else:
        build(copy, "--wheel", "--sdist")
    return copy


@pytest.fixture(scope="module")
def pure(tree: Path) -> Path:
    """The wheel for all systems."""
    (wheel,) = (tree / "dist").glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def machine_code(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel with machine code, with the tag that auditwheel gives it where that is installed."""
    if not LINUX_X86:
        pytest.skip("a wheel with machine code is for Linux on x86-64")
    if BUILT:
        (wheel,) = ROOT.joinpath(BUILT).glob("*manylinux*.whl")
        return wheel
    pytest.importorskip("numba")
    folder = tmp_path_factory.mktemp("machine_code")
    build(tree, "--wheel", "--outdir", str(folder), GPUBUF_MACHINE_CODE="1")
    (wheel,) = folder.glob("*.whl")
    if shutil.which("auditwheel", path=TOOLS) is None:
        return wheel
    repair = [shutil.which("auditwheel", path=TOOLS), "repair", "--wheel-dir", folder / "dist", wheel]
    subprocess.run(repair, env={**os.environ, "PATH": TOOLS}, check=True, capture_output=True)
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


@pytest.fixture
def wheel(request: pytest.FixtureRequest) -> Path:
    """A wheel by the name of its fixture."""
    built: Path = request.getfixturevalue(request.param)
    return built


def wheel_names(wheel: Path) -> list[str]:
    """The files in it; those of auditwheel have entries for folders too."""
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if not name.endswith("/")]


def in_metadata(wheel: Path, name: str) -> str:
    """A file of the metadata of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (found,) = (each for each in archive.namelist() if each.endswith(f".dist-info/{name}"))
        return archive.read(found).decode()


@pytest.fixture(scope="module")
def wheel_files(pure: Path) -> list[str]:
    return wheel_names(pure)


@pytest.fixture(scope="module")
def sdist_files(tree: Path) -> list[str]:
    (sdist,) = (tree / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert all(m.isfile() or m.isdir() for m in members), "a link in an sdist points nowhere on the other side"
    return [m.name.partition("/")[2] for m in members if m.isfile()]


def package_files() -> set[str]:
    """Every file of the package, the kernels under their import path."""
    walked = os.walk(ROOT / "gpubuf", followlinks=True)
    files = {Path(folder, name).relative_to(ROOT).as_posix() for folder, _, names in walked for name in names}
    return {name for name in files if name.endswith((".py", "py.typed", ".json"))}


def test_wheel_holds_the_package_and_nothing_else(wheel_files: list[str]):
    """The kernels are inside, once, under gpubuf; no top-level `kernels`, no tests."""
    inside = {name for name in wheel_files if not name.partition("/")[0].endswith(".dist-info")}
    assert inside == package_files()
    assert "gpubuf/py.typed" in inside
    assert "gpubuf/kernels/rows/__init__.py" in inside
    assert {name.partition("/")[0] for name in inside} == {"gpubuf"}


def test_wheel_metadata(pure: Path):
    metadata = Parser().parsestr(in_metadata(pure, "METADATA"))
    assert "MIT License" in in_metadata(pure, "licenses/LICENSE")
    assert "gpubuf = gpubuf.cli:main" in in_metadata(pure, "entry_points.txt")
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Requires-Python"] == ">=3.11"
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert not [line for line in needed if "pytest" in line or "gymnasium" in line]


def test_the_pure_wheel_is_for_all_systems(pure: Path):
    tags = Parser().parsestr(in_metadata(pure, "WHEEL"))
    assert (tags["Root-Is-Purelib"], tags.get_all("Tag")) == ("true", ["py3-none-any"])
    assert pure.name.endswith("-py3-none-any.whl")


LINK = re.compile(r"\]\(([^)]+)\)|(?:src|href)=\"([^\"]+)\"")


def test_links_of_the_readme_lead_somewhere_from_another_page(pure: Path, tree: Path):
    """PyPI shows it. In the repository they are relative, so that they lead to the version at hand."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base = project["urls"]["Repository"]
    shown = Parser().parsestr(in_metadata(pure, "METADATA"))
    text = shown.get_payload()
    assert shown["Description-Content-Type"] == "text/markdown"
    assert "REPOSITORY" not in text
    assert f"git clone {base} gpubuf" in text
    written = [a or b for a, b in LINK.findall((ROOT / "README.md").read_text())]
    links = [a or b for a, b in LINK.findall(text)]
    assert len(links) == len(written)
    assert not [link for link in written if link.startswith(base)]
    for link, before in zip(links, written, strict=True):
        assert link.startswith(("https://", "#")), link
        if link.startswith(base):
            assert link.removeprefix(base) in (f"/blob/main/{before}", f"/raw/main/{before}")
            assert ("/raw/" in link) == before.endswith((".png", ".svg", ".gif", ".webp"))
            assert (ROOT / before.partition("#")[0]).exists(), before
        else:
            assert link == before
    (sdist,) = (tree / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        information = archive.extractfile(f"{sdist.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert information is not None
        assert Parser().parsestr(information.read().decode()).get_payload() == text


def test_sdist_holds_the_project(sdist_files: list[str]):
    """Package, tests, benchmarks, documentation, and what the two commands need."""
    present = set(sdist_files)
    assert package_files() <= present
    for folder in ("tests", "benchmarks", "docs", "examples"):
        expected = {p.relative_to(ROOT).as_posix() for p in (ROOT / folder).rglob("*.[pm][yd]")}
        assert expected
        assert expected <= present
    assert {"LICENSE", "Makefile", "README.md", "constraints.txt", "pyproject.toml", ".ci/run"} <= present
    assert {"CITATION.cff", "mkdocs.yml", "docs/drawings/ring.svg"} <= present
    assert {"CHANGELOG.md", "CONTRIBUTING.md", ".pre-commit-config.yaml", ".github/workflows/ci.yml"} <= present
    assert not [name for name in present if name.startswith("kernels/") or "__pycache__" in name]


def test_wheel_from_the_sdist_is_the_same(tree: Path, wheel_files: list[str], tmp_path: Path):
    (sdist,) = (tree / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    build(unpacked, "--wheel")
    (again,) = (unpacked / "dist").glob("*.whl")
    assert sorted(wheel_names(again)) == sorted(wheel_files)


def test_wheel_works_away_from_the_checkout(pure: Path, tmp_path: Path):
    """The library and its low layer are imported from the wheel's own files; both backends' sources are there."""
    with zipfile.ZipFile(pure) as archive:
        archive.extractall(tmp_path)
    program = (
        "import importlib.util, gpubuf.data, gpubuf.objectives, gpubuf.kernels\n"
        "from gpubuf.kernels import rows\n"
        "assert rows.new_ring('cpu').tolist() == [0, 0, 0, 0]\n"
        "assert importlib.util.find_spec('gpubuf.kernels.rows._triton')\n"
        "assert importlib.util.find_spec('gpubuf.kernels.rows._cpu')\n"
        "print(rows.__file__, gpubuf.__version__)"
    )
    run = run_away(sys.executable, program, tmp_path, {**os.environ, "PYTHONPATH": str(tmp_path)})
    assert run.returncode == 0, run.stderr
    version = pure.name.split("-")[1]
    assert run.stdout.split() == [str(tmp_path / "gpubuf" / "kernels" / "rows" / "__init__.py"), version]


WITHOUT_EXTRAS = """
import sys

# None makes a package look as if it were not installed.
sys.modules.update(dict.fromkeys({missing}))
import torch
from tensordict import TensorDict
import gpubuf

print(gpubuf.__file__, gpubuf.__version__)
buffer = gpubuf.TensorDictPrioritizedReplayBuffer(
    alpha=0.6, beta=0.4, storage=gpubuf.LazyTensorStorage(100), batch_size=16, n_steps=2
)
done = (torch.arange(120) % 10 == 9).unsqueeze(-1)
rows = {{"observation": torch.randn(120, 3), "next": {{"reward": torch.randn(120, 1), "done": done}}}}
buffer.extend(TensorDict(rows, [120]))
batch = buffer.sample()
batch["td_error"] = torch.rand(16)
buffer.update_tensordict_priority(batch)
buffer.save("saved")
buffer.load("saved")
slices = gpubuf.TensorDictReplayBuffer(
    storage=gpubuf.LazyMemmapStorage(200), sampler=gpubuf.SliceSampler(slice_len=4), batch_size=16
)
slices.extend(TensorDict(rows, [120]))
assert slices.sample()["next", "reward"].shape == (16, 1)
print(gpubuf.plan(buffer[:4], 1_000).row_bytes)
"""


def away() -> dict[str, str]:
    """The environment variables of a process that sees neither this checkout nor its constraints."""
    ours = ("PYTHONPATH", "PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT")
    return {name: value for name, value in os.environ.items() if name not in ours}


def fresh_environment(folder: Path) -> Path:
    """The interpreter of a new environment in ``folder``, which sees the packages that are installed here."""
    environment = folder / "fresh"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    # A plain path: what is installed here as a link to a checkout stays out.
    own = sysconfig.get_path("purelib", vars={"base": str(environment)})
    Path(own, "shared.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    return environment / "bin" / "python"


def pip(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the pip of here on the environment of ``python``."""
    command = [sys.executable, "-m", "pip", "--python", str(python), *arguments]
    return subprocess.run(command, env=away(), cwd=python.parents[2], capture_output=True, text=True, check=False)


def packages_of_extras() -> set[str]:
    """Import names of everything that only an extra installs, and of what these bring along."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {re.split(r"[^\w-]", line)[0] for lines in project["optional-dependencies"].values() for line in lines}
    names = {name.replace("-", "_") for name in extras} | {
        "_pytest",
        "markdown_it",
        "mujoco",
        "imageio",
        "xdist",
    }
    # torch itself imports setuptools where it is installed.
    return names - {"setuptools"}


@pytest.mark.slow
@pytest.mark.parametrize("wheel", ["pure", "machine_code"], indirect=True)
def test_the_wheel_installs_into_a_fresh_environment(wheel: Path, tmp_path: Path):
    """pip, the command, and the buffers without an extra: writes, priorities, slices, files, checkpoints and a plan.

    The environment sees the packages installed here, and is filled by the pip of here: nothing is downloaded.
    """
    missing = packages_of_extras()
    assert {"gymnasium", "numba", "rich", "matplotlib", "pytest"} <= missing
    python = fresh_environment(tmp_path)
    pip(python, "install", "-q", "--no-index", "--no-deps", str(wheel)).check_returncode()
    program = WITHOUT_EXTRAS.format(missing=missing)
    run = run_away(python, program, tmp_path, away())
    assert run.returncode == 0, run.stderr
    file, version, *_ = run.stdout.split()
    assert file.startswith(str(python.parents[1]))
    assert version == wheel.name.split("-")[1]
    command = [python.with_name("gpubuf"), "plan", "--spec", "observation=3:float32", "--capacity", "100"]
    planned = subprocess.run(command, env=away(), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "observation" in planned.stdout, planned.stderr


def programs_of_the_readme() -> tuple[str, str]:
    """The line of TorchRL's that the first diff changes, and the program below it."""
    text = (ROOT / "README.md").read_text()
    change, program = re.search(r"```diff\n-(.*)\n.*\n```\n\n```python\n(.*?)```", text, re.DOTALL).groups()
    return change, program


@pytest.mark.network
@pytest.mark.parametrize(
    ("other", "oldest", "program"),
    [
        ("torchrl", (0, 14, 1), "\n".join(programs_of_the_readme())),
        ("stable-baselines3", (2, 9), "from gpubuf.integrations.sb3 import DictReplayBuffer, ReplayBuffer"),
    ],
)
def test_pip_finds_the_newest_of_others(other: str, oldest: tuple[int, ...], program: str, pure: Path, tmp_path: Path):
    """CASES 86: gpubuf and the newest TorchRL or Stable-Baselines3 go together, and run in what pip installs.

    TensorDict is what pip would have to replace here. PyTorch stays the one of here, of any build.
    """
    (tmp_path / "constraints.txt").write_text(f"torch=={torch.__version__.partition('+')[0]}\n")
    python = fresh_environment(tmp_path)
    if pip(python, "index", "versions", "--retries", "0", other).returncode:
        pytest.skip(f"no index that has {other} can be reached")
    options = ["--report", str(tmp_path / "report.json"), "--constraint", str(tmp_path / "constraints.txt")]
    run = pip(python, "install", "-q", "--no-compile", *options, str(pure), other)
    assert run.returncode == 0, run.stderr
    items = json.loads((tmp_path / "report.json").read_text())["install"]
    installed = {item["metadata"]["name"]: item["metadata"]["version"] for item in items}
    (version,) = (version for name, version in installed.items() if name.replace("_", "-") == other)
    assert tuple(map(int, version.split("."))) >= oldest, installed
    run = run_away(python, program, tmp_path, away())
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("twine", path=TOOLS) is None, reason="twine is not installed: `make dist` does it")
def test_twine_accepts_what_is_built(tree: Path, machine_code: Path):
    twine = shutil.which("twine", path=TOOLS)
    check = [twine, "check", "--strict", *(tree / "dist").iterdir(), machine_code]
    run = subprocess.run(check, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_citation_agrees_with_the_project():
    """It has no version of its own."""
    text = (ROOT / "CITATION.cff").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"license: {project['license']}\n" in text
    assert f"repository-code: {project['urls']['Repository']}\n" in text
    assert f"name: {project['authors'][0]['name']}\n" in text
    assert not re.search(r"^version:", text, re.MULTILINE)


@pytest.mark.skipif(not CHECKOUT, reason="not a checkout: an sdist holds the kernels themselves")
def test_the_package_is_reached_through_relative_links():
    """The kernels from the package, and the package from the folder that an editable install puts on the path."""
    assert os.readlink(ROOT / "gpubuf" / "kernels") == os.path.join("..", "kernels")
    assert os.readlink(ROOT / ".editable" / "gpubuf") == os.path.join("..", "gpubuf")
    assert os.listdir(ROOT / ".editable") == ["gpubuf"]


# Machine code of the CPU kernels


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch):
    """Puts an extension with some attributes where the wheel has one; nothing where None is given."""

    def put(**attributes: object) -> None:
        found = SimpleNamespace(**attributes) if attributes else None
        monkeypatch.setitem(sys.modules, "gpubuf.kernels._machine_code", found)
        _jit.machine_code.cache_clear()

    yield put
    monkeypatch.undo()
    _jit.machine_code.cache_clear()


def compiled_elsewhere(name: str, *, stamp: str | None = None, runs_here: bool = True) -> dict[str, object]:
    return {"stamp": stamp or _jit.source_stamp(), "runs_here": runs_here, name: lambda *_: "compiled elsewhere"}


@pytest.fixture
def uniform(monkeypatch: pytest.MonkeyPatch) -> _jit.Kernel:
    """A kernel as it is before its first call."""
    kernel = _jit.named("philox._numba_kernels.uniform")
    monkeypatch.setattr(kernel, "_enter", None)
    return kernel


def test_a_kernel_is_taken_from_the_machine_code(beside: Callable[..., None], uniform: _jit.Kernel):
    beside(**compiled_elsewhere(uniform.name))
    assert uniform() == "compiled elsewhere"


@pytest.mark.parametrize("reason", ["missing", "other sources", "an older processor", "another kernel"])
def test_numba_compiles_where_there_is_no_machine_code(reason: str, beside: Callable[..., None], uniform: _jit.Kernel):
    pytest.importorskip("numba")
    beside(
        **{
            "missing": {},
            "other sources": compiled_elsewhere(uniform.name, stamp="0"),
            "an older processor": compiled_elsewhere(uniform.name, runs_here=False),
            "another kernel": compiled_elsewhere("rows._numba_read.copy_batch"),
        }[reason]
    )
    assert (_jit.machine_code() is None) == (reason != "another kernel")
    rng, out = torch.tensor([7, 3, 0]), torch.empty(5, dtype=torch.float64)
    assert uniform(rng.data_ptr(), 5, out.data_ptr()) is None
    assert rng.tolist() == [7, 8, 0]


def test_info_says_which_machine_code_is_used(beside: Callable[..., None]):
    beside(**compiled_elsewhere("a.kernel"), __file__="/there/_machine_code.abi3.so")
    assert info().caches["CPU"] == "/there/_machine_code.abi3.so"


@pytest.mark.slow
def test_the_machine_code_wheel_holds_one_file_more(machine_code: Path, pure: Path):
    extension = "gpubuf/kernels/_machine_code.abi3.so"
    assert {*wheel_names(machine_code)} - {*wheel_names(pure)} == {extension}
    assert {*wheel_names(pure)} <= {*wheel_names(machine_code)}
    assert in_metadata(machine_code, "METADATA") == in_metadata(pure, "METADATA")


@pytest.mark.slow
def test_the_tags_of_the_machine_code_wheel_are_true(machine_code: Path, tmp_path: Path):
    """The stable ABI of Python 3.11, and a system that has the symbols of the C library which it needs."""
    tags = Parser().parsestr(in_metadata(machine_code, "WHEEL"))
    assert tags["Root-Is-Purelib"] == "false"
    platforms = machine_code.stem.rpartition("-")[2].split(".")
    assert sorted(tags.get_all("Tag", [])) == sorted(f"cp311-abi3-{name}" for name in platforms)
    with zipfile.ZipFile(machine_code) as archive:
        path = archive.extract("gpubuf/kernels/_machine_code.abi3.so", tmp_path)
    if (nm := shutil.which("nm")) is not None and (objdump := shutil.which("objdump")) is not None:
        headers = subprocess.run([objdump, "-p", path], check=True, capture_output=True, text=True).stdout
        assert re.findall(r"NEEDED +(.*)", headers) == ["libc.so.6"]
        assert "PATH" not in headers
        symbols = subprocess.run([nm, "-D", path], check=True, capture_output=True, text=True).stdout.splitlines()
        found = {kind: {each.split()[-1] for each in symbols if f" {kind} " in each} for kind in "TDBRU"}
        assert found["T"] == {"PyInit__machine_code"}
        assert not found["D"] | found["B"] | found["R"]
        other = {name.partition("@")[0] for name in found["U"] if not re.match("_?Py", name)}
        assert other <= {"free", "malloc", "memcpy", "memmove", "memset"}
    auditwheel = shutil.which("auditwheel", path=TOOLS)
    if auditwheel is None:
        pytest.skip("auditwheel is not installed: `make dist` does it")
    said = subprocess.run([auditwheel, "show", machine_code], check=True, capture_output=True, text=True).stdout
    assert set(platforms) == {"manylinux_2_17_x86_64", "manylinux2014_x86_64"}
    assert 'consistent with the following platform tag: "manylinux_2_17_x86_64"' in " ".join(said.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("system", "taken"),
    [
        ("manylinux2014_x86_64", "machine_code"),
        ("manylinux2014_aarch64", "pure"),
        ("macosx_14_0_arm64", "pure"),
        ("win_amd64", "pure"),
    ],
)
def test_pip_takes_the_wheel_of_a_system(
    system: str, taken: str, machine_code: Path, pure: Path, request: pytest.FixtureRequest, tmp_path: Path
):
    if "manylinux" not in machine_code.name:
        pytest.skip("auditwheel is not installed, which gives the wheel its tag")
    found = [argument for wheel in (machine_code, pure) for argument in ("--find-links", str(wheel.parent))]
    for version in ("3.11", "3.13"):
        into = tmp_path / version
        options = ["--platform", system, "--python-version", version, "--only-binary", ":all:", "--dest", str(into)]
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-index", "--no-deps", *found, *options, "gpubuf"]
        subprocess.run(command, env=away(), cwd=tmp_path, check=True)
        assert [path.name for path in into.iterdir()] == [request.getfixturevalue(taken).name]


DRAWS = """
import hashlib, sys

sys.modules.update(dict.fromkeys({missing}))
import torch
import gpubuf
from gpubuf.info import info

torch.manual_seed(0)
digest = hashlib.sha256()
ends = torch.rand(6000, 1) < 0.03
after = dict(observation=torch.randn(6000, 5), reward=torch.randn(6000, 1), done=ends, terminated=ends)
rows = {{"observation": torch.randn(6000, 5), "action": torch.rand(6000, 2), "next": after}}
slices = gpubuf.SliceSampler(slice_len=8)
samplers = slices, gpubuf.PrioritizedSampler(5000, alpha=0.6, beta=0.4), gpubuf.RandomSampler()
for number, sampler in enumerate(samplers):
    storage = gpubuf.LazyTensorStorage(5000)
    buffer = gpubuf.TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=64, n_steps=(1, 3, 3)[number])
    for _ in range(3):
        buffer.extend(rows)
        for _ in range(5):
            batch = buffer.sample()
            for key in sorted(batch.keys(True, True), key=str):
                digest.update(batch[key].contiguous().view(torch.uint8).numpy().tobytes())
            batch["td_error"] = torch.rand(64)
            buffer.update_tensordict_priority(batch)
print(digest.hexdigest(), info().caches["CPU"], bool(sys.modules.get("numba")), sep="\\n")
"""


@pytest.mark.slow
def test_machine_code_gives_what_numba_gives(machine_code: Path, tmp_path: Path):
    """To the bit, without Numba. Where a source has changed, or where there is no machine code, Numba compiles."""
    python = fresh_environment(tmp_path)
    pip(python, "install", "-q", "--no-index", "--no-deps", str(machine_code)).check_returncode()
    kernels = Path(sysconfig.get_path("platlib", vars={"platbase": str(python.parents[1])}), "gpubuf", "kernels")
    extension = str(kernels / "_machine_code.abi3.so")

    def drawn(*missing: str) -> list[str]:
        """What was drawn, what compiled the kernels, and whether Numba was imported."""
        run = run_away(python, DRAWS.format(missing=missing), tmp_path, away())
        assert run.returncode == 0, run.stderr
        return run.stdout.splitlines()

    digest, *how = drawn("numba")
    assert how == [extension, "False"]
    assert drawn() == [digest, extension, "False"]
    with (kernels / "_primitives.py").open("a") as source:
        source.write("# changed\n")
    assert drawn("numba")[1].startswith("none: Numba is not installed")
    again, where, imported = drawn()
    assert (again, imported) == (digest, "True")
    assert where != extension


@pytest.mark.slow
@pytest.mark.parametrize(("wheel", "missing"), [("pure", "nothing"), ("machine_code", "numba")], indirect=["wheel"])
def test_a_minutes_work_with_an_installed_wheel(wheel: Path, missing: str, tmp_path: Path):
    """Buffers, checkpoints, training and mapped files, in an environment that sees nothing of the checkout."""
    pytest.importorskip("gymnasium")
    python = fresh_environment(tmp_path)
    pip(python, "install", "-q", "--no-index", "--no-deps", str(wheel)).check_returncode()
    smoke = (ROOT / "tests" / "support" / "smoke.py").read_text()
    program = f"import sys\nsys.modules.update(dict.fromkeys({[missing]}))\nsys.argv[1:] = ['mapped']\n{smoke}"
    program = program.replace("from __future__ import annotations\n", "")
    run = run_away(python, program, tmp_path, away())
    assert run.returncode == 0, run.stderr


# The recipe for conda


def test_the_recipe_says_what_the_project_says(tree: Path):
    """conda's names for the same dependencies; rattler-build reads it where that is installed."""
    yaml = pytest.importorskip("yaml", reason="PyYAML, which OmegaConf brings, is not installed")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (sdist,) = (tree / "dist").glob("*.tar.gz")
    namespace = runpy.run_path(str(ROOT / "release" / "recipe.py"))
    text = namespace["recipe"](sdist)
    found = yaml.safe_load(text)
    assert found["context"] == {"version": project["version"], "python_min": project["requires-python"][2:]}
    assert found["source"]["sha256"] == hashlib.sha256(sdist.read_bytes()).hexdigest()
    assert found["source"]["url"].replace("${{ version }}", project["version"]).endswith(f"/{sdist.name}")
    needed = {re.split(r"[^\w-]", line)[0] for line in project["dependencies"]}
    run, held = found["requirements"]["run"], found["requirements"]["run_constraints"]
    assert {line.split()[0] for line in run} == (needed - {"torch", "triton"}) | {"python", "pytorch", "numba"}
    for line in (*run[1:], *held):
        name = line.split()[0].removeprefix("py") if "pytorch" in line else line.split()[0]
        wanted = [
            each for each in (*project["dependencies"], *project["optional-dependencies"]["numba"]) if name in each
        ]
        assert wanted[0].partition(";")[0] == "".join(line.split()).replace("pytorch", "torch")
    build = found["build"]
    assert build["noarch"] == "python"
    assert build["python"]["entry_points"] == [f"gpubuf = {project['scripts']['gpubuf']}"]
    try:
        from rattler_build import Stage0Recipe
    except ImportError:
        return
    (variant,) = Stage0Recipe.from_yaml(text).render()
    assert (variant.recipe.package.name, variant.recipe.package.version) == ("gpubuf", project["version"])


# Beside other packages


def environment(folder: Path, *wheels: Path) -> tuple[Path, Path]:
    """A fresh environment without any package but those of wheels: its interpreter, and where its packages are."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(packages)
    return folder / "bin" / "python", packages


@pytest.fixture(scope="module")
def installed(tree: Path, pure: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[Path], Path]]:
    """For each way to have gpubuf, the wheels to install and the folder to run in."""
    program = "from setuptools.build_meta import build_editable; build_editable('editable')"
    (tree / "editable").mkdir()
    subprocess.run([sys.executable, "-c", program], cwd=tree, check=True, capture_output=True)
    (editable,) = (tree / "editable").glob("*.whl")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (sdist,) = (tree / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(elsewhere, filter="data")
    (unpacked,) = elsewhere.iterdir()
    return {
        "clone": ([], tree),
        "sdist": ([], unpacked),
        "wheel": ([pure], elsewhere),
        "editable": ([editable], elsewhere),
    }


WAYS = ("clone", "sdist", "wheel", "editable")

TRANSFORMERS = """
import importlib.metadata, importlib.util

def available(name):
    # As `_is_package_available` of transformers' utils/import_utils.py.
    if importlib.util.find_spec(name) is None:
        return False
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        package = importlib.import_module(name)
        return hasattr(package, "__version__") or getattr(package, "__file__", None) is not None
    return True

try:
    # As its integrations/hub_kernels.py.
    from kernels import get_kernel
except ImportError:
    get_kernel = None
"""


@pytest.mark.parametrize("hub", [False, True], ids=["absent", "present"])
@pytest.mark.parametrize("way", WAYS)
def test_import_kernels_belongs_to_others(
    way: str, hub: bool, installed: dict[str, tuple[list[Path], Path]], tmp_path: Path
):
    """CASES 86: to transformers, Hugging Face's `kernels` is there where it is installed, and there only."""
    wheels, folder = installed[way]
    python, packages = environment(tmp_path / "environment", *wheels)
    (packages / "transformers.py").write_text(TRANSFORMERS)
    if hub:
        (packages / "kernels").mkdir()
        (packages / "kernels" / "__init__.py").write_text("get_kernel = 'theirs'")
        (packages / "kernels-0.17.2.dist-info").mkdir()
        (packages / "kernels-0.17.2.dist-info" / "METADATA").write_text("Name: kernels\nVersion: 0.17.2\n")
    program = (
        "import importlib.util, transformers, gpubuf\n"
        "assert importlib.util.find_spec('gpubuf.kernels.rows')\n"
        "print(transformers.available('kernels'), transformers.get_kernel)"
    )
    away = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run([python, "-c", program], env=away, cwd=folder, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == (["True", "theirs"] if hub else ["False", "None"])


@pytest.mark.parametrize("way", ["wheel", "editable"])
def test_an_install_makes_nothing_importable_but_gpubuf(
    way: str, installed: dict[str, tuple[list[Path], Path]], tmp_path: Path
):
    """Nothing that lies in the root of the clone."""
    wheels, folder = installed[way]
    python, _ = environment(tmp_path / "environment", *wheels)
    names = sorted({"kernels"} | {path.stem for path in ROOT.iterdir() if path.stem.isidentifier()})
    assert {"benchmarks", "docs", "examples", "gpubuf", "setup", "tests"} < set(names)
    program = f"import importlib.util\nprint(*(name for name in {names} if importlib.util.find_spec(name)))"
    run = run_away(python, program, folder, {})
    assert run.stdout.split() == ["gpubuf"], run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("way", ["wheel", "editable"])
def test_another_project_sees_the_types(way: str, installed: dict[str, tuple[list[Path], Path]], tmp_path: Path):
    """To mypy, which runs no code of the environment: it follows paths and links only."""
    if way == "editable" and not CHECKOUT:
        pytest.skip("not a checkout: an editable install of an sdist is an import hook")
    wheels, _ = installed[way]
    python, _ = environment(tmp_path / "environment", *wheels)
    (tmp_path / "use.py").write_text(
        "import gpubuf, gpubuf.kernels.sum_tree\n"
        "reveal_type(gpubuf.kernels.sum_tree.eligible_words(64))\n"
        "reveal_type(gpubuf.plan)\n"
    )
    # Without PyTorch there, which takes mypy a minute.
    check = [sys.executable, "-m", "mypy", "--ignore-missing-imports", "--python-executable", python, "use.py"]
    seen = subprocess.run(check, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert 'use.py:2: note: Revealed type is "int"' in seen.stdout
    assert "-> gpubuf.planning." in seen.stdout
