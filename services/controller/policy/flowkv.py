"""FlowKV's choice (papers 1.6.4): the least expected time to first token, weighed by decode load.

    P*, D* = argmin est_ttft(p, d, request) x (1 + LS_D(d))

over prefill sides that may get a prompt and decode sides that could hold it. Ahead of that stand,
in this order: a pair that works, room in the decode side's pool, and load scores below 1.

What comes beside it:

* A worker without a long prefix may get it copied from one that has it, where the copy would take
  at most half of the time that computing it takes (Mooncake's and MemServe's trade). The estimate
  of each prefill side is then that of the cheaper way.
* P = D needs no transfer. A worker with both abilities competes with it; and a decode worker that
  lacks at most two blocks of the prompt does so without being asked to help.

The search is exact and looks at few prefill sides: a side's own time is a lower bound of its pairs'
costs, so the sides are tried from the least bound on until the next bound is no better.
"""

from dataclasses import dataclass

import numpy as np

from services.controller.policy.cluster_view import INFINITE, Array, ClusterView
from services.controller.policy.views import Placement, RequestView

MAX_LOCAL_BLOCKS = 2
"""Uncached blocks up to which a decode worker computes a prompt itself."""
MIN_COPY_BLOCKS = 2
MAX_COPY_SHARE = 0.5
"""Most that a copy may take of the time to compute the same blocks: it keeps two pools busy."""
NUM_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class _Costs:
    """What a choice is made of; arrays by slot.

    ``compute_seconds`` are until the prompt is computed without a copy, ``prefill_seconds`` with
    ``num_copied`` blocks copied from slot ``holder`` where that is cheaper.
    """

    hits: Array
    compute_seconds: Array
    prefill_seconds: Array
    num_copied: Array
    holder: int
    missing_bytes: Array
    prefill_tiers: Array
    decode_tiers: Array


@dataclass(frozen=True, slots=True)
class _Sides:
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
        options = [_cheapest_pair(cluster, costs)]
        if not cluster.has_fixed_roles:
            options.append(_cheapest_local(cluster, request, costs))
        best = min(options, key=lambda sides: sides.cost)
        return None if best.cost == INFINITE else _placement(cluster, costs, best)


def _costs(cluster: ClusterView, request: RequestView) -> _Costs:
    prefill_full, decode_full = cluster.score_tiers
    hits = cluster.hits(request)
    rates = cluster.rates
    uncached = np.maximum(1.0, request.num_prompt_tokens - hits * request.block_size)
    compute = (cluster.uncomputed + uncached) / rates
    prefill, num_copied, holder = compute, np.zeros(len(hits)), -1
    if request.hits:
        holder = int(hits.argmax())
        gain = hits[holder] - hits
        copy = gain * cluster.block_bytes * cluster.link_seconds[holder]
        saved = gain * request.block_size / rates
        is_copied = (
            (gain >= MIN_COPY_BLOCKS)
            & (copy <= MAX_COPY_SHARE * saved)
            & np.isfinite(cluster.pair_tier[holder])
        )
        prefill = np.where(is_copied, compute - saved + copy, compute)
        num_copied = np.where(is_copied, hits[holder], 0.0)
    return _Costs(
        hits,
        compute,
        prefill,
        num_copied,
        holder,
        (request.num_prompt_blocks - hits) * cluster.block_bytes,
        cluster.prefill_tier(request) + prefill_full,
        cluster.decode_tier(request) + decode_full,
    )


def _cheapest_pair(cluster: ClusterView, costs: _Costs) -> _Sides:
    """Return the exact minimum over all pairs."""
    weights = cluster.decode_weights
    best = _Sides(INFINITE, -1, -1, "least expected time")
    bounds = costs.prefill_seconds * weights.min() + costs.prefill_tiers + costs.decode_tiers.min()
    order = bounds.argsort()
    for start in range(0, len(order), NUM_AT_ONCE):
        rows = order[start : start + NUM_AT_ONCE]
        if bounds[rows[0]] >= best.cost:
            break
        seconds = (
            costs.prefill_seconds[rows, None] + costs.missing_bytes * cluster.link_seconds[rows]
        )
        found = seconds * weights + (
            cluster.pair_tier[rows] + costs.decode_tiers + costs.prefill_tiers[rows, None]
        )
        row, decode = divmod(int(found.argmin()), len(order))
        if found[row, decode] < best.cost:
            best = _Sides(float(found[row, decode]), int(rows[row]), decode, best.reason)
    return best


def _cheapest_local(cluster: ClusterView, request: RequestView, costs: _Costs) -> _Sides:
    """Return the best decode worker that computes the little it lacks by itself."""
    found = costs.compute_seconds * cluster.decode_weights + costs.decode_tiers
    found += cluster.local_tier
    least_hits = request.num_prompt_tokens / request.block_size - MAX_LOCAL_BLOCKS
    found[costs.hits < least_hits] = INFINITE
    slot = int(found.argmin())
    return _Sides(float(found[slot]), slot, slot, "little to compute on the decode side")


def _placement(cluster: ClusterView, costs: _Costs, sides: _Sides) -> Placement:
    prefill, decode = cluster.at(sides.prefill), cluster.at(sides.decode)
    num_copied = int(costs.num_copied[sides.prefill])
    seconds = float(costs.prefill_seconds[sides.prefill])
    if sides.prefill == sides.decode and num_copied == 0:
        seconds = float(costs.compute_seconds[sides.prefill])
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
