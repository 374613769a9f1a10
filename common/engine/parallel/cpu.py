"""A parallel engine of processes on CPUs."""

from pathlib import Path
from tempfile import TemporaryDirectory

from common.engine.cpu_engine import CpuEngine, CpuStep
from common.engine.failure import EngineBroken
from common.engine.parallel.engine import ParallelEngine
from common.engine.parallel.follower import rank_layout
from common.engine.parallel.gloo import GlooCommunicator
from common.engine.parallel.group import RankGroup
from common.engine.parallel.messages import (
    EngineSettings,
    Join,
    Joined,
    LoadShard,
    MakePool,
    PoolMade,
)
from common.engine.shard import Shard
from common.errors import ConfigError
from common.kv.pool import KVPool

LOAD_SECONDS = 1800.0
"""How long a rank may take to load its weights."""
FOLDER_PREFIX = "flowpath-ranks-"


def build_on_cpu(settings: EngineSettings, pool: KVPool) -> ParallelEngine[CpuStep]:
    """Start the other ranks and load the model; ``pool`` has blocks of ``rank_layout``.

    To be called in the main thread: the ranks end with the thread that started them. ConfigError
    where the model cannot be split or a rank cannot do its part.
    """
    layout = rank_layout(settings)
    with TemporaryDirectory(prefix=FOLDER_PREFIX) as folder:
        rendezvous = str(Path(folder, "rendezvous"))
        communicator = GlooCommunicator(Shard(0, settings.num_ranks), Path(rendezvous))
        group = RankGroup(settings.num_ranks, communicator.abort)
        try:
            group.order(lambda rank: LoadShard(rank=rank, settings=settings, rendezvous=rendezvous))
            group.order(lambda _: MakePool(num_blocks=pool.num_blocks))
            lead = CpuEngine(
                *(Path(settings.folder), layout, pool.buffer, settings.num_threads),
                has_weights=settings.has_weights,
                communicator=communicator,
            )
            made = group.answers(PoolMade, LOAD_SECONDS)
            group.order(lambda _: Join())
            with group.watched("meeting the other ranks"):
                communicator.connect()
            group.answers(Joined, LOAD_SECONDS)
        except EngineBroken as error:
            group.close()
            raise ConfigError(str(error)) from error
        except BaseException:
            group.close()
            raise
    handles = [pool.handle(), *(report.handle for report in made)]
    return ParallelEngine(lead, group, layout, handles)
