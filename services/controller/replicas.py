"""Hot prefixes that are copied to other workers ahead of need: counts, orders, and their ends.

A copy is an ordinary ``CopyPrefix`` whose id is no request's, so that nobody waits for it. It has
ended well once the target's index events tell of its blocks, and otherwise when its source says
that nothing comes, either side is gone, or too much time has passed. Whatever becomes of it, no
request is touched.
"""

from dataclasses import dataclass

from common.ids import RequestId
from common.messages.control import CopyPrefix, PrefixNotCopied
from services.controller.effects import Effect, Fact, Note, PeerKey, Send
from services.controller.members import Members
from services.controller.policy.prefix_heat import PrefixHeat
from services.controller.policy.replicas import CopyUnderWay, Replica, Rest, plan_replicas
from services.controller.prefixes import Prefixes
from services.controller.request_record import RequestRecord

MAX_COPY_SECONDS = 30.0
"""After that nothing will tell of a copy any more: leases have ended it long before."""
COOL_DOWN_SECONDS = 30.0
"""So long the same prefix is not copied to the same worker again."""


@dataclass(frozen=True, slots=True)
class _Copy:
    replica: Replica
    ordered_at: float

    @property
    def under_way(self) -> CopyUnderWay:
        return CopyUnderWay(self.replica.digest, self.replica.source, self.replica.target)


class Replicas:
    """Orders copies once a round, while ``hot_replicas`` is not 0 and prefixes are indexed."""

    def __init__(self, members: Members, prefixes: Prefixes, hot_replicas: int) -> None:
        self._members = members
        self._prefixes = prefixes
        self._hot_replicas = hot_replicas
        self._heat = PrefixHeat()
        self._copies: dict[RequestId, _Copy] = {}
        self._rest_until: dict[Rest, float] = {}
        self._num_ordered = 0

    def submitted(self, record: RequestRecord | None, now: float) -> None:
        """Count the prefixes of a request that was just taken in; None was refused."""
        is_counted = self._hot_replicas and self._prefixes.is_used
        if not is_counted or record is None or not record.payload:
            return
        view = record.view
        hashes = record.hashes[: view.max_hit_blocks]
        self._heat.use(hashes, record.payload[0], view.block_size, now)

    def not_copied(self, sender: PeerKey, message: PrefixNotCopied, cause: str) -> list[Effect]:
        """Take a source's word that nothing will come; no effects where it was no copy of ours."""
        copy = self._copies.get(message.request_id)
        if copy is None or copy.replica.source != sender:
            return []
        return [self._end(message.request_id, message.message, cause)]

    def take_round(self, cause: str, now: float) -> list[Effect]:
        """End the copies that are over, and order those that are due."""
        effects: list[Effect] = []
        for request_id, copy in list(self._copies.items()):
            effects += self._look_at(request_id, copy, cause, now)
        self._rest_until = {rest: at for rest, at in self._rest_until.items() if now < at}
        hot = self._heat.hot(now)
        if not hot:
            return effects
        replicas = plan_replicas(
            [(prefix, self._prefixes.index.hits(prefix.hashes)) for prefix in hot],
            list(self._members.view()),
            [copy.under_way for copy in self._copies.values()],
            self._rest_until,
            self._hot_replicas,
        )
        for replica in replicas:
            effects += self._order(replica, cause, now)
        return effects

    def validate(self) -> None:
        """Check that no worker is in two copies. Raises AssertionError: a bug of ours."""
        self._heat.validate()
        sides = [s for c in self._copies.values() for s in (c.replica.source, c.replica.target)]
        assert len(sides) == len(set(sides)), sides

    def _order(self, replica: Replica, cause: str, now: float) -> list[Effect]:
        self._num_ordered += 1
        request_id = RequestId(f"replica-{self._num_ordered}")
        self._copies[request_id] = _Copy(replica, now)
        self._rest_until[replica.digest, replica.target] = now + COOL_DOWN_SECONDS
        source = self._members.workers[replica.source]
        target = self._members.workers[replica.target]
        source.assign(0, 0)
        num_tokens = replica.num_blocks * target.hello.block_size
        order = CopyPrefix(request_id=request_id, target=target.peer, num_tokens=num_tokens)
        told = f"{replica.num_holders} of {self._hot_replicas} workers hold a prefix in much use"
        facts: tuple[Fact, ...] = (
            *_sides(replica),
            ("num_tokens", num_tokens),
            ("num_missing_blocks", replica.num_missing),
            ("num_uses", round(replica.prefix.num_uses, 2)),
            ("num_holders", replica.num_holders),
            ("hot_replicas", self._hot_replicas),
            ("used_share", round(replica.used_share, 4)),
            ("uncomputed_tokens", replica.uncomputed_tokens),
            ("reason", told),
        )
        return [
            Note("replica_ordered", cause, request_id, facts),
            Send(source.key, order, cause, (replica.prefix.tokens[: 4 * num_tokens],)),
        ]

    def _look_at(self, request_id: RequestId, copy: _Copy, cause: str, now: float) -> list[Effect]:
        replica = copy.replica
        for key in (replica.source, replica.target):
            if key not in self._members.workers:
                return [self._end(request_id, f"{key[0]} is gone", cause)]
        hits = self._prefixes.index.hits(replica.prefix.hashes[: replica.num_blocks])
        has_now = hits.get(replica.target, 0)
        had_before = replica.num_blocks - replica.num_missing
        # A source that evicted some of it meanwhile sends the rest.
        if has_now > had_before and has_now >= min(replica.num_blocks, hits.get(replica.source, 0)):
            del self._copies[request_id]
            seconds = round(now - copy.ordered_at, 3)
            facts = (*_sides(replica), ("num_blocks", has_now), ("seconds", seconds))
            return [Note("replica_held", cause, request_id, facts)]
        if now - copy.ordered_at > MAX_COPY_SECONDS:
            return [self._end(request_id, f"nothing came in {MAX_COPY_SECONDS:g} s", cause)]
        return []

    def _end(self, request_id: RequestId, reason: str, cause: str) -> Note:
        replica = self._copies.pop(request_id).replica
        facts = (*_sides(replica), ("reason", reason))
        return Note("replica_failed", cause, request_id, facts)


def _sides(replica: Replica) -> tuple[Fact, ...]:
    return (("source", replica.source[0]), ("target", replica.target[0]))
