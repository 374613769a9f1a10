"""How many floating-point operations a model's step takes. Pure.

Counted are the matrix products of the model's own mathematics, a multiplication and an addition as
two operations, for what a step has to bring forth: K and V of each of its tokens in every layer,
and the logits of each token after which one is drawn.

::

    a layer, of a token       2 x hidden x (q + 2 kv)         queries, keys, values
                              2 x q x hidden                  output
                              2 x 3 x hidden x intermediate   gate, up, down
    a layer, of a pair        4 x q                           query with key, weight with value
    the head, of a drawn one  2 x hidden x vocabulary

A pair is a token and a position that it sees: itself, all before it, within the layer's window. Of
the last layer a token that nothing is drawn after needs its K and V only.

Not counted: norms, rotations, softmax, activations, biases, look-ups of embeddings and draws, which
are a few thousandths; and whatever an engine computes beyond need, such as padding.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

from common.models.config import ModelConfig


class ComputedRow(Protocol):
    """Tokens of one sequence that a step computes together."""

    @property
    def start(self) -> int:
        """Position of the first; K and V of earlier ones are there."""
        ...

    @property
    def num_tokens(self) -> int:
        """How many, one after the other."""
        ...

    @property
    def is_last(self) -> bool:
        """Whether tokens are drawn after the last one; however many, its logits are one row."""
        ...


def step_flops(config: ModelConfig, rows: Iterable[ComputedRow]) -> int:
    """Return the operations of one step of the whole model, however many devices share it."""
    *inner, last = config.layer_windows
    spans = [(row.start, row.num_tokens, row.is_last) for row in rows]
    num_tokens = sum(count for _, count, _ in spans)
    seen = [start + count for start, count, is_last in spans if is_last]
    num_draws, last_pairs = len(seen), sum(seen if last is None else (min(n, last) for n in seen))
    inner_pairs = sum(
        num_layers * _all_pairs(spans, window) for window, num_layers in Counter(inner).items()
    )
    hidden = config.hidden_size
    key_value = 2 * hidden * 2 * config.kv_size
    query_output = 2 * 2 * hidden * config.q_size
    mlp = 2 * 3 * hidden * config.intermediate_size
    of_tokens = num_tokens * (len(inner) * (key_value + query_output + mlp) + key_value)
    of_draws = num_draws * (query_output + mlp + 2 * hidden * config.vocab_size)
    return of_tokens + of_draws + 4 * config.q_size * (inner_pairs + last_pairs)


def _all_pairs(spans: Sequence[tuple[int, int, bool]], window: int | None) -> int:
    if window is None:  # told apart, since steps have hundreds of rows and models no windows
        return sum(count * (2 * start + count + 1) for start, count, _ in spans) // 2
    return sum(num_pairs(start, count, window) for start, count, _ in spans)


def num_pairs(start: int, count: int, window: int | None) -> int:
    """Return how many positions ``count`` tokens from ``start`` on see, all together."""
    within = count if window is None else min(max(window - start, 0), count)
    pairs = within * start + within * (within + 1) // 2
    return pairs if window is None else pairs + (count - within) * window
