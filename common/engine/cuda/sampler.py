"""Drawing tokens on the device, as ``common.engine.sampler`` describes, without waiting for it.

Greedy draws of the raw logits are their maximum. All others are computed together, some rows at a
time, in float64 as on the CPU. Nothing here waits: what the device finds is copied to the host
behind it and read when the step is collected.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from common.engine.cuda.draws import DrawTable, Entries, is_plain_greedy, tabulate
from common.engine.cuda.upload import Array, upload
from common.engine.interface import SampleSpec
from common.sampling import SampledToken

ROWS_AT_ONCE = 64
"""Rows whose whole distributions are in memory at a time."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One draw from row ``row`` of a step's logits."""

    row: int
    spec: SampleSpec


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of the draws ``places``: the token's own logprob, (draws), and the best, (draws, count)."""

    places: tuple[int, ...]
    own: torch.Tensor
    top_ids: torch.Tensor
    top_values: torch.Tensor


@dataclass(frozen=True, slots=True)
class Drawn:
    """A step's tokens, on one side: ``ids`` int64 and ``scores`` float32, one a draw.

    A draw whose score is not finite has no token.
    """

    ids: torch.Tensor
    scores: torch.Tensor
    logprobs: Logprobs | None = None

    def to_host(self) -> "Drawn":
        """Enqueue copies to host memory; they are there when the stream has come so far."""
        logprobs = self.logprobs
        if logprobs is not None:
            logprobs = Logprobs(
                logprobs.places,
                to_host(logprobs.own),
                to_host(logprobs.top_ids),
                to_host(logprobs.top_values),
            )
        return Drawn(to_host(self.ids), to_host(self.scores), logprobs)

    def tokens(self, draws: Sequence[Draw]) -> list[SampledToken | None]:
        """Return each draw's token, None where the logits were no numbers; for the host's side."""
        is_sound = self.scores.isfinite().tolist()
        ids = self.ids.tolist()
        tokens: list[SampledToken | None] = [
            SampledToken(token_id) if is_good else None
            for token_id, is_good in zip(ids, is_sound, strict=True)
        ]
        if self.logprobs is None:
            return tokens
        own, top_ids = self.logprobs.own.tolist(), self.logprobs.top_ids.tolist()
        top_values = self.logprobs.top_values.tolist()
        for at, place in enumerate(self.logprobs.places):
            if tokens[place] is not None:
                count = draws[place].spec.params.num_logprobs
                top = tuple(zip(top_ids[at][:count], top_values[at][:count], strict=True))
                tokens[place] = SampledToken(ids[place], own[at], top)
        return tokens


def is_plain(draws: Sequence[Draw], num_rows: int) -> bool:
    """Tell whether the draws are one raw maximum of each row, in order, and nothing more."""
    return len(draws) == num_rows and all(
        draw.spec.params.num_logprobs is None and is_plain_greedy(draw.spec) for draw in draws
    )


class DeviceSampler:
    """Draws from logits of one vocabulary on one device."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device

    def draw(
        self, logits: torch.Tensor, best: tuple[torch.Tensor, torch.Tensor], draws: Sequence[Draw]
    ) -> Drawn:
        """Draw one token for each of ``draws``.

        ``logits`` is float32 (rows, vocabulary) and is not changed; ``best`` are each row's largest
        (values, ids), the lowest id among equals, a NaN where the row has one.
        """
        (rows,) = self._upload(np.fromiter((draw.row for draw in draws), np.int64, len(draws)))
        scores, ids = best[0][rows], best[1][rows]
        special = [at for at, draw in enumerate(draws) if not is_plain_greedy(draw.spec)]
        for first in range(0, len(special), ROWS_AT_ONCE):
            part = special[first : first + ROWS_AT_ONCE]
            table = tabulate([draws[at].spec for at in part], self._vocab_size)
            (places,) = self._upload(np.array(part, np.int64))
            raw = logits[rows[places]]
            part_scores, part_ids = self._draw_part(raw, table)
            # A row that was no number before bias and bans has no token either.
            is_sound = scores[places].isfinite()
            scores[places] = torch.where(is_sound, part_scores, torch.nan)
            ids[places] = part_ids
        return Drawn(ids, scores, self._logprobs(logits, rows, ids, draws))

    def _draw_part(
        self, scores: torch.Tensor, table: DrawTable
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (largest processed scores, ids); changes ``scores``."""
        self._process(scores, table)
        best, best_ids = scores.max(dim=1)
        if table.is_all_greedy:
            return best, best_ids
        (numbers,) = self._upload(table.numbers.reshape(-1))
        at, temperature, top_k, top_p, min_p = numbers.view(len(scores), -1).unsqueeze(2).unbind(1)
        is_greedy = temperature == 0.0
        temperature = temperature.masked_fill(is_greedy, 1.0)
        if table.numbers[:, 2].any():
            largest = min(int(table.numbers[:, 2].max()), self._vocab_size)
            _keep_top_k(scores, top_k, largest)
        weights = _weights(scores, best, temperature)
        if (table.numbers[:, 3] < 1.0).any():
            threshold = _top_p_threshold(scores, best, temperature, top_p)
            weights.masked_fill_(scores < threshold, 0.0)
        if table.numbers[:, 4].any():
            weights.masked_fill_(weights < min_p, 0.0)
        ids = _invert(weights, at)
        return best, torch.where(is_greedy.squeeze(1), best_ids, ids)

    def _process(self, scores: torch.Tensor, table: DrawTable) -> None:
        """Apply in place everything that comes before the temperature."""
        for entries, kind in (
            (table.bias, "bias"),
            (table.repetition, "repetition"),
            (table.penalties, "penalties"),
            (table.banned, "banned"),
        ):
            if not len(entries.rows):
                continue
            rows, ids, values = self._upload_entries(entries)
            found = scores[rows, ids]
            if kind == "bias":
                found = found + values
            elif kind == "repetition":
                found = torch.where(found < 0, found * values, found / values)
            elif kind == "penalties":
                found = found - values
            else:
                found = torch.full_like(found, -torch.inf)
            scores[rows, ids] = found

    def _logprobs(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        ids: torch.Tensor,
        draws: Sequence[Draw],
    ) -> Logprobs | None:
        wanted = [at for at, draw in enumerate(draws) if draw.spec.params.num_logprobs is not None]
        if not wanted:
            return None
        count = max(draws[at].spec.params.num_logprobs or 0 for at in wanted)
        count = min(count, self._vocab_size)
        own, top_ids, top_values = [], [], []
        for first in range(0, len(wanted), ROWS_AT_ONCE):
            (places,) = self._upload(np.array(wanted[first : first + ROWS_AT_ONCE], np.int64))
            values = logits[rows[places]].log_softmax(dim=1)
            own.append(values.gather(1, ids[places].unsqueeze(1)).squeeze(1))
            best_ids = _best_ids(values, count)
            top_ids.append(best_ids)
            top_values.append(values.gather(1, best_ids))
        return Logprobs(tuple(wanted), torch.cat(own), torch.cat(top_ids), torch.cat(top_values))

    def _upload_entries(self, entries: Entries) -> list[torch.Tensor]:
        return self._upload(entries.rows, entries.ids, entries.values)

    def _upload(self, *arrays: Array) -> list[torch.Tensor]:
        return upload(arrays, self._device)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Enqueue a copy to host memory; it is there when the stream has come so far."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _weights(scores: torch.Tensor, best: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Return float64 weights of which the largest is 1."""
    return ((scores.double() - best.double().unsqueeze(1)) / temperature).exp_()


def _keep_top_k(scores: torch.Tensor, top_k: torch.Tensor, largest: int) -> None:
    """Set to -inf what is below the k-th largest of its row; 0 keeps all."""
    place = top_k.long().clamp(1, largest) - 1
    threshold = scores.topk(largest, dim=1).values.gather(1, place)
    scores.masked_fill_((scores < threshold) & (top_k > 0.0), -torch.inf)


def _top_p_threshold(
    scores: torch.Tensor, best: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """Return the smallest score of the fewest largest ones that hold ``top_p`` of the sum."""
    ordered = scores.sort(dim=1, descending=True).values
    held = _weights(ordered, best, temperature).cumsum(dim=1)
    place = torch.searchsorted(held, top_p * held[:, -1:]).clamp_(max=scores.shape[1] - 1)
    return ordered.gather(1, place).masked_fill(top_p >= 1.0, -torch.inf)


def _invert(weights: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Return the first ids whose cumulative weight exceeds ``at`` of the sum."""
    cumulative = weights.cumsum(dim=1)
    total = cumulative[:, -1:].contiguous()
    found = torch.searchsorted(cumulative, at * total, right=True)
    # Rounding can reach the sum itself: then it is the last token that has any weight.
    last = torch.searchsorted(cumulative, total)
    return torch.minimum(found, last).squeeze(1).clamp_(max=weights.shape[1] - 1)


def _best_ids(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ids of the ``count`` largest of each row, the lower id among equals.

    Sorts by one integer: the value's bits in an order that follows the numbers, then the id.
    """
    bits = (values + 0.0).view(torch.int32).long()  # + 0.0: both zeros are one number
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    size = values.shape[1]
    falling = torch.arange(size - 1, -1, -1, device=values.device)
    keys = (ordered << 32) | falling
    return size - 1 - (keys.topk(count, dim=1).values & 0xFFFFFFFF)
