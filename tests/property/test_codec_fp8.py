"""What the FP8 codec loses is bounded, once and for all."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.kv.layout import PAGE_BYTES, KVLayout
from common.storage.codec_fp8 import Fp8Codec

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LAYOUTS = [
    KVLayout(2, 4, 3, 8, "float32"),
    KVLayout(3, 4, 1, 10, "bfloat16", planes=1),
    KVLayout(1, 64, 3, 256, "float16"),
]
EXAMPLES = settings(max_examples=60, deadline=None, derandomize=True)


def numbers_of(block: bytearray, layout: KVLayout) -> torch.Tensor:
    """Return a block's numbers in place: (planes of all layers, block_size, kv_heads, head_dim)."""
    shape = (layout.num_layers * layout.planes, layout.block_size, layout.num_kv_heads, -1)
    count = layout.payload_bytes // layout.element_bytes
    return torch.frombuffer(block, dtype=TYPES[layout.dtype], count=count).view(shape)


def scales_of(encoded: bytearray, layout: KVLayout) -> torch.Tensor:
    count = layout.payload_bytes // layout.element_bytes
    groups = (layout.num_layers * layout.planes, layout.num_kv_heads)
    offset = -(-count // 16) * 16
    scales = torch.frombuffer(
        encoded, dtype=torch.float32, offset=offset, count=groups[0] * groups[1]
    )
    return scales.view(groups)[:, None, :, None]


def random_block(layout: KVLayout, seed: int, exponent: int, spread: int) -> bytearray:
    """Return numbers of about 2**exponent, some of them down to 2**(exponent - spread)."""
    random = np.random.default_rng(seed)
    block = bytearray(random.bytes(layout.block_bytes))
    numbers = numbers_of(block, layout)
    wide = random.standard_normal(numbers.shape) * 2.0 ** random.uniform(
        exponent - spread, exponent, numbers.shape
    )
    limit = 60000.0 if layout.dtype == "float16" else 2e38
    numbers.copy_(torch.from_numpy(wide.clip(-limit, limit)))
    return block


def encoded_of(block: bytearray, codec: Fp8Codec) -> bytearray:
    encoded = bytearray(b"\x55" * codec.encoded_bytes)
    assert codec.try_encode(block, encoded)
    return encoded


def decoded_of(encoded: bytearray, codec: Fp8Codec) -> bytearray:
    block = bytearray(b"\x55" * codec.block_bytes)
    codec.decode(encoded, block)
    return block


cases = (
    st.sampled_from(LAYOUTS),
    st.integers(0, 2**32 - 1),
    st.integers(-140, 127) | st.integers(-12, 12),
    st.sampled_from([0, 4, 20, 60]),
)


@EXAMPLES
@given(*cases)
def test_every_number_is_off_by_half_a_unit_of_e4m3_at_most(
    layout: KVLayout, seed: int, exponent: int, spread: int
) -> None:
    codec = Fp8Codec(layout)
    block = random_block(layout, seed, exponent, spread)
    encoded = encoded_of(block, codec)
    scales = scales_of(encoded, layout).double()
    before = numbers_of(block, layout).double()
    after = numbers_of(decoded_of(encoded, codec), layout).double()
    # Numbers of four binary digits, of which the least normal one is 2**-6 of the scale.
    bound = torch.maximum(before.abs() / 16, scales * 2**-10)
    assert ((after - before).abs() <= bound).all()
    assert (before.abs() <= 448 * scales).all()
    assert (torch.frexp(scales).mantissa == 0.5).all(), "scales are powers of two"


@EXAMPLES
@given(*cases)
def test_what_was_decoded_is_not_changed_by_being_encoded_again(
    layout: KVLayout, seed: int, exponent: int, spread: int
) -> None:
    codec = Fp8Codec(layout)
    once = decoded_of(encoded_of(random_block(layout, seed, exponent, spread), codec), codec)
    assert decoded_of(encoded_of(once, codec), codec) == once
    assert not any(once[layout.payload_bytes :]), "padding is zeros"


@EXAMPLES
@given(*cases)
def test_the_reported_error_is_the_one_that_decoding_leaves(
    layout: KVLayout, seed: int, exponent: int, spread: int
) -> None:
    codec = Fp8Codec(layout)
    block = random_block(layout, seed, exponent, spread)
    encoded = encoded_of(block, codec)
    error = codec.error(block, encoded)
    before = numbers_of(block, layout).double()
    after = numbers_of(decoded_of(encoded, codec), layout).double()
    if not before.any():
        assert (error.rms, error.greatest) == (0, 0)
        return
    difference = (after - before).flatten()
    assert error.rms == pytest.approx(float(difference.norm() / before.norm()), rel=1e-3, abs=1e-9)
    greatest = float(difference.abs().max() / before.abs().max())
    assert error.greatest == pytest.approx(greatest, rel=1e-3, abs=1e-9)
    if exponent > -100:  # the least scales of all are greater than their numbers need
        assert error.greatest <= 1 / 16


@pytest.mark.parametrize("layout", LAYOUTS)
def test_zeros_of_both_signs_stay_what_they_are(layout: KVLayout) -> None:
    codec = Fp8Codec(layout)
    block = bytearray(layout.block_bytes)
    numbers_of(block, layout)[::2] = -0.0
    encoded = encoded_of(block, codec)
    assert decoded_of(encoded, codec) == block
    assert codec.error(block, encoded).rms == 0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_a_block_with_a_number_that_is_not_finite_is_not_encoded(
    layout: KVLayout, number: float
) -> None:
    block = random_block(layout, 0, 0, 4)
    numbers_of(block, layout)[-1, -1, 0, 3] = number
    codec = Fp8Codec(layout)
    assert not codec.try_encode(block, bytearray(codec.encoded_bytes))


@pytest.mark.parametrize(
    ("layout", "greatest"), [(LAYOUTS[0], 2.0**127), (LAYOUTS[1], 2.0**127), (LAYOUTS[2], 61440.0)]
)
def test_numbers_up_to_the_types_own_bound_stay_finite(layout: KVLayout, greatest: float) -> None:
    codec = Fp8Codec(layout)
    block = random_block(layout, 0, 0, 4)
    numbers = numbers_of(block, layout)
    numbers[0, 0, 0, 0] = greatest
    assert numbers_of(decoded_of(encoded_of(block, codec), codec), layout).isfinite().all()
    numbers[0, 0, 0, 0] = torch.finfo(numbers.dtype).max  # would be rounded up to infinity
    assert not codec.try_encode(block, bytearray(codec.encoded_bytes))


def test_memory_that_can_only_be_read_is_encoded_too() -> None:
    layout = LAYOUTS[0]
    codec = Fp8Codec(layout)
    block = random_block(layout, 1, 0, 4)
    encoded = bytearray(codec.encoded_bytes)
    assert codec.try_encode(bytes(block), encoded)
    assert encoded == encoded_of(block, codec)


def test_an_encoded_block_is_half_of_16_bit_numbers_with_a_page_for_its_scales() -> None:
    layout = KVLayout(32, 64, 8, 128, "bfloat16")
    assert Fp8Codec(layout).encoded_bytes == layout.block_bytes // 2 + PAGE_BYTES


def test_a_quantised_layout_has_no_codec() -> None:
    with pytest.raises(ValueError, match="float8_e4m3"):
        Fp8Codec(KVLayout(2, 4, 3, 8, "bfloat16", kv_cache_dtype="float8_e4m3"))
