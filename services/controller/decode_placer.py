"""Placing the decode of a request again, where the decode side that was chosen first refused."""

from common.errors import ErrorCode
from common.messages.control import DecodeRefused, PlaceDecode
from common.messages.fields import WorkerState
from services.controller import request_machine as machine
from services.controller.effects import Effect, Fact, Note, PeerKey, Send
from services.controller.limits import ControllerLimits
from services.controller.members import Members, WorkerRecord
from services.controller.policy.placement import choose_decode
from services.controller.request_book import RequestBook, ignored
from services.controller.request_machine import RequestPhase
from services.controller.request_record import RequestRecord

MAX_FAULTS = 5
"""Attempts with one decode worker that fail for another reason than room."""


class DecodePlacer:
    """Chooses decode sides among ``members`` for the records in ``book`` that wait for one."""

    def __init__(self, members: Members, book: RequestBook, limits: ControllerLimits) -> None:
        self._members = members
        self._book = book
        self._limits = limits

    def decode_refused(
        self, sender: PeerKey, message: DecodeRefused, cause: str, now: float
    ) -> list[Effect]:
        """Place the decode of a request again, now or when there is room."""
        record = self._book.requests.get(message.request_id)
        if record is not None and record.decode is not None:
            if record.prefill != sender or record.decode[0] != message.decode_worker:
                return [ignored(message.request_id, cause, "not its present decode side")]
            if message.code is not ErrorCode.NO_ROOM:
                record.faults[record.decode] += 1
        facts: tuple[Fact, ...] = (
            ("decode", message.decode_worker),
            ("code", message.code),
            ("message", message.message),
        )
        effects: list[Effect] = [Note("decode_refused", cause, message.request_id, facts)]
        effects += self._book.step(message.request_id, machine.DecodeRefusedReceived(), cause, now)
        if record is not None and record.phase is RequestPhase.WAITING:
            is_oldest = next(iter(self._book.waiting)) == record.request_id
            effects += self._place_decode(record, cause, now, may_ask_again=is_oldest)
        return effects

    def retry_waiting(self, cause: str, now: float) -> list[Effect]:
        """Place the decodes that wait, in their order, where there is room now.

        The oldest that finds no room keeps what there is: were later, smaller ones let past it, it
        could wait for ever.
        """
        effects: list[Effect] = []
        is_first = True
        for request_id in list(self._book.waiting):
            record = self._book.requests[request_id]
            effects += self._place_decode(record, cause, now, may_ask_again=is_first)
            is_first &= record.phase is not RequestPhase.WAITING
        return effects

    def _place_decode(
        self, record: RequestRecord, cause: str, now: float, *, may_ask_again: bool
    ) -> list[Effect]:
        """Try to place a waiting decode: first on those not asked yet, then where room shows."""
        assert record.prefill is not None, "a request that waits for its decode has a prefill side"
        prefill = self._members.workers[record.prefill]
        workers = self._members.decoders()
        if workers and all(_is_excluded(record, prefill, worker.key) for worker in workers):
            troubles = filter(None, (prefill.trouble_with(worker.key) for worker in workers))
            told = "no decode worker can be paired with its prefill worker"
            told = ": ".join((told, *list(troubles)[:1]))
            event = machine.DeadlinePassed(ErrorCode.TRANSFER_FAILED, told)
            return self._book.step(record.request_id, event, cause, now)
        view = prefill.view()
        ready = [
            w
            for w in workers
            if w.state is WorkerState.READY and not _is_excluded(record, prefill, w.key)
        ]
        unasked = [w.view() for w in ready if w.key not in record.refusals]
        chosen = choose_decode(unasked, record.num_blocks, view)
        if chosen is None and may_ask_again:
            free = [
                worker.view()
                for worker in ready
                if now - record.refusals.get(worker.key, -1e9) >= self._limits.retry_seconds
                and worker.has_room_now(record.num_blocks)
            ]
            chosen = choose_decode(free, record.num_blocks, view)
        if chosen is None:
            return []
        key: PeerKey = (chosen.worker_id, chosen.epoch)
        self._members.workers[key].replaced_blocks += record.num_blocks
        effects = self._book.step(record.request_id, machine.DecodePlaced(key), cause, now)
        place = PlaceDecode(request_id=record.request_id, decode=self._members.workers[key].peer)
        facts: tuple[Fact, ...] = (
            ("decode", chosen.worker_id),
            ("decode_used_share", round(chosen.used_share, 4)),
            ("num_refusals", len(record.refusals)),
            ("reason", "least loaded of those not asked, or with room"),
        )
        return [
            *effects,
            Note("decode_placed", cause, record.request_id, facts),
            Send(record.prefill, place, cause),
            record.tell_placed(cause),
        ]


def _is_excluded(record: RequestRecord, prefill: WorkerRecord, decode: PeerKey) -> bool:
    return record.faults[decode] >= MAX_FAULTS or bool(prefill.trouble_with(decode))
