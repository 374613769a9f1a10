"""Refused decodes: who gets the room that comes."""

from common.messages.control import PlaceDecode
from common.messages.fields import KVCounts
from services.controller.effects import Effect
from tests.unit.controller.cluster import Cluster, heartbeat, kv, only, pair_cluster


def room(cluster: Cluster, counts: KVCounts) -> list[Effect]:
    cluster.now += 1
    return cluster.beat("d0", heartbeat(counts))


def asked(effects: list[Effect]) -> list[str]:
    return [
        message.request_id
        for _, message in only(effects, PlaceDecode)
        if isinstance(message, PlaceDecode)
    ]


def test_requests_that_have_not_asked_for_room_do_not_keep_a_refused_one_from_it() -> None:
    cluster = pair_cluster()
    cluster.submit("refused", 20 * 64)
    cluster.refused("p0", "d0", "refused")
    for number in range(10):
        cluster.submit(f"behind it in the prefill queue {number}", 20 * 64)
    assert asked(room(cluster, kv(referenced=50))) == ["refused"]


def test_a_small_request_does_not_overtake_an_older_large_one() -> None:
    cluster = pair_cluster()
    for name, num_blocks in (("large", 60), ("small", 5)):
        cluster.submit(name, num_blocks * 64)
        cluster.refused("p0", "d0", name)
    assert asked(room(cluster, kv(referenced=80))) == []
    assert asked(room(cluster, kv(referenced=20))) == ["large", "small"]


def test_a_small_request_that_is_refused_later_does_not_ask_again_before_the_large_one() -> None:
    cluster = pair_cluster()
    cluster.submit("large", 60 * 64)
    cluster.refused("p0", "d0", "large")
    cluster.submit("small", 5 * 64)
    cluster.refused("p0", "d0", "small")
    assert asked(room(cluster, kv(referenced=80))) == []
    cluster.cancel("large")
    assert asked(room(cluster, kv(referenced=80))) == ["small"]


def test_room_is_given_once_between_two_heartbeats() -> None:
    cluster = pair_cluster()
    for name in ("first", "second"):
        cluster.submit(name, 40 * 64)
        cluster.refused("p0", "d0", name)
    assert asked(room(cluster, kv(referenced=50))) == ["first"]
    assert asked(cluster.tick(after=0.1)) == []
    assert asked(room(cluster, kv(referenced=10, in_transfer=40))) == ["second"]


def test_a_request_that_is_refused_again_keeps_its_place() -> None:
    cluster = pair_cluster()
    for name in ("first", "second"):
        cluster.submit(name, 40 * 64)
        cluster.now += 1
        cluster.refused("p0", "d0", name)
    assert asked(room(cluster, kv(referenced=50))) == ["first"]
    cluster.refused("p0", "d0", "first")
    assert asked(room(cluster, kv(referenced=50))) == ["first"]
