"""The block checksum against its definition, written out in Python."""

import numpy as np
from flowpath_native import checksum, checksum_blocks, checksum_kernels, checksum_with
from hypothesis import given, settings
from hypothesis import strategies as st

MASK = 2**64 - 1
KERNELS = checksum_kernels()


def mix(h: int) -> int:
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    h = (h ^ (h >> 27)) * 0x94D049BB133111EB & MASK
    return h ^ (h >> 31)


def checksum_reference(data: bytes) -> int:
    """The definition in ``native/include/flowpath/memory/checksum.hpp``."""
    padded = data + bytes(-len(data) % 8)
    total = 0
    for i in range(len(padded) // 8):
        word = int.from_bytes(padded[8 * i : 8 * i + 8], "little")
        mixed = mix((i % 64 + 1) * 0x9E3779B97F4A7C15 & MASK)
        x = word ^ ((mixed + i // 64 * 0x9E3779B97F4A7C15) & MASK)
        total += (x & 0xFFFFFFFF) * (x >> 32) + x
    return mix((total + len(data) * 0xD6E8FEB86659FD93) & MASK)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 2000), st.integers(0, 2**32 - 1))
def test_every_kernel_equals_the_definition(num_bytes: int, seed: int) -> None:
    data = np.random.default_rng(seed).bytes(num_bytes)
    expected = checksum_reference(data)
    assert checksum(data) == expected
    assert {name: checksum_with(name, data) for name in KERNELS} == dict.fromkeys(KERNELS, expected)
    assert checksum(memoryview(b"x" + data)[1:]) == expected  # at an odd address


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.binary(min_size=1, max_size=600), st.data())
def test_a_single_flipped_bit_changes_it(block: bytes, data: st.DataObject) -> None:
    bit = data.draw(st.integers(0, 8 * len(block) - 1))
    damaged = bytearray(block)
    damaged[bit // 8] ^= 1 << (bit % 8)
    assert checksum(damaged) != checksum(block)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, MASK), min_size=2, max_size=60), st.data())
def test_swapped_words_change_it(words: list[int], data: st.DataObject) -> None:
    i, j = data.draw(st.tuples(*[st.integers(0, len(words) - 1)] * 2))
    swapped = list(words)
    swapped[i], swapped[j] = swapped[j], swapped[i]
    same = checksum(np.array(words, dtype=np.uint64)) == checksum(
        np.array(swapped, dtype=np.uint64)
    )
    assert same == (words == swapped)


def test_swapped_blocks_change_it() -> None:
    pool = np.random.default_rng(1).integers(0, 256, (8, 4096), dtype=np.uint8)
    swapped = pool[[1, 0, 2, 3, 4, 5, 6, 7]]
    assert checksum(pool) != checksum(swapped)
    before, after = (checksum_blocks(p, list(range(8)), 4096).tolist() for p in (pool, swapped))
    assert after == [before[1], before[0], *before[2:]]
    assert len(set(before)) == 8


def test_every_bit_of_a_constant_block_counts() -> None:
    """Cached blocks are often constant; each of their bits flipped gives its own checksum."""
    for fill in (0x00, 0xFF):
        block = bytearray([fill] * 1536)
        seen = {checksum(block)}
        for bit in range(8 * len(block)):
            block[bit // 8] ^= 1 << (bit % 8)
            seen.add(checksum(block))
            block[bit // 8] ^= 1 << (bit % 8)
        assert len(seen) == 8 * len(block) + 1


def test_trailing_zeros_and_length_count() -> None:
    assert len({checksum(bytes(n)) for n in range(100)}) == 100


def test_known_values_stay_as_they_are() -> None:
    """Stored blocks carry these values: a change of the function is a change of format."""
    assert checksum(b"") == 0
    assert checksum(b"FlowPath") == 0x66E93BB0EE99E3B2
    assert checksum(bytes(range(256)) * 5) == 0x519E39CA6A54B9AE
