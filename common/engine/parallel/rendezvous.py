"""The folder in which ranks meet, and the removal of those whose owner was killed."""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from time import time

PREFIX = "flowpath-ranks-"
_LOCK = "owner"
_YOUNG_SECONDS = 60.0
"""A folder without a lock may be about to get it."""


class Rendezvous:
    """A folder of this process's; its lock tells others that the owner lives."""

    def __init__(self) -> None:
        """Make it; OSError where that fails."""
        remove_abandoned()
        while True:
            self._folder = TemporaryDirectory(prefix=PREFIX)
            self._lock = os.open(Path(self._folder.name, _LOCK), os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if os.fstat(self._lock).st_nlink:
                break
            # Somebody had the lock first, took the folder for abandoned and has removed it.
            self.close()

    @property
    def file(self) -> str:
        """The file that all ranks know; it is not made yet."""
        return str(Path(self._folder.name, "rendezvous"))

    def close(self) -> None:
        """Remove the folder; a second call does nothing."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        self._folder.cleanup()


def remove_abandoned() -> list[str]:
    """Remove this user's folders whose owner is gone, however it ended; return their names."""
    removed = []
    for folder in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
        with suppress(OSError):  # somebody else's, or another process removes it
            if folder.lstat().st_uid == os.getuid() and _remove_abandoned(folder):
                removed.append(folder.name)
    return removed


def _remove_abandoned(folder: Path) -> bool:
    """Remove the folder, its lock held, unless its owner lives; tell whether it is gone."""
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        is_old = time() - folder.lstat().st_mtime > _YOUNG_SECONDS
        if is_old:
            shutil.rmtree(folder)
        return is_old
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True
