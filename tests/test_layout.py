"""The structure that the rest relies on: who imports whom, and what an import does."""

import ast
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gpubuf.data
import gpubuf.kernels
from gpubuf.integrations import torchrl

ROOT = Path(__file__).parent.parent
KERNELS = Path(gpubuf.kernels.__path__[0])
SOURCES = sorted(
    {
        path.resolve()
        for folder in ("gpubuf", "gpubuf/kernels", "tests", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
    }
)


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)


@functools.cache
def imported_modules(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide what they reach"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_import_has_no_side_effects():
    """No compiler, no environment, no device, no training stack, no change to torch's global state."""
    program = """
import json, os, sys, warnings
import torch, tensordict
before = set(sys.modules), dict(os.environ), torch.get_rng_state(), torch.get_num_threads(), list(warnings.filters)
import gpubuf, gpubuf.data, gpubuf.modules, gpubuf.objectives, gpubuf.optim
import gpubuf.kernels.categorical, gpubuf.kernels.philox, gpubuf.kernels.rows, gpubuf.kernels.sac
import gpubuf.kernels.sum_tree, gpubuf.kernels.td
print(json.dumps({
    "modules": sorted({name.partition(".")[0] for name in set(sys.modules) - before[0]}),
    "environment": dict(os.environ) == before[1],
    "random state": bool((torch.get_rng_state() == before[2]).all()),
    "threads": torch.get_num_threads() == before[3],
    "warnings": list(warnings.filters) == before[4],
    "no device": not torch.cuda.is_initialized(),
}))
"""
    result = run(program)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    heavy = {"numba", "llvmlite", "triton", "gymnasium", "mujoco", "matplotlib", "rich", "typer", "pytest", "torchrl"}
    assert not heavy & set(found.pop("modules"))
    assert all(found.values()), found


@pytest.mark.parametrize("path", sorted(KERNELS.rglob("*.py")), ids=lambda p: str(p.relative_to(KERNELS)))
def test_the_low_layer_stands_alone(path: Path):
    """Nothing under gpubuf.kernels imports from the rest of gpubuf."""
    reached = {name for name in imported_modules(path) if name.partition(".")[0] == "gpubuf"}
    assert not [name for name in reached if not name.startswith("gpubuf.kernels")]


@pytest.mark.parametrize("path", sorted(KERNELS.rglob("_triton*.py")), ids=lambda p: f"{p.parent.name}/{p.name}")
def test_kernel_files_hold_kernels_only(path: Path):
    """Functions are compiled, or compute their constants; configuration is chosen elsewhere, never by autotuning."""
    for node in ast.parse(path.read_text()).body:
        assert not isinstance(node, ast.ClassDef), f"{node.name} is no kernel"
        if isinstance(node, ast.FunctionDef):
            decorators = [ast.unparse(d) for d in node.decorator_list]
            (decorator,) = (d.partition("(")[0] for d in decorators)
            allowed = ("triton.jit", "constexpr_function", "jit_for_any_size")
            assert decorator in allowed, f"{node.name} has {decorators}"


FAMILIES = sorted(path.parent for path in KERNELS.glob("*/_launch.py"))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda path: path.name)
def test_families_hold_the_same_files(family: Path):
    """A file belongs to one backend by its name; ``_check.py`` is for both."""
    names = {path.stem for path in family.glob("*.py")}
    required = {"__init__", "_launch", "_triton", "_cpu"}
    assert required <= names
    others = names - required - {"_check"}
    assert not [name for name in others if not name.startswith(("_triton_", "_numba"))]


REFERENCES = sorted((ROOT / "tests" / "kernels" / "reference").glob("*.py"))


@pytest.mark.parametrize("path", REFERENCES, ids=lambda path: path.stem)
def test_references_are_plain(path: Path):
    """They define the operations: plain Python, NumPy or torch, with nothing of the backends that they define."""
    imported = imported_modules(path)
    roots = {name.partition(".")[0] for name in imported if not name.startswith("tests.kernels.reference.")}
    assert roots <= {"__future__", "gpubuf", "numpy", "torch", *sys.stdlib_module_names}
    # of gpubuf: the constants and types of a family
    assert not [name for name in imported if name.startswith("gpubuf") and "._" in name]


FOLDERS = ("storage", "samplers", "processing", "checkpoints", "ingress", "loading")
"""Folders of gpubuf/data, from the lowest to the highest: each imports from those before it only."""


def folder_of(module: str) -> str:
    """``"storage"`` for a module of gpubuf/data/storage; ``""`` for one beside the folders, or elsewhere."""
    return next((folder for folder in FOLDERS if module.startswith(f"gpubuf.data.{folder}.")), "")


def test_folders_of_data_import_downwards():
    """Also where the import is for the type checker alone."""
    data = ROOT / "gpubuf" / "data"
    assert {path.parent.name for path in data.glob("*/*.py")} == set(FOLDERS)
    upwards = [
        f"{path.relative_to(data)} imports {name}"
        for path in sorted(data.glob("*/*.py"))
        for name in sorted(imported_modules(path))
        if FOLDERS.index(folder_of(name) or FOLDERS[0]) > FOLDERS.index(path.parent.name)
    ]
    assert not upwards


def test_the_core_does_not_know_torchrl():
    """What is here only because TorchRL has it is in gpubuf/integrations/torchrl, which no other module imports."""
    package, own = ROOT / "gpubuf", "gpubuf.integrations.torchrl"
    others = [
        path for path in SOURCES if package in path.parents and package / "integrations" / "torchrl" not in path.parents
    ]
    reached = {str(path): imported_modules(path) for path in others if path != package / "__init__.py"}
    assert not [path for path, names in reached.items() if any(f"{name}.".startswith(f"{own}.") for name in names)]
    named = re.compile("ListStorage|MaxValueWriter")
    assert not [path for path in (package / "data").rglob("*.py") if named.search(path.read_text())]


def imports_among(modules: dict[str, Path]) -> dict[str, set[str]]:
    """For each module of gpubuf, by its name, those that it imports, in functions and for the type checker too."""
    found = {}
    for name, path in modules.items():
        reached = imported_modules(path)
        # `from package.module import name` reaches the module.
        reached |= {each.rpartition(".")[0] for each in reached if each not in modules}
        found[name] = reached & modules.keys() - {name}
    return found


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others of the group."""
    reach = {name: set(targets) for name, targets in arrows.items()}
    for middle in reach:
        for name, targets in reach.items():
            if middle in targets:
                reach[name] = targets | reach[middle]
    groups = {name: sorted(other for other in reach if other in reach[name] and name in reach[other]) for name in reach}
    return sorted({tuple(group): group for group in groups.values() if group}.values())


def gpubuf_modules() -> dict[str, Path]:
    paths = [*(ROOT / "gpubuf").rglob("*.py"), *(ROOT / "gpubuf" / "kernels").rglob("*.py")]
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths)
    return {name.removesuffix(".__init__"): path for name, path in zip(names, paths, strict=True)}


def test_what_finds_circles():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "e"}, "e": set()}) == [["b", "c"]]


def test_a_loss_on_values_needs_nothing_of_sac():
    """Neither its kernels nor its distribution."""
    arrows = imports_among(gpubuf_modules())
    reached, new = set(), {"gpubuf.objectives.values"}
    while new:
        reached |= new
        new = {target for name in new for target in arrows[name]} - reached
    assert "gpubuf.kernels.td" in reached
    assert not [name for name in reached if {"sac", "temperature", "tanh_normal"} & set(name.split("."))]


def test_no_module_imports_itself_through_others():
    assert circles(imports_among(gpubuf_modules())) == []


def test_families_of_kernels_are_no_ring():
    """A family, whatever file of it, and a module that families share stand on those that they import from."""
    arrows: dict[str, set[str]] = {}
    for name, targets in imports_among(gpubuf_modules()).items():
        unit, *others = (".".join(each.split(".")[:3]) for each in (name, *targets))
        arrows.setdefault(unit, set()).update(set(others) - {unit})
    families = {name: targets for name, targets in arrows.items() if name.startswith("gpubuf.kernels.")}
    assert "gpubuf.kernels.rows" in families["gpubuf.kernels.sum_tree"]
    assert circles(families) == []


BENCHMARK_ROOMS = ("measure", "peers", "workloads", "studies")
"""Folders of benchmarks/, from the lowest to the highest. The files beside them are commands, and import any room."""


@pytest.mark.slow
def test_any_module_of_a_class_may_be_imported_first():
    """A pickle names the module of a class: in a fresh process nothing of gpubuf may have been imported before it."""
    program = """
import importlib, os
import torch, tensordict
for name in os.environ["NAMES"].split():
    if not (child := os.fork()):
        importlib.import_module(name)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
"""
    exported = [getattr(module, name) for module in (gpubuf.data, torchrl) for name in module.__all__]
    names = {kind.__module__ for kind in exported if isinstance(kind, type)}
    assert {"gpubuf.data.storage.schema", "gpubuf.integrations.torchrl.buffers"} <= names
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env={**os.environ, "NAMES": " ".join(names)}, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()


def test_benchmark_rooms_import_downwards():
    """A room imports from the rooms before it, and from no command."""
    folder = ROOT / "benchmarks"
    assert {path.parent.name for path in folder.glob("*/*.py")} == set(BENCHMARK_ROOMS)
    upwards = []
    for number, room in enumerate(BENCHMARK_ROOMS):
        allowed = tuple(f"benchmarks.{each}." for each in BENCHMARK_ROOMS[: number + 1])
        for path in sorted((folder / room).rglob("*.py")):
            reached = [name for name in imported_modules(path) if name.partition(".")[0] == "benchmarks"]
            upwards += [f"{path.name} imports {name}" for name in reached if not f"{name}.".startswith(allowed)]
    assert not upwards


@pytest.mark.parametrize(
    ("folders", "unknown"),
    [(("gpubuf", "kernels"), {"benchmarks", "tests"}), (("benchmarks",), {"tests"})],
    ids=["gpubuf", "benchmarks"],
)
def test_nobody_imports_upwards(folders: tuple[str, ...], unknown: set[str]):
    """The package knows neither its benchmarks nor its tests; the benchmarks don't know the tests."""
    files = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in folders]
    assert len(files) > 20
    reached = {(path.name, name) for path in files for name in imported_modules(path)}
    assert not [found for found in reached if found[1].partition(".")[0] in unknown]
    assert not [path.name for path in files if re.search(rf"import_module\(.({'|'.join(unknown)})\b", path.read_text())]


def test_nothing_collects_garbage():
    """A library that calls gc.collect() stalls its user's training loop by milliseconds."""
    library = [path for path in SOURCES if ROOT / "tests" not in path.parents]
    assert not [path for path in library if "gc.collect(" in path.read_text()]


def test_tests_import_no_tests():
    """What several tests share is in tests/support."""
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    shared = {path: {n for n in imported_modules(path) if re.match(r"tests\.(\w+\.)?test_", n)} for path in tests}
    assert not {str(path.relative_to(ROOT)): names for path, names in shared.items() if names}


def test_tensors_made_inside_name_their_device():
    """Case 72: a default device is for the user's tensors. Factories that follow it are those of torch.device()."""
    from torch.utils._device import _device_constructors

    factories = {f"torch.{factory.__name__}" for factory in _device_constructors()}
    nameless = []
    for path in SOURCES:
        if not path.is_relative_to(ROOT / "gpubuf") and not path.is_relative_to(KERNELS.resolve()):
            continue
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        for call in calls:
            # With ** it may be among the others.
            named = {"device", None} & {keyword.arg for keyword in call.keywords}
            if ast.unparse(call.func) in factories and not named:
                nameless.append(f"{path.relative_to(ROOT)}:{call.lineno}: {ast.unparse(call)}")
    assert nameless == []
