"""How every program of FlowPath starts: settings from one file, a name, exit code 2 when wrong."""

import argparse
import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from common.config.load import load_settings, read_settings
from common.config.settings import Settings
from common.errors import ConfigError

EXIT_CONFIG_ERROR = 2
_PR_SET_PDEATHSIG = 1


def run_program(
    program: str,
    default_id: str,
    argv: Sequence[str],
    body: Callable[[Settings, str], int],
) -> int:
    """Read the arguments, call ``body(settings, id)`` and return its exit code.

    They are ``[--settings FILE] [--id ID] [--parent PID]``.
    With ``--parent`` the process is killed when that one, its parent, ends, however it ends.
    Without ``--settings`` the layers are loaded (environment, FLOWPATH_CONFIG, defaults). A
    ConfigError, here or in ``body``, is told on standard error and returns 2.
    """
    parser = argparse.ArgumentParser(prog=f"python -m services.{program}")
    parser.add_argument("--settings", type=Path, help="settings file of the whole cluster")
    parser.add_argument("--id", default=default_id, help="this process's name in the cluster")
    parser.add_argument("--parent", type=int, help="process id of the supervisor to die with")
    given = parser.parse_args(list(argv))
    if given.parent is not None:
        die_with_parent(given.parent)
    try:
        settings = read_settings(given.settings) if given.settings else load_settings().settings
        if given.parent is None:
            if given.settings and given.settings.name == f"{given.id}.settings.json":
                given.settings.unlink(missing_ok=True)  # ours alone, made for this start
            log_file = settings.log_dir / f"{given.id or program}.jsonl"
            sys.stderr.write(f"flowpath {program}: logs to {log_file}\n")
        return body(settings, str(given.id))
    except ConfigError as error:
        sys.stderr.write(f"flowpath {program}: {error}\n")
        return EXIT_CONFIG_ERROR


def run_and_end(main: Callable[[], int]) -> NoReturn:
    """Run a program and end the process with its exit code, without the interpreter's own end.

    For workers and ranks: threads of the libraries may be waiting for other ranks, for ever.
    """
    try:
        code = main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001 - nobody is left to handle it
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # closed, or nobody reads it
            stream.flush()
    os._exit(code)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when ``parent`` ends; exit now when it has ended."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    if os.getppid() != parent:
        sys.exit(1)
