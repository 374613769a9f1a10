"""The host memory to which preempted sequences' blocks go, and back from there.

Every copy is complete when its call returns, so it is in order with the steps before and after.
"""

from collections.abc import Sequence
from typing import Protocol

import flowpath_native
import numpy as np

from common.cuda.driver import CudaError, draining
from common.errors import ConfigError, TransferError
from common.kv.device_pool import DevicePool
from common.kv.pool import BlockPool, KVPool
from common.transfer.host_staged import PinnedWindow

Pairs = Sequence[tuple[int, int]]
"""(pool block, host slot) of each block to copy."""


class HostBlocks(Protocol):
    """``num_slots`` slots of one block each beside a pool."""

    @property
    def num_slots(self) -> int:
        """How many blocks it holds."""
        ...

    def swap_out(self, pairs: Pairs) -> None:
        """Copy blocks of the pool to slots."""
        ...

    def swap_in(self, pairs: Pairs) -> None:
        """Copy slots to blocks of the pool."""
        ...

    def close(self) -> None:
        """Let go of the memory."""
        ...


class NoHostBlocks:
    """Nothing is kept: sequences that give way are computed again."""

    num_slots = 0

    def swap_out(self, pairs: Pairs) -> None:
        """There is no slot to copy to."""
        raise IndexError(f"{len(pairs)} blocks for no slots")

    def swap_in(self, pairs: Pairs) -> None:
        """There is no slot to copy from."""
        raise IndexError(f"{len(pairs)} blocks from no slots")

    def close(self) -> None:
        """There is nothing to let go of."""


class MemoryHostBlocks:
    """Slots beside a pool that is in host memory too. ConfigError when there is no memory."""

    def __init__(self, pool: KVPool, num_slots: int) -> None:
        self.num_slots = num_slots
        self._memory = KVPool(num_slots, pool.block_bytes)
        shape = (-1, pool.block_bytes)
        self._slots = np.frombuffer(self._memory.buffer, dtype=np.uint8).reshape(shape)
        self._blocks = np.frombuffer(pool.buffer, dtype=np.uint8).reshape(shape)

    def swap_out(self, pairs: Pairs) -> None:
        """Copy blocks of the pool to slots."""
        blocks, slots = zip(*pairs, strict=True)
        self._slots[list(slots)] = self._blocks[list(blocks)]

    def swap_in(self, pairs: Pairs) -> None:
        """Copy slots to blocks of the pool."""
        blocks, slots = zip(*pairs, strict=True)
        self._blocks[list(blocks)] = self._slots[list(slots)]

    def close(self) -> None:
        """Let go of the memory."""
        del self._slots, self._blocks
        self._memory.close()


class DeviceHostBlocks:
    """Page-locked slots beside a pool on a GPU. ConfigError when they cannot be had."""

    def __init__(self, pool: DevicePool, num_slots: int) -> None:
        self.num_slots = num_slots
        self._pool = pool
        try:
            self._window = PinnedWindow(pool, num_slots, pool.block_bytes)
        except (TransferError, CudaError) as error:
            raise ConfigError(f"swap_bytes cannot be had: {error}") from error
        self._queue = pool.driver.queue(pool.device_index)

    def swap_out(self, pairs: Pairs) -> None:
        """Copy blocks of the pool to slots."""
        blocks, slots = zip(*pairs, strict=True)
        self._copy(
            (self._window.address, slots, self.num_slots),
            (self._pool.address, blocks, self._pool.num_blocks),
        )

    def swap_in(self, pairs: Pairs) -> None:
        """Copy slots to blocks of the pool."""
        blocks, slots = zip(*pairs, strict=True)
        self._copy(
            (self._pool.address, blocks, self._pool.num_blocks),
            (self._window.address, slots, self.num_slots),
        )

    def close(self) -> None:
        """Let go of stream and memory."""
        self._queue.close()
        self._window.close()

    def _copy(
        self, target: tuple[int, tuple[int, ...], int], source: tuple[int, tuple[int, ...], int]
    ) -> None:
        """Copy blocks from one memory to the other: address, places and their bound of each."""
        for _, places, bound in (target, source):
            if not all(0 <= place < bound for place in places):
                raise IndexError(f"a block of {places} is outside of {bound}")
        size = self._pool.block_bytes
        runs = flowpath_native.align(
            np.asarray(source[1], dtype=np.int32), np.asarray(target[1], dtype=np.int32)
        ).tolist()
        with draining(self._queue):
            self._queue.copy(
                [
                    (target[0] + to * size, source[0] + at * size, length * size)
                    for at, to, length in runs
                ]
            )
            self._queue.wait(is_long=False)


def open_host_blocks(pool: BlockPool, swap_bytes: int) -> HostBlocks:
    """Return as many slots as fit ``swap_bytes``. ConfigError when they cannot be had."""
    num_slots = swap_bytes // pool.block_bytes
    if num_slots == 0:
        return NoHostBlocks()
    if isinstance(pool, DevicePool):
        return DeviceHostBlocks(pool, num_slots)
    if isinstance(pool, KVPool):
        return MemoryHostBlocks(pool, num_slots)
    raise ConfigError(f"swap_bytes cannot be used with a {type(pool).__name__}")
