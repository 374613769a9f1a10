"""The bytes of a KV pool in host memory, which peers on the same host map and write directly.

The pool is an anonymous memory file (``memfd``): it has no name in any file system and lives as
long as somebody has it open or mapped, so that killed processes leave nothing behind::

    offset 0                                     num_bytes
    | block 0 | block 1 | ... | block n - 1 | nonce, 16 bytes | rest of the page |

Its size is sealed: a mapping of it can never fault, whatever becomes of its owner.
"""

import errno
import fcntl
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from mmap import mmap
from typing import Protocol

import flowpath_native
import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError, TransferError
from common.kv.layout import PAGE_BYTES
from common.kv.memory_file import available_bytes, map_shared, open_peer_file
from common.messages.fields import CudaPoolHandle, PoolHandle, RanksPoolHandle

NONCE_BYTES = 16
FILE_NAME = "flowpath-kv"
_GIB = 1024**3


class BlockPool(Protocol):
    """A pool of KV blocks wherever its memory is: ``KVPool`` on the host, ``DevicePool`` on a GPU.

    Block ``i`` is one run of ``block_bytes`` bytes, ``i * block_bytes`` behind block 0; in a pool
    of several tensor-parallel ranks (``common.transfer.ranks.RankedPool``) a run in each of them.
    """

    @property
    def num_blocks(self) -> int:
        """How many blocks are given out."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, a multiple of 4096."""
        ...

    @property
    def num_bytes(self) -> int:
        """``num_blocks * block_bytes``."""
        ...

    def handle(self) -> PoolHandle | CudaPoolHandle | RanksPoolHandle:
        """Return what a peer on this host needs to open the pool."""
        ...

    def checksum(self, block_ids: Sequence[int]) -> NDArray[np.uint64]:
        """Return the checksum of each named block; ValueError for one outside of the pool.

        The function is ``flowpath_native.checksum`` wherever the memory is. Waits with the GIL
        released.
        """
        ...

    def close(self) -> None:
        """Let go of the memory; a second call does nothing."""
        ...


class KVPool:
    """This process's pool: ``num_blocks`` blocks of ``block_bytes`` bytes (multiple of 4096).

    All memory is present from the start. ConfigError when it does not suffice. ``is_huge`` asks
    for transparent huge pages.
    """

    def __init__(self, num_blocks: int, block_bytes: int, *, is_huge: bool = False) -> None:
        if num_blocks < 1 or block_bytes < 1 or block_bytes % PAGE_BYTES:
            raise ConfigError(
                f"a KV pool of {num_blocks} blocks of {block_bytes} bytes is impossible: it needs"
                f" at least one block, of a multiple of {PAGE_BYTES} bytes"
            )
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.num_bytes = num_blocks * block_bytes
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._refuse_beyond(available_bytes())
        self._fd = os.memfd_create(FILE_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, self.num_bytes + PAGE_BYTES)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, seals)
            self._mapping = map_shared(self._fd, self.num_bytes + PAGE_BYTES, is_huge=is_huge)
        except OSError as error:
            os.close(self._fd)
            raise ConfigError(f"{self._wish()}: {error.strerror}; {_ADVICE}") from error
        self._mapping[self.num_bytes : self.num_bytes + NONCE_BYTES] = self._nonce
        self.buffer = memoryview(self._mapping)[: self.num_bytes]
        """Writable bytes of all blocks; block ``i`` starts at ``i * block_bytes``."""

    def handle(self) -> PoolHandle:
        """Return what a peer on this host needs to map the pool."""
        return PoolHandle(
            kind="memfd",
            pid=os.getpid(),
            fd=self._fd,
            num_blocks=self.num_blocks,
            block_bytes=self.block_bytes,
            num_bytes=self.num_bytes,
            nonce=self._nonce,
        )

    def checksum(self, block_ids: Sequence[int]) -> NDArray[np.uint64]:
        """Return the checksum of each named block (see ``BlockPool``)."""
        return flowpath_native.checksum_blocks(self.buffer, block_ids, self.block_bytes)

    def close(self) -> None:
        """Let go of the file and of the memory; a second call does nothing.

        Arrays and tensors made of ``buffer`` stay valid: the mapping lives until the last is gone.
        """
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        _unmap(self.buffer, self._mapping)

    def _refuse_beyond(self, bound: int) -> None:
        if self.num_bytes + PAGE_BYTES > bound:
            raise ConfigError(
                f"{self._wish()}, and {bound / _GIB:.2f} GiB are available; {_ADVICE}"
            )

    def _wish(self) -> str:
        return (
            f"the KV pool needs {self.num_bytes / _GIB:.2f} GiB"
            f" ({self.num_blocks} blocks of {self.block_bytes} bytes)"
        )


_ADVICE = "make the pool smaller or free memory"


class PeerPool:
    """A peer's pool, mapped into this process with its page tables filled."""

    def __init__(self, handle: PoolHandle, mapping: mmap) -> None:
        self.num_blocks = handle.num_blocks
        self.block_bytes = handle.block_bytes
        self.num_bytes = handle.num_bytes
        self._mapping = mapping
        self.buffer = memoryview(mapping)[: handle.num_bytes]
        """Writable bytes of all blocks. They outlive the peer: its death makes no access fault."""

    @classmethod
    def open(cls, handle: PoolHandle) -> "PeerPool":
        """Map the pool that ``handle`` names; TransferError says what to check."""
        where = f"cannot map the KV pool of process {handle.pid} (descriptor {handle.fd})"
        try:
            fd = open_peer_file(handle.pid, handle.fd, FILE_NAME)
        except OSError as error:
            raise TransferError(f"{where}: {error.strerror}; {_what_to_check(error)}") from error
        except ValueError as error:
            raise TransferError(
                f"{where}: {error}; the peer was restarted or the pid reused"
            ) from error
        try:
            mapping = cls._map_checked(fd, handle, where)
        finally:
            os.close(fd)
        return cls(handle, mapping)

    @staticmethod
    def _map_checked(fd: int, handle: PoolHandle, where: str) -> mmap:
        num_bytes = handle.num_blocks * handle.block_bytes
        actual = os.fstat(fd).st_size
        if handle.num_bytes != num_bytes or actual != num_bytes + PAGE_BYTES:
            raise TransferError(
                f"{where}: {handle.num_blocks} blocks of {handle.block_bytes} bytes do not fit"
                f" the {handle.num_bytes} bytes named or the {actual} bytes of the file"
            )
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise TransferError(f"{where}: its size is not sealed")
        if os.pread(fd, NONCE_BYTES, num_bytes) != handle.nonce:
            raise TransferError(f"{where}: the nonce differs; the pid or descriptor was reused")
        try:
            return map_shared(fd, num_bytes + PAGE_BYTES)
        except OSError as error:
            raise TransferError(f"{where}: {error.strerror}; check the memory limits") from error

    def close(self) -> None:
        """Unmap; a second call does nothing."""
        _unmap(self.buffer, self._mapping)


def _what_to_check(error: OSError) -> str:
    match error.errno:
        case errno.ENOENT | errno.ESRCH:
            return (
                "the peer is gone, or the two run in different pid namespaces: workers that share"
                " memory need one"
            )
        case errno.EACCES | errno.EPERM:
            return (
                "both processes must run as the same user, and nothing may restrict ptrace access"
                " between them"
            )
        case _:
            return "check that /proc is mounted and the limit of open files is not reached"


def _unmap(buffer: memoryview, mapping: mmap) -> None:
    # BufferError: views are left; the mapping goes with the last of them.
    with suppress(BufferError):
        buffer.release()
        mapping.close()
