"""Drawing tokens from logits, as ``SamplingParams`` say.

Per draw, in this order: logprobs of the model's own distribution; then logit bias, repetition
penalty, presence and frequency penalties, the ban of end tokens before ``min_tokens``,
temperature, top-k, top-p, min-p. Greedy draws take the largest processed logit, the lowest id
among equals. All others invert the cumulative distribution, in token-id order, at one uniform
number that depends on (seed, choice, position) alone.
"""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from common.engine.draws import uniform
from common.engine.interface import SampleSpec
from common.sampling import SampledToken, SamplingParams

Logits = npt.NDArray[np.float32]
Weights = npt.NDArray[np.float64]

NUM_CANDIDATES = 1024
"""How many of the largest weights top-p looks at before it sorts the whole vocabulary."""


def sample(
    logits: torch.Tensor, specs: Sequence[tuple[int, SampleSpec]]
) -> list[SampledToken | None]:
    """Draw one token for each (row of ``logits``, spec), in order.

    ``logits`` is float32 (rows, vocabulary) and is not changed. None stands for a row whose
    logits have no finite maximum: they hold a NaN or an infinity, or a bias made them so.
    """
    if not specs:
        return []
    best = logits.argmax(dim=1)
    is_sound = logits.gather(1, best.unsqueeze(1)).squeeze(1).isfinite().tolist()
    best_ids = best.tolist()
    logprobs = _Logprobs(logits)
    drawn: list[SampledToken | None] = []
    for row, spec in specs:
        if not is_sound[row]:
            drawn.append(None)
            continue
        token_id = best_ids[row] if _is_plain_greedy(spec) else _draw(logits[row], spec)
        drawn.append(None if token_id is None else logprobs.report(row, token_id, spec.params))
    return drawn


class _Logprobs:
    """Natural logarithms of the model's own probabilities, for the rows that ask."""

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits
        self._rows: dict[int, torch.Tensor] = {}

    def report(self, row: int, token_id: int, params: SamplingParams) -> SampledToken:
        count = params.num_logprobs
        if count is None:
            return SampledToken(token_id)
        if row not in self._rows:
            self._rows[row] = self._logits[row].log_softmax(dim=0)
        values = self._rows[row]
        return SampledToken(token_id, float(values[token_id]), _best(values, count))


def _best(values: torch.Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """Return the ``count`` largest as (id, value), best first, the lower id among equals."""
    count = min(count, len(values))
    if count == 0:
        return ()
    threshold = values.topk(count).values[-1]
    ids = (values >= threshold).nonzero().squeeze(1)
    found = zip(ids.tolist(), values[ids].tolist(), strict=True)
    return tuple(sorted(found, key=lambda pair: (-pair[1], pair[0]))[:count])


def _is_plain_greedy(spec: SampleSpec) -> bool:
    """Tell whether the draw is the raw logits' maximum."""
    params = spec.params
    return (
        params.temperature == 0.0
        and not params.logit_bias
        and not params.has_penalties
        and spec.position >= params.min_tokens
    )


def _draw(raw: torch.Tensor, spec: SampleSpec) -> int | None:
    params = spec.params
    scores = _process(raw.numpy().copy(), spec)
    best = int(scores.argmax())
    if not math.isfinite(scores[best]):
        return None
    if params.temperature == 0.0:
        return best
    weights = np.exp((scores.astype(np.float64) - float(scores[best])) / params.temperature)
    weights = _filter(weights, params)
    position = spec.position
    return _invert(weights, uniform(params.seed, spec.choice, position))


def _process(scores: Logits, spec: SampleSpec) -> Logits:
    """Apply in place everything that comes before the temperature."""
    params, size = spec.params, len(scores)
    for token_id, bias in params.logit_bias.items():
        if 0 <= token_id < size and math.isfinite(bias):
            scores[token_id] += np.float32(bias)
    if params.repetition_penalty != 1.0:
        seen = _known_ids({*spec.prompt_token_ids, *spec.output_token_ids}, size)
        found = scores[seen]
        penalty = np.float32(params.repetition_penalty)
        scores[seen] = np.where(found < 0, found * penalty, found / penalty)
    if params.presence_penalty or params.frequency_penalty:
        counts = Counter(spec.output_token_ids)
        seen = _known_ids(counts, size)
        times = np.array([counts[int(token_id)] for token_id in seen], dtype=np.float32)
        scores[seen] -= params.frequency_penalty * times + np.float32(params.presence_penalty)
    if spec.position < params.min_tokens:
        scores[_known_ids({*params.eos_token_ids, *params.stop_token_ids}, size)] = -np.inf
    return scores


def _known_ids(ids: set[int] | Counter[int], size: int) -> npt.NDArray[np.int64]:
    return np.array([i for i in ids if 0 <= i < size], dtype=np.int64)


def _filter(weights: Weights, params: SamplingParams) -> Weights:
    """Set to 0 what top-k, top-p and min-p leave out; tokens that tie with a kept one stay."""
    size = len(weights)
    if 0 < params.top_k < size:
        threshold = np.partition(weights, size - params.top_k)[size - params.top_k]
        weights = np.where(weights >= threshold, weights, 0.0)
    if params.top_p < 1.0:
        weights = np.where(weights >= _top_p_threshold(weights, params.top_p), weights, 0.0)
    if params.min_p > 0.0:
        # The largest weight is exp(0).
        weights = np.where(weights >= params.min_p, weights, 0.0)
    return weights


def _top_p_threshold(weights: Weights, top_p: float) -> float:
    """Return the smallest weight of the fewest largest ones that hold ``top_p`` of the sum."""
    wanted = top_p * float(weights.sum())
    for count in (min(NUM_CANDIDATES, len(weights)), len(weights)):
        largest = np.sort(np.partition(weights, len(weights) - count)[len(weights) - count :])[::-1]
        held = np.cumsum(largest)
        if held[-1] >= wanted:
            return float(largest[np.searchsorted(held, wanted)])
    return 0.0  # the sums differ in their last bit: all of it is wanted


def _invert(weights: Weights, at: float) -> int:
    """Return the first id whose cumulative weight exceeds ``at`` of the sum."""
    cumulative = np.cumsum(weights)
    found = int(np.searchsorted(cumulative, at * cumulative[-1], side="right"))
    # Rounding can reach the sum itself: then it is the last token that has any weight.
    return min(found, int(np.searchsorted(cumulative, cumulative[-1])))
