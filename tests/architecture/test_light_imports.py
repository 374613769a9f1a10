"""Programs that need no tensors start without torch, transformers and the native core."""

import importlib.util
import subprocess
import sys

import pytest

from tests.support.source_tree import ROOT

HEAVY = ("torch", "transformers", "flowpath_native", "numpy.testing")
LIGHT = ("services.gateway.app", "services.controller.core", "services.cli.main")
SCRIPT = """
import importlib, sys
importlib.import_module(sys.argv[1])
print(*(name for name in sys.argv[2:] if name in sys.modules))
"""


@pytest.mark.parametrize("module", LIGHT)
def test_a_light_program_loads_nothing_heavy(module: str) -> None:
    assert importlib.util.find_spec(module) is not None
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, module, *HEAVY],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
