from collections.abc import Callable

import pytest

from common.errors import ErrorCode
from common.ids import RequestId
from common.messages.control import (
    Cancel,
    Goodbye,
    PlaceDecode,
    PlaceRequest,
    RequestFailed,
    RequestPlaced,
    RequestRefused,
)
from common.messages.fields import Role
from services.controller.dispatcher import MAX_PLACEMENTS
from services.controller.effects import Effect, Send
from services.controller.limits import ControllerLimits
from services.controller.request_record import CANCEL_REPORT_SECONDS
from tests.unit.controller.cluster import (
    Cluster,
    heartbeat,
    kv,
    notes,
    only,
    pair_cluster,
    sent,
    sent_names,
    submit,
)


def refusal(effects: list[Effect]) -> RequestRefused:
    found = only(effects, RequestRefused)
    assert len(found) == 1
    message = found[0][1]
    assert isinstance(message, RequestRefused)
    return message


def failure(effects: list[Effect]) -> RequestFailed:
    found = only(effects, RequestFailed)
    assert len(found) == 1
    message = found[0][1]
    assert isinstance(message, RequestFailed)
    return message


def test_a_request_goes_to_its_prefill_worker_with_the_prompt_and_the_gateway_is_told() -> None:
    cluster = pair_cluster()
    effects = cluster.submit("r", 64)
    (place,) = [e for e in effects if isinstance(e, Send) and isinstance(e.message, PlaceRequest)]
    assert place.peer == ("p0", 1)
    assert place.payload == (bytes(256),)
    assert isinstance(place.message, PlaceRequest)
    assert place.message.decode is not None
    assert place.message.decode.worker_id == "d0"
    assert place.message.tokens_endpoint == "ipc:///tmp/g.tokens"
    (placed,) = [message for _, message in sent(effects) if isinstance(message, RequestPlaced)]
    assert (placed.prefill_worker, placed.decode_worker) == ("p0", "d0")
    assert notes(effects) == ["request_placed"]


def test_a_combined_worker_gets_a_request_without_a_decode_side() -> None:
    cluster = Cluster()
    cluster.join("c0", Role.COMBINED)
    cluster.join_gateway()
    effects = cluster.submit("r")
    place = only(effects, PlaceRequest)[0][1]
    assert isinstance(place, PlaceRequest)
    assert place.decode is None
    assert cluster.finished("c0", "r")
    assert cluster.phase("r") == "unknown"


def test_the_life_of_a_request_that_succeeds() -> None:
    cluster = pair_cluster()
    cluster.submit("r")
    assert sent_names(cluster.started("d0", "r")) == []
    assert cluster.phase("r") == "decoding"
    assert sent_names(cluster.finished("d0", "r")) == [("g", "RequestFinished")]
    assert cluster.phase("r") == "unknown"


def test_a_request_that_ends_with_its_first_token_never_reaches_the_decode_side() -> None:
    cluster = pair_cluster()
    cluster.submit("r")
    assert sent_names(cluster.finished("p0", "r")) == [("g", "RequestFinished")]
    assert cluster.phase("r") == "unknown"


def test_the_end_of_a_request_that_nobody_waits_for_is_told_to_nobody() -> None:
    cluster = pair_cluster()
    cluster.submit("r")
    cluster.started("d0", "r")
    assert sent_names(cluster.finished("p0", "r")) == []
    cluster.cancel("r")
    assert sent_names(cluster.finished("d0", "r", was_cancelled=True)) == []
    assert sent_names(cluster.finished("d0", "r")) == []


def test_own_assignments_count_as_load_until_the_next_heartbeat() -> None:
    cluster = pair_cluster(num_prefill=2, num_decode=2)
    chosen = []
    for number in range(4):
        place = only(cluster.submit(f"r{number}", 64), PlaceRequest)[0]
        message = place[1]
        assert isinstance(message, PlaceRequest)
        assert message.decode is not None
        chosen.append((place[0][0], message.decode.worker_id))
    assert chosen == [("p0", "d0"), ("p1", "d1"), ("p0", "d0"), ("p1", "d1")]
    cluster.beat("p0", heartbeat(uncomputed_tokens=1))
    assert only(cluster.submit("r5", 64), PlaceRequest)[0][0][0] == "p0"


@pytest.mark.parametrize(
    ("roles", "told"),
    [
        ((), "no prefill and no decode worker is ready"),
        ((Role.PREFILL,), "no decode worker is ready"),
        ((Role.DECODE,), "no prefill worker is ready"),
    ],
)
def test_without_workers_a_request_is_refused_naming_the_role(
    roles: tuple[Role, ...], told: str
) -> None:
    cluster = Cluster()
    cluster.join_gateway()
    for role in roles:
        cluster.join(f"{role}-0", role)
    refused = refusal(cluster.submit("r"))
    assert (refused.code, refused.message) == (ErrorCode.NO_WORKER, told)
    assert refused.retry_after_seconds == 1.0


def test_the_queue_is_bounded_by_requests_whose_decode_has_not_started() -> None:
    cluster = Cluster(ControllerLimits(max_queue=2))
    cluster.join("p0", Role.PREFILL)
    cluster.join("d0", Role.DECODE)
    cluster.join_gateway()
    cluster.submit("r0")
    cluster.submit("r1")
    refused = refusal(cluster.submit("r2"))
    assert refused.code is ErrorCode.QUEUE_FULL
    assert refused.retry_after_seconds == 1.0
    cluster.started("d0", "r0")
    assert only(cluster.submit("r3"), PlaceRequest)


def test_a_prompt_that_never_fits_is_refused_with_the_numbers() -> None:
    cluster = pair_cluster()
    refused = refusal(cluster.submit("r", 100 * 64))
    assert refused.code is ErrorCode.CONTEXT_EXCEEDED
    assert "with 1 choice needs 101 KV blocks of 64 tokens" in refused.message
    assert "has 100 (kv_bytes)" in refused.message
    assert refused.retry_after_seconds is None


def test_a_repeated_id_is_refused_and_the_first_is_not_disturbed() -> None:
    cluster = pair_cluster()
    cluster.submit("r")
    assert refusal(cluster.submit("r")).code is ErrorCode.BAD_REQUEST
    assert cluster.phase("r") == "placed"


def test_a_prompt_frame_of_another_length_is_refused() -> None:
    cluster = pair_cluster()
    assert refusal(cluster.say("g", submit("r", 64), payload=(bytes(8),))).code == "bad_request"


def test_a_worker_that_is_not_reached_is_dead_and_the_request_goes_to_another() -> None:
    cluster = pair_cluster(num_prefill=2)
    cluster.unreachable.add("p0")
    effects = cluster.submit("r")
    assert [key[0] for key, _ in only(effects, PlaceRequest)] == ["p1"]
    assert cluster.phase("r") == "placed"
    assert cluster.core.members.worker_named("p0") is None


def test_when_no_other_worker_is_left_a_request_for_an_unreachable_one_waits_for_the_next() -> None:
    cluster = pair_cluster()
    cluster.unreachable.add("p0")
    cluster.submit("r")
    assert cluster.phase("r") == "queued"
    cluster.unreachable.clear()
    effects = cluster.join("p0", Role.PREFILL, epoch=2)
    (place,) = [e for e in effects if isinstance(e, Send) and isinstance(e.message, PlaceRequest)]
    assert (place.peer, place.payload) == (("p0", 2), (bytes(256),))


def test_other_requests_of_an_unreachable_worker_fail() -> None:
    cluster = pair_cluster(num_prefill=2)
    cluster.submit("r0")
    cluster.beat("p0")
    cluster.unreachable.add("p0")
    effects = cluster.submit("r1")
    assert failure(effects).request_id == "r0"
    assert cluster.phase("r1") == "placed"


@pytest.mark.parametrize("code", [ErrorCode.SHUTTING_DOWN, ErrorCode.NO_WORKER])
def test_a_request_that_meets_a_worker_that_takes_nothing_in_goes_to_another(
    code: ErrorCode,
) -> None:
    cluster = pair_cluster(num_prefill=2)
    cluster.submit("r", 64)
    effects = cluster.given_back("p0", "r", code)
    (place,) = [e for e in effects if isinstance(e, Send) and isinstance(e.message, PlaceRequest)]
    assert (place.peer[0], place.payload) == ("p1", (bytes(256),))
    assert sent_names(effects) == [("p1", "PlaceRequest"), ("g", "RequestPlaced")]
    assert notes(effects) == [
        "worker_state_changed",
        "placement_refused",
        "request_moved",
        "request_placed",
    ]
    assert cluster.phase("r") == "placed"
    assert [key[0] for key, _ in only(cluster.submit("r1"), PlaceRequest)] == ["p1"]
    cluster.started("d0", "r")
    cluster.finished("d0", "r")
    assert cluster.phase("r") == "unknown"


def test_a_combined_worker_s_refusal_is_placed_again_too() -> None:
    cluster = Cluster()
    cluster.join("c0", Role.COMBINED)
    cluster.join("c1", Role.COMBINED)
    cluster.join_gateway()
    cluster.submit("r")
    effects = cluster.given_back("c0", "r")
    assert sent_names(effects) == [("c1", "PlaceRequest"), ("g", "RequestPlaced")]


def test_a_refusal_that_nobody_else_can_make_good_fails_the_request_as_it_says() -> None:
    cluster = pair_cluster()
    cluster.submit("r")
    assert failure(cluster.given_back("p0", "r")).code == "shutting_down"
    assert cluster.phase("r") == "unknown"


def test_a_request_is_placed_a_bounded_number_of_times() -> None:
    cluster = pair_cluster(num_prefill=MAX_PLACEMENTS + 2)
    cluster.submit("r")
    for number in range(MAX_PLACEMENTS - 1):
        effects = cluster.given_back(f"p{number}", "r")
        assert [key[0] for key, _ in only(effects, PlaceRequest)] == [f"p{number + 1}"]
    effects = cluster.given_back(f"p{MAX_PLACEMENTS - 1}", "r")
    assert failure(effects).code == "shutting_down"


def test_a_request_that_was_not_begun_for_long_goes_to_another_when_it_is_given_back() -> None:
    cluster = pair_cluster(num_prefill=2)
    cluster.submit("r", 64)
    for _ in range(10):
        cluster.tick(after=0.9)
        for name in ("p0", "p1", "d0"):
            cluster.beat(name)
        cluster.gateway_beat()
    effects = cluster.given_back("p0", "r")
    assert sent_names(effects) == [("p1", "PlaceRequest"), ("g", "RequestPlaced")]


def test_a_request_that_its_worker_failed_is_placed_nowhere_else() -> None:
    cluster = pair_cluster(num_prefill=2)
    cluster.submit("r")
    effects = cluster.failed("p0", "r", ErrorCode.SHUTTING_DOWN)
    assert sent_names(effects) == [("g", "RequestFailed"), ("d0", "Cancel")]
    assert cluster.phase("r") == "unknown"


@pytest.mark.parametrize(
    "sign",
    [
        lambda cluster: cluster.refused("p0", "d0", "r"),
        lambda cluster: cluster.cancel("r", choice=0),
    ],
    ids=["a refused decode", "a stop string in its tokens"],
)
def test_a_request_that_its_worker_has_begun_fails_when_the_worker_gives_it_back(
    sign: Callable[[Cluster], object],
) -> None:
    cluster = pair_cluster(num_prefill=2)
    cluster.submit("r")
    sign(cluster)
    assert failure(cluster.given_back("p0", "r")).code == "shutting_down"


def test_what_is_given_back_twice_is_placed_once() -> None:
    cluster = pair_cluster(num_prefill=2)
    cluster.submit("r")
    cluster.given_back("p0", "r")
    assert sent_names(cluster.given_back("p0", "r")) == []
    assert cluster.phase("r") == "placed"


def test_a_refusal_of_a_request_that_is_being_cancelled_ends_it_quietly() -> None:
    cluster = pair_cluster(num_prefill=2)
    cluster.submit("r")
    cluster.cancel("r")
    assert sent_names(cluster.given_back("p0", "r")) == []
    assert cluster.phase("r") == "unknown"


def test_a_refused_decode_is_placed_on_the_next_worker_at_once() -> None:
    cluster = pair_cluster(num_decode=2)
    cluster.submit("r")
    effects = cluster.refused("p0", "d0", "r")
    assert sent_names(effects) == [("p0", "PlaceDecode"), ("g", "RequestPlaced")]
    place = only(effects, PlaceDecode)[0][1]
    assert isinstance(place, PlaceDecode)
    assert place.decode.worker_id == "d1"
    assert cluster.phase("r") == "placed"


def test_a_decode_that_all_refuse_waits_for_a_heartbeat_that_shows_room() -> None:
    cluster = pair_cluster()
    cluster.submit("r", 640)
    cluster.beat("d0", heartbeat(kv(referenced=95)))
    assert sent_names(cluster.refused("p0", "d0", "r")) == []
    assert cluster.phase("r") == "waiting"
    cluster.now += 1
    full = cluster.beat("d0", heartbeat(kv(referenced=95)))
    assert only(full, PlaceDecode) == []
    roomy = cluster.beat("d0", heartbeat(kv(referenced=50)))
    assert len(only(roomy, PlaceDecode)) == 1
    assert cluster.phase("r") == "placed"


def test_cached_blocks_are_room() -> None:
    cluster = pair_cluster()
    cluster.submit("r", 640)
    cluster.refused("p0", "d0", "r")
    cluster.now += 1
    effects = cluster.beat("d0", heartbeat(kv(cached=100)))
    assert len(only(effects, PlaceDecode)) == 1


def test_a_worker_that_refused_is_not_asked_again_within_20_milliseconds() -> None:
    cluster = pair_cluster()
    cluster.submit("r")
    assert only(cluster.refused("p0", "d0", "r"), PlaceDecode) == []
    cluster.now += 0.019
    assert only(cluster.beat("d0"), PlaceDecode) == []
    cluster.now += 0.002
    assert len(only(cluster.beat("d0"), PlaceDecode)) == 1


def test_waiting_decodes_are_placed_in_their_order_as_room_comes() -> None:
    cluster = pair_cluster()
    for name in ("r0", "r1"):
        cluster.submit(name, 40 * 64)
        cluster.refused("p0", "d0", name)
    cluster.now += 1
    effects = cluster.beat("d0", heartbeat(kv(referenced=50)))
    placed = [message for _, message in only(effects, PlaceDecode)]
    assert [getattr(message, "request_id", "") for message in placed] == ["r0"]
    assert cluster.phase("r1") == "waiting"


def test_waiting_for_room_ends_at_the_deadline_and_cancels_the_prefill() -> None:
    cluster = pair_cluster()
    cluster.submit("r")
    cluster.beat("d0", heartbeat(kv(referenced=100)))
    cluster.refused("p0", "d0", "r")
    cluster.now += 60.1
    for name in ("p0", "d0"):
        cluster.beat(name, heartbeat(kv(referenced=100)))
    cluster.gateway_beat()
    effects = cluster.tick()
    assert failure(effects).code is ErrorCode.NO_ROOM
    assert [key[0] for key, _ in only(effects, Cancel)] == ["p0"]
    cluster.finished("p0", "r", was_cancelled=True)
    assert cluster.phase("r") == "unknown"


def test_a_pair_that_fails_again_and_again_for_another_reason_ends_the_request() -> None:
    cluster = pair_cluster()
    cluster.submit("r")
    for attempt in range(5):
        effects = cluster.refused("p0", "d0", "r", ErrorCode.TRANSFER_FAILED)
        assert (only(effects, RequestFailed) == []) == (attempt < 4)
        if attempt < 4:
            cluster.now += 0.1
            cluster.beat("d0")
    assert failure(effects).code is ErrorCode.TRANSFER_FAILED


def test_a_stale_refusal_of_an_earlier_decode_side_is_ignored() -> None:
    cluster = pair_cluster(num_decode=2)
    cluster.submit("r")
    cluster.refused("p0", "d0", "r")
    assert sent_names(cluster.refused("p0", "d0", "r")) == []
    assert cluster.phase("r") == "placed"


def test_a_request_timeout_fails_the_request_and_stops_both_sides() -> None:
    cluster = Cluster(ControllerLimits(request_timeout_seconds=5))
    cluster.join("p0", Role.PREFILL)
    cluster.join("d0", Role.DECODE)
    cluster.join_gateway()
    cluster.submit("r")
    effects = cluster.tick(after=5.1)
    assert failure(effects).code is ErrorCode.DEADLINE_EXCEEDED
    assert {key[0] for key, _ in only(effects, Cancel)} == {"p0", "d0"}


def test_a_cancel_reaches_both_sides_before_the_decode_and_only_the_decode_side_after() -> None:
    cluster = pair_cluster()
    cluster.submit("r0")
    assert sent_names(cluster.cancel("r0")) == [("p0", "Cancel"), ("d0", "Cancel")]
    cluster.submit("r1")
    cluster.started("d0", "r1")
    assert sent_names(cluster.cancel("r1")) == [("d0", "Cancel")]
    assert sent_names(cluster.cancel("r1")) == []
    cluster.finished("d0", "r1", was_cancelled=True)
    assert cluster.phase("r1") == "unknown"


def test_a_cancelled_choice_is_passed_on_and_the_request_goes_on() -> None:
    cluster = pair_cluster()
    cluster.submit("r", num_choices=2)
    cluster.started("d0", "r")
    effects = cluster.cancel("r", choice=1)
    cancel = only(effects, Cancel)[0][1]
    assert isinstance(cancel, Cancel)
    assert cancel.choice == 1
    assert cluster.phase("r") == "decoding"


def test_a_decode_that_starts_while_the_cancel_travels_is_cancelled_again_and_awaited() -> None:
    cluster = pair_cluster()
    cluster.submit("r")
    cluster.cancel("r")
    assert sent_names(cluster.started("d0", "r")) == [("d0", "Cancel")]
    cluster.finished("p0", "r", was_cancelled=True)
    assert cluster.phase("r") == "cancelling_decode"
    cluster.finished("d0", "r", was_cancelled=True)
    assert cluster.phase("r") == "unknown"


def test_a_decode_that_starts_after_its_request_was_ended_is_told_to_stop() -> None:
    cluster = pair_cluster()
    cluster.submit("r")
    cluster.cancel("r")
    cluster.finished("p0", "r", was_cancelled=True)
    assert cluster.phase("r") == "unknown"
    assert sent_names(cluster.started("d0", "r")) == [("d0", "Cancel")]


def test_a_cancel_of_a_request_without_a_record_reaches_every_worker() -> None:
    cluster = pair_cluster()
    assert sent_names(cluster.cancel("x")) == [("p0", "Cancel"), ("d0", "Cancel")]


def test_a_refused_decode_of_a_request_without_a_record_is_answered() -> None:
    cluster = pair_cluster()
    assert sent_names(cluster.refused("p0", "d0", "x")) == [("p0", "PlacementUnknown")]


def test_a_cancel_of_another_gateway_s_request_is_ignored() -> None:
    cluster = pair_cluster()
    cluster.join_gateway("g2")
    cluster.submit("r")
    assert notes(cluster.cancel("r", gateway="g2")) == ["event_ignored"]
    assert cluster.phase("r") == "placed"


def test_a_cancelled_request_that_nobody_reports_is_logged_as_leaked_and_dropped() -> None:
    cluster = pair_cluster()
    cluster.submit("r")
    cluster.cancel("r")
    cluster.now += CANCEL_REPORT_SECONDS + 0.1
    for name in ("p0", "d0"):
        cluster.beat(name)
    cluster.gateway_beat()
    assert notes(cluster.tick()) == ["request_record_leaked", "request_ended"]
    assert RequestId("r") not in cluster.core.book.requests


def test_an_error_of_the_prefill_side_fails_the_request_and_stops_the_decode_side() -> None:
    cluster = pair_cluster()
    cluster.submit("r")
    effects = cluster.failed("p0", "r")
    assert sent_names(effects) == [("g", "RequestFailed"), ("d0", "Cancel")]
    assert cluster.phase("r") == "unknown"


def test_an_error_of_the_decode_side_before_its_decode_stops_the_prefill_side() -> None:
    cluster = pair_cluster()
    cluster.submit("r")
    assert sent_names(cluster.failed("d0", "r")) == [("g", "RequestFailed"), ("p0", "Cancel")]
    assert cluster.phase("r") == "cancelling_prefill"


def test_the_death_of_a_prefill_side_that_handed_over_harms_nothing() -> None:
    cluster = pair_cluster()
    cluster.submit("r")
    cluster.started("d0", "r")
    effects = cluster.tick(100)
    assert only(effects, RequestFailed) == []
    assert cluster.phase("r") == "decoding"


def test_a_report_of_a_worker_without_a_part_in_the_request_is_ignored() -> None:
    cluster = pair_cluster(num_decode=2)
    cluster.submit("r")
    for effects in (
        cluster.finished("d1", "r"),
        cluster.failed("d1", "r"),
        cluster.started("d1", "r"),
    ):
        assert notes(effects) == ["event_ignored"]
    assert cluster.phase("r") == "placed"


def test_every_decision_names_its_request_and_cause() -> None:
    cluster = pair_cluster()
    effects = [*cluster.submit("r"), *cluster.started("d0", "r"), *cluster.cancel("r")]
    effects += [*cluster.finished("d0", "r", was_cancelled=True), *cluster.submit("r2", 9999)]
    told = [
        (e.event, e.request_id, e.cause.split(" ")[0]) for e in effects if not isinstance(e, Send)
    ]
    assert told == [
        ("request_placed", "r", "SubmitRequest"),
        ("request_moved", "r", "DecodeStarted"),
        ("request_moved", "r", "CancelRequest"),
        ("request_ended", "r", "RequestFinished"),
        ("request_refused", "r2", "SubmitRequest"),
    ]


def test_waiting_where_no_decode_worker_is_left_ends_soon_and_by_name() -> None:
    cluster = pair_cluster()
    cluster.submit("r")
    cluster.say("d0", Goodbye(reason="stopped"))
    assert cluster.phase("r") == "waiting"
    cluster.now += 9.9
    cluster.beat("p0", heartbeat())
    cluster.gateway_beat()
    assert only(cluster.tick(), RequestFailed) == []
    cluster.now += 0.2
    cluster.beat("p0", heartbeat())
    cluster.gateway_beat()
    told = failure(cluster.tick())
    assert (told.code, told.message) == (
        ErrorCode.NO_WORKER,
        "no decode worker was ready within 10 s",
    )
