"""What a worker does with the store: looks prompts up, loads prefixes, keeps what it computed."""

import asyncio
from collections import deque
from collections.abc import Sequence

import structlog

from common.ids import RequestId
from common.kv.blocks import BlockManager, PublishedBlocks
from common.kv.prefix_cache import HASH_BYTES
from common.messages.control import LookUpPrefix, PrefixFound
from common.storage.interface import StoreStats
from common.worker.control import ControlLink
from common.worker.store_access import StoreAccess
from common.worker.stored_prefixes import StoredPrefixes

log = structlog.get_logger()

MAX_LOOK_UPS = 256
"""Look-ups that may wait; beyond, nothing is found."""


class StoredBlocks:
    """One worker's use of the store. Lives in the loop; ``serve`` does the work.

    Computed blocks are copied to the store's queue a sequence's turn at a time, in the order in
    which they were published, so that each follows the one before it.
    """

    def __init__(self, access: StoreAccess, blocks: BlockManager, block_size: int) -> None:
        self._access = access
        self._blocks = blocks
        self._computed: deque[PublishedBlocks] = deque()
        self._has_computed = asyncio.Event()
        self._look_ups: asyncio.Queue[tuple[RequestId, list[bytes]]] = asyncio.Queue(MAX_LOOK_UPS)
        self.prefixes = StoredPrefixes(access, blocks, block_size)
        self.num_dropped = 0
        """Computed blocks that the store's queue had no room for, and those after them."""

    def attach(self, control: ControlLink) -> None:
        """Join to the controller."""
        self._control = control

    @property
    def is_busy(self) -> bool:
        """Whether blocks of the pool are held for the store, or a request waits for it."""
        return bool(self._computed) or self.prefixes.num_open > 0

    def stats(self) -> StoreStats:
        """Return the store's own counts."""
        return self._access.stats()

    def look_up(self, order: LookUpPrefix, payload: tuple[bytes, ...]) -> None:
        """Tell the controller later how much of a prompt is stored."""
        hashes = _unpack_hashes(payload)
        if hashes is None:
            sizes = [len(frame) for frame in payload]
            log.error("order_ignored", request_id=order.request_id, reason=f"hashes of {sizes}")
            return
        try:
            self._look_ups.put_nowait((order.request_id, hashes))
        except asyncio.QueueFull:
            tell_found(self._control, order.request_id, 0)

    def keep(self, computed: Sequence[PublishedBlocks]) -> None:
        """Have computed blocks written; they are held until they are copied."""
        self._computed.extend(computed)
        if self._computed:
            self._has_computed.set()

    async def serve(self) -> None:
        """Work for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.prefixes.serve(), name="store reads")
            tasks.create_task(self._serve_look_ups(), name="store look-ups")
            tasks.create_task(self._serve_computed(), name="store writes")

    async def _serve_look_ups(self) -> None:
        while True:
            request_id, hashes = await self._look_ups.get()
            num_blocks = await self._access.longest_prefix(hashes)
            tell_found(self._control, request_id, num_blocks)

    async def _serve_computed(self) -> None:
        while True:
            await self._has_computed.wait()
            held = self._computed[0]
            self.num_dropped += await self._access.write(held)
            self._blocks.release(held.owner)
            self._computed.popleft()
            if not self._computed:
                self._has_computed.clear()


def tell_found(control: ControlLink, request_id: RequestId, num_blocks: int) -> None:
    """Answer a look-up."""
    control.send(PrefixFound(request_id=request_id, num_blocks=num_blocks), request_id)


def _unpack_hashes(payload: tuple[bytes, ...]) -> list[bytes] | None:
    """Return the hashes of the one frame; None for anything else."""
    if len(payload) != 1 or not payload[0] or len(payload[0]) % HASH_BYTES:
        return None
    frame = payload[0]
    return [frame[at : at + HASH_BYTES] for at in range(0, len(frame), HASH_BYTES)]
