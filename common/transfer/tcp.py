"""Transport ``tcp``: blocks travel over several parallel streams into a peer's pool on any host.

The prefill side opens its streams at pairing and keeps them. A write is cut into one share for each
stream; the kernel takes the bytes straight from the own pool while the calling thread computes the
checksums, and the write is over when the peer has confirmed every byte. After a failure the streams
that took part are gone, and the next write opens them anew.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.errors import RemoteProtocolError, TransferError
from common.kv.layout import PAGE_BYTES
from common.kv.pool import KVPool
from common.messages.fields import ExportedPool, TcpPoolHandle
from common.transfer.aligned import align_checked
from common.transfer.backend import LinkRate, WriteReport
from common.transfer.tcp_rates import measure_limit
from common.transfer.tcp_stream import SendStream, Share
from common.transfer.tcp_wire import TOKEN_BYTES
from common.transfer.verify import checksum_blocks

MAX_STREAMS = 4
"""Streams to one peer; fewer where that would be more than every second core."""
MIN_SHARE_BYTES = 2 * 1024 * 1024
"""Less is not worth waking another thread."""
WARM_BYTES = 1024 * 1024
"""Sent through each new stream, so that its window has grown before the first blocks."""
MEASURED_BYTES = 32 * 1024 * 1024
NUM_MEASURED = 3


@dataclass(frozen=True, slots=True)
class _Together:
    """Threads that send at the same time, and what went wrong, first things first."""

    futures: list[Future[None]]
    errors: list[Exception]


class TcpLink:
    """Streams to a peer's pool. One write at a time; others wait for it."""

    def __init__(
        self, pool: KVPool, handle: TcpPoolHandle, stall_seconds: float, num_streams: int
    ) -> None:
        self._pool = pool
        self._handle = handle
        self._stall_seconds = stall_seconds
        self._where = f"tcp {handle.host}:{handle.port}"
        self._lock = threading.Lock()
        self._is_closed = False
        self._streams: list[SendStream | None] = [None] * num_streams
        self._threads = ThreadPoolExecutor(num_streams, "tcp-send")
        try:
            self._open_streams(num_streams)
        except BaseException:
            self.close()
            raise

    def write(
        self, pairs_src: Sequence[int], pairs_dst: Sequence[int], token: bytes = b""
    ) -> WriteReport:
        """Send blocks into the peer's pool (see ``PeerLink``).

        TransferError as well when no byte moves for ``stall_seconds``, or the peer does not know
        the token: it may have revoked it.
        """
        start = time.perf_counter()
        with self._lock:
            self._refuse_closed()
            rows = self._aligned(pairs_src, pairs_dst, token)
            num_bytes = len(pairs_dst) * self._pool.block_bytes
            shares = _cut_shares(rows, self._num_shares(num_bytes), self._pool.block_bytes)
            streams = self._open_streams(len(shares))
            num_calls = sum(len(share.targets) for share in shares)
            if num_bytes < MIN_SHARE_BYTES and shares:
                checksums = self._send_alone(streams[0], shares[0], token, pairs_src)
            else:
                checksums = self._send_together(streams, shares, token, pairs_src)
        return WriteReport(
            num_blocks=len(pairs_dst),
            num_calls=num_calls,
            num_bytes=num_bytes,
            seconds=time.perf_counter() - start,
            checksums=checksums,
        )

    def measure(self) -> LinkRate:
        """Compare sending bytes that the peer drops with a bare stream on this host."""
        with self._lock:
            self._refuse_closed()
            streams = self._open_streams(len(self._streams))
            best = min(self._probe(streams, MEASURED_BYTES) for _ in range(NUM_MEASURED))
        return LinkRate(
            num_bytes=MEASURED_BYTES,
            gigabytes_per_second=MEASURED_BYTES / best / 1e9,
            limit_gigabytes_per_second=measure_limit(MEASURED_BYTES),
        )

    def close(self) -> None:
        """Close the streams, after a write in progress; a second call does nothing."""
        with self._lock:
            self._is_closed = True
            self._drop_streams()
            self._threads.shutdown()

    # ---- sending ---------------------------------------------------------------------------------

    def _send_alone(
        self, stream: SendStream, share: Share, token: bytes, sources: Sequence[int]
    ) -> NDArray[np.uint64]:
        """Send from the calling thread; compute the checksums while the bytes are under way."""
        try:
            sequences = stream.send(share, self._pool.buffer, token)
            checksums = checksum_blocks(self._pool, sources)
            stream.await_receipts(sequences)
        except (RemoteProtocolError, TransferError) as error:
            self._drop_streams()
            raise self._failed(share.num_bytes, error) from error
        return checksums

    def _send_together(
        self, streams: list[SendStream], shares: list[Share], token: bytes, sources: Sequence[int]
    ) -> NDArray[np.uint64]:
        def send(stream: SendStream, share: Share) -> None:
            stream.await_receipts(stream.send(share, self._pool.buffer, token))

        together = self._start(send, list(zip(streams, shares, strict=True)))
        checksums = checksum_blocks(self._pool, sources)
        self._finish(together, sum(share.num_bytes for share in shares))
        return checksums

    def _start(
        self,
        send: Callable[[SendStream, Share], None],
        parts: list[tuple[SendStream, Share]],
    ) -> "_Together":
        errors: list[Exception] = []

        def run(stream: SendStream, share: Share) -> None:
            try:
                send(stream, share)
            except (RemoteProtocolError, TransferError) as error:
                errors.append(error)
                # One lost share makes the others useless: let them end now.
                for other, _ in parts:
                    other.cut()

        return _Together([self._threads.submit(run, *part) for part in parts], errors)

    def _finish(self, together: "_Together", num_bytes: int) -> None:
        """Wait for every thread: afterwards none of them reads the pool."""
        wait(together.futures)
        if together.errors:
            self._drop_streams()
            raise self._failed(num_bytes, together.errors[0]) from together.errors[0]
        for future in together.futures:
            future.result()

    def _probe(self, streams: list[SendStream], num_bytes: int) -> float:
        """Send ``num_bytes`` in all over the streams; return the seconds."""
        start = time.perf_counter()
        source, each = self._pool.buffer, num_bytes // len(streams)

        def probe(stream: SendStream, _: Share) -> None:
            stream.await_receipts(stream.probe(source, each, self._handle.secret))

        self._finish(self._start(probe, [(stream, Share()) for stream in streams]), num_bytes)
        return time.perf_counter() - start

    # ---- streams ---------------------------------------------------------------------------------

    def _open_streams(self, count: int) -> list[SendStream]:
        """Return the first ``count`` streams, those that are missing opened and warmed."""
        missing = [index for index in range(count) if self._streams[index] is None]
        opened: list[SendStream] = []
        try:
            for index in missing:
                stream = SendStream.connect(self._handle, self._stall_seconds)
                self._streams[index] = stream
                opened.append(stream)
        except (OSError, RemoteProtocolError, TransferError) as error:
            raise TransferError(
                f"{self._where}: cannot open a data stream: {error}; check that the address can be"
                " reached from here and no firewall is between"
            ) from error
        if opened:
            self._probe(opened, WARM_BYTES * len(opened))
        return [stream for stream in self._streams[:count] if stream is not None]

    def _drop_streams(self) -> None:
        for index, stream in enumerate(self._streams):
            if stream is not None:
                self._streams[index] = None
                stream.close()

    def _num_shares(self, num_bytes: int) -> int:
        return max(1, min(len(self._streams), num_bytes // MIN_SHARE_BYTES))

    # ---- checks ----------------------------------------------------------------------------------

    def _aligned(
        self, sources: Sequence[int], targets: Sequence[int], token: bytes
    ) -> NDArray[np.int32]:
        """Return the fewest runs, rows (source, target, length), after every check."""
        if len(token) != TOKEN_BYTES:
            raise TransferError(f"{self._where}: a write without a token")
        return align_checked(
            self._where, (sources, self._pool.num_blocks), (targets, self._handle.num_blocks)
        )

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise TransferError(f"{self._where}: the link is closed")

    def _failed(self, num_bytes: int, error: BaseException) -> TransferError:
        return TransferError(f"{self._where}: writing {num_bytes} bytes failed: {error}")


class TcpBackend:
    """Peers that export their pool with ``TcpExport``, on any host.

    A link gives up when no byte moves for ``stall_seconds``: at most a third of the lease, because
    a write's data and its confirmation may stall one after the other.
    """

    name = "tcp"
    is_networked = True

    def __init__(
        self, pool: KVPool, stall_seconds: float, *, num_streams: int | None = None
    ) -> None:
        self._pool = pool
        self._stall_seconds = stall_seconds
        self._num_streams = num_streams or min(
            MAX_STREAMS, max(1, len(os.sched_getaffinity(0)) // 2)
        )

    def open_peer(self, handle: ExportedPool) -> TcpLink:
        """Open and warm the streams; TransferError says what to check. Waits for the network."""
        if not isinstance(handle, TcpPoolHandle):
            raise TransferError("tcp: the peer's pool is not offered over tcp")
        if handle.block_bytes != self._pool.block_bytes:
            raise TransferError(
                f"tcp: the peer's blocks have {handle.block_bytes} bytes, ours"
                f" {self._pool.block_bytes}"
            )
        return TcpLink(self._pool, handle, self._stall_seconds, self._num_streams)


def _cut_shares(rows: NDArray[np.int32], count: int, block_bytes: int) -> list[Share]:
    """Cut the runs into ``count`` shares of the same size, give or take a page."""
    pages_per_block = block_bytes // PAGE_BYTES
    total = int(rows[:, 2].sum()) * pages_per_block if len(rows) else 0
    shares = [Share() for _ in range(count)]
    done = 0
    for source, target, length in rows.tolist():
        page, num_pages = 0, length * pages_per_block
        while page < num_pages:
            index = min(done * count // total, count - 1)
            end = -(-total * (index + 1) // count)
            taken = min(num_pages - page, end - done)
            block, first_page = divmod(page, pages_per_block)
            shares[index].add(
                (source * pages_per_block + page) * PAGE_BYTES,
                (target + block, first_page, taken),
            )
            page += taken
            done += taken
    return [share for share in shares if share.targets]
