"""Workers of one process whose pools are joined by a ``FakeFabric``."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from common.transfer.nccl import NcclBackend, NcclLink
from common.transfer.nccl_export import NcclExport
from common.transfer.nccl_limit import CommunicatorLimit
from tests.support.data_stream import wait_until
from tests.support.fake_nccl import AddressedKVPool, FakeFabric, FakeNcclDriver
from tests.support.pool_side import PoolSide

STALL_SECONDS = 20.0


@dataclass(frozen=True)
class NcclWorker(PoolSide):
    """Both sides of the transport, and the pool."""

    pool: AddressedKVPool
    driver: FakeNcclDriver
    export: NcclExport
    backend: NcclBackend

    def link_to(self, peer: "NcclWorker") -> NcclLink:
        return self.backend.open_peer(peer.export.handle())


@contextmanager
def nccl_worker(
    fabric: FakeFabric,
    num_blocks: int,
    block_bytes: int,
    *,
    stall_seconds: float = STALL_SECONDS,
    max_communicators: int = 8,
    max_moving: int = 4,
) -> Iterator[NcclWorker]:
    """A worker with an empty pool, each of whose sides may hold and move so much."""
    limits = [CommunicatorLimit(max_communicators, max_moving) for _ in range(2)]
    pool = AddressedKVPool(num_blocks, block_bytes)
    driver = FakeNcclDriver(fabric)
    export = NcclExport(pool, driver, limits[0], stall_seconds)
    backend = NcclBackend(pool, driver, limits[1], stall_seconds)
    worker = NcclWorker(pool, driver, export, backend)
    worker.empty()
    yield worker
    export.close()
    wait_until(lambda: export.num_streams == 0)
    pool.close()
