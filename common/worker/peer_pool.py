"""A paired peer's pool as the worker's loop writes it."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

from common.errors import TransferError
from common.messages.fields import ExportedPool
from common.transfer.backend import LinkRate, PeerLink, TransferBackend, WriteReport


class WritablePool:
    """An opened pool, and the thread that waits for its writes. Lives in the loop."""

    def __init__(
        self, link: PeerLink, rate: LinkRate, copier: Executor, own_copier: Executor | None
    ) -> None:
        self.rate = rate
        """The link's rate at its opening, beside what the hardware gives."""
        self._link = link
        self._copier = copier
        self._own_copier = own_copier
        self._num_writes = 0
        self._is_ending = False

    @classmethod
    async def open(
        cls, backend: TransferBackend, handle: ExportedPool, copier: Executor
    ) -> "WritablePool":
        """Open a peer's pool and measure the way there; TransferError says what to check.

        Memory is copied in the worker's one ``copier``; a peer behind a network gets a thread of
        its own, so that a slow one holds nobody up.
        """
        own = ThreadPoolExecutor(1, "send") if backend.is_networked else None
        loop = asyncio.get_running_loop()
        try:
            link = await loop.run_in_executor(own or copier, backend.open_peer, handle)
            rate = await loop.run_in_executor(own or copier, link.measure)
        except TransferError:
            if own is not None:
                own.shutdown(wait=False)
            raise
        return cls(link, rate, own or copier, own)

    def write(
        self, sources: Sequence[int], targets: Sequence[int], token: bytes
    ) -> asyncio.Future[WriteReport]:
        """Start to write blocks in the thread now (see ``PeerLink.write``).

        The thread begins before the caller's own work goes on: a handoff waits for it.
        """
        loop = asyncio.get_running_loop()
        if self._is_ending:
            refused: asyncio.Future[WriteReport] = loop.create_future()
            refused.set_exception(TransferError("the peer is gone"))
            return refused
        self._num_writes += 1
        writing = loop.run_in_executor(self._copier, self._link.write, sources, targets, token)
        writing.add_done_callback(self._written)
        return writing

    def end(self) -> None:
        """Close the pool as soon as no write is in flight."""
        self._is_ending = True
        if self._num_writes == 0:
            self._link.close()
            if self._own_copier is not None:
                self._own_copier.shutdown(wait=False)

    def _written(self, writing: asyncio.Future[WriteReport]) -> None:
        if writing.cancelled():
            return  # by a task that ended: the thread may be in the middle of the write
        self._num_writes -= 1
        if self._is_ending:
            self.end()
