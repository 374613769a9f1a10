"""The host memory to which preempted sequences' blocks go, and back from there.

Every copy is complete when its call returns, so it is in order with the steps before and after.
"""

from collections.abc import Sequence
from typing import Protocol

from common.errors import ConfigError
from common.kv.device_pool import DevicePool
from common.kv.pool import BlockPool, KVPool
from common.transfer.ranks import RankedPool
from common.worker.host_memory import HostedPool, HostMemory, host_block_bytes
from common.worker.pool_copies import open_pool_copies

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


class SwapBlocks:
    """Slots of whole blocks beside a pool, page-locked where that is on GPUs.

    ConfigError when they cannot be had.
    """

    def __init__(self, pool: HostedPool, swap_bytes: int) -> None:
        self._memory = HostMemory(pool, swap_bytes, "swap_bytes")
        self._copies = open_pool_copies(pool)
        self.num_slots = self._memory.num_blocks

    def swap_out(self, pairs: Pairs) -> None:
        """Copy blocks of the pool to slots."""
        blocks, slots = zip(*pairs, strict=True)
        self._copies.download(self._memory, slots, blocks)
        self._copies.wait()

    def swap_in(self, pairs: Pairs) -> None:
        """Copy slots to blocks of the pool."""
        blocks, slots = zip(*pairs, strict=True)
        self._copies.upload(self._memory, slots, blocks)
        self._copies.wait()

    def close(self) -> None:
        """Let go of what the copies are made with, and of the memory."""
        self._copies.close()
        self._memory.close()


def open_host_blocks(pool: BlockPool, swap_bytes: int) -> HostBlocks:
    """Return as many slots as fit ``swap_bytes``. ConfigError when they cannot be had."""
    if not isinstance(pool, KVPool | DevicePool | RankedPool):
        raise ConfigError(f"swap_bytes cannot be used with a {type(pool).__name__}")
    if swap_bytes < host_block_bytes(pool):
        return NoHostBlocks()
    return SwapBlocks(pool, swap_bytes)
