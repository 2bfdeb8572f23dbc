"""Wheel and sdist hold what they should: a checkout without symlinks would silently lose the kernels."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
#: An sdist has the kernels where the link leads, and neither link nor folder at the top.
CHECKOUT = (ROOT / "kernels").exists()
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs")


def build(source: Path, *what: str) -> None:
    """Build into ``source/dist`` with the tools installed here: no isolation, so no network."""
    command = [sys.executable, "-m", "build", "--no-isolation", *what, str(source)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def run_away(python: str | Path, program: str, cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a program where the checkout can't be imported."""
    # -P: the working directory is no place to import from
    return subprocess.run([python, "-P", "-c", program], env=env, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source tree, wheel and sdist built in ``dist/``.

    A copy, because setuptools leaves build/ behind, and puts what it finds there into the next wheel.
    """
    copy = tmp_path_factory.mktemp("tree") / "gpubuf"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=LEFT_OUT)
    for hidden in (".ci", ".github", ".gitignore", ".pre-commit-config.yaml"):
        (shutil.copytree if (ROOT / hidden).is_dir() else shutil.copy)(ROOT / hidden, copy / hidden)
    if CHECKOUT:
        shutil.copytree(ROOT / ".editable", copy / ".editable", symlinks=True)
    build(copy, "--wheel", "--sdist")
    return copy


def wheel_names(folder: Path) -> list[str]:
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


@pytest.fixture(scope="module")
def wheel_files(tree: Path) -> list[str]:
    return wheel_names(tree / "dist")


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


def test_wheel_metadata(tree: Path):
    (wheel,) = (tree / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (metadata_name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(metadata_name).decode())
        info = metadata_name.partition("/")[0]
        assert b"MIT License" in archive.read(f"{info}/licenses/LICENSE")
        assert "gpubuf = gpubuf.cli:main" in archive.read(f"{info}/entry_points.txt").decode()
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Requires-Python"] == ">=3.11"
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert not [line for line in needed if "pytest" in line or "gymnasium" in line]


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
    assert sorted(wheel_names(unpacked / "dist")) == sorted(wheel_files)


def test_wheel_works_away_from_the_checkout(tree: Path, tmp_path: Path):
    """The library and its low layer are imported from the wheel's own files; both backends' sources are there."""
    (wheel,) = (tree / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
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
    version = wheel.name.split("-")[1]
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
def test_the_wheel_installs_into_a_fresh_environment(tree: Path, tmp_path: Path):
    """pip, the command, and the buffers without an extra: writes, priorities, slices, files, checkpoints and a plan.

    The environment sees the packages installed here, and is filled by the pip of here: nothing is downloaded.
    """
    missing = packages_of_extras()
    assert {"gymnasium", "rich", "matplotlib", "pytest"} <= missing
    (wheel,) = (tree / "dist").glob("*.whl")
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
def test_pip_finds_the_newest_of_others(other: str, oldest: tuple[int, ...], program: str, tree: Path, tmp_path: Path):
    """CASES 86: gpubuf and the newest TorchRL or Stable-Baselines3 go together, and run in what pip installs.

    TensorDict is what pip would have to replace here. PyTorch stays the one of here.
    """
    (wheel,) = (tree / "dist").glob("*.whl")
    (tmp_path / "constraints.txt").write_text(f"torch=={torch.__version__}\n")
    python = fresh_environment(tmp_path)
    if pip(python, "index", "versions", "--retries", "0", other).returncode:
        pytest.skip(f"no index that has {other} can be reached")
    options = ["--report", str(tmp_path / "report.json"), "--constraint", str(tmp_path / "constraints.txt")]
    run = pip(python, "install", "-q", "--no-compile", *options, str(wheel), other)
    assert run.returncode == 0, run.stderr
    items = json.loads((tmp_path / "report.json").read_text())["install"]
    installed = {item["metadata"]["name"]: item["metadata"]["version"] for item in items}
    (version,) = (version for name, version in installed.items() if name.replace("_", "-") == other)
    assert tuple(map(int, version.split("."))) >= oldest, installed
    run = run_away(python, program, tmp_path, away())
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".release" / ".ready").exists(), reason="`make dist` has not made its environment")
def test_twine_accepts_what_is_built(tree: Path):
    check = [ROOT / ".release" / "bin" / "python", "-m", "twine", "check", "--strict", *(tree / "dist").iterdir()]
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
def installed(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[Path], Path]]:
    """For each way to have gpubuf, the wheels to install and the folder to run in."""
    program = "from setuptools.build_meta import build_editable; build_editable('editable')"
    (tree / "editable").mkdir()
    subprocess.run([sys.executable, "-c", program], cwd=tree, check=True, capture_output=True)
    (editable,), (wheel,) = (tree / "editable").glob("*.whl"), (tree / "dist").glob("*.whl")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (sdist,) = (tree / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(elsewhere, filter="data")
    (unpacked,) = elsewhere.iterdir()
    return {
        "clone": ([], tree),
        "sdist": ([], unpacked),
        "wheel": ([wheel], elsewhere),
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
