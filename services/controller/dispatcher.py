"""Placing requests: first on two sides, then their decodes again where one was refused."""

from dataclasses import dataclass

from common.errors import ErrorCode
from common.ids import RequestId
from common.messages.control import (
    DecodeRefused,
    PlaceDecode,
    PlaceRequest,
    RequestFailed,
    RequestPlaced,
    RequestRefused,
    SubmitRequest,
)
from common.messages.fields import Role
from services.controller import request_machine as machine
from services.controller.effects import Effect, Fact, Note, PeerKey, Send
from services.controller.limits import ControllerLimits
from services.controller.members import GatewayRecord, Members, WorkerRecord
from services.controller.policy.placement import (
    Placement,
    choose_decode,
    choose_sides,
    num_blocks_needed,
)
from services.controller.request_book import RequestBook, ignored
from services.controller.request_machine import CANCELLING, RequestPhase
from services.controller.request_record import RequestRecord

MAX_FAULTS = 5
"""Attempts with one decode worker that fail for another reason than room."""
MAX_PLACEMENTS = 4
"""Prefill workers that are tried for one request."""
NOT_TAKING_IN = (ErrorCode.SHUTTING_DOWN, ErrorCode.NO_WORKER)
"""How a worker refuses a request without a look at it: it drains, or is quarantined."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not taken in."""

    code: ErrorCode
    message: str
    retry_after_seconds: float | None = None


class Dispatcher:
    """Makes the records in ``book`` and chooses their sides among ``members``."""

    def __init__(self, members: Members, book: RequestBook, limits: ControllerLimits) -> None:
        self._members = members
        self._book = book
        self._limits = limits

    def submit(
        self,
        gateway: GatewayRecord,
        message: SubmitRequest,
        payload: tuple[bytes, ...],
        cause: str,
        now: float,
    ) -> list[Effect]:
        """Place a request, or refuse it by name."""
        if message.request_id in self._book.requests:
            refusal = Refusal(ErrorCode.BAD_REQUEST, "this request id is in use")
            return refuse(gateway.key, message.request_id, refusal, cause)
        if len(payload) != 1 or len(payload[0]) != 4 * message.num_prompt_tokens:
            refusal = Refusal(
                ErrorCode.BAD_REQUEST, "the prompt's frame and num_prompt_tokens differ"
            )
            return refuse(gateway.key, message.request_id, refusal, cause)
        chosen = self._choose(message)
        if isinstance(chosen, Refusal):
            return refuse(gateway.key, message.request_id, chosen, cause)
        placement, num_blocks = chosen
        sides = (self._key(placement.prefill.worker_id), self._key(placement.decode.worker_id))
        record = RequestRecord(message, gateway.key, sides, num_blocks, payload, now)
        self._book.add(record)
        return self._place(record, placement, cause)

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

    def place_failed(self, message: PlaceRequest, cause: str, now: float) -> list[Effect]:
        """Choose again for a request whose ``PlaceRequest`` could not be sent.

        The worker that was not reached is no member any more, or is not ready.
        """
        record = self._book.requests.get(message.request_id)
        if record is None:
            return []
        chosen = self._choose(record.submission, is_new=False)
        if record.phase in CANCELLING or isinstance(chosen, Refusal):
            code, told = ErrorCode.NO_WORKER, "the chosen worker was not reached"
            if isinstance(chosen, Refusal):
                code, told = chosen.code, chosen.message
            return self._book.step(
                message.request_id, machine.PlacementFailed(code, told), cause, now
            )
        return self._replace(record, chosen[0], cause, now)

    def place_refused(
        self, worker: WorkerRecord, message: RequestFailed, cause: str, now: float
    ) -> list[Effect]:
        """Choose again for a request that a worker, which was ready when it was chosen, refused.

        Returns no effects when the message is no such refusal, or nobody else can take it: then
        the request has failed.
        """
        record = self._book.requests.get(message.request_id)
        if record is None or not _is_refused(record, worker.key, message.code):
            return []
        worker.is_draining = True  # until its next heartbeat tells
        chosen = self._choose(record.submission, is_new=False)
        if isinstance(chosen, Refusal):
            return []
        facts: tuple[Fact, ...] = (("prefill", worker.key[0]), ("reason", message.message))
        note = Note("placement_refused", cause, record.request_id, facts)
        return [note, *self._replace(record, chosen[0], cause, now)]

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

    def _choose(
        self, message: SubmitRequest, *, is_new: bool = True
    ) -> tuple[Placement, int] | Refusal:
        limits = self._limits
        ready = list(self._members.ready_workers())
        if missing := self.missing_role():
            return Refusal(ErrorCode.NO_WORKER, missing, limits.retry_after_seconds)
        if is_new and self._book.num_queued >= limits.max_queue:
            told = f"{self._book.num_queued} requests wait already, the most that may (max_queue)"
            return Refusal(ErrorCode.QUEUE_FULL, told, limits.retry_after_seconds)
        block_size = ready[0].hello.block_size
        params, choices = message.params, message.params.num_choices
        num_blocks = num_blocks_needed(
            message.num_prompt_tokens, choices, params.num_left, block_size
        )
        placement = choose_sides([worker.view() for worker in ready], num_blocks)
        if placement is None:
            largest = max(worker.hello.num_blocks for worker in ready)
            told = (
                f"the prompt of {message.num_prompt_tokens} tokens with {choices} "
                f"{'choice' if choices == 1 else 'choices'} needs "
                f"{num_blocks} KV blocks of {block_size} tokens; the largest worker's pool has "
                f"{largest} (kv_bytes)"
            )
            return Refusal(ErrorCode.CONTEXT_EXCEEDED, told)
        return placement, num_blocks

    def missing_role(self) -> str:
        """Say which role has no ready worker, or which pair does not work, if so."""
        if self._members.num_ready(Role.COMBINED):
            return ""
        missing = [
            role for role in (Role.PREFILL, Role.DECODE) if not self._members.num_ready(role)
        ]
        if missing:
            return f"no {' and no '.join(missing)} worker is ready"
        return self._members.why_unpaired()

    def _replace(
        self, record: RequestRecord, placement: Placement, cause: str, now: float
    ) -> list[Effect]:
        sides = (self._key(placement.prefill.worker_id), self._key(placement.decode.worker_id))
        again = self._book.step(record.request_id, machine.PrefillReplaced(*sides), cause, now)
        return [*again, *self._place(record, placement, cause)]

    def _place(self, record: RequestRecord, placement: Placement, cause: str) -> list[Effect]:
        submission = record.submission
        prefill = self._members.workers[record.prefill]
        decode = None if record.decode is None else self._members.workers[record.decode]
        prefill.assigned_tokens += submission.num_prompt_tokens
        gateway = self._members.gateways[record.gateway].hello
        place = PlaceRequest(
            request_id=record.request_id,
            gateway_id=gateway.gateway_id,
            tokens_endpoint=gateway.tokens_endpoint,
            params=submission.params,
            num_prompt_tokens=submission.num_prompt_tokens,
            decode=decode.peer if decode is not None and decode is not prefill else None,
        )
        facts: tuple[Fact, ...] = (
            ("prefill", placement.prefill.worker_id),
            ("decode", placement.decode.worker_id),
            ("num_prompt_tokens", submission.num_prompt_tokens),
            ("num_blocks", record.num_blocks),
            ("prefill_uncomputed_tokens", placement.prefill.uncomputed_tokens),
            ("decode_used_share", round(placement.decode.used_share, 4)),
            ("decode_has_room", placement.decode.has_room(record.num_blocks)),
            ("reason", "least loaded"),
        )
        return [
            Note("request_placed", cause, record.request_id, facts),
            Send(record.prefill, place, cause, record.payload),
            self._tell_placed(record, cause),
        ]

    def _place_decode(
        self, record: RequestRecord, cause: str, now: float, *, may_ask_again: bool
    ) -> list[Effect]:
        """Try to place a waiting decode: first on those not asked yet, then where room shows."""
        prefill = self._members.workers[record.prefill]
        workers = [w for w in self._members.workers.values() if w.peer.role is Role.DECODE]
        if workers and all(_is_excluded(record, prefill, worker.key) for worker in workers):
            troubles = filter(None, (prefill.trouble_with(worker.key) for worker in workers))
            told = "no decode worker can be paired with its prefill worker"
            told = ": ".join((told, *list(troubles)[:1]))
            event = machine.DeadlinePassed(ErrorCode.TRANSFER_FAILED, told)
            return self._book.step(record.request_id, event, cause, now)
        view = prefill.view()
        ready = [
            w for w in self._members.ready_workers() if not _is_excluded(record, prefill, w.key)
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
        key = self._key(chosen.worker_id)
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
            self._tell_placed(record, cause),
        ]

    def _tell_placed(self, record: RequestRecord, cause: str) -> Send:
        decode = record.decode or record.prefill
        placed = RequestPlaced(
            request_id=record.request_id,
            prefill_worker=self._members.workers[record.prefill].peer.worker_id,
            decode_worker=self._members.workers[decode].peer.worker_id,
        )
        return Send(record.gateway, placed, cause)

    def _key(self, worker_id: str) -> PeerKey:
        worker = self._members.worker_named(worker_id)
        assert worker is not None, worker_id
        return worker.key


def _is_excluded(record: RequestRecord, prefill: WorkerRecord, decode: PeerKey) -> bool:
    return record.faults[decode] >= MAX_FAULTS or bool(prefill.trouble_with(decode))


def _is_refused(record: RequestRecord, sender: PeerKey, code: ErrorCode) -> bool:
    """Whether the request's prefill side has not taken it in, and another one may be tried.

    The prompt is kept only as long as such a refusal may come.
    """
    return (
        code in NOT_TAKING_IN
        and record.phase is RequestPhase.PLACED
        and record.prefill == sender
        and bool(record.payload)
        and record.num_placements < MAX_PLACEMENTS
    )


def refuse(gateway: PeerKey, request_id: RequestId, refusal: Refusal, cause: str) -> list[Effect]:
    """Return the effects that refuse a request by name."""
    refused = RequestRefused(
        request_id=request_id,
        code=refusal.code,
        message=refusal.message,
        retry_after_seconds=refusal.retry_after_seconds,
    )
    facts: tuple[Fact, ...] = (("code", refusal.code), ("reason", refusal.message))
    return [
        Note("request_refused", cause, request_id, facts, "warning"),
        Send(gateway, refused, cause),
    ]
