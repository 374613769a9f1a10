"""What a worker is put together from."""

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from common.engine.interface import Engine
from common.ids import WorkerId
from common.kv.blocks import BlockManager
from common.models.config import ModelConfig
from common.scheduler.local import LocalScheduler
from common.transfer.backend import PeerLink
from common.worker.compaction import Compactor
from common.worker.control import ControlLink
from common.worker.emitter import TokenEmitter
from common.worker.host_blocks import HostBlocks
from common.worker.inbound import InboundHandoffs
from common.worker.outbound import OutboundHandoffs
from common.worker.own_role import OwnRole
from common.worker.stored_blocks import StoredBlocks


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """One engine with its thread, one pool with its books, and who plans. Leases are in seconds."""

    worker_id: WorkerId
    engine: Engine
    engine_thread: Executor
    blocks: BlockManager
    scheduler: LocalScheduler
    own_pool: PeerLink
    host_blocks: HostBlocks
    lease_seconds: float
    slow_down: float = 1.0
    """How many times as long every step is to take."""
    stored: StoredBlocks | None = None
    """Its use of the store of KV blocks, where it has one."""
    compactor: Compactor | None = None
    """Tidies its pool in idle time, where that is wanted."""
    why_broken: Callable[[], str | None] = lambda: None
    """Tells why the engine computes nothing any more; None while it does."""
    model: ModelConfig | None = None
    """What the engine computes; without it no operations are counted."""


@dataclass(frozen=True, slots=True)
class Channels:
    """How a worker is joined to the cluster: one end of every conversation, and
    what it tells of itself there."""

    control: ControlLink
    emitter: TokenEmitter
    inbound: InboundHandoffs
    outbound: OutboundHandoffs
    own: OwnRole
