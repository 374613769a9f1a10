"""The CPU engine with the K and V of two layers in a ring and of the rest in the pool."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from common.engine.batch import Batch, flatten
from common.engine.cpu_engine import CpuRunner, all_tokens, draw
from common.engine.failure import RowOutcome
from common.engine.interface import LaunchedStep, StepRow, SynchronousStep
from common.engine.kernels import DecoderKernels
from common.engine.layerwise.passes import RingPass, plan_passes
from common.engine.layerwise.stream import LayerStream, Span, ring_layout, slot_of
from common.kv.layout import KVLayout
from common.sampling import SampledToken


class RingKernels(DecoderKernels):
    """Kernels over a ring, which wait for each layer and let it go again."""

    def __init__(
        self,
        layout: KVLayout,
        ring: torch.Tensor,
        num_heads: int,
        tables: tuple[torch.Tensor, torch.Tensor],
        num_threads: int,
        stream: LayerStream,
    ) -> None:
        """``layout`` is that of ``ring``."""
        super().__init__(layout, ring, num_heads, tables, num_threads)
        self._stream = stream

    def rotate_store(
        self,
        layer: int,
        qkv: torch.Tensor,
        norms: tuple[torch.Tensor | None, torch.Tensor | None],
        epsilon: float,
    ) -> None:
        """Do so when the layer is in the ring (see ``DecoderKernels``)."""
        self._stream.wait_loaded(layer)
        super().rotate_store(slot_of(layer), qkv, norms, epsilon)

    def attend(self, layer: int, qkv: torch.Tensor, window: int | None) -> torch.Tensor:
        """Do so, and let the layer go (see ``DecoderKernels``)."""
        out = super().attend(slot_of(layer), qkv, window)
        self._stream.computed(layer)
        return out


@dataclass(frozen=True, slots=True)
class LayerwiseStep(SynchronousStep):
    """A step that is checked and cut into passes, and computed when it is collected."""

    number: int
    num_rows: int
    passes: tuple[tuple[RingPass, Batch], ...]


class LayerwiseCpuEngine:
    """Implements ``common.engine.interface.Engine``; made for prefill (papers 2.4).

    Between the steps K and V live in the pool. A step holds those of two layers in a ring of
    ``num_places`` blocks and computes one layer while the next one comes and the last one goes. A
    sequence may have as many tokens as fit the ring; a step of more goes in several passes.
    """

    max_in_flight = 1

    def __init__(
        self,
        model_folder: Path,
        layout: KVLayout,
        pool: memoryview | torch.Tensor,
        num_threads: int = 1,
        *,
        num_places: int,
        has_weights: bool = True,
        tell: Callable[[Span], None] | None = None,
    ) -> None:
        """Load the model; errors as ``CpuEngine``, and ValueError for a quantised layout.

        ``tell`` is given what is done with every layer, and when.
        """
        if num_places < 1:
            raise ValueError(f"a ring of {num_places} blocks holds nothing")
        self.layout = layout
        self.num_places = num_places
        self.peak_places = 0
        """Most places of the ring that a pass has needed."""
        shape = ring_layout(layout)
        self.ring_bytes = num_places * shape.block_bytes
        ring = torch.zeros(self.ring_bytes, dtype=torch.uint8)
        self._make_stream = partial(LayerStream, layout=layout, ring=ring, tell=tell)
        self._stream: LayerStream | None = None

        def make_kernels(
            layout: KVLayout,
            pool: torch.Tensor,
            num_heads: int,
            tables: tuple[torch.Tensor, torch.Tensor],
            num_threads: int,
        ) -> RingKernels:
            del layout
            self._stream = self._make_stream(pool)
            return RingKernels(shape, ring, num_heads, tables, num_threads, self._stream)

        self._runner = CpuRunner(
            *(model_folder, layout, pool, num_threads),
            has_weights=has_weights,
            make_kernels=make_kernels,
        )
        self.config = self._runner.config
        self._num_launched = 0

    def launch(self, rows: Sequence[StepRow]) -> LayerwiseStep:
        """Check a step and cut it into passes; ValueError names a malformed row."""
        if not rows:
            raise ValueError("a step has at least one row")
        passes = []
        for each in plan_passes(rows, self.layout.block_size, self.num_places):
            batch = flatten(each.rows, self.layout.block_size, self.config.vocab_size)
            self._runner.set_batch(batch)
            passes.append((each, batch))
        step = LayerwiseStep(self._num_launched, len(rows), tuple(passes))
        self._num_launched += 1
        return step

    def collect(self, step: LaunchedStep) -> list[tuple[SampledToken, ...]]:
        """Compute the launched step, pass by pass (see ``Engine``)."""
        if not isinstance(step, LayerwiseStep):
            raise TypeError(f"step {step.number} was launched by another engine")
        outcomes: list[RowOutcome] = [()] * step.num_rows
        for each, batch in step.passes:
            drawn = draw(self._compute(each, batch), each.rows, batch)
            for number, outcome in zip(each.numbers, drawn, strict=True):
                outcomes[number] = outcome
        return all_tokens(outcomes)

    def execute(self, rows: Sequence[StepRow]) -> list[tuple[SampledToken, ...]]:
        """Launch a step and collect it."""
        return self.collect(self.launch(rows)) if rows else []

    def close(self) -> None:
        """End the threads that move layers."""
        if self._stream is not None:
            self._stream.close()

    def _compute(self, each: RingPass, batch: Batch) -> torch.Tensor:
        stream = self._stream
        assert stream is not None, "the runner has made its kernels"
        self.peak_places = max(self.peak_places, each.num_blocks)
        self._runner.set_batch(batch)
        stream.begin(each.loads, each.stores)
        try:
            logits = self._runner.forward(batch)
            stream.finish()
        except BaseException:
            stream.abandon()
            raise
        return logits
