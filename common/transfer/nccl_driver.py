"""What transport ``nccl`` needs of NCCL and of the device; its logic runs without either."""

from collections.abc import Sequence
from typing import Protocol

from common.kv.pool import BlockPool

UNIQUE_ID_BYTES = 128
SENDER = 0
"""Rank of the prefill side."""
RECEIVER = 1
"""Rank of the decode side."""

Piece = tuple[int, int]
"""``(address, num_bytes)`` of adjacent memory of the own device."""


class AddressedPool(BlockPool, Protocol):
    """A pool whose memory has an address on the device."""

    @property
    def address(self) -> int:
        """Where block 0 begins."""
        ...


class Mark(Protocol):
    """A point in the work that was handed over to a communicator."""

    def is_done(self) -> bool:
        """Whether the device has come past it."""
        ...


class Communicator(Protocol):
    """Two ranks that were joined. For one thread at a time; no call waits for the peer.

    What was handed over is done in order. The next call must wait until ``is_ready``.
    """

    def is_ready(self) -> bool:
        """Whether what was begun last, joining or a group, is under way; TransferError if not."""
        ...

    def send(self, pieces: Sequence[Piece]) -> None:
        """Begin to send the pieces to the other rank as one group."""
        ...

    def receive(self, pieces: Sequence[Piece]) -> None:
        """Begin to receive the pieces from the other rank as one group."""
        ...

    def mark(self) -> Mark:
        """Mark the end of what was handed over until now."""
        ...

    def abort(self) -> Mark:
        """End everything at once, whatever the peer does; a second call changes nothing.

        Past the returned mark the device touches no memory for this communicator any more.
        """
        ...


class Scratch(Protocol):
    """Memory of the device that belongs to no block."""

    @property
    def address(self) -> int:
        """Where it begins."""
        ...

    def free(self) -> None:
        """Give it back."""
        ...


class NcclDriver(Protocol):
    """NCCL on one device. Calls may come from any thread."""

    def new_unique_id(self) -> bytes:
        """Return the name of a communicator that is yet to be joined, ``UNIQUE_ID_BYTES`` long."""
        ...

    def join(self, unique_id: bytes, rank: int) -> Communicator:
        """Begin to join the communicator of that name as one of two ranks."""
        ...

    def allocate(self, num_bytes: int) -> Scratch:
        """Take memory of the device; TransferError when there is none."""
        ...

    @property
    def device_uuid(self) -> str:
        """The device, as every process of the host calls it."""
        ...

    def limit_rate(self, peer_uuid: str) -> float:
        """Return what the way to another device could give, in GB/s.

        The sum of the NVLinks where those join the two, else the measured rate of the own bus: no
        network adapter is faster.
        """
        ...
