"""What both halves of the handoff share in one worker."""

import asyncio
from concurrent.futures import Executor
from dataclasses import dataclass

from common.kv.pool import KVPool
from common.messages.fields import PeerInfo


@dataclass(frozen=True, slots=True)
class HandoffSetup:
    """The worker's task group, copy thread, pool and identity.

    Leases are in seconds, ``block_size`` in tokens; ``growth_tokens`` is the room for output that
    a reservation asks for beside the prompt.
    """

    tasks: asyncio.TaskGroup
    copier: Executor
    pool: KVPool
    self_info: PeerInfo
    model_fingerprint: str
    lease_seconds: float
    block_size: int
    growth_tokens: int
