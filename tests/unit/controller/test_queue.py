"""Late binding: requests wait in the controller until a worker is to have them."""

import pytest

from common.errors import ErrorCode
from common.messages.control import (
    PlaceRequest,
    RequestFailed,
    RequestPlaced,
    RequestQueued,
    RequestRefused,
)
from common.messages.fields import Role
from services.controller.effects import Effect
from services.controller.limits import ControllerLimits
from tests.unit.controller.cluster import Cluster, heartbeat, notes, only, rates, sent_names

BUDGET = 512
AHEAD = 2 * BUDGET


def small_cluster(num_prefill: int = 1, limits: ControllerLimits | None = None) -> Cluster:
    """Workers p0.. and d0 that get two steps' prompts ahead, and a gateway."""
    cluster = Cluster(limits)
    for number in range(num_prefill):
        cluster.join(f"p{number}", Role.PREFILL, pid=100 + number, max_num_batched_tokens=BUDGET)
    cluster.join("d0", Role.DECODE, pid=200, max_num_batched_tokens=BUDGET)
    cluster.join_gateway()
    return cluster


def placed(effects: list[Effect]) -> list[tuple[str, str]]:
    return [
        (key[0], message.request_id)
        for key, message in only(effects, PlaceRequest)
        if isinstance(message, PlaceRequest)
    ]


def all_beat(cluster: Cluster, *uncomputed: int) -> list[Effect]:
    """Let p0, p1, .. tell what they have to compute, and the others live."""
    effects = [*cluster.beat("d0"), *cluster.gateway_beat()]
    for number, tokens in enumerate(uncomputed):
        effects += cluster.beat(f"p{number}", heartbeat(uncomputed_tokens=tokens))
    return effects


def test_a_worker_gets_prompts_until_it_has_two_steps_ahead_and_the_rest_is_queued() -> None:
    cluster = small_cluster()
    assert placed(cluster.submit("r0", AHEAD - 1)) == [("p0", "r0")]
    assert placed(cluster.submit("r1", 2000)) == [("p0", "r1")]
    effects = cluster.submit("r2", 1)
    assert sent_names(effects) == [("g", "RequestQueued")]
    assert notes(effects) == ["request_queued"]
    assert cluster.phase("r2") == "queued"


@pytest.mark.parametrize(
    ("name", "rate", "uncomputed", "may_take"),
    [
        ("p0", 100.0, AHEAD - 1, True),
        ("d0", 100.0, 49, True),
        ("d0", 100.0, 50, False),
        ("d0", 0.0, AHEAD - 1, True),
    ],
)
def test_a_decode_worker_gets_prompts_for_half_a_second_and_no_whole_steps(
    name: str, rate: float, uncomputed: int, *, may_take: bool
) -> None:
    """It computes them beside its decodes; until its rate is known it gets as much as others."""
    cluster = small_cluster()
    measured = rates(prefill=rate)
    cluster.beat(name, heartbeat(uncomputed_tokens=uncomputed, measured=measured))
    worker = cluster.core.members.worker_named(name)
    assert worker is not None
    assert worker.can_take_prompt is may_take


def test_a_heartbeat_that_was_under_way_does_not_hide_what_was_placed_meanwhile() -> None:
    cluster = small_cluster()
    for name in ("r0", "r1"):
        assert placed(cluster.submit(name, BUDGET)) == [("p0", name)]
    cluster.beat("p0", heartbeat(num_orders=0))
    assert placed(cluster.submit("r2", BUDGET)) == []
    assert placed(cluster.beat("p0", heartbeat(uncomputed_tokens=BUDGET, num_orders=1))) == []
    assert placed(cluster.beat("p0", heartbeat(num_orders=2))) == [("p0", "r2")]


def test_an_idle_worker_gets_a_prompt_however_long_and_the_gateway_is_told_it_is_placed() -> None:
    cluster = small_cluster()
    effects = cluster.submit("r", 6000)
    assert only(effects, RequestQueued) == []
    assert len(only(effects, RequestPlaced)) == 1


def test_a_fast_worker_gets_half_a_second_of_its_measured_rate_ahead() -> None:
    cluster = small_cluster()
    cluster.beat("p0", heartbeat(uncomputed_tokens=4_999, measured=rates(prefill=10_000)))
    assert placed(cluster.submit("r0")) == [("p0", "r0")]
    assert placed(cluster.submit("r1")) == []


def test_queued_requests_go_out_in_their_order_with_the_time_they_waited() -> None:
    cluster = small_cluster()
    cluster.submit("busy", AHEAD)
    for name in ("r0", "r1", "r2"):
        cluster.submit(name, AHEAD - 1)
    cluster.now += 0.25
    effects = cluster.beat("p0", heartbeat(uncomputed_tokens=AHEAD - 1))
    assert placed(effects) == [("p0", "r0")]
    place = only(effects, PlaceRequest)[0][1]
    assert isinstance(place, PlaceRequest)
    assert place.queued_seconds == pytest.approx(0.25)
    assert placed(cluster.beat("p0", heartbeat(uncomputed_tokens=0))) == [
        ("p0", "r1"),
        ("p0", "r2"),
    ]


def test_a_worker_that_joins_finds_the_queue_s_oldest() -> None:
    cluster = small_cluster()
    cluster.submit("busy", AHEAD)
    cluster.submit("r0")
    effects = cluster.join("p1", Role.PREFILL, max_num_batched_tokens=BUDGET)
    assert placed(effects) == [("p1", "r0")]


def test_nobody_overtakes_the_oldest_also_when_a_new_request_finds_a_free_worker() -> None:
    cluster = small_cluster(2)
    all_beat(cluster, AHEAD, AHEAD)
    cluster.submit("r0")
    cluster.submit("r1")
    cluster.now += 1
    assert placed(all_beat(cluster, AHEAD, AHEAD - 1)) == [("p1", "r0")]
    assert placed(cluster.submit("r2")) == []
    assert placed(all_beat(cluster, AHEAD - 1, 0)) == [("p0", "r1"), ("p1", "r2")]


def test_queued_requests_count_against_max_queue() -> None:
    cluster = small_cluster(limits=ControllerLimits(max_queue=2))
    cluster.submit("r0", AHEAD)
    cluster.submit("r1")
    assert cluster.phase("r1") == "queued"
    refused = only(cluster.submit("r2"), RequestRefused)[0][1]
    assert isinstance(refused, RequestRefused)
    assert refused.code is ErrorCode.QUEUE_FULL


def test_a_prompt_that_fits_no_pool_is_refused_at_once_while_all_are_busy() -> None:
    cluster = small_cluster()
    cluster.submit("busy", AHEAD)
    refused = only(cluster.submit("r", 100 * 64), RequestRefused)[0][1]
    assert isinstance(refused, RequestRefused)
    assert refused.code is ErrorCode.CONTEXT_EXCEEDED


def test_a_queued_request_is_cancelled_without_a_word_to_any_worker() -> None:
    cluster = small_cluster()
    cluster.submit("busy", AHEAD)
    cluster.submit("r")
    assert sent_names(cluster.cancel("r", choice=0)) == []
    assert cluster.phase("r") == "queued"
    assert sent_names(cluster.cancel("r")) == []
    assert cluster.phase("r") == "unknown"
    assert placed(cluster.beat("p0")) == []


def test_queued_requests_of_a_gateway_that_is_gone_are_dropped() -> None:
    cluster = small_cluster()
    cluster.submit("busy", AHEAD)
    cluster.submit("r")
    assert sent_names(cluster.tick(50)) == [("p0", "Cancel"), ("d0", "Cancel")]
    assert cluster.phase("r") == "unknown"


def test_a_queued_request_ends_by_name_when_no_worker_could_serve_it_for_a_while() -> None:
    cluster = small_cluster()
    cluster.submit("busy", AHEAD)
    cluster.submit("r")
    cluster.tick(200)
    assert cluster.phase("r") == "queued"
    cluster.now += 9.9
    for _ in range(2):
        cluster.beat("p0", heartbeat(uncomputed_tokens=AHEAD))
        cluster.gateway_beat()
        told = only(cluster.tick(), RequestFailed)
        cluster.now += 0.2
    failed = told[0][1]
    assert isinstance(failed, RequestFailed)
    assert (failed.code, failed.message) == (
        ErrorCode.NO_WORKER,
        "no worker could serve it within 10 s",
    )
    assert cluster.phase("r") == "unknown"


def test_a_worker_that_comes_back_in_time_serves_what_was_queued() -> None:
    cluster = small_cluster()
    cluster.submit("busy", AHEAD)
    cluster.submit("r")
    cluster.tick(200)
    cluster.now += 9
    all_beat(cluster, 0)
    effects = cluster.join("d0", Role.DECODE, epoch=2, pid=201, max_num_batched_tokens=BUDGET)
    assert placed(effects) == [("p0", "r")]


def test_one_that_no_ready_worker_can_hold_any_more_lets_the_others_past() -> None:
    cluster = small_cluster()
    cluster.join("p1", Role.PREFILL, pid=101, num_blocks=300, max_num_batched_tokens=BUDGET)
    cluster.join("d1", Role.DECODE, pid=201, num_blocks=300)
    all_beat(cluster, AHEAD, AHEAD)
    cluster.submit("large", 200 * 64)
    cluster.submit("small")
    assert cluster.phase("large") == "queued"
    effects = cluster.tick(101)
    assert placed(effects) == []
    assert placed(all_beat(cluster, 0)) == [("p0", "small")]
    assert cluster.phase("large") == "queued"


def test_a_queued_request_ends_at_request_timeout() -> None:
    cluster = small_cluster(limits=ControllerLimits(request_timeout_seconds=1))
    cluster.submit("busy", AHEAD)
    cluster.submit("r")
    cluster.now += 1.1
    all_beat(cluster, AHEAD)
    failed = {getattr(m, "request_id", ""): m for _, m in only(cluster.tick(), RequestFailed)}
    assert set(failed) == {"busy", "r"}
    assert getattr(failed["r"], "code", "") is ErrorCode.DEADLINE_EXCEEDED
    assert cluster.phase("r") == "unknown"


def test_a_request_that_a_draining_worker_gave_back_keeps_its_place() -> None:
    cluster = small_cluster(2)
    cluster.submit("first", AHEAD)
    cluster.submit("second", AHEAD)
    cluster.submit("third")
    effects = cluster.given_back("p0", "first")
    assert placed(effects) == []
    assert [cluster.phase(name) for name in ("first", "third")] == ["queued", "queued"]
    assert placed(cluster.beat("p1")) == [("p1", "first")]
