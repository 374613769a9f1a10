"""Decode steps as CUDA graphs, one for each of a ladder of batch sizes.

A graph is a recording of launches with fixed addresses. So its inputs lie in arrays of its own
that every step fills in one copy, and rows beyond the step's own are padding: they attend to the
scratch block and store nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from common.engine.cuda.decoder import CudaDecoder
from common.engine.cuda.device_batch import DeviceBatch, Group, TensorRows
from common.engine.cuda.flashinfer_kernels import FlashInferKernels, GraphPlan
from common.engine.cuda.step_batch import SKIPPED_SLOT, HostRows, Ints, Longs, PagedRows, StepBatch
from common.engine.cuda.upload import ALIGNMENT, Array, Packed

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
SIZE_STEP = 64
"""Beyond the ladder, a graph for every further 64 rows."""

NUM_WARM_UPS = 2


def ladder(max_rows: int) -> tuple[int, ...]:
    """Return the batch sizes that get a graph; the last one holds ``max_rows`` rows."""
    more = range(SIZES[-1] + SIZE_STEP, max_rows + SIZE_STEP, SIZE_STEP)
    sizes = [size for size in (*SIZES, *more) if size < max_rows]
    return (*sizes, max_rows)


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """The first token of each sampled row of the step launched last, and its score.

    Graphs and eager steps write into the same memory, so that the step after can read there the
    tokens that it continues with.
    """

    ids: torch.Tensor
    scores: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    plan: GraphPlan


@dataclass(frozen=True, slots=True)
class _Rows:
    token_ids: Longs
    positions: Ints
    slots: Ints
    paged: HostRows


@dataclass(frozen=True, slots=True)
class _Inputs:
    packed: Packed
    rows: TensorRows


class DecodeGraphs:
    """The captured graphs, their inputs and their logits."""

    def __init__(
        self,
        decoder: CudaDecoder,
        kernels: FlashInferKernels,
        slab: torch.Tensor,
        num_drawn: int,
        scratch_block: int,
    ) -> None:
        """``slab`` is int64: ``num_drawn`` drawn tokens, then the inputs of a step.

        One array for both, so that one look-up finds tokens that the host knows and tokens that
        only the device knows.
        """
        self._decoder = decoder
        self._kernels = kernels
        self._slab = slab
        self._inputs = slab[num_drawn:].view(torch.uint8)
        self._num_drawn = num_drawn
        self._scratch_block = scratch_block
        self._graphs: dict[int, _Graph] = {}
        self._logits = torch.empty(0)
        self._latest: Packed | None = None

    @property
    def max_rows(self) -> int:
        """The most rows that a graph takes; 0 before capturing."""
        return max(self._graphs, default=0)

    def capture(
        self,
        sizes: tuple[int, ...],
        vocab_size: int,
        drawn: DrawnTokens,
        tell: Callable[[str], None],
    ) -> None:
        """Capture a graph for every size, the largest first, in one shared memory pool."""
        device = self._slab.device
        num_logits = max(sizes) if self._decoder.has_head else 0
        self._logits = torch.empty((num_logits, vocab_size), dtype=torch.float32, device=device)
        shared = torch.cuda.graph_pool_handle()
        stream = torch.cuda.current_stream()
        for number, size in enumerate(sorted(sizes, reverse=True), start=1):
            inputs = self._pack(_padding(size, self._scratch_block), np.zeros(size, np.int64))
            self._inputs[: inputs.packed.num_bytes].copy_(inputs.packed.memory)
            batch, sources = self._fixed(inputs.packed, size)
            assert batch.decodes is not None  # they are all there is
            plan = self._kernels.graph_plan(batch.decodes.device, self._scratch_block)
            stream.synchronize()
            self._kernels.begin_graph(plan, inputs.rows)
            for _ in range(NUM_WARM_UPS):
                self._compute(batch, sources, drawn)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile.
            with torch.cuda.graph(
                graph, pool=shared, stream=stream, capture_error_mode="thread_local"
            ):
                self._compute(batch, sources, drawn)
            self._graphs[size] = _Graph(graph, plan)
            tell(f"decode graphs: {number} of {len(sizes)} captured")

    def run(self, batch: StepBatch, pending_places: Longs) -> torch.Tensor | None:
        """Enqueue a step of decodes that are all sampled; return its logits.

        None in a rank without a head. They are overwritten by the next run. The raw maxima are in
        the drawn tokens.
        """
        num_rows = batch.num_tokens
        size = min(size for size in self._graphs if size >= num_rows)
        # Token i of the inputs is the slab's entry num_drawn + i.
        sources = np.arange(self._num_drawn, self._num_drawn + size)
        sources[batch.pending_tokens] = pending_places
        inputs = self._pack(_padded(batch, size, self._scratch_block), sources)
        self._inputs[: inputs.packed.num_bytes].copy_(inputs.packed.memory, non_blocking=True)
        chosen = self._graphs[size]
        self._kernels.begin_graph(chosen.plan, inputs.rows)
        chosen.graph.replay()
        self._latest = inputs.packed
        return self._logits[:num_rows] if self._decoder.has_head else None

    def release(self) -> None:
        """Let go of all graphs, none of which is running."""
        for captured in self._graphs.values():
            captured.graph.reset()
        self._graphs.clear()

    def latest_rows(self) -> TensorRows:
        """Return the device's rows of the latest run, then its padding, until the next run."""
        assert self._latest is not None  # run comes first
        return _paged(self._latest.views(self._inputs))

    def _pack(self, rows: _Rows, sources: Longs) -> _Inputs:
        # The indices come last: their number changes, and all else stays where it is.
        arrays = (
            *(rows.token_ids, sources, rows.positions, rows.slots),
            *(rows.paged.qo_indptr, rows.paged.indptr, rows.paged.last_page_len),
            *(rows.paged.kv_lens, rows.paged.indices),
        )
        packed = Packed(arrays, is_pinned=True)
        if packed.num_bytes > self._inputs.numel():
            raise ValueError(f"{len(rows.paged.indices)} blocks are more than a step can name")
        return _Inputs(packed, _paged(packed.views(packed.memory)))

    def _fixed(self, packed: Packed, size: int) -> tuple[DeviceBatch, torch.Tensor]:
        """Return the device's arrays of a size, with all the room for indices, and the sources."""
        views = packed.views(self._inputs)
        last = self._inputs[packed.offset_of(len(views) - 1) :]
        views[-1] = last[: last.numel() // ALIGNMENT * ALIGNMENT].view(torch.int32)
        rows = _paged(views)
        group = Group(0, size, rows, rows)
        none = self._slab.new_empty(0)
        positions, slots = views[2], views[3]
        batch = DeviceBatch(*(none, positions, slots, group, None, None, None, none, none, none))
        return batch, views[1]

    def _compute(self, batch: DeviceBatch, sources: torch.Tensor, drawn: DrawnTokens) -> None:
        size = batch.num_tokens
        token_ids = self._slab.index_select(0, sources)
        logits = self._decoder.forward(batch, token_ids, self._logits[:size])
        if logits is not None:
            torch.max(logits, dim=1, out=(drawn.scores[:size], drawn.ids[:size]))


def input_bytes(max_rows: int, max_blocks: int) -> int:
    """Return the room for the inputs of ``max_rows`` rows of ``max_blocks`` blocks each."""
    return max_rows * (2 * 8 + 6 * 4 + 4 * max_blocks) + 16 * ALIGNMENT


def _paged(views: Sequence[torch.Tensor]) -> TensorRows:
    qo_indptr, indptr, last_page_len, kv_lens, indices = views[4:]
    return PagedRows(qo_indptr, indptr, indices, last_page_len, kv_lens)


def _padding(size: int, scratch_block: int) -> _Rows:
    """Return rows of one position in the scratch block."""
    ones = np.ones(size, np.int32)
    bounds = np.arange(size + 1, dtype=np.int32)
    paged = PagedRows(bounds, bounds, np.full(size, scratch_block, np.int32), ones, ones)
    zeros = np.zeros(size, np.int32)
    return _Rows(np.zeros(size, np.int64), zeros, np.full(size, SKIPPED_SLOT, np.int32), paged)


def _padded(batch: StepBatch, size: int, scratch_block: int) -> _Rows:
    rows = batch.decodes
    assert rows is not None  # a step has rows
    more = size - batch.num_tokens
    if not more:
        return _Rows(batch.token_ids, batch.positions, batch.slots, rows)
    padding = _padding(more, scratch_block)

    def join(real: Array, padded: Array) -> Array:
        return np.concatenate((real, padded))

    paged = PagedRows(
        qo_indptr=np.arange(size + 1, dtype=np.int32),
        indptr=join(rows.indptr, rows.indptr[-1] + padding.paged.indptr[1:]),
        indices=join(rows.indices, padding.paged.indices),
        last_page_len=join(rows.last_page_len, padding.paged.last_page_len),
        kv_lens=join(rows.kv_lens, padding.paged.kv_lens),
    )
    return _Rows(
        join(batch.token_ids, padding.token_ids),
        join(batch.positions, padding.positions),
        join(batch.slots, padding.slots),
        paged,
    )
