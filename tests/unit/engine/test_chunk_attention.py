"""Attention of a chunk over its context, with and without a window, against the definition."""

import pytest
import torch

from common.engine.chunk_attention import MAX_QUERIES, ChunkAttention


def reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None
) -> torch.Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = (part.double().repeat_interleave(group, dim=1) for part in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * query.shape[2] ** -0.5
    position = torch.arange(len(query)).unsqueeze(1) + len(key) - len(query)
    other = torch.arange(len(key)).unsqueeze(0)
    is_hidden = other > position
    if window is not None:
        is_hidden |= other <= position - window
    weights = scores.masked_fill(is_hidden, float("-inf")).softmax(dim=2)
    return torch.einsum("hqk,khd->qhd", weights, value)


@pytest.mark.parametrize("window", [None, 1, 7, MAX_QUERIES, 5000])
def test_chunks_of_any_shape_follow_the_definition(window: int | None) -> None:
    torch.manual_seed(0)
    attend = ChunkAttention(torch.float32)  # one object for all: masks are shared between calls
    for num_queries, num_keys in [
        (5, 5),
        (MAX_QUERIES + 9, MAX_QUERIES + 9),
        (5, 300),
        (2 * MAX_QUERIES, 900),
        (MAX_QUERIES + 1, MAX_QUERIES + 2),
        (40, 41),
    ]:
        query = torch.randn(num_queries, 4, 16)
        key, value = torch.randn(2, num_keys, 2, 16).unbind(0)
        expected = reference(query, key, value, window)
        actual = attend(query, key, value, window).double()
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
