"""How loaded a worker is, and when a request's first token would come.

The load scores follow FlowKV as laid out for this project (papers 1.6.4):

    LS_P = 0.6 x uncomputed / (rate x TTFT objective) + 0.3 x KV in use + 0.1 x utilisation
    LS_D = 0.5 x step time / TPOT objective + 0.4 x KV in use and reserved + 0.1 x decoding / most

Utilisation is the share of the next step that waiting prompts would fill. The time to first token
is the sum of queue, computation and transfer, as in Mooncake's Conductor:

    uncomputed(P) / rate(P) + (prompt - hit(P)) / rate(P) + (blocks - hit(D)) x bytes / link(P, D)
"""

from collections.abc import Iterable
from dataclasses import dataclass

from common.messages.fields import Role
from services.controller.policy.views import RequestView, WorkerView

DEFAULT_PREFILL_RATE = 1000.0
"""Tokens per second of a worker while neither it nor any other was measured."""
DEFAULT_LINK_RATE = 1e9
"""Bytes per second of a link that was not measured yet."""


@dataclass(frozen=True, slots=True)
class Objectives:
    """What the cluster aims at: time to first token, and time between two tokens."""

    ttft_seconds: float = 2.0
    tpot_seconds: float = 0.05


def prefill_rate(view: WorkerView, if_unknown: float = DEFAULT_PREFILL_RATE) -> float:
    """Prompt tokens per second that the worker computes."""
    return view.prefill_rate or if_unknown


def prefill_score(view: WorkerView, queued_tokens: float, objectives: Objectives) -> float:
    """Load of a worker's prefill half; 1 is full. ``queued_tokens`` is its share of the queue."""
    tokens = view.uncomputed_tokens + queued_tokens
    late = tokens / (prefill_rate(view) * objectives.ttft_seconds)
    filled = min(1.0, tokens / max(1, view.max_num_batched_tokens))
    return 0.6 * late + 0.3 * view.used_share + 0.1 * filled


def decode_score(view: WorkerView, objectives: Objectives) -> float:
    """Load of a worker's decode half; 1 is full.

    The step time of a worker that decodes nothing is an old one, and nobody waits for it.
    """
    slow = view.decode_step_seconds / objectives.tpot_seconds if view.num_decoding else 0.0
    batch = view.num_decoding / max(1, view.max_num_seqs)
    return 0.5 * slow + 0.4 * view.used_share + 0.1 * batch


def decode_weight(view: WorkerView, score: float, objectives: Objectives) -> float:
    """Factor of an estimate for this decode side: 1 + LS_D (``score``), and more if it is slow.

    The latter tells workers apart that are equally loaded: the time that all its sequences and one
    more would take for a token each, at the rate that it once showed.
    """
    expected = 0.0
    if view.decode_rate:
        expected = (view.num_decoding + 1) / (view.decode_rate * objectives.tpot_seconds)
    return 1.0 + score + 0.1 * min(1.0, expected)


def role_scores(
    workers: Iterable[WorkerView], queued_tokens: int, objectives: Objectives
) -> tuple[list[float], list[float]]:
    """Return LS_P of the workers that prefill by role, LS_D of those that decode.

    The tokens queued in the controller are shared evenly among the former. Workers that have not
    measured themselves, and those that drain, say nothing about load.
    """
    counted = [w for w in workers if w.is_measured and not w.is_draining]
    prefills = [w for w in counted if w.role is not Role.DECODE]
    share = queued_tokens / max(1, len(prefills))
    return (
        [prefill_score(w, share, objectives) for w in prefills],
        [decode_score(w, objectives) for w in counted if w.role is not Role.PREFILL],
    )


def link_rate(source: WorkerView, target: WorkerView) -> float:
    """Bytes per second from one worker to another, as measured or the default."""
    return source.link_rates.get(target.key, 0.0) or DEFAULT_LINK_RATE


def transfer_seconds(source: WorkerView, target: WorkerView, num_blocks: int) -> float:
    """Time to move blocks between two workers; none within one."""
    if source.key == target.key:
        return 0.0
    return max(0, num_blocks) * source.block_bytes / link_rate(source, target)


def ttft_seconds(
    prefill: WorkerView,
    decode: WorkerView,
    request: RequestView,
    if_unknown: float = DEFAULT_PREFILL_RATE,
) -> float:
    """Expected time until the request can decode on ``decode``, prefilled on ``prefill``."""
    rate = prefill_rate(prefill, if_unknown)
    uncached = request.num_uncached(request.hits.get(prefill.key, 0))
    missing = request.num_prompt_blocks - request.hits.get(decode.key, 0)
    compute = (prefill.uncomputed_tokens + uncached) / rate
    return compute + transfer_seconds(prefill, decode, missing)
