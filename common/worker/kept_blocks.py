"""Writes what was computed to the store, behind the requests' backs.

Theory of operation. Computed blocks come here held by owners of their own, in the order in which
they were published. They are copied into the store's queue in a thread, and let go then. A store
takes a block only after the one before it; where that was computed by another worker, or was never
taken, this happens first::

    offered here a while ago    copy
    stored, by whomever         copy
    not stored yet              ask again, for whoever computed it may be about to write it
    not stored after a while    offer what is missing, if it is cached here; else drop

So the holes heal that a full queue or an eviction has left.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic

from common.kv.blocks import BlockManager, PublishedBlocks
from common.telemetry.store_metrics import StoreMetrics
from common.worker.store_access import StoreAccess

RETRY_SECONDS = 0.1
GRACE_SECONDS = 2.0
"""How long the block before may take to be written by the worker that computed it."""
MAX_WAITING_SHARE = 8
"""Blocks of at most 1 / 8 of the pool wait for one before them; beyond, nobody's is waited for."""
MAX_REMEMBERED = 65536


@dataclass(slots=True, eq=False)
class _Job:
    held: PublishedBlocks
    give_up_at: float
    retry_at: float = 0.0


class KeptBlocks:
    """The blocks that are on their way to the store. Lives in the loop; ``serve`` does the work."""

    def __init__(self, access: StoreAccess, blocks: BlockManager) -> None:
        self._access = access
        self._blocks = blocks
        self._max_waiting = blocks.counts().total // MAX_WAITING_SHARE
        self._jobs: list[_Job] = []
        self._num_open_blocks = 0
        self._has_new = asyncio.Event()
        self._last_kept: dict[bytes, None] = {}
        self._num_healed = 0

    def attach(self, metrics: StoreMetrics, wake: asyncio.Event) -> None:
        """Join to what counts the blocks that are not offered at all.

        ``wake`` is set when blocks are let go: somebody may wait for the room.
        """
        self._metrics = metrics
        self._wake = wake

    @property
    def is_busy(self) -> bool:
        """Whether blocks of the pool are held for the store."""
        return self._num_open_blocks > 0

    def keep(self, computed: Sequence[PublishedBlocks]) -> None:
        """Have blocks written some time; whoever holds them is released here."""
        give_up_at = monotonic() + GRACE_SECONDS
        self._jobs += [_Job(held, give_up_at) for held in computed]
        self._num_open_blocks += sum(len(held.hashes) for held in computed)
        self._has_new.set()

    async def serve(self) -> None:
        """Write for ever."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_SECONDS if self._jobs else None):
                    await self._has_new.wait()
            self._has_new.clear()
            jobs, self._jobs = self._jobs, []
            waiting = [job for job in jobs if not await self._is_done(job)]
            self._jobs = waiting + self._jobs

    async def _is_done(self, job: _Job) -> bool:
        """Write a job's blocks or drop them; False where it is to be tried again later."""
        held, now = job.held, monotonic()
        if now < job.retry_at:
            return False
        num_stored = len(held.before)
        if held.previous is not None and held.previous not in self._last_kept:
            num_stored = await self._access.num_stored(held.before)
        if num_stored < len(held.before):
            if now < job.give_up_at and self._num_open_blocks <= self._max_waiting:
                job.retry_at = now + RETRY_SECONDS
                return False
            if not await self._heal(held.before, num_stored):
                self._end(held, num_dropped=len(held.hashes), event="dropped_orphan")
                return True
        num_dropped = await self._write(held)
        # The store itself has counted the first that it dropped.
        self._end(held, num_dropped=max(0, num_dropped - 1), event="dropped_full")
        return True

    async def _heal(self, chain: Sequence[bytes], num_stored: int) -> bool:
        """Offer the blocks of a chain that are not stored; return whether that went well."""
        owner = f"healed-{self._num_healed}"
        held = self._blocks.hold_found(owner, chain[num_stored:], chain[:num_stored])
        if held is None:
            return False
        self._num_healed += 1
        num_dropped = await self._write(held)
        self._blocks.release(owner)
        self._wake.set()
        return num_dropped == 0

    async def _write(self, held: PublishedBlocks) -> int:
        num_dropped = await self._access.write(held)
        if num_dropped == 0:
            self._last_kept[held.hashes[-1]] = None
            if len(self._last_kept) > MAX_REMEMBERED:
                del self._last_kept[next(iter(self._last_kept))]
        return num_dropped

    def _end(self, held: PublishedBlocks, *, num_dropped: int, event: str) -> None:
        if num_dropped:
            self._metrics.blocks.labels(event).inc(num_dropped)
        self._blocks.release(held.owner)
        self._num_open_blocks -= len(held.hashes)
        self._wake.set()
