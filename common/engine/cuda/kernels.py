"""What a decoder layer needs beside its matrix products, and the arithmetic that all share."""

from collections.abc import Callable
from typing import Protocol

import torch

from common.engine.cuda.device_batch import DeviceBatch
from common.engine.cuda.model import DTYPES
from common.engine.cuda.products import Product
from common.engine.cuda.scales import E4M3
from common.engine.weights import LayerWeights
from common.kv.layout import KVLayout

POOL_DTYPES = DTYPES | {"float8_e4m3": E4M3}


PlaceOf = Callable[[int], int]
"""Where in the pool's view a layer's K and V lie."""


def own_place(layer: int) -> int:
    """Return the layer: each has a place of its own."""
    return layer


class Kernels(Protocol):
    """Over one pool, and one batch at a time. Tensors are contiguous and in the model's type.

    ``rotate_store`` writes K and V into the pool, attention reads them there. Prompts from their
    begin attend to k and v as they were computed, which differ where the pool is quantised.
    """

    def begin(self, batch: DeviceBatch) -> None:
        """Take the batch that the next calls work on."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the RMSNorm of (rows, size)."""
        ...

    def add_rms_norm(
        self, delta: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """Add ``delta`` to ``residual`` in place and return the RMSNorm of the sum.

        ``delta`` may be overwritten.
        """
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up of (rows, 2 * size), gate first."""
        ...

    def rotate_store(
        self,
        layer: int,
        weights: LayerWeights[Product],
        heads: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Normalise (where there are weights) and rotate q and k in place; store k and v.

        ``heads`` is (tokens, q, k and v of all heads), or of k and v alone. ``positions`` and
        ``slots`` are int32, one a token; nothing is stored for a negative slot.
        """
        ...

    def attend(self, layer: int, heads: torch.Tensor) -> torch.Tensor:
        """Return causal attention of all the batch's tokens, (tokens, num_heads * head_dim)."""
        ...

    def attend_tail(self, layer: int, heads: torch.Tensor) -> torch.Tensor:
        """Return the attention of the sampled tokens alone; ``heads`` has only theirs."""
        ...


def pool_view(pool: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    """Return a pool's bytes as (blocks, layers, planes, block_size, kv_heads, head_dim).

    A view: blocks are ``layout.block_bytes`` apart, their padding and scales are no part of it.
    ValueError where the pool is no whole number of blocks.
    """
    if pool.dtype != torch.uint8 or pool.dim() != 1 or not pool.is_contiguous():
        raise ValueError("the pool must be one contiguous run of bytes")
    if not pool.numel() or pool.numel() % layout.block_bytes:
        raise ValueError(
            f"a pool of {pool.numel()} bytes is no multiple of blocks of {layout.block_bytes}"
        )
    num_blocks = pool.numel() // layout.block_bytes
    blocks = pool.view(POOL_DTYPES[layout.element_dtype]).view(num_blocks, -1)
    payload = blocks[:, : layout.payload_bytes // layout.element_bytes]
    shape = (layout.num_layers, layout.planes, layout.block_size)
    return payload.view(num_blocks, *shape, layout.num_kv_heads, layout.head_dim)
