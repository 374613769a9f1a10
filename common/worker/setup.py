"""What both halves of the handoff share in one worker."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass

from common.kv.pool import BlockPool
from common.transfer.backend import PoolExport
from common.worker.own_role import OwnRole


@dataclass(frozen=True, slots=True)
class HandoffSetup:
    """The worker's task group, copy thread, pool, and what it tells of itself (``own``).

    ``exports`` are the transports that peers may use, by name. Leases are in seconds,
    ``block_size`` in tokens; ``growth_tokens`` is the room for output that a reservation asks for
    beside the prompt.
    """

    tasks: asyncio.TaskGroup
    copier: Executor
    pool: BlockPool
    exports: Mapping[str, PoolExport]
    own: OwnRole
    model_fingerprint: str
    lease_seconds: float
    block_size: int
    growth_tokens: int
