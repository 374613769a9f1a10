"""The engine for GPUs with the K and V of two layers on the device and of the rest on the host."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from common.cuda.driver import CudaDriver, CudaError
from common.engine.cpu_engine import all_tokens
from common.engine.cuda.engine import CudaEngine, PreparedCudaStep
from common.engine.cuda.kernels import Kernels
from common.engine.cuda.model import CudaModel
from common.engine.cuda.products import Product
from common.engine.cuda.runner import LayerPlaces
from common.engine.failure import RowOutcome, RowsFailed
from common.engine.interface import LaunchedStep, StepRow, SynchronousStep
from common.engine.layerwise.cuda_stream import CudaLayerStream
from common.engine.layerwise.passes import RingPass, plan_passes
from common.engine.layerwise.stream import LayerMover, LayerStream, Span, ring_layout, slot_of
from common.engine.weights import LayerWeights
from common.errors import ConfigError
from common.kv.layout import KVLayout
from common.sampling import SampledToken


class RingKernels:
    """Implements ``Kernels`` over a ring: waits for each layer and lets it go again.

    Between passes, as when kernels are compiled, layers are taken as they are. The last layer is
    let go by whoever ends the pass: its attention may be left out.
    """

    def __init__(self, kernels: Kernels, mover: LayerMover, num_layers: int) -> None:
        self._kernels = kernels
        self._mover = mover
        self._last = num_layers - 1
        self.is_in_pass = False
        self.begin = kernels.begin
        self.rms_norm = kernels.rms_norm
        self.add_rms_norm = kernels.add_rms_norm
        self.silu_mul = kernels.silu_mul
        self.attend_tail = kernels.attend_tail

    def rotate_store(
        self,
        layer: int,
        weights: LayerWeights[Product],
        heads: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Do so when the layer is in the ring (see ``Kernels``)."""
        if self.is_in_pass:
            self._mover.wait_loaded(layer)
        self._kernels.rotate_store(layer, weights, heads, positions, slots)

    def attend(self, layer: int, heads: torch.Tensor) -> torch.Tensor:
        """Do so, and let the layer go (see ``Kernels``)."""
        out = self._kernels.attend(layer, heads)
        if self.is_in_pass and layer != self._last:
            self._mover.computed(layer)
        return out


@dataclass(frozen=True, slots=True)
class LayerwiseCudaStep(SynchronousStep):
    """A step that is checked and cut into passes, and computed when it is collected."""

    number: int
    num_rows: int
    passes: tuple[tuple[RingPass, PreparedCudaStep], ...]


class LayerwiseCudaEngine:
    """Implements ``common.engine.interface.Engine``; made for prefill (papers 2.4).

    Between the steps K and V live in ``pool``, host memory that is page-locked until ``close``. A
    step holds those of two layers in a ring of ``num_places`` blocks on the model's device, and
    computes one layer while the next one comes and the last one goes. A sequence may have as many
    tokens as fit the ring; a step of more goes in several passes.
    """

    max_in_flight = 1

    def __init__(  # noqa: PLR0913 - each is a fact of its own, and most have names at the call
        self,
        model: CudaModel,
        layout: KVLayout,
        pool: memoryview,
        *,
        num_places: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        tell: Callable[[str], None] | None = None,
        tell_span: Callable[[Span], None] | None = None,
    ) -> None:
        """``tell`` gets lines of progress, ``tell_span`` what is done with each layer, and when.

        ValueError for a quantised layout and where pool, layout and model do not fit each other;
        ConfigError where the device has no room for the ring, or the pool cannot be page-locked.
        """
        if num_places < 1:
            raise ValueError(f"a ring of {num_places} blocks holds nothing")
        self.config, self.layout = model.config, layout
        self.num_places = num_places
        self.peak_places = 0
        """Most places of the ring that a pass has needed."""
        shape = ring_layout(layout)
        self.ring_bytes = num_places * shape.block_bytes
        try:
            # One place more, where compiling writes.
            ring = torch.zeros(
                self.ring_bytes + shape.block_bytes, dtype=torch.uint8, device=model.device
            )
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"layer_ring: {model.device} has no room for {self.ring_bytes} bytes: {error}"
            ) from error
        on_host = torch.frombuffer(pool, dtype=torch.uint8)
        self._locked_at = 0
        self._mover: LayerMover
        if model.device.type == "cuda":
            self._locked_at = _lock_pages(on_host, model.device.index)
            self._mover = CudaLayerStream(on_host, layout, ring, tell_span)
        else:
            self._mover = LayerStream(on_host, layout, ring, tell_span)
        self._inner = CudaEngine(
            *(model, layout, ring, num_places),
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            use_graphs=False,
            tell=tell,
            places=LayerPlaces(shape, slot_of, self._watch),
        )
        self._num_launched = 0

    def launch(self, rows: Sequence[StepRow]) -> LayerwiseCudaStep:
        """Check a step and cut it into passes; ValueError names a malformed row."""
        if not rows:
            raise ValueError("a step has at least one row")
        passes = tuple(
            (each, self._inner.prepare(each.rows))
            for each in plan_passes(rows, self.layout.block_size, self.num_places)
        )
        step = LayerwiseCudaStep(self._num_launched, len(rows), passes)
        self._num_launched += 1
        return step

    def collect(self, step: LaunchedStep) -> list[tuple[SampledToken, ...]]:
        """Compute the launched step, pass by pass (see ``Engine``)."""
        if not isinstance(step, LayerwiseCudaStep):
            raise TypeError(f"step {step.number} was launched by another engine")
        outcomes: list[RowOutcome] = [()] * step.num_rows
        for each, prepared in step.passes:
            for number, outcome in zip(each.numbers, self._compute(each, prepared), strict=True):
                outcomes[number] = outcome
        return all_tokens(outcomes)

    def execute(self, rows: Sequence[StepRow]) -> list[tuple[SampledToken, ...]]:
        """Launch a step and collect it."""
        return self.collect(self.launch(rows)) if rows else []

    def close(self) -> None:
        """Let go of what moves layers, and of the pool's pages; a second call does nothing."""
        self._mover.close()
        address, self._locked_at = self._locked_at, 0
        if address:
            _driver().unpin(address)

    def _watch(self, kernels: Kernels) -> RingKernels:
        self._ring_kernels = RingKernels(kernels, self._mover, self.config.num_layers)
        return self._ring_kernels

    def _compute(self, each: RingPass, prepared: PreparedCudaStep) -> Sequence[RowOutcome]:
        mover, kernels = self._mover, self._ring_kernels
        self.peak_places = max(self.peak_places, each.num_blocks)
        mover.begin(each.loads, each.stores)
        kernels.is_in_pass = True
        try:
            step = self._inner.start(prepared)
            mover.computed(self.config.num_layers - 1)
            mover.finish()
        except BaseException:
            mover.abandon()
            raise
        finally:
            kernels.is_in_pass = False
        try:
            return self._inner.collect(step)
        except RowsFailed as failed:
            return failed.outcomes


def _lock_pages(memory: torch.Tensor, device: int) -> int:
    """Lock host memory for a device; return its address."""
    address = memory.data_ptr()
    try:
        _driver().pin(device, address, memory.numel())
    except CudaError as error:
        raise ConfigError(
            f"layer_ring: the pool's {memory.numel()} bytes cannot be page-locked: {error}; make it"
            " smaller with kv_bytes"
        ) from error
    return address


def _driver() -> CudaDriver:
    from common.cuda.cupy_driver import cuda_driver  # noqa: PLC0415 - there on GPU machines alone

    return cuda_driver()
