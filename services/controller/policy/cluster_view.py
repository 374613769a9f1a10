"""The cluster as arrays: one slot per worker, kept up to date, so that placing is cheap.

Every array has one element per slot; a slot is taken by a worker's first ``update`` and free again
after ``remove``. ``pair_tier[p, d]`` is 0 where the pair works (and for p = d), ``UNKNOWN_TIER``
where that is not known, and infinite where it is broken or roles forbid it: a combined worker hands
over to nobody, and nobody to it. ``link_seconds[p, d]`` are seconds per byte.
"""

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from common.messages.fields import Role
from services.controller.policy.estimates import (
    DEFAULT_PREFILL_RATE,
    Objectives,
    decode_score,
    decode_weight,
    link_rate,
    prefill_score,
)
from services.controller.policy.views import Incarnation, Pairing, RequestView, WorkerView

Array = NDArray[np.float64]

TIER = 1e6
"""Costs are seconds or tokens below this; each whole TIER above puts a choice behind all others."""
UNKNOWN_TIER = 8 * TIER
NO_ROOM_TIER = 4 * TIER
DECODE_FULL_TIER = 2 * TIER
PREFILL_FULL_TIER = TIER
INFINITE = float("inf")
MAX_BLOCKS = 2**53

(
    _TOTAL,
    _FREE,
    _USED_SHARE,
    _UNCOMPUTED,
    _RATE,
    _TOKEN_SECONDS,
    _PREFILL_TIER,
    _PREFILL_SCORE_TIER,
    _DECODE_TIER,
    _DECODE_SCORE_TIER,
    _DECODE_WEIGHT,
    _BLOCK_BYTES,
    _LOCAL_TIER,
    _ROLE_TIER,
    _NUM_COLUMNS,
) = range(15)
_TIERS = [
    _PREFILL_TIER,
    _PREFILL_SCORE_TIER,
    _DECODE_TIER,
    _DECODE_SCORE_TIER,
    _LOCAL_TIER,
    _ROLE_TIER,
]


class ClusterView:
    """All ready workers, in the order in which they came.

    ``has_fixed_roles`` (roles=manual) keeps prompts from decode workers however short they are;
    help is then not to be granted either.
    """

    def __init__(
        self,
        views: Iterable[WorkerView] = (),
        *,
        objectives: Objectives | None = None,
        has_fixed_roles: bool = False,
    ) -> None:
        self.objectives = objectives or Objectives()
        self.has_fixed_roles = has_fixed_roles
        self._slots: dict[Incarnation, int] = {}
        self._views: list[WorkerView | None] = []
        self._free_slots: list[int] = []
        self._columns = np.zeros((_NUM_COLUMNS, 0))
        self._pair_tier = np.zeros((0, 0))
        self._link_seconds = np.zeros((0, 0))
        self._fastest = 0.0
        self._least_total = MAX_BLOCKS
        for view in views:
            self.update(view)

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[WorkerView]:
        return (view for view in self._views if view is not None)

    def get(self, key: Incarnation) -> WorkerView | None:
        """Return a worker's last view."""
        slot = self._slots.get(key)
        return None if slot is None else self._views[slot]

    def update(self, view: WorkerView) -> None:
        """Take a worker in, or its news."""
        key = view.key
        slot = self._slots.get(key)
        before = None
        if slot is None:
            slot = self._new_slot(key)
        else:
            before = self._views[slot]
        self._views[slot] = view
        if before is None or before.role is not view.role:
            self._relate(slot, view)
        elif before.pairings != view.pairings or before.link_rates != view.link_rates:
            self._relate_row(slot, view)
        if view.prefill_rate > self._fastest:
            self._take_fastest(view.prefill_rate)
        score = decode_score(view, self.objectives)
        prefill_tier = 0.0 if view.can_prefill and view.can_take_prompt else INFINITE
        is_overloaded = prefill_score(view, 0, self.objectives) >= 1.0
        decode_tier = 0.0 if view.can_decode else INFINITE
        self._columns[:, slot] = (
            view.total_blocks,
            view.total_blocks - view.used_blocks,
            view.used_share,
            view.uncomputed_tokens,
            view.prefill_rate,
            1.0 / (view.prefill_rate or self.fastest_rate),
            prefill_tier,
            prefill_tier + PREFILL_FULL_TIER * is_overloaded,
            decode_tier,
            decode_tier + DECODE_FULL_TIER * (score >= 1.0),
            decode_weight(view, score, self.objectives),
            view.block_bytes,
            0.0 if view.role is Role.DECODE and view.can_take_prompt else INFINITE,
            0.0 if view.can_prefill else INFINITE,
        )
        self._least_total = min(self._least_total, view.total_blocks)

    def remove(self, key: Incarnation) -> None:
        """Let a worker go; an unknown one is ignored."""
        slot = self._slots.pop(key, None)
        if slot is None:
            return
        self._views[slot] = None
        self._free_slots.append(slot)
        self._blank(slot)
        self._take_fastest(max((view.prefill_rate for view in self), default=0.0))
        self._least_total = min((view.total_blocks for view in self), default=MAX_BLOCKS)

    def can_serve(self, request: RequestView) -> bool:
        """Whether roles, pools and pairs allow the request at all, once there is time for it."""
        columns = self._columns
        holds = columns[_TOTAL] >= request.num_blocks
        prefills = np.flatnonzero(holds & (columns[_ROLE_TIER] < INFINITE))
        decodes = holds & (columns[_DECODE_TIER] < INFINITE)
        return bool((self._pair_tier[prefills][:, decodes] < INFINITE).any())

    def at(self, slot: int) -> WorkerView:
        """Return the worker of a slot that a policy chose."""
        view = self._views[slot]
        if view is None:
            raise AssertionError(f"nobody is in slot {slot}")
        return view

    def slots(self) -> Iterator[tuple[int, WorkerView]]:
        """Yield every worker with its slot."""
        return ((slot, view) for slot, view in enumerate(self._views) if view is not None)

    def slot_of(self, key: Incarnation) -> int | None:
        """Return a worker's slot."""
        return self._slots.get(key)

    def hits(self, request: RequestView) -> Array:
        """Cached blocks of the prompt in each slot."""
        found = np.zeros(len(self._views))
        slots = self._slots
        for key, num_blocks in request.hits.items():
            slot = slots.get(key)
            if slot is not None:
                found[slot] = num_blocks
        return found

    def prefill_tier(self, request: RequestView, *, by_score: bool = False) -> Array:
        """0 where a prompt may go now, infinite where not.

        ``by_score`` puts workers whose load score is 1 or more a tier behind.
        """
        return self._holding(request, self._row(_PREFILL_SCORE_TIER if by_score else _PREFILL_TIER))

    def decode_tier(self, request: RequestView, *, by_score: bool = False) -> Array:
        """0 where a decode has room now, ``NO_ROOM_TIER`` where it may have later, or infinite.

        ``by_score`` puts workers whose load score is 1 or more a tier behind.
        """
        tier = self._row(_DECODE_SCORE_TIER if by_score else _DECODE_TIER)
        has_no_room = self._columns[_FREE] < request.num_blocks
        return self._holding(request, tier + NO_ROOM_TIER * has_no_room)

    def _holding(self, request: RequestView, tier: Array) -> Array:
        """Return tiers that are infinite where even the empty pool would be too small."""
        if self._least_total >= request.num_blocks:
            return tier
        return np.where(self._row(_TOTAL) >= request.num_blocks, tier, INFINITE)

    @property
    def uncomputed(self) -> Array:
        """Prompt tokens that wait to be computed."""
        return self._row(_UNCOMPUTED)

    @property
    def used_share(self) -> Array:
        """Share of each pool in use."""
        return self._row(_USED_SHARE)

    @property
    def pair_tier(self) -> Array:
        """See the module's head; (prefill slot, decode slot)."""
        return self._pair_tier

    @property
    def link_seconds(self) -> Array:
        """Seconds per byte; (source slot, target slot)."""
        return self._link_seconds

    @property
    def fastest_rate(self) -> float:
        """Highest prefill rate measured: what a worker gets credit for until it is measured."""
        return self._fastest or DEFAULT_PREFILL_RATE

    @property
    def token_seconds(self) -> Array:
        """Seconds per prompt token; who is not measured yet gets work, and so is measured."""
        return self._row(_TOKEN_SECONDS)

    @property
    def decode_weights(self) -> Array:
        """``decode_weight`` of each slot."""
        return self._row(_DECODE_WEIGHT)

    @property
    def block_bytes(self) -> Array:
        """Bytes of one block of each worker's pool."""
        return self._row(_BLOCK_BYTES)

    @property
    def local_tier(self) -> Array:
        """0 for workers of the decode role that may get a prompt now."""
        return self._row(_LOCAL_TIER)

    def _take_fastest(self, rate: float) -> None:
        """Note the highest rate measured, which is also that of those not measured yet."""
        self._fastest = rate
        unknown = self._columns[_RATE] <= 0
        self._columns[_TOKEN_SECONDS, unknown] = 1.0 / self.fastest_rate

    def _row(self, column: int) -> Array:
        row: Array = self._columns[column]
        return row

    def _new_slot(self, key: Incarnation) -> int:
        if self._free_slots:
            slot = self._free_slots.pop()
        else:
            slot = len(self._views)
            self._views.append(None)
            self._columns = np.pad(self._columns, ((0, 0), (0, 1)))
            self._pair_tier = np.pad(self._pair_tier, (0, 1), constant_values=INFINITE)
            self._link_seconds = np.pad(self._link_seconds, (0, 1))
        self._slots[key] = slot
        return slot

    def _blank(self, slot: int) -> None:
        self._columns[:, slot] = 0.0
        self._columns[_DECODE_WEIGHT, slot] = 1.0
        self._columns[_TIERS, slot] = INFINITE
        self._pair_tier[slot, :] = INFINITE
        self._pair_tier[:, slot] = INFINITE

    def _relate(self, slot: int, view: WorkerView) -> None:
        self._relate_row(slot, view)
        for other_slot, other in enumerate(self._views):
            if other is not None:
                self._relate_pair(other_slot, other, slot, view)

    def _relate_row(self, slot: int, view: WorkerView) -> None:
        for other_slot, other in enumerate(self._views):
            if other is not None:
                self._relate_pair(slot, view, other_slot, other)

    def _relate_pair(
        self, source: int, prefill: WorkerView, target: int, decode: WorkerView
    ) -> None:
        if source == target:
            self._pair_tier[source, target] = 0.0
            self._link_seconds[source, target] = 0.0
            return
        self._pair_tier[source, target] = _tier(prefill, decode)
        self._link_seconds[source, target] = 1.0 / link_rate(prefill, decode)


def _tier(prefill: WorkerView, decode: WorkerView) -> float:
    if Role.COMBINED in (prefill.role, decode.role):
        return INFINITE
    match prefill.pairing_with(decode):
        case Pairing.WORKS:
            return 0.0
        case Pairing.UNKNOWN:
            return UNKNOWN_TIER
        case Pairing.BROKEN:
            return INFINITE
