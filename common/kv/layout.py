"""The block-major layout of KV memory, ``(B, L, 2, H)`` (FlowKV 1.2).

One block of all layers is one contiguous run of ``block_bytes``, so that a run of adjacent blocks
moves in one copy::

    block b   | layer 0: K, V | layer 1: K, V | ... | layer L-1: K, V | padding to 4096 |
    K (or V)  (block_size, kv_heads, head_dim) elements

A quantised block holds numbers of one byte and says itself what they stand for::

    block b   | layer 0: K, V | ... | layer L-1: K, V | pad to 16 | trailer | padding to 4096 |
    trailer   (layers, planes) float32: number = stored number * scale

The trailer is inside of ``block_bytes``: what moves, stores or sums blocks does so to their scales.
"""

import hashlib
import math
from dataclasses import dataclass

PAGE_BYTES = 4096
TRAILER_ALIGNMENT = 16
SCALE_BYTES = 4
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
QUANTISED_BYTES = {"float8_e4m3": 1}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of the pool's blocks. ``block_size`` is in tokens, ``dtype`` the model's torch name.

    ``kv_cache_dtype`` is the type of the pool's numbers, ``auto`` the model's own. ``scales`` are
    those of every quantised block, (layers, planes) row by row; left out they are 1, and 16-bit and
    32-bit pools have none. ValueError for other types, other numbers of scales, and scales that are
    no positive numbers.
    """

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    planes: int = 2
    kv_cache_dtype: str = "auto"
    scales: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Give a quantised layout its scales, and refuse what fits no block."""
        if not self.is_quantised:
            if self.kv_cache_dtype != "auto":
                raise ValueError(f"there is no KV cache of {self.kv_cache_dtype}")
            if self.scales:
                raise ValueError(f"numbers of {self.dtype} have no scales")
            return
        count = self.num_layers * self.planes
        if not self.scales:
            object.__setattr__(self, "scales", (1.0,) * count)
        if len(self.scales) != count:
            raise ValueError(f"{len(self.scales)} scales are not one a layer and plane, {count}")
        for scale in self.scales:
            if not (math.isfinite(scale) and scale > 0):
                raise ValueError(f"{scale} is no scale")

    @property
    def is_quantised(self) -> bool:
        """Whether the pool's numbers are scaled and smaller than the model's."""
        return self.kv_cache_dtype in QUANTISED_BYTES

    @property
    def element_dtype(self) -> str:
        """Type of the pool's numbers."""
        return self.kv_cache_dtype if self.is_quantised else self.dtype

    @property
    def element_bytes(self) -> int:
        """Bytes of one number."""
        if self.is_quantised:
            return QUANTISED_BYTES[self.kv_cache_dtype]
        return ELEMENT_BYTES[self.dtype]

    @property
    def plane_elements(self) -> int:
        """Numbers in one layer's K (or V) of one block: the paper's H."""
        return self.block_size * self.num_kv_heads * self.head_dim

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token over all layers."""
        per_layer = self.planes * self.num_kv_heads * self.head_dim
        return self.num_layers * per_layer * self.element_bytes

    @property
    def payload_bytes(self) -> int:
        """Bytes of one block that carry numbers."""
        return self.block_size * self.token_bytes

    @property
    def trailer_offset(self) -> int:
        """Where in a block its scales begin, in bytes."""
        return -(-self.payload_bytes // TRAILER_ALIGNMENT) * TRAILER_ALIGNMENT

    @property
    def block_bytes(self) -> int:
        """Distance between blocks in bytes: all they hold, padded to a multiple of 4096."""
        num_bytes = self.payload_bytes
        if self.is_quantised:
            num_bytes = self.trailer_offset + SCALE_BYTES * len(self.scales)
        return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES

    def scales_of(self, layer: int) -> tuple[float, ...]:
        """Return a layer's scales, one a plane; a number is what is stored times its scale."""
        return self.scales[layer * self.planes : (layer + 1) * self.planes]

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def fingerprint(self) -> str:
        """Return 16 hex digits that two pools share only when raw block copies are right."""
        fields: tuple[object, ...] = (
            self.num_layers,
            self.planes,
            self.block_size,
            self.num_kv_heads,
            self.head_dim,
            self.dtype,
            self.block_bytes,
        )
        if self.is_quantised:
            fields += (self.kv_cache_dtype, self.trailer_offset, self.scales)
        return hashlib.sha256(repr(fields).encode()).hexdigest()[:16]
