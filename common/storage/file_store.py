"""The store in a folder: local, or any mount that several hosts share.

``folder.py`` has the folder's layout, ``folder_writer.py`` how a block gets there, ``ledger.py``
how all writers keep to one bound. Reading needs none of their locks: a block's path follows from
its hash and the one before, files are only ever whole, and a checksum decides.
"""

import errno
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import flowpath_native
import structlog

from common.errors import ConfigError
from common.kv.layout import PAGE_BYTES
from common.storage.folder import StoreFolder, block_path, key_of
from common.storage.folder_index import FolderIndex
from common.storage.folder_writer import MAX_BATCH, FolderWriter
from common.storage.header import HEADER_BYTES, HeaderCodec
from common.storage.interface import Memory, StoreIdentity, StoreStats
from common.storage.ledger import LEDGER, FolderBusyError
from common.storage.store_url import FileOptions
from common.storage.tally import Tally
from common.storage.tree import Key
from common.storage.troubles import Troubles
from common.storage.write_behind import PendingBlock, WriteBehind

CLOSE_SECONDS = 30.0
_HEAD_BYTES = 256  # of a header, as the native core hands it out
_DAMAGED = {-1: "too short", -2: "a checksum does not fit"}
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


class FileStore:
    """One process's view of the folder (see ``BlockStore``)."""

    def __init__(
        self,
        root: Path,
        identity: StoreIdentity,
        options: FileOptions,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        """Open the folder and index it; ConfigError where it is unusable.

        ``clock`` returns nanoseconds since 1970.
        """
        self.identity = identity
        self._codec = HeaderCodec(identity)
        self._digest = self._codec.digest()
        self._options = options
        self._file_bytes = PAGE_BYTES + identity.block_bytes
        if options.capacity_bytes < self._file_bytes:
            raise ConfigError(
                f"a store of {options.capacity_bytes} bytes holds no block of {self._file_bytes}"
            )
        self._tally = Tally()
        self._troubles = Troubles(f"file:{root}")
        self._folder = StoreFolder(root)
        self._is_closed = False
        started = time.monotonic()
        try:
            self._engine, self._reader = _open_files(
                self._folder.fd, options.io, options.queue_depth
            )
            self._index = FolderIndex(self._folder, clock)
            self._writer = self._enter()
        except BaseException:
            self._folder.close()
            raise
        self._queue = None if self._writer is None else self._make_queue()
        num_blocks, stored_bytes = self._index.totals()
        structlog.get_logger().info(
            "store_opened",
            store=f"file:{root}",
            io=self._engine,
            is_direct=_is_direct(self._folder),
            is_writable=self._writer is not None,
            num_blocks=num_blocks,
            stored_bytes=stored_bytes,
            capacity_bytes=options.capacity_bytes,
            seconds=round(time.monotonic() - started, 3),
        )

    def register(self, buffers: Sequence[Memory]) -> bool:
        """Pin the memory for io_uring (see ``BlockStore``)."""
        is_registered = self._reader.register_memory(buffers)
        structlog.get_logger().info(
            "store_memory_registered", io=self._engine, is_registered=is_registered
        )
        return is_registered

    def longest_prefix(self, hashes: Sequence[bytes], previous: bytes | None = None) -> int:
        """Look blocks up in the index, and unknown ones on the disk (see ``BlockStore``)."""
        chain = self._chain(hashes, previous)
        num_found = 0
        try:
            while num_found < len(chain) and self._index.find(*chain[num_found]):
                num_found += 1
        except OSError as error:
            self._note_refused(error.errno or 0)
        self._use([key for key, _ in chain[:num_found]])
        return num_found

    def read(
        self,
        hashes: Sequence[bytes],
        buffer: Memory,
        block_ids: Sequence[int],
        previous: bytes | None = None,
    ) -> list[bool]:
        """Read straight into the buffer (see ``BlockStore``)."""
        chain = self._chain(hashes, previous)
        paths = [block_path(key, parent) for key, parent in chain]
        block_bytes = self.identity.block_bytes
        started = time.perf_counter_ns()
        outcomes, heads = self._reader.read(
            paths, buffer, [block_id * block_bytes for block_id in block_ids], block_bytes
        )
        elapsed = time.perf_counter_ns() - started
        hits: list[bool] = []
        before = previous
        for number, (block_hash, outcome) in enumerate(zip(hashes, outcomes, strict=True)):
            start = number * _HEAD_BYTES
            is_ours = heads[start : start + HEADER_BYTES] == self._codec.pack(block_hash, before)
            hits.append(outcome == 0 and is_ours)
            key, parent = chain[number]
            if not hits[-1]:
                self._missed(key, paths[number], outcome)
            elif not self._index.is_known(key):
                self._index.add(key, parent, self._file_bytes)
            before = block_hash
        self._use([key for (key, _), is_hit in zip(chain, hits, strict=True) if is_hit])
        num_hits = sum(hits)
        self._tally.add(
            StoreStats(
                num_hits=num_hits,
                num_misses=len(hits) - num_hits,
                read_bytes=num_hits * block_bytes,
                read_ns=elapsed,
            )
        )
        return hits

    def write(self, block_hash: bytes, previous: bytes | None, payload: Memory) -> bool:
        """Queue a copy of the block (see ``BlockStore``)."""
        if self._index.is_known(key_of(self._digest, block_hash)):
            self._tally.add(StoreStats(num_known=1))
            return True
        if self._queue is not None and self._queue.offer(block_hash, previous, payload):
            return True
        self._tally.add(StoreStats(num_dropped_full=1))
        return False

    def flush(self, timeout_seconds: float) -> bool:
        """Wait for the queue (see ``BlockStore``)."""
        return self._queue is None or self._queue.flush(timeout_seconds)

    def stats(self) -> StoreStats:
        """Return the counts of now; the blocks are those of every identity in the folder."""
        queued_bytes = 0 if self._queue is None else self._queue.queued_bytes
        return self._tally.stats(*self._index.totals(), self._options.capacity_bytes, queued_bytes)

    def close(self) -> None:
        """Write what waits and leave the folder (see ``BlockStore``)."""
        if self._is_closed:
            return
        self._is_closed = True
        num_undone = 0 if self._queue is None else self._queue.close(CLOSE_SECONDS)
        if num_undone:
            # Its thread is inside of the file system and still needs what it was given.
            structlog.get_logger().warning("store_left_unwritten", num_blocks=num_undone)
            return
        if self._writer is not None:
            self._writer.close()
        self._reader.register_memory([])
        self._folder.close()

    def _enter(self) -> FolderWriter | None:
        """Return the folder's writer, or None after indexing a folder that can only be read."""
        where = f"cannot use the store's folder {self._folder.root}"
        try:
            _, files = _open_files(self._folder.fd, self._options.io, MAX_BATCH)
            return FolderWriter(
                self._folder,
                self._index,
                files,
                self._tally,
                self._troubles,
                capacity_bytes=self._options.capacity_bytes,
            )
        except FolderBusyError:
            raise ConfigError(f"{where}: another process holds its lock") from None
        except OSError as error:
            if error.errno not in _READ_ONLY:
                raise ConfigError(f"{where}: {error}") from error
            self._troubles.note("read_only", reason=str(error))
        try:
            self._index.refresh()
        except OSError as error:
            raise ConfigError(f"{where}: {error}") from error
        return None

    def _make_queue(self) -> WriteBehind:
        return WriteBehind(
            self._codec,
            self.identity.block_bytes,
            self._options.queue_bytes,
            self._write_batch,
            MAX_BATCH,
        )

    def _write_batch(self, arena: Memory, blocks: Sequence[PendingBlock]) -> None:
        assert self._writer is not None, "only a store that writes has a queue"
        self._writer.write(arena, self._file_bytes, self._digest, blocks)

    def _chain(
        self, hashes: Sequence[bytes], previous: bytes | None
    ) -> list[tuple[Key, Key | None]]:
        """Return each block's key and that of the block before."""
        keys = [key_of(self._digest, block_hash) for block_hash in hashes]
        first = None if previous is None else key_of(self._digest, previous)
        return list(zip(keys, [first, *keys[:-1]], strict=True)) if keys else []

    def _use(self, keys: list[Key]) -> None:
        for key in self._index.use(keys):
            self._index.save_use(key)

    def _missed(self, key: Key, path: str, outcome: int) -> None:
        self._index.forget(key)
        if outcome == errno.ENOENT:
            return
        if outcome > 0:
            self._note_refused(outcome)
            return
        reason = _DAMAGED.get(outcome, "it is another model's or another block")
        self._troubles.note("damaged", path=path, reason=reason)
        self._tally.add(StoreStats(num_damaged=1))
        try:
            self._folder.remove(path)
        except OSError as error:
            self._troubles.note("damaged_stays", path=path, reason=str(error))

    def _note_refused(self, number: int) -> None:
        self._troubles.note("read_failed", reason=os.strerror(number))
        self._tally.add(StoreStats(num_read_errors=1))


def _open_files(
    root_fd: int, wish: str, queue_depth: int
) -> tuple[str, flowpath_native.BlockFiles]:
    """Return the engine's name and the engine; ConfigError where the wish cannot be met."""
    engine = wish
    if wish == "auto":
        engine = "io_uring" if flowpath_native.has_io_uring() else "threads"
    try:
        return engine, flowpath_native.BlockFiles(engine, root_fd, queue_depth, is_direct=True)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"the store's io={wish}: {error}") from error


def _is_direct(folder: StoreFolder) -> bool | None:
    """Tell whether the file system has direct I/O; None where there is no file to try it on."""
    try:
        os.close(os.open(LEDGER, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC, dir_fd=folder.fd))
    except OSError as error:
        return False if error.errno == errno.EINVAL else None
    return True
