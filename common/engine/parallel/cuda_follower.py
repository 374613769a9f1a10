"""What a rank other than 0 does on its GPU."""

from collections.abc import Sequence

from common.engine.cuda.runner import CudaRunner
from common.engine.cuda.step_batch import Longs, StepBatch
from common.engine.parallel.cuda import RankPool, load_shard
from common.engine.parallel.follower import Finish
from common.engine.parallel.meeting import Handle, layout_of, make_communicator
from common.engine.parallel.messages import LoadShard
from common.engine.parallel.wire import Array
from common.engine.shard import Shard


class CudaFollower:
    """Implements ``common.engine.parallel.follower.Follower``; a step is enqueued as it starts."""

    def __init__(self, order: LoadShard) -> None:
        """Load the rank's weights."""
        self._settings = settings = order.settings
        shard = Shard(order.rank, settings.num_ranks)
        self._layout = layout_of(settings)
        self._communicator = make_communicator(settings, shard, order.rendezvous)
        self._model = load_shard(settings, shard)
        self._own: RankPool | None = None
        self._runner: CudaRunner | None = None

    def make_pool(self, num_blocks: int) -> Handle:
        """Make the pool."""
        self._own = RankPool.make(self._layout, num_blocks, self._model.device)
        return self._own.handle()

    def join(self) -> None:
        """Meet the other ranks, then compile and capture together with them."""
        settings, own = self._settings, self._own
        assert own is not None  # the orders come in their order
        self._communicator.connect()
        self._runner = CudaRunner(
            *(self._model, self._layout, own.memory, own.scratch_block),
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_num_seqs=settings.max_num_seqs,
            use_graphs=settings.use_graphs,
            communicator=self._communicator,
        )

    def start(self, arrays: Sequence[Array | None]) -> Finish:
        """Enqueue the batch, and that its drawn tokens come from rank 0."""
        runner = self._runner
        assert runner is not None  # the orders come in their order
        pending_places, *rest = arrays
        batch = StepBatch.of_arrays(rest)
        with runner.on_stream():
            runner.enqueue(batch, _longs(pending_places))
            runner.share_drawn(len(batch.sampled_rows))
            done = runner.record()

        def finish() -> None:
            if done is not None:
                done.synchronize()

        return finish


def _longs(array: Array | None) -> Longs:
    if array is None:
        raise ValueError("the step does not say where its pending tokens are")
    return array.astype("int64", copy=False)
