"""Pools that have lived: requests come and go until free memory looks as it does in service.

Every workload drives the production code, and beside it a plain free list that follows the same
operations: a stack of block ids, taken from the top and given back to the top.
"""

from dataclasses import dataclass
from enum import StrEnum
from random import Random

import flowpath_native
import numpy as np

from common.kv.blocks import BlockManager, Hold
from common.kv.journal import AllocOp, AllocOpKind
from common.kv.runs import to_blocks

NUM_BLOCKS = 4096
BLOCK_SIZE = 64
REQUEST_TOKENS = 1024
REQUEST_BLOCKS = REQUEST_TOKENS // BLOCK_SIZE
NUM_OPERATIONS = 10_000
FILL = 0.8
MIN_REMAINDER_BLOCKS = REQUEST_BLOCKS
SINGLE_SHARE = 0.3


class Workload(StrEnum):
    """How requests end."""

    WHOLE = "whole"
    """Every request gives all its blocks back at once."""
    CACHED = "cached"
    """30 % stay in the prefix cache, which evicts them block by block; 30 % begin with a hit."""
    SINGLE = "single"
    """30 % are freed block by block in random order, while a tenth of the pool waits for that."""


class FreeList:
    """Places blocks as a stack does, following the block names of another allocator."""

    def __init__(self, num_blocks: int) -> None:
        self._stack = list(reversed(range(num_blocks)))
        self._place: dict[int, int] = {}

    def take(self, blocks: list[int]) -> None:
        """Place blocks that the other allocator handed out."""
        for block in blocks:
            self._place[block] = self._stack.pop()

    def give_back(self, blocks: list[int]) -> None:
        """Free blocks that the other allocator was given back.

        The last goes first, as is usual: what came and went whole is found in its order again.
        """
        self._stack.extend(self._place.pop(block) for block in reversed(blocks))

    def places(self, blocks: list[int]) -> list[int]:
        """Return where the other allocator's blocks lie here."""
        return [self._place[block] for block in blocks]

    def follow(self, op: AllocOp) -> None:
        """Do what a block manager's log says."""
        match op.op:
            case AllocOpKind.ACQUIRE | AllocOpKind.GROW | AllocOpKind.FORK:
                self.take(to_blocks(op.runs))
            case AllocOpKind.RELEASE | AllocOpKind.EVICT:
                self.give_back(to_blocks(op.runs))
            case AllocOpKind.RELOCATE:  # a free list moves nothing: the blocks get other names
                for old, new in zip(to_blocks(op.runs), to_blocks(op.shared), strict=True):
                    self._place[new] = self._place.pop(old)
            case AllocOpKind.OPEN | AllocOpKind.TRUNCATED:
                pass


@dataclass(frozen=True, slots=True)
class Placed:
    """One request's blocks under both policies, in logical order."""

    segments: list[int]
    free_list: list[int]


class ManagedPool:
    """A block manager with live requests that hold ``FILL`` of its blocks.

    What its cache keeps comes on top: the pool has hardly a block that is free.
    """

    def __init__(self, seed: int, workload: Workload) -> None:
        self._random = Random(seed)
        self._tokens = np.random.default_rng(seed)
        self._is_caching = workload is Workload.CACHED
        self._free_list = FreeList(NUM_BLOCKS)
        self._manager = BlockManager(
            NUM_BLOCKS, BLOCK_SIZE, MIN_REMAINDER_BLOCKS, "churn", self._free_list.follow
        )
        self._live: dict[str, np.ndarray] = {}
        self._published: list[np.ndarray] = []
        self._num_requests = 0

    def operate(self) -> None:
        """Begin one request, or end one where the pool is full enough."""
        if self._manager.counts().referenced + REQUEST_BLOCKS <= FILL * NUM_BLOCKS:
            self._begin(self._prompt(), NUM_BLOCKS * BLOCK_SIZE)
        else:
            self._end(self._random.choice(list(self._live)))

    def probe(self) -> Placed:
        """Begin a request that no cache knows, and return where it is."""
        while self._manager.counts().referenced + REQUEST_BLOCKS > FILL * NUM_BLOCKS:
            self.operate()
        blocks = self._begin(self._fresh_tokens(REQUEST_TOKENS), 0)
        return Placed(blocks, self._free_list.places(blocks))

    def check(self) -> None:
        """Raise where an invariant is broken."""
        self._manager.validate()

    def _begin(self, prompt: np.ndarray, max_cached_tokens: int) -> list[int]:
        self._num_requests += 1
        owner = f"request-{self._num_requests}"
        acquired = self._manager.acquire(
            owner, prompt, hold=Hold.REQUEST, max_cached_tokens=max_cached_tokens
        )
        if acquired is None:
            raise RuntimeError("a pool with room refused a request")
        self._live[owner] = prompt
        return list(acquired.block_ids)

    def _end(self, owner: str) -> None:
        prompt = self._live.pop(owner)
        if self._is_caching and self._random.random() < SINGLE_SHARE:
            self._manager.publish(owner, prompt)
            self._published = [*self._published[-63:], prompt]
        self._manager.release(owner)

    def _prompt(self) -> np.ndarray:
        if not self._published or self._random.random() >= SINGLE_SHARE:
            return self._fresh_tokens(REQUEST_TOKENS)
        known = self._random.choice(self._published)
        num_known = self._random.randrange(1, REQUEST_BLOCKS) * BLOCK_SIZE
        fresh = self._fresh_tokens(REQUEST_TOKENS - num_known)
        return np.concatenate([known[:num_known], fresh])

    def _fresh_tokens(self, count: int) -> np.ndarray:
        return self._tokens.integers(0, 2**31 - 1, count, dtype=np.int32)


class SinglyFreedPool:
    """The segment allocator alone, under the worst order in which a cache could free blocks."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._allocator = flowpath_native.SegmentAllocator(NUM_BLOCKS, MIN_REMAINDER_BLOCKS)
        self._free_list = FreeList(NUM_BLOCKS)
        self._live: list[list[int]] = []
        self._waiting: list[int] = []

    def operate(self) -> None:
        """Begin one request, end one, or free one block that waits."""
        num_used = NUM_BLOCKS - self._allocator.num_free
        if num_used + REQUEST_BLOCKS <= FILL * NUM_BLOCKS:
            self._begin()
        elif len(self._waiting) > NUM_BLOCKS // 10:
            self._free([self._waiting.pop(self._random.randrange(len(self._waiting)))])
        else:
            ended = self._live.pop(self._random.randrange(len(self._live)))
            if self._random.random() < SINGLE_SHARE:
                self._waiting.extend(ended)
            else:
                self._free(ended)

    def probe(self) -> Placed:
        """Begin a request and return where it is."""
        while NUM_BLOCKS - self._allocator.num_free + REQUEST_BLOCKS > FILL * NUM_BLOCKS:
            self.operate()
        blocks = self._begin()
        return Placed(blocks, self._free_list.places(blocks))

    def check(self) -> None:
        """Raise where an invariant is broken."""
        self._allocator.check()

    def _begin(self) -> list[int]:
        runs = self._allocator.allocate(REQUEST_BLOCKS)
        if runs is None:
            raise RuntimeError("a pool with room refused a request")
        blocks = to_blocks(runs)
        self._free_list.take(blocks)
        self._live.append(blocks)
        return blocks

    def _free(self, blocks: list[int]) -> None:
        self._allocator.free([(block, 1) for block in blocks])
        self._free_list.give_back(blocks)


def churned_pool(workload: Workload, seed: int) -> ManagedPool | SinglyFreedPool:
    """Return a pool after ``NUM_OPERATIONS`` operations, with its invariants checked."""
    pool = SinglyFreedPool(seed) if workload is Workload.SINGLE else ManagedPool(seed, workload)
    for _ in range(NUM_OPERATIONS):
        pool.operate()
    pool.check()
    return pool
