"""The one interface of all transports: open a peer's pool, write blocks into it, close.

The prefill side writes; the decode side names blocks of its pool, never addresses. A backend is
made with the own pool as the source.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.messages.fields import PoolHandle

MIN_LINK_RATIO = 0.5
"""A link below this share of a plain memcpy's rate is flagged."""


@dataclass(frozen=True, slots=True)
class WriteReport:
    """What one write moved. ``num_calls`` is the number of contiguous copies."""

    num_blocks: int
    num_calls: int
    num_bytes: int
    seconds: float
    checksums: NDArray[np.uint64]
    """The checksum of each pair's block, in the order in which the pairs were given."""


@dataclass(frozen=True, slots=True)
class LinkRate:
    """A link's measured rate beside a plain memcpy of the same size in the same process."""

    num_bytes: int
    gigabytes_per_second: float
    memcpy_gigabytes_per_second: float

    @property
    def ratio(self) -> float:
        """The link's share of the memcpy's rate."""
        return self.gigabytes_per_second / self.memcpy_gigabytes_per_second

    @property
    def is_flagged(self) -> bool:
        """Whether the link is far below what the hardware gives."""
        return self.ratio < MIN_LINK_RATIO


class PeerLink(Protocol):
    """A peer's pool that this process can write. Calls may come from any thread."""

    def write(self, pairs_src: Sequence[int], pairs_dst: Sequence[int]) -> WriteReport:
        """Copy own block ``pairs_src[i]`` to the peer's block ``pairs_dst[i]``, for all i.

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

    def open_peer(self, handle: PoolHandle) -> PeerLink:
        """Open the pool that a peer exported; TransferError says what to check."""
        ...
