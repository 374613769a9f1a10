"""Which host this is, as workers and the controller tell each other."""

import platform
from pathlib import Path


def host_name(host: str) -> str:
    """Return the host's own name in what ``host_id`` returned there."""
    return host.partition("/")[0]


def host_id() -> str:
    """Return a name that two processes share only when each sees the other's process ids.

    It joins the host's name, its boot and the namespace of process ids.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/pid")
    boot_id = boot.read_text().strip()[:8] if boot.exists() else "-"
    pids = str(namespace.readlink()) if namespace.exists() else "-"
    return f"{platform.node() or 'host'}/{boot_id}/{pids}"
