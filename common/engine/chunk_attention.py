"""Attention of a prefill chunk over its whole context, by gathered keys and values."""

import torch
from torch.nn.functional import scaled_dot_product_attention

MAX_QUERIES = 256
"""Queries of one masked call: the mask of a chunk with a prefix is (queries, keys)."""


class ChunkAttention:
    """Causal attention in which the last query sees the last key (lower right).

    Masks are kept between layers of a step: all have one shape, a triangle at the right end, so
    that a narrower one is the right end of a wider one.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._causal = torch.empty((MAX_QUERIES, 0), dtype=dtype)
        self._windowed: dict[int, torch.Tensor] = {}
        self._dtype = dtype

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        """Return (queries, heads, dim) of queries of that shape and (keys, kv_heads, dim) K and V.

        ``window`` is how many positions a query sees, itself included.
        """
        num_queries, num_keys = len(query), len(key)
        if window is not None and window >= num_keys:
            window = None
        if num_queries == num_keys and window is None:
            return _attend(query, key, value, mask=None)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        for first in range(0, num_queries, MAX_QUERIES):
            last = min(first + MAX_QUERIES, num_queries)
            end = num_keys - num_queries + last
            begin = 0 if window is None else max(0, end - (last - first) - window + 1)
            mask = self._mask(last - first, end - begin, window)
            out[first:last] = _attend(query[first:last], key[begin:end], value[begin:end], mask)
        return out

    def _mask(self, num_queries: int, num_keys: int, window: int | None) -> torch.Tensor:
        """Return the additive mask of queries whose last one sees the last key."""
        width = num_keys - num_queries + MAX_QUERIES
        if window is None:
            if self._causal.shape[1] < width:
                self._causal = self._make(width, None)
            mask = self._causal
        else:
            if window not in self._windowed:
                self._windowed[window] = self._make(MAX_QUERIES + window - 1, window)
            mask = self._windowed[window]
        # Rows from the bottom, columns from the right end: both ends stay aligned.
        return mask[MAX_QUERIES - num_queries :, mask.shape[1] - num_keys :]

    def _make(self, width: int, window: int | None) -> torch.Tensor:
        query = torch.arange(width - MAX_QUERIES, width).unsqueeze(1)
        key = torch.arange(width).unsqueeze(0)
        is_hidden = key > query
        if window is not None:
            is_hidden |= key <= query - window
        mask = torch.zeros((MAX_QUERIES, width), dtype=self._dtype)
        return mask.masked_fill_(is_hidden, float("-inf"))


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
    has_groups = query.shape[1] != key.shape[1]
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=has_groups
    )
    return out.squeeze(0).transpose(0, 1)
