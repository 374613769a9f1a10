"""Where a request is prefilled and decoded: the least loaded worker that can hold it.

A prefill side is chosen by the fewest prompt tokens that wait to be computed, a decode side by the
smallest share of its pool in use, among those with room where there are any: a decode side that
is full now may have room when the prefill ends, and says so itself when it has not.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from common.ids import WorkerId
from common.messages.fields import Role


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as placement sees it; blocks and tokens include what was just assigned to it."""

    worker_id: WorkerId
    role: Role
    uncomputed_tokens: int
    total_blocks: int
    used_blocks: int

    @property
    def used_share(self) -> float:
        """Share of the pool that requests and transfers hold."""
        return self.used_blocks / self.total_blocks if self.total_blocks else 1.0

    @property
    def can_prefill(self) -> bool:
        """Whether its role computes prompts."""
        return self.role in (Role.PREFILL, Role.COMBINED)

    def can_hold(self, num_blocks: int) -> bool:
        """Whether the empty pool would be large enough."""
        return self.total_blocks >= num_blocks

    def has_room(self, num_blocks: int) -> bool:
        """Whether the pool has room now; cached blocks give way."""
        return self.total_blocks - self.used_blocks >= num_blocks


@dataclass(frozen=True, slots=True)
class Placement:
    """The chosen sides; of a combined worker both are the same."""

    prefill: WorkerView
    decode: WorkerView


def num_blocks_needed(
    num_prompt_tokens: int, num_choices: int, max_tokens: int, block_size: int
) -> int:
    """Blocks without which no worker can serve a request.

    A request of one token needs its prompt's. Otherwise each choice has a tail of its own after
    the whole blocks of the prompt, with room for its first token.
    """
    if max_tokens == 1:
        return -(-num_prompt_tokens // block_size)
    return num_prompt_tokens // block_size + num_choices


def choose_sides(workers: Sequence[WorkerView], num_blocks: int) -> Placement | None:
    """Return the best pair, or None when no worker's role or pool fits."""
    decode = choose_decode(workers, num_blocks)
    fitting = [
        worker
        for worker in workers
        if worker.can_prefill
        and worker.can_hold(num_blocks)
        and (worker.role is Role.COMBINED or decode is not None)
    ]
    if not fitting:
        return None
    prefill = min(fitting, key=lambda w: (w.uncomputed_tokens, w.used_share, w.worker_id))
    if prefill.role is Role.COMBINED or decode is None:
        return Placement(prefill, prefill)
    return Placement(prefill, decode)


def choose_decode(workers: Iterable[WorkerView], num_blocks: int) -> WorkerView | None:
    """Return the best decode side for a handoff, or None when no pool would ever hold it."""
    fitting = [w for w in workers if w.role is Role.DECODE and w.can_hold(num_blocks)]
    if not fitting:
        return None
    return min(fitting, key=lambda w: (not w.has_room(num_blocks), w.used_share, w.worker_id))
