"""Transport ``ranks``: workers of any numbers of tensor-parallel ranks on one host.

The source's rank 0 maps the pools of all ranks on both sides and moves each KV head once, as
``common.transfer.heads`` plans it. A worker of one rank takes part as what it is, a worker whose
only rank has all heads.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from common.cuda.driver import CudaDriver
from common.errors import TransferError
from common.ids import TransferId
from common.kv.device_pool import DevicePool
from common.kv.layout import KVLayout
from common.kv.pool import BlockPool, KVPool, PeerPool
from common.messages.fields import CudaPoolHandle, ExportedPool, PoolHandle, RanksPoolHandle
from common.transfer.cuda_ranks import DeviceRank
from common.transfer.ranks import MemoryRank, RankedPool, RankMemory, RanksLink

RANKS = "ranks"

OpenRank = Callable[[PoolHandle | CudaPoolHandle], RankMemory]
"""Maps one rank's pool; TransferError where that cannot be."""


class RanksBackend:
    """Peers of this host whose ranks' pools are in memory of the same kind as ours."""

    name = RANKS
    is_networked = False

    def __init__(self, pool: RankedPool, open_rank: OpenRank) -> None:
        self._pool = pool
        self._open_rank = open_rank

    def open_peer(self, handle: ExportedPool) -> RanksLink:
        """Map the pools of all the peer's ranks; TransferError when one is gone or does not fit."""
        if not isinstance(handle, RanksPoolHandle):
            raise TransferError(f"{RANKS}: the peer's pool is offered as {handle.kind}")
        with ExitStack() as opened:
            targets: list[RankMemory] = []
            for rank in handle.ranks:
                target = self._open_rank(rank)
                opened.callback(target.close)
                targets.append(target)
            link = RanksLink.between(self._pool, targets)
            opened.pop_all()
        return link


class RanksExport:
    """The decode side: whoever maps the ranks' pools can write all of them.

    Writing cannot be fenced: it has ended when the peer says so, or is dead.
    """

    name = RANKS
    is_fencing = False

    def __init__(self, pool: RankedPool) -> None:
        self._pool = pool

    def handle(self) -> RanksPoolHandle:
        """Return what a peer on this host needs to map the pools."""
        return self._pool.handle()

    def grant(
        self, transfer_id: TransferId, block_ids: object, token: bytes | None = None
    ) -> bytes:
        """Return no token: the mapping is the right to write."""
        return b""

    def revoke(self, transfer_id: TransferId) -> None:
        """Do nothing: the mapping cannot be taken back."""

    def close(self) -> None:
        """Do nothing: the pools close their memory."""


def join_ranks(
    layout: KVLayout, own: KVPool | DevicePool, others: Sequence[PoolHandle | CudaPoolHandle]
) -> RankedPool:
    """Return the pool of rank 0's ``own`` and the other ranks', which it maps.

    ``layout`` is the whole model's. TransferError where one cannot be mapped.
    """
    opener = _opener(own.driver if isinstance(own, DevicePool) else None)
    first = DeviceRank.of_pool(own) if isinstance(own, DevicePool) else MemoryRank(own)
    with ExitStack() as opened:
        ranks: list[RankMemory] = [first]
        for handle in others:
            rank = opener(handle)
            opened.callback(rank.close)
            ranks.append(rank)
        pool = RankedPool(layout, ranks, [own.handle(), *others])
        opened.pop_all()
    return pool


def as_ranked(pool: BlockPool, layout: KVLayout) -> RankedPool | None:
    """Return the pool of one rank as the pool of all ranks; None where its memory has no ranks.

    ``layout`` is the whole model's.
    """
    if isinstance(pool, RankedPool):
        return pool
    return join_ranks(layout, pool, ()) if isinstance(pool, KVPool | DevicePool) else None


def open_ranks(pool: RankedPool) -> tuple[RanksExport, RanksBackend]:
    """Return both sides of the transport for a pool."""
    first = pool.ranks[0]
    opener = _opener(first.driver if isinstance(first, DeviceRank) else None)
    return RanksExport(pool), RanksBackend(pool, opener)


def _opener(driver: CudaDriver | None) -> OpenRank:
    """Return what maps pools of the kind of ours: on GPUs where there is a driver."""

    def on_device(handle: PoolHandle | CudaPoolHandle) -> RankMemory:
        if driver is None or not isinstance(handle, CudaPoolHandle):
            raise TransferError(f"{RANKS}: the peer's pools are not on GPUs, and ours are")
        return DeviceRank.mapped(driver, handle)

    def in_memory(handle: PoolHandle | CudaPoolHandle) -> RankMemory:
        if not isinstance(handle, PoolHandle):
            raise TransferError(f"{RANKS}: the peer's pools are not in host memory, and ours are")
        return MemoryRank(PeerPool.open(handle))

    return in_memory if driver is None else on_device
