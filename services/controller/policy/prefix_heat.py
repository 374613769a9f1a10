"""Which prefixes of prompts are hot: a tree of the prompts seen lately, with weights that fade.

Theory of operation
-------------------
A prompt is the chain of hashes of its whole blocks, and a hash names the whole prefix up to it. The
tree holds one node where prompts begin, part or end, never one per block; so a node stands for the
prefix that leads to it, and keeps the hashes and the tokens since its parent.

A prompt is a use of every node on its way, but counts only where it ends, or goes on in another way
than the use before it did. So a prefix that many prompts share is hot where they part; the parts of
one conversation, each of which goes on as the last one did, are not, however often it comes back.
Weights halve every ``HALF_LIFE_SECONDS``; a prefix is hot while its weight is ``HOT_USES`` or more.

Memory is bounded: at most ``MAX_NODES`` nodes, ``MAX_BLOCKS`` blocks, and the first
``MAX_CHAIN_BLOCKS`` blocks of one prompt. Beyond that the coldest tails are forgotten first.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from common.errors import InvariantViolationError

HALF_LIFE_SECONDS = 30.0
HOT_USES = 4.0
"""That many uses at one moment make a prefix hot; spread over a half-life, half as many again."""
MIN_HOT_BLOCKS = 4
"""Shorter prefixes are computed sooner than anybody could copy them."""
MAX_NODES = 1024
MAX_CHAIN_BLOCKS = 4096
MAX_BLOCKS = 65536
"""16 MiB of tokens, at 64 tokens a block."""
MAX_HOT = 16
KEPT_SHARE = 0.75
"""What is left after the coldest were forgotten: it is not done again at the next prompt."""


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """A prefix in use: its hash chain, its tokens (int32, little-endian) and its faded uses."""

    hashes: tuple[bytes, ...]
    tokens: bytes
    num_uses: float

    @property
    def digest(self) -> bytes:
        """The hash that names it."""
        return self.hashes[-1]


@dataclass(slots=True, eq=False)
class _Node:
    """``went_on`` is the first hash after this prefix in its last use, None where that ended."""

    parent: "_Node | None"
    hashes: tuple[bytes, ...]
    tokens: bytes
    weight: float
    at: float
    went_on: bytes | None = None
    children: "dict[bytes, _Node]" = field(default_factory=dict)

    def faded(self, now: float) -> float:
        return float(self.weight * 0.5 ** ((now - self.at) / HALF_LIFE_SECONDS))

    def use(self, went_on: bytes | None, now: float) -> None:
        counts = went_on is None or went_on != self.went_on
        self.weight = self.faded(now) + counts
        self.at, self.went_on = now, went_on


class PrefixHeat:
    """The tree. ``use`` is its only mutator."""

    def __init__(self) -> None:
        self._root = _Node(None, (), b"", 0.0, 0.0)
        self._num_nodes = 0
        self._num_blocks = 0

    @property
    def num_nodes(self) -> int:
        """Prefixes that are counted."""
        return self._num_nodes

    @property
    def num_blocks(self) -> int:
        """Blocks whose hashes and tokens are kept."""
        return self._num_blocks

    def use(self, hashes: Sequence[bytes], tokens: bytes, block_size: int, now: float) -> None:
        """Count a prompt: the chain of its whole blocks, and its ids as int32, little-endian."""
        chain, stride = tuple(hashes[:MAX_CHAIN_BLOCKS]), 4 * block_size
        node, place = self._root, 0
        while place < len(chain):
            child = node.children.get(chain[place])
            if child is None:
                rest = tokens[place * stride : len(chain) * stride]
                self._attach(_Node(node, chain[place:], rest, 1.0, now))
                break
            num_common = _num_common(child.hashes, chain, place)
            if num_common < len(child.hashes):
                child = self._split(child, num_common, stride, now)
            place += num_common
            child.use(chain[place] if place < len(chain) else None, now)
            node = child
        if self._num_nodes > MAX_NODES or self._num_blocks > MAX_BLOCKS:
            self._forget_coldest(now)

    def hot(self, now: float) -> list[HotPrefix]:
        """Return at most ``MAX_HOT`` hot prefixes, the hottest first, of equal ones the longest."""
        found: list[tuple[float, int, _Node]] = []
        for node, depth in self._walk():
            uses = node.faded(now)
            if uses >= HOT_USES and depth >= MIN_HOT_BLOCKS:
                found.append((uses, depth, node))
        found.sort(key=lambda one: one[:2], reverse=True)
        return [_prefix_of(node, uses) for uses, _, node in found[:MAX_HOT]]

    def validate(self) -> None:
        """Raise InvariantViolationError where the tree or its sums are wrong."""
        nodes = [node for node, _ in self._walk()]
        num_blocks = sum(len(node.hashes) for node in nodes)
        if (len(nodes), num_blocks) != (self._num_nodes, self._num_blocks):
            raise InvariantViolationError("prefix heat: nodes or blocks are miscounted")
        if self._num_nodes > MAX_NODES or self._num_blocks > MAX_BLOCKS:
            raise InvariantViolationError("prefix heat: more is kept than may be")
        for node in nodes:
            for first, child in node.children.items():
                if child.parent is not node or child.hashes[:1] != (first,):
                    raise InvariantViolationError("prefix heat: a node is not where it belongs")

    def _walk(self) -> Iterator[tuple[_Node, int]]:
        """Yield every node with the number of blocks of its prefix."""
        waiting = [(child, len(child.hashes)) for child in self._root.children.values()]
        while waiting:
            node, depth = waiting.pop()
            yield node, depth
            waiting += [(child, depth + len(child.hashes)) for child in node.children.values()]

    def _attach(self, node: _Node) -> None:
        assert node.parent is not None, "the root is never attached"
        node.parent.children[node.hashes[0]] = node
        self._num_nodes += 1
        self._num_blocks += len(node.hashes)

    def _split(self, node: _Node, place: int, stride: int, now: float) -> _Node:
        """Cut a node after ``place`` of its blocks; return the new one before the cut.

        All uses until now went on in the same way, and count as one.
        """
        assert node.parent is not None, "the root has no blocks"
        weight = min(1.0, node.faded(now))
        head, cut = node.hashes[:place], place * stride
        upper = _Node(node.parent, head, node.tokens[:cut], weight, now, node.hashes[place])
        node.parent.children[head[0]] = upper
        node.parent, node.hashes, node.tokens = upper, node.hashes[place:], node.tokens[cut:]
        upper.children[node.hashes[0]] = node
        self._num_nodes += 1
        return upper

    def _forget_coldest(self, now: float) -> None:
        while (
            self._num_nodes > KEPT_SHARE * MAX_NODES or self._num_blocks > KEPT_SHARE * MAX_BLOCKS
        ):
            leaves = [node for node, _ in self._walk() if not node.children]
            leaves.sort(key=lambda node: node.faded(now))
            # Their parents may be colder than the hottest of them, and are leaves then.
            for leaf in leaves[: max(1, len(leaves) // 2)]:
                self._detach(leaf)

    def _detach(self, leaf: _Node) -> None:
        assert leaf.parent is not None, "the root is no leaf while there are nodes"
        del leaf.parent.children[leaf.hashes[0]]
        self._num_nodes -= 1
        self._num_blocks -= len(leaf.hashes)


def _num_common(edge: tuple[bytes, ...], chain: tuple[bytes, ...], place: int) -> int:
    """Return how many blocks of an edge a chain has from ``place`` on; the first is the same.

    A hash names all before it: where one is the same, those before it are.
    """
    low, high = 1, min(len(edge), len(chain) - place)
    while low < high:
        middle = (low + high + 1) // 2
        if edge[middle - 1] == chain[place + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def _prefix_of(node: _Node, num_uses: float) -> HotPrefix:
    path: list[_Node] = []
    at: _Node | None = node
    while at is not None:
        path.insert(0, at)
        at = at.parent
    hashes = tuple(digest for one in path for digest in one.hashes)
    return HotPrefix(hashes, b"".join(one.tokens for one in path), num_uses)
