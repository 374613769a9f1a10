"""Shared mappings of anonymous memory files, and how much memory is left for them."""

import errno
import mmap
import os
from contextlib import suppress
from pathlib import Path

MADV_POPULATE_WRITE = 23
"""Linux 5.14: fault every page in for writing, or fail; Python has no name for it yet."""


def map_shared(fd: int, num_bytes: int, *, is_huge: bool = False) -> mmap.mmap:
    """Map ``num_bytes`` of a memory file for reading and writing, with every page present.

    Afterwards neither reading nor writing faults. ``is_huge`` asks for transparent huge pages,
    which the system may ignore. OSError when memory does not suffice.
    """
    mapping = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    if is_huge:
        # A kernel without transparent huge pages refuses; base pages are right too.
        with suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    populate(mapping)
    return mapping


def populate(mapping: mmap.mmap) -> None:
    """Fault all pages in without changing a byte."""
    try:
        mapping.madvise(MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # what a kernel before 5.14 answers
            raise
        # Reading maps the page that a fault finds or makes; writing could race with its owner.
        for offset in range(0, len(mapping), mmap.PAGESIZE):
            mapping[offset]


def available_bytes() -> int:
    """Return how much memory can still be filled: the machine's, or less where a cgroup says so.

    Without /proc/meminfo there is no bound to report.
    """
    available = _meminfo_available_bytes()
    for limit, used in _cgroup_limits():
        available = min(available, max(0, limit - used))
    return available


def _meminfo_available_bytes() -> int:
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 2**63 - 1


def _cgroup_limits() -> list[tuple[int, int]]:
    """Return (limit, used) of every cgroup (version 2) around this process that has a limit."""
    root = Path("/sys/fs/cgroup")
    limits: list[tuple[int, int]] = []
    with suppress(OSError):
        line = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()[-1]
        folder = root / line.split("::", 1)[-1].lstrip("/")
        for place in (folder, *folder.parents):
            if not place.is_relative_to(root):
                break
            with suppress(OSError, ValueError):
                limit = int((place / "memory.max").read_text(encoding="ascii"))
                used = int((place / "memory.current").read_text(encoding="ascii"))
                limits.append((limit, used))
    return limits


def open_peer_file(pid: int, fd: int, name: str) -> int:
    """Open another process's memory file called ``name`` by its descriptor, for mapping.

    OSError says why not; ValueError that the descriptor is something else.
    """
    link = f"/proc/{pid}/fd/{fd}"
    target = Path(link).readlink()
    if not str(target).startswith(f"/memfd:{name}"):
        raise ValueError(f"it is {target}")
    return os.open(link, os.O_RDWR | os.O_CLOEXEC)
