"""Every case of docs/cases.md has a test that names it. ``python -m tests.test_cases`` prints which."""

import ast
import functools
import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "cases.md"
# one number or several: "Case 47", "CASES 8", "CASES.md 10, 18", "CASES 11 and 12", "CASES 1 to 3"
MENTION = re.compile(r"\b(?:CASES(?:\.md)?|Cases?)\s+(\d+(?:(?:\s*,\s*|\s+and\s+|\s+to\s+)\d+)*)")


def numbers(text: str) -> set[int]:
    """The cases that a docstring names."""
    found: set[int] = set()
    for mention in MENTION.findall(text):
        for part in re.split(r"\s*,\s*|\s+and\s+", mention):
            first, *last = (int(n) for n in re.findall(r"\d+", part))
            found |= set(range(first, (last[0] if last else first) + 1))
    return found


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def covering_tests() -> dict[int, list[str]]:
    """``file::test`` of every test by the case that its docstring, or its module's, names."""
    found: dict[int, list[str]] = {}
    for path in sorted(HERE.rglob("test_*.py")):
        module, file = parsed(path), path.relative_to(HERE).as_posix()
        tests = [n for n in ast.walk(module) if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")]
        for node, name in [(module, file), *((test, f"{file}::{test.name}") for test in tests)]:
            for number in numbers(ast.get_docstring(node) or ""):
                found.setdefault(number, []).append(name)
    return found


def needs_a_gpu(name: str) -> bool:
    """Whether ``file::test`` runs on a GPU only."""
    file, _, test = name.partition("::")
    module = parsed(HERE / file)

    def marked(decorators: list[ast.expr]) -> bool:
        return any(re.search(r"\bgpu\b", ast.unparse(each)) for each in decorators)

    if marked(
        [n.value for n in module.body if isinstance(n, ast.Assign) and "pytestmark" in ast.unparse(n.targets[0])]
    ):
        return True
    found = [n for n in ast.walk(module) if isinstance(n, ast.FunctionDef) and n.name == test]
    return any(marked(node.decorator_list) for node in found)


def listed_cases() -> dict[int, bool]:
    """Number of every case on the page, and whether it has to have a test by now."""
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    return {int(number): "*later*" not in text for number, text in rows}


def test_mentions_are_read():
    assert numbers("x (CASES 8)") == {8}
    assert numbers("CASES.md 10, 18: and CASES 1 to 3.") == {1, 2, 3, 10, 18}
    assert numbers("CASES 11 and 12 in 100 runs; 13 cases") == {11, 12}
    assert numbers("Case 47: x. Cases 48 and 49: y; in case 3") == {47, 48, 49}


def test_every_case_has_a_test():
    cases = listed_cases()
    assert list(cases) == sorted(cases)
    assert set(range(1, 69)) <= set(cases)
    covered = covering_tests()
    assert not [number for number, due in cases.items() if due and number not in covered]
    assert not [number for number in covered if number not in cases]
    only_on_a_gpu = [n for n, due in cases.items() if due and all(map(needs_a_gpu, covered[n]))]
    assert not only_on_a_gpu, "nothing tests these where there is no GPU"
    assert not [n for n, due in cases.items() if not due and n in covered], "these have come"


def test_tests_that_need_a_gpu_are_known():
    assert needs_a_gpu("kernels/test_rows_gpu.py::test_no_sync_and_graph_capture")
    assert needs_a_gpu("data/test_threads.py::test_two_streams_on_a_gpu")
    assert not needs_a_gpu("data/test_threads.py::test_streams_wait_for_each_other")
    assert not needs_a_gpu("data/test_sampler_contract.py")


if __name__ == "__main__":
    for number, tests in sorted(covering_tests().items()):
        print(f"{number:3}  {', '.join(tests)}")
