"""The transports that a worker offers, both sides of each."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import structlog

from common.errors import ConfigError
from common.kv.device_pool import DevicePool
from common.kv.layout import KVLayout
from common.kv.pool import BlockPool, KVPool
from common.transfer.backend import PoolExport, TransferBackend
from common.transfer.cuda_ipc import (
    CUDA_IPC,
    GATHER_BUFFER,
    LAYERWISE,
    CudaIpcBackend,
    CudaIpcExport,
    gather_buffer_backend,
    layerwise_backend,
)
from common.transfer.host_staged import StagedTcpBackend
from common.transfer.nccl_cuda import open_nccl
from common.transfer.nixl_packages import is_nixl_installed
from common.transfer.ranks import RankedPool
from common.transfer.ranks_transport import RANKS, as_ranked, open_ranks
from common.transfer.rdma import RDMA
from common.transfer.rdma_export import open_rdma
from common.transfer.rdma_memory import RdmaMemory
from common.transfer.rdma_nixl import NixlLibrary
from common.transfer.rdma_ports import fastest_port_rate
from common.transfer.selection import TRANSPORTS
from common.transfer.shm import MemoryExport, ShmBackend
from common.transfer.tcp import TcpBackend
from common.transfer.tcp_export import TcpExport

log = structlog.get_logger()

STALLS_PER_LEASE = 3
"""A write's data and its confirmation may stall one after the other, all within the lease."""
LOOPBACK = "127.0.0.1"
AUTO = "auto"
NCCL = "nccl"

Both = tuple[PoolExport, TransferBackend]


@dataclass(frozen=True, slots=True)
class Transports:
    """By name: how peers may write the own pool, and how theirs are written."""

    exports: Mapping[str, PoolExport]
    backends: Mapping[str, TransferBackend]

    @property
    def names(self) -> tuple[str, ...]:
        """What ``PeerInfo.transports`` reports, best first."""
        return tuple(name for name in TRANSPORTS if name in self.exports)

    def close(self) -> None:
        """End all writing into the own pool that can be ended."""
        for export in self.exports.values():
            export.close()


def open_transports(
    pool: BlockPool,
    lease_seconds: float,
    choice: str,
    host: str,
    *,
    layout: KVLayout | None = None,
    is_mixed: bool = False,
) -> Transports:
    """Open the chosen transport, or with ``auto`` every one that makes sense for the pool's memory.

    ``tcp``, ``nccl`` and ``rdma`` listen on ``host``, or on loopback where that is empty. Where
    peers can only be on this host, ``auto`` opens no listener, but one for ``tcp`` where some pools
    of the host are on GPUs and others are not (``is_mixed``); ``rdma`` it opens where NIXL and an
    active adapter are. ``layerwise`` and ``ranks`` need ``layout``, the whole model's. ConfigError
    when the address cannot be used, or the transport does not fit the pool or is not installed.
    """
    opened: dict[str, Both] = {}
    stall_seconds = lease_seconds / STALLS_PER_LEASE
    if isinstance(pool, DevicePool):
        opened = _on_device(pool, stall_seconds, choice, host, layout)
    elif isinstance(pool, KVPool):
        if choice in (AUTO, "shm"):
            opened["shm"] = MemoryExport(pool), ShmBackend(pool)
    elif not isinstance(pool, RankedPool):
        raise ConfigError(f"no transport moves a {type(pool).__name__}")
    if isinstance(pool, DevicePool | KVPool):
        opened |= _over_rdma(pool, stall_seconds, choice, host)
    if choice == "tcp" or (choice == AUTO and (host or is_mixed)):
        opened |= _over_tcp(pool, stall_seconds, host)
    # Ranks are joined in memory of one kind.
    if choice in (AUTO, RANKS) and layout is not None and not is_mixed:
        ranked = as_ranked(pool, layout)
        if ranked is not None:
            opened[RANKS] = open_ranks(ranked)
    if not opened and choice != AUTO:
        raise ConfigError(
            f"transport {choice} does not move a KV pool in {_where(pool)}; set transport to auto,"
            " or to tcp between hosts"
        )
    return Transports(
        MappingProxyType({name: both[0] for name, both in opened.items()}),
        MappingProxyType({name: both[1] for name, both in opened.items()}),
    )


def _where(pool: BlockPool) -> str:
    if isinstance(pool, RankedPool):
        return "the memory of several ranks"
    return "a GPU's memory" if isinstance(pool, DevicePool) else "host memory"


def _on_device(
    pool: DevicePool, stall_seconds: float, choice: str, host: str, layout: KVLayout | None
) -> dict[str, Both]:
    opened: dict[str, Both] = {}
    if choice == NCCL or (choice == AUTO and host):
        opened[NCCL] = open_nccl(pool, stall_seconds, host=host or LOOPBACK)
    if choice in (AUTO, CUDA_IPC):
        opened[CUDA_IPC] = CudaIpcExport(pool), CudaIpcBackend(pool)
    if choice == GATHER_BUFFER:
        opened[choice] = CudaIpcExport(pool, name=choice), gather_buffer_backend(pool)
    if choice == LAYERWISE:
        if layout is None:
            raise ConfigError(f"transport {choice} needs the pool's layout")
        opened[choice] = CudaIpcExport(pool, name=choice), layerwise_backend(pool, layout)
    return opened


def _over_tcp(pool: BlockPool, stall_seconds: float, host: str) -> dict[str, Both]:
    if isinstance(pool, DevicePool):
        export = TcpExport(pool, stall_seconds, host=host or LOOPBACK)
        return {"tcp": (export, StagedTcpBackend(pool, stall_seconds))}
    if isinstance(pool, KVPool):
        export = TcpExport(pool, stall_seconds, host=host or LOOPBACK)
        return {"tcp": (export, TcpBackend(pool, stall_seconds))}
    return {}


def _over_rdma(
    pool: DevicePool | KVPool, stall_seconds: float, choice: str, host: str
) -> dict[str, Both]:
    is_wanted = choice == AUTO and host and is_nixl_installed() and fastest_port_rate() > 0
    if choice != RDMA and not is_wanted:
        return {}
    try:
        memory = RdmaMemory.of_pool(pool)
        both = open_rdma(pool, NixlLibrary(memory), memory, stall_seconds, host=host or LOOPBACK)
    except ConfigError as error:
        if choice == RDMA:
            raise
        log.warning("transport_not_offered", transport=RDMA, reason=str(error))
        return {}
    return {RDMA: both}
