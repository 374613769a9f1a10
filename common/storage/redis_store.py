"""The store in a Redis server.

A block is one string: the header of ``header.py``, the payload's checksum (u64, little-endian), the
payload. Its key is ``flowpath:<identity>:<hash>``. The server bounds its memory itself
(``maxmemory`` with ``allkeys-lru``); a prefix is used from its last block to its first, so that
tails look older than what they hang from. What survives a restart of the server is up to its
settings too: a block is stored when the server has taken it.

While the server does not answer, every lookup misses and every block is dropped; it is asked again
once in a while.
"""

import importlib
import struct
import time
from collections.abc import Sequence
from typing import Protocol

import flowpath_native
import structlog

from common.errors import ConfigError
from common.kv.layout import PAGE_BYTES
from common.storage.header import HEADER_BYTES, HeaderCodec
from common.storage.interface import Memory, StoreIdentity, StoreStats
from common.storage.tally import Tally
from common.storage.troubles import Troubles
from common.storage.write_behind import PendingBlock, WriteBehind

ANSWER_SECONDS = 5.0
AGAIN_SECONDS = 5.0
"""How long a server that failed is left alone."""
CLOSE_SECONDS = 15.0
MAX_BATCH = 16
_MAX_ANSWER_BYTES = 16 * 2**20
_SUM = struct.Struct("<Q")
_PAYLOAD_AT = HEADER_BYTES + _SUM.size
_SUM_AT = PAGE_BYTES - 16  # of a sealed file

Command = tuple[str | bytes, ...]


class _Pipeline(Protocol):
    def execute_command(self, *command: str | bytes) -> object: ...
    def execute(self) -> list[object]: ...


class _Client(Protocol):
    """What is used of ``redis.Redis``."""

    def pipeline(self, *, transaction: bool) -> _Pipeline: ...
    def close(self) -> None: ...


class RedisStore:
    """One process's connection to the server (see ``BlockStore``)."""

    def __init__(self, url: str, identity: StoreIdentity, queue_bytes: int) -> None:
        """Prepare to ask the server; ConfigError without the ``redis`` package or a usable URL."""
        self.identity = identity
        self._codec = HeaderCodec(identity)
        self._prefix = b"flowpath:" + self._codec.digest().hex().encode() + b":"
        try:
            redis = importlib.import_module("redis")
        except ImportError:
            raise ConfigError(
                "a store in Redis needs the package redis: .venv/bin/pip install '.[redis]'"
            ) from None
        try:
            self._client: _Client = redis.Redis.from_url(
                url, socket_timeout=ANSWER_SECONDS, socket_connect_timeout=ANSWER_SECONDS
            )
        except ValueError as error:
            raise ConfigError(f"the store's URL: {error}") from error
        self._errors: tuple[type[Exception], ...] = (redis.RedisError, OSError)
        self._tally = Tally()
        self._troubles = Troubles("redis")
        self._silent_until = 0.0
        self._is_closed = False
        self._queue = WriteBehind(
            self._codec, identity.block_bytes, queue_bytes, self._write_batch, MAX_BATCH
        )
        structlog.get_logger().info("store_opened", store="redis", io="socket", is_writable=True)

    def register(self, buffers: Sequence[Memory]) -> bool:
        """Prepare nothing: answers are copied."""
        del buffers
        return False

    def longest_prefix(self, hashes: Sequence[bytes], previous: bytes | None = None) -> int:
        """Touch all blocks in one round trip (see ``BlockStore``)."""
        del previous
        commands: list[Command] = [("TOUCH", self._key(each)) for each in reversed(hashes)]
        answers = self._ask(commands)
        if answers is None:
            return 0
        found = [answer == 1 for answer in reversed(answers)]
        return found.index(False) if False in found else len(found)

    def read(
        self,
        hashes: Sequence[bytes],
        buffer: Memory,
        block_ids: Sequence[int],
        previous: bytes | None = None,
    ) -> list[bool]:
        """Fetch some blocks at a time and copy them to their places (see ``BlockStore``)."""
        block_bytes = self.identity.block_bytes
        place = memoryview(buffer).cast("B")
        num_places = len(place) // block_bytes
        if len(hashes) != len(block_ids) or not all(0 <= each < num_places for each in block_ids):
            raise ValueError(f"{len(hashes)} blocks do not fit {len(block_ids)} ids in the buffer")
        heads = [
            self._codec.pack(each, before)
            for each, before in zip(hashes, [previous, *hashes][: len(hashes)], strict=True)
        ]
        started = time.perf_counter_ns()
        hits = [False] * len(hashes)
        step = max(1, _MAX_ANSWER_BYTES // block_bytes)
        for end in range(len(hashes), 0, -step):
            numbers = range(end - 1, max(-1, end - step - 1), -1)
            answers = self._ask([("GET", self._key(hashes[number])) for number in numbers])
            for number, value in zip(numbers, answers or (), strict=answers is not None):
                if isinstance(value, bytes) and self._is_whole(value, heads[number]):
                    start = block_ids[number] * block_bytes
                    place[start : start + block_bytes] = value[_PAYLOAD_AT:]
                    hits[number] = True
                elif value is not None:
                    self._drop_damaged(self._key(hashes[number]))
        self._tally.add(
            StoreStats(
                num_hits=sum(hits),
                num_misses=len(hits) - sum(hits),
                read_bytes=sum(hits) * block_bytes,
                read_ns=time.perf_counter_ns() - started,
            )
        )
        return hits

    def write(self, block_hash: bytes, previous: bytes | None, payload: Memory) -> bool:
        """Queue a copy of the block (see ``BlockStore``)."""
        if self._queue.offer(block_hash, previous, payload):
            return True
        self._tally.add(StoreStats(num_dropped_full=1))
        return False

    def flush(self, timeout_seconds: float) -> bool:
        """Wait for the queue (see ``BlockStore``)."""
        return self._queue.flush(timeout_seconds)

    def stats(self) -> StoreStats:
        """Return the counts of now; what the server holds in all is for the server to tell."""
        return self._tally.stats(0, 0, 0, self._queue.queued_bytes)

    def close(self) -> None:
        """Write what waits and hang up (see ``BlockStore``)."""
        if self._is_closed:
            return
        self._is_closed = True
        num_undone = self._queue.close(CLOSE_SECONDS)
        if num_undone:
            structlog.get_logger().warning("store_left_unwritten", num_blocks=num_undone)
        self._client.close()

    def _key(self, block_hash: bytes) -> bytes:
        return self._prefix + block_hash.hex().encode()

    def _ask(self, commands: Sequence[Command]) -> list[object] | None:
        """Return all answers; None where the server gives none or was left alone."""
        if not commands:
            return []
        if time.monotonic() < self._silent_until:
            return None
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        try:
            return pipeline.execute()
        except self._errors as error:
            self._silent_until = time.monotonic() + AGAIN_SECONDS
            self._troubles.note("server_failed", reason=str(error))
            self._tally.add(StoreStats(num_read_errors=1))
            return None

    def _is_whole(self, value: bytes, head: bytes) -> bool:
        if len(value) != _PAYLOAD_AT + self.identity.block_bytes or not value.startswith(head):
            return False
        (expected,) = _SUM.unpack_from(value, HEADER_BYTES)
        return bool(expected == flowpath_native.checksum(memoryview(value)[_PAYLOAD_AT:]))

    def _drop_damaged(self, key: bytes) -> None:
        self._troubles.note("damaged", key=key.decode())
        self._tally.add(StoreStats(num_damaged=1))
        self._ask([("DEL", key)])

    def _write_batch(self, arena: Memory, blocks: Sequence[PendingBlock]) -> None:
        wanted = self._wanted(blocks)
        commands: list[Command] = []
        view = memoryview(arena)
        for block in wanted:
            payload_at = block.offset + PAGE_BYTES
            value = b"".join(
                (
                    view[block.offset : block.offset + HEADER_BYTES],
                    view[block.offset + _SUM_AT : block.offset + _SUM_AT + _SUM.size],
                    view[payload_at : payload_at + self.identity.block_bytes],
                )
            )
            commands.append(("SET", self._key(block.block_hash), value))
        if self._ask(commands) is None:
            self._tally.add(StoreStats(num_write_errors=len(wanted)))
            return
        written_bytes = len(wanted) * (_PAYLOAD_AT + self.identity.block_bytes)
        self._tally.add(StoreStats(num_written=len(wanted), written_bytes=written_bytes))

    def _wanted(self, blocks: Sequence[PendingBlock]) -> list[PendingBlock]:
        """Return what the server lacks and would find by its parents."""
        commands: list[Command] = [("EXISTS", self._key(block.block_hash)) for block in blocks]
        commands += [("EXISTS", self._key(block.previous or b"")) for block in blocks]
        answers = self._ask(commands)
        if answers is None:
            self._tally.add(StoreStats(num_write_errors=len(blocks)))
            return []
        wanted: list[PendingBlock] = []
        present: set[bytes | None] = {None}
        present.update(
            block.previous
            for block, answer in zip(blocks, answers[len(blocks) :], strict=True)
            if answer == 1
        )
        num_known = 0
        for block, answer in zip(blocks, answers[: len(blocks)], strict=True):
            if answer == 1:
                num_known += 1
                present.add(block.block_hash)
            elif block.previous in present:
                wanted.append(block)
                present.add(block.block_hash)
        num_orphans = len(blocks) - num_known - len(wanted)
        self._tally.add(StoreStats(num_known=num_known, num_dropped_orphans=num_orphans))
        return wanted
