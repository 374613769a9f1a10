"""Packed products equal plain ones."""

import pytest
import torch
from torch.nn import functional

from common.engine import linear
from common.engine.linear import Linear, can_pack

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 64, 96), (8, 577, 100), (70, 48, 1)])
def test_packed_and_plain_products_agree(
    dtype: torch.dtype, has_bias: bool, rows: int, inputs: int, outputs: int
) -> None:
    if not can_pack(dtype):
        pytest.skip(f"this torch or processor packs no {dtype}")
    torch.manual_seed(0)
    weight, x = torch.randn(outputs, inputs).to(dtype), torch.randn(rows, inputs).to(dtype)
    bias = torch.randn(outputs).to(dtype) if has_bias else None

    product = Linear(weight, bias)

    assert product.is_packed
    expected = functional.linear(
        x.double(), weight.double(), None if bias is None else bias.double()
    )
    tolerance = 1e-4 if dtype is torch.float32 else 0.15
    torch.testing.assert_close(product(x).double(), expected, rtol=0.01, atol=tolerance)


def test_a_build_without_packing_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(30, 20), torch.randn(30), torch.randn(3, 20)
    packed = Linear(weight, bias)(x)
    monkeypatch.setattr(linear, "can_pack", lambda dtype: False)
    plain = Linear(weight, bias)
    assert not plain.is_packed
    torch.testing.assert_close(plain(x), packed, rtol=1e-5, atol=1e-5)


def test_a_build_that_lacks_the_operators_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(weight: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(linear, "_pack", refuse)
    assert not can_pack.__wrapped__(torch.float32)
