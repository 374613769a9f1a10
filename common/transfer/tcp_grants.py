"""Who may write where: the grants of one exported pool, and the fences that take them back.

A grant lets the holder of its token write the blocks of one transfer. A stream enters a grant
before it reads bytes into those blocks and leaves it afterwards. Revoking takes the grant away,
cuts the streams that are inside and waits until they have left: from then on no byte can reach the
blocks, whatever the peer does.
"""

import threading
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from common.errors import LocalProtocolError, RemoteProtocolError, TransferError
from common.ids import TransferId
from common.kv.layout import PAGE_BYTES
from common.transfer.tcp_wire import (
    GRANT_ID_BYTES,
    TOKEN_BYTES,
    Extents,
    FrameHeader,
    is_proven,
    new_token,
)

FENCE_SECONDS = 10.0
"""How long a cut stream may take to leave; microseconds, unless the machine stands still."""


class Writer(Protocol):
    """A stream that writes into the pool."""

    def cut(self) -> None:
        """End the stream at once."""
        ...


@dataclass(slots=True, eq=False)
class _Grant:
    transfer_id: TransferId
    token: bytes
    starts: list[int]
    """First blocks of the granted runs, in order; no two runs touch."""
    ends: list[int]
    is_open: bool = True
    writers: set[Writer] = field(default_factory=set)

    def holds(self, first: int, last: int) -> bool:
        """Tell whether every block from ``first`` to ``last`` is granted."""
        place = bisect_right(self.starts, first) - 1
        return place >= 0 and last < self.ends[place]


class WriteGrants:
    """The grants of a pool of ``num_blocks`` blocks of ``block_bytes`` bytes. Thread-safe."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self._num_blocks = num_blocks
        self._pages_per_block = block_bytes // PAGE_BYTES
        self._changed = threading.Condition()
        self._by_id: dict[bytes, _Grant] = {}
        self._by_transfer: dict[TransferId, _Grant] = {}

    def grant(
        self, transfer_id: TransferId, block_ids: Sequence[int], token: bytes | None = None
    ) -> bytes:
        """Let the holder of the returned token write these blocks.

        ``token`` grants again what was revoked, to who holds it. LocalProtocolError when the
        transfer has a grant, or a block is not the pool's.
        """
        granted = new_token() if token is None else token
        if len(granted) != TOKEN_BYTES:
            raise LocalProtocolError(f"a token of {len(granted)} bytes")
        starts, ends = _runs(block_ids)
        if starts and not 0 <= starts[0] <= ends[-1] <= self._num_blocks:
            raise LocalProtocolError(f"blocks {starts[0]} to {ends[-1] - 1} of {self._num_blocks}")
        grant = _Grant(transfer_id, granted, starts, ends)
        with self._changed:
            if transfer_id in self._by_transfer:
                raise LocalProtocolError(f"transfer {transfer_id} has a grant already")
            self._by_transfer[transfer_id] = grant
            self._by_id[granted[:GRANT_ID_BYTES]] = grant
        return granted

    def revoke(self, transfer_id: TransferId) -> None:
        """Take the grant back; on return no byte is written for it any more.

        Waits for streams that are inside, usually none. A transfer without a grant is fenced
        already. TransferError when a stream does not leave: its blocks must not be used again.
        """
        with self._changed:
            grant = self._by_transfer.get(transfer_id)
            if grant is None:
                return
            if grant.is_open:
                grant.is_open = False
                del self._by_id[grant.token[:GRANT_ID_BYTES]]
            for writer in grant.writers:
                writer.cut()
            if not self._changed.wait_for(lambda: not grant.writers, FENCE_SECONDS):
                raise TransferError(
                    f"{len(grant.writers)} streams still write for transfer {transfer_id}"
                    f" {FENCE_SECONDS:g} s after they were cut"
                )
            if self._by_transfer.get(transfer_id) is grant:
                del self._by_transfer[transfer_id]

    def enter(
        self, header: FrameHeader, rows: bytes, extents: Extents, at: "Session"
    ) -> TransferId:
        """Admit a stream's frame and return its transfer; the stream must ``leave`` afterwards.

        RemoteProtocolError, with nothing changed, for an unknown or revoked grant, a wrong proof,
        or an extent outside of the grant.
        """
        with self._changed:
            grant = self._by_id.get(header.grant_id)
        if grant is None:
            raise RemoteProtocolError("a write without a grant")
        if not is_proven(
            header.proof, grant.token[GRANT_ID_BYTES:], at.nonces, header.signed, rows
        ):
            raise RemoteProtocolError("a write whose token is wrong")
        self._refuse_outside(grant, extents)
        with self._changed:
            if not grant.is_open:
                raise RemoteProtocolError(f"a write for the revoked transfer {grant.transfer_id}")
            grant.writers.add(at.writer)
        return grant.transfer_id

    def leave(self, transfer_id: TransferId, writer: Writer) -> None:
        """The stream writes no more for the frame that it entered with."""
        with self._changed:
            self._by_transfer[transfer_id].writers.discard(writer)
            self._changed.notify_all()

    @property
    def num_open(self) -> int:
        """Transfers that may be written."""
        with self._changed:
            return len(self._by_id)

    def _refuse_outside(self, grant: _Grant, extents: Extents) -> None:
        for block, first_page, num_pages in extents.tolist():
            last = block + (first_page + num_pages - 1) // self._pages_per_block
            is_shaped = num_pages > 0 and first_page < self._pages_per_block
            if not is_shaped or not grant.holds(block, last):
                raise RemoteProtocolError(
                    f"a write of {num_pages} pages from page {first_page} of block {block} on,"
                    f" outside of transfer {grant.transfer_id}"
                )


@dataclass(frozen=True, slots=True)
class Session:
    """A stream and the nonces of both of its sides."""

    writer: Writer
    nonces: bytes


def _runs(block_ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return first blocks and ends of the runs of adjacent blocks, in order."""
    ids = np.unique(np.asarray(block_ids, dtype=np.int64))
    if not len(ids):
        return [], []
    breaks = np.flatnonzero(np.diff(ids) != 1)
    starts = ids[np.concatenate(([0], breaks + 1))]
    ends = ids[np.concatenate((breaks, [len(ids) - 1]))] + 1
    return starts.tolist(), ends.tolist()
