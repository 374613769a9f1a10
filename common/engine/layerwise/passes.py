"""Which rows of a step are computed together when the device holds few blocks. Pure.

A pass holds the blocks of its rows in a ring, by numbers of its own: layer by layer, those with
earlier tokens are loaded before, and those with new tokens are stored after the layer. Rows do not
read what other rows of their step write, so a step may be cut between any two of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from common.engine.interface import StepRow


@dataclass(frozen=True, slots=True)
class RingPass:
    """Rows whose block tables name places in the ring, and where those are in the pool.

    ``rows`` are ``numbers`` of the step. ``loads`` and ``stores`` are (pool block, ring block).
    """

    numbers: tuple[int, ...]
    rows: tuple[StepRow, ...]
    loads: tuple[tuple[int, int], ...]
    stores: tuple[tuple[int, int], ...]
    num_blocks: int
    """Places of the ring that are in use."""


@dataclass(slots=True)
class _Draft:
    numbers: list[int] = field(default_factory=list)
    rows: list[StepRow] = field(default_factory=list)
    places: dict[int, int] = field(default_factory=dict)
    loads: dict[int, int] = field(default_factory=dict)
    stores: dict[int, int] = field(default_factory=dict)

    def takes(self, blocks: Sequence[int], num_places: int) -> bool:
        num_new = sum(block not in self.places for block in set(blocks))
        return len(self.places) + num_new <= num_places

    def add(self, number: int, row: StepRow, blocks: Sequence[int], block_size: int) -> None:
        for block in blocks:
            self.places.setdefault(block, len(self.places))
        end = row.start + len(row.token_ids)
        num_earlier = -(-row.start // block_size)
        for block in blocks[:num_earlier]:
            self.loads[block] = self.places[block]
        for block in blocks[row.start // block_size : -(-end // block_size)]:
            self.stores[block] = self.places[block]
        self.numbers.append(number)
        self.rows.append(replace(row, block_table=[self.places[block] for block in blocks]))

    def finished(self) -> RingPass:
        return RingPass(
            tuple(self.numbers),
            tuple(self.rows),
            tuple(self.loads.items()),
            tuple(self.stores.items()),
            len(self.places),
        )


def plan_passes(rows: Sequence[StepRow], block_size: int, num_places: int) -> list[RingPass]:
    """Cut a step into passes that need at most ``num_places`` places each, in its order.

    Blocks that rows share are held once. ValueError names a row that alone needs more, or whose
    block table does not reach its last token.
    """
    passes: list[RingPass] = []
    draft = _Draft()
    for number, row in enumerate(rows):
        count = -(-(row.start + len(row.token_ids)) // block_size)
        blocks = row.block_table[:count]
        if len(blocks) < count:
            raise ValueError(f"row {number}: {len(blocks)} blocks, but its tokens need {count}")
        if count > num_places:
            raise ValueError(
                f"row {number} needs {count} blocks of the ring, which has {num_places}"
            )
        if not draft.takes(blocks, num_places):
            passes.append(draft.finished())
            draft = _Draft()
        draft.add(number, row, blocks, block_size)
    if draft.rows:
        passes.append(draft.finished())
    return passes
