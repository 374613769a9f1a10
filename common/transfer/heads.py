"""Which bytes go from which rank to which between tensor-parallel workers. Pure.

Rank r of N has the r-th N-th of the model's KV heads, so that its blocks are narrower the more
ranks there are. Within a block, layers, planes and tokens lie at one distance; so what one source
rank has for one target rank is the same number of bytes again and again, at two distances::

    source rank 0 of 1  | t0: h0 h1 h2 h3 | t1: h0 h1 h2 h3 | ...    the pieces for target rank 1
                                 '---'             '---'             of 2 are h2 h3 of each token
    target rank 1 of 2  | t0: h2 h3 | t1: h2 h3 | ...

Between equally many ranks, a block goes as it is. Every head is sent once, and so is what follows
the heads in a block: by the source rank that has the target rank's first head.

A block's checksum is that of the target rank's whole block, padding included. Its sum of terms
(``native/include/flowpath/memory/checksum.hpp``) may be taken in parts, so the source ranks that
write one block each sum what they write, where it lies in the target, and the parts add up.
"""

from dataclasses import dataclass, replace

from common.errors import ConfigError
from common.kv.layout import SCALE_BYTES, KVLayout

VECTOR_BYTES = 16


@dataclass(frozen=True, slots=True)
class Pieces:
    """``count`` pieces of ``num_bytes`` bytes each; offsets are bytes from the block's begin.

    Piece i goes from ``source_offset + i * source_stride`` to ``target_offset + i *
    target_stride``. A lone piece has its own size as both strides.
    """

    source_offset: int
    target_offset: int
    num_bytes: int
    count: int
    source_stride: int
    target_stride: int

    def numbers(self) -> tuple[int, int, int, int, int, int]:
        """Return all of it as the kernels take it."""
        return (
            *(self.source_offset, self.target_offset, self.num_bytes),
            *(self.count, self.source_stride, self.target_stride),
        )


@dataclass(frozen=True, slots=True)
class Rest:
    """What follows the heads: ``num_bytes`` bytes to copy (scales), then ``num_zeros`` zeros."""

    source_offset: int
    target_offset: int
    num_bytes: int
    num_zeros: int

    def numbers(self) -> tuple[int, int, int, int]:
        """Return all of it as the kernels take it."""
        return (self.source_offset, self.target_offset, self.num_bytes, self.num_zeros)


NO_REST = Rest(0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class HeadTransfer:
    """What one source rank sends to one target rank, in every block.

    ``first_head`` and ``num_heads`` are of the model's KV heads.
    """

    source_rank: int
    target_rank: int
    first_head: int
    num_heads: int
    pieces: Pieces
    rest: Rest | None
    source_block_bytes: int
    target_block_bytes: int

    @property
    def is_whole(self) -> bool:
        """Whether blocks go as they are, so that runs of adjacent ones are one copy each."""
        return self.pieces.num_bytes == self.source_block_bytes == self.target_block_bytes

    @property
    def written_bytes(self) -> int:
        """Bytes that are written in each of the target's blocks."""
        rest = 0 if self.rest is None else self.rest.num_bytes + self.rest.num_zeros
        return self.pieces.num_bytes * self.pieces.count + rest


def rank_layout(whole: KVLayout, num_ranks: int) -> KVLayout:
    """Return the layout of each rank's blocks; ConfigError where the ranks do not divide heads."""
    if num_ranks < 1 or whole.num_kv_heads % num_ranks:
        raise ConfigError(
            f"{whole.num_kv_heads} KV heads are not divided by {num_ranks} tensor-parallel ranks"
        )
    return replace(whole, num_kv_heads=whole.num_kv_heads // num_ranks)


def plan_heads(whole: KVLayout, num_sources: int, num_targets: int) -> tuple[HeadTransfer, ...]:
    """Return all transfers between workers of so many ranks each; ``whole`` has all KV heads.

    They are in the order of the source ranks, then of the target ranks. ConfigError where the ranks
    do not divide the heads.
    """
    source, target = rank_layout(whole, num_sources), rank_layout(whole, num_targets)
    return tuple(
        transfer
        for source_rank in range(num_sources)
        for target_rank in range(num_targets)
        if (transfer := _between(source, source_rank, target, target_rank)) is not None
    )


def _between(
    source: KVLayout, source_rank: int, target: KVLayout, target_rank: int
) -> HeadTransfer | None:
    source_first = source_rank * source.num_kv_heads
    target_first = target_rank * target.num_kv_heads
    first = max(source_first, target_first)
    last = min(source_first + source.num_kv_heads, target_first + target.num_kv_heads)
    if first >= last:
        return None
    head_bytes = source.head_dim * source.element_bytes
    source_stride = source.num_kv_heads * head_bytes
    target_stride = target.num_kv_heads * head_bytes
    piece = (last - first) * head_bytes
    rest = _rest(source, target) if first == target_first else None
    if piece == source_stride == target_stride:
        pieces, rest = _lone_piece(source.block_bytes), None
    else:
        pieces = Pieces(
            source_offset=(first - source_first) * head_bytes,
            target_offset=(first - target_first) * head_bytes,
            num_bytes=piece,
            count=source.num_layers * source.planes * source.block_size,
            source_stride=source_stride,
            target_stride=target_stride,
        )
    return HeadTransfer(
        *(source_rank, target_rank, first, last - first, pieces, rest),
        source_block_bytes=source.block_bytes,
        target_block_bytes=target.block_bytes,
    )


def _lone_piece(num_bytes: int) -> Pieces:
    return Pieces(0, 0, num_bytes, 1, num_bytes, num_bytes)


def _rest(source: KVLayout, target: KVLayout) -> Rest | None:
    """Return what a target's block has behind its heads.

    Heads end at a multiple of 16 bytes, where the scales begin. These are filled up with padding to
    a multiple of 16: both blocks have it.
    """
    scales = SCALE_BYTES * len(target.scales)
    num_bytes = -(-scales // VECTOR_BYTES) * VECTOR_BYTES
    num_zeros = target.block_bytes - target.payload_bytes - num_bytes
    if not num_bytes and not num_zeros:
        return None
    return Rest(source.payload_bytes, target.payload_bytes, num_bytes, num_zeros)
