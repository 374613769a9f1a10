"""One side of a transport in a test: a pool in host memory, to be filled and looked at."""

from dataclasses import dataclass

import numpy as np

from common.kv.pool import KVPool

EMPTY = 0xEE


@dataclass(frozen=True)
class PoolSide:
    """A worker's pool; blocks that nobody has written are full of ``EMPTY``."""

    pool: KVPool

    def block(self, number: int) -> bytes:
        size = self.pool.block_bytes
        return self.pool.buffer[number * size : (number + 1) * size].tobytes()

    def fill(self, seed: int) -> None:
        numbers = np.frombuffer(self.pool.buffer, dtype=np.uint8)
        numbers[:] = np.random.default_rng(seed).integers(0, 256, numbers.size, dtype=np.uint8)

    def empty(self) -> None:
        np.frombuffer(self.pool.buffer, dtype=np.uint8)[:] = EMPTY

    def is_empty(self) -> bool:
        return bool((np.frombuffer(self.pool.buffer, dtype=np.uint8) == EMPTY).all())
