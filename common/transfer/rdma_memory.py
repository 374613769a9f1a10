"""The memory of a pool as transport ``rdma`` registers it: the blocks, and room for probes."""

from dataclasses import dataclass, field

import numpy as np

from common.errors import ConfigError
from common.kv.device_pool import DevicePool
from common.kv.pool import BlockPool, KVPool
from common.transfer.rdma_agent import MemoryKind, Region, SourcePool

SCRATCH_BYTES = 4 * 1024 * 1024
"""Where probes are read to, in host memory; on a GPU it is the pool's scratch block."""


@dataclass(frozen=True, slots=True)
class RdmaMemory:
    """Addresses of this process. Block ``i`` is ``i * block_bytes`` behind ``address``."""

    kind: MemoryKind
    device: int
    address: int
    num_blocks: int
    block_bytes: int
    regions: tuple[Region, ...]
    """All that is registered."""
    scratch: Region
    """Registered bytes that belong to no block."""
    kept: tuple[object, ...] = field(default=(), repr=False)
    """Keeps the memory mapped as long as it may be registered."""

    @classmethod
    def of_pool(cls, pool: BlockPool) -> "RdmaMemory":
        """Describe a pool of one process; ConfigError for any other."""
        if isinstance(pool, DevicePool):
            scratch = (pool.address + pool.scratch_block * pool.block_bytes, pool.block_bytes)
            return cls(
                kind=MemoryKind.GPU,
                device=pool.device_index,
                address=pool.address,
                num_blocks=pool.num_blocks,
                block_bytes=pool.block_bytes,
                regions=((pool.address, pool.num_bytes + pool.block_bytes),),
                scratch=scratch,
            )
        if not isinstance(pool, KVPool):
            raise ConfigError(f"rdma does not move a {type(pool).__name__}")
        blocks = np.frombuffer(pool.buffer, dtype=np.uint8)
        room = np.ones(SCRATCH_BYTES, dtype=np.uint8)
        scratch = (int(room.ctypes.data), SCRATCH_BYTES)
        address = int(blocks.ctypes.data)
        return cls(
            kind=MemoryKind.HOST,
            device=0,
            address=address,
            num_blocks=pool.num_blocks,
            block_bytes=pool.block_bytes,
            regions=((address, pool.num_bytes), scratch),
            scratch=scratch,
            kept=(blocks, room),
        )

    def as_source(self, metadata: bytes) -> SourcePool:
        """Return what a peer needs to read the pool."""
        return SourcePool(self.kind, self.device, self.address, self.num_blocks, metadata)
