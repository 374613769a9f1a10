"""An engine without a model, whose tokens prove that every K and V was where it belongs.

A token's place in the pool gets the token and its position, in every layer and plane. What is
drawn is a hash of what the pool holds at all positions so far, so that a block that was lost,
mixed up or damaged on its way changes the tokens, and ``expected_tokens`` says what they must be
from the prompt alone.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from common.engine.interface import DeferredStep, LaunchedStep, SampleSpec, StepRow
from common.kv.layout import KVLayout
from common.sampling import SampledToken, SamplingParams

Pace = Callable[[Sequence[StepRow]], None]
Words = NDArray[np.uint32]

MARK = 2**31
"""Added to every stored token, so that memory of zeros is never a token."""
_MIX = np.uint64(0x9E3779B97F4A7C15)
_STRIDE = np.uint64(0xD1B54A32D192ED03)
_TOP_LOGPROB_STEP = 0.25


class FakeEngine:
    """Implements ``common.engine.interface.Engine``; deterministic, without a model.

    ``pace`` is called in every step, in the step's thread and before anything is written: it
    decides how long the step takes. With ``max_in_flight`` 2 steps are planned ahead as for a
    device, though each is computed only when it is collected. A head needs at least 8 bytes a
    token. No token that would end a choice is ever drawn: requests run to their ``max_tokens``.
    """

    def __init__(
        self,
        layout: KVLayout,
        pool: memoryview,
        vocab_size: int,
        pace: Pace | None = None,
        *,
        max_in_flight: int = 1,
    ) -> None:
        self.max_in_flight = max_in_flight
        self._num_launched = 0
        self._drawn: dict[int, list[tuple[SampledToken, ...]]] = {}
        self._block_size = layout.block_size
        self._vocab_size = vocab_size
        self._pace = pace
        num_blocks = len(pool) // layout.block_bytes
        blocks = np.frombuffer(pool, np.uint32).reshape(num_blocks, layout.block_bytes // 4)
        shape = (num_blocks, layout.num_layers, layout.planes, layout.block_size, -1)
        self._words = blocks[:, : layout.payload_bytes // 4].reshape(shape)

    def launch(self, rows: Sequence[StepRow]) -> DeferredStep:
        """Note a step down; it is computed when it is collected."""
        step = DeferredStep(self._num_launched, rows)
        self._num_launched += 1
        return step

    def collect(self, step: LaunchedStep) -> list[tuple[SampledToken, ...]]:
        """Compute a launched step (see ``execute``); pending tokens are those of the one before."""
        if not isinstance(step, DeferredStep):
            raise TypeError(f"step {step.number} was launched by another engine")
        rows = [self._resolved(row) for row in step.rows]
        drawn = self.execute(rows)
        self._drawn = {step.number: drawn}
        return drawn

    def execute(self, rows: Sequence[StepRow]) -> list[tuple[SampledToken, ...]]:
        """Write every row's tokens into the pool and draw from what the pool holds."""
        if self._pace is not None:
            self._pace(rows)
        for row in rows:
            self._store(row)
        return [self._draw_all(row) for row in rows]

    def _resolved(self, row: StepRow) -> StepRow:
        if row.pending is None:
            return row
        token_id = self._drawn[row.pending.step][row.pending.row][0].token_id
        return replace(row, token_ids=[*row.token_ids[:-1], token_id], pending=None)

    def _store(self, row: StepRow) -> None:
        positions = np.arange(row.start, row.start + len(row.token_ids))
        blocks = np.asarray(row.block_table)[positions // self._block_size]
        places = positions % self._block_size
        self._words[blocks, :, :, places, 0] = np.asarray(row.token_ids)[:, None, None] + MARK
        self._words[blocks, :, :, places, 1] = positions[:, None, None]

    def _draw_all(self, row: StepRow) -> tuple[SampledToken, ...]:
        if not row.samples:
            return ()
        num_tokens = row.start + len(row.token_ids)
        num_blocks = -(-num_tokens // self._block_size)
        held = self._words[list(row.block_table[:num_blocks])]
        # (blocks, layers, planes, block_size, word) → (layers, planes, position, word)
        held = np.moveaxis(held, 0, 2)
        held = held.reshape(*held.shape[:2], -1, held.shape[-1])[:, :, :num_tokens]
        state = _state(held[0, 0, :, 0], held[0, 0, :, 1])
        if (held[:, :, :, :2] != held[0, 0, :, :2]).any():
            state += 1  # the layers differ: something did not arrive
        return tuple(_draw(state, spec, self._vocab_size) for spec in row.samples)


def expected_tokens(
    prompt: Sequence[int], params: SamplingParams, choice: int, vocab_size: int
) -> list[int]:
    """Return what a ``FakeEngine`` draws for one choice when nothing goes wrong."""
    tokens = list(prompt)
    for position in range(params.max_tokens):
        words = np.asarray(tokens, dtype=np.uint32) + np.uint32(MARK)
        state = _state(words, np.arange(len(tokens), dtype=np.uint32))
        outputs = tokens[len(prompt) : len(prompt) + position]
        drawn = _draw(state, SampleSpec(params, choice, prompt, outputs), vocab_size)
        tokens.append(drawn.token_id)
    return tokens[len(prompt) :]


class SteadyPace:
    """Steps that take ``step_seconds`` and ``token_seconds`` for each of their tokens."""

    def __init__(self, step_seconds: float, token_seconds: float = 0.0) -> None:
        self.step_seconds = step_seconds
        self.token_seconds = token_seconds
        self._never = threading.Event()

    def __call__(self, rows: Sequence[StepRow]) -> None:
        """Wait as long as the step is to take."""
        num_tokens = sum(len(row.token_ids) for row in rows)
        seconds = self.step_seconds + num_tokens * self.token_seconds
        if seconds > 0:
            self._never.wait(seconds)


def _state(words: Words, positions: Words) -> int:
    """Hash tokens with their stored positions and the places where they were found."""
    mixed = (words.astype(np.uint64) << np.uint64(32)) | positions.astype(np.uint64)
    mixed += np.arange(len(words), dtype=np.uint64) * _STRIDE
    mixed = (mixed ^ (mixed >> np.uint64(29))) * _MIX
    mixed ^= mixed >> np.uint64(32)
    return int(mixed.sum(dtype=np.uint64))


def _draw(state: int, spec: SampleSpec, vocab_size: int) -> SampledToken:
    params = spec.params
    if params.temperature > 0:  # greedy choices are all alike
        state += params.seed * 1_000_003 + spec.choice * 7919
    token = (state ^ (state >> 17)) % vocab_size
    ending = {*params.eos_token_ids, *params.stop_token_ids}
    while token in ending:
        token = (token + 1) % vocab_size
    if params.num_logprobs is None:
        return SampledToken(token)
    top = tuple(
        ((token + place) % vocab_size, -_TOP_LOGPROB_STEP * (1 + place))
        for place in range(params.num_logprobs)
    )
    return SampledToken(token, -_TOP_LOGPROB_STEP, top)
