"""A link over a connection that is joined at the first write, and again after a failure.

What is common to the transports whose bytes another library moves while a stream says which
(``nccl``, ``rdma``): checks, writes in frames, and what becomes of a connection that failed.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from common.errors import RemoteProtocolError, TransferError
from common.kv.pool import BlockPool
from common.transfer.aligned import align_checked
from common.transfer.backend import WriteReport
from common.transfer.tcp_wire import TOKEN_BYTES
from common.transfer.verify import checksum_blocks

Sums = NDArray[np.uint64]
Meanwhile = Callable[[], Sums]
"""What is computed while a frame's bytes move: the checksums of the write, in its last frame."""

_NO_CHECKSUMS: Sums = np.empty(0, dtype=np.uint64)


class FrameRefusedError(TransferError):
    """The peer does not take this frame; the connection is as good as before."""


class Connection(Protocol):
    """For one thread at a time. After any error but ``FrameRefusedError`` it must be closed."""

    def is_stale(self) -> bool:
        """Whether the peer has ended it."""
        ...

    def close(self) -> None:
        """End it."""
        ...


ConnectionT = TypeVar("ConnectionT", bound=Connection)
_T = TypeVar("_T")


class JoinedLink(ABC, Generic[ConnectionT]):
    """The way into a peer's pool. One write at a time; others wait for it."""

    def __init__(
        self, where: str, pool: BlockPool, num_target_blocks: int, max_frame_runs: int
    ) -> None:
        """``where`` names the peer in errors; a frame has at most ``max_frame_runs`` runs."""
        self._where = where
        self._own_pool = pool
        self._num_target_blocks = num_target_blocks
        self._max_frame_runs = max_frame_runs
        self._lock = threading.Lock()
        self._is_closed = False
        self._connection: ConnectionT | None = None

    def write(
        self, pairs_src: Sequence[int], pairs_dst: Sequence[int], token: bytes = b""
    ) -> WriteReport:
        """Bring blocks into the peer's pool (see ``PeerLink``).

        TransferError as well when nothing moves for ``stall_seconds``, or the peer does not know
        the token: it may have revoked it.
        """
        start = time.perf_counter()
        with self._lock:
            self._refuse_closed()
            runs = self._aligned(pairs_src, pairs_dst, token)
            checksums, step = _NO_CHECKSUMS, self._max_frame_runs
            for at in range(0, len(runs), step):
                is_last = at + step >= len(runs)
                checksums = self._write_frame(
                    runs[at : at + step],
                    token,
                    partial(checksum_blocks, self._own_pool, pairs_src)
                    if is_last
                    else lambda: _NO_CHECKSUMS,
                )
        return WriteReport(
            num_blocks=len(pairs_dst),
            num_calls=len(runs),
            num_bytes=len(pairs_dst) * self._own_pool.block_bytes,
            seconds=time.perf_counter() - start,
            checksums=checksums,
        )

    def close(self) -> None:
        """End the connection, after a write in progress; a second call does nothing."""
        with self._lock:
            self._is_closed = True
            self._drop()

    # ---- what a transport adds -------------------------------------------------------------------

    @abstractmethod
    def _write_frame(self, runs: NDArray[np.int32], token: bytes, meanwhile: Meanwhile) -> Sums:
        """Move runs, rows (source, target, length); return what ``meanwhile`` has computed."""

    @abstractmethod
    def _join(self) -> ConnectionT:
        """Return a new connection; TransferError says what to check."""

    # ---- the connection --------------------------------------------------------------------------

    def _connected(self, use: Callable[[ConnectionT], _T]) -> _T:
        """Use the connection, or a new one where the peer has ended the old one meanwhile."""
        try:
            return self._used(use)
        except FrameRefusedError as error:
            raise TransferError(f"{self._where}: {error}") from error
        except (RemoteProtocolError, TransferError) as error:
            self._drop()
            raise TransferError(f"{self._where}: {error}") from error
        except BaseException:
            self._drop()
            raise

    def _used(self, use: Callable[[ConnectionT], _T]) -> _T:
        connection = self._connection
        if connection is None or connection.is_stale():
            connection = self._connect()
        return use(connection)

    def _connect(self) -> ConnectionT:
        self._drop()
        self._connection = connection = self._join()
        return connection

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    # ---- checks ----------------------------------------------------------------------------------

    def _aligned(
        self, sources: Sequence[int], targets: Sequence[int], token: bytes
    ) -> NDArray[np.int32]:
        """Return the fewest runs, rows (source, target, length), after every check."""
        if len(token) != TOKEN_BYTES:
            raise TransferError(f"{self._where}: a write without a token")
        return align_checked(
            self._where,
            (sources, self._own_pool.num_blocks),
            (targets, self._num_target_blocks),
        )

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise TransferError(f"{self._where}: the link is closed")
