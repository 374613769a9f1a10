"""What one rank computes on its device: batches in, logits and drawn tokens there.

Everything goes to one stream, in order. So a step may continue with tokens that the step before has
yet to draw, and memory of a step is free for the next.
"""

from collections.abc import Callable
from dataclasses import dataclass

import structlog
import torch

from common.engine.communicator import ALONE, Communicator
from common.engine.cuda.decoder import CudaDecoder
from common.engine.cuda.device_batch import TensorRows, to_device
from common.engine.cuda.flashinfer_kernels import FlashInferKernels, why_not
from common.engine.cuda.graphs import DecodeGraphs, DrawnTokens, input_bytes, ladder
from common.engine.cuda.kernels import Kernels, PlaceOf, own_place, pool_view
from common.engine.cuda.memory import float_workspace_bytes
from common.engine.cuda.model import CudaModel
from common.engine.cuda.sampler import to_host
from common.engine.cuda.scales import BlockScales
from common.engine.cuda.step_batch import Longs, StepBatch, StepPacker
from common.engine.cuda.streams import InferenceOn, new_stream, timed_event
from common.engine.cuda.torch_kernels import TorchKernels
from common.engine.interface import StepRow
from common.kv.layout import KVLayout

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class LayerPlaces:
    """Memory that does not hold all layers' K and V at a time.

    ``layout`` is that of its blocks and ``place_of`` says where a layer lies in them. ``watch``
    returns kernels that see to it that each layer is there.
    """

    layout: KVLayout
    place_of: PlaceOf
    watch: Callable[[Kernels], Kernels]


@dataclass(frozen=True, slots=True)
class Computed:
    """What is enqueued of a step: the sampled tokens' logits, None where there are none.

    ``is_foreign`` says of each sampled row whether it read blocks of other scales, on the host;
    None where blocks have none.
    """

    logits: torch.Tensor | None
    is_foreign: torch.Tensor | None


class CudaRunner:
    """Executes batches of one rank's model over its pool; on the CPU as well, with torch alone.

    ``drawn`` are the first tokens of the latest step's sampled rows: the raw maxima, where whoever
    has the logits draws nothing else.
    """

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
        communicator: Communicator = ALONE,
        places: LayerPlaces | None = None,
    ) -> None:
        """See ``CudaEngine``. All ranks are made at the same time: what is captured meets there.

        With ``places`` the pool is memory as they say, and no step is captured.
        """
        config = model.config
        self.device = device = model.device
        self._communicator = communicator
        self._scratch_block = scratch_block
        tell = tell or (lambda _line: None)
        _check_fit(model, layout)
        is_cuda = device.type == "cuda"
        self._stream = new_stream(device) if is_cuda else None
        num_drawn = max(max_num_batched_tokens, max_num_seqs)
        max_blocks = layout.num_blocks_for(config.max_model_len)
        num_inputs = -(-input_bytes(max_num_seqs, max_blocks) // 8)
        with self.on_stream():
            view = pool_view(pool, layout if places is None else places.layout)
            place_of = own_place if places is None else places.place_of
            watch = _unwatched if places is None else places.watch
            self._scales = BlockScales(pool, layout) if layout.is_quantised else None
            reason = why_not(config, layout, device)
            self._slab = torch.zeros(num_drawn + num_inputs, dtype=torch.int64, device=device)
            scores = torch.zeros(num_drawn, dtype=torch.float32, device=device)
            self.drawn = DrawnTokens(self._slab[:num_drawn], scores)
            self._graphs: DecodeGraphs | None = None
            self._kernels: Kernels
            if reason is not None:
                if is_cuda:
                    log.warning("attention runs on torch's own kernels, slower", reason=reason)
                kernels_of_torch = TorchKernels(
                    config, layout, view, device, self._scales, place_of
                )
                self._kernels = watch(kernels_of_torch)
                self._decoder = CudaDecoder(model, self._kernels, communicator)
                return
            partial_bytes = float_workspace_bytes(config, max_num_seqs, layout.kv_cache_dtype)
            tell("compiling kernels; the first time on a machine takes minutes")
            kernels = FlashInferKernels(
                config, layout, view, device, partial_bytes, self._scales, place_of
            )
            self._kernels = watch(kernels)
            self._decoder = CudaDecoder(model, self._kernels, communicator)
            self._warm_up(layout.block_size, config.vocab_size)
            if use_graphs and places is None:
                self._graphs = DecodeGraphs(
                    self._decoder, kernels, self._slab, num_drawn, scratch_block
                )
                self._graphs.capture(ladder(max_num_seqs), config.vocab_size, self.drawn, tell)
                communicator.before_parting(self._graphs.release)

    def on_stream(self) -> InferenceOn:
        """Return the context in which all else of a step is enqueued."""
        return InferenceOn(self._stream)

    def enqueue(self, batch: StepBatch, pending_places: Longs) -> Computed:
        """Enqueue a batch, whose pending tokens are at these places among those drawn last."""
        graphs = self._graphs
        rows: TensorRows | None = None
        logits: torch.Tensor | None
        if graphs is not None and batch.is_pure_decode and batch.num_tokens <= graphs.max_rows:
            logits = graphs.run(batch, pending_places)
            if self._scales is not None:
                rows = graphs.latest_rows()
        else:
            logits, rows = self._compute(batch, pending_places)
        # Behind the step's own writes: they give new blocks their scales.
        is_foreign = None
        if self._scales is not None and rows is not None and logits is not None:
            is_foreign = to_host(self._scales.foreign_rows(rows)[: len(batch.sampled_rows)])
        return Computed(logits, is_foreign)

    def share_drawn(self, num_sampled: int) -> None:
        """Enqueue that every rank has the tokens that rank 0 has drawn."""
        if num_sampled:
            self._communicator.share(self.drawn.ids[:num_sampled])

    def record(self) -> torch.cuda.Event | None:
        """Return the event that happens when all that was enqueued is done; None: it is."""
        if self._stream is None:
            return None
        done = timed_event()
        done.record(self._stream)
        return done

    def _compute(
        self, batch: StepBatch, pending_places: Longs
    ) -> tuple[torch.Tensor | None, TensorRows | None]:
        """Return the sampled tokens' logits and their rows, None where there are none."""
        there = to_device(batch, pending_places, self.device)
        token_ids = there.token_ids
        if len(pending_places):
            token_ids[there.pending_tokens] = self.drawn.ids[there.pending_places]
        self._kernels.begin(there)
        logits = self._decoder.forward(there, token_ids)
        if logits is not None:
            size = len(logits)
            out = (self.drawn.scores[:size], self.drawn.ids[:size])
            torch.max(logits, dim=1, out=out)
        sampled = there.decodes if there.tail is None else there.tail
        return logits, None if sampled is None or logits is None else sampled.device

    def _warm_up(self, block_size: int, vocab_size: int) -> None:
        """Compile what steps use, on the scratch block."""
        packer = StepPacker(block_size, vocab_size)
        half = block_size // 2
        table = (self._scratch_block,)
        for rows in (
            [StepRow([0] * half, 0, table), StepRow([0] * half, half, table)],
            [StepRow([0], half, table)],
        ):
            batch = packer.pack(rows)
            self._compute(batch, batch.pending_rows)
            torch.cuda.current_stream().synchronize()


def _unwatched(kernels: Kernels) -> Kernels:
    return kernels


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
