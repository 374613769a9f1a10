"""A parallel engine of processes with a GPU each."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from common.engine.cuda.engine import CudaEngine, PreparedCudaStep
from common.engine.cuda.model import CudaModel
from common.engine.parallel.engine import ParallelEngine
from common.engine.parallel.meeting import LOAD_SECONDS, Handle, device_of, layout_of, meeting
from common.engine.parallel.messages import EngineSettings
from common.engine.shard import Shard
from common.kv.device_pool import DevicePool
from common.kv.layout import KVLayout
from common.kv.pool import KVPool
from common.models.config import ModelConfig

CountBlocks = Callable[[CudaModel, KVLayout], int]
"""Says how many blocks the pool may have, when the weights are on the device."""


@dataclass(frozen=True, slots=True)
class RankPool:
    """One rank's pool, its memory with the scratch block, and which block that is."""

    pool: DevicePool | KVPool
    memory: torch.Tensor
    scratch_block: int

    @classmethod
    def make(cls, layout: KVLayout, num_blocks: int, device: torch.device) -> "RankPool":
        """Make a pool of ``num_blocks`` blocks and the scratch block on a device.

        ConfigError when it does not fit. On a CPU, where the engine is its own reference, the pool
        counts the scratch block in.
        """
        if device.type == "cuda":
            on_device = DevicePool(num_blocks, layout.block_bytes, device.index)
            return cls(on_device, on_device.tensor, on_device.scratch_block)
        pool = KVPool(num_blocks + 1, layout.block_bytes)
        return cls(pool, torch.frombuffer(pool.buffer, dtype=torch.uint8), num_blocks)

    def handle(self) -> Handle:
        """Return how peers on this host open the pool."""
        return self.pool.handle()


@dataclass(frozen=True, slots=True)
class CudaRanks:
    """The engine of all ranks and rank 0's pool."""

    engine: ParallelEngine[PreparedCudaStep]
    own: RankPool


def load_shard(settings: EngineSettings, shard: Shard) -> CudaModel:
    """Make the rank's device the process's own and load its weights there.

    ModelError where the folder cannot be served.
    """
    device = device_of(settings, shard)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return CudaModel.load(
        ModelConfig.load(Path(settings.folder)),
        settings.dtype,
        device,
        "auto" if settings.has_weights else "dummy",
        shard,
    )


def build_on_cuda(
    settings: EngineSettings,
    count_blocks: CountBlocks,
    tell: Callable[[str], None] | None = None,
) -> CudaRanks:
    """Make the engine: rank r on ``settings.devices[r]``, all with pools of as many blocks.

    ``count_blocks`` is asked for rank 0, which needs more memory than the others: it draws. Errors
    and the thread to call it in: see ``meeting``.
    """
    layout = layout_of(settings)
    shard = Shard(0, settings.num_ranks)
    with meeting(settings) as met:
        model = load_shard(settings, shard)
        own = RankPool.make(layout, count_blocks(model, layout), model.device)
        met.make_pools(own.scratch_block)
        handles = met.connect()
        with met.group.watched("making the engine", LOAD_SECONDS):
            lead = CudaEngine(
                *(model, layout, own.memory, own.scratch_block),
                max_num_batched_tokens=settings.max_num_batched_tokens,
                max_num_seqs=settings.max_num_seqs,
                use_graphs=settings.use_graphs,
                tell=tell,
                communicator=met.communicator,
            )
        met.finish()
    engine = ParallelEngine(lead, met.group, layout, [own.handle(), *handles])
    return CudaRanks(engine, own)
