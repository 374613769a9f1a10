"""What a rank other than 0 does with its orders."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from common.engine.batch import Batch
from common.engine.cpu_engine import CpuRunner
from common.engine.parallel.meeting import Handle, layout_of, make_communicator
from common.engine.parallel.messages import LoadShard
from common.engine.parallel.wire import Array
from common.engine.shard import Shard
from common.kv.pool import KVPool
from common.messages.fields import PoolHandle

Finish = Callable[[], None]
"""Waits until a step is computed; called from another thread, in the order of the steps."""


class Follower(Protocol):
    """One rank's shard, pool and device. The methods come in this order."""

    def make_pool(self, num_blocks: int) -> Handle:
        """Make the rank's pool; return how peers on this host open it."""
        ...

    def join(self) -> None:
        """Meet the other ranks and get ready for steps."""
        ...

    def start(self, arrays: Sequence[Array | None]) -> Finish:
        """Take on the batch of these arrays, as rank 0 has packed it."""
        ...


class CpuFollower:
    """A rank on the CPU; a step is computed when it is waited for."""

    def __init__(self, order: LoadShard) -> None:
        self._settings = order.settings
        self._communicator = make_communicator(
            order.settings, Shard(order.rank, order.settings.num_ranks), order.rendezvous
        )
        self._layout = layout_of(order.settings)
        self._pool: KVPool | None = None
        self._runner: CpuRunner | None = None

    def make_pool(self, num_blocks: int) -> PoolHandle:
        """Make the pool and load the rank's weights."""
        settings = self._settings
        self._pool = pool = KVPool(num_blocks, self._layout.block_bytes)
        self._runner = CpuRunner(
            *(Path(settings.folder), self._layout, pool.buffer, settings.num_threads),
            has_weights=settings.has_weights,
            communicator=self._communicator,
        )
        return pool.handle()

    def join(self) -> None:
        """Meet the other ranks."""
        self._communicator.connect()

    def start(self, arrays: Sequence[Array | None]) -> Finish:
        """Check the batch."""
        runner = self._runner
        assert runner is not None  # the orders come in their order
        batch = Batch.of_arrays([array for array in arrays if array is not None])
        runner.set_batch(batch)

        def finish() -> None:
            runner.forward(batch)

        return finish
