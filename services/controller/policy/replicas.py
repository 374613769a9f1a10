"""Which hot prefixes are copied to which workers before a request needs them there.

Where many prompts begin alike, the worker that has computed the beginning would get them all, or
the others would copy or compute it while requests wait. So a hot prefix (``prefix_heat``) is copied
ahead of need until ``hot_replicas`` workers that compute prompts hold it. Copies never compete with
what a worker is asked for:

* a target has at most one step's prompts to compute, is not about to have a full pool, and gives
  only free or cached blocks away; the pool's own order of eviction takes the coldest of those;
* a worker takes part in one copy at a time, as the target or as the source;
* a prefix that was copied to a worker is not copied there again for a while, whatever became of it,
  so that a pool which is too small for all that is hot is not filled in circles.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from common.messages.fields import Role
from services.controller.policy.estimates import link_rate
from services.controller.policy.prefix_heat import MIN_HOT_BLOCKS, HotPrefix
from services.controller.policy.views import Incarnation, Pairing, WorkerView

MAX_USED_SHARE = 0.7
"""Share of the target's pool that requests and transfers may hold with the copy."""
MAX_PREFIX_SHARE = 0.25
"""Most of a pool that one prefix may fill."""

Rest = tuple[bytes, Incarnation]
"""A prefix, by the hash that names it, that is not copied to this worker for now."""


class CopyUnderWay(NamedTuple):
    """A copy that was ordered and has not ended."""

    digest: bytes
    source: Incarnation
    target: Incarnation


@dataclass(frozen=True, slots=True)
class Replica:
    """Let ``source`` copy the first ``num_blocks`` blocks of ``prefix`` to ``target``.

    ``num_holders`` workers that compute prompts have them. ``used_share`` and ``uncomputed_tokens``
    are the target's.
    """

    prefix: HotPrefix
    source: Incarnation
    target: Incarnation
    num_blocks: int
    num_missing: int
    num_holders: int
    used_share: float
    uncomputed_tokens: int

    @property
    def digest(self) -> bytes:
        """The hash that names the prefix, however much of it there is to copy at a time."""
        return self.prefix.digest


def plan_replicas(
    hot: Sequence[tuple[HotPrefix, Mapping[Incarnation, int]]],
    workers: Sequence[WorkerView],
    under_way: Collection[CopyUnderWay],
    resting: Collection[Rest],
    hot_replicas: int,
) -> list[Replica]:
    """Return the copies to order now: of each hot prefix at most one, in the order of ``hot``.

    With each prefix comes how many of its leading blocks each worker has; absent is none.
    """
    busy = {key for copy in under_way for key in (copy.source, copy.target)}
    replicas: list[Replica] = []
    for prefix, hits in hot:
        replica = _replica(prefix, hits, workers, busy, under_way, resting, hot_replicas)
        if replica is not None:
            replicas.append(replica)
            busy |= {replica.source, replica.target}
    return replicas


def _replica(
    prefix: HotPrefix,
    hits: Mapping[Incarnation, int],
    workers: Sequence[WorkerView],
    busy: Collection[Incarnation],
    under_way: Collection[CopyUnderWay],
    resting: Collection[Rest],
    hot_replicas: int,
) -> Replica | None:
    num_blocks = max((hits.get(worker.key, 0) for worker in workers), default=0)
    if num_blocks < MIN_HOT_BLOCKS:
        return None
    digest = prefix.digest
    needing = [worker for worker in workers if worker.role is not Role.DECODE]
    num_holders = sum(hits.get(worker.key, 0) >= num_blocks for worker in needing)
    num_coming = sum(copy.digest == digest for copy in under_way)
    if num_holders + num_coming >= hot_replicas:
        return None
    targets = [
        worker
        for worker in needing
        if worker.key not in busy
        and (digest, worker.key) not in resting
        and _has_time_and_room(worker, num_blocks, num_blocks - hits.get(worker.key, 0))
    ]
    targets.sort(key=lambda w: (w.uncomputed_tokens, w.used_share, w.worker_id))
    holders = [w for w in workers if w.key not in busy and hits.get(w.key, 0) >= num_blocks]
    for target in targets:
        source = _source(holders, target)
        if source is not None:
            return Replica(
                prefix,
                source.key,
                target.key,
                num_blocks,
                num_blocks - hits.get(target.key, 0),
                num_holders,
                target.used_share,
                target.uncomputed_tokens,
            )
    return None


def _has_time_and_room(target: WorkerView, num_blocks: int, num_missing: int) -> bool:
    """Whether a copy is worth it, and disturbs nothing there."""
    is_idle = target.has_heartbeat and target.can_take_prompt and not target.is_draining
    is_idle = is_idle and target.uncomputed_tokens <= target.max_num_batched_tokens
    has_room = target.used_blocks + num_missing <= MAX_USED_SHARE * target.total_blocks
    has_room = has_room and num_blocks <= MAX_PREFIX_SHARE * target.total_blocks
    return is_idle and has_room and num_missing >= MIN_HOT_BLOCKS


def _source(holders: Sequence[WorkerView], target: WorkerView) -> WorkerView | None:
    """Return who can write to the target: over a pair that works, then the fastest link."""
    able = [
        holder
        for holder in holders
        if holder.pairing_with(target) is not Pairing.BROKEN
        and (holder.role is Role.COMBINED) == (target.role is Role.COMBINED)
    ]
    return min(
        able,
        key=lambda w: (w.pairing_with(target), -link_rate(w, target), w.worker_id),
        default=None,
    )
