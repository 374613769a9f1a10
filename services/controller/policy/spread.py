"""Which running decodes move so that all get their tokens sooner: from long batches to short ones.

Theory of operation
-------------------
Every worker measures what its decode steps cost: a base, each sequence, each token of a context.
Between two workers the decodes lie well where the next token takes as long on either side. While
the longer step is longer by ``MIN_GAIN`` after another move still, a decode moves there: the one
with the most tokens to draw yet, then every other one by that order, so that neither side is left
with all that take long; of equal ones the smaller. What it gains over these tokens must pay for
the move ``PAYS`` times over: its KV at the pair's measured rate, behind that of the moves before
it, and the time it stands still.

A worker of which that is not known yet is taken for as fast as the other one, but no faster than
its steps were. One that has prompts to compute gets nothing: the tokens there would wait for these.
Nor does one on the same GPU, where two batches would share what one has. Whoever moved lately
stays.

A prefill worker that took decodes in a quiet time gives them back when prompts come again
(``plan_returns``): these would be held up until the last of them is done.
"""

from collections import Counter, defaultdict
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

from services.controller.policy.estimates import link_rate
from services.controller.policy.migration import (
    MAX_TARGET_SHARE,
    DecodeView,
    Migration,
    takes_decodes_of,
)
from services.controller.policy.views import Incarnation, Pairing, WorkerView

MIN_GAIN = 0.15
"""Share of the longer step by which it must exceed the other one."""
PAYS = 4.0
STILL_SECONDS = 0.05
"""How long a move holds a decode up beside the copy, generously."""
MAX_CONSIDERED = 8
"""Of a large cluster the workers with the longest steps and those with the shortest."""
MAX_SPREADING = 64
"""Most moves of the cluster under way at once; those from one worker wait for each other."""

NONE_MOVING: Mapping[Incarnation, Sequence[int]] = {}


class Batch(NamedTuple):
    """Sequences that decode at a worker, and the tokens that they attend to."""

    num_sequences: int = 0
    num_tokens: int = 0

    def with_one(self, num_tokens: int) -> "Batch":
        """Return it with one sequence more."""
        return Batch(self.num_sequences + 1, self.num_tokens + num_tokens)

    def without_one(self, num_tokens: int) -> "Batch":
        """Return it with one sequence less."""
        return Batch(self.num_sequences - 1, max(0, self.num_tokens - num_tokens))


def step_there(source: WorkerView, target: WorkerView, batch: Batch) -> float:
    """Return the seconds of such a step at ``target``; as at ``source`` where not known."""
    if target.decode_cost.is_known:
        return target.decode_cost.at(*batch)
    return max(target.decode_cost.base, source.decode_cost.at(*batch))


def would_gain(source: WorkerView, target: WorkerView) -> bool:
    """Whether another worker could take decodes that a worker has, as both told, to some avail."""
    number, num_tokens = source.num_decoding, source.num_decode_tokens
    if number < 2 or not source.decode_cost.is_known or source.devices & target.devices:
        return False
    longer = source.decode_cost.at(number, num_tokens)
    there = Batch(target.num_decoding, target.num_decode_tokens).with_one(num_tokens // number)
    return longer - step_there(source, target, there) > MIN_GAIN * longer


class _State:
    """What workers decode and have in use, and what is to leave them, while moves are planned."""

    def __init__(
        self,
        workers: Sequence[WorkerView],
        batches: Mapping[Incarnation, Batch],
        under_way: Mapping[Incarnation, Sequence[int]],
    ) -> None:
        self.there = defaultdict(Batch, batches)
        self.used = {worker.key: worker.used_blocks for worker in workers}
        self.queued = Counter({key: sum(blocks) for key, blocks in under_way.items()})
        """Blocks that are to leave a worker."""
        self.moves: list[Migration] = []
        self._most = MAX_SPREADING - sum(len(blocks) for blocks in under_way.values())

    @property
    def is_full(self) -> bool:
        """Whether no more may be under way."""
        return len(self.moves) >= self._most

    def take(self, move: Migration, num_tokens: int) -> None:
        """Begin a move of a decode that attends to so many tokens."""
        self.moves.append(move)
        self.there[move.source] = self.there[move.source].without_one(num_tokens)
        self.there[move.target] = self.there[move.target].with_one(num_tokens)
        self.used[move.target] += move.num_blocks
        self.queued[move.source] += move.num_blocks


def can_spread(workers: Sequence[WorkerView], batches: Mapping[Incarnation, Batch]) -> bool:
    """Whether any decode could gain anything, were it free to move and without a context.

    A decode that has one gains less.
    """
    sources, targets = _sides(workers, batches, batches)
    for source in sources:
        longer = source.decode_cost.at(*batches.get(source.key, Batch()))
        for target in targets:
            there = batches.get(target.key, Batch()).with_one(0)
            gain = longer - step_there(source, target, there)
            if target.key != source.key and gain > MIN_GAIN * longer:
                return True
    return False


def _sides(
    workers: Sequence[WorkerView],
    batches: Mapping[Incarnation, Batch],
    having: Container[Incarnation],
) -> tuple[list[WorkerView], list[WorkerView]]:
    """Return who of those ``having`` decodes may give them away, and who may take them.

    They are sorted by their steps, and of each there are those whom it matters for most.
    """
    none = Batch()
    by_step = sorted(
        workers, key=lambda w: (w.decode_cost.at(*batches.get(w.key, none)), w.worker_id)
    )
    sources = [
        w for w in by_step if w.key in having and w.decode_cost.is_known and not w.is_draining
    ]
    targets = [w for w in by_step if w.can_decode and not w.uncomputed_tokens]
    return sources[-MAX_CONSIDERED:], targets[:MAX_CONSIDERED]


def plan_spread(
    workers: Sequence[WorkerView],
    decodes: Sequence[DecodeView],
    batches: Mapping[Incarnation, Batch],
    under_way: Mapping[Incarnation, Sequence[int]] = NONE_MOVING,
) -> list[Migration]:
    """Return the moves to begin now.

    ``batches`` are what decodes at each worker, or is on its way to it. ``under_way`` are the
    blocks of each decode that is leaving a worker already.
    """
    here: defaultdict[Incarnation, list[DecodeView]] = defaultdict(list)
    for decode in sorted(decodes, key=lambda d: (-d.num_left, d.num_blocks, d.request_id)):
        if decode.is_movable and not decode.has_moved:
            here[decode.worker].append(decode)
    for key, waiting in here.items():
        here[key] = [*waiting[0::2], *waiting[1::2]][::-1]  # the next one is the last
    sources, targets = _sides(workers, batches, here)
    state = _State(workers, batches, under_way)
    while not state.is_full:
        found = _next_move(sources, targets, here, state)
        if found is None:
            break
        move, place = found
        state.take(move, here[move.source].pop(place).num_tokens)
    return state.moves


def plan_returns(
    workers: Sequence[WorkerView],
    guests: Sequence[DecodeView],
    batches: Mapping[Incarnation, Batch],
    under_way: Mapping[Incarnation, Sequence[int]] = NONE_MOVING,
) -> list[Migration]:
    """Return the moves by which ``guests`` leave prefill workers that do not decode any more.

    Each goes where the step with it is the shortest. What is nearly done stays.
    """
    state = _State(workers, batches, under_way)
    there, used = state.there, state.used
    hosts = {w.key: w for w in workers if not w.can_decode and not w.is_draining}
    targets = [w for w in workers if w.can_decode and not w.uncomputed_tokens]
    for decode in sorted(guests, key=lambda d: (-d.num_left, d.num_blocks, d.request_id)):
        host = hosts.get(decode.worker)
        if host is None or not decode.is_movable or state.is_full:
            continue
        steps = [
            (step_there(host, target, there[target.key].with_one(decode.num_tokens)), target)
            for target in targets
            if _can_take(target, host, there[target.key], used[target.key] + decode.num_blocks)
        ]
        num_blocks = state.queued[host.key] + decode.num_blocks
        steps = [
            (step, target)
            for step, target in steps
            if step * decode.num_left >= PAYS * _cost(host, target, num_blocks)
        ]
        if not steps:
            continue
        _, target = min(steps, key=lambda each: (each[0], each[1].worker_id))
        reason = "prompts come again"
        move = Migration(decode.request_id, host.key, target.key, decode.num_blocks, reason)
        state.take(move, decode.num_tokens)
    return state.moves


def _next_move(
    sources: Sequence[WorkerView],
    targets: Sequence[WorkerView],
    here: Mapping[Incarnation, list[DecodeView]],
    state: _State,
) -> tuple[Migration, int] | None:
    """Return the most that one move gains the longest step that gains anything.

    With it comes the decode's place in its worker's list, whose last one is the first to go. Where
    that gains nothing, the next one of a shorter context may.
    """
    for source in sorted(sources, key=lambda w: -w.decode_cost.at(*state.there[w.key])):
        decodes = here[source.key]
        least_tokens: int | None = None
        for place in range(len(decodes) - 1, -1, -1):
            decode = decodes[place]
            if least_tokens is not None and decode.num_tokens >= least_tokens:
                continue
            move = _best_move(source, targets, decode, state)
            if move is not None:
                return move, place
            least_tokens = decode.num_tokens
    return None


def _best_move(
    source: WorkerView, targets: Sequence[WorkerView], decode: DecodeView, state: _State
) -> Migration | None:
    """Return the move of one decode that gains the most; None where none pays."""
    there, used, queued = state.there, state.used, state.queued
    longer = source.decode_cost.at(*there[source.key])
    best: tuple[float, WorkerView] | None = None
    for target in targets:
        num_used = used[target.key] + decode.num_blocks
        if not _can_take(target, source, there[target.key], num_used):
            continue
        with_it = there[target.key].with_one(decode.num_tokens)
        gain = longer - step_there(source, target, with_it)
        cost = _cost(source, target, queued[source.key] + decode.num_blocks)
        is_worth_it = gain > MIN_GAIN * longer and gain * decode.num_left >= PAYS * cost
        if is_worth_it and (best is None or gain > best[0]):
            best = gain, target
    if best is None:
        return None
    gain, target = best
    reason = f"steps of {1e3 * longer:.1f} ms here, {1e3 * (longer - gain):.1f} ms there"
    return Migration(decode.request_id, source.key, target.key, decode.num_blocks, reason)


def _rate(source: WorkerView, target: WorkerView) -> float:
    """Bytes per second there; as back where only that was measured."""
    is_measured = source.link_rates.get(target.key, 0.0) > 0
    return link_rate(source, target) if is_measured else link_rate(target, source)


def _cost(source: WorkerView, target: WorkerView, num_blocks: int) -> float:
    """Return the seconds of tokens that a move takes from a decode, behind others' blocks."""
    return STILL_SECONDS + num_blocks * source.block_bytes / _rate(source, target)


def _can_take(target: WorkerView, source: WorkerView, batch: Batch, num_used: int) -> bool:
    """Whether one decode more fits there, with so many blocks in use then."""
    return (
        target.key != source.key
        and takes_decodes_of(target, source)
        and not source.devices & target.devices
        and batch.num_sequences < target.max_num_seqs
        and num_used <= MAX_TARGET_SHARE * target.total_blocks
        and source.pairing_with(target) is not Pairing.BROKEN
    )
