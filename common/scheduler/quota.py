"""How much of the waiting prompts one step computes: a quota of attention time. Pure.

Data-parallel ranks wait for each other after attention. Where each packs prompts up to the same
predicted attention time, instead of the same number of tokens, none waits long (papers 2.8).

Prompts are taken in their order. The first that does not fit gets the largest chunk that does,
found by binary search, and ends the step; what is left of it stays at the head. A step is never
empty while a prompt waits: of its first one so many tokens are computed, whatever they cost.

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


class Allowance:
    """What the prompts of one step may still take of its quota.

    A partial chunk ends on a border of ``block_size`` tokens where it reaches one. The sum of
    predicted times is at most the quota, but for the first ``min_tokens`` tokens.

    Raises ValueError for a quota, block size or minimum that is not positive.
    """

    def __init__(
        self,
        cost: AttentionCost,
        quota_seconds: float = QUOTA_SECONDS,
        *,
        block_size: int = 1,
        min_tokens: int = 1,
    ) -> None:
        if not isfinite(quota_seconds) or quota_seconds <= 0 or min(block_size, min_tokens) < 1:
            raise ValueError(
                f"no quota: {quota_seconds} s in blocks of {block_size}, at least {min_tokens}"
            )
        self._cost = cost
        self._quota_seconds = quota_seconds
        self._used = 0.0
        self._block_size = block_size
        self._min_tokens = min_tokens
        self._is_closed = False

    @property
    def is_spent(self) -> bool:
        """Whether nothing more fits."""
        least = self._cost.chunk_seconds + self._cost.token_seconds
        is_full = self._used > 0 and self._used + least > self._quota_seconds
        return self._is_closed or is_full

    def take(self, prompt: Chunk) -> int:
        """Return how many of a prompt's tokens the step computes, and count them as taken.

        Nothing more fits after fewer than all.
        """
        if self._is_closed:
            return 0
        seconds = self._cost.seconds(prompt)
        if self._used + seconds <= self._quota_seconds:
            self._used += seconds
            return prompt.num_tokens
        self._is_closed = True
        num_tokens = largest_fit(self._cost, prompt, self._quota_seconds - self._used)
        border = num_tokens - (prompt.num_cached + num_tokens) % self._block_size
        num_tokens = border if border > 0 else num_tokens
        least = 0 if self._used else min(self._min_tokens, prompt.num_tokens)
        return max(num_tokens, least)


def pack(
    prompts: Iterable[Chunk],
    cost: AttentionCost,
    quota_seconds: float = QUOTA_SECONDS,
    *,
    block_size: int = 1,
) -> list[Chunk]:
    """Return the chunks of the next step: a prefix of the prompts, the last perhaps in part.

    Each prompt is what is left of it: ``num_tokens`` after ``num_cached``, at least one. A first
    chunk of one token is computed whatever it costs. Raises what ``Allowance`` raises.
    """
    allowance = Allowance(cost, quota_seconds, block_size=block_size)
    chunks: list[Chunk] = []
    for prompt in prompts:
        num_tokens = allowance.take(prompt)
        if num_tokens > 0:
            chunks.append(Chunk(prompt.num_cached, num_tokens))
        if num_tokens < prompt.num_tokens:
            break
    return chunks


def remainder(prompt: Chunk, num_computed: int) -> Chunk:
    """Return what is left of a prompt after so many of its tokens were computed."""
    return Chunk(prompt.num_cached + num_computed, prompt.num_tokens - num_computed)
