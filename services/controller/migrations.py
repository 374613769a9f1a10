"""Running decodes that move to another worker: from full pools, draining workers, long batches."""

from collections import Counter
from dataclasses import dataclass

from common.ids import RequestId, WorkerId
from common.messages.control import MigrateDecode
from common.messages.fields import WorkerState
from services.controller import request_machine as machine
from services.controller.effects import Effect, Fact, Note, Send
from services.controller.members import Members
from services.controller.policy.migration import DecodeView, Migration, plan_migrations
from services.controller.policy.spread import plan_returns, plan_spread
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


class Migrations:
    """Begins moves, once a round; ``lifecycle`` takes what becomes of them."""

    def __init__(self, members: Members, book: RequestBook) -> None:
        self._members = members
        self._book = book
        self._spread: dict[RequestId, _Spread] = {}

    def take_round(self, cause: str, now: float) -> list[Effect]:
        """Begin the moves that are due."""
        workers = [
            worker.view()
            for worker in self._members.workers.values()
            if worker.state in (WorkerState.READY, WorkerState.DRAINING)
        ]
        records = self._book.requests.values()
        num_moving = sum(record.phase is RequestPhase.MIGRATING for record in records)
        decodes = [
            self._view(record, now) for record in records if record.phase is RequestPhase.DECODING
        ]
        moves = plan_migrations(workers, decodes, num_moving)
        begun = {move.request_id for move in moves}
        decodes = [decode for decode in decodes if decode.request_id not in begun]
        spread = self._spread_moves(workers, decodes, num_moving + len(moves), now)
        self._note_spread(spread, now)
        effects: list[Effect] = []
        for move in (*moves, *spread):
            effects += self._begin(move, cause, now)
        return effects

    def _spread_moves(
        self, workers: list[WorkerView], decodes: list[DecodeView], num_moving: int, now: float
    ) -> list[Migration]:
        """Return the moves that let prompts come sooner, or else tokens."""
        if now - self._book.last_submitted_at < RETURN_SECONDS:
            guests = [decode for decode in decodes if decode.request_id in self._spread]
            returns = plan_returns(workers, guests, self._counts(), num_moving)
            if returns:
                return returns
        return plan_spread(workers, decodes, self._counts(), num_moving)

    def _note_spread(self, moves: list[Migration], now: float) -> None:
        requests = self._book.requests
        self._spread = {name: kept for name, kept in self._spread.items() if name in requests}
        for move in moves:
            before = self._spread.get(move.request_id)
            number = before.number + 1 if before else 1
            self._spread[move.request_id] = _Spread(number, now)

    def _has_moved(self, record: RequestRecord, now: float) -> bool:
        spread = self._spread.get(record.request_id)
        if spread is not None and spread.number > 1:
            return now - spread.begun_at < MOVED_TWICE_SECONDS
        return record.moved_at is not None and now - record.moved_at < MOVED_AGAIN_SECONDS

    def _counts(self) -> Counter[Incarnation]:
        """Count the sequences that decode at each worker or move there."""
        counts: Counter[Incarnation] = Counter()
        for record in self._book.requests.values():
            place = record.target or record.decode
            if place is not None and record.phase in DECODED:
                counts[WorkerId(place[0]), place[1]] += record.submission.params.num_choices
        return counts

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
        """Return a decode as the planner sees it; its blocks are counted from its pace."""
        assert record.decode is not None, "it decodes"
        worker = self._members.workers[record.decode]
        params, prompt = record.submission.params, record.submission.num_prompt_tokens
        seconds = now - (record.decoding_since or now)
        step_seconds = worker.rates.decode_step_seconds if worker.rates else 0.0
        num_drawn = params.num_left
        if step_seconds > 0:
            num_drawn = min(num_drawn, 1 + int(seconds / step_seconds))
        failed_at = record.move_failed_at
        is_resting = failed_at is not None and now - failed_at < FAILED_AGAIN_SECONDS
        return DecodeView(
            request_id=record.request_id,
            worker=(WorkerId(record.decode[0]), record.decode[1]),
            num_blocks=-(-(prompt + num_drawn) // worker.hello.block_size),
            is_movable=params.num_choices == 1 and not is_resting,
            num_left=params.num_left - num_drawn,
            has_moved=self._has_moved(record, now),
        )
