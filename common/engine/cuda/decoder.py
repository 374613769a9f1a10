"""The forward pass of a dense decoder over one batch on one device."""

import torch
from torch.nn import functional

from common.engine.communicator import ALONE, Communicator
from common.engine.cuda.device_batch import DeviceBatch
from common.engine.cuda.kernels import Kernels
from common.engine.cuda.model import CudaModel
from common.engine.cuda.products import Product
from common.engine.cuda.step_batch import SKIPPED_SLOT
from common.engine.weights import LayerWeights


class CudaDecoder:
    """Enqueues the computation of logits; K and V go to the pool and are read from there alone.

    What the ranks of a parallel engine compute is added up by the communicator.
    """

    def __init__(
        self, model: CudaModel, kernels: Kernels, communicator: Communicator = ALONE
    ) -> None:
        self._config = model.config
        self._weights = model.weights
        self._kernels = kernels
        self._sum = communicator.sum
        # What the last layer needs of the tokens that are not sampled.
        self._last_kv = model.weights.layers[-1].qkv.outputs_from(model.config.q_size)

    @property
    def has_head(self) -> bool:
        """Whether this rank computes logits."""
        return self._weights.head is not None

    def forward(
        self, batch: DeviceBatch, token_ids: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Write all K and V and return float32 logits (sampled tokens, vocabulary), in ``out``.

        None when nothing is sampled, and in a rank without a head. ``kernels.begin(batch)`` came
        before. Of the last layer, K and V are computed for all tokens and all else for the sampled
        ones.
        """
        kernels, layers = self._kernels, self._weights.layers
        x = functional.embedding(token_ids, self._weights.embedding)
        hidden = kernels.rms_norm(x, layers[0].input_norm)
        for index, layer in enumerate(layers[:-1]):
            heads = layer.qkv(hidden)
            kernels.rotate_store(index, layer, heads, batch.positions, batch.slots)
            delta = self._sum(layer.output(kernels.attend(index, heads)))
            next_norm = layers[index + 1].input_norm
            hidden = self._finish_layer(layer, delta, x, next_norm)
        last, layer = len(layers) - 1, layers[-1]
        if batch.tail is None:
            heads = layer.qkv(hidden)
            kernels.rotate_store(last, layer, heads, batch.positions, batch.slots)
            attended = kernels.attend(last, heads)
        else:
            heads = self._last_kv(hidden)
            kernels.rotate_store(last, layer, heads, batch.positions, batch.slots)
            if not len(batch.sampled_tokens):
                return None
            x, hidden = x[batch.sampled_tokens], hidden[batch.sampled_tokens]
            positions = batch.positions[batch.sampled_tokens]
            heads = layer.qkv(hidden)
            skipped = torch.full_like(positions, SKIPPED_SLOT)
            kernels.rotate_store(last, layer, heads, positions, skipped)
            attended = kernels.attend_tail(last, heads)
        delta = self._sum(layer.output(attended))
        hidden = self._finish_layer(layer, delta, x, self._weights.final_norm)
        head = self._weights.head
        return None if head is None else head(hidden, out)

    def _finish_layer(
        self,
        layer: LayerWeights[Product],
        delta: torch.Tensor,
        x: torch.Tensor,
        next_norm: torch.Tensor,
    ) -> torch.Tensor:
        """Add the attention's output and the MLP's to ``x`` and return the next hidden state."""
        kernels = self._kernels
        hidden = kernels.add_rms_norm(delta, x, layer.post_attention_norm)
        delta = self._sum(layer.down(kernels.silu_mul(layer.gate_up(hidden))))
        return kernels.add_rms_norm(delta, x, next_norm)
