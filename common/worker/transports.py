"""The transports that a worker offers, both sides of each."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from common.kv.pool import KVPool
from common.transfer.backend import PoolExport, TransferBackend
from common.transfer.selection import PREFERENCE
from common.transfer.shm import MemoryExport, ShmBackend
from common.transfer.tcp import TcpBackend
from common.transfer.tcp_export import TcpExport

STALLS_PER_LEASE = 3
"""A write's data and its confirmation may stall one after the other, all within the lease."""
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Transports:
    """By name: how peers may write the own pool, and how theirs are written."""

    exports: Mapping[str, PoolExport]
    backends: Mapping[str, TransferBackend]

    @property
    def names(self) -> tuple[str, ...]:
        """What ``PeerInfo.transports`` reports, best first."""
        return tuple(name for name in PREFERENCE if name in self.exports)

    def close(self) -> None:
        """End all writing into the own pool that can be ended."""
        for export in self.exports.values():
            export.close()


def open_transports(pool: KVPool, lease_seconds: float, choice: str, host: str) -> Transports:
    """Open the chosen transport, or with ``auto`` every one that makes sense.

    ``tcp`` listens on ``host``, or on loopback where that is empty. Where peers can only be on
    this host, ``auto`` opens no listener. ConfigError when the address cannot be used.
    """
    exports: dict[str, PoolExport] = {}
    backends: dict[str, TransferBackend] = {}
    if choice in ("auto", "shm"):
        exports["shm"], backends["shm"] = MemoryExport(pool), ShmBackend(pool)
    if choice == "tcp" or (choice == "auto" and host):
        stall_seconds = lease_seconds / STALLS_PER_LEASE
        exports["tcp"] = TcpExport(pool, stall_seconds, host=host or LOOPBACK)
        backends["tcp"] = TcpBackend(pool, stall_seconds)
    return Transports(MappingProxyType(exports), MappingProxyType(backends))
