"""Programs that need no tensors start without torch, transformers and the native core."""

import importlib.util
import subprocess
import sys

from tests.support.source_tree import ROOT

HEAVY = ("torch", "transformers", "flowpath_native", "numpy.testing")
HTTP = ("services.gateway.app", "services.gateway.fake_backend")
"""The half of the gateway that speaks HTTP; it knows no sockets of the cluster, either."""
LIGHT = ("services.controller.core", "services.cli.main")
SCRIPT = """
import importlib, sys
heavy, *modules = sys.argv[1:]
told = set()
for module in modules:
    importlib.import_module(module)
    for name in heavy.split(","):
        if name in sys.modules and name not in told:
            told.add(name)
            print(module, "loads", name)
    if module.startswith("services.gateway") and "zmq" in sys.modules:
        print(module, "loads zmq")
"""


def test_a_light_program_loads_nothing_heavy() -> None:
    modules = (*HTTP, *LIGHT)
    assert all(importlib.util.find_spec(module) is not None for module in modules)
    # One after the other in one process: what the first loads is told as the first's.
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, ",".join(HEAVY), *modules],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
