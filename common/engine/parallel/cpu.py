"""A parallel engine of processes on CPUs."""

from pathlib import Path

from common.engine.cpu_engine import CpuEngine, CpuStep
from common.engine.parallel.engine import ParallelEngine
from common.engine.parallel.meeting import layout_of, meeting
from common.engine.parallel.messages import EngineSettings
from common.kv.pool import KVPool


def build_on_cpu(settings: EngineSettings, pool: KVPool) -> ParallelEngine[CpuStep]:
    """Make the engine of ``settings.num_ranks`` ranks; ``pool`` is rank 0's, of ``layout_of``.

    Errors and the thread to call it in: see ``meeting``.
    """
    layout = layout_of(settings)
    with meeting(settings) as met:
        met.make_pools(pool.num_blocks)
        lead = CpuEngine(
            *(Path(settings.folder), layout, pool.buffer, settings.num_threads),
            has_weights=settings.has_weights,
            communicator=met.communicator,
        )
        handles = met.connect()
        met.finish()
    return ParallelEngine(lead, met.group, layout, [pool.handle(), *handles])
