"""The forward pass of a dense decoder over one ragged batch."""

import torch

from common.engine.batch import Batch
from common.engine.head import LogitsHead
from common.engine.kernels import DecoderKernels
from common.engine.linear import Linear
from common.engine.weights import DecoderWeights, LayerWeights
from common.models.config import ModelConfig


class Decoder:
    """Computes logits; K and V go to the pool and are read from there alone."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights[Linear, LogitsHead],
        kernels: DecoderKernels,
    ) -> None:
        self._config = config
        self._weights = weights
        self._kernels = kernels

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
            attended = self._attend(index, layer, hidden)
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
        return self._weights.head(hidden)

    def _attend(
        self, index: int, layer: LayerWeights[Linear], hidden: torch.Tensor
    ) -> torch.Tensor:
        qkv = layer.qkv(hidden)
        norms = (layer.q_norm, layer.k_norm)
        self._kernels.rotate_store(index, qkv, norms, self._config.rms_norm_eps)
        return self._kernels.attend(index, qkv, self._config.layer_windows[index])
