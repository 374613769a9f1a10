"""Blocks of KV as FP8 E4M3 with scales: half the bytes of 16-bit numbers, a quarter of 32-bit ones.

An encoded block, little-endian::

    numbers | pad to 16 | scales | zeros to 4096
    numbers   (layers, planes, block_size, kv_heads, head_dim), one byte each
    scales    (layers, planes, kv_heads) float32: number = stored number * scale

A scale is the least power of two with which its group's greatest number stays within E4M3's 448.
Multiplying by it rounds nothing, so a number is off by half a unit in the last of E4M3's four
binary digits at most: 1/16 of itself, or 2**-10 of the scale where it is smaller than 2**-6 of
that. And a block that was decoded is encoded to the same numbers again, however often.

Numbers that are not finite, or that the pool's type could not hold once they are rounded up, have
no place in it: such a block cannot be encoded.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from common.kv.layout import PAGE_BYTES, SCALE_BYTES, TRAILER_ALIGNMENT, KVLayout
from common.storage.interface import Memory

FP8 = "fp8"
FP8_MAX = 448.0
_CHUNK_ELEMENTS = 32767
"""Worked on at a time: they stay in the cache, and from one more on torch would share the work out
to threads, which compete with those that compute the model."""
_MAX_EXPONENT = 119
"""Of a scale: beyond, 448 times it is no float32."""


@dataclass(frozen=True, slots=True)
class _Numbers:
    """A type of a pool's numbers. ``limit`` is the greatest that it holds when rounded to E4M3, and
    ``min_exponent`` the least of a scale whose every multiple it holds exactly.
    """

    dtype: torch.dtype
    limit: float
    min_exponent: int


_NUMBERS = {
    "float32": _Numbers(torch.float32, math.ldexp(FP8_MAX, _MAX_EXPONENT), -126),
    "bfloat16": _Numbers(torch.bfloat16, math.ldexp(FP8_MAX, _MAX_EXPONENT), -124),
    "float16": _Numbers(torch.float16, 61440.0, -15),
}


@dataclass(frozen=True, slots=True)
class BlockError:
    """How far a decoded block is from what was encoded.

    ``rms`` is the root mean square of the differences by that of the numbers, ``greatest`` the
    greatest difference by the greatest number; both 0 for a block of zeros.
    """

    rms: float
    greatest: float


@dataclass(frozen=True, slots=True)
class _Chunk:
    planes: slice
    heads: slice


class Fp8Codec:
    """Encodes and decodes blocks of one layout. Without state: any thread may use it.

    ValueError for a layout whose numbers are quantised already. Blocks and encoded blocks are
    memory of ``block_bytes`` and ``encoded_bytes`` bytes at least.
    """

    def __init__(self, layout: KVLayout) -> None:
        if layout.is_quantised:
            raise ValueError(f"numbers of {layout.element_dtype} are not encoded to {FP8}")
        self.block_bytes = layout.block_bytes
        self._numbers = _NUMBERS[layout.dtype]
        self._payload_bytes = layout.payload_bytes
        num_planes = layout.num_layers * layout.planes
        self._shape = (num_planes, layout.block_size, layout.num_kv_heads, layout.head_dim)
        self._num_elements = math.prod(self._shape)
        self._groups = (num_planes, layout.num_kv_heads)
        self._scales_at = -(-self._num_elements // TRAILER_ALIGNMENT) * TRAILER_ALIGNMENT
        self._end = self._scales_at + SCALE_BYTES * math.prod(self._groups)
        self.encoded_bytes = -(-self._end // PAGE_BYTES) * PAGE_BYTES
        self._chunks = tuple(_chunks(*self._shape))

    def try_encode(self, block: Memory, encoded: Memory) -> bool:
        """Encode a block; False, with undefined bytes in ``encoded``, where that cannot be."""
        source, (codes, scales) = self._plain(block), self._parts(encoded)
        greatest = torch.empty(self._groups)
        for chunk in self._chunks:
            work = source[chunk.planes, :, chunk.heads].float().abs()
            greatest[chunk.planes, chunk.heads] = work.amax(1).amax(-1)
        if not bool((greatest <= self._numbers.limit).all()):  # neither is one that is NaN
            return False
        exponents = _exponents(greatest).clamp_(min=self._numbers.min_exponent)
        scales.copy_(torch.ldexp(torch.ones(self._groups), exponents))
        factors = _spread(torch.ldexp(torch.ones(self._groups), -exponents))
        for chunk in self._chunks:
            work = source[chunk.planes, :, chunk.heads].float()
            part = codes[chunk.planes, :, chunk.heads].view(torch.float8_e4m3fn)
            part.copy_(work * factors[chunk.planes, :, chunk.heads])
        with memoryview(encoded).cast("B") as view:
            view[self._num_elements : self._scales_at] = bytes(self._scales_at - self._num_elements)
            view[self._end : self.encoded_bytes] = bytes(self.encoded_bytes - self._end)
        return True

    def decode(self, encoded: Memory, block: Memory) -> None:
        """Decode what ``try_encode`` made; the padding of ``block`` becomes zeros."""
        target, (codes, scales) = self._plain(block), self._parts(encoded)
        factors = _spread(scales)
        for chunk in self._chunks:
            part = target[chunk.planes, :, chunk.heads]
            part.copy_(_decoded(codes, factors, chunk))
        with memoryview(block).cast("B") as view:
            view[self._payload_bytes : self.block_bytes] = bytes(
                self.block_bytes - self._payload_bytes
            )

    def error(self, block: Memory, encoded: Memory) -> BlockError:
        """Return how far ``encoded`` is from the block that it was made of."""
        source, (codes, scales) = self._plain(block), self._parts(encoded)
        # In units of the greatest scale, so that squares stay within float32.
        unit = float(scales.max())
        factors = _spread(scales / unit)
        squares = error_squares = greatest = greatest_error = 0.0
        for chunk in self._chunks:
            work = source[chunk.planes, :, chunk.heads].float() / unit
            difference = _decoded(codes, factors, chunk).sub_(work)
            squares += float(work.square().sum())
            error_squares += float(difference.square().sum())
            greatest = max(greatest, _greatest(work))
            greatest_error = max(greatest_error, _greatest(difference))
        if squares == 0:
            return BlockError(0.0, 0.0)
        return BlockError(math.sqrt(error_squares / squares), greatest_error / greatest)

    def _plain(self, block: Memory) -> torch.Tensor:
        numbers = torch.frombuffer(
            _writable(block), dtype=self._numbers.dtype, count=self._num_elements
        )
        return numbers.view(self._shape)

    def _parts(self, encoded: Memory) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes (as signed bytes) and scales, in place."""
        memory = _writable(encoded)
        codes = torch.frombuffer(memory, dtype=torch.int8, count=self._num_elements)
        scales = torch.frombuffer(
            memory,
            dtype=torch.float32,
            count=math.prod(self._groups),
            offset=self._scales_at,
        )
        return codes.view(self._shape), scales.view(self._groups)


def _decoded(codes: torch.Tensor, factors: torch.Tensor, chunk: _Chunk) -> torch.Tensor:
    """Return numbers as float32.

    E4M3 is float16 with fewer digits: moved to their places, sign, exponent and mantissa read as
    2**-8 of the number. Torch's own conversion looks at one number at a time.
    """
    wide = codes[chunk.planes, :, chunk.heads].to(torch.int16)
    wide.bitwise_left_shift_(7).bitwise_and_(~0x4000)  # the sign was copied to the bit below it
    numbers = wide.view(torch.float16).float()
    return numbers.mul_(factors[chunk.planes, :, chunk.heads] * 256.0)


def _exponents(greatest: torch.Tensor) -> torch.Tensor:
    """Return the least powers of two by which 448 is at least these numbers."""
    mantissas, exponents = torch.frexp(greatest)
    return exponents - 9 + (mantissas > FP8_MAX / 512)


def _spread(groups: torch.Tensor) -> torch.Tensor:
    """Lay numbers of groups beside the numbers that they are for."""
    return groups[:, None, :, None]


def _greatest(numbers: torch.Tensor) -> float:
    low, high = torch.aminmax(numbers)
    return max(-float(low), float(high))


def _chunks(num_planes: int, block_size: int, num_heads: int, head_dim: int) -> Iterator[_Chunk]:
    """Yield pieces that have whole groups each."""
    group = block_size * head_dim
    heads_step = min(num_heads, max(1, _CHUNK_ELEMENTS // group))
    planes_step = max(1, _CHUNK_ELEMENTS // (group * num_heads))
    for plane in range(0, num_planes, planes_step):
        for head in range(0, num_heads, heads_step):
            yield _Chunk(slice(plane, plane + planes_step), slice(head, head + heads_step))


def _writable(memory: Memory) -> Memory:
    """Return the memory, or a copy of what can only be read: tensors cannot lie there."""
    with memoryview(memory) as view:
        return bytearray(view) if view.readonly else memory
