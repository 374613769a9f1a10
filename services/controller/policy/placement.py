"""Where a request is prefilled and decoded: the least loaded worker that can hold it.

A prefill side is chosen by the fewest prompt tokens that wait to be computed, a decode side by the
smallest share of its pool in use, among those with room where there are any: a decode side that
is full now may have room when the prefill ends, and says so itself when it has not. Both must be
able to pair; a pair that is known to work goes before one that is not known yet.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from common.ids import Epoch, WorkerId
from common.messages.fields import Role


class Pairing(IntEnum):
    """Whether a prefill worker can hand over to a decode worker; the best is the least."""

    WORKS = 0
    UNKNOWN = 1
    BROKEN = 2


Incarnation = tuple[WorkerId, Epoch]


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as placement sees it; blocks and tokens include what was just assigned to it.

    ``pairings`` are a prefill worker's with decode workers; those that are not in it are unknown.
    """

    worker_id: WorkerId
    epoch: Epoch
    role: Role
    uncomputed_tokens: int
    total_blocks: int
    used_blocks: int
    pairings: Mapping[Incarnation, Pairing] = field(default_factory=dict)

    def pairing_with(self, decode: "WorkerView") -> Pairing:
        """How the pair with a decode worker stands."""
        return self.pairings.get((decode.worker_id, decode.epoch), Pairing.UNKNOWN)

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
    """Return the best decode side for a handoff of ``prefill``; None when nobody fits."""
    decodes = [w for w in workers if w.can_hold(num_blocks)]
    able = [w for w in _by_room(decodes, num_blocks) if prefill.pairing_with(w) < Pairing.BROKEN]
    return min(able, key=prefill.pairing_with, default=None)


def _by_room(workers: Iterable[WorkerView], num_blocks: int) -> list[WorkerView]:
    """Return the decode workers, the best first."""
    return sorted(
        (w for w in workers if w.role is Role.DECODE),
        key=lambda w: (not w.has_room(num_blocks), w.used_share, w.worker_id),
    )
