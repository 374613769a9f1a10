"""A store whose blocks are kept encoded."""

from collections.abc import Sequence
from dataclasses import replace

from common.storage.codec_stage import CodecStage
from common.storage.interface import BlockStore, Memory, StoreIdentity, StoreStats


class CodecStore:
    """The pool's blocks in front of ``storage``, which has encoded ones (see ``BlockStore``).

    What is read is what was written but for the codec's error. Bytes are counted as storage moves
    them. The stage stays its owner's to close.
    """

    def __init__(self, storage: BlockStore, stage: CodecStage) -> None:
        """ValueError where storage has other blocks than the codec makes."""
        found, made = storage.identity.block_bytes, stage.codec.encoded_bytes
        if found != made:
            raise ValueError(f"a store of blocks of {found} bytes, and a codec's of {made}")
        self._storage = storage
        self._stage = stage
        self.identity: StoreIdentity = replace(
            storage.identity, block_bytes=stage.codec.block_bytes
        )

    def register(self, buffers: Sequence[Memory]) -> bool:
        """Prepare nothing: storage reads into the stage's memory, not into the caller's."""
        del buffers
        return self._storage.register([self._stage.read_memory])

    def longest_prefix(self, hashes: Sequence[bytes], previous: bytes | None = None) -> int:
        """Look up."""
        return self._storage.longest_prefix(hashes, previous)

    def read(
        self,
        hashes: Sequence[bytes],
        buffer: Memory,
        block_ids: Sequence[int],
        previous: bytes | None = None,
    ) -> list[bool]:
        """Read as many blocks at a time as the stage holds, and decode each to its place.

        After a turn with a miss the rest is left alone and counts as missing: the prefix ends.
        """
        size = self.identity.block_bytes
        with memoryview(buffer).cast("B") as place:
            num_places = len(place) // size
            if len(hashes) != len(block_ids) or not all(0 <= i < num_places for i in block_ids):
                raise ValueError(f"{len(hashes)} blocks do not fit {len(block_ids)} ids")
            hits: list[bool] = []
            while len(hits) < len(hashes) and False not in hits:
                start = len(hits)
                part = hashes[start : start + self._stage.num_slots]
                before = hashes[start - 1] if start else previous
                with self._stage.reading() as memory:
                    came = self._storage.read(part, memory, range(len(part)), before)
                    for slot, is_hit in enumerate(came):
                        at = block_ids[start + slot] * size
                        if is_hit:
                            self._stage.decode(slot, place[at : at + size])
                hits += came
        return hits + [False] * (len(hashes) - len(hits))

    def write(self, block_hash: bytes, previous: bytes | None, payload: Memory) -> bool:
        """Encode a block and have it written; False also where it cannot be encoded."""
        with self._stage.encoded(payload) as encoded:
            return encoded is not None and self._storage.write(block_hash, previous, encoded)

    def flush(self, timeout_seconds: float) -> bool:
        """Wait for the queue."""
        return self._storage.flush(timeout_seconds)

    def stats(self) -> StoreStats:
        """Return storage's counts, and what could not be encoded."""
        num_unencodable = self._stage.stats().num_unencodable
        return replace(self._storage.stats(), num_unencodable=num_unencodable)

    def close(self) -> None:
        """Close storage."""
        self._storage.close()
