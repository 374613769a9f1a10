"""By which side a stored prefix is loaded, and what the workers are told of it."""

from typing import Literal

import pytest

from common.ids import Epoch, WorkerId
from common.messages.control import CopyPrefix, Goodbye, PlaceRequest, PrefixUnavailable
from common.messages.fields import PairStatus
from services.controller.effects import Effect, Note, Send
from services.controller.limits import ControllerLimits
from services.controller.members import WorkerRecord
from tests.unit.controller.cluster import (
    Cluster,
    heartbeat,
    kv,
    notes,
    only,
    pair_cluster,
    rates,
)
from tests.unit.controller.test_look_ups import HASHES, PROMPT

RATES = rates(prefill=1000, read=10_000)


def store_cluster(
    store_read: Literal["dual", "prefill", "decode"] = "dual",
    num_prefill: int = 1,
    num_decode: int = 1,
    store_load: Literal["auto", "always"] = "auto",
    policy: str = "flowkv",
) -> Cluster:
    """Workers that compute 1000 tokens per second, and read ten times as many."""
    limits = ControllerLimits(policy=policy, store_read=store_read, store_load=store_load)
    cluster = pair_cluster(num_prefill, num_decode, limits=limits, has_store=True)
    for name in [key[0] for key in cluster.core.members.workers]:
        cluster.beat(name, heartbeat(measured=RATES))
    return cluster


def submit_stored(cluster: Cluster, num_blocks: int, name: str = "r") -> list[Effect]:
    """Submit the prompt and answer for the store; returns what placed it."""
    asked = [e for e in cluster.submit(name, 640, prompt=PROMPT) if isinstance(e, Send)]
    return cluster.found(asked[-1].peer[0], name, num_blocks)


def place_of(effects: list[Effect]) -> PlaceRequest:
    (place,) = [m for _, m in only(effects, PlaceRequest) if isinstance(m, PlaceRequest)]
    return place


def copy_of(effects: list[Effect]) -> tuple[Send, CopyPrefix]:
    (send,) = [e for e in effects if isinstance(e, Send) and isinstance(e.message, CopyPrefix)]
    assert isinstance(send.message, CopyPrefix)
    return send, send.message


def facts(effects: list[Effect]) -> dict[str, object]:
    (note,) = [e for e in effects if isinstance(e, Note) and e.event == "request_placed"]
    return dict(note.facts)


def worker(cluster: Cluster, name: str) -> WorkerRecord:
    found = cluster.core.members.worker_named(name)
    assert found is not None
    return found


def test_the_prefill_side_is_told_how_much_to_load_and_counts_what_is_left_as_work() -> None:
    cluster = store_cluster()
    effects = submit_stored(cluster, 8)
    place = place_of(effects)
    assert (place.num_stored_tokens, place.num_prefix_tokens) == (512, 0)
    assert only(effects, CopyPrefix) == []
    assert worker(cluster, "p0").assigned_tokens == 128
    assert worker(cluster, "p0").assigned_reads == 512
    told = facts(effects)
    assert (told["path"], told["path_reason"]) == (
        "prefill_read",
        "p0 reads: both read queues are equal",
    )
    assert told["num_read_tokens"] == 512
    assert (told["num_stored_blocks"], told["prefill_read_queue"], told["decode_read_queue"]) == (
        8,
        0,
        0,
    )


def test_the_decode_side_is_told_to_load_and_to_hand_over_where_its_queue_is_shorter() -> None:
    cluster = store_cluster()
    cluster.beat("p0", heartbeat(measured=RATES, read_queue_tokens=64))
    effects = submit_stored(cluster, 8)
    place = place_of(effects)
    assert (place.num_stored_tokens, place.num_prefix_tokens) == (0, 512)
    send, copy = copy_of(effects)
    assert (send.peer[0], copy.target.worker_id) == ("d0", "p0")
    assert (copy.num_tokens, copy.num_stored_tokens) == (512, 512)
    assert send.payload == (PROMPT[: 4 * 512],)
    assert worker(cluster, "d0").assigned_reads == 512
    assert worker(cluster, "p0").assigned_tokens == 128
    told = facts(effects)
    assert (told["path"], told["copy_from"]) == ("decode_read", "d0")


def test_reads_that_were_just_assigned_count_until_the_worker_tells_of_them() -> None:
    cluster = store_cluster()
    paths = [facts(submit_stored(cluster, 8, f"r{n}"))["path"] for n in range(3)]
    assert paths == ["prefill_read", "decode_read", "prefill_read"]
    cluster.beat("p0", heartbeat(measured=RATES))
    assert worker(cluster, "p0").assigned_reads == 0
    assert facts(submit_stored(cluster, 8, "r3"))["path"] == "prefill_read"


@pytest.mark.parametrize(
    ("store_read", "path"), [("prefill", "prefill_read"), ("decode", "decode_read")]
)
def test_the_setting_chooses_the_side(store_read: Literal["prefill", "decode"], path: str) -> None:
    cluster = store_cluster(store_read)
    for name in ("p0", "d0"):
        cluster.beat(name, heartbeat(measured=RATES, read_queue_tokens=100))
    assert facts(submit_stored(cluster, 8))["path"] == path


def test_what_is_computed_sooner_than_loaded_is_computed() -> None:
    cluster = store_cluster()
    for name in ("p0", "d0"):
        cluster.beat(name, heartbeat(measured=RATES, read_queue_tokens=10_000))
    effects = submit_stored(cluster, 8)
    assert (place_of(effects).num_stored_tokens, place_of(effects).num_prefix_tokens) == (0, 0)
    assert only(effects, CopyPrefix) == []
    assert worker(cluster, "p0").assigned_tokens == 640
    assert facts(effects)["path_reason"] == "computing takes no longer than loading"


def test_what_is_stored_is_loaded_however_long_the_queues_where_that_is_wanted() -> None:
    cluster = store_cluster(store_load="always")
    for name in ("p0", "d0"):
        cluster.beat(name, heartbeat(measured=RATES, read_queue_tokens=10_000))
    effects = submit_stored(cluster, 8)
    assert place_of(effects).num_stored_tokens == 8 * 64
    assert facts(effects)["path"] == "prefill_read"


def holder_cluster() -> Cluster:
    """p1 will be chosen, p0 has 6 blocks cached, and the link between them is fast."""
    cluster = store_cluster(num_prefill=2)
    link = PairStatus(
        worker_id=WorkerId("p1"),
        epoch=Epoch(1),
        transport="shm",
        reason="",
        bytes_per_second=1e9,
    )
    cluster.beat("p0", heartbeat(uncomputed_tokens=9000, measured=RATES, pairs=(link,)))
    cluster.index("p0", 1, HASHES[:6])
    return cluster


def test_a_prefix_comes_from_another_pool_or_from_the_store_never_from_both() -> None:
    for num_stored, path in ((6, "copy"), (9, "prefill_read")):
        cluster = holder_cluster()
        effects = submit_stored(cluster, num_stored)
        place = place_of(effects)
        assert facts(effects)["path"] == path
        assert bool(place.num_stored_tokens) is not bool(place.num_prefix_tokens)
        assert len(only(effects, CopyPrefix)) == (path == "copy")


def test_a_request_that_was_given_back_is_loaded_by_its_next_prefill_side() -> None:
    cluster = store_cluster(num_prefill=2)
    first = only(submit_stored(cluster, 8), PlaceRequest)[0][0][0]
    effects = cluster.given_back(first, "r")
    ((key, place),) = only(effects, PlaceRequest)
    assert key[0] != first
    assert isinstance(place, PlaceRequest)
    assert place.num_stored_tokens or place.num_prefix_tokens


# ---- a prefix that does not come -----------------------------------------------------------------


def unavailable(effects: list[Effect]) -> list[str]:
    return [key[0] for key, _ in only(effects, PrefixUnavailable)]


def test_the_prefill_side_hears_that_the_prefix_will_not_come() -> None:
    cluster = store_cluster("decode")
    submit_stored(cluster, 8)
    effects = cluster.not_copied("d0", "r")
    assert unavailable(effects) == ["p0"]
    assert "prefix_not_copied" in notes(effects)
    assert unavailable(cluster.not_copied("d0", "r")) == [], "it was told"


def test_the_prefill_side_hears_it_also_while_its_decode_waits_for_a_place() -> None:
    cluster = store_cluster("decode")
    submit_stored(cluster, 8)
    cluster.refused("p0", "d0", "r")
    assert cluster.phase("r") == "waiting"
    assert unavailable(cluster.not_copied("d0", "r")) == ["p0"]


def test_only_the_worker_that_was_to_write_the_prefix_can_say_that_it_will_not() -> None:
    cluster = store_cluster("decode", num_decode=2)
    submit_stored(cluster, 8)
    assert unavailable(cluster.not_copied("d1", "r")) == []
    assert unavailable(cluster.not_copied("p0", "r")) == []
    assert unavailable(cluster.not_copied("d0", "unknown")) == []


def test_nobody_waits_for_a_prefix_once_the_prefill_side_is_out_of_it() -> None:
    cluster = store_cluster("decode")
    submit_stored(cluster, 8)
    cluster.started("d0", "r")
    assert unavailable(cluster.not_copied("d0", "r")) == []


def test_the_prefill_side_hears_of_a_holder_that_left() -> None:
    cluster = store_cluster("decode")
    submit_stored(cluster, 8)
    effects = cluster.say("d0", Goodbye(reason="stopped"))
    assert cluster.phase("r") == "waiting"
    assert unavailable(effects) == ["p0"]


def test_the_prefill_side_hears_of_a_holder_without_a_part_in_the_request_that_died() -> None:
    cluster = holder_cluster()
    effects = submit_stored(cluster, 6)
    assert (facts(effects)["copy_from"], place_of(effects).num_prefix_tokens) == ("p0", 384)
    assert unavailable(cluster.tick(100)) == ["p1"]
    assert cluster.phase("r") == "placed"


def test_room_that_one_decode_leaves_goes_to_the_next_prompt_though_others_are_loading() -> None:
    cluster = store_cluster(policy="dualpath")
    num_blocks = 640 // 64 + 1
    placed = [bool(only(submit_stored(cluster, 9, f"r{n}"), PlaceRequest)) for n in range(12)]
    assert placed == [True] * (100 // num_blocks) + [False] * 3
    # Of nine prompts, more than beta in all, a block each is computed and the rest is read.
    loading = heartbeat(measured=RATES, uncomputed_tokens=9 * 64, read_queue_tokens=9 * 288)
    for name in ("p0", "d0"):
        cluster.beat(name, loading)
    for number in range(3):
        cluster.started("d0", f"r{number}")
        decoding = heartbeat(kv(referenced=num_blocks), measured=RATES, num_decoding=1)
        assert only(cluster.beat("d0", decoding), PlaceRequest) == []
        cluster.finished("d0", f"r{number}")
        effects = cluster.beat("d0", heartbeat(kv(cached=(number + 1) * num_blocks)))
        assert place_of(effects).request_id == f"r{9 + number}", "cached blocks give way"
