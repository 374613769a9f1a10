"""The engine of a GPU: steps are enqueued one behind the other, tokens come back later.

Everything goes to one stream, in order. So a step may continue with tokens that the step before has
yet to draw, memory of a step is free for the next, and the host prepares one step while the device
runs another.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import structlog
import torch

from common.engine.cuda.decoder import CudaDecoder
from common.engine.cuda.device_batch import TensorRows, to_device
from common.engine.cuda.flashinfer_kernels import FlashInferKernels, why_not
from common.engine.cuda.graphs import DecodeGraphs, DrawnTokens, input_bytes, ladder
from common.engine.cuda.kernels import Kernels, pool_view
from common.engine.cuda.memory import float_workspace_bytes
from common.engine.cuda.model import CudaModel
from common.engine.cuda.sampler import DeviceSampler, Draw, Drawn, is_plain, to_host
from common.engine.cuda.scales import BlockScales
from common.engine.cuda.step_batch import Longs, StepBatch, StepPacker
from common.engine.cuda.streams import InferenceOn, new_event, new_stream
from common.engine.cuda.torch_kernels import TorchKernels
from common.engine.cuda.upload import upload
from common.engine.failure import RowOutcome, RowsFailed
from common.engine.interface import LaunchedStep, StepRow
from common.errors import ErrorCode, RequestError
from common.kv.layout import KVLayout
from common.sampling import SampledToken

log = structlog.get_logger()

MAX_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class CudaStep:
    """A step on its way. ``drawn`` is on the host, and complete once ``done`` has happened.

    So is ``is_foreign``, which says of each sampled row whether it read blocks of other scales;
    None where blocks have none.
    """

    number: int
    num_rows: int
    sampled_rows: tuple[int, ...]
    draws: tuple[Draw, ...]
    drawn: Drawn
    is_foreign: torch.Tensor | None
    done: torch.cuda.Event | None


class CudaEngine:
    """Executes steps of one model over one pool; implements ``common.engine.interface.Engine``.

    On a device without CUDA, and in float32, it computes the same with torch's own operators.
    ``last_launch_seconds`` is the host's time in the latest ``launch``.
    """

    max_in_flight = MAX_IN_FLIGHT

    def __init__(  # noqa: PLR0913 - each is a fact of its own, and most have names at the call
        self,
        model: CudaModel,
        layout: KVLayout,
        pool: torch.Tensor,
        scratch_block: int,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        use_graphs: bool = True,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        """``pool`` is the uint8 memory of all blocks, on the model's device.

        ``scratch_block`` is one that no sequence is ever given. ``tell`` gets lines of progress:
        kernels are compiled and graphs captured here. ValueError where pool, layout and model do
        not fit each other.
        """
        self.config, self.layout = model.config, layout
        self.last_launch_seconds = 0.0
        self._model = model
        self._device = model.device
        self._scratch_block = scratch_block
        self._max_num_batched_tokens = max_num_batched_tokens
        self._tell = tell or (lambda _line: None)
        _check_fit(model, layout)
        is_cuda = self._device.type == "cuda"
        self._stream = new_stream(self._device) if is_cuda else None
        self._packer = StepPacker(layout.block_size, self.config.vocab_size)
        self._sampler = DeviceSampler(self.config.vocab_size, self._device)
        self._num_launched = 0
        # Row of the latest step -> its place among the drawn tokens, -1 where it draws none.
        self._places: Longs = np.empty(0, np.int64)
        num_drawn = max(max_num_batched_tokens, max_num_seqs)
        max_blocks = layout.num_blocks_for(self.config.max_model_len)
        num_inputs = -(-input_bytes(max_num_seqs, max_blocks) // 8)
        with self._on_stream():
            view = pool_view(pool, layout)
            self._scales = BlockScales(pool, layout) if layout.is_quantised else None
            reason = why_not(self.config, layout, self._device)
            self._slab = torch.zeros(num_drawn + num_inputs, dtype=torch.int64, device=self._device)
            scores = torch.zeros(num_drawn, dtype=torch.float32, device=self._device)
            self._drawn = DrawnTokens(self._slab[:num_drawn], scores)
            self._graphs: DecodeGraphs | None = None
            self._kernels: Kernels
            if reason is not None:
                if is_cuda:
                    log.warning("attention runs on torch's own kernels, slower", reason=reason)
                self._kernels = TorchKernels(self.config, layout, view, self._device, self._scales)
                self._decoder = CudaDecoder(model, self._kernels)
                return
            partial_bytes = float_workspace_bytes(self.config, max_num_seqs, layout.kv_cache_dtype)
            self._tell("compiling kernels; the first time on a machine takes minutes")
            kernels = FlashInferKernels(
                self.config, layout, view, self._device, partial_bytes, self._scales
            )
            self._kernels = kernels
            self._decoder = CudaDecoder(model, kernels)
            self._warm_up()
            if use_graphs:
                self._graphs = DecodeGraphs(
                    self._decoder, kernels, self._slab, num_drawn, scratch_block
                )
                sizes = ladder(max_num_seqs)
                self._graphs.capture(sizes, self.config.vocab_size, self._drawn, self._tell)

    def launch(self, rows: Sequence[StepRow]) -> CudaStep:
        """Enqueue a step; ValueError names a malformed row, before anything is enqueued."""
        begin = time.perf_counter()
        if not rows:
            raise ValueError("a step has at least one row")
        batch = self._packer.pack(rows)
        if len(batch.sampled_rows) > len(self._drawn.ids):
            raise ValueError(f"{len(batch.sampled_rows)} sampled rows are more than a step takes")
        pending_places = self._pending_places(rows, batch)
        draws = tuple(
            Draw(at, spec)
            for at, index in enumerate(batch.sampled_rows.tolist())
            for spec in rows[index].samples
        )
        with self._on_stream():
            drawn, is_foreign = self._enqueue(batch, pending_places, draws)
            done = None
            if self._stream is not None:
                done = new_event()
                done.record(self._stream)
        places = np.full(len(rows), -1, np.int64)
        places[batch.sampled_rows] = np.arange(len(batch.sampled_rows))
        self._places = places
        sampled_rows = tuple(batch.sampled_rows.tolist())
        step = CudaStep(self._num_launched, len(rows), sampled_rows, draws, drawn, is_foreign, done)
        self._num_launched += 1
        self.last_launch_seconds = time.perf_counter() - begin
        return step

    def collect(self, step: LaunchedStep) -> list[tuple[SampledToken, ...]]:
        """Wait for a launched step and return each row's tokens, in order.

        RowsFailed carries every row's outcome when the logits of a row are not numbers, or its
        quantised blocks have other scales than the layout's.
        """
        if not isinstance(step, CudaStep):
            raise TypeError(f"step {step.number} was launched by another engine")
        if step.done is not None:
            step.done.synchronize()
        tokens = step.drawn.tokens(step.draws)
        found: list[list[SampledToken | None]] = [[] for _ in step.sampled_rows]
        for draw, token in zip(step.draws, tokens, strict=True):
            found[draw.row].append(token)
        outcomes: list[RowOutcome] = [()] * step.num_rows
        for index, row_tokens in zip(step.sampled_rows, found, strict=True):
            outcomes[index] = _outcome(row_tokens)
        if step.is_foreign is not None:
            for at in step.is_foreign.nonzero().flatten().tolist():
                outcomes[step.sampled_rows[at]] = RequestError(
                    ErrorCode.INTERNAL, "blocks of the request have other scales than this engine's"
                )
        succeeded = [outcome for outcome in outcomes if not isinstance(outcome, RequestError)]
        if len(succeeded) < len(outcomes):
            raise RowsFailed(outcomes)
        return succeeded

    def execute(self, rows: Sequence[StepRow]) -> list[tuple[SampledToken, ...]]:
        """Launch a step and collect it."""
        return self.collect(self.launch(rows)) if rows else []

    def _enqueue(
        self, batch: StepBatch, pending_places: Longs, draws: tuple[Draw, ...]
    ) -> tuple[Drawn, torch.Tensor | None]:
        num_sampled = len(batch.sampled_rows)
        graphs = self._graphs
        rows: TensorRows | None = None
        if graphs is not None and batch.is_pure_decode and batch.num_tokens <= graphs.max_rows:
            logits: torch.Tensor | None = graphs.run(batch, pending_places)
            if self._scales is not None:
                rows = graphs.latest_rows()
        else:
            logits, rows = self._compute(batch, pending_places)
        # Behind the step's own writes: they give new blocks their scales.
        is_foreign = None
        if self._scales is not None and rows is not None:
            is_foreign = to_host(self._scales.foreign_rows(rows)[:num_sampled])
        return self._draw(logits, num_sampled, draws), is_foreign

    def _draw(
        self, logits: torch.Tensor | None, num_sampled: int, draws: tuple[Draw, ...]
    ) -> Drawn:
        best = (self._drawn.scores[:num_sampled], self._drawn.ids[:num_sampled])
        if logits is None or is_plain(draws, num_sampled):
            return Drawn(best[1], best[0]).to_host()
        drawn = self._sampler.draw(logits, best, draws)
        rows = np.fromiter((draw.row for draw in draws), np.int64, len(draws))
        (firsts,) = upload([np.searchsorted(rows, np.arange(num_sampled))], self._device)
        self._drawn.ids[:num_sampled] = drawn.ids[firsts]
        return drawn.to_host()

    def _compute(
        self, batch: StepBatch, pending_places: Longs
    ) -> tuple[torch.Tensor | None, TensorRows | None]:
        """Return the sampled tokens' logits and their rows, None where nothing is sampled."""
        there = to_device(batch, pending_places, self._device)
        token_ids = there.token_ids
        if len(pending_places):
            token_ids[there.pending_tokens] = self._drawn.ids[there.pending_places]
        self._kernels.begin(there)
        logits = self._decoder.forward(there, token_ids)
        if logits is not None:
            size = len(logits)
            out = (self._drawn.scores[:size], self._drawn.ids[:size])
            torch.max(logits, dim=1, out=out)
        sampled = there.decodes if there.tail is None else there.tail
        return logits, None if sampled is None or logits is None else sampled.device

    def _pending_places(self, rows: Sequence[StepRow], batch: StepBatch) -> Longs:
        """Return where the drawn tokens of the latest step are that this one continues with."""
        if not len(batch.pending_rows):
            return batch.pending_rows
        latest = self._num_launched - 1
        for index, row in enumerate(rows):
            if row.pending is not None and row.pending.step != latest:
                raise ValueError(f"row {index} awaits step {row.pending.step}, not {latest}")
        is_known = batch.pending_rows < len(self._places)
        places = self._places[batch.pending_rows * is_known]
        if not is_known.all() or (places < 0).any():
            raise ValueError("a row awaits a token that the step before does not draw")
        return places

    def _warm_up(self) -> None:
        """Compile what steps use, on the scratch block."""
        half = self.layout.block_size // 2
        table = (self._scratch_block,)
        for rows in (
            [StepRow([0] * half, 0, table), StepRow([0] * half, half, table)],
            [StepRow([0], half, table)],
        ):
            batch = self._packer.pack(rows)
            self._compute(batch, batch.pending_rows)
            torch.cuda.current_stream().synchronize()

    def _on_stream(self) -> InferenceOn:
        return InferenceOn(self._stream)


def _outcome(tokens: Sequence[SampledToken | None]) -> RowOutcome:
    drawn = tuple(token for token in tokens if token is not None)
    if len(drawn) == len(tokens):
        return drawn
    return RequestError(
        ErrorCode.INTERNAL, "the model's output is not a number; the request cannot go on"
    )


def _check_fit(model: CudaModel, layout: KVLayout) -> None:
    config = model.config
    wanted = (config.num_layers, config.num_kv_heads, config.head_dim, 2, model.dtype)
    given = (
        *(layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.planes),
        layout.dtype,
    )
    if wanted != given:
        raise ValueError(
            f"the layout (layers, KV heads, head size, planes, type) {given} is not {wanted}"
        )
