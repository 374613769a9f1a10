"""How every program of FlowPath starts: settings from one file, a name, exit code 2 when wrong."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from common.config.load import load_settings, read_settings
from common.config.settings import Settings
from common.errors import ConfigError

EXIT_CONFIG_ERROR = 2


def run_program(
    program: str,
    default_id: str,
    argv: Sequence[str],
    body: Callable[[Settings, str], int],
) -> int:
    """Read ``[--settings FILE] [--id ID]``, call ``body(settings, id)`` and return its exit code.

    Without ``--settings`` the layers are loaded (environment, FLOWPATH_CONFIG, defaults). A
    ConfigError, here or in ``body``, is told on standard error and returns 2.
    """
    parser = argparse.ArgumentParser(prog=f"python -m services.{program}")
    parser.add_argument("--settings", type=Path, help="settings file of the whole cluster")
    parser.add_argument("--id", default=default_id, help="this process's name in the cluster")
    given = parser.parse_args(list(argv))
    try:
        settings = read_settings(given.settings) if given.settings else load_settings().settings
        return body(settings, str(given.id))
    except ConfigError as error:
        sys.stderr.write(f"flowpath {program}: {error}\n")
        return EXIT_CONFIG_ERROR
