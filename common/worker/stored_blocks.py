"""What a worker does with the store: looks prompts up, loads prefixes, keeps what it computed."""

import asyncio

import structlog

from common.config.preload_file import Prompts
from common.ids import RequestId
from common.kv.blocks import BlockManager
from common.kv.prefix_cache import HASH_BYTES
from common.messages.control import LookUpPrefix, PrefixFound
from common.telemetry.progress import Progress
from common.telemetry.store_metrics import StoreMetrics
from common.worker.control import ControlLink
from common.worker.kept_blocks import KeptBlocks
from common.worker.prefetcher import Prefetcher
from common.worker.preload import preload
from common.worker.store_access import StoreAccess
from common.worker.store_measures import StoreMeter
from common.worker.stored_prefixes import StoredPrefixes

log = structlog.get_logger()

MAX_LOOK_UPS = 256
"""Look-ups that may wait; beyond, nothing is found."""


class StoredBlocks:
    """One worker's use of the store. Lives in the loop; ``serve`` does the work."""

    def __init__(
        self,
        access: StoreAccess,
        blocks: BlockManager,
        block_size: int,
        to_preload: Prompts = (),
        *,
        is_prefetching: bool = True,
    ) -> None:
        """Without a host tier nothing is prefetched, whatever ``is_prefetching`` says."""
        self._access = access
        self._to_preload = to_preload
        self._pool_tokens = blocks.counts().total * block_size
        self._preloading: asyncio.Task[int] | None = None
        self._look_ups: asyncio.Queue[tuple[RequestId, list[bytes]]] = asyncio.Queue(MAX_LOOK_UPS)
        self.prefixes = StoredPrefixes(access, blocks, block_size)
        self.kept = KeptBlocks(access, blocks)
        self.prefetcher: Prefetcher | None = None
        if is_prefetching and access.has_tier:
            self.prefetcher = Prefetcher(access, self.prefixes)

    def attach(self, control: ControlLink, metrics: StoreMetrics, wake: asyncio.Event) -> None:
        """Join to the controller, and to what is moved by ``measure``.

        ``wake`` is set when blocks of the pool are let go.
        """
        self._control = control
        self.kept.attach(metrics, wake)
        self.prefixes.attach(wake)
        access = self._access
        self._meter = StoreMeter(
            metrics,
            access.stats(),
            access.link_stats(),
            access.buffer_stats(),
            access.codec_stats(),
        )

    def measure(self) -> None:
        """Move the metrics by what the store and its link have counted since the last call."""
        access = self._access
        self._meter.take(
            access.stats(), access.link_stats(), access.buffer_stats(), access.codec_stats()
        )

    @property
    def is_busy(self) -> bool:
        """Whether blocks of the pool are held for the store, or a request waits for it."""
        return self.kept.is_busy or self.prefixes.num_open > 0

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

    async def serve(self) -> None:
        """Work for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.prefixes.serve(), name="store reads")
            tasks.create_task(self._serve_look_ups(), name="store look-ups")
            tasks.create_task(self.kept.serve(), name="store writes")
            if self.prefetcher is not None:
                tasks.create_task(self.prefetcher.serve(), name="store prefetches")
            if self._to_preload:
                work = preload(self._to_preload, self.prefixes, self._pool_tokens, Progress())
                self._preloading = tasks.create_task(work, name="store preload")

    def stop_preloading(self) -> None:
        """Load nothing more but what requests wait for."""
        if self._preloading is not None:
            self._preloading.cancel()

    async def _serve_look_ups(self) -> None:
        while True:
            request_id, hashes = await self._look_ups.get()
            num_blocks = await self._access.longest_prefix(hashes)
            tell_found(self._control, request_id, num_blocks)


def tell_found(control: ControlLink, request_id: RequestId, num_blocks: int) -> None:
    """Answer a look-up."""
    control.send(PrefixFound(request_id=request_id, num_blocks=num_blocks), request_id)


def _unpack_hashes(payload: tuple[bytes, ...]) -> list[bytes] | None:
    """Return the hashes of the one frame; None for anything else."""
    if len(payload) != 1 or not payload[0] or len(payload[0]) % HASH_BYTES:
        return None
    frame = payload[0]
    return [frame[at : at + HASH_BYTES] for at in range(0, len(frame), HASH_BYTES)]
