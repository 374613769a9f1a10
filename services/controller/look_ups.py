"""Asking workers how much of a prompt the store has, before the prompt is placed."""

from common.errors import RemoteProtocolError
from common.ids import RequestId
from common.messages.control import LookUpPrefix, PrefixFound
from services.controller import request_machine as machine
from services.controller.effects import Effect, Fact, Note, PeerKey, Send
from services.controller.members import Members
from services.controller.policy.views import RequestView
from services.controller.request_book import RequestBook, ignored
from services.controller.request_machine import RequestPhase
from services.controller.request_record import RequestRecord

LOOK_UP_SECONDS = 0.25
"""How long an answer is waited for; then nothing is taken to be stored."""
REST_SECONDS = 2.0
"""A worker whose answer was late is not asked for so long, unless it answers after all."""
MIN_BLOCKS = 2
"""Blocks of a prompt that must be worth loading, for the store to be asked."""


class LookUps:
    """Takes the records in ``book`` through LOOKING_UP. Workers with a store are asked in turn."""

    def __init__(self, members: Members, book: RequestBook) -> None:
        self._members = members
        self._book = book
        self._keepers: tuple[int, list[PeerKey]] = (-1, [])
        self._turn = 0
        self._open: dict[RequestId, None] = {}
        self._late_at: dict[PeerKey, float] = {}

    def whom_to_ask(self, now: float) -> PeerKey | None:
        """Return the ready worker with a store whose turn it is, if there is one."""
        keepers = self._ready_keepers()
        for number in range(len(keepers)):
            key = keepers[(self._turn + number) % len(keepers)]
            if key not in self._late_at or now - self._late_at[key] >= REST_SECONDS:
                return key
        return None

    def begin(
        self,
        record: RequestRecord,
        request: RequestView,
        asked: PeerKey,
        cause: str,
        now: float,
    ) -> list[Effect]:
        """Ask for a record whose look-up ``is_worth_asking``."""
        self._turn = self._ready_keepers().index(asked) + 1
        self._open.pop(record.request_id, None)  # an id may come again: it stands last then
        self._open[record.request_id] = None
        chain = b"".join(record.hashes[: request.max_hit_blocks])
        look_up = LookUpPrefix(request_id=record.request_id)
        return [
            *self._book.step(record.request_id, machine.LookUpStarted(asked), cause, now),
            Send(asked, look_up, cause, (chain,)),
        ]

    def found(self, sender: PeerKey, message: PrefixFound, cause: str, now: float) -> list[Effect]:
        """Take an answer in; a late one is ignored.

        Raises RemoteProtocolError for more blocks than the prompt has.
        """
        self._late_at.pop(sender, None)
        record = self._book.requests.get(message.request_id)
        if record is None or record.phase is not RequestPhase.LOOKING_UP:
            answered = machine.LookUpAnswered(0)
            return self._book.step(message.request_id, answered, cause, now)
        if record.asked != sender:
            return [ignored(message.request_id, cause, "another worker was asked")]
        if message.num_blocks > record.view.num_prompt_blocks:
            told = f"{sender[0]} found {message.num_blocks} blocks of a prompt that has fewer"
            raise RemoteProtocolError(told)
        num_blocks = min(message.num_blocks, record.view.max_hit_blocks)
        return [
            self._note(record, num_blocks, "the worker that was asked has answered", cause, now),
            *self._book.step(record.request_id, machine.LookUpAnswered(num_blocks), cause, now),
        ]

    def end_late(self, cause: str, now: float) -> list[Effect]:
        """Let the requests go on whose answers have not come in time."""
        effects: list[Effect] = []
        for request_id in list(self._open):
            record = self._book.requests.get(request_id)
            if record is not None and record.phase is RequestPhase.LOOKING_UP:
                if now - record.asked_at < LOOK_UP_SECONDS:
                    break  # the others were asked later
                if record.asked is not None:
                    self._late_at[record.asked] = now
                told = f"no answer within {LOOK_UP_SECONDS:g} s"
                effects.append(self._note(record, 0, told, cause, now))
                effects += self._book.step(request_id, machine.LookUpLost(), cause, now)
            del self._open[request_id]
        return effects

    def _ready_keepers(self) -> list[PeerKey]:
        standing = self._members.standing()
        if self._keepers[0] != standing:
            keys = [w.key for w in self._members.ready_workers() if w.hello.has_store]
            self._keepers = (standing, list[PeerKey](keys))
            self._late_at = {key: at for key, at in self._late_at.items() if key in keys}
        return self._keepers[1]

    def _note(
        self, record: RequestRecord, num_blocks: int, reason: str, cause: str, now: float
    ) -> Note:
        facts: tuple[Fact, ...] = (
            ("worker", record.asked and record.asked[0]),
            ("num_stored_blocks", num_blocks),
            ("num_blocks", record.view.max_hit_blocks),
            ("seconds", round(now - record.asked_at, 6)),
            ("reason", reason),
        )
        return Note("store_looked_up", cause, record.request_id, facts)


def is_worth_asking(request: RequestView) -> bool:
    """Whether the store could have blocks that no worker has cached, and enough of them."""
    most_hits = max(request.hits.values(), default=0)
    return request.max_hit_blocks >= MIN_BLOCKS and most_hits < request.max_hit_blocks
