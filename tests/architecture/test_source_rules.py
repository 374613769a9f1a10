"""Rules that every source file obeys and that no linter knows."""

import ast
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.support.source_tree import (
    ROOT,
    calls_of,
    imports_of,
    name_of,
    num_code_lines,
    python_files,
    tree_of,
)

MAX_CODE_LINES = 400
PROGRAM = python_files("services", "common", "native")
EVERYTHING = python_files("services", "common", "native", "benchmarks", "docs")
UNSAFE_MODULES = ("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib")
UNSAFE_CALLS = (
    "eval",
    "exec",
    "torch.load",
    "torch.save",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "numpy.load",
    "np.load",
    "os.system",
)


@cache
def imports(path: Path) -> Sequence[tuple[int, str]]:
    return tuple(imports_of(path))


def test_the_rules_see_the_source() -> None:
    assert len(PROGRAM) > 80
    assert ROOT / "common" / "messages" / "codec.py" in PROGRAM


@pytest.mark.parametrize("path", python_files("services", "common"), ids=name_of)
def test_a_file_stays_within_its_budget_of_code_lines(path: Path) -> None:
    assert num_code_lines(path) <= MAX_CODE_LINES, "open a second file"


def test_blank_lines_comments_and_docstrings_cost_no_budget(tmp_path: Path) -> None:
    path = tmp_path / "sample.py"
    path.write_text(
        '"""Module\n\ndocstring."""\n\n# comment\nx = [\n    1,  # why\n]\n\n\n'
        'def f() -> str:\n    """Doc."""\n    return """two\nlines"""\n'
    )
    assert num_code_lines(path) == 3 + 1 + 2


def test_nothing_reads_or_writes_code_as_data() -> None:
    found: list[str] = []
    for path in EVERYTHING:
        found += [
            f"{name_of(path)}:{line} imports {name}"
            for line, name in imports(path)
            if name.split(".")[0] in UNSAFE_MODULES
        ]
        found += [
            f"{name_of(path)}:{line} calls {name}"
            for line, name in calls_of(path)
            if name in UNSAFE_CALLS
        ]
    assert found == []


def test_zmq_is_spoken_in_one_package_alone() -> None:
    speakers = {
        path.parent
        for path in EVERYTHING
        for _, name in imports(path)
        if name.split(".")[0] == "zmq"
    }
    assert speakers == {ROOT / "common" / "transport"}


def test_every_package_says_what_it_is() -> None:
    folders = {path.parent for path in python_files("services", "common")}
    silent = []
    for folder in sorted(folders):
        init = folder / "__init__.py"
        docstring = ast.get_docstring(ast.parse(init.read_text())) if init.exists() else None
        if not docstring or len(docstring) < 12:
            silent.append(name_of(folder))
    assert silent == []


def test_every_module_says_what_it_is() -> None:
    silent = [name_of(path) for path in PROGRAM if not ast.get_docstring(tree_of(path))]
    assert silent == []
