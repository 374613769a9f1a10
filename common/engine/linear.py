"""A matrix product with fixed weights, which are laid out once for the processor."""

import functools

import torch
from torch.nn import functional

TYPICAL_ROWS = 8
"""Rows of the product that the layout is chosen for: a layout for 8 serves 1 and 1024 as well, and
float32 products of a few rows take half the time that they take in a layout for 1."""


class Linear:
    """``x @ weight.T + bias`` over the last dimension.

    ``weight`` is (out, in); it is re-laid into the processor's own order where torch can do so,
    and the given tensor is not kept then.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features = weight.shape[0]
        self._bias = bias
        self.is_packed = can_pack(weight.dtype)
        self._weight = _pack(weight) if self.is_packed else weight.contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product, (rows, out), of (rows, in)."""
        if self.is_packed:
            return _multiply_packed(x, self._weight, self._bias)
        return functional.linear(x, self._weight, self._bias)


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(  # noqa: SLF001
        weight.contiguous(), TYPICAL_ROWS
    )
    return packed


def _multiply_packed(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    product: torch.Tensor = _linear_pointwise()(x, packed, bias, "none", [], "")
    return product


@functools.cache
def _linear_pointwise() -> torch._ops.OpOverload:
    # The overload itself: resolving it from the packet costs microseconds in every call.
    overload: torch._ops.OpOverload = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001
    return overload


@functools.cache
def can_pack(dtype: torch.dtype) -> bool:
    """Tell whether this torch and processor have packed products of the type, by trying one.

    The operators are not part of torch's public interface, so any build may lack them.
    """
    try:
        weight = torch.eye(16, dtype=dtype)
        product = _multiply_packed(weight[:2].contiguous(), _pack(weight), None)
    except (RuntimeError, AttributeError):
        return False
    return torch.equal(product, weight[:2])
