"""Blocks to store: chains of hashes, and bytes that follow from a hash."""

import hashlib
from pathlib import Path

import numpy as np

from common.storage.file_store import FileStore
from common.storage.interface import BlockStore, StoreIdentity
from common.storage.store_url import FileOptions

PAGE_BYTES = 4096
BLOCK_BYTES = 2 * PAGE_BYTES
FILE_BYTES = BLOCK_BYTES + PAGE_BYTES
FLUSH_SECONDS = 60.0

IDENTITY = StoreIdentity(
    model_fingerprint="0123456789abcdef",
    layout_fingerprint="fedcba9876543210",
    dtype="bfloat16",
    block_bytes=BLOCK_BYTES,
)


def chain(name: str, count: int) -> list[bytes]:
    """Return hashes of successive blocks; chains of one name begin alike."""
    return [hashlib.blake2b(f"{name} {i}".encode(), digest_size=16).digest() for i in range(count)]


def payload(block_hash: bytes, block_bytes: int = BLOCK_BYTES) -> bytes:
    """Return the bytes that belong to a hash."""
    seed = int.from_bytes(block_hash[:8], "little")
    return np.random.default_rng(seed).bytes(block_bytes)


def open_file_store(
    root: Path,
    num_blocks: int = 1000,
    *,
    identity: StoreIdentity = IDENTITY,
    io: str = "auto",
    num_queued: int = 64,
) -> FileStore:
    """Open a folder that holds ``num_blocks`` blocks."""
    file_bytes = identity.block_bytes + PAGE_BYTES
    options = FileOptions(
        capacity_bytes=num_blocks * file_bytes,
        queue_bytes=num_queued * file_bytes,
        queue_depth=8,
        io=io,
    )
    return FileStore(root, identity, options)


def store_chain(
    store: BlockStore, hashes: list[bytes], previous: bytes | None = None
) -> list[bool]:
    """Write blocks and wait until they are stored or dropped; tell which were taken."""
    taken = []
    for block_hash in hashes:
        data = payload(block_hash, store.identity.block_bytes)
        taken.append(store.write(block_hash, previous, data))
        previous = block_hash
    assert store.flush(FLUSH_SECONDS), "the store did not write in time"
    return taken


def read_chain(store: BlockStore, hashes: list[bytes], previous: bytes | None = None) -> list[bool]:
    """Read blocks and tell which are there; AssertionError where one has other bytes."""
    block_bytes = store.identity.block_bytes
    buffer = bytearray(len(hashes) * block_bytes)
    hits = store.read(hashes, buffer, range(len(hashes)), previous)
    for number, (block_hash, is_hit) in enumerate(zip(hashes, hits, strict=True)):
        if is_hit:
            start = number * block_bytes
            found = bytes(buffer[start : start + block_bytes])
            assert found == payload(block_hash, block_bytes), f"block {number} has other bytes"
    return hits


def files_of(root: Path) -> list[Path]:
    """Return the files of stored blocks."""
    return sorted(root.glob("????????????????/??/*"))


def folder_bytes(root: Path) -> int:
    """Return the bytes of all blocks in a folder, also of those that are being written."""
    total = 0
    for path in [*files_of(root), *root.glob("writers/*/[0-9]*")]:
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # renamed or evicted meanwhile
            continue
    return total
