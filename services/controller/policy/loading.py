"""Whether what the store has of a prompt is loaded, and by which side (DualPath; papers 2.2, 2.7).

Once both sides of a request are chosen, its stored prefix can come into either pool:

* the prefill side reads it, and its handoff then moves the whole prompt to the decode side;
* the decode side reads it and hands it to the prefill side, whose handoff moves the rest alone.

One side reads all of a request: the one whose queue of reads is shorter, in tokens, of equal ones
the prefill side (``dualpath.path``). It does so if that is clearly sooner than computing the same
tokens:

    (missing(side) + queue(side)) / read_rate(side) + handed over  <  0.9 x saved / prefill_rate

``saved`` are the stored tokens that the prefill side has not cached, ``missing`` those that the
reading side has not. What the decode side hands over takes ``saved`` tokens over its link to the
prefill side, where that was measured. While a rate is unknown loading is tried, and so measured.

Another worker's pool may hold a prefix of the prompt, too, and the policy have found that copying
it pays (``Placement.copy_from``). Then the way by which the prompt is computed sooner is taken,
never both; with an unknown rate of reads the one that leaves less to compute, the copy if equal.

``store_load`` "always" asks nothing of this: whatever the store has and the prefill side lacks is
loaded.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal, NamedTuple

from common.messages.fields import Role
from services.controller.policy.dualpath.engines import Side
from services.controller.policy.dualpath.path import reading_side
from services.controller.policy.estimates import DEFAULT_PREFILL_RATE, link_rate
from services.controller.policy.views import Pairing, Placement, RequestView, WorkerView

MAX_LOAD_SHARE = 0.9
"""Most that loading may take of the time to compute the same tokens."""

StoreRead = Literal["dual", "prefill", "decode"]
"""Which sides may read: either, or one alone. A worker that is both sides reads for itself."""
StoreLoad = Literal["auto", "always"]
"""Whether loading is weighed against computing and copying, or never given up for them."""

Inputs = tuple[tuple[str, int | float], ...]


class Path(StrEnum):
    """How the leading blocks of a prompt come into the prefill side's pool."""

    COMPUTE = "compute"
    COPY = "copy"
    PREFILL_READ = "prefill_read"
    DECODE_READ = "decode_read"


@dataclass(frozen=True, slots=True)
class Loading:
    """The path of one request: ``num_blocks`` leading blocks of its prompt come by it.

    ``num_read_tokens`` are those of them that its reading side has to read from the store.
    ``inputs`` are for the log.
    """

    path: Path
    num_blocks: int
    num_read_tokens: int
    reason: str
    inputs: Inputs = ()


class _Reader(NamedTuple):
    """A side that may read, and why it is this one; ``seconds`` are 0 while not measured."""

    view: WorkerView
    path: Path
    reason: str
    num_tokens: int
    seconds: float


def choose_path(
    placement: Placement,
    request: RequestView,
    store_read: StoreRead = "dual",
    holder: WorkerView | None = None,
    store_load: StoreLoad = "auto",
) -> Loading:
    """Return how the prompt's leading blocks come to the prefill side of a placement.

    ``holder`` is the worker that ``placement.copy_from`` names, if it is still there.
    """
    prefill, num_copied = placement.prefill, placement.num_copy_blocks
    is_copied = holder is not None and holder.key != prefill.key and num_copied > 0
    copier = holder if is_copied else None
    without = Loading(Path.COMPUTE, 0, 0, "")
    if copier is not None:
        without = Loading(Path.COPY, num_copied, 0, "")
    if not request.num_stored_blocks:
        return without
    queues = (
        ("num_stored_blocks", request.num_stored_blocks),
        ("prefill_read_queue", prefill.read_queue_tokens),
        ("decode_read_queue", placement.decode.read_queue_tokens),
    )
    num_gained = request.num_stored_blocks - request.hits.get(prefill.key, 0)
    if num_gained <= 0:
        reason = "the prefill side has cached what is stored"
        return replace(without, reason=reason, inputs=queues)
    reader = _choose_reader(placement, request, store_read, num_gained)
    if reader is None:
        reason = "neither side may read from the store"
        return replace(without, reason=reason, inputs=queues)
    saved = num_gained * request.block_size * _token_seconds(prefill)
    inputs = (
        *queues,
        ("load_seconds", round(reader.seconds, 6)),
        ("saved_seconds", round(saved, 6)),
    )
    if store_load == "always":
        return _loading(reader, request, inputs)
    if prefill.prefill_rate and reader.seconds >= MAX_LOAD_SHARE * saved:
        reason = "computing takes no longer than loading"
        return replace(without, reason=reason, inputs=inputs)
    if copier is not None and not _is_sooner(reader, copier, prefill, request, num_copied):
        reason = f"the copy from {copier.worker_id} takes no longer than loading"
        return replace(without, reason=reason, inputs=inputs)
    return _loading(reader, request, inputs)


def _loading(reader: _Reader, request: RequestView, inputs: Inputs) -> Loading:
    return Loading(reader.path, request.num_stored_blocks, reader.num_tokens, reader.reason, inputs)


def _choose_reader(
    placement: Placement, request: RequestView, store_read: StoreRead, num_gained: int
) -> _Reader | None:
    """Return the side that would read, if one may."""
    prefill, decode = placement.prefill, placement.decode
    if prefill.key == decode.key:
        if not prefill.has_store:
            return None
        return _reader(prefill, Path.PREFILL_READ, "it does both", request, 0.0)
    link = decode.link_rates.get(prefill.key, 0.0)
    handed = num_gained * decode.block_bytes / link if link else 0.0
    may_prefill = store_read != "decode" and prefill.has_store
    may_decode = store_read != "prefill" and decode.has_store and _can_hand(decode, prefill)
    if may_prefill and may_decode:
        queues = prefill.read_queue_tokens, decode.read_queue_tokens
        may_prefill = reading_side(*queues) is Side.PREFILL
        is_tie = queues[0] == queues[1]
        reason = "both read queues are equal" if is_tie else "its read queue is shorter"
    else:
        reason = "only it may read"
    if may_prefill:
        return _reader(prefill, Path.PREFILL_READ, reason, request, 0.0)
    if may_decode:
        return _reader(decode, Path.DECODE_READ, reason, request, handed)
    return None


def _reader(
    view: WorkerView, path: Path, reason: str, request: RequestView, handed: float
) -> _Reader:
    missing = max(0, request.num_stored_blocks - request.hits.get(view.key, 0))
    num_tokens = missing * request.block_size
    seconds = 0.0
    if view.read_rate:
        seconds = (num_tokens + view.read_queue_tokens) / view.read_rate + handed
    return _Reader(view, path, f"{view.worker_id} reads: {reason}", num_tokens, seconds)


def _can_hand(source: WorkerView, target: WorkerView) -> bool:
    """Whether the decode side can write into the prefill side's pool."""
    is_pair = Role.COMBINED not in (source.role, target.role)
    return is_pair and source.pairing_with(target) is not Pairing.BROKEN


def _token_seconds(prefill: WorkerView) -> float:
    return 1.0 / (prefill.prefill_rate or DEFAULT_PREFILL_RATE)


def _copy_seconds(
    holder: WorkerView, prefill: WorkerView, request: RequestView, num_blocks: int
) -> float:
    num_moved = max(0, num_blocks - request.hits.get(prefill.key, 0))
    return num_moved * prefill.block_bytes / link_rate(holder, prefill)


def _compute_seconds(prefill: WorkerView, request: RequestView, num_blocks: int) -> float:
    num_hits = max(num_blocks, request.hits.get(prefill.key, 0))
    return request.num_uncached(num_hits) * _token_seconds(prefill)


def _is_sooner(
    reader: _Reader,
    copier: WorkerView,
    prefill: WorkerView,
    request: RequestView,
    num_copied: int,
) -> bool:
    """Whether the prompt is computed sooner after loading than after the copy."""
    if not reader.view.read_rate:
        return request.num_stored_blocks > num_copied
    loaded = reader.seconds + _compute_seconds(prefill, request, request.num_stored_blocks)
    copied = _copy_seconds(copier, prefill, request, num_copied)
    return loaded < copied + _compute_seconds(prefill, request, num_copied)
