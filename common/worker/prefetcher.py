"""Brings stored prefixes that found no room in the pool into the host tier, until there is room.

Theory of operation. Loads read ahead already: they begin with a request's arrival, not with its
turn. What they cannot do is read into a pool that is full. Such a prefix is *awaited* here from
then on. While no load waits or is under way, its blocks are read from storage into the tier, one
batch of ``BATCH_BYTES`` after the other: a load that comes in the meantime shares the link with one
batch at most. The tier bounds how many blocks are ahead of their read (``HostTier.prefetch``). When
there is room, the load finds them there.

Oldest first. A prefix is done with when its blocks are there, or at the first that is not stored or
finds no slot.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from common.ids import RequestId
from common.worker.store_access import StoreAccess
from common.worker.stored_prefixes import StoredPrefixes

log = structlog.get_logger()

BATCH_BYTES = 8 * 2**20
"""About what is read before it is asked again whether a load waits."""


@dataclass(slots=True, eq=False)
class _Awaited:
    hashes: Sequence[bytes]
    next: int
    """Number of the first block that was not looked at."""
    is_done: bool = False


class Prefetcher:
    """Prefetches of one worker. Lives in the loop; ``serve`` does the work."""

    def __init__(self, access: StoreAccess, prefixes: StoredPrefixes) -> None:
        self._access = access
        self._prefixes = prefixes
        self._batch = max(1, BATCH_BYTES // access.block_bytes)
        self._awaited: dict[RequestId, _Awaited] = {}
        self._num_awaiting: Counter[bytes] = Counter()
        self._changed = asyncio.Event()
        prefixes.on_idle = self._changed.set

    def begin(self, request_id: RequestId, hashes: Sequence[bytes], num_cached: int) -> None:
        """Bring what follows the first ``num_cached`` blocks of a prefix into the tier."""
        if request_id not in self._awaited:
            self._num_awaiting.update(hashes)
        self._awaited[request_id] = _Awaited(hashes, num_cached)
        self._changed.set()

    def stop(self, request_id: RequestId) -> None:
        """Bring nothing more: it is loaded now."""
        if (awaited := self._awaited.get(request_id)) is not None:
            awaited.is_done = True

    def end(self, request_id: RequestId) -> None:
        """Nobody waits for this prefix any more; what was brought and not read is wasted."""
        ended = self._awaited.pop(request_id, None)
        if ended is None:
            return
        for block in ended.hashes:
            self._num_awaiting[block] -= 1
            if not self._num_awaiting[block]:
                del self._num_awaiting[block]
        self._abandon(ended.hashes)
        self._changed.set()

    async def serve(self) -> None:
        """Work for ever."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._access.prefetch_room > 0 and (found := self._next()) is not None:
                await self._fetch(*found)

    def _next(self) -> tuple[RequestId, _Awaited] | None:
        """Return the oldest prefix of which there is a block to bring; None while loads wait."""
        if self._prefixes.num_open:
            return None
        for request_id, awaited in self._awaited.items():
            if awaited.is_done:
                continue
            awaited.next += self._access.num_in_tier(awaited.hashes[awaited.next :])
            if awaited.next < len(awaited.hashes):
                return request_id, awaited
            awaited.is_done = True
        return None

    async def _fetch(self, request_id: RequestId, awaited: _Awaited) -> None:
        start = awaited.next
        part = awaited.hashes[start : start + self._batch]
        part = part[: self._access.prefetch_room]
        previous = awaited.hashes[start - 1] if start else None
        num_read = await self._access.prefetch(part, previous)
        awaited.next += num_read
        if num_read < len(part) and not self._access.num_in_tier(awaited.hashes[awaited.next :]):
            awaited.is_done = True  # it is not stored, or there is no slot
        log.debug("prefetched", request_id=request_id, num_blocks=num_read, num_asked=len(part))
        if self._awaited.get(request_id) is not awaited:
            self._abandon(part)

    def _abandon(self, hashes: Sequence[bytes]) -> None:
        """Give up blocks, but for those that another request waits for."""
        self._access.abandon([block for block in hashes if block not in self._num_awaiting])
