"""Makes computed blocks findable for later prompts, when nobody waits for it. Pure."""

from common.kv.blocks import BlockManager
from common.scheduler.request import Sequence


class Publisher:
    """Remembers whose whole blocks are new.

    Hashing a prompt takes a while: its tokens go out and its blocks to another worker before.
    """

    def __init__(self, blocks: BlockManager, block_size: int) -> None:
        self._blocks = blocks
        self._block_size = block_size
        self._waiting: dict[Sequence, None] = {}

    def note(self, sequence: Sequence) -> None:
        """The sequence has computed more; ``publish_all`` comes to it."""
        if sequence.num_computed // self._block_size > sequence.num_published:
            self._waiting[sequence] = None

    def publish(self, sequence: Sequence) -> None:
        """Publish what was noted of one sequence."""
        if sequence in self._waiting:
            del self._waiting[sequence]
            self._blocks.publish(sequence.owner, sequence.tokens(0, sequence.num_computed))
            sequence.num_published = sequence.num_computed // self._block_size

    def publish_all(self) -> None:
        """Publish everything that was noted."""
        for sequence in list(self._waiting):
            self.publish(sequence)
