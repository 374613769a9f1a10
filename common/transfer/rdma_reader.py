"""The decode side of one pair of workers: a stream on which the peer says what to read."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

import numpy as np
import structlog

from common.errors import FlowPathError, RemoteProtocolError, TransferError
from common.kv.layout import PAGE_BYTES
from common.transfer.pace import Pace
from common.transfer.rdma_agent import Piece, SourcePool
from common.transfer.rdma_memory import RdmaMemory
from common.transfer.rdma_shared import Remote, SharedAgent, SharedRead
from common.transfer.rdma_wire import (
    DONE,
    HEADER_BYTES,
    JOIN,
    MAX_PAYLOAD_BYTES,
    MAX_PROBE_BYTES,
    MOVED,
    PROBE,
    REFUSED,
    Runs,
    pack_answer,
    parse_header,
    parse_runs,
    parse_source,
    payload_bytes,
)
from common.transfer.tcp_grants import Session, WriteGrants
from common.transfer.tcp_socket import DataSocket
from common.transfer.tcp_wire import Extents, FrameHeader, is_proven

log = structlog.get_logger()

REQUEST_BYTES = 64 * 1024 * 1024
"""Of one request, about: the least progress that is seen."""
MAX_REQUEST_PIECES = 1024
MAX_REQUESTS = 4
"""Under way at once."""
SETTLE_SECONDS = 5.0
"""How long requests that are not wanted any more may take to end, before the agent is ended."""
TOLD_PER_STALL = 4
"""How often the peer is told, while it would give up, that bytes move."""
NUM_LOOKS = 8
"""Looks in a row where processors do an adapter's work, which goes on while one looks."""


@dataclass(frozen=True, slots=True)
class ReadingSide:
    """What all streams of an exported pool share."""

    memory: RdmaMemory
    agent: SharedAgent
    grants: WriteGrants
    secret: bytes
    stall_seconds: float
    is_offloaded: bool
    """Whether adapters move the bytes by themselves."""


class _Fence:
    """The reader of one frame, as its grant knows it."""

    def __init__(self) -> None:
        self.is_cut = False

    def cut(self) -> None:
        """Begin no further request; those under way end by themselves, or with the agent."""
        self.is_cut = True


class _Requests:
    """The requests of one frame, a few at a time and in order."""

    def __init__(self, remote: Remote, source: SourcePool, pieces: Sequence[Piece]) -> None:
        self._remote = remote
        self._source = source
        self._waiting = deque(to_requests(pieces))
        self._open: deque[SharedRead] = deque()
        self.goal = len(self._waiting)
        self.num_done = 0

    def move(self) -> int:
        """Begin what may begin and look at what was begun; return how many are done."""
        while self._waiting and len(self._open) < MAX_REQUESTS:
            self._open.append(self._remote.read(self._source, self._waiting.popleft()))
        while self._open and self._open[0].is_done():
            self._open.popleft()
            self.num_done += 1
        return self.num_done

    def settle(self) -> None:
        """Return when no byte comes any more for what was begun, whatever it takes."""
        self._waiting.clear()
        pace = Pace(lambda: None, SETTLE_SECONDS)
        goal = self.num_done + len(self._open)
        try:
            pace.until(self.move, goal)
        except TransferError:
            self._remote.end(self._open)


class RdmaReader:
    """Serves the frames of one stream in one thread."""

    def __init__(self, side: ReadingSide, stream: DataSocket, address: str, nonces: bytes) -> None:
        self._side = side
        self._stream = stream
        self._address = address
        self._nonces = nonces
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._payload = memoryview(bytearray(MAX_PAYLOAD_BYTES))
        self._sequence = 0
        self._source: SourcePool | None = None
        self._remote: Remote | None = None
        self._told_at = 0.0
        self._fence = _Fence()
        self._pace = Pace(self._look, side.stall_seconds)

    def serve(self) -> None:
        """Serve frames until the stream ends; then nothing of the peer's is read any more."""
        try:
            while self._serve_next():
                pass
        except RemoteProtocolError as error:
            log.warning("data_frame_refused", peer=self._address, reason=str(error))
        except TransferError as error:
            log.warning("data_stream_ended", peer=self._address, reason=str(error))
        finally:
            if self._remote is not None:
                self._remote.forget()

    # ---- frames ----------------------------------------------------------------------------------

    def _serve_next(self) -> bool:
        """Serve one frame; False when the peer has ended the stream between two."""
        if not self._stream.receive_next(self._header):
            return False
        header = parse_header(self._header, self._sequence)
        view = self._payload[: payload_bytes(header)]
        self._stream.receive([view])
        payload = bytes(view)
        self._fence = _Fence()
        self._told_at = monotonic()
        if header.kind == JOIN:
            self._join(header, payload)
        elif header.kind == PROBE:
            self._probe(header, payload)
        else:
            self._write(header, payload)
        self._sequence += 1
        return True

    def _join(self, header: FrameHeader, payload: bytes) -> None:
        self._require_secret(header, payload)
        if self._source is not None:
            raise RemoteProtocolError("it has joined already")
        self._source = parse_source(payload)
        self._connected(self._source)
        self._answer(DONE)

    def _write(self, header: FrameHeader, payload: bytes) -> None:
        source, memory = self._joined(), self._side.memory
        try:
            runs = parse_runs(payload, source.num_blocks, memory.num_blocks)
            transfer_id = self._side.grants.enter(
                header, payload, self._targets(runs), Session(self._fence, self._nonces)
            )
        except RemoteProtocolError as error:
            self._refuse(error)
            return
        size = memory.block_bytes
        pieces = [
            (memory.address + to * size, source.address + at * size, length * size)
            for at, to, length in runs.tolist()
        ]
        try:
            self._read(source, pieces)
        except FlowPathError as error:
            # After any other error bytes may still come: the blocks stay fenced off.
            self._side.grants.leave(transfer_id, self._fence)
            raise TransferError(f"transfer {transfer_id}: {error}") from error
        self._side.grants.leave(transfer_id, self._fence)
        self._answer(DONE)

    def _probe(self, header: FrameHeader, payload: bytes) -> None:
        self._require_secret(header, payload)
        source, memory = self._joined(), self._side.memory
        left = int(np.frombuffer(payload, dtype="<u4")[2]) * PAGE_BYTES
        if not 0 < left <= MAX_PROBE_BYTES:
            raise RemoteProtocolError(f"a probe of {left} bytes")
        address, room = memory.scratch
        room = min(room, source.num_blocks * memory.block_bytes)
        pieces: list[Piece] = []
        while left:
            pieces.append((address, source.address, min(left, room)))
            left -= pieces[-1][2]
        self._read(source, pieces)
        self._answer(DONE)

    def _read(self, source: SourcePool, pieces: list[Piece]) -> None:
        """Read all pieces; afterwards, also after an error, no byte of them comes any more."""
        requests = _Requests(self._connected(source), source, pieces)

        def move() -> int:
            self._refuse_cut()
            before = requests.num_done
            for _ in range(1 if self._side.is_offloaded else NUM_LOOKS):
                if requests.move() == requests.goal:
                    break
            if requests.num_done > before:
                self._tell_progress()
            return requests.num_done

        try:
            self._pace.until(move, requests.goal)
        except BaseException:
            requests.settle()
            raise

    # ---- parts -----------------------------------------------------------------------------------

    def _targets(self, runs: Runs) -> Extents:
        pages_per_block = self._side.memory.block_bytes // PAGE_BYTES
        extents: Extents = np.zeros((len(runs), 3), dtype=np.uint32)
        extents[:, 0] = runs[:, 1]
        extents[:, 2] = runs[:, 2] * np.uint32(pages_per_block)
        return extents

    def _joined(self) -> SourcePool:
        if self._source is None:
            raise RemoteProtocolError("it has not joined")
        return self._source

    def _connected(self, source: SourcePool) -> Remote:
        """Return the peer, connected anew where the agent has been ended meanwhile."""
        old = self._remote
        if old is not None and old.is_current:
            return old
        remote = self._remote = self._side.agent.connect(source.metadata)
        if old is not None:
            old.forget()
        return remote

    def _look(self) -> None:
        """End a wait whose peer is gone."""
        if not self._stream.is_quiet():
            raise RemoteProtocolError("it speaks before its turn")

    def _refuse_cut(self) -> None:
        """Begin nothing more for a grant that was taken back."""
        if self._fence.is_cut:
            raise TransferError("it was revoked")

    def _tell_progress(self) -> None:
        """Say that bytes move, often enough for the peer's patience."""
        now = monotonic()
        if now - self._told_at > self._side.stall_seconds / TOLD_PER_STALL:
            self._told_at = now
            self._answer(MOVED)

    def _require_secret(self, header: FrameHeader, payload: bytes) -> None:
        if not is_proven(header.proof, self._side.secret, self._nonces, header.signed, payload):
            raise RemoteProtocolError("a frame without proof")

    def _refuse(self, error: FlowPathError) -> None:
        log.warning("data_frame_refused", peer=self._address, reason=str(error))
        self._answer(REFUSED)

    def _answer(self, code: int) -> None:
        self._stream.send([memoryview(pack_answer(code, self._sequence))])


def to_requests(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Cut pieces into requests of bounded length."""
    requests: list[list[Piece]] = []
    open_bytes = REQUEST_BYTES
    for to, at, length in pieces:
        for offset in range(0, length, REQUEST_BYTES):
            num_bytes = min(REQUEST_BYTES, length - offset)
            if open_bytes + num_bytes > REQUEST_BYTES or len(requests[-1]) == MAX_REQUEST_PIECES:
                requests.append([])
                open_bytes = 0
            requests[-1].append((to + offset, at + offset, num_bytes))
            open_bytes += num_bytes
    return requests
