"""FP8 numbers and the scales that lie beside them in every block (see ``KVLayout``).

Scales are constants of an engine, one a layer and plane. They are written into a block's trailer
with its first slot and compared before a token drawn from the block is given out: so a block is
right or refused, whichever engine, tier or link it came from.
"""

import torch
from torch.nn import functional

from common.engine.cuda.device_batch import TensorRows
from common.kv.layout import SCALE_BYTES, KVLayout

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max


class BlockScales:
    """The trailers of a pool of quantised blocks."""

    def __init__(self, pool: torch.Tensor, layout: KVLayout) -> None:
        """``pool`` is the uint8 memory of all blocks."""
        shape = (layout.num_layers, layout.planes)
        blocks = pool.view(torch.float32).view(-1, layout.block_bytes // SCALE_BYTES)
        first = layout.trailer_offset // SCALE_BYTES
        self.trailers = blocks[:, first : first + len(layout.scales)].view(-1, *shape)
        """(blocks, layers, planes) float32, a view."""
        self._expected = torch.tensor(layout.scales, device=pool.device).view(shape)

    def write(self, layer: int, blocks: torch.Tensor) -> None:
        """Write a layer's scales into the trailers of ``blocks``, int64 and possibly repeated."""
        self.trailers[blocks, layer] = self._expected[layer]

    def foreign_rows(self, rows: TensorRows) -> torch.Tensor:
        """Tell of each row whether it has a block with other scales; bool, enqueued alone."""
        trailers = self.trailers.index_select(0, rows.indices)
        is_foreign = (trailers != self._expected).flatten(1).any(dim=1)
        # How many there are before each row's end, so that a row has those between two ends.
        counts = functional.pad(is_foreign.cumsum(0), (1, 0)).index_select(0, rows.indptr)
        return counts[1:] != counts[:-1]


def quantise(numbers: torch.Tensor, scale: float) -> torch.Tensor:
    """Return numbers as ``dequantise`` takes them; those out of range become the largest."""
    scaled = numbers.float() * inverse_of(scale)
    return scaled.clamp(-LARGEST, LARGEST).to(E4M3)


def dequantise(stored: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the float32 numbers that stored ones stand for."""
    return stored.float() * scale


def inverse_of(scale: float) -> float:
    """Return what numbers are multiplied with before they are stored, in float32's precision."""
    return float(1 / torch.tensor(scale, dtype=torch.float32))
