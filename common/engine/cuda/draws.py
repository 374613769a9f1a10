"""What a step's draws ask for, gathered on the host for the device."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.engine.draws import uniform
from common.engine.interface import SampleSpec
from common.sampling import SamplingParams

Doubles = NDArray[np.float64]
Floats = NDArray[np.float32]
Longs = NDArray[np.int64]

COLUMNS = ("at", "temperature", "top_k", "top_p", "min_p")
"""Columns of ``DrawTable.numbers``."""


@dataclass(frozen=True, slots=True)
class Entries:
    """Single logits to change: their row in the table, their token id, and by how much."""

    rows: Longs
    ids: Longs
    values: Floats


@dataclass(frozen=True, slots=True)
class DrawTable:
    """Draws that are not the raw logits' maximum, one row each.

    ``numbers`` is float64, (draws, COLUMNS). ``bias`` is added; ``repetition`` divides positive
    logits and multiplies negative ones; ``penalties`` is subtracted; ``banned`` becomes -inf; in
    this order.
    """

    numbers: Doubles
    bias: Entries
    repetition: Entries
    penalties: Entries
    banned: Entries

    @property
    def is_all_greedy(self) -> bool:
        """Whether no row asks for chance."""
        return not self.numbers[:, 1].any()


def is_plain_greedy(spec: SampleSpec) -> bool:
    """Tell whether the draw is the raw logits' maximum."""
    params = spec.params
    return (
        params.temperature == 0.0
        and not params.logit_bias
        and not params.has_penalties
        and (params.min_tokens == 0 or spec.position >= params.min_tokens)
    )


def tabulate(specs: Sequence[SampleSpec], vocab_size: int) -> DrawTable:
    """Return the table of draws."""
    numbers = np.empty((len(specs), len(COLUMNS)))
    bias, repetition, penalties, banned = (_Builder(vocab_size) for _ in range(4))
    for row, spec in enumerate(specs):
        params = spec.params
        is_random = params.temperature > 0.0
        at = uniform(params.seed, spec.choice, spec.position) if is_random else 0.0
        numbers[row] = (at, params.temperature, params.top_k, params.top_p, params.min_p)
        if params.logit_bias:
            finite = {i: b for i, b in params.logit_bias.items() if math.isfinite(b)}
            bias.add(row, finite, list(finite.values()))
        if params.repetition_penalty != 1.0:
            seen = {*spec.prompt_token_ids, *spec.output_token_ids}
            repetition.add(row, seen, [params.repetition_penalty] * len(seen))
        if params.presence_penalty or params.frequency_penalty:
            counts = Counter(spec.output_token_ids)
            penalties.add(row, counts, _penalties(params, counts))
        if params.min_tokens and spec.position < params.min_tokens:
            ending = {*params.eos_token_ids, *params.stop_token_ids}
            banned.add(row, ending, [0.0] * len(ending))
    return DrawTable(numbers, bias.build(), repetition.build(), penalties.build(), banned.build())


def _penalties(params: SamplingParams, counts: Counter[int]) -> list[float]:
    times = np.fromiter(counts.values(), np.float32, len(counts))
    amounts = params.frequency_penalty * times + np.float32(params.presence_penalty)
    return [float(amount) for amount in amounts]


class _Builder:
    """Collects the entries of one kind."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: list[int] = []
        self._ids: list[int] = []
        self._values: list[float] = []

    def add(self, row: int, ids: Iterable[int], values: Sequence[float]) -> None:
        """Take a row's ids, leaving out those that are not in the vocabulary."""
        for token_id, value in zip(ids, values, strict=True):
            if 0 <= token_id < self._vocab_size:
                self._rows.append(row)
                self._ids.append(token_id)
                self._values.append(value)

    def build(self) -> Entries:
        return Entries(
            np.array(self._rows, np.int64),
            np.array(self._ids, np.int64),
            np.array(self._values, np.float32),
        )
