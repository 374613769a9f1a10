"""How the store is asked for a prompt before the prompt is placed."""

import pytest

from common.ids import RequestId
from common.kv.prefix_cache import PrefixCache
from common.messages.control import Goodbye, LookUpPrefix, PlaceRequest, RequestRefused
from common.messages.fields import Role
from services.controller.effects import Effect, Note, Send
from services.controller.limits import ControllerLimits
from services.controller.look_ups import LOOK_UP_SECONDS, REST_SECONDS
from tests.unit.controller.cluster import (
    MODEL,
    Cluster,
    heartbeat,
    notes,
    only,
    pair_cluster,
    sent_names,
)

FLOWKV = ControllerLimits(policy="flowkv")
PROMPT = b"".join(number.to_bytes(4, "little") for number in range(640))
HASHES = list(PrefixCache(64, MODEL).chain(None, range(640)))


def store_cluster(num_prefill: int = 1, limits: ControllerLimits = FLOWKV) -> Cluster:
    return pair_cluster(num_prefill, limits=limits, has_store=True)


def asked(effects: list[Effect]) -> list[str]:
    return [key[0] for key, _ in only(effects, LookUpPrefix)]


def placed(effects: list[Effect]) -> list[str]:
    return [str(getattr(message, "request_id", "")) for _, message in only(effects, PlaceRequest)]


@pytest.mark.parametrize("policy", ["flowkv", "least_loaded", "dualpath"])
def test_a_worker_with_a_store_is_asked_first_and_the_gateway_knows_that_it_waits(
    policy: str,
) -> None:
    cluster = store_cluster(limits=ControllerLimits(policy=policy))
    effects = cluster.submit("r", 640, prompt=PROMPT)
    assert sent_names(effects) == [("g", "RequestQueued"), ("p0", "LookUpPrefix")]
    (look_up,) = [e for e in effects if isinstance(e, Send) and e.peer[0] == "p0"]
    assert look_up.payload == (b"".join(HASHES[:9]),), "the last token is computed in any case"
    assert cluster.phase("r") == "looking_up"
    answered = cluster.found("p0", "r", 4)
    assert placed(answered) == ["r"]
    assert "store_looked_up" in notes(answered)
    assert cluster.core.book.requests[RequestId("r")].num_stored_blocks == 4


def test_without_a_store_nobody_is_asked() -> None:
    cluster = pair_cluster(limits=FLOWKV)
    assert placed(cluster.submit("r", 640, prompt=PROMPT)) == ["r"]


def test_workers_are_asked_in_turn_and_only_ready_ones() -> None:
    cluster = store_cluster(2)
    turns = [asked(cluster.submit(f"r{n}", 640, prompt=PROMPT))[0] for n in range(4)]
    assert turns == ["p0", "p1", "d0", "p0"]
    cluster.beat("p1", heartbeat(is_draining=True))
    turns = [asked(cluster.submit(f"s{n}", 640, prompt=PROMPT))[0] for n in range(2)]
    assert sorted(turns) == ["d0", "p0"]


@pytest.mark.parametrize(("num_tokens", "is_asked"), [(128, False), (129, True)])
def test_a_prompt_is_worth_asking_for_that_leaves_two_blocks_to_load(
    num_tokens: int, is_asked: bool
) -> None:
    cluster = store_cluster()
    assert bool(asked(cluster.submit("r", num_tokens))) is is_asked


def test_a_prompt_that_some_worker_has_cached_as_far_as_it_helps_is_not_asked_for() -> None:
    cluster = store_cluster()
    cluster.index("d0", 1, HASHES[:8])
    assert asked(cluster.submit("r0", 640, prompt=PROMPT)) == ["p0"]
    cluster.index("d0", 2, HASHES[8:9])
    assert asked(cluster.submit("r1", 640, prompt=PROMPT)) == []


def test_later_requests_do_not_overtake_one_that_is_looked_up() -> None:
    cluster = store_cluster()
    cluster.submit("r0", 640, prompt=PROMPT)
    assert sent_names(cluster.submit("r1", 64)) == [("g", "RequestQueued")]
    cluster.submit("r2", 640, prompt=PROMPT)
    assert placed(cluster.found("d0", "r2", 0)) == []
    assert placed(cluster.found("p0", "r0", 0)) == ["r0", "r1", "r2"]


def test_a_late_answer_is_not_waited_for_and_changes_nothing_when_it_comes() -> None:
    cluster = store_cluster()
    cluster.submit("r", 640, prompt=PROMPT)
    assert placed(cluster.tick(after=LOOK_UP_SECONDS - 0.01)) == []
    late = cluster.tick(after=0.02)
    assert placed(late) == ["r"]
    (told,) = [e for e in late if isinstance(e, Note) and e.event == "store_looked_up"]
    assert dict(told.facts)["reason"] == "no answer within 0.25 s"
    assert notes(cluster.found("p0", "r", 9)) == ["event_ignored"]
    assert cluster.core.book.requests[RequestId("r")].num_stored_blocks == 0


def test_a_worker_that_answers_late_is_not_asked_for_a_while_unless_it_answers_after_all() -> None:
    cluster = store_cluster()
    cluster.submit("r0", 640, prompt=PROMPT)
    cluster.tick(after=LOOK_UP_SECONDS)
    assert asked(cluster.submit("r1", 640, prompt=PROMPT)) == ["d0"]
    assert asked(cluster.submit("r2", 640, prompt=PROMPT)) == ["d0"]
    cluster.found("p0", "r0", 3)
    assert asked(cluster.submit("r3", 640, prompt=PROMPT)) == ["p0"]


def test_when_no_worker_answers_requests_are_placed_without_asking_until_they_have_rested() -> None:
    cluster = store_cluster()
    for name in ("r0", "r1"):
        cluster.submit(name, 640, prompt=PROMPT)
    cluster.tick(after=LOOK_UP_SECONDS)
    assert placed(cluster.submit("r2", 640, prompt=PROMPT)) == ["r2"]
    cluster.now += REST_SECONDS
    assert asked(cluster.submit("r3", 640, prompt=PROMPT)) == ["p0"]


def test_a_request_goes_on_when_the_worker_that_was_asked_dies_leaves_or_is_not_reached() -> None:
    for end in ("die", "leave", "unreachable"):
        cluster = store_cluster(2)
        if end == "unreachable":
            cluster.unreachable.add("p0")
        effects = cluster.submit("r", 640, prompt=PROMPT)
        if end == "die":
            effects = cluster.tick(100)
        if end == "leave":
            effects = cluster.say("p0", Goodbye(reason="stopped"))
        assert placed(effects) == ["r"], end
        assert cluster.core.book.requests[RequestId("r")].num_stored_blocks == 0


def test_the_end_of_the_last_prefill_worker_leaves_a_looked_up_request_queued() -> None:
    cluster = store_cluster()
    cluster.submit("r", 640, prompt=PROMPT)
    assert placed(cluster.tick(100)) == []
    assert cluster.phase("r") == "queued"
    assert placed(cluster.join("p1", Role.PREFILL, pid=101)) == ["r"]


def test_a_cancel_or_a_lost_gateway_ends_a_looked_up_request_without_a_word_to_workers() -> None:
    cluster = store_cluster()
    cluster.submit("r0", 640, prompt=PROMPT)
    assert sent_names(cluster.cancel("r0")) == []
    cluster.submit("r1", 640, prompt=PROMPT)
    assert sent_names(cluster.tick(50)) == []
    assert [cluster.phase(name) for name in ("r0", "r1")] == ["unknown", "unknown"]
    assert notes(cluster.found("p0", "r0", 3)) == ["event_ignored"]


def test_answers_of_workers_that_were_not_asked_and_of_impossible_length_change_nothing() -> None:
    cluster = store_cluster()
    cluster.submit("r", 640, prompt=PROMPT)
    assert notes(cluster.found("d0", "r", 3)) == ["event_ignored"]
    assert notes(cluster.found("p0", "r", 11)) == ["protocol_violation"]
    assert cluster.phase("r") == "looking_up"
    cluster.found("p0", "r", 10)
    assert cluster.core.book.requests[RequestId("r")].num_stored_blocks == 9


def test_a_prompt_that_fits_no_pool_is_refused_before_the_store_is_asked() -> None:
    cluster = store_cluster()
    effects = cluster.submit("r", 100 * 64)
    assert len(only(effects, RequestRefused)) == 1
    assert asked(effects) == []


def test_requests_that_are_looked_up_count_against_max_queue() -> None:
    cluster = store_cluster(limits=ControllerLimits(policy="flowkv", max_queue=1))
    cluster.submit("r0", 640, prompt=PROMPT)
    assert len(only(cluster.submit("r1", 640, prompt=PROMPT), RequestRefused)) == 1
