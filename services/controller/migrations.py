"""Running decodes that move to another worker: from full pools, draining workers, long batches."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from common.ids import RequestId, WorkerId
from common.messages.control import MigrateDecode
from common.messages.fields import WorkerState
from services.controller import request_machine as machine
from services.controller.effects import Effect, Fact, Note, PeerKey, Send
from services.controller.members import Members
from services.controller.policy.migration import (
    DecodeView,
    Migration,
    is_giving_away,
    plan_migrations,
)
from services.controller.policy.spread import Batch, can_spread, plan_returns, plan_spread
from services.controller.policy.views import Incarnation, WorkerView
from services.controller.request_book import RequestBook
from services.controller.request_machine import DECODED, RequestPhase
from services.controller.request_record import RequestRecord

FAILED_AGAIN_SECONDS = 2.0
"""A decode whose move failed is left where it is for so long."""
MOVED_AGAIN_SECONDS = 5.0
"""And one that moved, where it is only about how long steps take."""
MOVED_TWICE_SECONDS = 60.0
"""The same for one that has moved so twice: where a long context makes the steps long wherever it
is, or the workers' speeds change, it would wander for ever."""

RETURN_SECONDS = 1.0
"""For so long after a request, decodes leave prefill workers that took them in a quiet time."""


@dataclass(frozen=True, slots=True)
class _Spread:
    """How often a decode was told to move to a shorter batch, and when it was last."""

    number: int
    begun_at: float


@dataclass(slots=True)
class _Progress:
    """What a running decode is thought to have drawn: one token in each of its worker's steps.

    ``num_steps`` is the worker's count when ``num_drawn`` was brought up to date; there is no
    worker before one has told its load. ``num_tokens`` are with the prompt's.
    """

    worker: PeerKey | None = None
    num_steps: int = 0
    num_drawn: int = 1
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Round:
    """What is to be planned with."""

    workers: Sequence[WorkerView]
    decodes: Sequence[DecodeView]
    batches: Mapping[Incarnation, Batch]
    under_way: Mapping[Incarnation, Sequence[int]]


class Migrations:
    """Begins moves, once a round; ``lifecycle`` takes what becomes of them."""

    def __init__(self, members: Members, book: RequestBook) -> None:
        self._members = members
        self._book = book
        self._spread: dict[RequestId, _Spread] = {}
        self._progress: dict[RequestId, _Progress] = {}
        self._spreading: set[RequestId] = set()
        """Those that move for that reason now."""

    def take_round(self, cause: str, now: float) -> list[Effect]:
        """Begin the moves that are due."""
        workers = [
            worker.view()
            for worker in self._members.workers.values()
            if worker.state in (WorkerState.READY, WorkerState.DRAINING)
        ]
        moving, batches = self._look(workers)
        self._spreading &= {record.request_id for record in moving}
        is_pressing = can_spread(workers, batches) or any(map(is_giving_away, workers))
        if not is_pressing and not self._spread:
            return []  # most of the time: nobody need look at each decode
        records = self._book.requests.values()
        decodes = [
            self._view(record, now) for record in records if record.phase is RequestPhase.DECODING
        ]
        moves = plan_migrations(workers, decodes, len(moving) - len(self._spreading))
        begun = {move.request_id for move in moves}
        decodes = [decode for decode in decodes if decode.request_id not in begun]
        spread = self._spread_moves(_Round(workers, decodes, batches, self._under_way(moving)), now)
        self._note_spread(spread, now)
        effects: list[Effect] = []
        for move in (*moves, *spread):
            effects += self._begin(move, cause, now)
        return effects

    def _spread_moves(self, this: _Round, now: float) -> list[Migration]:
        """Return the moves that let prompts come sooner, or else tokens."""
        if now - self._book.last_submitted_at < RETURN_SECONDS:
            guests = [decode for decode in this.decodes if decode.request_id in self._spread]
            returns = plan_returns(this.workers, guests, this.batches, this.under_way)
            if returns:
                return returns
        return plan_spread(this.workers, this.decodes, this.batches, this.under_way)

    def _look(
        self, workers: Sequence[WorkerView]
    ) -> tuple[list[RequestRecord], dict[Incarnation, Batch]]:
        """Bring every decode's progress up to date; return those that move, and all batches.

        A batch is what decodes at a worker or moves there.
        """
        loads = {key: worker.load for key, worker in self._members.workers.items()}
        keys: dict[PeerKey, Incarnation] = {worker.key: worker.key for worker in workers}
        sums = {key: [0, 0] for key in keys}
        moving: list[RequestRecord] = []
        progress: dict[RequestId, _Progress] = {}
        for record in self._book.requests.values():
            if record.phase not in DECODED or record.decode is None:
                continue
            known = self._progress.get(record.request_id) or _Progress()
            progress[record.request_id] = known
            load = loads.get(record.decode)
            if load is not None:
                if known.worker == record.decode:
                    known.num_drawn += max(0, load.num_steps - known.num_steps)
                known.worker, known.num_steps = record.decode, load.num_steps
            if record.phase is RequestPhase.MIGRATING:
                moving.append(record)
            params = record.submission.params
            known.num_tokens = record.submission.num_prompt_tokens + min(
                params.num_left, known.num_drawn
            )
            total = sums.get(record.target or record.decode)
            if total is not None:
                total[0] += params.num_choices
                total[1] += params.num_choices * known.num_tokens
        self._progress = progress
        return moving, {keys[key]: Batch(*total) for key, total in sums.items() if total[0]}

    def _note_spread(self, moves: list[Migration], now: float) -> None:
        requests = self._book.requests
        self._spread = {name: kept for name, kept in self._spread.items() if name in requests}
        for move in moves:
            before = self._spread.get(move.request_id)
            number = before.number + 1 if before else 1
            self._spread[move.request_id] = _Spread(number, now)
            self._spreading.add(move.request_id)

    def _has_moved(self, record: RequestRecord, now: float) -> bool:
        spread = self._spread.get(record.request_id)
        if spread is not None and spread.number > 1:
            return now - spread.begun_at < MOVED_TWICE_SECONDS
        return record.moved_at is not None and now - record.moved_at < MOVED_AGAIN_SECONDS

    def _under_way(self, moving: Iterable[RequestRecord]) -> dict[Incarnation, list[int]]:
        """Return the blocks of every decode that moves, by the worker that it leaves."""
        leaving: defaultdict[Incarnation, list[int]] = defaultdict(list)
        for record in moving:
            assert record.decode is not None, "it leaves it"
            source = self._members.workers.get(record.decode)
            if source is not None:
                num_tokens = self._progress[record.request_id].num_tokens
                leaving[source.key].append(-(-num_tokens // source.hello.block_size))
        return leaving

    def _begin(self, move: Migration, cause: str, now: float) -> list[Effect]:
        target = self._members.workers[move.target]
        target.replaced_blocks += move.num_blocks
        facts: tuple[Fact, ...] = (
            ("source", move.source[0]),
            ("target", move.target[0]),
            ("num_blocks", move.num_blocks),
            ("reason", move.reason),
        )
        order = MigrateDecode(request_id=move.request_id, decode=target.peer)
        return [
            *self._book.step(move.request_id, machine.MigrationStarted(target.key), cause, now),
            Note("migration_started", cause, move.request_id, facts),
            Send(move.source, order, cause),
        ]

    def _view(self, record: RequestRecord, now: float) -> DecodeView:
        """Return a decode as the planner sees it; its blocks are counted from its progress."""
        assert record.decode is not None, "it decodes"
        worker = self._members.workers[record.decode]
        params = record.submission.params
        num_tokens = self._progress[record.request_id].num_tokens
        failed_at = record.move_failed_at
        is_resting = failed_at is not None and now - failed_at < FAILED_AGAIN_SECONDS
        return DecodeView(
            request_id=record.request_id,
            worker=(WorkerId(record.decode[0]), record.decode[1]),
            num_blocks=-(-num_tokens // worker.hello.block_size),
            num_tokens=num_tokens,
            is_movable=params.num_choices == 1 and not is_resting,
            num_left=params.num_left - (num_tokens - record.submission.num_prompt_tokens),
            has_moved=self._has_moved(record, now),
        )
