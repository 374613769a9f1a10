"""Counts how often a process has opened each exported allocation: CUDA maps each only once."""

import threading
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class _Opened:
    address: int
    num_users: int


class OpenedHandles:
    """The mappings of one process, by device and handle. Calls may come from any thread."""

    def __init__(
        self, open_memory: Callable[[int, bytes], int], close_memory: Callable[[int, int], None]
    ) -> None:
        self._open = open_memory
        self._close = close_memory
        self._opened: dict[tuple[int, bytes], _Opened] = {}
        self._lock = threading.Lock()

    def open(self, device: int, handle: bytes) -> int:
        """Map the memory, or count one more user; return its address. A failure counts nothing."""
        with self._lock:
            opened = self._opened.get((device, handle))
            if opened is None:
                opened = _Opened(self._open(device, handle), 0)
                self._opened[device, handle] = opened
            opened.num_users += 1
            return opened.address

    def close(self, device: int, handle: bytes) -> None:
        """Count one user less; the last one unmaps. KeyError when it is not open."""
        with self._lock:
            opened = self._opened[device, handle]
            opened.num_users -= 1
            if opened.num_users == 0:
                del self._opened[device, handle]
                self._close(device, opened.address)
