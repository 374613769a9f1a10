"""The prefill side of one pair of workers: a stream on which the peer is told what to read."""

from collections.abc import Callable
from time import monotonic
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from common.errors import TransferError
from common.kv.layout import PAGE_BYTES
from common.messages.fields import RdmaPoolHandle
from common.transfer.joined_link import FrameRefusedError
from common.transfer.rdma_memory import RdmaMemory
from common.transfer.rdma_shared import SharedAgent
from common.transfer.rdma_wire import (
    ANSWER_BYTES,
    DONE,
    JOIN,
    MAX_METADATA_BYTES,
    MOVED,
    PROBE,
    REFUSED,
    WRITE,
    pack_frame,
    pack_runs,
    pack_source,
    parse_answer,
)
from common.transfer.tcp_stream import open_stream
from common.transfer.tcp_wire import GRANT_ID_BYTES, NO_GRANT

IDLE_SECONDS = 1e-3
"""Between two turns of our own part where adapters move the bytes; the peer's word ends it."""
SHORT_SECONDS = 1e-4
"""The same where processors do an adapter's work: they need the time that no turn takes."""
NUM_TURNS = 8
"""Turns in a row there."""

_T = TypeVar("_T")


class RdmaConnection:
    """For one thread at a time. After any error but ``FrameRefusedError`` it must be closed."""

    def __init__(
        self,
        memory: RdmaMemory,
        agent: SharedAgent,
        handle: RdmaPoolHandle,
        stall_seconds: float,
        *,
        is_offloaded: bool,
    ) -> None:
        """Connect and join; OSError, TransferError or RemoteProtocolError says why not."""
        self._agent = agent
        self._secret = handle.secret
        self._stall_seconds = stall_seconds
        self._is_offloaded = is_offloaded
        self._sequence = 0
        metadata = agent.open()
        if len(metadata) > MAX_METADATA_BYTES:
            raise TransferError(f"the own agent's metadata has {len(metadata)} bytes")
        self._sock, self._session = open_stream(
            handle.host, handle.port, handle.secret, stall_seconds
        )
        try:
            payload = pack_source(memory.as_source(metadata))
            self._ask(JOIN, payload, (NO_GRANT, self._secret), lambda: None)
        except BaseException:
            self.close()
            raise

    def write(self, runs: NDArray[np.int32], token: bytes, meanwhile: Callable[[], _T]) -> _T:
        """Have runs, rows (source, target, length), read by the peer, and wait until it has them.

        Calls ``meanwhile`` while the bytes are under way and returns what it returns.
        """
        key = (token[:GRANT_ID_BYTES], token[GRANT_ID_BYTES:])
        return self._ask(WRITE, pack_runs(runs), key, meanwhile)

    def probe(self, num_bytes: int) -> float:
        """Have so many bytes read that the peer drops; return the seconds."""
        start = monotonic()
        runs = np.array([(0, 0, num_bytes // PAGE_BYTES)], dtype=np.int32)
        self._ask(PROBE, pack_runs(runs), (NO_GRANT, self._secret), lambda: None)
        return monotonic() - start

    def is_stale(self) -> bool:
        """Whether the peer has ended it since its last use."""
        try:
            return not self._sock.is_quiet()
        except TransferError:
            return True

    def close(self) -> None:
        """End the stream; a second call does nothing."""
        self._sock.cut()
        self._sock.close()

    def _ask(
        self, kind: int, payload: bytes, key: tuple[bytes, bytes], meanwhile: Callable[[], _T]
    ) -> _T:
        sequence = self._sequence
        self._sequence += 1
        self._sock.send([memoryview(pack_frame(kind, sequence, payload, key, self._session))])
        result = meanwhile()
        deadline = monotonic() + self._stall_seconds
        while (code := self._next_word(sequence)) != DONE:
            if code == REFUSED:
                raise FrameRefusedError("the peer does not grant it, or not any more")
            if code == MOVED:
                deadline = monotonic() + self._stall_seconds
            elif monotonic() > deadline:
                raise TransferError(f"nothing moved for {self._stall_seconds:.1f} s")
        return result

    def _next_word(self, sequence: int) -> int | None:
        """Do our part; return what the peer says about the frame, None when it says nothing yet."""
        for _ in range(1 if self._is_offloaded else NUM_TURNS):
            self._agent.progress()
        if not self._sock.has_word(IDLE_SECONDS if self._is_offloaded else SHORT_SECONDS):
            return None
        answer = memoryview(bytearray(ANSWER_BYTES))
        self._sock.receive([answer])
        return parse_answer(bytes(answer), sequence)
