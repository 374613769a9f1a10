"""FlowKV's choice (papers 1.6.4): the least expected time to first token, weighed by decode load.

    P*, D* = argmin est_ttft(p, d, request) x (1 + LS_D(d))

over prefill sides that may get a prompt and decode sides that could hold it. Ahead of that stand,
in this order: a pair that works, room in the decode side's pool, and load scores below 1. The time
is the sum of queue, computation and transfer, as in Mooncake's Conductor:

    uncomputed(p) / rate(p) + (prompt - hit(p)) / rate(p) + (blocks - hit(d)) x bytes / link(p, d)

What comes beside it:

* A worker without a long prefix may get it copied from one that has it, where the copy would take
  at most half of the time that computing it takes (Mooncake's and MemServe's trade). The estimate
  of each prefill side is then that of the cheaper way.
* What the store has of the prompt needs no computing, either, where loading it is the cheaper way:
  by the prefill side or, if that is sooner, by some decode side (``loading`` decides which).
* P = D needs no transfer. A worker with both abilities competes with it; and a decode worker that
  lacks at most two blocks of the prompt does so without being asked to help.

The search is exact and looks at few prefill sides: a side's own time is a lower bound of its pairs'
costs, so after the most promising side only those are looked at whose bound is below its best pair.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.controller.policy.cluster_view import INFINITE, Array, ClusterView
from services.controller.policy.loading import MAX_LOAD_SHARE
from services.controller.policy.views import Placement, RequestView

MAX_LOCAL_BLOCKS = 2
"""Uncached blocks up to which a decode worker computes a prompt itself."""
MIN_COPY_BLOCKS = 2
COPY_SECONDS = 0.02
"""What a copy takes beside its bytes: two workers' messages, each behind what it is at."""
MAX_COPY_SHARE = 0.5
"""Most that a copy may take of the time to compute the same blocks: it keeps two pools busy."""


class _Costs(NamedTuple):
    """What a choice is made of; arrays by slot.

    ``compute_seconds`` are until the prompt is computed without help, ``prefill_seconds`` with
    ``num_copied`` blocks copied from slot ``holder``, or others loaded, where that is cheaper.
    """

    hits: Array
    compute_seconds: Array
    prefill_seconds: Array
    num_copied: Array
    holder: int
    missing_bytes: Array
    prefill_tiers: Array
    decode_tiers: Array


class _Sides(NamedTuple):
    """Slots of a choice and what it costs."""

    cost: float
    prefill: int
    decode: int
    reason: str


class FlowKV:
    """Least expected time to first token x (1 + load of the decode side)."""

    name = "flowkv"
    uses_prefixes = True

    def choose(self, cluster: ClusterView, request: RequestView) -> Placement | None:
        """Return the cheapest sides."""
        if not len(cluster):
            return None
        costs = _costs(cluster, request)
        best = _cheapest_pair(cluster, costs)
        if not cluster.has_fixed_roles:
            local = _cheapest_local(cluster, request, costs)
            best = local if local.cost < best.cost else best
        return None if best.cost == INFINITE else _placement(cluster, costs, best)


def _costs(cluster: ClusterView, request: RequestView) -> _Costs:
    hits = cluster.hits(request)
    token_seconds = cluster.token_seconds
    uncached = np.maximum(1.0, request.num_prompt_tokens - request.block_size * hits)
    compute = (cluster.uncomputed + uncached) * token_seconds
    prefill, num_copied, holder = compute, hits, -1
    if request.hits:
        holder = int(hits.argmax())
        gain = hits[holder] - hits
        copy = COPY_SECONDS + gain * cluster.block_bytes * cluster.link_seconds[holder]
        saved = (request.block_size * gain) * token_seconds
        is_copied = (copy <= MAX_COPY_SHARE * saved) & (gain >= MIN_COPY_BLOCKS)
        is_copied &= cluster.pair_tier[holder] < INFINITE
        prefill = compute - is_copied * (saved - copy)
        num_copied = is_copied * hits[holder]
    if request.num_stored_blocks:
        prefill = np.minimum(prefill, _seconds_with_loads(cluster, request, hits, compute))
    return _Costs(
        hits,
        compute,
        prefill,
        num_copied,
        holder,
        (request.num_prompt_blocks - hits) * cluster.block_bytes,
        cluster.prefill_tier(request, by_score=True),
        cluster.decode_tier(request, by_score=True),
    )


def _seconds_with_loads(
    cluster: ClusterView, request: RequestView, hits: Array, compute: Array
) -> Array:
    """Return when each side would have computed the prompt with what is stored of it loaded."""
    gain = request.block_size * np.maximum(0.0, request.num_stored_blocks - hits)
    load = np.full(len(gain), INFINITE)
    by_decode = INFINITE
    for slot, view in cluster.slots():
        if view.has_store:
            token_seconds = 1.0 / view.read_rate if view.read_rate else 0.0
            load[slot] = (view.read_queue_tokens + gain[slot]) * token_seconds
            by_decode = min(by_decode, float(load[slot])) if view.can_decode else by_decode
    load = np.minimum(load, by_decode)
    saved = gain * cluster.token_seconds
    return np.where(load < MAX_LOAD_SHARE * saved, compute - saved + load, compute)


def _cheapest_pair(cluster: ClusterView, costs: _Costs) -> _Sides:
    """Return the exact minimum over all pairs."""
    least_weight = np.minimum.reduce(cluster.decode_weights)
    least_tier = np.minimum.reduce(costs.decode_tiers)
    bounds = costs.prefill_seconds * least_weight + costs.prefill_tiers + least_tier
    first = int(bounds.argmin())
    cost, _, decode = _cheapest_of(cluster, costs, slice(first, first + 1))
    best = _Sides(cost, first, decode, "least expected time")
    bounds[first] = INFINITE
    others = np.flatnonzero(bounds < cost)
    if len(others):
        cost, row, decode = _cheapest_of(cluster, costs, others)
        if cost < best.cost:
            best = _Sides(cost, int(others[row]), decode, best.reason)
    return best


def _cheapest_of(
    cluster: ClusterView, costs: _Costs, prefills: slice | NDArray[np.intp]
) -> tuple[float, int, int]:
    """Return the cost of the cheapest pair of these prefill sides, its number, its decode side."""
    seconds = cluster.link_seconds[prefills] * costs.missing_bytes
    seconds += costs.prefill_seconds[prefills, None]
    seconds *= cluster.decode_weights
    seconds += cluster.pair_tier[prefills]
    seconds += costs.decode_tiers
    seconds += costs.prefill_tiers[prefills, None]
    row, decode = divmod(int(seconds.argmin()), seconds.shape[1])
    return float(seconds[row, decode]), row, decode


def _cheapest_local(cluster: ClusterView, request: RequestView, costs: _Costs) -> _Sides:
    """Return the best decode worker that computes the little it lacks by itself."""
    reason = "little to compute on the decode side"
    least_hits = request.num_prompt_tokens / request.block_size - MAX_LOCAL_BLOCKS
    if max(request.hits.values(), default=0) < least_hits:
        return _Sides(INFINITE, -1, -1, reason)
    found = costs.compute_seconds * cluster.decode_weights + costs.decode_tiers
    found += cluster.local_tier
    found[costs.hits < least_hits] = INFINITE
    slot = int(found.argmin())
    return _Sides(float(found[slot]), slot, slot, reason)


def _placement(cluster: ClusterView, costs: _Costs, sides: _Sides) -> Placement:
    prefill, decode = cluster.at(sides.prefill), cluster.at(sides.decode)
    num_copied = int(costs.num_copied[sides.prefill]) if costs.holder >= 0 else 0
    seconds = float(costs.prefill_seconds[sides.prefill])
    missing = float(costs.missing_bytes[sides.decode])
    transfer = missing * float(cluster.link_seconds[sides.prefill, sides.decode])
    return Placement(
        prefill,
        decode,
        sides.reason,
        round(seconds + transfer, 6),
        cluster.at(costs.holder).key if num_copied else None,
        num_copied,
        (
            ("uncomputed_tokens", prefill.uncomputed_tokens),
            ("prefill_rate", prefill.prefill_rate),
            ("hit_blocks", int(costs.hits[sides.prefill])),
            ("decode_hit_blocks", int(costs.hits[sides.decode])),
            ("transfer_seconds", round(transfer, 6)),
            ("decode_weight", round(float(cluster.decode_weights[sides.decode]), 4)),
            ("decode_used_share", round(decode.used_share, 4)),
        ),
    )
