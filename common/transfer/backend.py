"""The one interface of all transports: open a peer's pool, write blocks into it, close.

The prefill side writes; the decode side names blocks of its pool, never addresses. A backend is
made with the own pool as the source.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.ids import TransferId
from common.messages.fields import ExportedPool

MIN_LINK_RATIO = 0.5
"""A link below this share of its limit is flagged."""


@dataclass(frozen=True, slots=True)
class WriteReport:
    """What one write moved.

    ``num_calls`` is the number of operations that moved it: contiguous copies, each one call of the
    memory's or network's interface, and launches of a GPU kernel, which copy any number of blocks.
    """

    num_blocks: int
    num_calls: int
    num_bytes: int
    seconds: float
    checksums: NDArray[np.uint64]
    """The checksum of each pair's block, in the order in which the pairs were given."""


@dataclass(frozen=True, slots=True)
class LinkRate:
    """A link's measured rate beside its limit, measured in the same process with as many bytes.

    The limit of shared memory is a plain memcpy, that of ``tcp`` a bare stream on this host, that
    of a GPU's memory a copy inside of it, and that of another GPU's memory what joins the two.
    """

    num_bytes: int
    gigabytes_per_second: float
    limit_gigabytes_per_second: float

    @property
    def ratio(self) -> float:
        """The link's share of its limit."""
        return self.gigabytes_per_second / self.limit_gigabytes_per_second

    @property
    def is_flagged(self) -> bool:
        """Whether the link is far below what the hardware gives."""
        return self.ratio < MIN_LINK_RATIO


class PeerLink(Protocol):
    """A peer's pool that this process can write. Calls may come from any thread."""

    def write(
        self, pairs_src: Sequence[int], pairs_dst: Sequence[int], token: bytes = b""
    ) -> WriteReport:
        """Copy own block ``pairs_src[i]`` to the peer's block ``pairs_dst[i]``, for all i.

        ``token`` is what the peer granted with the reservation; shared memory needs none.

        Blocks until every byte is in the peer's pool, with the GIL released while bytes move, so
        call it in an executor thread. No target may be given twice. TransferError: nothing was
        written, or what was written is of no use.
        """
        ...

    def measure(self) -> LinkRate:
        """Measure the link without writing into the peer's blocks. Takes some milliseconds."""
        ...

    def close(self) -> None:
        """Let go of the peer's pool, after a write in progress; a second call does nothing."""
        ...


class TransferBackend(Protocol):
    """A transport, by the name that both sides report in ``PeerInfo.transports``."""

    @property
    def name(self) -> str:
        """The transport's name."""
        ...

    @property
    def is_networked(self) -> bool:
        """Whether its calls wait for the peer, so that each link needs a thread of its own."""
        ...

    def open_peer(self, handle: ExportedPool) -> PeerLink:
        """Open the pool that a peer exported; TransferError says what to check."""
        ...


class PoolExport(Protocol):
    """The decode side of a transport: the own pool, as paired peers may write it."""

    @property
    def name(self) -> str:
        """The transport's name."""
        ...

    @property
    def is_fencing(self) -> bool:
        """Whether ``revoke`` ends a peer's writing by itself, without the peer's word or death."""
        ...

    def handle(self) -> ExportedPool:
        """Return what a peer needs to open the pool. It may hold a secret."""
        ...

    def grant(
        self, transfer_id: TransferId, block_ids: Sequence[int], token: bytes | None = None
    ) -> bytes:
        """Let the holder of the returned token write these blocks; empty where none is needed.

        ``token`` grants again what was revoked, to who holds it already.
        """
        ...

    def revoke(self, transfer_id: TransferId) -> None:
        """Take the grant back; a transfer without one is fine.

        Where ``is_fencing``: on return no byte is written for it any more, and TransferError says
        that this is not certain. Waits, so call it in an executor thread.
        """
        ...

    def close(self) -> None:
        """Export nothing any more."""
        ...
