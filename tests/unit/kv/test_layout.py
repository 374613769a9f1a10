"""What a block holds and where."""

from dataclasses import replace

import pytest

from common.kv.layout import KVLayout

PLAIN = KVLayout(32, 64, 8, 128, "bfloat16")
QUANTISED = replace(PLAIN, kv_cache_dtype="float8_e4m3")


def test_a_block_of_the_models_own_type_is_all_numbers() -> None:
    assert PLAIN.payload_bytes == PLAIN.block_bytes == 8 * 2**20
    assert (PLAIN.element_dtype, PLAIN.scales) == ("bfloat16", ())


def test_a_quantised_block_ends_with_its_scales_inside_the_stride() -> None:
    assert (QUANTISED.element_dtype, QUANTISED.element_bytes) == ("float8_e4m3", 1)
    assert QUANTISED.payload_bytes == QUANTISED.trailer_offset == 4 * 2**20
    assert QUANTISED.block_bytes == 4 * 2**20 + 4096
    assert QUANTISED.scales == (1.0,) * 64


@pytest.mark.parametrize("block_size", [1, 8, 64])
@pytest.mark.parametrize("head_dim", [6, 64, 80])
@pytest.mark.parametrize("num_layers", [1, 3, 600])
def test_the_trailer_is_aligned_and_fits(num_layers: int, head_dim: int, block_size: int) -> None:
    layout = KVLayout(num_layers, block_size, 1, head_dim, "float16", 2, "float8_e4m3")
    assert layout.trailer_offset % 16 == 0
    assert 0 <= layout.trailer_offset - layout.payload_bytes < 16
    end = layout.trailer_offset + 8 * num_layers
    assert layout.block_bytes % 4096 == 0
    assert 0 <= layout.block_bytes - end < 4096


def test_scales_are_in_the_order_of_layers_and_planes() -> None:
    layout = KVLayout(2, 16, 1, 64, "float16", 2, "float8_e4m3", (1.0, 2.0, 3.0, 4.0))
    assert layout.scales_of(0) == (1.0, 2.0)
    assert layout.scales_of(1) == (3.0, 4.0)


def test_pools_whose_blocks_mean_something_else_have_other_fingerprints() -> None:
    ones = replace(QUANTISED, scales=(1.0,) * 64)
    assert ones.fingerprint() == QUANTISED.fingerprint()
    layouts = [
        PLAIN,
        QUANTISED,
        replace(QUANTISED, dtype="float16"),
        replace(QUANTISED, scales=(2.0, *QUANTISED.scales[1:])),
        replace(QUANTISED, scales=(*QUANTISED.scales[1:], 2.0)),
    ]
    assert len({layout.fingerprint() for layout in layouts}) == len(layouts)


def test_the_option_changes_no_other_pools_fingerprint() -> None:
    assert PLAIN.fingerprint() == "8ffc5d8b1fd32481"


@pytest.mark.parametrize(
    ("dtype", "scales", "message"),
    [
        ("int8", (), "no KV cache of int8"),
        ("auto", (1.0,), "numbers of bfloat16 have no scales"),
        ("float8_e4m3", (1.0,), "1 scales are not one a layer and plane, 64"),
        ("float8_e4m3", (0.0,) * 64, "0.0 is no scale"),
        ("float8_e4m3", (float("nan"),) * 64, "nan is no scale"),
        ("float8_e4m3", (float("inf"),) * 64, "inf is no scale"),
    ],
)
def test_what_no_block_can_be_is_refused(
    dtype: str, scales: tuple[float, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        KVLayout(32, 64, 8, 128, "bfloat16", 2, dtype, scales)
