"""The engine that a worker sees, whose steps all ranks compute together."""

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from common.engine.failure import RowsFailed
from common.engine.interface import LaunchedStep, StepRow
from common.engine.parallel.group import RankGroup
from common.engine.parallel.wire import Array
from common.kv.layout import KVLayout
from common.messages.fields import CudaPoolHandle, PoolHandle
from common.sampling import SampledToken


class PreparedStep(Protocol):
    """A step whose rows were found well-formed."""

    def arrays(self) -> Sequence[Array | None]:
        """Return what the other ranks need to compute the same batch."""
        ...


PreparedT = TypeVar("PreparedT", bound=PreparedStep)


class LeadEngine(Protocol[PreparedT]):
    """Rank 0's own engine; see ``common.engine.interface.Engine``."""

    @property
    def max_in_flight(self) -> int:
        """Steps that may be launched and not yet collected."""
        ...

    def prepare(self, rows: Sequence[StepRow]) -> PreparedT:
        """Check a step; ValueError for a malformed row, and nothing has changed."""
        ...

    def start(self, prepared: PreparedT) -> LaunchedStep:
        """Launch the step that was prepared last."""
        ...

    def collect(self, step: LaunchedStep) -> list[tuple[SampledToken, ...]]:
        """Wait for the oldest launched step."""
        ...


class ParallelEngine(Generic[PreparedT]):
    """Implements ``common.engine.interface.Engine`` over rank 0's engine and the other ranks.

    A step is done when every rank has written its K and V. A rank that fails or dies breaks the
    engine for good: ``launch`` and ``collect`` raise ``EngineBroken`` from then on.
    """

    def __init__(
        self,
        lead: LeadEngine[PreparedT],
        group: RankGroup,
        layout: KVLayout,
        handles: Sequence[PoolHandle | CudaPoolHandle],
    ) -> None:
        self._lead = lead
        self._group = group
        self._num_launched = 0
        self.max_in_flight = lead.max_in_flight
        self.layout = layout
        """Of the blocks in each rank's pool."""
        self.handles = tuple(handles)
        """Of the pools of all ranks, rank 0's first."""

    @property
    def broken(self) -> str | None:
        """Why the engine computes nothing any more; None while it does."""
        return self._group.broken

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes of ranks 1, 2, ..."""
        return self._group.pids

    def launch(self, rows: Sequence[StepRow]) -> LaunchedStep:
        """Take on a step in all ranks; ValueError for a malformed row, before any rank knows it."""
        self._group.check()
        prepared = self._lead.prepare(rows)
        self._group.start_step(self._num_launched, prepared.arrays())
        with self._group.watched(f"launching step {self._num_launched}"):
            step = self._lead.start(prepared)
        self._num_launched += 1
        return step

    def collect(self, step: LaunchedStep) -> list[tuple[SampledToken, ...]]:
        """Wait for the oldest launched step in all ranks and return the drawn tokens of its rows.

        RowsFailed as ``common.engine.interface.Engine`` says.
        """
        with self._group.watched(f"step {step.number}"):
            try:
                drawn = self._lead.collect(step)
            except RowsFailed:
                self._group.finish_step(step.number)
                raise
            self._group.finish_step(step.number)
            return drawn

    def execute(self, rows: Sequence[StepRow]) -> list[tuple[SampledToken, ...]]:
        """Launch a step and collect it."""
        return self.collect(self.launch(rows)) if rows else []

    def give_up(self, reason: str) -> None:
        """Break the engine from any thread, so that whoever waits for a step goes on."""
        self._group.fail(reason)

    def close(self) -> None:
        """End the other ranks; a second call does nothing."""
        self._group.close()
