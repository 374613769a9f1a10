"""Pools of ranks on several GPUs, as rank 0's process moves them: each GPU writes its own heads."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import numpy as np
from numpy.typing import NDArray

from common.cuda.driver import BlockCopies, CudaDriver, CudaError
from common.errors import TransferError
from common.kv.device_pool import DevicePool
from common.messages.fields import CudaPoolHandle
from common.transfer.aligned import align_checked
from common.transfer.backend import LinkRate
from common.transfer.cuda_heads import HeadMover
from common.transfer.cuda_link import measure_memory
from common.transfer.cuda_movers import MAX_PEER_COPIES, PEER_CTAS, DirectMover
from common.transfer.heads import HeadTransfer
from common.transfer.ranks import MovedHeads, Pairs, RankMemory

Close = Callable[[], None]


class DeviceRank:
    """Implements ``common.transfer.ranks.RankMemory`` on a GPU that this process sees."""

    def __init__(self, driver: CudaDriver, device: int, handle: CudaPoolHandle, own: int) -> None:
        """``own`` is the address of block 0 where the pool is this process's, else 0."""
        self.driver = driver
        self.device = device
        self.num_blocks = handle.num_blocks
        self.block_bytes = handle.block_bytes
        self._handle = handle
        self._own = own
        self._is_closed = False
        self._address, self._unmap = self.map_for(device)
        try:
            self._queue = driver.queue(device)
        except BaseException:
            self._unmap()
            raise

    @classmethod
    def of_pool(cls, pool: DevicePool) -> "DeviceRank":
        """Return the rank whose pool is this process's own."""
        return cls(pool.driver, pool.device_index, pool.handle(), pool.address)

    @classmethod
    def mapped(cls, driver: CudaDriver, handle: CudaPoolHandle) -> "DeviceRank":
        """Map the pool of a rank in another process of this host.

        TransferError where this process does not see its GPU, or it cannot be mapped.
        """
        if handle.num_bytes != handle.num_blocks * handle.block_bytes:
            raise TransferError(
                f"ranks: {handle.num_blocks} blocks of {handle.block_bytes} bytes are not the"
                f" {handle.num_bytes} bytes named"
            )
        for device in range(driver.num_devices()):
            if driver.device_uuid(device) == handle.device_uuid:
                return cls(driver, device, handle, 0)
        raise TransferError(
            f"ranks: a rank's pool is on {handle.device_uuid}, which this process does not see; let"
            " CUDA_VISIBLE_DEVICES of each worker name the GPUs of both, its own ones first"
        )

    def map_for(self, device: int) -> tuple[int, Close]:
        """Return the address of block 0 for work on a GPU, and what undoes the mapping."""
        driver = self.driver
        if device != self.device:
            if not driver.can_access_peer(device, self.device):
                raise TransferError(
                    f"ranks: GPU {device} cannot reach the memory of GPU {self.device} directly"
                    " (see `nvidia-smi topo -p2p r`); choose another transport"
                )
            driver.enable_peer_access(device, self.device)
        if self._own:
            return self._own, _nothing
        memory = self._handle.ipc_handle
        address = driver.open_memory(device, memory) + self._handle.offset
        return address, partial(driver.close_memory, device, memory)

    def checksum(self, block_ids: Sequence[int]) -> NDArray[np.uint64]:
        """Return the checksum of each named block, computed on the rank's GPU."""
        ids = np.asarray(block_ids, dtype=np.int64)
        outside = ids[(ids < 0) | (ids >= self.num_blocks)]
        if len(outside):
            raise ValueError(f"block {outside[0]} is outside of {self.num_blocks} blocks")
        if not len(ids):
            return np.empty(0, dtype=np.uint64)
        self._queue.checksum_blocks(self._address, ids.astype(np.int32), self.block_bytes)
        return self._queue.wait(is_long=False)

    def pair_with(self, target: RankMemory, transfer: HeadTransfer) -> "DevicePair":
        """Return the way to a rank on this GPU or one that it reaches."""
        if not isinstance(target, DeviceRank):
            raise TransferError("ranks: the peer's pools are not on GPUs, and ours are")
        return DevicePair(transfer, self, target)

    def close(self) -> None:
        """Unmap the pool; its owner's stays."""
        if not self._is_closed:
            self._is_closed = True
            with suppress(CudaError):  # a broken device has nothing to wait for
                self._queue.close()
            self._unmap()


class DevicePair:
    """Implements ``common.transfer.ranks.RankPair``: the source's GPU writes to the target's."""

    def __init__(self, transfer: HeadTransfer, source: DeviceRank, target: DeviceRank) -> None:
        self.transfer = transfer
        self._num_blocks = (source.num_blocks, target.num_blocks)
        self._driver, self._devices = source.driver, (source.device, target.device)
        device = source.device
        self._source, unmap_source = source.map_for(device)
        self._closes: list[Close] = [unmap_source]
        try:
            self._target, unmap_target = target.map_for(device)
            self._closes.append(unmap_target)
            is_far = target.device != device
            num_ctas = PEER_CTAS if is_far else 0
            self._heads = HeadMover(self._driver, device, num_ctas=num_ctas)
            self._closes.append(self._heads.close)
            max_copies = MAX_PEER_COPIES if is_far else 0
            self._blocks = DirectMover(
                self._driver, device, max_copies=max_copies, num_ctas=num_ctas
            )
            self._closes.append(self._blocks.close)
        except BaseException:
            self.close()
            raise

    def write(self, pairs: Pairs) -> MovedHeads:
        """Copy in one launch, or whole blocks of few runs in one copy a run, and wait.

        The source blocks must be whole: the copies wait for no other stream.
        """
        runs = align_checked(
            "ranks", (pairs[0], self._num_blocks[0]), (pairs[1], self._num_blocks[1])
        )
        if not len(runs):
            return MovedHeads(0, 0, np.empty(0, dtype=np.uint64))
        sources, targets = (np.asarray(ids, dtype=np.int32) for ids in pairs)
        plan = self.transfer
        num_bytes = len(targets) * plan.written_bytes
        try:
            if plan.is_whole:
                size = plan.source_block_bytes
                copies = BlockCopies(self._source, self._target, sources, targets, size)
                moved = self._blocks.move(copies, runs)
                return MovedHeads(moved.num_calls, num_bytes, moved.checksums)
            sums = self._heads.move(plan, (self._source, self._target), sources, targets)
        except CudaError as error:
            raise TransferError(f"ranks: writing {num_bytes} bytes failed: {error}") from error
        return MovedHeads(1, num_bytes, sums)

    def measure(self) -> LinkRate:
        """Compare reading the target's pool with what the hardware should give."""
        plan, driver, (own, peer) = self.transfer, self._driver, self._devices
        num_bytes = min(
            self._num_blocks[0] * plan.source_block_bytes,
            self._num_blocks[1] * plan.target_block_bytes,
        )
        target = driver.device_uuid(peer), self._target
        return measure_memory(driver, (own, self._source), target, num_bytes)

    def close(self) -> None:
        """Let go of streams and mappings; a second call does nothing."""
        while self._closes:
            self._closes.pop()()


def _nothing() -> None:
    """Undo no mapping: the pool is this process's own."""
