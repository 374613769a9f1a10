"""Matrix products with fixed weights, on any device."""

import torch
from torch.nn import functional


class Product:
    """``x @ weight.T + bias`` over the last dimension; ``weight`` is (out, in)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product, (rows, out), of (rows, in)."""
        return functional.linear(x, self._weight, self._bias)

    def outputs_from(self, first: int) -> "Product":
        """Return the product that leaves out the first ``first`` outputs; it shares the weights."""
        return Product(self._weight[first:], None if self._bias is None else self._bias[first:])


class Float32Head:
    """The vocabulary's product with float32 results, so that a greedy choice is the model's own."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._transposed = weight.t()
        # The product of 16-bit numbers with float32 results exists on GPUs alone.
        self._is_direct = weight.is_cuda and weight.dtype != torch.float32

    def __call__(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return float32 logits, (rows, vocabulary), of (rows, hidden), in ``out`` if given."""
        if out is None:
            shape = (len(hidden), self._transposed.shape[1])
            out = hidden.new_empty(shape, dtype=torch.float32)
        if self._is_direct:
            torch.ops.aten.mm.dtype_out(hidden, self._transposed, torch.float32, out=out)
        else:
            torch.mm(hidden.float(), self._transposed.float(), out=out)
        return out
