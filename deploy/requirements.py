#!/usr/bin/env python3
"""Prints requirements from pyproject.toml, one a line: ``requirements.py GROUP...``.

A group is ``build`` (what builds the wheel), ``run`` (what the programs import), or an extra.
"""

import sys
import tomllib
from pathlib import Path

PROJECT_FILE = Path(__file__).parents[1] / "pyproject.toml"
BUILD_TOOLS = ("cmake>=3.24", "ninja")
"""What scikit-build-core asks for where the machine has none."""
CONVERSION_ONLY = "transformers"
"""Reads the default model's file once, and is imported by no program."""


def requirements(group: str) -> list[str]:
    """Return the requirements of one group; KeyError when there is none of that name."""
    project = tomllib.loads(PROJECT_FILE.read_text())
    needed: list[str] = project["project"]["dependencies"]
    conversion = [line for line in needed if line.startswith(CONVERSION_ONLY)]
    extras: dict[str, list[str]] = project["project"]["optional-dependencies"]
    match group:
        case "build":
            return [*project["build-system"]["requires"], *BUILD_TOOLS]
        case "run":
            return [line for line in needed if line not in conversion]
        case "convert":
            return [*conversion, *extras[group]]
        case _:
            return extras[group]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        sys.stdout.write("".join(f"{line}\n" for line in requirements(name)))
