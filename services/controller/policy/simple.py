"""The policies that ``flowkv`` is compared with.

All see the same candidates: prefill sides that may get a prompt now and could hold the request;
decode sides that could hold it, those with room now first; and pairs that work before those that
are not known yet. A decode worker that helps with a prompt keeps it, where it has room. The
policies differ in the order among the candidates.
"""

import numpy as np

from common.messages.fields import Role
from services.controller.policy.cluster_view import (
    NO_ROOM_TIER,
    UNKNOWN_TIER,
    Array,
    ClusterView,
)
from services.controller.policy.views import Placement, RequestView


class RoundRobin:
    """Each worker in its turn, prefill and decode sides for themselves."""

    name = "round_robin"
    uses_prefixes = False

    def __init__(self) -> None:
        self._prefill_turn = 0
        self._decode_turn = 0

    def choose(self, cluster: ClusterView, request: RequestView) -> Placement | None:
        """Return the sides whose turn it is."""
        count = len(cluster.uncomputed)
        slots = np.arange(count, dtype=np.float64)
        prefills = (slots - self._prefill_turn) % max(1, count)
        decodes = (slots - self._decode_turn) % max(1, count)
        chosen = _first_pair(cluster, request, prefills, decodes)
        if chosen is None:
            return None
        self._prefill_turn, self._decode_turn = chosen[0] + 1, chosen[1] + 1
        return _placement(cluster, chosen, "in turn")


class RandomChoice:
    """Any worker, by seeded dice."""

    name = "random"
    uses_prefixes = False

    def __init__(self, seed: int) -> None:
        self._dice = np.random.default_rng(seed)

    def choose(self, cluster: ClusterView, request: RequestView) -> Placement | None:
        """Return any sides that fit."""
        count = len(cluster.uncomputed)
        chosen = _first_pair(cluster, request, self._dice.random(count), self._dice.random(count))
        return None if chosen is None else _placement(cluster, chosen, "by dice")


class LeastLoaded:
    """Fewest prompt tokens that wait, and the smallest share of the pool in use."""

    name = "least_loaded"
    uses_prefixes = False

    def choose(self, cluster: ClusterView, request: RequestView) -> Placement | None:
        """Return the least loaded sides."""
        chosen = _first_pair(cluster, request, _waiting(cluster), cluster.used_share)
        return None if chosen is None else _placement(cluster, chosen, "least loaded")


class PowerOfTwo:
    """The less loaded of two workers that seeded dice name, on each side."""

    name = "power_of_two"
    uses_prefixes = False

    def __init__(self, seed: int) -> None:
        self._dice = np.random.default_rng(seed)

    def choose(self, cluster: ClusterView, request: RequestView) -> Placement | None:
        """Return the better of two on each side; the others where none of them fits."""
        prefills = self._two_first(_waiting(cluster), cluster.prefill_tier(request))
        decodes = self._two_first(cluster.used_share, cluster.decode_tier(request))
        chosen = _first_pair(cluster, request, prefills, decodes)
        return None if chosen is None else _placement(cluster, chosen, "the better of two")

    def _two_first(self, loads: Array, tiers: Array) -> Array:
        costs: Array = 2.0 + loads / (1.0 + loads.max(initial=0.0))
        able = np.flatnonzero(np.isfinite(tiers))
        two = self._dice.permutation(able)[:2]
        costs[two] -= 1.0
        costs[two[:1]] -= 1e-9  # of equals the first one named
        return costs


class PrefixAware:
    """Fewest tokens to compute until the prompt is done: what waits, and what is not cached."""

    name = "prefix_aware"
    uses_prefixes = True

    def choose(self, cluster: ClusterView, request: RequestView) -> Placement | None:
        """Return the sides; among decode sides of equal use the one that has more cached."""
        hits = cluster.hits(request)
        uncached = np.maximum(1.0, request.num_prompt_tokens - hits * request.block_size)
        shares = cluster.used_share - hits / (1e3 * request.num_prompt_blocks)
        costs = _waiting(cluster) + uncached
        chosen = _first_pair(cluster, request, costs, shares)
        if chosen is None:
            return None
        return _placement(cluster, chosen, "least to compute", int(hits[chosen[0]]))


def _waiting(cluster: ClusterView) -> Array:
    """Tokens that wait; among equals the pool in use decides."""
    tokens: Array = cluster.uncomputed + 0.5 * cluster.used_share
    return tokens


def _first_pair(
    cluster: ClusterView, request: RequestView, prefill_costs: Array, decode_costs: Array
) -> tuple[int, int] | None:
    """Return slots of the first prefill side with a pair that works, and its first decode side.

    Where no pair works, one that is not known yet.
    """
    prefills = prefill_costs + cluster.prefill_tier(request)
    decodes = decode_costs + cluster.decode_tier(request)
    unknown: tuple[int, int] | None = None
    # Nearly always the first one will do: no need to sort.
    while len(prefills) and np.isfinite(prefills[prefill := int(prefills.argmin())]):
        prefills[prefill] = np.inf
        if cluster.at(prefill).role is Role.DECODE and decodes[prefill] < NO_ROOM_TIER:
            return prefill, prefill
        costs = decodes + cluster.pair_tier[prefill]
        decode = int(costs.argmin())
        if costs[decode] < UNKNOWN_TIER:
            return prefill, decode
        if unknown is None and np.isfinite(costs[decode]):
            unknown = prefill, decode
    return unknown


def _placement(
    cluster: ClusterView, chosen: tuple[int, int], reason: str, num_hit_blocks: int = 0
) -> Placement:
    prefill, decode = cluster.at(chosen[0]), cluster.at(chosen[1])
    return Placement(
        prefill,
        decode,
        reason,
        inputs=(
            ("uncomputed_tokens", prefill.uncomputed_tokens),
            ("hit_blocks", num_hit_blocks),
            ("decode_used_share", round(decode.used_share, 4)),
        ),
    )
