"""A parallel engine of real processes, driven as ``engine_runs`` drives the one that is alone."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from common.engine.interface import StepRow
from common.engine.parallel.cpu import build_on_cpu
from common.engine.parallel.cuda import build_on_cuda
from common.engine.parallel.meeting import layout_of
from common.engine.parallel.messages import EngineSettings
from common.kv.pool import KVPool, PeerPool
from common.messages.fields import PoolHandle
from common.models.config import ModelConfig
from common.sampling import SampledToken, SamplingParams
from tests.support.cuda_runs import generate

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
"""A shape of the tiny models that 2 and 4 ranks divide."""


class PooledRanks:
    """The engine, the pools of all its ranks, and a hand that gives out blocks in random order."""

    def __init__(
        self,
        folder: Path,
        num_ranks: int,
        *,
        dtype: str = "float32",
        num_blocks: int = 64,
        seed: int = 0,
        has_weights: bool = True,
    ) -> None:
        settings = EngineSettings(
            folder=str(folder),
            num_ranks=num_ranks,
            engine="cpu",
            dtype=dtype,
            block_size=16,
            has_weights=has_weights,
        )
        self.config = ModelConfig.load(folder)
        self.layout = layout_of(settings)
        own = KVPool(num_blocks, self.layout.block_bytes)
        self.engine = build_on_cpu(settings, own)
        others = [handle for handle in self.engine.handles[1:] if isinstance(handle, PoolHandle)]
        self.pools: tuple[KVPool | PeerPool, ...] = (own, *map(PeerPool.open, others))
        # NaN everywhere: what is read without having been written shows.
        for pool in self.pools:
            torch.frombuffer(pool.buffer, dtype=torch.uint8).fill_(255)
        order = np.random.default_rng(seed).permutation(num_blocks)
        self._free = [int(block) for block in order]

    def blocks_for(self, num_tokens: int) -> list[int]:
        count = self.layout.num_blocks_for(num_tokens)
        taken, self._free = self._free[:count], self._free[count:]
        assert len(taken) == count, "the test's pool is too small"
        return taken

    def execute(self, *rows: StepRow) -> list[tuple[SampledToken, ...]]:
        return self.engine.execute(rows)

    def close(self) -> None:
        self.engine.close()
        for pool in self.pools:
            pool.close()


def count_ties(
    found: Sequence[SampledToken], expected: Sequence[SampledToken], noise: float
) -> int:
    """Return in how many places two equally good tokens were told apart; all else is equal.

    Both were drawn greedily, each after the same tokens.
    """
    num_ties = 0
    for token, reference in zip(found, expected, strict=True):
        wanted = dict(reference.top_logprobs)
        for token_id, logprob in token.top_logprobs:
            # Of the last of the best 20, another one may be just as good.
            assert abs(wanted.get(token_id, reference.top_logprobs[-1][1]) - logprob) < noise
        if token.token_id != reference.token_id:
            assert wanted[reference.token_id] - wanted[token.token_id] < noise
            num_ties += 1
    return num_ties


class CudaRanks:
    """The engine for GPUs with several ranks on any devices, and a hand that gives out blocks."""

    def __init__(
        self,
        folder: Path,
        devices: tuple[str, ...],
        *,
        dtype: str = "float32",
        num_blocks: int = 64,
        kv_cache_dtype: str = "auto",
        scales: tuple[float, ...] = (),
        use_graphs: bool = True,
    ) -> None:
        settings = EngineSettings(
            folder=str(folder),
            num_ranks=len(devices),
            engine="cuda",
            devices=devices,
            dtype=dtype,
            block_size=16,
            kv_cache_dtype=kv_cache_dtype,
            scales=scales,
            max_num_batched_tokens=1024,
            max_num_seqs=8,
            use_graphs=use_graphs,
        )
        self.built = build_on_cuda(settings, lambda _model, _layout: num_blocks)
        self.engine = self.built.engine
        self._free = [int(block) for block in np.random.default_rng(0).permutation(num_blocks)]

    def blocks_for(self, num_tokens: int) -> list[int]:
        count = self.engine.layout.num_blocks_for(num_tokens)
        taken, self._free = self._free[:count], self._free[count:]
        assert len(taken) == count, "the test's pool is too small"
        return taken

    def execute(self, *rows: StepRow) -> list[tuple[SampledToken, ...]]:
        return self.engine.execute(rows)

    def generate(
        self, prompts: list[list[int]], params: SamplingParams, num_new: int, *, ahead: bool
    ) -> list[list[SampledToken]]:
        tables = [tuple(self.blocks_for(len(prompt) + num_new)) for prompt in prompts]
        return generate(self.engine, tables, prompts, params, num_new, ahead=ahead)

    def close(self) -> None:
        self.engine.close()
        self.built.own.pool.close()
