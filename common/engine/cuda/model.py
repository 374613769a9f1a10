"""A model on its device: loaded before the pool exists, so that the pool gets what is left."""

from dataclasses import dataclass
from typing import Literal

import torch

from common.engine.cuda.products import Float32Head, Product
from common.engine.random_weights import RandomWeights
from common.engine.shard import WHOLE, Shard
from common.engine.weights import DecoderWeights, Makers, assemble_weights, read_weights
from common.errors import ConfigError
from common.models.config import ModelConfig

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
LoadFormat = Literal["auto", "dummy"]

CudaWeights = DecoderWeights[Product, Float32Head]
_MAKERS = Makers(Product, Float32Head)


@dataclass(frozen=True, slots=True)
class CudaModel:
    """A shard's configuration and its weights, in ``dtype`` (a torch name) on ``device``."""

    config: ModelConfig
    dtype: str
    device: torch.device
    weights: CudaWeights

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        dtype: str,
        device: torch.device,
        load_format: LoadFormat = "auto",
        shard: Shard = WHOLE,
    ) -> "CudaModel":
        """Read a shard of the folder's weights, or for ``dummy`` draw random ones.

        ``config`` is the whole model's; for ``dummy`` its file is enough. ModelError where the
        folder cannot be served, ConfigError for an unknown ``dtype`` and where the model cannot be
        split so.
        """
        if dtype not in DTYPES:
            raise ConfigError(f"dtype {dtype!r} is not supported: {', '.join(DTYPES)} are")
        kind = DTYPES[dtype]
        with torch.inference_mode():
            if load_format == "dummy":
                source = RandomWeights(config, kind, device, shard).tensor
                weights = assemble_weights(config, source, _MAKERS, shard)
            else:
                weights = read_weights(config, kind, device, _MAKERS, shard)
        return cls(shard.config(config), dtype, device, weights)
