"""Which worker has which prefix cached: the controller's index and how it is kept whole."""

import numpy as np

from common.errors import RemoteProtocolError
from common.ids import WorkerId
from common.kv.prefix_cache import PrefixCache
from common.messages.control import KVIndexEvents, KVIndexRequested
from services.controller.effects import Effect, Fact, Note, PeerKey, Send
from services.controller.members import Members, WorkerRecord
from services.controller.policy.prefix_index import PrefixIndex
from services.controller.policy.views import Incarnation

ASK_AGAIN_SECONDS = 1.0


class Prefixes:
    """Feeds the index from the workers' events, and looks prompts up in it.

    Where no policy reads prefixes (``is_used``) nothing is kept.
    """

    def __init__(self, members: Members, *, is_used: bool) -> None:
        self.index = PrefixIndex()
        self._members = members
        self.is_used = is_used
        self._chains: dict[tuple[int, str], PrefixCache] = {}
        self._asked_at: dict[PeerKey, float] = {}

    def take(
        self,
        worker: WorkerRecord,
        message: KVIndexEvents,
        payload: tuple[bytes, ...],
        cause: str,
        now: float,
    ) -> list[Effect]:
        """Take a worker's batch of changes in, or ask for everything where one is missing.

        Raises RemoteProtocolError for frames that are no hashes.
        """
        if len(payload) != 2:
            raise RemoteProtocolError(f"{worker.key[0]}: index events in {len(payload)} frames")
        if not self.is_used:
            return []
        added, removed = payload
        is_taken = self.index.apply(
            _incarnation(worker.key),
            message.sequence,
            added,
            removed,
            is_snapshot=message.is_snapshot,
        )
        if not is_taken:
            return self._ask(worker, message.sequence, cause, now)
        if message.is_snapshot:
            self._asked_at.pop(worker.key, None)
        return []

    def check(self, worker: WorkerRecord, sequence: int, cause: str, now: float) -> list[Effect]:
        """Find a gap by the number of the last batch that a heartbeat says was sent."""
        if not self.is_used or sequence <= self.index.sequence_of(_incarnation(worker.key)):
            return []
        return self._ask(worker, sequence, cause, now)

    def drop(self, key: PeerKey) -> None:
        """Forget a worker that is gone."""
        self.index.drop(_incarnation(key))
        self._asked_at.pop(key, None)

    def hashes(self, prompt: bytes, *, is_needed: bool = False) -> tuple[bytes, ...]:
        """Return the hash chain of a prompt's whole blocks (ids as int32, little-endian).

        Empty where no policy reads prefixes, unless ``is_needed``.
        """
        if not (self.is_used or is_needed) or not self._members.workers:
            return ()
        hello = next(iter(self._members.workers.values())).hello
        salt = (hello.block_size, hello.model_fingerprint)
        if salt not in self._chains:
            self._chains = {salt: PrefixCache(*salt)}
        return tuple(self._chains[salt].chain(None, np.frombuffer(prompt, dtype="<i4")))

    def _ask(self, worker: WorkerRecord, sequence: int, cause: str, now: float) -> list[Effect]:
        if now - self._asked_at.get(worker.key, -ASK_AGAIN_SECONDS) < ASK_AGAIN_SECONDS:
            return []
        self._asked_at[worker.key] = now
        facts: tuple[Fact, ...] = (
            ("worker", worker.key[0]),
            ("known", self.index.sequence_of(_incarnation(worker.key))),
            ("sequence", sequence),
        )
        return [
            Note("kv_index_gap", cause, facts=facts),
            Send(worker.key, KVIndexRequested(), cause),
        ]


def _incarnation(key: PeerKey) -> Incarnation:
    return (WorkerId(key[0]), key[1])
