"""The prefill side of one pair of workers: a stream, and the communicator that it joined."""

from collections.abc import Callable, Sequence
from time import monotonic
from typing import TypeVar

import numpy as np

from common.errors import RemoteProtocolError, TransferError
from common.messages.fields import NcclPoolHandle
from common.transfer.joined_link import FrameRefusedError
from common.transfer.nccl_driver import SENDER, Communicator, NcclDriver, Piece
from common.transfer.nccl_pace import Progress, hand_over, has_settled
from common.transfer.nccl_wire import (
    ANSWER_BYTES,
    DONE,
    GO,
    JOIN,
    PROBE,
    REFUSED,
    WRITE,
    pack_frame,
    parse_answer,
    to_groups,
)
from common.transfer.pace import Pace
from common.transfer.tcp_stream import open_stream
from common.transfer.tcp_wire import GRANT_ID_BYTES, NO_GRANT, Extents

JOIN_SECONDS = 20.0
"""How long two live workers may take to join; a fraction of it, as a rule."""

_T = TypeVar("_T")


class NotStartedError(TransferError):
    """The connection ended before the peer took the frame: nothing of it was begun."""


class NcclConnection:
    """For one thread at a time. After any error but ``FrameRefusedError`` it must be closed."""

    def __init__(self, driver: NcclDriver, handle: NcclPoolHandle, stall_seconds: float) -> None:
        """Connect and join; OSError, TransferError or RemoteProtocolError says why not."""
        self._secret = handle.secret
        self._sequence = 0
        self._is_confirmed = False
        self._communicator: Communicator | None = None
        self._sock, self._session = open_stream(
            handle.host, handle.port, handle.secret, stall_seconds
        )
        self._pace = Pace(self._look, stall_seconds)
        try:
            self._communicator = self._join(driver)
        except BaseException:
            self.close()
            raise

    def write(
        self,
        pieces: Sequence[Piece],
        extents: Extents,
        token: bytes,
        meanwhile: Callable[[], _T],
    ) -> _T:
        """Send pieces to the extents and wait until they are there.

        Calls ``meanwhile`` while the bytes are under way and returns what it returns.
        """
        key = (token[:GRANT_ID_BYTES], token[GRANT_ID_BYTES:])
        return self._send(WRITE, pieces, extents, key, meanwhile)

    def probe(self, pieces: Sequence[Piece], num_pages: int) -> float:
        """Send pieces of ``num_pages`` pages each that the peer drops; return the seconds."""
        start = monotonic()
        extents = np.array([(0, 0, num_pages)] * len(pieces), dtype=np.uint32)
        self._send(PROBE, pieces, extents, (NO_GRANT, self._secret), lambda: None)
        return monotonic() - start

    def is_stale(self) -> bool:
        """Whether the peer has ended it since its last use."""
        try:
            return not self._sock.is_quiet()
        except TransferError:
            return True

    def close(self) -> None:
        """End the communicator and the stream; a second call does nothing."""
        communicator, self._communicator = self._communicator, None
        self._sock.cut()
        if communicator is not None:
            # The source blocks may be used again by whoever hears of the end.
            has_settled(communicator.abort())
        self._sock.close()

    # ---- frames ----------------------------------------------------------------------------------

    def _join(self, driver: NcclDriver) -> Communicator:
        unique_id = driver.new_unique_id()
        sequence = self._say(JOIN, unique_id, (NO_GRANT, self._secret))
        if self._hear(sequence) != GO:
            raise FrameRefusedError("the peer has no room for another communicator")
        communicator = driver.join(unique_id, SENDER)
        self._communicator = communicator
        self._is_confirmed = False
        self._pace.until(
            lambda: int(communicator.is_ready()) + int(self._is_confirmed), 2, JOIN_SECONDS
        )
        return communicator

    def _send(
        self,
        kind: int,
        pieces: Sequence[Piece],
        extents: Extents,
        key: tuple[bytes, bytes],
        meanwhile: Callable[[], _T],
    ) -> _T:
        communicator = self._communicator
        if communicator is None:
            raise TransferError("the connection is closed")
        groups = to_groups(pieces)
        try:
            sequence = self._say(kind, extents.astype("<u4").tobytes(), key)
            code = self._hear(sequence)
        except TransferError as error:
            raise NotStartedError(str(error)) from error
        if code == REFUSED:
            raise FrameRefusedError("the peer does not grant it, or not any more")
        if code != GO:
            raise RemoteProtocolError("an answer out of turn")
        self._is_confirmed = False
        marks = hand_over(communicator, communicator.send, groups, self._pace)
        result = meanwhile()
        self._pace.until(Progress(marks), len(marks))
        if not self._is_confirmed:
            self._confirm()
        return result

    def _say(self, kind: int, payload: bytes, key: tuple[bytes, bytes]) -> int:
        sequence = self._sequence
        self._sequence += 1
        self._sock.send([memoryview(pack_frame(kind, sequence, payload, key, self._session))])
        return sequence

    def _hear(self, sequence: int) -> int:
        """Return the answer to the frame, GO or REFUSED."""
        answer = memoryview(bytearray(ANSWER_BYTES))
        self._sock.receive([answer])
        return parse_answer(bytes(answer), sequence)

    def _look(self) -> None:
        """See whether the peer has confirmed the last frame, or is gone."""
        if not self._is_confirmed and not self._sock.is_quiet():
            self._confirm()

    def _confirm(self) -> None:
        """Receive the peer's word that the last frame is done."""
        if self._hear(self._sequence - 1) != DONE:
            raise RemoteProtocolError("an answer out of turn")
        self._is_confirmed = True
