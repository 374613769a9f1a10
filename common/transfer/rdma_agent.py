"""What transport ``rdma`` needs of the library that reads other hosts' memory.

Its logic runs without the library. The prefill side registers its pool and lets peers read it; the
decode side begins the reads, into its own pool.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

Region = tuple[int, int]
"""``(address, num_bytes)`` of adjacent memory."""

Piece = tuple[int, int, int]
"""``(own address, peer's address, num_bytes)`` of bytes that are read from there to here."""


class MemoryKind(StrEnum):
    """Where registered memory is."""

    HOST = "host"
    GPU = "gpu"


@dataclass(frozen=True, slots=True)
class SourcePool:
    """A pool that may be read: what its owner tells the decode side on their own stream.

    ``metadata`` is the library's description of the owner and of what it registered. It is the
    right to reach that memory, so it is for no log.
    """

    kind: MemoryKind
    device: int
    address: int
    num_blocks: int
    metadata: bytes = field(repr=False)


class Read(Protocol):
    """Bytes that are on their way into the own memory."""

    def is_done(self) -> bool:
        """Whether all are there; TransferError when that failed, though some may still come.

        Moves the work on where the hardware does not.
        """
        ...


class RdmaAgent(Protocol):
    """One party, with all memory registered that it was made for. For one thread at a time.

    No call waits for a peer. A read that was begun can be ended by ``close`` alone: what forgets a
    peer, or gives up a request, does not keep bytes from arriving.
    """

    @property
    def metadata(self) -> bytes:
        """What a peer needs to read the registered memory."""
        ...

    def connect(self, metadata: bytes) -> str:
        """Take a peer's metadata; return the peer's name. TransferError where it cannot be used."""
        ...

    def forget(self, name: str) -> None:
        """Let go of a peer; one that is gone is fine."""
        ...

    def read(self, name: str, source: SourcePool, pieces: Sequence[Piece]) -> Read:
        """Begin to read pieces from a peer's memory; TransferError when that cannot be begun."""
        ...

    def progress(self) -> None:
        """Do our part of what peers do with our memory, where the hardware does not do it."""
        ...

    def close(self) -> None:
        """End everything: on return no byte is written into the memory any more."""
        ...


class RdmaLibrary(Protocol):
    """Makes agents for the own pool. Calls may come from any thread."""

    @property
    def port_rate(self) -> float:
        """What this host's fastest active adapter could give, in GB/s; 0 where there is none."""
        ...

    def new_agent(self) -> RdmaAgent:
        """Register the memory with an agent of a new name; TransferError says why not."""
        ...
