"""How much of the waiting prompts one step computes: a quota of attention time. Pure.

Data-parallel ranks wait for each other after attention. Where each packs prompts up to the same
predicted attention time, instead of the same number of tokens, none waits long (papers 2.8).

Prompts are taken in their order. The first that does not fit gets the largest chunk that does,
found by binary search, and ends the step; what is left of it stays at the head. A step is never
empty while a prompt waits: where not even one token fits, one token is computed.

The published pseudo code counts a quota in TFLOPS, which is a rate and no amount; its search
returns the first size that does *not* fit, it forgets the remainder, and it may return nothing at
all. Here the quota is in seconds, and the search returns the largest size that fits.
"""

from collections.abc import Iterable
from math import isfinite

from common.scheduler.attention_cost import AttentionCost, Chunk

QUOTA_SECONDS = 0.3
"""The paper's quota."""


def largest_fit(cost: AttentionCost, prompt: Chunk, seconds: float) -> int:
    """Return the most tokens, up to the prompt's, whose attention takes at most ``seconds``."""
    low, high = 0, prompt.num_tokens
    while low < high:
        middle = (low + high + 1) // 2
        if cost.seconds(Chunk(prompt.num_cached, middle)) <= seconds:
            low = middle
        else:
            high = middle - 1
    return low


def pack(
    prompts: Iterable[Chunk],
    cost: AttentionCost,
    quota_seconds: float = QUOTA_SECONDS,
    *,
    block_size: int = 1,
) -> list[Chunk]:
    """Return the chunks of the next step: a prefix of the prompts, the last perhaps in part.

    Each prompt is what is left of it: ``num_tokens`` after ``num_cached``, at least one. A partial
    chunk ends on a border of ``block_size`` tokens where it reaches one. The sum of predicted times
    is at most the quota, but for a first chunk of one token, which is computed whatever it costs.

    Raises ValueError for a quota or block size that is not positive.
    """
    if not isfinite(quota_seconds) or quota_seconds <= 0 or block_size < 1:
        raise ValueError(f"no quota: {quota_seconds} s in blocks of {block_size}")
    used = 0.0
    chunks: list[Chunk] = []
    for prompt in prompts:
        seconds = cost.seconds(prompt)
        if used + seconds <= quota_seconds:
            chunks.append(prompt)
            used += seconds
            continue
        num_tokens = largest_fit(cost, prompt, quota_seconds - used)
        border = num_tokens - (prompt.num_cached + num_tokens) % block_size
        num_tokens = border if border > 0 else num_tokens
        if num_tokens == 0 and not chunks:
            num_tokens = 1
        if num_tokens > 0:
            chunks.append(Chunk(prompt.num_cached, num_tokens))
        break
    return chunks


def remainder(prompt: Chunk, num_computed: int) -> Chunk:
    """Return what is left of a prompt after so many of its tokens were computed."""
    return Chunk(prompt.num_cached + num_computed, prompt.num_tokens - num_computed)
