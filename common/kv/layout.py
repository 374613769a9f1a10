"""The block-major layout of KV memory, ``(B, L, 2, H)`` (FlowKV 1.2).

One block of all layers is one contiguous run of ``block_bytes``, so that a run of adjacent blocks
moves in one copy::

    block b   | layer 0: K, V | layer 1: K, V | ... | layer L-1: K, V | padding to 4096 |
    K (or V)  (block_size, kv_heads, head_dim) elements
"""

import hashlib
from dataclasses import dataclass

PAGE_BYTES = 4096
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of the pool's blocks. ``block_size`` is in tokens, ``dtype`` a torch name."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    planes: int = 2

    @property
    def element_bytes(self) -> int:
        """Bytes of one number."""
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
    def block_bytes(self) -> int:
        """Distance between blocks in bytes: the payload padded to a multiple of 4096."""
        return -(-self.payload_bytes // PAGE_BYTES) * PAGE_BYTES

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def fingerprint(self) -> str:
        """Return 16 hex digits that two pools share only when raw block copies are right."""
        fields = (
            self.num_layers,
            self.planes,
            self.block_size,
            self.num_kv_heads,
            self.head_dim,
            self.dtype,
            self.block_bytes,
        )
        return hashlib.sha256(repr(fields).encode()).hexdigest()[:16]
