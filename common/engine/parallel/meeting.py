"""How the ranks of an engine come together: processes, pools, connections."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir

import torch

from common.engine.dtype import load_model_layout
from common.engine.failure import EngineBroken
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
from common.engine.parallel.nccl import NcclCommunicator
from common.engine.parallel.rendezvous import Rendezvous
from common.engine.shard import Shard
from common.errors import ConfigError
from common.kv.layout import KVLayout
from common.messages.fields import CudaPoolHandle, PoolHandle
from common.models.config import ModelConfig

LOAD_SECONDS = 1800.0
"""How long a rank may take to load its weights, and to compile and capture its kernels."""

Handle = PoolHandle | CudaPoolHandle
RanksCommunicator = GlooCommunicator | NcclCommunicator


class Meeting:
    """Rank 0's side, while the engine is being made. The methods come in this order."""

    def __init__(self, settings: EngineSettings) -> None:
        """Start the other ranks' processes."""
        self._settings = settings
        try:
            self._place = Rendezvous()
        except OSError as error:
            raise ConfigError(
                f"ranks cannot meet: no folder can be made in {gettempdir()}: {error}; TMPDIR names"
                " another place"
            ) from error
        self._rendezvous = self._place.file
        root = Shard(0, settings.num_ranks)
        self.communicator = make_communicator(settings, root, self._rendezvous)
        self.group = RankGroup(settings.num_ranks, self._let_go, self._part)

    def load(self) -> None:
        """Have every rank load its weights; those for CPUs do when they have pools."""
        settings, rendezvous = self._settings, self._rendezvous
        self.group.order(
            lambda rank: LoadShard(rank=rank, settings=settings, rendezvous=rendezvous)
        )

    def make_pools(self, num_blocks: int) -> None:
        """Have every rank make a pool of so many blocks."""
        self.group.order(lambda _: MakePool(num_blocks=num_blocks))

    def connect(self) -> list[Handle]:
        """Wait until all have their pools, and meet; return the pools' handles."""
        made = self.group.answers(PoolMade, LOAD_SECONDS)
        self.group.order(lambda _: Join())
        with self.group.watched("meeting the other ranks"):
            self.communicator.connect()
        return [report.handle for report in made]

    def finish(self) -> None:
        """Wait until all are ready for steps."""
        self.group.answers(Joined, LOAD_SECONDS)

    def _let_go(self) -> None:
        self.communicator.abort()
        self._place.close()

    def _part(self) -> None:
        self.communicator.close()
        self._place.close()


@contextmanager
def meeting(settings: EngineSettings) -> Iterator[Meeting]:
    """Start the ranks; when anything fails, they are ended.

    To be entered in the main thread: the ranks end with the thread that started them. ConfigError
    where the model cannot be split between so many ranks, or one of them cannot do its part.
    """
    layout_of(settings)
    met = Meeting(settings)
    try:
        met.load()
        yield met
    except EngineBroken as error:
        met.group.close()
        raise ConfigError(str(error)) from error
    except BaseException:
        met.group.close()
        raise


def layout_of(settings: EngineSettings) -> KVLayout:
    """Return the layout of the blocks in each rank's pool: the model's with that rank's heads.

    ConfigError where the model cannot be split between so many ranks.
    """
    whole = ModelConfig.load(Path(settings.folder))
    return load_model_layout(
        Shard(0, settings.num_ranks).config(whole),
        settings.dtype,
        settings.block_size,
        settings.kv_cache_dtype,
        settings.scales,
    )


def device_of(settings: EngineSettings, shard: Shard) -> torch.device:
    """Return the device of a rank."""
    return torch.device(settings.devices[shard.rank] if settings.devices else "cpu")


def make_communicator(settings: EngineSettings, shard: Shard, rendezvous: str) -> RanksCommunicator:
    """Return what connects the ranks' devices, not connected yet."""
    device = device_of(settings, shard)
    if device.type == "cuda":
        return NcclCommunicator(shard, Path(rendezvous), device)
    return GlooCommunicator(shard, Path(rendezvous))
