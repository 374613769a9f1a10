"""From the queue to the workers: a request is bound to its two sides as late as may be."""

from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import ErrorCode
from common.ids import RequestId
from common.messages.control import (
    PlaceRequest,
    RequestFailed,
    RequestQueued,
    RequestRefused,
    SubmitRequest,
)
from common.messages.fields import Role
from services.controller import request_machine as machine
from services.controller.effects import Effect, Fact, Note, PeerKey, Send
from services.controller.limits import ControllerLimits
from services.controller.members import GatewayRecord, Members, WorkerRecord
from services.controller.policy.placement import Placement, choose_sides, num_blocks_needed
from services.controller.request_book import RequestBook
from services.controller.request_machine import RequestPhase
from services.controller.request_record import RequestRecord

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
    """Makes the records in ``book`` and chooses their sides among ``members``.

    Requests wait in the controller, first come first served, while every worker that could compute
    their prompts has enough to do. So one worker's long prompts delay nothing that another worker
    could have begun, and a worker that joins, or takes another role, finds work.
    """

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
        """Take a request in and place it if a worker is to have it now, or refuse it by name."""
        refusal = self._check(message, payload)
        if refusal is not None:
            return refuse(gateway.key, message.request_id, refusal, cause)
        record = RequestRecord(message, gateway.key, self._num_blocks(message), payload, now)
        self._book.add(record)
        effects = self.dispatch_queued(cause, now)
        if record.phase is RequestPhase.QUEUED:
            facts: tuple[Fact, ...] = (
                ("num_ahead", len(self._book.queued) - 1),
                ("num_prompt_tokens", message.num_prompt_tokens),
                ("reason", "every worker that could have it has enough to compute"),
            )
            queued = RequestQueued(request_id=record.request_id)
            effects += [
                Note("request_queued", cause, record.request_id, facts),
                Send(gateway.key, queued, cause),
            ]
        return effects

    def dispatch_queued(self, cause: str, now: float) -> list[Effect]:
        """Place queued requests, in their order, while there are workers that are to have them.

        Nobody overtakes the oldest that could be served at all: its worker has room soon. One that
        no ready worker could serve lets the others past.
        """
        effects: list[Effect] = []
        ready = list(self._members.ready_workers())
        for request_id in list(self._book.queued):
            record = self._book.requests[request_id]
            placement = self._choose(record.submission, [w for w in ready if _may_have_work(w)])
            if placement is not None:
                effects += self._place(record, placement, cause, now)
            elif self._choose(record.submission, ready) is not None:
                record.unserved_since = None
                break
            elif record.unserved_since is None:
                record.unserved_since = now
        return effects

    def place_failed(self, message: PlaceRequest, cause: str, now: float) -> list[Effect]:
        """Take a request back whose ``PlaceRequest`` could not be sent."""
        record = self._book.requests.get(message.request_id)
        if record is None or record.phase is not RequestPhase.PLACED:
            return []
        return self._book.step(message.request_id, machine.Requeued(), cause, now)

    def place_refused(
        self, worker: WorkerRecord, message: RequestFailed, cause: str, now: float
    ) -> list[Effect]:
        """Take a request back that a worker, which was ready when it was chosen, refused.

        Returns no effects when the message is no such refusal, or nobody else can take it: then
        the request has failed.
        """
        record = self._book.requests.get(message.request_id)
        if record is None or not _is_refused(record, worker.key, message.code):
            return []
        worker.is_draining = True  # until its next heartbeat tells
        if self._choose(record.submission, list(self._members.ready_workers())) is None:
            return []
        facts: tuple[Fact, ...] = (("prefill", worker.key[0]), ("reason", message.message))
        note = Note("placement_refused", cause, record.request_id, facts)
        return [note, *self._book.step(record.request_id, machine.Requeued(), cause, now)]

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

    def _check(self, message: SubmitRequest, payload: tuple[bytes, ...]) -> Refusal | None:
        if message.request_id in self._book.requests:
            return Refusal(ErrorCode.BAD_REQUEST, "this request id is in use")
        if len(payload) != 1 or len(payload[0]) != 4 * message.num_prompt_tokens:
            told = "the prompt's frame and num_prompt_tokens differ"
            return Refusal(ErrorCode.BAD_REQUEST, told)
        limits = self._limits
        if missing := self.missing_role():
            return Refusal(ErrorCode.NO_WORKER, missing, limits.retry_after_seconds)
        if self._book.num_queued >= limits.max_queue:
            told = f"{self._book.num_queued} requests wait already, the most that may (max_queue)"
            return Refusal(ErrorCode.QUEUE_FULL, told, limits.retry_after_seconds)
        ready = list(self._members.ready_workers())
        if self._choose(message, ready) is not None:
            return None
        choices = message.params.num_choices
        largest = max(worker.hello.num_blocks for worker in ready)
        told = (
            f"the prompt of {message.num_prompt_tokens} tokens with {choices} "
            f"{'choice' if choices == 1 else 'choices'} needs "
            f"{self._num_blocks(message)} KV blocks of {self._block_size} tokens; the largest "
            f"worker's pool has {largest} (kv_bytes)"
        )
        return Refusal(ErrorCode.CONTEXT_EXCEEDED, told)

    @property
    def _block_size(self) -> int:
        return next(iter(self._members.workers.values())).hello.block_size

    def _num_blocks(self, message: SubmitRequest) -> int:
        params = message.params
        return num_blocks_needed(
            message.num_prompt_tokens, params.num_choices, params.num_left, self._block_size
        )

    def _choose(self, message: SubmitRequest, workers: Sequence[WorkerRecord]) -> Placement | None:
        if not workers:
            return None
        return choose_sides([worker.view() for worker in workers], self._num_blocks(message))

    def _place(
        self, record: RequestRecord, placement: Placement, cause: str, now: float
    ) -> list[Effect]:
        prefill = self._members.workers[placement.prefill.worker_id, placement.prefill.epoch]
        decode = self._members.workers[placement.decode.worker_id, placement.decode.epoch]
        event = machine.Dispatched(prefill.key, decode.key)
        moved = self._book.step(record.request_id, event, cause, now)
        submission = record.submission
        prefill.assigned_tokens += submission.num_prompt_tokens
        gateway = self._members.gateways[record.gateway].hello
        queued_seconds = max(0.0, now - record.submitted_at)
        place = PlaceRequest(
            request_id=record.request_id,
            gateway_id=gateway.gateway_id,
            tokens_endpoint=gateway.tokens_endpoint,
            params=submission.params,
            num_prompt_tokens=submission.num_prompt_tokens,
            decode=decode.peer if decode is not prefill else None,
            queued_seconds=queued_seconds,
        )
        facts: tuple[Fact, ...] = (
            ("prefill", placement.prefill.worker_id),
            ("decode", placement.decode.worker_id),
            ("num_prompt_tokens", submission.num_prompt_tokens),
            ("num_blocks", record.num_blocks),
            ("queued_seconds", round(queued_seconds, 6)),
            ("num_queued", len(self._book.queued)),
            ("prefill_uncomputed_tokens", placement.prefill.uncomputed_tokens),
            ("decode_used_share", round(placement.decode.used_share, 4)),
            ("decode_has_room", placement.decode.has_room(record.num_blocks)),
            ("reason", "least loaded"),
        )
        return [
            *moved,
            Note("request_placed", cause, record.request_id, facts),
            Send(prefill.key, place, cause, record.payload),
            record.tell_placed(cause),
        ]


def _may_have_work(worker: WorkerRecord) -> bool:
    """Whether placement may see it now: a worker that decodes takes decodes at any time."""
    return worker.peer.role is Role.DECODE or worker.can_take_prompt


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
