"""The trie of stored blocks beside a plain model that looks at everything."""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.storage.tree import BlockTree

paths = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)
Path = tuple[int, ...]


@dataclass
class Block:
    num_bytes: int
    used_ns: int


def key(path: Path) -> bytes:
    return bytes(path)


class TreeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tree = BlockTree()
        self.blocks: dict[Path, Block] = {}
        self.now = 0

    def leaves(self) -> list[Path]:
        parents = {path[:-1] for path in self.blocks}
        return [path for path in self.blocks if path not in parents]

    @rule(path=paths, num_bytes=st.integers(1, 9), is_late=st.booleans())
    def add(self, path: Path, num_bytes: int, *, is_late: bool) -> None:
        used_ns = self.now if is_late else self.now // 2
        self.now += 1
        self.tree.add(key(path), key(path[:-1]) if len(path) > 1 else None, num_bytes, used_ns)
        block = self.blocks.setdefault(path, Block(num_bytes, used_ns))
        block.used_ns = max(block.used_ns, used_ns)

    @rule(path=paths)
    def use_prefix(self, path: Path) -> None:
        self.now += 1
        for end in range(len(path), 0, -1):
            self.tree.touch(key(path[:end]), self.now)
            if path[:end] in self.blocks:
                self.blocks[path[:end]].used_ns = self.now

    @rule(path=paths)
    def somebody_removes(self, path: Path) -> None:
        self.tree.remove(key(path))
        self.blocks.pop(path, None)

    @precondition(lambda self: self.blocks)
    @rule(count=st.integers(1, 4))
    def evict(self, count: int) -> None:
        for _ in range(count):
            oldest = self.tree.oldest_leaf()
            leaves = self.leaves()
            assert (oldest is None) == (not leaves)
            if oldest is None:
                return
            path = tuple(oldest)
            assert path in leaves, "a block would go before what hangs from it"
            assert self.blocks[path].used_ns == min(self.blocks[leaf].used_ns for leaf in leaves)
            self.tree.remove(oldest)
            del self.blocks[path]

    @invariant()
    def sums_agree(self) -> None:
        self.tree.validate()
        assert len(self.tree) == len(self.blocks)
        assert self.tree.num_bytes == sum(block.num_bytes for block in self.blocks.values())
        for path, block in self.blocks.items():
            assert self.tree.used_ns(key(path)) == block.used_ns


TestTree = TreeMachine.TestCase
TestTree.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)
