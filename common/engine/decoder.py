"""The forward pass of a dense decoder over one ragged batch."""

import torch

from common.engine.batch import Batch
from common.engine.chunk_attention import ChunkAttention
from common.engine.kernels import DecoderKernels
from common.engine.weights import DecoderWeights, LayerWeights
from common.models.config import ModelConfig


class Decoder:
    """Computes logits; K and V go to the pool and are read from there alone."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        kernels: DecoderKernels,
        pool: torch.Tensor,
    ) -> None:
        """``pool`` is the strided view (blocks, layers, 2, block_size, kv_heads, head_dim)."""
        self._config = config
        self._weights = weights
        self._kernels = kernels
        self._pool = pool
        self._chunk_attention = ChunkAttention(pool.dtype)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return float32 logits (sampled tokens, vocabulary) after writing all K and V.

        Of the last layer, only what the sampled tokens need is computed after its attention.
        """
        kernels, epsilon = self._kernels, self._config.rms_norm_eps
        kernels.set_batch(batch)
        layers = self._weights.layers
        x = self._weights.embedding[batch.token_ids]
        delta: torch.Tensor | None = None
        for index, layer in enumerate(layers):
            if delta is None:
                hidden = kernels.rms_norm(x, layer.input_norm, epsilon)
            else:
                hidden = kernels.add_rms_norm(x, delta, layer.input_norm, epsilon)
            attended = self._attend(index, layer, hidden, batch)
            if index == len(layers) - 1:
                if not len(batch.sampled_tokens):
                    return x.new_empty((0, self._config.vocab_size), dtype=torch.float32)
                if len(batch.sampled_tokens) < batch.num_tokens:
                    x, attended = x[batch.sampled_tokens], attended[batch.sampled_tokens]
            delta = layer.output(attended)
            hidden = kernels.add_rms_norm(x, delta, layer.post_attention_norm, epsilon)
            delta = layer.down(kernels.silu_mul(layer.gate_up(hidden)))
        assert delta is not None  # a model has at least one layer
        hidden = kernels.add_rms_norm(x, delta, self._weights.final_norm, epsilon)
        return self._weights.lm_head(hidden).float()

    def _attend(
        self, index: int, layer: LayerWeights, hidden: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        config, window = self._config, self._config.layer_windows[index]
        qkv = layer.qkv(hidden)
        norms = (layer.q_norm, layer.k_norm)
        self._kernels.rotate_store(index, qkv, norms, config.rms_norm_eps)
        out = qkv.new_empty((batch.num_tokens, config.q_size))
        if batch.num_paged:
            self._kernels.attend(index, qkv, out, window)
        if batch.chunks:
            heads = qkv.view(batch.num_tokens, -1, config.head_dim)
            query = heads[:, : config.num_heads]
            key, value = heads[:, config.num_heads :].chunk(2, dim=1)
            out_heads = out.view(batch.num_tokens, config.num_heads, config.head_dim)
            for chunk in batch.chunks:
                rows = slice(chunk.first, chunk.last)
                if chunk.start:
                    end = chunk.start + chunk.last - chunk.first
                    k, v = (self._gather(index, plane, chunk.block_table, end) for plane in (0, 1))
                else:
                    k, v = key[rows], value[rows]
                out_heads[rows] = self._chunk_attention(query[rows], k, v, window)
        return out

    def _gather(self, layer: int, plane: int, blocks: torch.Tensor, end: int) -> torch.Tensor:
        """Return K (plane 0) or V of positions 0 .. end - 1, (end, kv_heads, head_dim)."""
        return self._pool[blocks, layer, plane].flatten(0, 1)[:end]
