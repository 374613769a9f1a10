"""Host memory for whole blocks beside a pool, wherever that is."""

from collections.abc import Sequence

import flowpath_native
import numpy as np
from numpy.typing import NDArray

from common.cuda.driver import CudaDriver
from common.errors import ConfigError, TransferError
from common.kv.device_pool import DevicePool
from common.kv.pool import KVPool
from common.transfer.cuda_ranks import DeviceRank
from common.transfer.host_staged import PinnedWindow
from common.transfer.ranks import RankedPool

HostedPool = KVPool | DevicePool | RankedPool
"""Pools whose blocks can be kept in host memory."""


def host_block_bytes(pool: HostedPool) -> int:
    """Return the bytes of one block in host memory, which has all KV heads.

    Together, the blocks of several ranks can be longer: each has padding of its own.
    """
    return pool.layout.block_bytes if isinstance(pool, RankedPool) else pool.block_bytes


class HostMemory:
    """Room for as many blocks as fit ``num_bytes``, page-locked beside a pool on GPUs.

    A block has the model's whole layout, ``host_block_bytes(pool)``. ConfigError, which names
    ``setting``, where that is none or cannot be had. ``buffer`` has the bytes of all, aligned to
    pages; ``address`` is where a GPU finds them.
    """

    def __init__(self, pool: HostedPool, num_bytes: int, setting: str) -> None:
        self.block_bytes = host_block_bytes(pool)
        self.num_blocks = num_bytes // self.block_bytes
        if self.num_blocks < 1:
            raise ConfigError(
                f"{setting} {num_bytes} holds no block: one has {self.block_bytes} bytes"
            )
        self._window: PinnedWindow | None = None
        self.address = 0
        gpu = _gpu_of(pool)
        try:
            if gpu is not None:
                self._window = PinnedWindow(*gpu, self.num_blocks, self.block_bytes)
                self._memory = self._window.pool
                self.address = self._window.address
            else:
                self._memory = KVPool(self.num_blocks, self.block_bytes)
        except (ConfigError, TransferError) as error:
            raise ConfigError(f"{setting} cannot be had: {error}") from error
        self.buffer = self._memory.buffer

    def close(self) -> None:
        """Let go of the memory; nothing may use it any more."""
        if self._window is None:
            self._memory.close()
        else:
            self._window.close()


def runs_of(sources: Sequence[int], targets: Sequence[int]) -> NDArray[np.int32]:
    """Return (source, target, length) of the fewest copies."""
    return flowpath_native.align(
        np.asarray(sources, dtype=np.int32), np.asarray(targets, dtype=np.int32)
    )


def refuse_outside(*sides: tuple[Sequence[int], int]) -> None:
    """IndexError where a place of a side is outside of its bound."""
    for places, bound in sides:
        if not all(0 <= place < bound for place in places):
            raise IndexError(f"a block of {places} is outside of {bound}")


def _gpu_of(pool: HostedPool) -> tuple[CudaDriver, int] | None:
    """Return the GPU that copies from and to host memory; of several ranks, rank 0's."""
    if isinstance(pool, DevicePool):
        return pool.driver, pool.device_index
    first = pool.ranks[0] if isinstance(pool, RankedPool) else None
    return (first.driver, first.device) if isinstance(first, DeviceRank) else None
