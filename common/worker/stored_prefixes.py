"""Loads leading tokens of prompts from the store into the prefix cache.

Theory of operation. Loads are done one after the other, in the order in which they were asked for.
Only when its turn comes does a load take blocks, so that none are held by what waits, and what an
earlier load has brought is not read again. But where there was no room then, and there is now,
``try_load_now`` takes the room at once and is next. Blocks are read a batch at a time, straight
into the pool; as soon as one is missing or damaged the rest is left alone. What arrived in one
piece from the front is published and let go: it is cached then, like anything computed here.

The blocks are held for a transfer until the read of them has returned, whatever becomes of the
request meanwhile: then no further batch is begun.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from common.ids import RequestId
from common.kv.blocks import Acquired, BlockManager, Hold
from common.worker.phases import PrefixLoaded
from common.worker.store_access import StoreAccess

log = structlog.get_logger()

BATCH_BYTES = 64 * 2**20
"""About what is read before it is asked again whether the load is still wanted."""
MAX_LOADS = 1024
"""Loads that may wait; what is asked for beyond is computed."""
EWMA_WEIGHT = 0.3

OnLoaded = Callable[[PrefixLoaded], None]


@dataclass(slots=True, eq=False)
class _Load:
    request_id: RequestId
    tokens: Sequence[int]
    then: OnLoaded
    num_unread: int
    """Tokens that are still to be read, as far as is known."""
    owner: str
    acquired: Acquired | None = None
    is_wanted: bool = True


class StoredPrefixes:
    """The loads of one worker. Lives in the loop; ``serve`` does the work."""

    def __init__(self, access: StoreAccess, blocks: BlockManager, block_size: int) -> None:
        self._access = access
        self._blocks = blocks
        self._block_size = block_size
        # A buffer takes several turns, so that copies and reads overlap.
        self._batch = max(1, max(BATCH_BYTES, access.buffer_bytes) // access.block_bytes)
        self._loads: deque[_Load] = deque()
        self._has_loads = asyncio.Event()
        self._numbers = itertools.count()
        self._read_tokens = 0.0
        self._read_seconds = 0.0
        self.on_idle: Callable[[], None] = lambda: None
        """Called when no load waits or is under way any more."""

    def attach(self, wake: asyncio.Event) -> None:
        """``wake`` is set when blocks are let go: somebody may wait for the room."""
        self._wake = wake

    @property
    def num_open(self) -> int:
        """Loads that wait or are under way."""
        return len(self._loads)

    @property
    def queue_tokens(self) -> int:
        """Tokens that wait to be read or are being read."""
        return sum(load.num_unread for load in self._loads if load.is_wanted)

    @property
    def tokens_per_second(self) -> float:
        """How fast reads were of late, by sums that fade read by read; 0 before the first."""
        return self._read_tokens / self._read_seconds if self._read_seconds > 0 else 0.0

    def try_load(self, request_id: RequestId, tokens: Sequence[int], then: OnLoaded) -> bool:
        """Load what is not cached here of the whole blocks of ``tokens``, which begin a prompt.

        ``then`` is told later what came, perhaps nothing, unless the load is forgotten before.
        False: too many loads wait, and nothing will be done.
        """
        load = self._new(request_id, tokens, then)
        if load is None:
            return False
        self._loads.append(load)
        self._has_loads.set()
        return True

    def try_load_now(self, request_id: RequestId, tokens: Sequence[int], then: OnLoaded) -> bool:
        """Load as ``try_load`` does, next and into blocks that are taken at once.

        False: no room, or too many loads wait, and nothing will be done.
        """
        load = self._new(request_id, tokens, then)
        if load is None or not self._acquire(load):
            return False
        self._loads.insert(min(1, len(self._loads)), load)
        self._has_loads.set()
        return True

    def _new(self, request_id: RequestId, tokens: Sequence[int], then: OnLoaded) -> _Load | None:
        if len(self._loads) >= MAX_LOADS:
            log.warning("load_refused", request_id=request_id, num_loads=len(self._loads))
            return None
        whole = tokens[: len(tokens) // self._block_size * self._block_size]
        num_unread = len(whole) - self._blocks.match(whole, len(whole))
        owner = f"load-{next(self._numbers)}-{request_id}"
        return _Load(request_id, whole, then, num_unread, owner)

    def forget(self, request_id: RequestId) -> None:
        """Nobody waits for this request's prefix any more."""
        for load in self._loads:
            if load.request_id == request_id:
                load.is_wanted = False

    async def serve(self) -> None:
        """Do loads for ever."""
        while True:
            await self._has_loads.wait()
            load = self._loads[0]
            loaded = await self._load(load)
            self._loads.popleft()
            if not self._loads:
                self._has_loads.clear()
            if load.is_wanted:
                load.then(loaded)
            if not self._loads:
                self.on_idle()

    async def _load(self, load: _Load) -> PrefixLoaded:
        owner, num_tokens = load.owner, len(load.tokens)
        if load.acquired is None:
            if not load.is_wanted or num_tokens <= self._blocks.match(load.tokens, num_tokens):
                return PrefixLoaded()
            if not self._acquire(load):
                return PrefixLoaded(had_room=False)
        acquired = load.acquired
        assert acquired is not None, "it was acquired just now or when it was asked for"
        first = acquired.num_cached_tokens // self._block_size
        # Once, and no more: of a long prompt that takes milliseconds.
        hashes = self._blocks.prefix_hashes(load.tokens)
        num_read, num_from_storage, seconds = await self._read(
            load, hashes, acquired.block_ids, first
        )
        self._blocks.publish_hashed(owner, hashes[: first + num_read])
        self._blocks.release(owner)
        self._wake.set()
        loaded = PrefixLoaded(
            num_read * self._block_size, self._moved(num_read, num_from_storage), num_read, seconds
        )
        log.info(
            "prefix_loaded",
            request_id=load.request_id,
            num_tokens=loaded.num_tokens,
            num_bytes=loaded.num_bytes,
            num_asked_tokens=num_tokens,
            num_cached_tokens=acquired.num_cached_tokens,
            num_storage_blocks=num_from_storage,
            read_seconds=round(seconds, 6),
            was_wanted=load.is_wanted,
        )
        return loaded

    def _acquire(self, load: _Load) -> bool:
        """Take blocks for the load; False where there is no room."""
        num_tokens = len(load.tokens)
        load.acquired = self._blocks.acquire(
            load.owner, load.tokens, hold=Hold.TRANSFER, max_cached_tokens=num_tokens
        )
        if load.acquired is None:
            log.info("load_without_room", request_id=load.request_id, num_tokens=num_tokens)
            return False
        return True

    async def _read(
        self, load: _Load, hashes: Sequence[bytes], block_ids: Sequence[int], first: int
    ) -> tuple[int, int, float]:
        """Read from number ``first`` on; return blocks, those from storage, seconds in reads."""
        start, num_from_storage, total = first, 0, 0.0
        while load.is_wanted and start < len(hashes):
            end = min(start + self._batch, len(hashes))
            load.num_unread = (len(hashes) - start) * self._block_size
            read = await self._access.read(
                hashes[start:end], block_ids[start:end], hashes[start - 1] if start else None
            )
            total += read.seconds
            num_from_storage += read.num_from_storage
            self._learn(read.num_from_storage * self._block_size, read.storage_seconds)
            start += read.num_blocks
            if start < end:
                break
        return start - first, num_from_storage, total

    def _moved(self, num_blocks: int, num_from_storage: int) -> int:
        """Return the bytes that blocks had where they came from, the tier's being the pool's."""
        num_stored = min(num_blocks, num_from_storage)
        stored_bytes = num_stored * self._access.stored_block_bytes
        return stored_bytes + (num_blocks - num_stored) * self._access.block_bytes

    def _learn(self, num_tokens: int, seconds: float) -> None:
        """Misses cost time and bring nothing: they say nothing of how fast blocks are read."""
        if num_tokens and seconds > 0:
            keep = 1 - EWMA_WEIGHT
            self._read_tokens = keep * self._read_tokens + EWMA_WEIGHT * num_tokens
            self._read_seconds = keep * self._read_seconds + EWMA_WEIGHT * seconds
