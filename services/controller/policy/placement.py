"""Where a request is prefilled and decoded: the least loaded worker that can hold it.

A prefill side is chosen by the fewest prompt tokens that wait to be computed, a decode side by the
smallest share of its pool in use, among those with room where there are any: a decode side that
is full now may have room when the prefill ends, and says so itself when it has not. Both must be
able to pair; a pair that is known to work goes before one that is not known yet.
"""

from collections.abc import Iterable, Sequence

from common.messages.fields import Role
from services.controller.policy.views import Incarnation, Pairing, Placement, WorkerView

__all__ = [
    "Incarnation",
    "Pairing",
    "Placement",
    "WorkerView",
    "choose_decode",
    "choose_sides",
    "num_blocks_needed",
]


def num_blocks_needed(
    num_prompt_tokens: int, num_choices: int, num_left: int, block_size: int
) -> int:
    """Blocks without which no worker can serve a request.

    A request of one token needs its prompt's. Otherwise each choice has a tail of its own after
    the whole blocks of the prompt, with room for its first token.
    """
    if num_left == 1:
        return -(-num_prompt_tokens // block_size)
    return num_prompt_tokens // block_size + num_choices


def choose_sides(workers: Sequence[WorkerView], num_blocks: int) -> Placement | None:
    """Return the best pair, or None when no worker's role, pool or pairing fits."""
    able = [w for w in workers if w.can_hold(num_blocks)]
    prefills = sorted(
        (w for w in able if w.can_prefill),
        key=lambda w: (w.uncomputed_tokens, w.used_share, w.worker_id),
    )
    decodes = _by_room(able, num_blocks)
    for worst in (Pairing.WORKS, Pairing.UNKNOWN):
        for prefill in prefills:
            if prefill.role is Role.COMBINED:
                return Placement(prefill, prefill)
            for decode in decodes:
                if prefill.pairing_with(decode) <= worst:
                    return Placement(prefill, decode)
    return None


def choose_decode(
    workers: Iterable[WorkerView], num_blocks: int, prefill: WorkerView
) -> WorkerView | None:
    """Return the best decode side for a handoff of ``prefill``; None when nobody fits.

    That may be ``prefill`` itself where it is allowed to decode.
    """
    able = [
        worker
        for worker in _by_room(workers, num_blocks)
        if worker.can_hold(num_blocks) and _pairing(prefill, worker) < Pairing.BROKEN
    ]
    return min(able, key=lambda worker: _pairing(prefill, worker), default=None)


def _pairing(prefill: WorkerView, decode: WorkerView) -> Pairing:
    return Pairing.WORKS if prefill.key == decode.key else prefill.pairing_with(decode)


def _by_room(workers: Iterable[WorkerView], num_blocks: int) -> list[WorkerView]:
    """Return the workers that may decode for others, the best first."""
    return sorted(
        (w for w in workers if w.can_decode and w.role is not Role.COMBINED),
        key=lambda w: (not w.has_room(num_blocks), w.used_share, w.worker_id),
    )
