"""How loaded a worker is, and the rates that stand in for what was not measured yet.

The load scores follow FlowKV as laid out for this project (papers 1.6.4):

    LS_P = 0.6 x uncomputed / (rate x TTFT objective) + 0.3 x KV in use + 0.1 x utilisation
    LS_D = 0.5 x step time / TPOT objective + 0.4 x KV in use and reserved + 0.1 x decoding / most

Utilisation is the share of the next step that waiting prompts would fill.
"""

from dataclasses import dataclass, replace

from services.controller.policy.views import WorkerView

DEFAULT_PREFILL_RATE = 1000.0
"""Tokens per second of a worker while neither it nor any other was measured."""
DEFAULT_LINK_RATE = 1e9
"""Bytes per second of a link that was not measured yet."""


@dataclass(frozen=True, slots=True)
class Objectives:
    """What the cluster aims at: time to first token, and time between two tokens."""

    ttft_seconds: float = 2.0
    tpot_seconds: float = 0.05


def prefill_score(view: WorkerView, queued_tokens: float, objectives: Objectives) -> float:
    """Load of a worker's prefill half; 1 is full. ``queued_tokens`` is its share of the queue."""
    tokens = view.uncomputed_tokens + queued_tokens
    rate = view.prefill_rate or DEFAULT_PREFILL_RATE
    late = tokens / (rate * objectives.ttft_seconds)
    filled = min(1.0, tokens / max(1, view.max_num_batched_tokens))
    return 0.6 * late + 0.3 * view.used_share + 0.1 * filled


def decode_score(view: WorkerView, objectives: Objectives) -> float:
    """Load of a worker's decode half; 1 is full.

    The step time of a worker that decodes nothing is an old one, and nobody waits for it.
    """
    slow = view.decode_step_seconds / objectives.tpot_seconds if view.num_decoding else 0.0
    batch = view.num_decoding / max(1, view.max_num_seqs)
    return 0.5 * slow + 0.4 * view.used_share + 0.1 * batch


def shared_decode_score(view: WorkerView, objectives: Objectives) -> float:
    """Load of a worker's decode half that other workers could take a part of.

    One sequence alone is as slow as its worker is: were there more workers, it would be so still.
    """
    alone = view if view.num_decoding > 1 else replace(view, decode_step_seconds=0.0)
    return decode_score(alone, objectives)


def decode_weight(view: WorkerView, score: float, objectives: Objectives) -> float:
    """Factor of an estimate for this decode side: 1 + LS_D (``score``), and more if it is slow.

    The latter tells workers apart that are equally loaded: the time that all its sequences and one
    more would take for a token each, at the rate that it once showed.
    """
    expected = 0.0
    if view.decode_rate:
        expected = (view.num_decoding + 1) / (view.decode_rate * objectives.tpot_seconds)
    return 1.0 + score + 0.1 * min(1.0, expected)


def link_rate(source: WorkerView, target: WorkerView) -> float:
    """Bytes per second from one worker to another, as measured or the default."""
    return source.link_rates.get(target.key, 0.0) or DEFAULT_LINK_RATE
