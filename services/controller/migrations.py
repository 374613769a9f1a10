"""Running decodes that move to another worker: from full pools, and from workers that drain."""

from common.ids import WorkerId
from common.messages.control import MigrateDecode
from common.messages.fields import WorkerState
from services.controller import request_machine as machine
from services.controller.effects import Effect, Fact, Note, Send
from services.controller.members import Members
from services.controller.policy.migration import DecodeView, Migration, plan_migrations
from services.controller.request_book import RequestBook
from services.controller.request_machine import RequestPhase
from services.controller.request_record import RequestRecord

FAILED_AGAIN_SECONDS = 2.0
"""A decode whose move failed is left where it is for so long."""


class Migrations:
    """Begins moves, once a round; ``lifecycle`` takes what becomes of them."""

    def __init__(self, members: Members, book: RequestBook) -> None:
        self._members = members
        self._book = book

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
        effects: list[Effect] = []
        for move in plan_migrations(workers, decodes, num_moving):
            effects += self._begin(move, cause, now)
        return effects

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
        )
