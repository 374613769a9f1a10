"""A CUDA engine over a small pool on any device, driven as ``engine_runs`` drives the CPU's."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from common.engine.cuda.engine import CudaEngine
from common.engine.cuda.model import CudaModel
from common.engine.dtype import load_model_layout
from common.engine.interface import Engine, PendingToken, SampleSpec, StepRow
from common.models.config import ModelConfig
from common.sampling import SampledToken, SamplingParams


class PooledCudaEngine:
    """An engine, its pool, and a hand that gives out blocks in random order.

    The pool's last block is the scratch block.
    """

    def __init__(
        self,
        folder: Path,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        block_size: int = 16,
        num_blocks: int = 64,
        max_num_seqs: int = 8,
        use_graphs: bool = True,
        load_format: str = "auto",
        kv_cache_dtype: str = "auto",
        scales: tuple[float, ...] = (),
        memory: memoryview | None = None,
    ) -> None:
        """``memory`` is the pool's on the host, of ``num_blocks`` and one; without, it is made."""
        self.config = ModelConfig.load(folder)
        self.device = torch.device(device)
        self.layout = load_model_layout(self.config, dtype, block_size, kv_cache_dtype, scales)
        num_bytes = (num_blocks + 1) * self.layout.block_bytes
        if memory is None:
            self.pool = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        else:
            self.pool = torch.frombuffer(memory, dtype=torch.uint8)
        # NaN everywhere: what is read without having been written shows.
        self.pool.fill_(255)
        self.told: list[str] = []
        model = CudaModel.load(
            self.config, dtype, self.device, "dummy" if load_format == "dummy" else "auto"
        )
        self.engine = CudaEngine(
            model,
            self.layout,
            self.pool,
            num_blocks,
            max_num_batched_tokens=1024,
            max_num_seqs=max_num_seqs,
            use_graphs=use_graphs,
            tell=self.told.append,
        )
        self._free = [int(block) for block in np.random.default_rng(0).permutation(num_blocks)]

    def blocks_for(self, num_tokens: int) -> list[int]:
        count = self.layout.num_blocks_for(num_tokens)
        taken, self._free = self._free[:count], self._free[count:]
        assert len(taken) == count, "the test's pool is too small"
        return taken

    def execute(self, *rows: StepRow) -> list[tuple[SampledToken, ...]]:
        return self.engine.execute(rows)

    def generate(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        num_new: int,
        *,
        ahead: bool,
    ) -> list[list[SampledToken]]:
        """Return each prompt's tokens, of steps collected one by one or launched one ahead."""
        tables = [tuple(self.blocks_for(len(prompt) + num_new)) for prompt in prompts]
        return generate(self.engine, tables, prompts, params, num_new, ahead=ahead)


def generate(
    engine: Engine,
    tables: Sequence[tuple[int, ...]],
    prompts: list[list[int]],
    params: SamplingParams,
    num_new: int,
    *,
    ahead: bool,
) -> list[list[SampledToken]]:
    """Drive any engine; each prompt has a table of the blocks of all its tokens."""
    outputs: list[list[SampledToken]] = [[] for _ in prompts]

    def spec(index: int, num_pending: int) -> tuple[SampleSpec, ...]:
        ids = [token.token_id for token in outputs[index]]
        return (SampleSpec(params, 0, prompts[index], ids, num_pending),)

    def decodes(pending_step: int | None) -> list[StepRow]:
        rows = []
        for index, prompt in enumerate(prompts):
            num_pending = int(pending_step is not None)
            start = len(prompt) + len(outputs[index]) + num_pending - 1
            last = [0] if num_pending else [outputs[index][-1].token_id]
            pending = None if pending_step is None else PendingToken(pending_step, index)
            samples = spec(index, num_pending)
            rows.append(StepRow(last, start, tables[index], samples, pending))
        return rows

    def keep(results: list[tuple[SampledToken, ...]]) -> None:
        for output, (token,) in zip(outputs, results, strict=True):
            output.append(token)

    steps = [
        engine.launch(
            [
                StepRow(prompt, 0, tables[index], spec(index, 0))
                for index, prompt in enumerate(prompts)
            ]
        )
    ]
    for _ in range(num_new - 1):
        if not ahead:
            keep(engine.collect(steps.pop()))
        pending_step = steps[-1].number if ahead else None
        steps.append(engine.launch(decodes(pending_step)))
        if ahead:
            keep(engine.collect(steps.pop(0)))
    keep(engine.collect(steps.pop()))
    return outputs
