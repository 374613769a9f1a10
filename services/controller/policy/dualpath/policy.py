"""DualPath's choice in today's controller: every worker is an engine, a host is a node.

The controller's queue is Algorithm 1's; a placement is one head of that queue.

* **Prefill side.** Workers that may compute prompts, in the order of Algorithm 1: those of a host
  with a short queue of reads first, then the fewest tokens, with those that this request adds: the
  ones that it has neither cached nor can load, and for those that it would load as many as it
  could compute in that time. So a prefix that is cached counts, and more so where reads are slow.
  Who has more than beta tokens gets none. Alpha is three seconds of what a host's workers read
  together. Among equals the worker's own queue of reads decides.
* **Decode side.** Hosts are the groups of phase 1: the one with the fewest tokens per worker comes
  first, the next one where it has nobody with room whom the prefill side can hand over to. Phase 2
  chooses inside a host; R is this request alone, since it is the head.

Tokens of a decode worker are the room that its requests hold or will hold. A worker that computes
prompts only to help keeps those it has room for. Where no decode worker has room the request stays
queued. How far ahead a worker is given prompts is beta's to say, and not ``can_take_prompt``'s.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from common.messages.fields import Role
from services.controller.policy.cluster_view import INFINITE, UNKNOWN_TIER, ClusterView
from services.controller.policy.dualpath.decode_side import (
    REASONS as DECODE_REASONS,
)
from services.controller.policy.dualpath.decode_side import (
    DecodeEngine,
    GroupLoad,
    Round,
    TokenClass,
)
from services.controller.policy.dualpath.engines import EngineId, GroupId, QueuedRequest
from services.controller.policy.dualpath.prefill_side import (
    REASONS as PREFILL_REASONS,
)
from services.controller.policy.dualpath.prefill_side import (
    PrefillEngine,
    preference,
)
from services.controller.policy.dualpath.thresholds import PRESETS, Adaptive, Horizons, Thresholds
from services.controller.policy.views import Placement, RequestView, WorkerView


@dataclass(frozen=True, slots=True)
class _Decode:
    """A decode side that phase 2 chose, its class and Z."""

    slot: int
    token_class: TokenClass
    limit: float


class DualPath:
    """Algorithm 1 for the prefill side, phases 1 and 2 for the decode side."""

    name = "dualpath"
    uses_prefixes = True

    def __init__(
        self, horizons: Horizons = PRESETS["medium"], *, is_adaptive: bool = False
    ) -> None:
        """With ``is_adaptive`` the thresholds follow what ``adapt`` is told."""
        self.is_adaptive = is_adaptive
        self._horizons = horizons
        self._factors = Adaptive()

    def adapt(self, link_use: float, compute_use: float) -> Adaptive:
        """Note how used links and engines were of late, 0 to 1; returns the factors from now on."""
        self._factors = self._factors.after(link_use, compute_use)
        return self._factors

    def choose(self, cluster: ClusterView, request: RequestView) -> Placement | None:
        """Return the first prefill side with a pair that works, and its decode side.

        Where no pair works, one that is not known yet; None while no engine may have the request.
        """
        prefills = self._prefills(cluster, request)
        decodes = _decode_groups(cluster, request)
        unknown: tuple[PrefillEngine, _Decode] | None = None
        for prefill in prefills:
            slot = int(prefill.engine)
            decode = _kept(cluster, request, slot) or _decode_for(
                cluster, request, slot, decodes, UNKNOWN_TIER
            )
            if decode is not None:
                return _placement(cluster, request, prefill, decode)
            if unknown is None:
                decode = _decode_for(cluster, request, slot, decodes, INFINITE)
                unknown = None if decode is None else (prefill, decode)
        return None if unknown is None else _placement(cluster, request, *unknown)

    def _prefills(self, cluster: ClusterView, request: RequestView) -> list[PrefillEngine]:
        """Return the engines that may get the prompt, the best first."""
        queues: defaultdict[str, int] = defaultdict(int)
        rates: defaultdict[str, float] = defaultdict(float)
        for view in cluster:
            queues[view.host] += view.read_queue_tokens
            rates[view.host] += view.read_rate
        found: list[tuple[tuple[int, int, int, int, int], PrefillEngine]] = []
        for slot, view in cluster.slots():
            if not view.can_prefill or not view.can_hold(request.num_blocks):
                continue
            compute_rate = view.prefill_rate or cluster.fastest_rate
            profiled = Thresholds.of(rates[view.host], compute_rate, self._horizons)
            thresholds = self._factors.applied_to(profiled)
            engine = PrefillEngine(
                EngineId(slot), view.uncomputed_tokens, queues[view.host], thresholds
            )
            key = preference(engine, _added(request, view, compute_rate))
            if key is not None:
                category, tokens, queue, _ = key
                found.append(((category, tokens, queue, view.read_queue_tokens, slot), engine))
        return [engine for _, engine in sorted(found, key=lambda one: one[0])]


def _added(request: RequestView, view: WorkerView, compute_rate: float) -> int:
    """Return the tokens that a request adds to a worker, loads in terms of computing.

    Loads take no time while their rate is not known; they are tried then, and so measured.
    """
    num_hits = request.hits.get(view.key, 0)
    loaded = max(0, request.num_stored_blocks - num_hits) * request.block_size
    share = min(1.0, compute_rate / view.read_rate) if view.read_rate > 0 else 0.0
    num_uncached = request.num_uncached(max(num_hits, request.num_stored_blocks))
    return num_uncached + round(loaded * share)


def _kept(cluster: ClusterView, request: RequestView, slot: int) -> _Decode | None:
    """Return a helping decode worker as its own decode side, where it has room."""
    view = cluster.at(slot)
    if view.role is not Role.DECODE or not view.has_room(request.num_blocks):
        return None
    return _decode_among(request, [(slot, view)], {slot})


_Group = list[tuple[int, WorkerView]]


def _decode_groups(cluster: ClusterView, request: RequestView) -> list[_Group]:
    """Return the decode workers by host, in the order of phase 1."""
    by_host: dict[str, _Group] = {}
    loads: dict[str, GroupLoad] = {}
    for slot, view in cluster.slots():
        if not view.can_decode:
            continue
        load = loads.setdefault(view.host, GroupLoad(GroupId(len(loads)), 0, 0, 0))
        load.num_engines += 1
        load.num_tokens += view.used_blocks * request.block_size
        by_host.setdefault(view.host, []).append((slot, view))
    return [by_host[host] for host in sorted(by_host, key=lambda host: loads[host].key)]


def _decode_for(
    cluster: ClusterView,
    request: RequestView,
    prefill: int,
    groups: Sequence[_Group],
    below_tier: float,
) -> _Decode | None:
    """Return the decode side among those whose pair with ``prefill`` is of a better tier."""
    tiers: list[float] = cluster.pair_tier[prefill].tolist()
    for group in groups:
        reached = {slot for slot, _ in group if tiers[slot] < below_tier}
        if reached and (found := _decode_among(request, group, reached)) is not None:
            return found
    return None


def _decode_among(request: RequestView, group: _Group, reached: set[int]) -> _Decode | None:
    """Phase 2 over one host's workers; to those that are not reached their room is no use."""
    engines = [
        DecodeEngine(
            EngineId(slot),
            view.num_unfinished,
            view.used_blocks * request.block_size,
            view.total_blocks - view.used_blocks if slot in reached else 0,
        )
        for slot, view in group
    ]
    phase = Round(engines, request.num_prompt_tokens)
    hits = {EngineId(slot): request.hits.get(view.key, 0) for slot, view in group}
    asked = QueuedRequest("", request.num_prompt_tokens, request.num_blocks)
    chosen = phase.choose(asked, hits)
    if chosen is None:
        return None
    engine, token_class = chosen
    return _Decode(int(engine.engine), token_class, phase.limit)


def _placement(
    cluster: ClusterView, request: RequestView, engine: PrefillEngine, chosen: _Decode
) -> Placement:
    prefill, decode = cluster.at(int(engine.engine)), cluster.at(chosen.slot)
    category = engine.category
    return Placement(
        prefill,
        decode,
        f"prefill: {PREFILL_REASONS[category]}; decode: {DECODE_REASONS[chosen.token_class]}",
        inputs=(
            ("prefill_category", f"C{category:d}"),
            ("decode_category", chosen.token_class.value),
            ("uncomputed_tokens", prefill.uncomputed_tokens),
            ("hit_blocks", request.hits.get(prefill.key, 0)),
            (
                "added_tokens",
                _added(request, prefill, prefill.prefill_rate or cluster.fastest_rate),
            ),
            ("beta", round(engine.thresholds.compute_tokens)),
            ("read_queue_tokens", engine.read_queue_tokens),
            ("alpha", _finite(engine.thresholds.read_tokens)),
            ("decode_requests", decode.num_unfinished),
            ("decode_tokens", decode.used_blocks * request.block_size),
            ("z", round(chosen.limit)),
            ("decode_used_share", round(decode.used_share, 4)),
        ),
    )


def _finite(tokens: float) -> int | str:
    """Logs are JSON, which has no infinity."""
    return "unknown" if tokens == INFINITE else round(tokens)
