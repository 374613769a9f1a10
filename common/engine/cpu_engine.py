"""The engine of a CPU worker: one process, one model, one KV pool."""

from collections.abc import Sequence
from pathlib import Path

import torch

from common.engine.batch import flatten
from common.engine.decoder import Decoder
from common.engine.dtype import TORCH_DTYPES
from common.engine.failure import RowOutcome, RowsFailed
from common.engine.head import LogitsHead
from common.engine.interface import DeferredStep, LaunchedStep, StepRow
from common.engine.kernels import DecoderKernels
from common.engine.linear import Linear
from common.engine.random_weights import RandomWeights
from common.engine.rope import rotary_tables
from common.engine.sampler import sample
from common.engine.weights import assemble_weights, load_weights
from common.errors import ErrorCode, RequestError
from common.kv.layout import KVLayout
from common.models.config import ModelConfig
from common.sampling import SampledToken


class CpuEngine:
    """Executes steps with our own decoder; implements ``common.engine.interface.Engine``.

    K and V live in the pool alone. The number of threads is torch's, and so the process's.
    """

    max_in_flight = 1

    def __init__(
        self,
        model_folder: Path,
        layout: KVLayout,
        pool: memoryview | torch.Tensor,
        num_threads: int = 1,
        *,
        has_weights: bool = True,
    ) -> None:
        """Load the model; ``pool`` is writable memory of ``layout.block_bytes`` bytes a block.

        Where the folder has no weights (``has_weights`` false), random ones are drawn.
        ModelError where the folder cannot be served, ValueError where pool and layout do not fit
        it. The engine keeps ``pool`` exported as long as it lives.
        """
        torch.set_num_threads(num_threads)
        self.config = ModelConfig.load(model_folder)
        self.layout = layout
        _check_layout(self.config, layout)
        pool_bytes = _as_bytes(pool, layout)
        dtype = TORCH_DTYPES[layout.dtype]
        with torch.inference_mode():
            if has_weights:
                weights = load_weights(self.config, dtype)
            else:
                source = RandomWeights(self.config, dtype, torch.device("cpu")).tensor
                weights = assemble_weights(self.config, source, Linear, LogitsHead)
            tables = rotary_tables(
                self.config.rope, self.config.head_dim, self.config.max_model_len
            )
            kernels = DecoderKernels(layout, pool_bytes, self.config.num_heads, tables, num_threads)
            self._decoder = Decoder(self.config, weights, kernels)
        self._num_launched = 0

    def launch(self, rows: Sequence[StepRow]) -> DeferredStep:
        """Note a step down; it is computed when it is collected."""
        step = DeferredStep(self._num_launched, rows)
        self._num_launched += 1
        return step

    def collect(self, step: LaunchedStep) -> list[tuple[SampledToken, ...]]:
        """Compute a launched step (see ``execute``)."""
        if not isinstance(step, DeferredStep):
            raise TypeError(f"step {step.number} was launched by another engine")
        return self.execute(step.rows)

    def execute(self, rows: Sequence[StepRow]) -> list[tuple[SampledToken, ...]]:
        """Compute all rows in one pass and write their K and V into the pool.

        Returns each row's tokens. RowsFailed carries every row's outcome when the logits of a row
        are not numbers; ValueError names a row that is malformed, before anything is computed.
        """
        if not rows:
            return []
        batch = flatten(rows, self.layout.block_size, self.config.vocab_size)
        with torch.inference_mode():
            logits = self._decoder.forward(batch)
            specs = [
                (at, spec)
                for at, index in enumerate(batch.sampled_rows)
                for spec in rows[index].samples
            ]
            drawn = iter(sample(logits, specs))
        outcomes: list[RowOutcome] = [()] * len(rows)
        for index in batch.sampled_rows:
            tokens = [next(drawn) for _ in rows[index].samples]
            outcomes[index] = _outcome(tokens)
        succeeded = [outcome for outcome in outcomes if not isinstance(outcome, RequestError)]
        if len(succeeded) < len(outcomes):
            raise RowsFailed(outcomes)
        return succeeded


def _outcome(tokens: Sequence[SampledToken | None]) -> RowOutcome:
    drawn = tuple(token for token in tokens if token is not None)
    if len(drawn) == len(tokens):
        return drawn
    return RequestError(
        ErrorCode.INTERNAL, "the model's output is not a number; the request cannot go on"
    )


def _check_layout(config: ModelConfig, layout: KVLayout) -> None:
    model = (config.num_layers, config.num_kv_heads, config.head_dim, 2)
    given = (layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.planes)
    if model != given:
        raise ValueError(f"the layout (layers, KV heads, head size, planes) {given} is not {model}")
    if layout.element_dtype not in TORCH_DTYPES:
        raise ValueError(f"the CPU engine does not run in {layout.element_dtype}")


def _as_bytes(pool: memoryview | torch.Tensor, layout: KVLayout) -> torch.Tensor:
    if isinstance(pool, memoryview):
        if pool.readonly:
            raise ValueError("the pool must be writable")
        pool = torch.frombuffer(pool, dtype=torch.uint8)
    if pool.dtype != torch.uint8 or pool.dim() != 1 or not pool.is_contiguous():
        raise ValueError("the pool must be one contiguous run of bytes")
    if not pool.numel() or pool.numel() % layout.block_bytes:
        raise ValueError(
            f"a pool of {pool.numel()} bytes is no multiple of blocks of {layout.block_bytes}"
        )
    return pool
