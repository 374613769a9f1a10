"""What a request needs, and where its decode goes when the first choice refused it."""

from collections.abc import Iterable

from common.messages.fields import Role
from services.controller.policy.views import Pairing, WorkerView


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
