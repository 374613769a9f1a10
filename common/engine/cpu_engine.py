"""The engine of a CPU worker: one process, one model, one KV pool."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from common.engine.batch import Batch, flatten
from common.engine.communicator import ALONE, Communicator
from common.engine.decoder import Decoder
from common.engine.dtype import TORCH_DTYPES
from common.engine.failure import RowOutcome, RowsFailed
from common.engine.interface import LaunchedStep, StepRow, SynchronousStep
from common.engine.kernels import DecoderKernels
from common.engine.random_weights import RandomWeights
from common.engine.rope import rotary_tables
from common.engine.sampler import sample
from common.engine.weights import CPU_MAKERS, assemble_weights, load_weights
from common.errors import ErrorCode, RequestError
from common.kv.layout import KVLayout
from common.models.config import ModelConfig
from common.sampling import SampledToken

MakeKernels = Callable[
    [KVLayout, torch.Tensor, int, tuple[torch.Tensor, torch.Tensor], int], DecoderKernels
]
"""Makes the kernels of a decoder, given what ``DecoderKernels`` takes."""


@dataclass(frozen=True, slots=True)
class CpuStep(SynchronousStep):
    """A step that is checked and flattened, and computed when it is collected."""

    number: int
    rows: Sequence[StepRow]
    batch: Batch

    def arrays(self) -> list[npt.NDArray[np.generic]]:
        """Return what the other ranks of a parallel engine compute with."""
        return self.batch.arrays()


class CpuRunner:
    """One rank's decoder over its pool. The number of threads is torch's, and so the process's."""

    def __init__(
        self,
        model_folder: Path,
        layout: KVLayout,
        pool: memoryview | torch.Tensor,
        num_threads: int = 1,
        *,
        has_weights: bool = True,
        communicator: Communicator = ALONE,
        make_kernels: MakeKernels = DecoderKernels,
    ) -> None:
        """Load the rank's shard of the model (see ``CpuEngine``)."""
        torch.set_num_threads(num_threads)
        whole, shard = ModelConfig.load(model_folder), communicator.shard
        self.config = config = shard.config(whole)
        _check_layout(config, layout)
        pool_bytes = _as_bytes(pool, layout)
        dtype = TORCH_DTYPES[layout.dtype]
        with torch.inference_mode():
            if has_weights:
                weights = load_weights(whole, dtype, shard)
            else:
                source = RandomWeights(whole, dtype, torch.device("cpu"), shard).tensor
                weights = assemble_weights(whole, source, CPU_MAKERS, shard)
            tables = rotary_tables(config.rope, config.head_dim, config.max_model_len)
            kernels = make_kernels(layout, pool_bytes, config.num_heads, tables, num_threads)
            self._decoder = Decoder(config, weights, kernels, communicator)

    def set_batch(self, batch: Batch) -> None:
        """Take the batch that is computed next; ValueError where an index is out of range."""
        self._decoder.set_batch(batch)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Compute the batch that was set (see ``Decoder.forward``), without gradients."""
        with torch.inference_mode():
            return self._decoder.forward(batch)


class CpuEngine:
    """Executes steps with our own decoder; implements ``common.engine.interface.Engine``.

    K and V live in the pool alone. In a parallel engine this is rank 0's part.
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
        communicator: Communicator = ALONE,
    ) -> None:
        """Load the model; ``pool`` is writable memory of ``layout.block_bytes`` bytes a block.

        Where the folder has no weights (``has_weights`` false), random ones are drawn.
        ModelError where the folder cannot be served, ConfigError where it cannot be split between
        the ranks, ValueError where pool and layout do not fit it. The engine keeps ``pool``
        exported as long as it lives.
        """
        self._runner = CpuRunner(
            *(model_folder, layout, pool, num_threads),
            has_weights=has_weights,
            communicator=communicator,
        )
        self.config = self._runner.config
        self.layout = layout
        self._num_launched = 0

    def prepare(self, rows: Sequence[StepRow]) -> CpuStep:
        """Check a step; ValueError names a malformed row."""
        if not rows:
            raise ValueError("a step has at least one row")
        batch = flatten(rows, self.layout.block_size, self.config.vocab_size)
        self._runner.set_batch(batch)
        return CpuStep(self._num_launched, rows, batch)

    def start(self, prepared: CpuStep) -> CpuStep:
        """Count the step that was prepared last."""
        self._num_launched += 1
        return prepared

    def launch(self, rows: Sequence[StepRow]) -> CpuStep:
        """Check a step and note it down; it is computed when it is collected."""
        return self.start(self.prepare(rows))

    def collect(self, step: LaunchedStep) -> list[tuple[SampledToken, ...]]:
        """Compute the launched step: all rows in one pass, with their K and V.

        Returns each row's tokens. RowsFailed carries every row's outcome when the logits of a row
        are not numbers.
        """
        if not isinstance(step, CpuStep):
            raise TypeError(f"step {step.number} was launched by another engine")
        return all_tokens(draw(self._runner.forward(step.batch), step.rows, step.batch))

    def execute(self, rows: Sequence[StepRow]) -> list[tuple[SampledToken, ...]]:
        """Launch a step and collect it."""
        return self.collect(self.launch(rows)) if rows else []


def draw(logits: torch.Tensor, rows: Sequence[StepRow], batch: Batch) -> list[RowOutcome]:
    """Draw every row's tokens from the logits of the batch that was made of the rows."""
    specs = [
        (at, spec) for at, index in enumerate(batch.sampled_rows) for spec in rows[index].samples
    ]
    with torch.inference_mode():
        drawn = iter(sample(logits, specs))
    outcomes: list[RowOutcome] = [()] * len(rows)
    for index in batch.sampled_rows:
        outcomes[index] = _outcome([next(drawn) for _ in rows[index].samples])
    return outcomes


def all_tokens(outcomes: Sequence[RowOutcome]) -> list[tuple[SampledToken, ...]]:
    """Return each row's tokens; RowsFailed, with all outcomes, where a row has none."""
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
