"""The decode side of one pair of workers: a stream, and the communicator that it joined."""

import threading
from contextlib import ExitStack
from dataclasses import dataclass
from time import monotonic

import structlog

from common.errors import FlowPathError, RemoteProtocolError, TransferError
from common.kv.layout import PAGE_BYTES
from common.transfer.nccl_driver import (
    RECEIVER,
    UNIQUE_ID_BYTES,
    AddressedPool,
    Communicator,
    NcclDriver,
    Piece,
)
from common.transfer.nccl_limit import CommunicatorLimit
from common.transfer.nccl_pace import Progress, hand_over, has_settled
from common.transfer.nccl_wire import (
    DONE,
    GO,
    HEADER_BYTES,
    JOIN,
    MAX_EXTENTS,
    MAX_PROBE_BYTES,
    PROBE,
    REFUSED,
    pack_answer,
    parse_header,
    payload_bytes,
    to_groups,
)
from common.transfer.pace import Pace
from common.transfer.tcp_grants import Session, WriteGrants
from common.transfer.tcp_socket import DataSocket
from common.transfer.tcp_wire import (
    EXTENT_BYTES,
    Extents,
    FrameHeader,
    is_proven,
    parse_extents,
)

log = structlog.get_logger()

JOIN_SECONDS = 20.0
GRACE_SECONDS = 0.25
"""How long a transfer that is revoked may take to end by itself, which keeps the communicator."""


@dataclass(frozen=True, slots=True)
class ReceivingSide:
    """What all streams of an exported pool share."""

    pool: AddressedPool
    driver: NcclDriver
    grants: WriteGrants
    limit: CommunicatorLimit
    secret: bytes
    stall_seconds: float


class _Fence:
    """The writer of one frame, as its grant knows it."""

    def __init__(self) -> None:
        self.cut_at: float | None = None

    def cut(self) -> None:
        """End the frame: at once, or by itself within the grace."""
        self.cut_at = monotonic()


class NcclReceiver:
    """Serves the frames of one stream in one thread; ``try_release`` may come from any."""

    def __init__(
        self, side: ReceivingSide, stream: DataSocket, address: str, nonces: bytes
    ) -> None:
        self._side = side
        self._stream = stream
        self._address = address
        self._nonces = nonces
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._payload = memoryview(bytearray(max(UNIQUE_ID_BYTES, MAX_EXTENTS * EXTENT_BYTES)))
        self._sequence = 0
        self._communicator: Communicator | None = None
        self._fence = _Fence()
        self._pace = Pace(self._look, side.stall_seconds)
        self._lock = threading.Lock()
        self._is_busy = False
        self._is_released = False

    def serve(self) -> None:
        """Serve frames until the stream ends; then the communicator is gone as well."""
        try:
            while self._serve_next():
                pass
        except RemoteProtocolError as error:
            log.warning("data_frame_refused", peer=self._address, reason=str(error))
        except TransferError as error:
            log.warning("data_stream_ended", peer=self._address, reason=str(error))
        finally:
            self._release()

    def try_release(self) -> bool:
        """End the communicator and the stream, unless a frame is being served."""
        with self._lock:
            if self._is_busy or self._is_released:
                return False
            self._is_released = True
        self._stream.cut()
        self._release()
        return True

    # ---- frames ----------------------------------------------------------------------------------

    def _serve_next(self) -> bool:
        """Serve one frame; False when the peer has ended the stream between two."""
        if not self._stream.receive_next(self._header):
            return False
        with self._lock:
            if self._is_released:
                return False
            self._is_busy = True
        try:
            self._serve_frame()
        finally:
            with self._lock:
                self._is_busy = False
            self._side.limit.used(self)
        self._sequence += 1
        return True

    def _serve_frame(self) -> None:
        header = parse_header(self._header, self._sequence)
        payload = self._payload[: payload_bytes(header)]
        self._stream.receive([payload])
        if header.kind == JOIN:
            self._join(header, bytes(payload))
            return
        with ExitStack() as stack:
            try:
                stack.enter_context(self._side.limit.moving(self._side.stall_seconds / 2))
            except TransferError as error:
                self._refuse(error)
                return
            if header.kind == PROBE:
                self._probe(header, bytes(payload))
            else:
                self._write(header, bytes(payload))

    def _join(self, header: FrameHeader, unique_id: bytes) -> None:
        self._require_secret(header, unique_id)
        if self._communicator is not None:
            raise RemoteProtocolError("it has joined already")
        try:
            self._side.limit.admit(self, self._side.stall_seconds / 2)
        except TransferError as error:
            self._refuse(error)
            return
        self._answer(GO)
        self._fence = _Fence()
        communicator = self._side.driver.join(unique_id, RECEIVER)
        self._communicator = communicator
        self._pace.until(lambda: int(communicator.is_ready()), 1, JOIN_SECONDS)
        self._answer(DONE)

    def _write(self, header: FrameHeader, payload: bytes) -> None:
        extents = parse_extents(memoryview(payload))
        fence = self._fence = _Fence()
        try:
            transfer_id = self._side.grants.enter(
                header, payload, extents, Session(fence, self._nonces)
            )
        except RemoteProtocolError as error:
            self._refuse(error)
            return
        try:
            self._receive(self._targets(extents))
        except TransferError as error:
            if self._release():
                self._side.grants.leave(transfer_id, fence)
            raise TransferError(f"transfer {transfer_id}: {error}") from error
        except BaseException:
            if self._release():
                self._side.grants.leave(transfer_id, fence)
            raise
        self._side.grants.leave(transfer_id, fence)
        self._answer(DONE)

    def _probe(self, header: FrameHeader, payload: bytes) -> None:
        self._require_secret(header, payload)
        lengths = [
            num_pages * PAGE_BYTES
            for _, _, num_pages in parse_extents(memoryview(payload)).tolist()
        ]
        if not 0 < min(lengths) <= max(lengths) <= MAX_PROBE_BYTES:
            raise RemoteProtocolError(f"a probe of {max(lengths)} bytes a piece")
        self._fence = _Fence()
        try:
            scratch = self._side.driver.allocate(max(lengths))
        except TransferError as error:
            self._refuse(error)
            return
        try:
            self._receive([(scratch.address, length) for length in lengths])
        except BaseException:
            if self._release():
                scratch.free()
            raise
        scratch.free()
        self._answer(DONE)

    def _receive(self, pieces: list[Piece]) -> None:
        """Receive all pieces; afterwards, or after ``_release``, nothing is received any more."""
        communicator = self._communicator
        if communicator is None:
            raise RemoteProtocolError("it has not joined")
        self._answer(GO)
        marks = hand_over(communicator, communicator.receive, to_groups(pieces), self._pace)
        self._pace.until(Progress(marks), len(marks))

    # ---- parts -----------------------------------------------------------------------------------

    def _targets(self, extents: Extents) -> list[Piece]:
        pool = self._side.pool
        return [
            (
                pool.address + block * pool.block_bytes + first_page * PAGE_BYTES,
                num_pages * PAGE_BYTES,
            )
            for block, first_page, num_pages in extents.tolist()
        ]

    def _look(self) -> None:
        """End a wait whose peer is gone or whose grant was taken back."""
        cut_at = self._fence.cut_at
        if cut_at is not None and monotonic() - cut_at > GRACE_SECONDS:
            raise TransferError("it was revoked")
        if not self._stream.is_quiet():
            raise RemoteProtocolError("it speaks before its turn")

    def _release(self) -> bool:
        """Abort the communicator; False when the device may still write for it."""
        communicator, self._communicator = self._communicator, None
        if communicator is None:
            return True
        is_settled = has_settled(communicator.abort())
        if not is_settled:
            log.error("device_does_not_settle", peer=self._address)
        self._side.limit.remove(self)
        return is_settled

    def _require_secret(self, header: FrameHeader, payload: bytes) -> None:
        if not is_proven(header.proof, self._side.secret, self._nonces, header.signed, payload):
            raise RemoteProtocolError("a frame without proof")

    def _refuse(self, error: FlowPathError) -> None:
        log.warning("data_frame_refused", peer=self._address, reason=str(error))
        self._answer(REFUSED)

    def _answer(self, code: int) -> None:
        self._stream.send([memoryview(pack_answer(code, self._sequence))])
