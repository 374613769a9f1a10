"""The bounded memory that encoded blocks pass on their way between storage and its readers."""

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import structlog

from common.storage.codec_fp8 import FP8, Fp8Codec
from common.storage.interface import Memory

READ_BYTES = 32 * 2**20
"""Of encoded blocks that are read at a time, or one block where that is more."""
MEASURE_EVERY = 8
"""Of so many encoded blocks one is decoded again, to see how far it is from what was written."""


@dataclass(frozen=True, slots=True)
class CodecStats:
    """What was encoded and decoded since a stage was made; errors are of the measured blocks.

    ``ratio`` is a block's bytes in the pool by those in storage. See ``BlockError``: ``rms_error``
    is the mean over blocks, ``worst_rms_error`` the worst block's, ``worst_error`` the greatest.
    """

    ratio: float = 1.0
    num_encoded: int = 0
    num_unencodable: int = 0
    num_decoded: int = 0
    encoded_bytes: int = 0
    """Bytes in the pool's form that were encoded."""
    decoded_bytes: int = 0
    """Bytes in the pool's form that encoded blocks became."""
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    num_measured: int = 0
    rms_error: float = 0.0
    worst_rms_error: float = 0.0
    worst_error: float = 0.0


class CodecStage:
    """One worker's codec with room for what it makes and reads. May be used from any thread.

    One thread encodes at a time, and one reads and decodes.
    """

    def __init__(self, codec: Fp8Codec) -> None:
        self.codec = codec
        self.num_slots = max(1, READ_BYTES // codec.encoded_bytes)
        """Encoded blocks that ``read_memory`` has room for."""
        self._reads = mmap.mmap(-1, self.num_slots * codec.encoded_bytes)
        self._encoded = mmap.mmap(-1, codec.encoded_bytes)
        self._reading = threading.Lock()
        self._encoding = threading.Lock()
        self._num_encoded = 0
        self._num_unencodable = 0
        self._num_decoded = 0
        self._encode_seconds = 0.0
        self._decode_seconds = 0.0
        self._num_measured = 0
        self._rms_sum = 0.0
        self._worst_rms = 0.0
        self._worst = 0.0

    @property
    def read_memory(self) -> Memory:
        """Where storage reads encoded blocks to, one behind the other."""
        return self._reads

    @contextmanager
    def encoded(self, payload: Memory) -> Iterator[Memory | None]:
        """Lend a block's encoded bytes; None where it cannot be encoded."""
        with self._encoding:
            began = perf_counter()
            is_encoded = self.codec.try_encode(payload, self._encoded)
            self._encode_seconds += perf_counter() - began
            if not is_encoded:
                self._num_unencodable += 1
                yield None
                return
            if self._num_encoded % MEASURE_EVERY == 0:
                self._measure(payload)
            self._num_encoded += 1
            yield self._encoded

    @contextmanager
    def reading(self) -> Iterator[Memory]:
        """Lend ``read_memory`` to one reader, who decodes what it reads meanwhile."""
        with self._reading:
            yield self._reads

    def decode(self, slot: int, block: Memory) -> None:
        """Decode what the reader has in a slot of ``read_memory``."""
        began = perf_counter()
        size = self.codec.encoded_bytes
        with memoryview(self._reads) as view, view[slot * size : (slot + 1) * size] as encoded:
            self.codec.decode(encoded, block)
        self._num_decoded += 1
        self._decode_seconds += perf_counter() - began

    def stats(self) -> CodecStats:
        """Return the counts of now."""
        size = self.codec.block_bytes
        return CodecStats(
            ratio=size / self.codec.encoded_bytes,
            num_encoded=self._num_encoded,
            num_unencodable=self._num_unencodable,
            num_decoded=self._num_decoded,
            encoded_bytes=self._num_encoded * size,
            decoded_bytes=self._num_decoded * size,
            encode_seconds=self._encode_seconds,
            decode_seconds=self._decode_seconds,
            num_measured=self._num_measured,
            rms_error=self._rms_sum / max(1, self._num_measured),
            worst_rms_error=self._worst_rms,
            worst_error=self._worst,
        )

    def close(self) -> None:
        """Tell what was done; nothing is encoded or decoded any more."""
        stats = self.stats()
        structlog.get_logger().info(
            "store_codec_closed",
            codec=FP8,
            ratio=round(stats.ratio, 4),
            num_encoded=stats.num_encoded,
            num_unencodable=stats.num_unencodable,
            num_decoded=stats.num_decoded,
            num_measured=stats.num_measured,
            rms_error=round(stats.rms_error, 6),
            worst_rms_error=round(stats.worst_rms_error, 6),
            worst_error=round(stats.worst_error, 6),
        )

    def _measure(self, payload: Memory) -> None:
        error = self.codec.error(payload, self._encoded)
        self._num_measured += 1
        self._rms_sum += error.rms
        self._worst_rms = max(self._worst_rms, error.rms)
        self._worst = max(self._worst, error.greatest)
