"""Hot prefixes that the controller has copied ahead of need, and how such copies end."""

import pytest

from common.ids import RequestId
from common.kv.prefix_cache import PrefixCache
from common.messages.control import CopyPrefix, PrefixUnavailable
from common.messages.fields import Role
from services.controller.effects import Effect, Note, Send
from services.controller.limits import ControllerLimits
from services.controller.policy.prefix_heat import HALF_LIFE_SECONDS, HOT_USES
from services.controller.replicas import COOL_DOWN_SECONDS, MAX_COPY_SECONDS
from tests.unit.controller.cluster import MODEL, Cluster, heartbeat, notes, only, pair_cluster

ROUND = 0.2
ENOUGH = int(HOT_USES) + 1  # they fade in the moment until the next round
NUM_BLOCKS = 8
NUM_TOKENS = NUM_BLOCKS * 64
SHARED = b"".join(number.to_bytes(4, "little") for number in range(NUM_TOKENS))
HASHES = list(PrefixCache(64, MODEL).chain(None, range(NUM_TOKENS)))


def prompt(number: int) -> bytes:
    """Return a prompt that shares all but its last block with the others."""
    return SHARED + number.to_bytes(4, "little") * 64


def use(cluster: Cluster, count: int = ENOUGH, first: int = 0) -> None:
    """Let so many requests come and go that begin alike."""
    for number in range(first, first + count):
        cluster.submit(f"r{number}", NUM_TOKENS + 64, prompt=prompt(number))
        record = cluster.core.book.requests[RequestId(f"r{number}")]
        assert record.decode is not None
        cluster.started(record.decode[0], f"r{number}")
        cluster.finished(record.decode[0], f"r{number}")


def idle(cluster: Cluster) -> None:
    for name in ("p0", "p1", "d0"):
        cluster.beat(name)


def hot_cluster(policy: str = "flowkv", hot_replicas: int = 2) -> Cluster:
    """A cluster in which p0 alone holds a prefix that was used a few times just now."""
    limits = ControllerLimits(policy=policy, hot_replicas=hot_replicas, death_seconds=1000)
    cluster = pair_cluster(num_prefill=2, limits=limits)
    idle(cluster)
    cluster.index("p0", 1, HASHES)
    use(cluster)
    idle(cluster)
    return cluster


def copies(effects: list[Effect]) -> list[tuple[str, str]]:
    """Return source and target of the copies ordered."""
    return [
        (key[0], message.target.worker_id)
        for key, message in only(effects, CopyPrefix)
        if isinstance(message, CopyPrefix)
    ]


def copying_cluster() -> Cluster:
    cluster = hot_cluster()
    assert copies(cluster.tick(after=ROUND)) == [("p0", "p1")]
    return cluster


def told(effects: list[Effect]) -> list[str]:
    """Return the notes about copies."""
    return [event for event in notes(effects) if event.startswith("replica_")]


def facts(effects: list[Effect], event: str) -> dict[str, object]:
    (note,) = [e for e in effects if isinstance(e, Note) and e.event == event]
    return dict(note.facts)


@pytest.mark.parametrize("policy", ["flowkv", "dualpath", "prefix_aware"])
def test_a_hot_prefix_is_copied_to_a_second_worker_ahead_of_need(policy: str) -> None:
    cluster = hot_cluster(policy)
    effects = cluster.tick(after=ROUND)
    (send,) = [e for e in effects if isinstance(e, Send) and isinstance(e.message, CopyPrefix)]
    assert isinstance(send.message, CopyPrefix)
    assert (send.peer[0], send.message.target.worker_id) == ("p0", "p1")
    assert (send.message.num_tokens, send.message.num_stored_tokens) == (NUM_TOKENS, 0)
    assert send.payload == (SHARED,)
    inputs = facts(effects, "replica_ordered")
    assert (inputs["source"], inputs["target"], inputs["num_tokens"]) == (
        "p0",
        "p1",
        NUM_TOKENS,
    )
    assert (inputs["num_holders"], inputs["hot_replicas"]) == (1, 2)
    assert float(str(inputs["num_uses"])) >= HOT_USES


def test_a_copy_has_ended_once_the_target_tells_of_its_blocks() -> None:
    cluster = copying_cluster()
    assert told(cluster.tick(after=ROUND)) == []
    cluster.index("p1", 1, HASHES[:-1])
    assert told(cluster.tick(after=ROUND)) == []
    cluster.index("p1", 2, HASHES[-1:])
    effects = cluster.tick(after=ROUND)
    assert told(effects) == ["replica_held"]
    assert facts(effects, "replica_held")["seconds"] == pytest.approx(3 * ROUND)
    cluster.tick(after=COOL_DOWN_SECONDS + 1)
    use(cluster, first=100)
    idle(cluster)
    assert told(cluster.tick(after=ROUND)) == []  # two workers hold it


@pytest.mark.parametrize(("policy", "hot_replicas"), [("flowkv", 0), ("least_loaded", 2)])
def test_nothing_is_copied_where_that_is_not_asked_for_or_nothing_is_known_of_prefixes(
    policy: str, hot_replicas: int
) -> None:
    assert told(hot_cluster(policy, hot_replicas).tick(after=ROUND)) == []


def test_a_prefix_that_has_cooled_is_not_copied() -> None:
    cluster = hot_cluster()
    assert copies(cluster.tick(after=HALF_LIFE_SECONDS)) == []


def test_a_target_that_gets_busy_again_is_left_alone_until_it_is_idle() -> None:
    cluster = hot_cluster()
    cluster.beat("p1", heartbeat(uncomputed_tokens=99_999))
    assert copies(cluster.tick(after=ROUND)) == []
    cluster.beat("p1")
    assert copies(cluster.tick(after=ROUND)) == [("p0", "p1")]


def test_a_refusal_ends_the_copy_and_it_is_not_tried_again_for_a_while() -> None:
    cluster = copying_cluster()
    effects = cluster.not_copied("p0", "replica-1")
    assert told(effects) == ["replica_failed"]
    assert facts(effects, "replica_failed")["reason"] == "it is gone"
    use(cluster, 8, first=100)
    idle(cluster)
    assert copies(cluster.tick(after=ROUND)) == []
    use(cluster, 8, first=200)
    idle(cluster)
    assert copies(cluster.tick(after=COOL_DOWN_SECONDS)) == [("p0", "p1")]


def test_only_its_source_can_say_that_a_copy_will_not_come() -> None:
    cluster = copying_cluster()
    assert "replica_failed" not in told(cluster.not_copied("d0", "replica-1"))
    assert told(cluster.not_copied("p0", "replica-1")) == ["replica_failed"]
    assert "replica_failed" not in told(cluster.not_copied("p0", "replica-1"))


@pytest.mark.parametrize("gone", ["p0", "p1"])
def test_the_death_of_a_side_ends_the_copy_and_touches_no_request(gone: str) -> None:
    cluster = copying_cluster()
    cluster.submit("other", 64)
    cluster.started("d0", "other")
    cluster.tick(100 if gone == "p0" else 101)
    effects = cluster.tick(after=ROUND)
    assert facts(effects, "replica_failed")["reason"] == f"{gone} is gone"
    assert only(effects, PrefixUnavailable) == []
    assert cluster.phase("other") == "decoding"


def test_a_source_that_cannot_be_reached_is_gone_and_the_copy_with_it() -> None:
    cluster = hot_cluster()
    cluster.unreachable = {"p0"}
    assert "worker_left" in notes(cluster.tick(after=ROUND))
    assert told(cluster.tick(after=ROUND)) == ["replica_failed"]


def test_a_copy_that_nobody_tells_of_is_given_up() -> None:
    cluster = copying_cluster()
    assert told(cluster.tick(after=MAX_COPY_SECONDS)) == []
    assert told(cluster.tick(after=ROUND)) == ["replica_failed"]


def test_a_copy_is_an_order_that_the_source_counts() -> None:
    cluster = hot_cluster()
    source = cluster.core.members.worker_named("p0")
    assert source is not None
    before = source.num_orders
    cluster.tick(after=ROUND)
    assert source.num_orders == before + 1


def test_a_third_holder_is_found_while_the_first_copy_is_under_way() -> None:
    cluster = hot_cluster(hot_replicas=3)
    cluster.join("p2", Role.PREFILL, pid=150)
    cluster.beat("p2")
    cluster.index("d0", 1, HASHES)
    assert copies(cluster.tick(after=ROUND)) == [("d0", "p1")]
    assert copies(cluster.tick(after=ROUND)) == [("p0", "p2")]


def test_a_copy_of_what_its_source_still_has_has_ended_too() -> None:
    cluster = copying_cluster()
    cluster.index("p0", 2, removed=HASHES[-1:])
    cluster.index("p1", 1, HASHES[:-1])
    effects = cluster.tick(after=ROUND)
    assert told(effects) == ["replica_held"]
    assert facts(effects, "replica_held")["num_blocks"] == NUM_BLOCKS - 1


def test_a_prefix_rests_however_much_of_it_its_source_holds() -> None:
    cluster = copying_cluster()
    cluster.not_copied("p0", "replica-1")
    cluster.index("p0", 2, removed=HASHES[-1:])
    use(cluster, 8, first=100)
    idle(cluster)
    assert copies(cluster.tick(after=ROUND)) == []
