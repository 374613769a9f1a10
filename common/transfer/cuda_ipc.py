"""Transport ``cuda_ipc``: a peer's pool in a GPU's memory is mapped and written by our own GPU.

The peer is another process of this host, with its pool on the same GPU or on one that ours reaches.
A pool is mapped once for each process, however many links there are to it.

``layerwise`` and ``gather_buffer`` write over the same mapping as other systems do, to be compared;
they are used by force alone.
"""

import os
from collections.abc import Callable, Sequence
from functools import partial

from common.cuda.driver import CudaError
from common.errors import TransferError
from common.ids import TransferId
from common.kv.device_pool import DevicePool
from common.kv.layout import KVLayout
from common.messages.fields import CudaPoolHandle, ExportedPool
from common.transfer.cuda_link import CudaLink, MappedPool
from common.transfer.cuda_movers import (
    MAX_PEER_COPIES,
    PEER_CTAS,
    BlockMover,
    DirectMover,
    GatherBufferMover,
    LayerwiseMover,
)

CUDA_IPC = "cuda_ipc"
LAYERWISE = "layerwise"
GATHER_BUFFER = "gather_buffer"

MoverFactory = Callable[[DevicePool, str], BlockMover]
"""Makes the mover for writes from a pool into one on the GPU of the given UUID."""


class CudaIpcBackend:
    """Peers on this host whose pool is in the memory of a GPU that ours reaches."""

    is_networked = False

    def __init__(
        self, pool: DevicePool, *, name: str = CUDA_IPC, make_mover: MoverFactory | None = None
    ) -> None:
        self.name = name
        self._pool = pool
        self._make_mover = make_mover or direct_mover

    def open_peer(self, handle: ExportedPool) -> CudaLink:
        """Map the peer's pool; TransferError when that cannot be or its blocks differ from ours."""
        if not isinstance(handle, CudaPoolHandle):
            raise TransferError(f"{self.name}: the peer's pool is not offered by CUDA IPC")
        self._refuse_unfit(handle)
        own, driver = self._pool.device_index, self._pool.driver
        is_seen = self._reach(handle.device_uuid)
        try:
            address = driver.open_memory(own, handle.ipc_handle) + handle.offset
        except CudaError as error:
            if is_seen:
                raise
            raise TransferError(
                f"{self.name}: GPU {own} cannot map the peer's pool on {handle.device_uuid}, which"
                f" this process does not see: {error}; let CUDA_VISIBLE_DEVICES of each worker name"
                " the GPUs of both, its own one first, or choose another transport"
            ) from error
        close = partial(driver.close_memory, own, handle.ipc_handle)
        try:
            mover = self._make_mover(self._pool, handle.device_uuid)
        except BaseException:
            close()
            raise
        return CudaLink(
            self.name,
            self._pool,
            MappedPool(address, handle.num_blocks, handle.device_uuid, close),
            mover,
        )

    def _refuse_unfit(self, handle: CudaPoolHandle) -> None:
        if handle.block_bytes != self._pool.block_bytes:
            raise TransferError(
                f"{self.name}: the peer's blocks have {handle.block_bytes} bytes, ours"
                f" {self._pool.block_bytes}"
            )
        if handle.num_bytes != handle.num_blocks * handle.block_bytes:
            raise TransferError(
                f"{self.name}: {handle.num_blocks} blocks of {handle.block_bytes} bytes are not"
                f" the {handle.num_bytes} bytes named"
            )
        if handle.pid == os.getpid():
            raise TransferError(
                f"{self.name}: process {handle.pid} is this one, which needs no mapping"
            )

    def _reach(self, uuid: str) -> bool:
        """Make a GPU's memory reachable, unless this process does not see it; tell if it does."""
        own, driver = self._pool.device_index, self._pool.driver
        for device in range(driver.num_devices()):
            if driver.device_uuid(device) != uuid:
                continue
            if device == own:
                return True
            if not driver.can_access_peer(own, device):
                raise TransferError(
                    f"{self.name}: GPU {own} cannot reach the memory of GPU {device} directly"
                    " (see `nvidia-smi topo -p2p r`); choose another transport"
                )
            driver.enable_peer_access(own, device)
            return True
        return False


class CudaIpcExport:
    """The decode side: whoever maps the pool can write all of it.

    Writing cannot be fenced: it has ended when the peer says so, or is dead.
    """

    is_fencing = False

    def __init__(self, pool: DevicePool, *, name: str = CUDA_IPC) -> None:
        self.name = name
        self._pool = pool

    def handle(self) -> CudaPoolHandle:
        """Return what a peer on this host needs to map the pool."""
        return self._pool.handle()

    def grant(
        self, transfer_id: TransferId, block_ids: Sequence[int], token: bytes | None = None
    ) -> bytes:
        """Return no token: the mapping is the right to write."""
        return b""

    def revoke(self, transfer_id: TransferId) -> None:
        """Do nothing: the mapping cannot be taken back."""

    def close(self) -> None:
        """Do nothing: the pool frees its memory."""


def own_link(name: str, pool: DevicePool) -> CudaLink:
    """Return a link from a pool to itself."""
    uuid = pool.driver.device_uuid(pool.device_index)
    mapped = MappedPool(pool.address, pool.num_blocks, uuid, close=_nothing)
    return CudaLink(name, pool, mapped, direct_mover(pool, uuid))


def direct_mover(pool: DevicePool, uuid: str) -> BlockMover:
    """Return FlowPath's way to move blocks."""
    own, driver = pool.device_index, pool.driver
    if uuid == driver.device_uuid(own):
        return DirectMover(driver, own)
    return DirectMover(driver, own, max_copies=MAX_PEER_COPIES, num_ctas=PEER_CTAS)


def layerwise_backend(pool: DevicePool, layout: KVLayout) -> CudaIpcBackend:
    """Return the backend that copies every layer and plane of every block by itself."""

    def make(pool: DevicePool, _: str) -> BlockMover:
        return LayerwiseMover(pool.driver, pool.device_index, layout)

    return CudaIpcBackend(pool, name=LAYERWISE, make_mover=make)


def gather_buffer_backend(pool: DevicePool) -> CudaIpcBackend:
    """Return the backend that gathers blocks into one buffer before it sends them."""

    def make(pool: DevicePool, uuid: str) -> BlockMover:
        num_ctas = 0 if uuid == pool.driver.device_uuid(pool.device_index) else PEER_CTAS
        return GatherBufferMover(pool.driver, pool.device_index, num_ctas=num_ctas)

    return CudaIpcBackend(pool, name=GATHER_BUFFER, make_mover=make)


def _nothing() -> None:
    """Close what was never opened."""
