"""Driving an engine over a small pool: block tables, rows, and the logits behind its draws."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from common.engine.cpu_engine import CpuEngine
from common.engine.dtype import TORCH_DTYPES, load_model_layout
from common.engine.interface import SampleSpec, StepRow
from common.kv.layout import KVLayout
from common.models.config import ModelConfig
from common.sampling import SampledToken, SamplingParams

GREEDY = SamplingParams(seed=0, max_tokens=1000, temperature=0.0, num_logprobs=20)


class PooledEngine:
    """An engine, its pool, and a hand that gives out blocks in random order."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: str = "float32",
        block_size: int = 16,
        num_blocks: int = 64,
        seed: int = 0,
        num_threads: int = 1,
    ) -> None:
        self.config = ModelConfig.load(folder)
        self.layout = load_model_layout(self.config, dtype, block_size)
        # NaN everywhere: what is read without having been written shows.
        self.pool = torch.full((num_blocks * self.layout.block_bytes,), 255, dtype=torch.uint8)
        self.engine = CpuEngine(folder, self.layout, self.pool, num_threads)
        order = np.random.default_rng(seed).permutation(num_blocks)
        self._free = [int(block) for block in order]

    def blocks_for(self, num_tokens: int) -> list[int]:
        count = self.layout.num_blocks_for(num_tokens)
        taken, self._free = self._free[:count], self._free[count:]
        assert len(taken) == count, "the test's pool is too small"
        return taken

    def execute(self, *rows: StepRow) -> list[tuple[SampledToken, ...]]:
        return self.engine.execute(rows)


def pool_view(pool: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    """Return the pool's bytes as (blocks, layers, planes, block_size, kv_heads, head_dim).

    A view: blocks are ``layout.block_bytes`` apart, their padding is not part of it.
    """
    elements = pool.view(TORCH_DTYPES[layout.dtype])
    num_blocks = pool.numel() // layout.block_bytes
    shape = (
        num_blocks,
        layout.num_layers,
        layout.planes,
        layout.block_size,
        layout.num_kv_heads,
        layout.head_dim,
    )
    blocks = elements.view(num_blocks, layout.block_bytes // layout.element_bytes)
    return blocks[:, : layout.payload_bytes // layout.element_bytes].view(shape)


def row(
    token_ids: Sequence[int],
    start: int,
    block_table: Sequence[int],
    *,
    params: SamplingParams | None = GREEDY,
    output: Sequence[int] = (),
) -> StepRow:
    samples = () if params is None else (SampleSpec(params, 0, (), output),)
    return StepRow(token_ids, start, block_table, samples)


def assert_logprobs_match(
    token: SampledToken, logits: torch.Tensor, tolerance: float = 1e-3
) -> None:
    """Compare a drawn token's logprobs with reference logits of its position."""
    expected = logits.float().log_softmax(dim=0)
    assert token.logprob is not None
    for token_id, logprob in ((token.token_id, token.logprob), *token.top_logprobs):
        assert abs(float(expected[token_id]) - logprob) < tolerance
    best = float(expected.max())
    assert best - float(expected[token.token_id]) < tolerance, "not the reference's best token"
