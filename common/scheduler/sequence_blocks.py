"""The blocks of sequences: acquired, grown, shared, swapped and let go. Pure.

Both halves of the scheduler share one of these, and with it the pool.
"""

from collections.abc import Sequence as SequenceOf

from common.kv.blocks import BlockManager, Hold, PublishedBlocks
from common.scheduler.publisher import Publisher
from common.scheduler.request import Sequence
from common.scheduler.steps import SchedulerLimits
from common.scheduler.swap import SwapSpace

Pairs = tuple[tuple[int, int], ...]


class SequenceBlocks:
    """Keeps what sequences know of their blocks equal to what the block manager knows."""

    def __init__(
        self, blocks: BlockManager, limits: SchedulerLimits, swap: SwapSpace, *, is_keeping: bool
    ) -> None:
        self._blocks = blocks
        self._limits = limits
        self._swap = swap
        self._publisher = Publisher(blocks, limits.block_size, is_keeping=is_keeping)

    def can_ever_hold(self, num_tokens: int) -> bool:
        """Whether an empty pool has room for ``num_tokens`` tokens."""
        return self._blocks.can_ever_hold(num_tokens)

    @property
    def num_tokens_in_all(self) -> int:
        """Tokens that the whole pool has room for."""
        return self._blocks.counts().total * self._limits.block_size

    def share_in_use(self) -> float:
        """Return the share of the pool that requests and transfers hold."""
        counts = self._blocks.counts()
        return (counts.referenced + counts.in_transfer) / counts.total

    def num_cached(self, sequence: Sequence) -> int:
        """Return how many leading tokens ``acquire`` would find cached now."""
        length = sequence.length
        return self._blocks.match(sequence.tokens(0, length), length - 1)

    def can_acquire(self, sequence: Sequence) -> bool:
        """Whether ``acquire`` would find room now."""
        return self._blocks.can_acquire(
            sequence.tokens(0, sequence.length),
            max_cached_tokens=sequence.length - 1,
            capacity_tokens=self._capacity_tokens(sequence),
        )

    def acquire(self, sequence: Sequence) -> bool:
        """Give blocks to a sequence that computes all its tokens but those of a known prefix.

        They have room for some output too, if it is decoded here. False: no room.
        """
        return self._acquire(sequence, sequence.length - 1)

    def _acquire(self, sequence: Sequence, max_cached_tokens: int) -> bool:
        acquired = self._blocks.acquire(
            sequence.owner,
            sequence.tokens(0, sequence.length),
            hold=Hold.REQUEST,
            max_cached_tokens=max_cached_tokens,
            capacity_tokens=self._capacity_tokens(sequence),
        )
        if acquired is None:
            return False
        self._note_table(sequence, acquired.num_cached_tokens)
        sequence.num_published = acquired.num_cached_tokens // self._limits.block_size
        return True

    def _capacity_tokens(self, sequence: Sequence) -> int:
        growth = min(sequence.request.new.params.num_left, self._limits.growth_tokens)
        wanted = sequence.length + (0 if sequence.request.is_remote else growth)
        return wanted if self._blocks.can_ever_hold(wanted) else sequence.length

    def adopt(self, sequence: Sequence, num_computed: int) -> None:
        """The sequence's owner holds its first ``num_computed`` tokens, as they arrived."""
        self._blocks.set_hold(sequence.owner, Hold.REQUEST)
        self._note_table(sequence, num_computed)
        sequence.num_handed = num_computed // self._limits.block_size
        self._publisher.note(sequence)

    def _note_table(self, sequence: Sequence, num_computed: int) -> None:
        sequence.block_table = self._blocks.block_ids(sequence.owner)
        sequence.num_computed = num_computed

    def grow(self, sequence: Sequence) -> bool:
        """Make room for the sequence's next token. False: no room."""
        wanted = sequence.next_length
        if wanted <= len(sequence.block_table) * self._limits.block_size:
            return True
        if not self._blocks.grow(sequence.owner, wanted):
            return False
        sequence.block_table = self._blocks.block_ids(sequence.owner)
        return True

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> Pairs | None:
        """Let a choice share the first tokens of another one.

        Returns the copies inside the pool that this takes; None when there is no room for them.
        """
        copies = self._blocks.fork(parent.owner, child.owner, num_tokens)
        if copies is not None:
            self._note_table(child, num_tokens)
            child.num_published = num_tokens // self._limits.block_size
        return copies

    def set_hold(self, sequence: Sequence, hold: Hold) -> None:
        """Say why the sequence has its blocks."""
        self._blocks.set_hold(sequence.owner, hold)

    def swap_out(self, sequence: Sequence) -> Pairs | None:
        """Let the blocks go after a copy of them to host slots.

        Returns the copies to make, (pool block, host slot); None, and nothing is changed, when
        there are no slots for all of them.
        """
        num_blocks = -(-sequence.num_computed // self._limits.block_size)
        slots = self._swap.try_take(num_blocks)
        if slots is None:
            return None
        pairs = tuple(zip(sequence.block_table, slots, strict=False))
        self.release(sequence)
        sequence.slots = slots
        return pairs

    def swap_in(self, sequence: Sequence) -> Pairs | None:
        """Give blocks to a sequence that was swapped out, and its slots back.

        Returns the copies to make, (pool block, host slot): a block that is found in the prefix
        cache needs none. None: no room, nothing is changed.
        """
        num_stored = sequence.num_computed
        if not self._acquire(sequence, num_stored):
            return None
        first = sequence.num_computed // self._limits.block_size
        pairs = tuple(zip(sequence.block_table[first:], sequence.slots[first:], strict=False))
        sequence.num_computed = num_stored
        self._give_slots_back(sequence)
        return pairs

    def _give_slots_back(self, sequence: Sequence) -> None:
        self._swap.give_back(sequence.slots)
        sequence.slots = ()

    def release(self, sequence: Sequence) -> None:
        """Let blocks and slots go; what was computed can be found while it lasts."""
        if self._blocks.is_held(sequence.owner):
            self._publisher.publish(sequence)
            self._blocks.release(sequence.owner)
        self._give_slots_back(sequence)
        sequence.block_table = ()
        sequence.num_published = 0

    def note_computed(self, sequence: Sequence) -> None:
        """The sequence has computed more, to be published when nobody waits for it."""
        self._publisher.note(sequence)

    def publish(self, sequence: Sequence) -> None:
        """Make what one sequence has computed findable now."""
        self._publisher.publish(sequence)

    def publish_all(self) -> None:
        """Make everything that was computed findable."""
        self._publisher.publish_all()

    def take_computed(self) -> list[PublishedBlocks]:
        """Return what was computed since the last call, held until it is let go."""
        return self._publisher.take_computed()

    def validate_slots(self, in_use: SequenceOf[int]) -> None:
        """Raise InvariantViolationError unless each host slot is free or, once, in use."""
        self._swap.validate(in_use)
