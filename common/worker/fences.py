"""Keeps blocks held until no byte of a peer can reach them any more.

Shared memory cannot be fenced: there the peer's word or death is the fence, and everything here
happens at once. Over a network the own side fences, whatever the peer says and however the link is
cut.
"""

import asyncio
from collections.abc import Callable

import structlog

from common.errors import TransferError
from common.ids import TransferId
from common.transfer.backend import PoolExport

log = structlog.get_logger()


class WriteFences:
    """The fences of one decode side. Lives in the loop; ``release`` frees a transfer's blocks."""

    def __init__(self, tasks: asyncio.TaskGroup, release: Callable[[str], None]) -> None:
        self._tasks = tasks
        self._release = release
        self._freed: set[TransferId] = set()

    def is_freeing(self, transfer_id: TransferId) -> bool:
        """Whether the transfer is over, and its blocks are held until the fence stands."""
        return transfer_id in self._freed

    def free(self, export: PoolExport, transfer_id: TransferId) -> None:
        """Free the transfer's blocks as soon as no byte can reach them."""
        if not export.is_fencing:
            self._release(transfer_id)
            return
        self._freed.add(transfer_id)
        self.start(export, transfer_id, lambda: self._free_fenced(transfer_id))

    def start(self, export: PoolExport, transfer_id: TransferId, then: Callable[[], None]) -> None:
        """End the peer's writing, where that can be done, and call ``then``."""
        if export.is_fencing:
            self._tasks.create_task(
                self._fence_and(export, transfer_id, then), name=f"fence {transfer_id}"
            )

    async def fence(self, export: PoolExport, transfer_id: TransferId) -> None:
        """End the peer's writing, where that can be done."""
        while export.is_fencing:
            try:
                await asyncio.to_thread(export.revoke, transfer_id)
            except TransferError as error:
                log.error("fence_late", transfer_id=transfer_id, reason=str(error))
            else:
                return

    async def _fence_and(
        self, export: PoolExport, transfer_id: TransferId, then: Callable[[], None]
    ) -> None:
        await self.fence(export, transfer_id)
        then()

    def _free_fenced(self, transfer_id: TransferId) -> None:
        self._freed.discard(transfer_id)
        self._release(transfer_id)
