"""Makes computed blocks findable for later prompts, when nobody waits for it. Pure."""

import itertools

from common.kv.blocks import BlockManager, PublishedBlocks
from common.scheduler.request import Sequence


class Publisher:
    """Remembers whose whole blocks are new.

    Hashing a prompt takes a while: its tokens go out and its blocks to another worker before.
    With ``is_keeping`` every block that was computed here is held, once, until whoever takes it
    from ``take_computed`` lets it go: neither its sequence's end nor an eviction frees it before.
    """

    def __init__(self, blocks: BlockManager, block_size: int, *, is_keeping: bool) -> None:
        self._blocks = blocks
        self._block_size = block_size
        self._is_keeping = is_keeping
        self._waiting: dict[Sequence, None] = {}
        self._computed: list[PublishedBlocks] = []
        self._numbers = itertools.count()

    def note(self, sequence: Sequence) -> None:
        """The sequence has computed more; ``publish_all`` comes to it."""
        if sequence.num_computed // self._block_size > sequence.num_published:
            self._waiting[sequence] = None

    def publish(self, sequence: Sequence) -> None:
        """Publish what was noted of one sequence."""
        if sequence in self._waiting:
            del self._waiting[sequence]
            first = max(sequence.num_published, sequence.num_handed)
            self._blocks.publish(sequence.owner, sequence.tokens(0, sequence.num_computed))
            sequence.num_published = sequence.num_computed // self._block_size
            if self._is_keeping and first < sequence.num_published:
                owner = f"computed-{next(self._numbers)}"
                self._computed.append(self._blocks.hold_published(owner, sequence.owner, first))

    def take_computed(self) -> list[PublishedBlocks]:
        """Return what was computed and published since the last call, in order."""
        taken, self._computed = self._computed, []
        return taken

    def publish_all(self) -> None:
        """Publish everything that was noted."""
        for sequence in list(self._waiting):
            self.publish(sequence)
