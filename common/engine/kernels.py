"""The native kernels of a decoder layer, called with tensors."""

import torch
from flowpath_native import CpuKernels

from common.engine.batch import Batch
from common.kv.layout import KVLayout


class DecoderKernels:
    """Everything of a layer beside its matrix products, over one pool and one batch at a time.

    Tensors are contiguous and of the layout's dtype; they go to the native code by address,
    because the usual exchange of one tensor costs more than a small kernel, and there are a dozen
    in each layer.
    """

    def __init__(
        self,
        layout: KVLayout,
        pool: torch.Tensor,
        num_heads: int,
        tables: tuple[torch.Tensor, torch.Tensor],
        num_threads: int,
    ) -> None:
        """``pool`` is the uint8 bytes of all blocks, ``tables`` are (cosine, sine)."""
        self._native = CpuKernels(
            pool.numpy(),
            num_layers=layout.num_layers,
            block_size=layout.block_size,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            block_bytes=layout.block_bytes,
            dtype=layout.dtype,
            num_heads=num_heads,
            cosine=tables[0].numpy(),
            sine=tables[1].numpy(),
            num_threads=num_threads,
        )
        self._scale = layout.head_dim**-0.5
        self._q_size = num_heads * layout.head_dim

    def set_batch(self, batch: Batch) -> None:
        """Take the batch that the next calls work on; ValueError where an index is out of range."""
        self._native.set_batch(batch.positions, batch.slots, batch.tables, batch.chunks)

    def rotate_store(
        self,
        layer: int,
        qkv: torch.Tensor,
        norms: tuple[torch.Tensor | None, torch.Tensor | None],
        epsilon: float,
    ) -> None:
        """Normalise (where there are weights) and rotate q and k in place; store k and v."""
        self._native.rotate_store(
            layer, _address(qkv), _address(norms[0]), _address(norms[1]), epsilon
        )

    def attend(self, layer: int, qkv: torch.Tensor, window: int | None) -> torch.Tensor:
        """Return causal attention of all tokens over the pool, (tokens, num_heads * head_dim).

        ``window`` is how many positions a token sees, itself included.
        """
        out = qkv.new_empty((len(qkv), self._q_size))
        self._native.attend(layer, _address(qkv), _address(out), window or 0, self._scale)
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """Return the RMSNorm of (rows, size)."""
        return self._norm(x, None, weight, epsilon)

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """Add ``delta`` to ``x`` in place and return the RMSNorm of the sum."""
        return self._norm(x, delta, weight, epsilon)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up of (rows, 2 * size), gate first."""
        rows, width = gate_up.shape
        out = gate_up.new_empty((rows, width // 2))
        self._native.silu_mul(_address(gate_up), _address(out), rows, width // 2)
        return out

    def _norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        out = torch.empty_like(x)
        rows, size = x.shape
        self._native.rms_norm(
            _address(x), _address(delta), _address(weight), _address(out), rows, size, epsilon
        )
        return out


def _address(tensor: torch.Tensor | None) -> int:
    if tensor is None:
        return 0
    if not tensor.is_contiguous():
        raise ValueError("kernels take contiguous tensors")
    return tensor.data_ptr()
