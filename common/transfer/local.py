"""Transport ``local``: prefill and decode share one pool, and nothing moves between workers.

What is left to copy are blocks inside of the pool: the partial last block of a forked choice.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from common.errors import TransferError
from common.kv.device_pool import DevicePool
from common.kv.pool import BlockPool, KVPool
from common.messages.fields import CudaPoolHandle, ExportedPool, PoolHandle
from common.transfer.backend import LinkRate, WriteReport
from common.transfer.cuda_ipc import own_link
from common.transfer.ranks import RankedPool, RanksLink
from common.transfer.rates import measure_mapping
from common.transfer.runs import write_blocks
from common.transfer.verify import checksum_blocks


@dataclass(frozen=True, slots=True)
class InnerCopies:
    """How blocks are copied inside of one pool, wherever its memory is."""

    write: Callable[[Sequence[int], Sequence[int]], WriteReport]
    measure: Callable[[], LinkRate]
    close: Callable[[], None]


class LocalLink:
    """The own pool as source and target. One write at a time."""

    def __init__(self, pool: BlockPool, copies: InnerCopies) -> None:
        self._pool = pool
        self._copies = copies
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
            report = self._copies.write([src for src, _ in moved], [dst for _, dst in moved])
            if len(moved) == len(pairs_src):
                return report
            return replace(report, checksums=checksum_blocks(self._pool, pairs_dst))

    def measure(self) -> LinkRate:
        """Compare reading the pool with a plain copy of its kind of memory."""
        with self._lock:
            self._refuse_closed()
            return self._copies.measure()

    def close(self) -> None:
        """Refuse further writes; the pool stays its owner's."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._copies.close()

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise TransferError("local: the link is closed")


class LocalBackend:
    """The worker as its own peer. Copies on a GPU wait for no step: none may touch the blocks."""

    name = "local"
    is_networked = False

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def open_peer(self, handle: ExportedPool) -> LocalLink:
        """Return a link to the own pool; TransferError when ``handle`` names another one."""
        if handle != self._pool.handle():
            raise TransferError(f"local: {_name_of(handle)} is not this worker's own pool")
        return LocalLink(self._pool, _inner_copies(self._pool))


def _inner_copies(pool: BlockPool) -> InnerCopies:
    if isinstance(pool, DevicePool):
        link = own_link("local", pool)
        return InnerCopies(link.write, link.measure, link.close)
    if isinstance(pool, RankedPool):
        ranks = RanksLink.within(pool)
        return InnerCopies(ranks.write, ranks.measure, ranks.close)
    if not isinstance(pool, KVPool):
        raise TransferError(f"local: no way to copy inside of a {type(pool).__name__}")

    def write(sources: Sequence[int], targets: Sequence[int]) -> WriteReport:
        return write_blocks(pool.buffer, pool.buffer, (sources, targets), pool.block_bytes)

    return InnerCopies(write, lambda: measure_mapping(pool.buffer), _nothing)


def _name_of(handle: ExportedPool) -> str:
    if isinstance(handle, PoolHandle):
        return f"process {handle.pid} descriptor {handle.fd}"
    if isinstance(handle, CudaPoolHandle):
        return f"process {handle.pid} GPU memory"
    return f"a pool that is offered over {handle.kind}"


def _nothing() -> None:
    """Close nothing: the pool stays its owner's."""
