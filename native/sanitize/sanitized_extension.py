# ruff: noqa: INP001  # a pytest plugin beside its script, found by PYTHONPATH
"""A pytest plugin that puts the sanitized build of ``flowpath_native`` in place of the installed.

The editable install finds its own build first, whatever the import path, so the module is loaded
from its file before any test can import it.
"""

import importlib.util
import sys
from pathlib import Path

BUILD = Path(__file__).parents[2] / "build" / "asan"

(FILE,) = BUILD.glob("flowpath_native*.so")
spec = importlib.util.spec_from_file_location("flowpath_native", FILE)
assert spec is not None
assert spec.loader is not None
module = importlib.util.module_from_spec(spec)
sys.modules["flowpath_native"] = module
spec.loader.exec_module(module)


def pytest_report_header() -> str:
    """Say which build is under test."""
    return f"flowpath_native: sanitized, {FILE}"
