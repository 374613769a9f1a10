"""A bounded log file: lines are appended whole, and the file is rotated by size."""

import errno
import os
import threading
from pathlib import Path

from common.errors import ConfigError

MAX_FILE_BYTES = 64 * 2**20
MAX_KEPT_FILES = 3


class LogFile:
    """Appends lines to ``path``; at ``max_bytes`` it becomes ``path.1``, that ``path.2``, ….

    At most ``max_kept`` old files stay. Lines that cannot be written (a full disk) are counted and
    dropped, and the next line that can be written is preceded by one that tells the count: logging
    never ends its process. ConfigError when the file cannot be opened at first. Safe for threads.
    """

    def __init__(
        self, path: Path, *, max_bytes: int = MAX_FILE_BYTES, max_kept: int = MAX_KEPT_FILES
    ) -> None:
        self.path = path
        self.num_dropped = 0
        self._max_bytes = max_bytes
        self._max_kept = max_kept
        self._lock = threading.Lock()
        self._descriptor = -1
        self._is_closed = False
        self._num_bytes = 0
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            raise ConfigError(
                f"log_dir {path.parent} cannot be used ({error.filename}: {error.strerror}); set "
                "--log-dir or FLOWPATH_LOG_DIR to a folder that you can write"
            ) from error

    def write(self, line: str) -> None:
        """Append one line; ``line`` has no line end."""
        data = line.encode(errors="backslashreplace") + b"\n"
        with self._lock:
            try:
                if self._descriptor < 0 and not self._is_closed:
                    self._open()
                if self._num_bytes and self._num_bytes + len(data) > self._max_bytes:
                    self._rotate()
                if self.num_dropped:
                    note = f'{{"event": "log_lines_dropped", "count": {self.num_dropped}}}\n'
                    data = note.encode() + data
                self._append(data)
                self.num_dropped = 0
            except OSError:
                self.num_dropped += 1

    def close(self) -> None:
        """Close the file; later lines are dropped."""
        with self._lock:
            self._is_closed = True
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(self.path, flags, 0o600)
        self._num_bytes = os.fstat(self._descriptor).st_size

    def _append(self, data: bytes) -> None:
        num_written = os.write(self._descriptor, data)
        if num_written < len(data):
            # From where this write ended, not from our count: others may have cut the file.
            end = os.lseek(self._descriptor, 0, os.SEEK_CUR)
            os.ftruncate(self._descriptor, end - num_written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._num_bytes += num_written

    def _rotate(self) -> None:
        os.close(self._descriptor)
        self._descriptor = -1
        for number in range(self._max_kept - 1, 0, -1):
            older = self._numbered(number)
            if older.exists():
                older.replace(self._numbered(number + 1))
        self.path.replace(self._numbered(1))
        self._open()

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")
