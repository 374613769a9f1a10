"""Weights from a random generator, for benchmarks: a model's config.json is enough."""

import math

import torch

from common.engine.shard import WHOLE, Shard
from common.engine.weights import expected_tensors, shard_parts
from common.models.config import ModelConfig

DUMMY_SEED = 20
DUMMY_BIAS = 0.02


class RandomWeights:
    """Draws weights that keep the size of what passes through them; the same in every process.

    A shard of them is drawn whole and cut, so that any number of ranks makes the same model.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard = WHOLE,
    ) -> None:
        self._shapes = expected_tensors(config)
        self._parts = shard_parts(config, shard)
        self._dtype = dtype
        self._device = device
        self._generator = torch.Generator(device).manual_seed(DUMMY_SEED)

    def tensor(self, name: str) -> torch.Tensor:
        """Draw the shard's part of the tensor of a name of ``expected_tensors``."""
        tensor = self._draw(name)
        part = self._parts.get(name)
        return tensor if part is None else tensor[part].contiguous()

    def _draw(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        if name.endswith("norm.weight"):
            return tensor.fill_(1.0)
        spread = DUMMY_BIAS if len(shape) == 1 else 1 / math.sqrt(shape[1])
        return tensor.normal_(std=spread, generator=self._generator)
