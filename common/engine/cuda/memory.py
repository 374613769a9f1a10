"""How much device memory an engine takes beside its weights and its pool."""

from common.engine.cuda.sampler import ROWS_AT_ONCE
from common.kv.layout import ELEMENT_BYTES
from common.models.config import ModelConfig

MIN_FLOAT_WORKSPACE = 128 * 2**20
INT_WORKSPACE = 8 * 2**20
NUM_INT_WORKSPACES = 5
"""Per kind of window: decodes, fresh prompts, later chunks, last tokens, graphs."""

LIBRARY_BYTES = 512 * 2**20
"""Workspaces of the matrix products, compiled modules, graphs, and what allocation wastes."""

SAMPLER_BYTES_PER_LOGIT = 64
"""Copies, float64 weights and their sums, sorted values with their ids, and the sort's own room."""

DECODE_TILES = (16, 128)
"""Query rows of one tile in a decode: for groups of at most 16 heads, and for more."""

CHUNK_TILE = 128
"""Query rows of one tile in a later chunk, at most."""

MAX_SPLIT_TILES = 512
"""More tiles than any GPU runs at a time, over all KV heads."""


def float_workspace_bytes(
    config: ModelConfig, max_num_seqs: int, kv_cache_dtype: str = "auto"
) -> int:
    """Return the room for partial results of attention that is split over its context.

    A graph of n sequences has up to n tiles for each of them and n * group / tile more, in every
    head, each with (head_dim + 1) float32 numbers a row. Over a quantised pool later chunks are
    split as well, as long as there are fewer tiles than run at a time.
    """
    group = config.num_heads // config.num_kv_heads
    tile = DECODE_TILES[0] if group <= DECODE_TILES[0] else DECODE_TILES[1]
    tiles = max_num_seqs + -(-max_num_seqs * group // tile)
    tiles = max(tiles, MAX_SPLIT_TILES // config.num_kv_heads)
    row_bytes = (config.head_dim + 1) * 4
    num_rows = tiles * tile
    if kv_cache_dtype != "auto":
        num_rows = max(num_rows, MAX_SPLIT_TILES // config.num_kv_heads * CHUNK_TILE)
    return max(MIN_FLOAT_WORKSPACE, config.num_heads * num_rows * row_bytes)


def activation_bytes(
    config: ModelConfig,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    dtype: str,
    kv_cache_dtype: str = "auto",
) -> int:
    """Return a bound on the bytes that steps need beside weights and pool.

    At the widest point of a layer a token holds its residual, its hidden state, gate and up, and
    their product; or its residual, hidden state, q, k, v and attended values. Captured graphs have
    activations of their own for ``max_num_seqs`` tokens.
    """
    element = ELEMENT_BYTES[dtype]
    mlp = 2 * config.hidden_size + 3 * config.intermediate_size
    attention = 3 * config.hidden_size + 2 * config.q_size + 2 * config.kv_size
    tokens = max_num_batched_tokens + 2 * max_num_seqs
    activations = tokens * max(mlp, attention) * element
    logits = 2 * max_num_seqs * config.vocab_size * 4
    sampler = min(ROWS_AT_ONCE, max_num_seqs) * config.vocab_size * SAMPLER_BYTES_PER_LOGIT
    rotary = config.max_model_len * config.head_dim * 4
    num_windows = len(set(config.layer_windows))
    workspaces = float_workspace_bytes(config, max_num_seqs, kv_cache_dtype)
    workspaces += num_windows * NUM_INT_WORKSPACES * INT_WORKSPACE
    return activations * 5 // 4 + logits + sampler + rotary + workspaces + LIBRARY_BYTES
