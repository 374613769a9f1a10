"""How much the folder of a ``file:`` store holds, agreed on by all who write to it.

Theory of operation
-------------------
Whoever wants to write reserves room first, under the folder's lock, and evicts while there is none.
When the blocks have their names, under the lock again, the reservation becomes stored bytes. Stored
and reserved bytes together never exceed the bound, whoever writes how much at a time.

A writer that dies leaves its reservation, which covers both its unfinished files and blocks that it
had named but not entered. Whoever finds it dead removes the files, drops the reservation, and
counts the folder anew.

The lock is ``flock``, which works across hosts on NFS and most cluster file systems. Where a file
system has none, each process still keeps to the bound by what it sees.
"""

import errno
import fcntl
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from common.storage.folder import StoreFolder

LEDGER = "ledger"
MAX_LEDGER_BYTES = 1 << 20
_RETRY_SECONDS = 0.002
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class FolderBusyError(Exception):
    """Others held the folder's lock for too long; what was to be done under it is dropped."""


@dataclass(slots=True)
class Entries:
    """What the ledger says; ``stored_bytes`` is None where nobody knows."""

    stored_bytes: int | None = None
    reserved: dict[str, int] = field(default_factory=dict)

    @property
    def reserved_bytes(self) -> int:
        """Of all writers together."""
        return sum(self.reserved.values())


class Ledger:
    """The file that holds the entries, and its lock. Used by one thread at a time."""

    def __init__(self, folder: StoreFolder) -> None:
        """Open the file, and make it where it is missing; OSError when that fails."""
        self._folder = folder
        self._fd = self._open()
        self._never = threading.Event()

    @contextmanager
    def locked(self, timeout_seconds: float) -> Iterator[Entries]:
        """Hold the folder's lock; the entries, as they are at the end, are kept.

        FolderBusyError when the lock was not to be had in time; OSError.
        """
        deadline = time.monotonic() + timeout_seconds
        has_lock = self._lock(deadline)
        while os.fstat(self._fd).st_nlink == 0:  # somebody emptied the folder
            os.close(self._fd)
            self._fd = self._open()
            has_lock = self._lock(deadline)
        try:
            before = os.pread(self._fd, MAX_LEDGER_BYTES, 0)
            entries = _parse(before)
            try:
                yield entries
            finally:
                after = _format(entries)
                if after != before:
                    os.pwrite(self._fd, after, 0)
                    os.ftruncate(self._fd, len(after))
        finally:
            if has_lock:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go of the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        return os.open(LEDGER, flags, 0o640, dir_fd=self._folder.fd)

    def _lock(self, deadline: float) -> bool:
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise FolderBusyError from None
                # Waiting in flock itself would have no deadline.
                self._never.wait(_RETRY_SECONDS)
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    return False
                raise
            else:
                return True


def _parse(data: bytes) -> Entries:
    """Return what the ledger says; a damaged one says nothing."""
    try:
        document = json.loads(data)
        stored, reserved = document["stored_bytes"], document["reserved"]
        if isinstance(stored, int) and all(isinstance(size, int) for size in reserved.values()):
            return Entries(stored, dict(reserved))
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    return Entries()


def _format(entries: Entries) -> bytes:
    document = {"stored_bytes": entries.stored_bytes, "reserved": entries.reserved}
    return json.dumps(document).encode()
