"""The forward pass of a dense decoder over one ragged batch."""

import torch

from common.engine.batch import Batch
from common.engine.communicator import Communicator
from common.engine.head import LogitsHead
from common.engine.kernels import DecoderKernels
from common.engine.linear import Linear
from common.engine.weights import DecoderWeights, LayerWeights
from common.models.config import ModelConfig


class Decoder:
    """Computes logits; K and V go to the pool and are read from there alone.

    ``config`` is that of the rank's shard, and ``communicator`` adds up what the ranks compute.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights[Linear, LogitsHead],
        kernels: DecoderKernels,
        communicator: Communicator,
    ) -> None:
        self._config = config
        self._weights = weights
        self._kernels = kernels
        self._sum = communicator.sum

    def set_batch(self, batch: Batch) -> None:
        """Take the batch that is computed next; ValueError where an index is out of range."""
        self._kernels.set_batch(batch)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return float32 logits (sampled tokens, vocabulary) after writing all K and V.

        It is the batch that was set. A rank without a head returns no rows. Of the last layer, only
        what the sampled tokens need is computed after its attention.
        """
        kernels, epsilon = self._kernels, self._config.rms_norm_eps
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
                    return self._no_logits(x)
                if len(batch.sampled_tokens) < batch.num_tokens:
                    x, attended = x[batch.sampled_tokens], attended[batch.sampled_tokens]
            delta = self._sum(layer.output(attended))
            hidden = kernels.add_rms_norm(x, delta, layer.post_attention_norm, epsilon)
            delta = self._sum(layer.down(kernels.silu_mul(layer.gate_up(hidden))))
        assert delta is not None  # a model has at least one layer
        if self._weights.head is None:
            return self._no_logits(x)
        hidden = kernels.add_rms_norm(x, delta, self._weights.final_norm, epsilon)
        return self._weights.head(hidden)

    def _no_logits(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_empty((0, self._config.vocab_size), dtype=torch.float32)

    def _attend(
        self, index: int, layer: LayerWeights[Linear], hidden: torch.Tensor
    ) -> torch.Tensor:
        qkv = layer.qkv(hidden)
        norms = (layer.q_norm, layer.k_norm)
        self._kernels.rotate_store(index, qkv, norms, self._config.rms_norm_eps)
        return self._kernels.attend(index, qkv, self._config.layer_windows[index])
