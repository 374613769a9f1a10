"""From the queue to the workers: a request is bound to its two sides as late as may be."""

from dataclasses import replace

from common.errors import ErrorCode
from common.messages.control import (
    CopyPrefix,
    PlaceRequest,
    PrefillRefused,
    RequestQueued,
    SubmitRequest,
)
from services.controller import request_machine as machine
from services.controller.effects import Effect, Fact, Note, PeerKey, Send
from services.controller.elasticity import Elasticity
from services.controller.limits import ControllerLimits
from services.controller.look_ups import LookUps, is_worth_asking
from services.controller.members import GatewayRecord, Members, WorkerRecord
from services.controller.policy.loading import Loading, Path, choose_path
from services.controller.policy.placement import num_blocks_needed
from services.controller.policy.policies import Policy
from services.controller.policy.views import Placement, RequestView
from services.controller.prefixes import Prefixes
from services.controller.refusal import Refusal, refuse
from services.controller.request_book import RequestBook
from services.controller.request_machine import RequestPhase
from services.controller.request_record import RequestRecord

MAX_PLACEMENTS = 4
"""Prefill workers that are tried for one request."""


class Dispatcher:
    """Makes the records in ``book`` and lets ``policy`` choose their sides among ``members``.

    Requests wait in the controller, first come first served, while every worker that could compute
    their prompts has enough to do. So one worker's long prompts delay nothing that another worker
    could have begun, and a worker that joins, or takes another role, finds work. They wait, too, in
    the same order, for what the store has of them, where a worker can tell.
    """

    def __init__(
        self,
        members: Members,
        book: RequestBook,
        limits: ControllerLimits,
        policy: Policy,
        prefixes: Prefixes,
        look_ups: LookUps,
        elasticity: Elasticity,
    ) -> None:
        self._members = members
        self._book = book
        self._limits = limits
        self._policy = policy
        self._prefixes = prefixes
        self._look_ups = look_ups
        self._elasticity = elasticity

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
        view, asked = self._view(message), self._look_ups.whom_to_ask(now)
        hashes = self._prefixes.hashes(payload[0], is_needed=asked is not None)
        request = self._with_hits(view, hashes)
        cluster = self._members.view()
        effects: list[Effect] = []
        if self._elasticity.helps_in_quiet and cluster.can_serve(request):
            effects = self._elasticity.end_quiet(cause, now)
            cluster = self._members.view()
        if asked is not None and not is_worth_asking(request):
            asked = None
        placement = None
        if asked is None and not self._book.queued:
            placement = self._policy.choose(cluster, request)
        if placement is None and not cluster.can_serve(request):
            return refuse(gateway.key, message.request_id, self._unfit(view), cause)
        record = RequestRecord(message, gateway.key, view, payload, now)
        record.hashes = hashes
        self._book.add(record)
        if placement is not None:
            return [*effects, *self._place(record, request, placement, cause, now)]
        reason = "every worker that could have it has enough to compute"
        begun: list[Effect] = []
        if asked is not None:
            reason = f"{asked[0]} is asked what the store has of it"
            begun = self._look_ups.begin(record, request, asked, cause, now)
        facts: tuple[Fact, ...] = (
            ("num_ahead", len(self._book.queued) - 1),
            ("num_prompt_tokens", message.num_prompt_tokens),
            ("reason", reason),
        )
        queued = RequestQueued(request_id=record.request_id)
        return [
            *effects,
            Note("request_queued", cause, record.request_id, facts),
            Send(gateway.key, queued, cause),
            *begun,
        ]

    def dispatch_queued(self, cause: str, now: float) -> list[Effect]:
        """Place queued requests, in their order, while there are workers that are to have them.

        Nobody overtakes the oldest that could be served at all: its worker has room soon, or what
        is stored of it is known soon. One that no ready worker could serve lets the others past.
        """
        effects: list[Effect] = []
        for request_id in list(self._book.queued):
            record = self._book.requests[request_id]
            if record.phase is RequestPhase.LOOKING_UP:
                break
            request = self._with_hits(record.view, record.hashes, record.num_stored_blocks)
            placement = self._policy.choose(self._members.view(), request)
            if placement is not None:
                effects += self._place(record, request, placement, cause, now)
            elif self._members.view().can_serve(request):
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

    def prefill_refused(
        self, worker: WorkerRecord, message: PrefillRefused, cause: str, now: float
    ) -> list[Effect]:
        """Take a request back that a worker, which was ready when it was chosen, has not begun.

        Returns no effects when nobody else can take it: then the request has failed.
        """
        record = self._book.requests.get(message.request_id)
        if record is None or not _can_be_placed_again(record, worker.key):
            return []
        worker.is_draining = True  # until its next heartbeat tells
        if not self._members.view().can_serve(record.view):
            return []
        facts: tuple[Fact, ...] = (("prefill", worker.key[0]), ("reason", message.message))
        note = Note("placement_refused", cause, record.request_id, facts)
        return [note, *self._book.step(record.request_id, machine.Requeued(), cause, now)]

    def _check(self, message: SubmitRequest, payload: tuple[bytes, ...]) -> Refusal | None:
        if message.request_id in self._book.requests:
            return Refusal(ErrorCode.BAD_REQUEST, "this request id is in use")
        if len(payload) != 1 or len(payload[0]) != 4 * message.num_prompt_tokens:
            told = "the prompt's frame and num_prompt_tokens differ"
            return Refusal(ErrorCode.BAD_REQUEST, told)
        limits = self._limits
        if missing := self._members.missing_role():
            return Refusal(ErrorCode.NO_WORKER, missing, limits.retry_after_seconds)
        if self._book.num_queued >= limits.max_queue:
            told = f"{self._book.num_queued} requests wait already, the most that may (max_queue)"
            return Refusal(ErrorCode.QUEUE_FULL, told, limits.retry_after_seconds)
        return None

    def _unfit(self, view: RequestView) -> Refusal:
        """Say that no worker's pool could hold the request."""
        largest = max(w.hello.num_blocks for w in self._members.ready_workers())
        told = (
            f"the prompt of {view.num_prompt_tokens} tokens with {view.num_choices} "
            f"{'choice' if view.num_choices == 1 else 'choices'} needs "
            f"{view.num_blocks} KV blocks of {view.block_size} tokens; the largest "
            f"worker's pool has {largest} (kv_bytes)"
        )
        return Refusal(ErrorCode.CONTEXT_EXCEEDED, told)

    def _view(self, message: SubmitRequest) -> RequestView:
        """Return a request as policies see it; there is a worker, so there is a block size."""
        block_size = next(iter(self._members.workers.values())).hello.block_size
        params = message.params
        return RequestView(
            num_prompt_tokens=message.num_prompt_tokens,
            num_blocks=num_blocks_needed(
                message.num_prompt_tokens, params.num_choices, params.num_left, block_size
            ),
            block_size=block_size,
            num_choices=params.num_choices,
            num_left=params.num_left,
        )

    def _with_hits(
        self, view: RequestView, hashes: tuple[bytes, ...], num_stored_blocks: int = 0
    ) -> RequestView:
        """Return the request with what is cached of it at this moment, and what is stored."""
        if not hashes:
            return view
        hits = self._prefixes.index.hits(hashes)
        return replace(view, hits=hits, num_stored_blocks=num_stored_blocks)

    def _place(
        self,
        record: RequestRecord,
        request: RequestView,
        placement: Placement,
        cause: str,
        now: float,
    ) -> list[Effect]:
        prefill = self._members.workers[placement.prefill.key]
        decode = self._members.workers[placement.decode.key]
        holder = placement.copy_from and self._members.view().get(placement.copy_from)
        limits = self._limits
        loading = choose_path(
            placement, request, limits.store_read, holder or None, limits.store_load
        )
        source = _prefix_source(placement, loading)
        event = machine.Dispatched(prefill.key, decode.key, source)
        moved = self._book.step(record.request_id, event, cause, now)
        submission = record.submission
        num_hits = max(request.hits.get(placement.prefill.key, 0), loading.num_blocks)
        is_reader = loading.path is Path.PREFILL_READ
        prefill.assign(request.num_uncached(num_hits), loading.num_read_tokens if is_reader else 0)
        gateway = self._members.gateways[record.gateway].hello
        num_tokens = loading.num_blocks * request.block_size
        place = PlaceRequest(
            request_id=record.request_id,
            gateway_id=gateway.gateway_id,
            tokens_endpoint=gateway.tokens_endpoint,
            params=submission.params,
            num_prompt_tokens=submission.num_prompt_tokens,
            decode=decode.peer if decode is not prefill else None,
            queued_seconds=max(0.0, now - record.submitted_at),
            num_prefix_tokens=num_tokens if source else 0,
            num_stored_tokens=num_tokens if loading.path is Path.PREFILL_READ else 0,
        )
        effects: list[Effect] = [
            *moved,
            self._note_of(record, place, placement, loading, cause),
            Send(prefill.key, place, cause, record.payload),
        ]
        if source is not None:
            copy = CopyPrefix(
                request_id=record.request_id,
                target=prefill.peer,
                num_tokens=num_tokens,
                num_stored_tokens=num_tokens if loading.path is Path.DECODE_READ else 0,
            )
            holding = self._members.workers[source]
            holding.assign(0, loading.num_read_tokens if loading.path is Path.DECODE_READ else 0)
            prefix = record.payload[0][: 4 * num_tokens]
            effects.append(Send(source, copy, cause, (prefix,)))
        return [*effects, record.tell_placed(cause)]

    def _note_of(
        self,
        record: RequestRecord,
        place: PlaceRequest,
        placement: Placement,
        loading: Loading,
        cause: str,
    ) -> Note:
        """Return the one line of this decision, with all that it was made of."""
        facts: tuple[Fact, ...] = (
            ("prefill", placement.prefill.worker_id),
            ("decode", placement.decode.worker_id),
            ("policy", self._policy.name),
            ("reason", placement.reason),
            ("num_prompt_tokens", place.num_prompt_tokens),
            ("num_blocks", record.num_blocks),
            ("queued_seconds", round(place.queued_seconds, 6)),
            ("num_queued", len(self._book.queued)),
            ("estimate_seconds", placement.estimate_seconds),
            ("path", loading.path),
            ("copy_from", record.prefix_from and record.prefix_from[0]),
            ("num_prefix_tokens", place.num_prefix_tokens),
        )
        if loading.inputs:
            stored: tuple[Fact, ...] = (
                ("path_reason", loading.reason),
                ("num_read_tokens", loading.num_read_tokens),
                *loading.inputs,
            )
            facts = (*facts, *stored)
        return Note("request_placed", cause, record.request_id, (*facts, *placement.inputs))


def _prefix_source(placement: Placement, loading: Loading) -> PeerKey | None:
    """Return who is to write the prompt's first blocks to the prefill side."""
    match loading.path:
        case Path.COPY:
            return placement.copy_from
        case Path.DECODE_READ:
            return placement.decode.key
        case Path.PREFILL_READ | Path.COMPUTE:
            return None


def _can_be_placed_again(record: RequestRecord, sender: PeerKey) -> bool:
    """Whether the request's prefill side may have refused it, and another one may be tried.

    The prompt is kept as long as nothing tells that it was begun.
    """
    return (
        record.phase is RequestPhase.PLACED
        and record.prefill == sender
        and bool(record.payload)
        and record.num_placements < MAX_PLACEMENTS
    )
