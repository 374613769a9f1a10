"""The engine of a GPU: steps are enqueued one behind the other, tokens come back later.

Everything goes to one stream, in order. So a step may continue with tokens that the step before has
yet to draw, memory of a step is free for the next, and the host prepares one step while the device
runs another.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from common.engine.communicator import ALONE, Communicator
from common.engine.cuda.model import CudaModel
from common.engine.cuda.runner import CudaRunner, LayerPlaces
from common.engine.cuda.sampler import DeviceSampler, Draw, Drawn, is_plain
from common.engine.cuda.step_batch import Longs, OptionalArrays, StepBatch, StepPacker
from common.engine.cuda.upload import upload
from common.engine.failure import RowOutcome, RowsFailed
from common.engine.interface import LaunchedStep, StepRow
from common.errors import ErrorCode, RequestError
from common.kv.layout import KVLayout
from common.sampling import SampledToken

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
    began: torch.cuda.Event | None
    done: torch.cuda.Event | None

    def seconds_after(self, before: LaunchedStep | None) -> float | None:
        """Return the time since the step before (see ``LaunchedStep``); None without a device."""
        since = before.done if isinstance(before, CudaStep) else self.began
        if since is None or self.done is None:
            return None
        milliseconds: float = since.elapsed_time(self.done)
        return milliseconds / 1e3


@dataclass(frozen=True, slots=True)
class PreparedCudaStep:
    """A step that is checked and packed; see ``StepBatch`` and ``CudaRunner.enqueue``."""

    batch: StepBatch
    pending_places: Longs
    num_rows: int
    draws: tuple[Draw, ...]

    def arrays(self) -> OptionalArrays:
        """Return what the other ranks of a parallel engine compute with."""
        return [self.pending_places, *self.batch.arrays()]


class CudaEngine:
    """Executes steps of one model over one pool; implements ``common.engine.interface.Engine``.

    On a device without CUDA, and in float32, it computes the same with torch's own operators.
    In a parallel engine this is rank 0's part: it draws, and the other ranks get its tokens.
    ``last_launch_seconds`` is the host's time in the latest ``start``.
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
        communicator: Communicator = ALONE,
        places: LayerPlaces | None = None,
    ) -> None:
        """``pool`` is the uint8 memory of all blocks, on the model's device.

        ``scratch_block`` is one that no sequence is ever given. ``tell`` gets lines of progress:
        kernels are compiled and graphs captured here. ValueError where pool, layout and model do
        not fit each other.
        """
        self.config, self.layout = model.config, layout
        self.last_launch_seconds = 0.0
        self._model = model
        self._runner = CudaRunner(
            *(model, layout, pool, scratch_block),
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            use_graphs=use_graphs,
            tell=tell,
            communicator=communicator,
            places=places,
        )
        self._packer = StepPacker(layout.block_size, self.config.vocab_size)
        self._sampler = DeviceSampler(self.config.vocab_size, model.device)
        self._num_launched = 0
        # Row of the latest step -> its place among the drawn tokens, -1 where it draws none.
        self._places: Longs = np.empty(0, np.int64)

    def prepare(self, rows: Sequence[StepRow]) -> PreparedCudaStep:
        """Check and pack a step; ValueError names a malformed row."""
        if not rows:
            raise ValueError("a step has at least one row")
        batch = self._packer.pack(rows)
        if len(batch.sampled_rows) > len(self._runner.drawn.ids):
            raise ValueError(f"{len(batch.sampled_rows)} sampled rows are more than a step takes")
        pending_places = self._pending_places(rows, batch)
        draws = tuple(
            Draw(at, spec)
            for at, index in enumerate(batch.sampled_rows.tolist())
            for spec in rows[index].samples
        )
        return PreparedCudaStep(batch, pending_places, len(rows), draws)

    def start(self, prepared: PreparedCudaStep) -> CudaStep:
        """Enqueue the step that was prepared last."""
        begin = time.perf_counter()
        batch, runner = prepared.batch, self._runner
        num_sampled = len(batch.sampled_rows)
        with runner.on_stream():
            began = runner.record()
            computed = runner.enqueue(batch, prepared.pending_places)
            drawn = self._draw(computed.logits, num_sampled, prepared.draws)
            runner.share_drawn(num_sampled)
            done = runner.record()
        places = np.full(prepared.num_rows, -1, np.int64)
        places[batch.sampled_rows] = np.arange(num_sampled)
        self._places = places
        step = CudaStep(
            number=self._num_launched,
            num_rows=prepared.num_rows,
            sampled_rows=tuple(batch.sampled_rows.tolist()),
            draws=prepared.draws,
            drawn=drawn,
            is_foreign=computed.is_foreign,
            began=began,
            done=done,
        )
        self._num_launched += 1
        self.last_launch_seconds = time.perf_counter() - begin
        return step

    def launch(self, rows: Sequence[StepRow]) -> CudaStep:
        """Enqueue a step; ValueError names a malformed row, before anything is enqueued."""
        return self.start(self.prepare(rows))

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

    def _draw(
        self, logits: torch.Tensor | None, num_sampled: int, draws: tuple[Draw, ...]
    ) -> Drawn:
        known = self._runner.drawn
        best = (known.scores[:num_sampled], known.ids[:num_sampled])
        if logits is None or is_plain(draws, num_sampled):
            return Drawn(best[1], best[0]).to_host()
        drawn = self._sampler.draw(logits, best, draws)
        rows = np.fromiter((draw.row for draw in draws), np.int64, len(draws))
        starts = np.searchsorted(rows, np.arange(num_sampled))
        (firsts,) = upload([starts], self._runner.device)
        known.ids[:num_sampled] = drawn.ids[firsts]
        return drawn.to_host()

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


def _outcome(tokens: Sequence[SampledToken | None]) -> RowOutcome:
    drawn = tuple(token for token in tokens if token is not None)
    if len(drawn) == len(tokens):
        return drawn
    return RequestError(
        ErrorCode.INTERNAL, "the model's output is not a number; the request cannot go on"
    )
