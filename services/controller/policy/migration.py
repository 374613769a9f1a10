"""Which running decodes move to another worker: from full pools, and from workers that drain.

Above ``PRESSURE`` of its pool in use a worker gives decodes away until it would be at ``RELIEVED``
(papers 1.6.4: migration above 90 % memory pressure); a draining one gives all away. The largest go
first: the fewest moves. A decode goes where most room is left, over a pair that works before one
that is not known yet, and never to a worker that would come under pressure itself.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from common.ids import RequestId
from common.messages.fields import Role
from services.controller.policy.views import Incarnation, Pairing, WorkerView

PRESSURE = 0.9
RELIEVED = 0.85
MAX_TARGET_SHARE = 0.8
MAX_MOVING = 4
"""Most migrations of the cluster at once: each takes a link and a frozen sequence."""


@dataclass(frozen=True, slots=True)
class DecodeView:
    """A running decode: where it is, and the blocks that it needs at the other end."""

    request_id: RequestId
    worker: Incarnation
    num_blocks: int
    is_movable: bool = True
    """Whether it is one live choice that no migration failed for lately."""
    num_tokens: int = 0
    """Tokens that it attends to."""
    num_left: int = 0
    """Tokens that it may draw yet."""
    has_moved: bool = False
    """Whether it came from another worker lately."""


@dataclass(frozen=True, slots=True)
class Migration:
    """Move this decode to ``target``."""

    request_id: RequestId
    source: Incarnation
    target: Incarnation
    num_blocks: int
    reason: str


def is_giving_away(worker: WorkerView) -> bool:
    """Whether a worker's decodes are to go elsewhere, however long their steps are."""
    return worker.is_draining or worker.used_share > PRESSURE


def plan_migrations(
    workers: Sequence[WorkerView], decodes: Sequence[DecodeView], num_moving: int = 0
) -> list[Migration]:
    """Return the moves to begin now, while ``num_moving`` are under way."""
    here: defaultdict[Incarnation, list[DecodeView]] = defaultdict(list)
    for decode in decodes:
        if decode.is_movable:
            here[decode.worker].append(decode)
    used = {worker.key: worker.used_blocks for worker in workers}
    moves: list[Migration] = []
    for source in sorted(workers, key=lambda w: (not w.is_draining, -w.used_share, w.worker_id)):
        if not is_giving_away(source):
            continue
        reason = "drain" if source.is_draining else f"pool at {source.used_share:.0%}"
        for decode in sorted(here[source.key], key=lambda d: (-d.num_blocks, d.request_id)):
            is_relieved = used[source.key] <= RELIEVED * source.total_blocks
            if num_moving + len(moves) >= MAX_MOVING or (is_relieved and not source.is_draining):
                break
            target = _target(workers, used, source, decode.num_blocks)
            if target is None:
                continue
            used[source.key] -= decode.num_blocks
            used[target.key] += decode.num_blocks
            moves.append(
                Migration(decode.request_id, source.key, target.key, decode.num_blocks, reason)
            )
    return moves


def _target(
    workers: Sequence[WorkerView], used: dict[Incarnation, int], source: WorkerView, num_blocks: int
) -> WorkerView | None:
    share = PRESSURE if source.is_draining else MAX_TARGET_SHARE
    able = [
        worker
        for worker in workers
        if worker.key != source.key
        and takes_decodes_of(worker, source)
        and used[worker.key] + num_blocks <= share * worker.total_blocks
        and source.pairing_with(worker) is not Pairing.BROKEN
    ]
    return min(
        able,
        key=lambda w: (source.pairing_with(w), used[w.key] - w.total_blocks, w.worker_id),
        default=None,
    )


def takes_decodes_of(worker: WorkerView, source: WorkerView) -> bool:
    """Whether a decode may go there; combined workers exchange decodes among themselves."""
    is_able = worker.can_decode and worker.has_heartbeat and not worker.is_draining
    return is_able and (worker.role is Role.COMBINED) == (source.role is Role.COMBINED)
