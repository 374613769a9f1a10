"""The project's own Python files, read for the rules that tests/architecture checks."""

import ast
import io
import tokenize
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


def python_files(*folders: str) -> list[Path]:
    """List the Python files under these folders of the project, caches left out."""
    return sorted(
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if "__pycache__" not in path.parts
    )


def name_of(path: Path) -> str:
    """Return a file's name as people write it."""
    return str(path.relative_to(ROOT))


@lru_cache(maxsize=1)
def tree_of(path: Path) -> ast.Module:
    """Parse a file, once for all that is asked of it before the next one."""
    return ast.parse(path.read_text())


def num_code_lines(path: Path) -> int:
    """Count lines that hold code: no blank lines, comments or docstrings."""
    source = path.read_text()
    documented = {
        line
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    code = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in skipped and token.type != tokenize.ENDMARKER
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(code - documented)


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of everything that a file imports."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def calls_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of everything that a file calls by a plain name."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call):
            name = _dotted(node.func)
            if name is not None:
                yield node.lineno, name


def _dotted(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return None if before is None else f"{before}.{node.attr}"
    return None
