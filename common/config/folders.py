"""The folders that FlowPath writes: where they are by default, and that they are private."""

import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from common.errors import ConfigError

MAX_RUN_DIR_BYTES = 72
"""A socket's path holds 107 bytes; the rest is for ``/<worker id>.handoff``."""


def default_run_dir(environment: Mapping[str, str], port: int) -> Path:
    """Return the folder of sockets for one user and one port."""
    runtime = environment.get("XDG_RUNTIME_DIR", "")
    if runtime and Path(runtime).is_dir() and len(runtime) < 48:
        return Path(runtime) / f"flowpath-{port}"
    return Path(tempfile.gettempdir()) / f"flowpath-{os.getuid()}-{port}"


def default_log_dir(environment: Mapping[str, str], port: int) -> Path:
    """Return the folder of log files for one port: two clusters never share a file."""
    state = environment.get("XDG_STATE_HOME", "")
    return (Path(state) if state else Path.home() / ".local" / "state") / "flowpath" / str(port)


def default_cache_dir(environment: Mapping[str, str]) -> Path:
    """Return the folder of converted models."""
    cache = environment.get("XDG_CACHE_HOME", "")
    return (Path(cache) if cache else Path.home() / ".cache") / "flowpath"


def prepare_run_dir(folder: Path) -> None:
    """Create the folder of sockets with mode 0700, or check the one that is there.

    ConfigError when it is not a folder, belongs to somebody else, or others can enter it: sockets
    in it need no keys because only this user reaches them.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ConfigError(
            f"run_dir {folder} cannot be made: {error.strerror}; set FLOWPATH_RUN_DIR to a folder "
            "that you can write"
        ) from error
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"run_dir {folder} is not a folder; set FLOWPATH_RUN_DIR to another one")
    if found.st_uid != os.getuid():
        raise ConfigError(
            f"run_dir {folder} belongs to user id {found.st_uid}, not to you ({os.getuid()}); "
            "set FLOWPATH_RUN_DIR to a folder of your own"
        )
    if found.st_mode & 0o077:
        raise ConfigError(
            f"run_dir {folder} has mode {stat.S_IMODE(found.st_mode):04o}, so others can reach its "
            f"sockets; run `chmod 700 {folder}` or set FLOWPATH_RUN_DIR to another folder"
        )


def write_private(path: Path, text: str) -> None:
    """Replace a file whose content only this user may read; whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    temporary.replace(path)


@contextmanager
def lock_file(path: Path, holder: str) -> Iterator[None]:
    """Hold an exclusive lock as long as the block runs; the kernel frees it with the process.

    ConfigError, which names ``holder`` and its process id, when it is held already.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid = os.pread(descriptor, 32, 0).decode().strip() or "unknown"
            raise ConfigError(
                f"{holder} (process {pid}) is running in {path.parent}; stop it, or choose "
                "another port or FLOWPATH_RUN_DIR"
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)
