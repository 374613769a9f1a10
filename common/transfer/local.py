"""Transport ``local``: prefill and decode share one pool, and nothing moves between workers.

What is left to copy are blocks inside of the pool: the partial last block of a forked choice.
"""

import threading
from collections.abc import Sequence
from dataclasses import replace

from common.errors import TransferError
from common.kv.pool import KVPool
from common.messages.fields import PoolHandle, TcpPoolHandle
from common.transfer.backend import LinkRate, WriteReport
from common.transfer.rates import measure_mapping
from common.transfer.runs import write_blocks
from common.transfer.verify import checksum_blocks


class LocalLink:
    """The own pool as source and target. One write at a time."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._is_closed = False
        self._lock = threading.Lock()

    def write(
        self, pairs_src: Sequence[int], pairs_dst: Sequence[int], token: bytes = b""
    ) -> WriteReport:
        """Copy blocks inside of the pool (see ``PeerLink``).

        A block that is its own target stays where it is and counts as no copy. A block that is
        both a source and another's target raises TransferError: the result would hang on order.
        """
        with self._lock:
            self._refuse_closed()
            if len(pairs_src) != len(pairs_dst):
                raise TransferError(
                    f"local: {len(pairs_src)} source and {len(pairs_dst)} target blocks"
                )
            moved = [pair for pair in zip(pairs_src, pairs_dst, strict=True) if pair[0] != pair[1]]
            both = {dst for _, dst in moved}.intersection(pairs_src)
            if both:
                raise TransferError(f"local: block {min(both)} is both a source and a target")
            pool = self._pool
            sources = [src for src, _ in moved]
            targets = [dst for _, dst in moved]
            report = write_blocks(pool.buffer, pool.buffer, (sources, targets), pool.block_bytes)
            if len(moved) == len(pairs_src):
                return report
            return replace(report, checksums=checksum_blocks(pool, pairs_dst))

    def measure(self) -> LinkRate:
        """Compare reading the pool with a plain memcpy."""
        with self._lock:
            self._refuse_closed()
            return measure_mapping(self._pool.buffer)

    def close(self) -> None:
        """Refuse further writes; the pool stays its owner's."""
        with self._lock:
            self._is_closed = True

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise TransferError("local: the link is closed")


class LocalBackend:
    """The worker as its own peer."""

    name = "local"
    is_networked = False

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    def open_peer(self, handle: PoolHandle | TcpPoolHandle) -> LocalLink:
        """Return a link to the own pool; TransferError when ``handle`` names another one."""
        if isinstance(handle, TcpPoolHandle):
            raise TransferError("local: the peer's pool is offered over tcp")
        if handle != self._pool.handle():
            raise TransferError(
                f"local: process {handle.pid} descriptor {handle.fd} is not this worker's own pool"
            )
        return LocalLink(self._pool)
