import pytest

from common.ids import Epoch
from common.messages.control import (
    ClusterState,
    Fenced,
    Goodbye,
    HelloRefused,
    HelloRequested,
    PeerLeft,
    RequestFailed,
    WorkerAccepted,
)
from common.messages.fields import Role, WorkerState
from services.controller.effects import Note
from services.controller.limits import ControllerLimits
from services.controller.status import status_report
from services.controller.strangers import MAX_TOLD_KEPT, TELL_AGAIN_SECONDS, Strangers
from tests.unit.controller.cluster import (
    Cluster,
    gateway_hello,
    heartbeat,
    kv,
    notes,
    only,
    pair_cluster,
    sent_names,
    submit,
    worker_hello,
)

OTHER = "ffffffffffffffff"
LIMITS = ControllerLimits()


def worker_state(cluster: Cluster, name: str) -> WorkerState | None:
    worker = cluster.core.members.worker_named(name)
    return None if worker is None else worker.state


def test_a_worker_is_accepted_and_introduced_to_the_others() -> None:
    cluster = Cluster()
    cluster.join("p0", Role.PREFILL)
    effects = cluster.join("d0", Role.DECODE)
    assert sent_names(effects) == [("p0", "PeerJoined"), ("d0", "WorkerAccepted")]
    accepted = only(effects, WorkerAccepted)[0][1]
    assert isinstance(accepted, WorkerAccepted)
    assert accepted.role is Role.DECODE
    assert accepted.role_generation == 1
    assert [peer.worker_id for peer in accepted.peers] == ["p0"]


def test_a_repeated_hello_is_answered_again_and_disturbs_nobody() -> None:
    cluster = pair_cluster()
    cluster.submit("r")
    effects = cluster.join("p0", Role.PREFILL)
    assert sent_names(effects) == [("p0", "WorkerAccepted")]
    assert cluster.phase("r") == "placed"


@pytest.mark.parametrize(
    ("options", "field", "expected", "actual"),
    [
        ({"model": OTHER}, "model_fingerprint", "0123456789abcdef", OTHER),
        ({"block_size": 32}, "block_size", "64", "32"),
        ({"dtype": "bfloat16"}, "dtype", "float32", "bfloat16"),
    ],
)
def test_a_worker_that_differs_is_refused_with_both_values(
    options: dict[str, object], field: str, expected: str, actual: str
) -> None:
    cluster = pair_cluster()
    effects = cluster.say("d9", worker_hello("d9", Role.DECODE, **options))  # type: ignore[arg-type]  # a table of options
    assert sent_names(effects) == [("d9", "HelloRefused")]
    refused = only(effects, HelloRefused)[0][1]
    assert isinstance(refused, HelloRefused)
    assert (refused.field, refused.expected, refused.actual) == (field, expected, actual)
    assert refused.message.startswith(f"{field} is {actual}, the cluster's is {expected}: ")
    assert worker_state(cluster, "d9") is None


def test_a_gateway_with_another_model_is_refused() -> None:
    cluster = pair_cluster()
    effects = cluster.say("g2", gateway_hello("g2", model=OTHER))
    assert sent_names(effects) == [("g2", "HelloRefused")]


def test_a_hello_that_names_another_process_is_refused() -> None:
    effects = Cluster().say("p0", worker_hello("p1", Role.PREFILL))
    assert sent_names(effects) == [("p0", "HelloRefused")]


def test_a_restarted_worker_replaces_its_old_incarnation_at_once() -> None:
    cluster = pair_cluster()
    cluster.submit("r")
    effects = cluster.join("p0", Role.PREFILL, epoch=2)
    assert sent_names(effects) == [
        ("d0", "PeerLeft"),
        ("g", "RequestFailed"),
        ("d0", "Cancel"),
        ("d0", "PeerJoined"),
        ("p0", "WorkerAccepted"),
    ]
    assert cluster.phase("r") == "unknown"
    late = cluster.started("p0", "r", epoch=1)
    assert sent_names(late) == [("p0", "Fenced")]


@pytest.mark.parametrize(("pid", "host"), [(101, "here"), (100, "elsewhere")])
def test_another_process_is_refused_the_name_of_a_living_worker(pid: int, host: str) -> None:
    cluster = pair_cluster()
    cluster.submit("r")
    effects = cluster.join("p0", Role.PREFILL, epoch=2, pid=pid, host=host)
    assert sent_names(effects) == [("p0", "HelloRefused")]
    refused = only(effects, HelloRefused)[0][1]
    assert isinstance(refused, HelloRefused)
    assert refused.message == (
        "the name p0 is taken by here pid 100; give this worker another one with --worker-id"
    )
    assert refused.retry_seconds == 1.5
    assert cluster.phase("r") == "placed"
    assert cluster.core.members.is_member(("p0", Epoch(1)))


def test_a_refused_name_is_logged_once_and_answered_each_time() -> None:
    cluster = pair_cluster()
    told = [cluster.join("p0", Role.PREFILL, epoch=2, pid=9) for _ in range(3)]
    assert [notes(effects) for effects in told] == [["hello_refused"], [], []]
    assert all(sent_names(effects) == [("p0", "HelloRefused")] for effects in told)


def test_a_name_is_free_once_its_holder_is_gone_or_silent() -> None:
    cluster = pair_cluster()
    cluster.tick(100)
    effects = cluster.join("p0", Role.PREFILL, epoch=2, pid=101)
    assert sent_names(effects)[-1] == ("p0", "WorkerAccepted")
    cluster.tick(after=1.6)  # its process runs: suspect, not dead
    assert worker_state(cluster, "p0") is WorkerState.SUSPECT
    effects = cluster.join("p0", Role.PREFILL, epoch=3, pid=102)
    assert sent_names(effects)[-1] == ("p0", "WorkerAccepted")
    assert cluster.core.members.is_member(("p0", Epoch(3)))


def test_another_process_is_refused_the_name_of_a_living_gateway() -> None:
    cluster = pair_cluster()
    effects = cluster.say("g", gateway_hello("g", 2, host="elsewhere"), epoch=2)
    assert sent_names(effects) == [("g", "HelloRefused")]
    cluster.tick(50)
    effects = cluster.say("g", gateway_hello("g", 2, host="elsewhere"), epoch=2)
    assert sent_names(effects) == [("g", "GatewayAccepted")]


def test_a_worker_whose_process_is_gone_is_dead_at_the_next_tick() -> None:
    cluster = pair_cluster()
    cluster.submit("r")
    effects = cluster.tick(200)
    assert sent_names(effects) == [
        ("p0", "PeerLeft"),
        ("g", "RequestFailed"),
        ("p0", "Cancel"),
    ]
    left = only(effects, PeerLeft)[0][1]
    assert isinstance(left, PeerLeft)
    assert left.worker_id == "d0"
    assert cluster.phase("r") == "cancelling_prefill"
    cluster.finished("p0", "r", was_cancelled=True)
    assert cluster.phase("r") == "unknown"


def test_a_silent_worker_whose_process_runs_is_suspect_before_it_is_dead() -> None:
    cluster = pair_cluster(num_decode=2)
    cluster.tick(after=1.0)
    cluster.beat("p0")
    cluster.beat("d1")
    cluster.gateway_beat()
    cluster.tick(after=1.0)
    assert worker_state(cluster, "d0") is WorkerState.SUSPECT
    assert worker_state(cluster, "d1") is WorkerState.READY
    cluster.submit("r")
    assert cluster.core.book.requests["r"].decode == ("d1", 1)  # type: ignore[index]  # an id
    cluster.beat("d0")
    assert worker_state(cluster, "d0") is WorkerState.READY
    effects = cluster.tick(after=5 * 1.5 + 0.1)
    assert ("worker_left") in notes(effects)
    assert worker_state(cluster, "d0") is None


def test_a_silent_worker_of_another_host_is_dead_after_death_seconds() -> None:
    cluster = Cluster()
    cluster.join("p0", Role.PREFILL, host="there")
    assert sent_names(cluster.tick(100, after=1.4)) == []
    assert worker_state(cluster, "p0") is WorkerState.READY
    assert "worker_left" in notes(cluster.tick(after=0.2))
    fenced = only(cluster.beat("p0"), Fenced)
    assert len(fenced) == 1


@pytest.mark.parametrize(
    ("beat", "state"),
    [
        (heartbeat(is_draining=True), WorkerState.DRAINING),
        (heartbeat(is_quarantined=True), WorkerState.QUARANTINED),
    ],
)
def test_a_worker_that_is_not_ready_gets_no_new_request(beat: object, state: WorkerState) -> None:
    cluster = pair_cluster()
    cluster.beat("p0", beat)  # type: ignore[arg-type]  # a Heartbeat
    assert worker_state(cluster, "p0") is state
    assert sent_names(cluster.submit("r")) == [("g", "RequestRefused")]


def test_requests_that_wait_for_a_decode_worker_that_leaves_are_placed_again() -> None:
    cluster = pair_cluster(num_decode=2)
    cluster.submit("r")
    record = cluster.core.book.requests["r"]  # type: ignore[index]  # an id
    assert record.decode == ("d0", 1)
    effects = cluster.say("d0", Goodbye(reason="stopped"))
    assert sent_names(effects) == [
        ("p0", "PeerLeft"),
        ("d1", "PeerLeft"),
        ("p0", "PlaceDecode"),
        ("g", "RequestPlaced"),
    ]
    assert (record.phase, record.decode) == ("placed", ("d1", 1))
    cluster.say("d1", Goodbye(reason="stopped"))
    assert record.phase == "waiting"
    cluster.join("d2", Role.DECODE)
    assert (record.phase, record.decode) == ("placed", ("d2", 1))


def test_a_leaving_worker_is_removed_and_what_it_decodes_fails_by_name() -> None:
    cluster = pair_cluster()
    cluster.submit("r")
    cluster.started("d0", "r")
    effects = cluster.say("d0", Goodbye(reason="stopped"))
    failed = only(effects, RequestFailed)[0][1]
    assert isinstance(failed, RequestFailed)
    assert failed.code == "shutting_down"
    assert worker_state(cluster, "d0") is None


def test_a_dead_gateway_s_requests_are_cancelled_and_nobody_is_told() -> None:
    cluster = pair_cluster()
    cluster.submit("r")
    effects = cluster.tick(50)
    assert sent_names(effects) == [("p0", "Cancel"), ("d0", "Cancel")]
    assert cluster.phase("r") == "cancelling_prefill"


def test_an_unknown_incarnation_is_asked_for_its_hello_and_keeps_its_requests() -> None:
    cluster = Cluster()
    assert sent_names(cluster.beat("p0", epoch=7)) == [("p0", "HelloRequested")]
    assert sent_names(cluster.started("d0", "r", epoch=3)) == [("d0", "HelloRequested")]
    effects = cluster.join("p0", Role.PREFILL, epoch=7)
    assert sent_names(effects) == [("p0", "WorkerAccepted")]
    cluster.now += TELL_AGAIN_SECONDS
    assert sent_names(cluster.finished("p0", "r")) == [("p0", "HelloRequested")]


def test_queued_messages_of_unknown_incarnations_are_answered_and_logged_once_a_second() -> None:
    cluster = Cluster()
    answers, told = [], []
    for beats in range(100):
        for name, epoch in (("p0", 1), ("p0", 2), ("d0", 1)):
            effects = cluster.beat(name, epoch=epoch)
            answers += [(key, beats) for key, _ in only(effects, HelloRequested)]
            told += notes(effects)
        cluster.now += 0.0199
    strangers = [("p0", 1), ("p0", 2), ("d0", 1)]
    assert answers == [(key, beats) for beats in (0, 51) for key in strangers]
    assert told == ["hello_requested"] * len(answers)


def test_each_request_of_an_unknown_gateway_is_refused_and_its_hello_asked_for_once() -> None:
    cluster = Cluster()
    effects = [*cluster.submit("r0"), *cluster.submit("r1")]
    assert sent_names(effects) == [
        ("g", "RequestRefused"),
        ("g", "HelloRequested"),
        ("g", "RequestRefused"),
    ]


def test_a_dead_incarnation_s_queued_messages_are_fenced_once_a_second() -> None:
    cluster = pair_cluster()
    cluster.tick(100)
    assert [notes(cluster.beat("p0")) for _ in range(3)] == [["fenced"], [], []]
    cluster.now += TELL_AGAIN_SECONDS
    assert sent_names(cluster.beat("p0")) == [("p0", "Fenced")]


def test_no_more_strangers_are_remembered_than_were_told_in_the_last_second() -> None:
    strangers = Strangers(TELL_AGAIN_SECONDS)
    for number in range(2 * MAX_TOLD_KEPT):
        assert strangers.note_if_due((f"p{number}", Epoch(1)), now=0.0)
    assert len(strangers._told_at) == MAX_TOLD_KEPT
    assert strangers.note_if_due(("late", Epoch(1)), now=TELL_AGAIN_SECONDS)
    assert len(strangers._told_at) == 1


def test_an_unknown_gateway_s_request_is_refused_and_its_hello_asked_for() -> None:
    cluster = Cluster()
    effects = cluster.say("g", submit("r"), payload=(bytes(256),))
    assert sent_names(effects) == [("g", "RequestRefused"), ("g", "HelloRequested")]


def test_a_message_of_the_wrong_kind_of_peer_is_named_and_dropped() -> None:
    cluster = pair_cluster()
    assert notes(cluster.say("p0", submit("r"))) == ["protocol_violation"]
    assert notes(cluster.beat("g")) == ["protocol_violation"]


def test_gateways_learn_which_role_is_missing() -> None:
    cluster = Cluster()
    cluster.join_gateway()
    cluster.join("d0", Role.DECODE)
    state = only(cluster.gateway_beat(), ClusterState)[0][1]
    assert isinstance(state, ClusterState)
    assert (state.is_ready, state.reason) == (False, "no prefill worker is ready")
    assert (state.num_prefill, state.num_decode) == (0, 1)
    assert state.max_request_tokens == 100 * 64 + 1
    cluster.join("c0", Role.COMBINED)
    state = only(cluster.gateway_beat(), ClusterState)[0][1]
    assert isinstance(state, ClusterState)
    assert (state.is_ready, state.num_combined) == (True, 1)


def test_gateways_learn_which_workers_live_and_when_no_other_one_can() -> None:
    cluster = Cluster()
    cluster.join_gateway()
    cluster.join("d0", Role.DECODE)
    cluster.join("p0", Role.PREFILL)
    first = living(cluster)
    assert [name for name, _ in first] == ["d0", "p0"]
    assert not told_state(cluster).has_all_workers
    for _ in range(90):
        cluster.tick(after=0.1)
        cluster.beat("d0")
        cluster.gateway_beat()
    assert told_state(cluster).has_all_workers
    assert living(cluster) == first[:1], "the silent one is dead"
    cluster.join("d0", Role.DECODE, epoch=2)
    again = living(cluster)
    assert [name for name, _ in again] == ["d0"]
    assert again != first[:1]


def told_state(cluster: Cluster) -> ClusterState:
    state = only(cluster.gateway_beat(), ClusterState)[0][1]
    assert isinstance(state, ClusterState)
    return state


def living(cluster: Cluster) -> list[tuple[str, int]]:
    return [(worker.worker_id, worker.epoch) for worker in told_state(cluster).workers]


def test_gateways_learn_what_the_largest_pool_that_decodes_holds() -> None:
    cluster = Cluster()
    cluster.join_gateway()
    cluster.join("p0", Role.PREFILL, num_blocks=500)
    assert max_request_tokens(cluster) == 0
    cluster.join("d0", Role.DECODE, num_blocks=62)
    cluster.join("d1", Role.DECODE, num_blocks=20)
    assert max_request_tokens(cluster) == 62 * 64 + 1


def max_request_tokens(cluster: Cluster) -> int:
    state = only(cluster.gateway_beat(), ClusterState)[0][1]
    assert isinstance(state, ClusterState)
    return state.max_request_tokens


def test_the_cluster_is_not_ready_while_requests_are_pending_and_no_worker_moves() -> None:
    cluster = pair_cluster()
    cluster.submit("r")
    for _ in range(22):
        cluster.tick(after=1.0)
        for name in ("p0", "d0"):
            cluster.beat(name, heartbeat(num_steps=5))
        cluster.gateway_beat()
    is_ready, reason = cluster.core.readiness(cluster.now)
    assert not is_ready
    assert "work is pending and no worker moved" in reason
    cluster.beat("d0", heartbeat(num_steps=6))
    assert cluster.core.readiness(cluster.now) == (True, "")


def test_an_idle_cluster_is_ready_however_long_nothing_moves() -> None:
    cluster = pair_cluster()
    for _ in range(30):
        cluster.tick(after=1.0)
        for name in ("p0", "d0"):
            cluster.beat(name)
        cluster.gateway_beat()
    assert cluster.core.readiness(cluster.now) == (True, "")


def test_the_status_report_lists_workers_by_name_with_their_blocks() -> None:
    cluster = pair_cluster()
    cluster.beat("d0", heartbeat(kv(referenced=3, cached=2)))
    cluster.submit("r")
    report = status_report(cluster.core, cluster.now + 1)
    assert [worker.id for worker in report.workers] == ["d0", "p0"]
    assert report.workers[0].kv == kv(referenced=3, cached=2)
    assert report.workers[1].kv is None
    assert (report.is_ready, report.num_requests, report.model_name) == (True, 1, "toy")
    assert [gateway.id for gateway in report.gateways] == ["g"]


@pytest.mark.parametrize("host", ["here", "there"])
def test_nobody_is_judged_by_the_time_that_the_controller_itself_stood_still(host: str) -> None:
    cluster = pair_cluster(host=host)
    for name in ("p0", "d0"):
        cluster.beat(name)
    cluster.stand_still(60.0)
    effects = cluster.tick()  # before it has read what they said meanwhile
    assert notes(effects) == ["stood_still"]
    assert list(cluster.core.members.workers) == [("p0", 1), ("d0", 1)]
    assert {worker.state for worker in cluster.core.members.workers.values()} == {"ready"}
    assert list(cluster.core.members.gateways) == [("g", 1)]
    assert cluster.core.readiness(cluster.core.own_time.at(cluster.now)) == (True, "")
    assert notes(cluster.tick(after=0.1)) == []
    death_seconds = LIMITS.death_seconds * (LIMITS.suspect_factor if host == "here" else 1)
    assert notes(cluster.tick(after=death_seconds)).count("worker_left") == 2


def test_a_pause_gives_a_silent_peer_no_more_time_than_it_had_left() -> None:
    cluster = pair_cluster(host="there")
    cluster.now += LIMITS.death_seconds - 0.6
    cluster.gateway_beat()
    cluster.stand_still(9.0)
    assert notes(cluster.tick()) == ["stood_still"]
    left = [effect for effect in cluster.tick(after=0.2) if isinstance(effect, Note)]
    assert [note.event for note in left if note.event == "worker_left"] == ["worker_left"] * 2


def test_the_status_tells_heartbeats_as_old_as_the_controller_could_have_heard_them() -> None:
    cluster = pair_cluster()
    cluster.stand_still(9.0)
    (first, _) = status_report(cluster.core, cluster.now).workers
    cluster.tick()
    (later, _) = status_report(cluster.core, cluster.now).workers
    assert first.heartbeat_age_seconds == later.heartbeat_age_seconds <= 0.5
