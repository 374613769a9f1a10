"""The segment allocator against a model that keeps one owner per block."""

from random import Random

import pytest
from flowpath_native import SegmentAllocator
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

Run = tuple[int, int]


class ModelAllocator:
    """The allocator's contract in the plainest form: a set of free blocks."""

    def __init__(self, num_blocks: int, min_remainder: int) -> None:
        self.num_blocks = num_blocks
        self.min_remainder = min_remainder
        self.free_blocks = set(range(num_blocks))

    def segments(self) -> list[Run]:
        runs: list[Run] = []
        for block in sorted(self.free_blocks):
            if runs and sum(runs[-1]) == block:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((block, 1))
        return runs

    def best_fit(self, n: int) -> Run | None:
        fitting = [run for run in self.segments() if run[1] >= n]
        tidy = [r for r in fitting if r[1] == n] or [
            r for r in fitting if r[1] - n >= self.min_remainder
        ]
        return min(tidy or fitting, key=lambda run: (run[1], run[0]), default=None)

    def take(self, start: int, length: int) -> Run:
        self.free_blocks -= set(range(start, start + length))
        return (start, length)

    def place(self, n: int) -> list[Run]:
        runs: list[Run] = []
        while n:
            segment = self.best_fit(n) or min(self.segments(), key=lambda run: (-run[1], run[0]))
            runs.append(self.take(segment[0], min(segment[1], n)))
            n -= runs[-1][1]
        return runs

    def allocate(self, n: int, tail: int | None = None) -> list[Run] | None:
        if n > len(self.free_blocks):
            return None
        runs: list[Run] = []
        if tail is not None:
            in_place = next((length for start, length in self.segments() if start == tail), 0)
            if in_place:
                runs.append(self.take(tail, min(in_place, n)))
                n -= runs[0][1]
        return joined(runs + self.place(n))

    def allocate_like(self, lengths: list[int]) -> list[Run] | None:
        total = sum(lengths)
        if total > len(self.free_blocks):
            return None
        if self.best_fit(total):
            return self.place(total)
        placed: dict[int, list[Run]] = {}
        for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            placed[i] = self.place(lengths[i])
        return joined([run for i in range(len(lengths)) for run in placed[i]])

    def free(self, runs: list[Run]) -> None:
        for start, length in runs:
            self.free_blocks |= set(range(start, start + length))


def joined(runs: list[Run]) -> list[Run]:
    result: list[Run] = []
    for start, length in runs:
        if result and sum(result[-1]) == start:
            result[-1] = (result[-1][0], result[-1][1] + length)
        else:
            result.append((start, length))
    return result


class AllocatorMachine(RuleBasedStateMachine):
    """Random life of a pool; each allocation is a list of runs in logical order."""

    allocations = Bundle("allocations")

    @initialize(num_blocks=st.integers(1, 60), min_remainder=st.integers(0, 8))
    def start(self, num_blocks: int, min_remainder: int) -> None:
        min_remainder = min(min_remainder, num_blocks)
        self.native = SegmentAllocator(num_blocks, min_remainder)
        self.model = ModelAllocator(num_blocks, min_remainder)

    @rule(target=allocations, n=st.integers(1, 20))
    def allocate(self, n: int) -> object:
        runs = self.native.allocate(n)
        assert runs == self.model.allocate(n)
        return multiple() if runs is None else runs

    @rule(target=allocations, lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5))
    def allocate_like(self, lengths: list[int]) -> object:
        runs = self.native.allocate_like(lengths)
        assert runs == self.model.allocate_like(lengths)
        return multiple() if runs is None else runs

    @rule(target=allocations, held=consumes(allocations), n=st.integers(1, 12))
    def grow(self, held: list[Run], n: int) -> object:
        tail = sum(held[-1])
        runs = self.native.allocate(n, tail)
        assert runs == self.model.allocate(n, tail)
        return held if runs is None else joined(held + runs)

    @rule(held=consumes(allocations))
    def free(self, held: list[Run]) -> None:
        self.native.free(held)
        self.model.free(held)
        with pytest.raises(ValueError, match="already free"):
            self.native.free(held)

    @rule(target=allocations, held=consumes(allocations), data=st.data())
    def free_the_last_blocks(self, held: list[Run], data: st.DataObject) -> object:
        start, length = held[-1]
        dropped = data.draw(st.integers(1, length))
        given_back = [(start + length - dropped, dropped)]
        self.native.free(given_back)
        self.model.free(given_back)
        kept = held[:-1] + ([(start, length - dropped)] if dropped < length else [])
        return kept or multiple()

    @rule(held=allocations)
    def refuse_a_run_given_twice(self, held: list[Run]) -> None:
        with pytest.raises(ValueError, match=r"run \d+ .* given before in the same call"):
            self.native.free([*held, held[0]])

    @rule(start=st.integers(0, 60), length=st.integers(1, 10))
    def ask(self, start: int, length: int) -> None:
        expected = set(range(start, start + length)) <= self.model.free_blocks
        assert self.native.is_free(start, length) == expected

    @invariant()
    def both_agree(self) -> None:
        if not hasattr(self, "native"):
            return
        self.native.check()
        segments = self.model.segments()
        assert self.native.free_segments() == segments
        assert self.native.num_segments == len(segments)
        free = sum(length for _, length in segments)
        largest = max((length for _, length in segments), default=0)
        assert (self.native.num_free, self.native.largest_free) == (free, largest)
        assert self.native.fragmentation == pytest.approx(1 - largest / free if free else 0.0)


AllocatorMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=30, deadline=None, derandomize=True
)
TestAllocatorMachine = AllocatorMachine.TestCase


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_freeing_everything_in_any_order_leaves_one_segment(
    sizes: list[int], random: Random
) -> None:
    allocator = SegmentAllocator(80, 4)
    held = [run for n in sizes for run in allocator.allocate(n) or []]
    random.shuffle(held)
    for run in held:
        allocator.free([run])
        allocator.check()
    assert allocator.free_segments() == [(0, 80)]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.data())
def test_mirrored_room_needs_few_copies(lengths: list[int], data: st.DataObject) -> None:
    """k sender runs and m receiver runs need at most k + m - 1 copies."""
    allocator = SegmentAllocator(64, 0)
    everything = allocator.allocate(64)
    assert everything == [(0, 64)]
    for block in sorted(data.draw(st.sets(st.integers(0, 63), min_size=sum(lengths)))):
        allocator.free([(block, 1)])
    received = allocator.allocate_like(lengths)
    assert received is not None
    assert sum(length for _, length in received) == sum(lengths)
    cuts = set()
    for runs in (lengths, [length for _, length in received]):
        position = 0
        for length in runs:
            position += length
            cuts.add(position)
    assert len(cuts) <= len(lengths) + len(received) - 1
