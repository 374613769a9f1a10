"""The prefix index as the workers feed it, and what placement makes of it."""

import pytest

from common.kv.prefix_cache import PrefixCache
from common.messages.control import CopyPrefix, KVIndexRequested, PlaceRequest
from common.messages.fields import PairStatus, Role
from services.controller.effects import Effect, Note, Send
from services.controller.limits import ControllerLimits
from services.controller.prefixes import ASK_AGAIN_SECONDS
from tests.unit.controller.cluster import (
    MODEL,
    Cluster,
    heartbeat,
    notes,
    only,
    pair_cluster,
    rates,
)

PREFIX_AWARE = ControllerLimits(policy="prefix_aware")
FLOWKV = ControllerLimits(policy="flowkv")
PROMPT = b"".join(number.to_bytes(4, "little") for number in range(640))
HASHES = list(PrefixCache(64, MODEL).chain(None, range(640)))


def facts(effects: list[Effect], event: str) -> dict[str, object]:
    (note,) = [e for e in effects if isinstance(e, Note) and e.event == event]
    return dict(note.facts)


def prefill_of(effects: list[Effect]) -> str:
    ((key, _),) = only(effects, PlaceRequest)
    return key[0]


@pytest.mark.parametrize("limits", [PREFIX_AWARE, FLOWKV], ids=["prefix_aware", "flowkv"])
def test_a_prompt_goes_where_its_prefix_is_cached(limits: ControllerLimits) -> None:
    cluster = pair_cluster(num_prefill=3, limits=limits)
    for name in ("p0", "p1", "p2"):
        cluster.beat(name, heartbeat(measured=rates(prefill=1000)))
    cluster.index("p1", 1, HASHES[:3])
    cluster.index("p2", 1, HASHES[:8])
    effects = cluster.submit("r", 640, prompt=PROMPT)
    assert prefill_of(effects) == "p2"
    assert facts(effects, "request_placed")["policy"] == limits.policy
    cluster.index("p2", 2, removed=HASHES[2:8])
    cluster.beat("p2", heartbeat(measured=rates(prefill=1000)))
    assert prefill_of(cluster.submit("r2", 640, prompt=PROMPT)) == "p1"


def test_only_what_is_not_cached_counts_as_the_worker_s_work() -> None:
    cluster = pair_cluster(limits=PREFIX_AWARE)
    cluster.index("p0", 1, HASHES[:8])
    cluster.submit("r", 640, prompt=PROMPT)
    worker = cluster.core.members.worker_named("p0")
    assert worker is not None
    assert worker.assigned_tokens == 640 - 8 * 64


def test_a_gap_is_asked_for_once_a_second_until_a_snapshot_closes_it() -> None:
    cluster = pair_cluster(limits=PREFIX_AWARE)
    assert only(cluster.index("p0", 1, HASHES[:1]), KVIndexRequested) == []
    gap = cluster.index("p0", 3, HASHES[2:3])
    assert [key[0] for key, _ in only(gap, KVIndexRequested)] == ["p0"]
    assert notes(gap) == ["kv_index_gap"]
    assert only(cluster.index("p0", 4, HASHES[3:4]), KVIndexRequested) == []
    cluster.now += ASK_AGAIN_SECONDS
    assert len(only(cluster.index("p0", 5, HASHES[4:5]), KVIndexRequested)) == 1
    assert only(cluster.index("p0", 6, HASHES[:6], is_snapshot=True), KVIndexRequested) == []
    assert cluster.core.prefixes.index.num_blocks == 6


def test_a_heartbeat_that_names_a_batch_which_never_came_shows_the_gap() -> None:
    cluster = pair_cluster(limits=PREFIX_AWARE)
    assert only(cluster.beat("p0", heartbeat(index_sequence=0)), KVIndexRequested) == []
    lost = cluster.beat("p0", heartbeat(index_sequence=1))
    assert len(only(lost, KVIndexRequested)) == 1


def test_a_controller_that_was_started_anew_rebuilds_its_index_from_snapshots() -> None:
    before = pair_cluster(limits=PREFIX_AWARE)
    before.index("p0", 1, HASHES[:4])
    after = Cluster(PREFIX_AWARE)
    after.join_gateway()
    after.beat("p0")
    after.join("p0", Role.PREFILL)
    after.join("d0", Role.DECODE)
    asked = after.beat("p0", heartbeat(index_sequence=1))
    assert len(only(asked, KVIndexRequested)) == 1
    after.index("p0", 2, HASHES[:4], is_snapshot=True)
    assert after.core.prefixes.index.hits(HASHES) == before.core.prefixes.index.hits(HASHES)


def test_what_a_dead_worker_had_is_forgotten() -> None:
    cluster = pair_cluster(limits=PREFIX_AWARE)
    cluster.index("p0", 1, HASHES)
    cluster.tick(100)
    assert cluster.core.prefixes.index.num_blocks == 0


def test_no_index_is_kept_for_a_policy_that_reads_none() -> None:
    cluster = pair_cluster()
    assert cluster.index("p0", 5, HASHES) == []
    assert cluster.beat("p0", heartbeat(index_sequence=5))
    assert cluster.core.prefixes.index.num_blocks == 0


def test_index_events_in_another_shape_are_the_worker_s_fault() -> None:
    cluster = pair_cluster(limits=PREFIX_AWARE)
    assert notes(cluster.index("p0", 1, [b"short"])) == ["protocol_violation"]


def test_a_prefix_that_is_cheaper_to_copy_than_to_compute_is_copied_from_its_holder() -> None:
    cluster = pair_cluster(num_prefill=2, limits=FLOWKV)
    link = PairStatus(
        worker_id="p1",
        epoch=1,
        transport="shm",
        reason="",
        bytes_per_second=1e9,  # type: ignore[arg-type]  # ids
    )
    measured = rates(prefill=1000)
    cluster.beat("p0", heartbeat(uncomputed_tokens=9000, measured=measured, pairs=(link,)))
    cluster.beat("p1", heartbeat(measured=measured))
    cluster.beat("d0")
    cluster.index("p0", 1, HASHES[:8])
    effects = cluster.submit("r", 640, prompt=PROMPT)
    assert prefill_of(effects) == "p1"
    ((_, place),) = only(effects, PlaceRequest)
    assert isinstance(place, PlaceRequest)
    assert place.num_prefix_tokens == 8 * 64
    (copy,) = [e for e in effects if isinstance(e, Send) and isinstance(e.message, CopyPrefix)]
    assert copy.peer == ("p0", 1)
    assert isinstance(copy.message, CopyPrefix)
    assert (copy.message.target.worker_id, copy.message.num_tokens) == ("p1", 8 * 64)
    assert copy.payload == (PROMPT[: 4 * 8 * 64],)
    told = facts(effects, "request_placed")
    assert (told["copy_from"], told["num_prefix_tokens"]) == ("p0", 8 * 64)
