"""What load makes of roles and of the number of workers."""

from common.ids import WorkerId
from common.messages.admin import (
    OrderDone,
    OrderDrain,
    OrderRoles,
    RoleControl,
    ScalerHello,
    StartWorker,
    StopWorker,
)
from common.messages.control import Directive, MigrateDecode, PlaceRequest, SetDraining, SwitchRole
from common.messages.fields import Mode, Role
from services.controller.effects import Effect
from services.controller.elasticity import SCALER_SECONDS
from services.controller.limits import ControllerLimits
from services.controller.status import status_report
from tests.unit.controller.cluster import (
    Cluster,
    answers,
    heartbeat,
    kv,
    notes,
    only,
    pair_cluster,
    rates,
)

AUTO = ControllerLimits(role_control=RoleControl.AUTO)
ROUND = 0.2
BUSY_TOKENS = 4000
MEASURED = rates(prefill=1000.0, step_seconds=0.02, decode=50.0)
SLOW_STEPS = rates(prefill=1000.0, step_seconds=0.2, decode=50.0)


def scaler(cluster: Cluster, *running: str, budget: int = 4) -> list[Effect]:
    names = tuple(WorkerId(name) for name in running)
    hello = ScalerHello(backend="process", host="here", max_workers=budget, running=names)
    return cluster.order(hello)


class Load:
    """A cluster whose workers tell the same load each round, until told otherwise."""

    def __init__(self, num_prefill: int = 1, num_decode: int = 1) -> None:
        self.cluster = pair_cluster(num_prefill, num_decode, limits=AUTO)
        self.is_prefill_busy = False
        self.is_decode_busy = False
        self.num_decoding = 60
        self.prefill_rates = MEASURED
        self.running: tuple[str, ...] = ()
        self.draining: set[str] = set()

    def rounds(self, number: int) -> list[Effect]:
        effects: list[Effect] = []
        cluster = self.cluster
        for _ in range(number):
            cluster.now += ROUND
            for worker in list(cluster.core.members.workers.values()):
                name = worker.peer.worker_id
                beat = self._beat(worker.role, is_draining=name in self.draining)
                effects += cluster.beat(name, beat, worker.peer.epoch)
            cluster.gateway_beat()
            if self.running:
                effects += scaler(cluster, *self.running)
            told = cluster.tick()
            for key, order in only(told, SwitchRole):
                assert isinstance(order, SwitchRole)
                told += cluster.switched(key[0], order.role, order.role_generation)
            effects += told
        return effects

    def seconds(self, seconds: float) -> list[Effect]:
        return self.rounds(round(seconds / ROUND))

    def _beat(self, role: Role, *, is_draining: bool) -> object:
        if role is Role.PREFILL:
            tokens = BUSY_TOKENS if self.is_prefill_busy else 0
            return heartbeat(
                uncomputed_tokens=tokens, measured=self.prefill_rates, is_draining=is_draining
            )
        if not self.is_decode_busy:
            return heartbeat(measured=MEASURED, is_draining=is_draining)
        return heartbeat(
            kv(referenced=60),
            num_decoding=self.num_decoding,
            measured=SLOW_STEPS,
            is_draining=is_draining,
        )


def directives(effects: list[Effect]) -> list[tuple[str, Mode | None]]:
    return [
        (key[0], message.mode)
        for key, message in only(effects, Directive)
        if isinstance(message, Directive)
    ]


def started(effects: list[Effect]) -> list[StartWorker]:
    return [answer for answer in answers(effects) if isinstance(answer, StartWorker)]


def test_a_scenario_is_told_with_its_scores_once_it_held() -> None:
    load = Load()
    load.is_prefill_busy = True
    assert "scenario_changed" not in notes(load.rounds(2))
    assert notes(load.rounds(10)).count("scenario_changed") == 1
    assert status_report(load.cluster.core, load.cluster.now).scenario == "imbalanced"


def test_idle_decode_workers_help_with_prompts_led_by_prefill_and_stop_when_it_is_over() -> None:
    load = Load()
    load.is_prefill_busy = True
    effects = load.rounds(12)
    assert "help_granted" in notes(effects)
    assert directives(effects)[0] == ("d0", Mode.DECODE_LED)
    placed = only(load.cluster.submit("r", 640), PlaceRequest)
    assert [key[0] for key, _ in placed] == ["d0"]
    load.is_prefill_busy = False
    effects = load.rounds(30)
    assert notes(effects).count("help_ended") == 1
    assert directives(effects)[-1] == ("d0", None)


def test_an_idle_prefill_worker_helps_though_it_never_had_a_prompt_to_be_measured_by() -> None:
    load = Load()
    load.prefill_rates = rates()
    load.is_decode_busy = True
    effects = load.rounds(12)
    assert "scenario_changed" in notes(effects)
    assert directives(effects)[0] == ("p0", Mode.DECODE_LED)


def test_one_slow_decode_a_worker_makes_nobody_help_or_change_its_role() -> None:
    load = Load(num_prefill=2)
    load.is_decode_busy = True
    load.num_decoding = 1
    effects = load.seconds(60)
    assert directives(effects) == []
    assert only(effects, SwitchRole) == []


def test_queued_prompts_count_as_prefill_load() -> None:
    load = Load()
    for number in range(8):
        load.cluster.submit(f"r{number}", 6000)
    effects = load.rounds(12)
    assert "scenario_changed" in notes(effects)


def test_an_imbalance_that_lasts_switches_one_worker_for_good_and_not_the_last_one() -> None:
    load = Load(num_decode=2)
    load.is_prefill_busy = True
    effects = load.seconds(14)
    (switch,) = only(effects, SwitchRole)
    assert switch[1] == SwitchRole(role=Role.PREFILL, role_generation=2)
    assert "role_ordered" in notes(effects)
    assert only(load.seconds(60), SwitchRole) == [], "one decode worker stays"


def test_roles_stay_while_they_are_the_operator_s_and_help_ends_at_once() -> None:
    load = Load(num_decode=2)
    load.is_prefill_busy = True
    load.rounds(12)
    effects = load.cluster.order(OrderRoles(control=RoleControl.MANUAL))
    assert directives(effects) == [("d0", None), ("d1", None)]
    assert isinstance(answers(effects)[-1], OrderDone)
    later = load.seconds(30)
    assert only(later, SwitchRole) == []
    assert directives(later) == []
    report = status_report(load.cluster.core, load.cluster.now)
    assert (report.role_control, report.scenario) == (RoleControl.MANUAL, "imbalanced")


def test_extreme_load_asks_the_scaler_for_one_worker_at_a_time_within_its_budget() -> None:
    load = Load()
    load.running = ("p0", "d0")
    load.is_prefill_busy = load.is_decode_busy = True
    (start,) = started(load.seconds(20))
    assert start.worker_id == f"extra-{start.role}-0"
    load.cluster.join(start.worker_id, start.role, pid=300)
    load.running = ("p0", "d0", start.worker_id)
    (second,) = started(load.seconds(20))
    assert second.worker_id != start.worker_id
    load.cluster.join(second.worker_id, second.role, pid=301)
    load.running = (*load.running, second.worker_id)
    assert started(load.seconds(60)) == [], "four is its budget"


def test_a_scaler_that_is_silent_is_asked_for_nothing() -> None:
    load = Load()
    scaler(load.cluster, "p0", "d0")
    load.is_prefill_busy = load.is_decode_busy = True
    load.cluster.now += SCALER_SECONDS
    assert started(load.seconds(20)) == []


def test_low_load_drains_an_added_worker_and_stops_it_when_it_is_empty() -> None:
    load = Load()
    load.cluster.join("extra-decode-0", Role.DECODE, pid=300)
    load.running = ("p0", "d0", "extra-decode-0")
    effects = load.seconds(60)
    assert {key[0] for key, _ in only(effects, SetDraining)} == {"extra-decode-0"}
    assert not any(isinstance(answer, StopWorker) for answer in answers(effects))
    load.draining = {"extra-decode-0"}
    effects = load.rounds(2)
    stops = [answer for answer in answers(effects) if isinstance(answer, StopWorker)]
    assert stops == [StopWorker(worker_id=WorkerId("extra-decode-0"))]
    assert notes(effects).count("worker_stopped") == 1
    effects = load.seconds(30)
    assert not any(key[0] in ("p0", "d0") for key, _ in only(effects, SetDraining))


def test_the_decodes_of_an_added_worker_move_before_it_is_stopped() -> None:
    load = Load()
    load.cluster.join("extra-decode-0", Role.DECODE, pid=300)
    load.running = ("p0", "d0", "extra-decode-0")
    load.cluster.beat("d0", heartbeat(kv(referenced=50)))
    load.cluster.submit("r")
    load.cluster.started("extra-decode-0", "r")
    effects = load.seconds(60)
    load.draining = {"extra-decode-0"}
    ((source, move),) = only(effects, MigrateDecode)
    assert isinstance(move, MigrateDecode)
    assert (source[0], move.decode.worker_id) == ("extra-decode-0", "d0")
    assert not any(isinstance(answer, StopWorker) for answer in answers(load.seconds(5)))
    load.cluster.started("d0", "r")
    stops = [answer for answer in answers(load.rounds(2)) if isinstance(answer, StopWorker)]
    assert stops == [StopWorker(worker_id=WorkerId("extra-decode-0"))]


def test_a_controller_that_was_started_anew_stops_what_an_earlier_one_drained() -> None:
    load = Load()
    load.cluster.join("extra-decode-0", Role.DECODE, pid=300)
    load.running = ("p0", "d0", "extra-decode-0")
    load.draining = {"extra-decode-0"}
    stops = [answer for answer in answers(load.rounds(3)) if isinstance(answer, StopWorker)]
    assert stops == [StopWorker(worker_id=WorkerId("extra-decode-0"))]


def drained_by_the_operator(name: str) -> Load:
    load = Load(num_decode=2)
    load.cluster.join("extra-decode-0", Role.DECODE, pid=300)
    load.running = ("p0", "d0", "d1", "extra-decode-0")
    load.cluster.order(OrderDrain(worker_id=WorkerId(name), is_draining=True))
    load.draining = {name}
    return load


def test_an_added_worker_that_the_operator_drained_goes_first_in_a_quiet_time() -> None:
    load = drained_by_the_operator("extra-decode-0")
    load.cluster.join("extra-decode-1", Role.DECODE, pid=301)
    load.running = (*load.running, "extra-decode-1")
    effects = load.seconds(15)
    stops = {answer for answer in answers(effects) if isinstance(answer, StopWorker)}
    assert stops == {StopWorker(worker_id=WorkerId("extra-decode-0"))}
    assert notes(effects).count("worker_retires") == 1


def test_a_worker_of_the_start_that_the_operator_drained_is_not_stopped() -> None:
    load = drained_by_the_operator("d1")
    load.running = ("p0", "d0", "d1")
    assert not any(isinstance(answer, StopWorker) for answer in answers(load.seconds(60)))


def test_an_added_worker_that_the_operator_drained_does_not_keep_others_from_being_added() -> None:
    load = Load()
    load.running = ("p0", "d0")
    load.is_prefill_busy = load.is_decode_busy = True
    (first,) = started(load.seconds(12))
    load.cluster.join(first.worker_id, first.role, pid=300)
    load.running = ("p0", "d0", first.worker_id)
    load.cluster.order(OrderDrain(worker_id=first.worker_id, is_draining=True))
    load.draining = {first.worker_id}
    assert len(started(load.seconds(12))) == 1


def test_a_worker_that_the_operator_wants_back_is_not_stopped() -> None:
    load = Load()
    load.cluster.join("extra-decode-0", Role.DECODE, pid=300)
    load.running = ("p0", "d0", "extra-decode-0")
    load.seconds(60)
    order = OrderDrain(worker_id=WorkerId("extra-decode-0"), is_draining=False)
    load.cluster.order(order)
    assert not any(isinstance(answer, StopWorker) for answer in answers(load.rounds(5)))


def test_a_cluster_of_combined_workers_grows_by_combined_ones() -> None:
    cluster = Cluster(AUTO)
    cluster.join("c0", Role.COMBINED)
    cluster.join_gateway()
    effects: list[Effect] = []
    for _ in range(60):
        cluster.now += ROUND
        beat = heartbeat(
            kv(referenced=60), uncomputed_tokens=BUSY_TOKENS, num_decoding=60, measured=SLOW_STEPS
        )
        cluster.beat("c0", beat)
        cluster.gateway_beat()
        effects += scaler(cluster, "c0")
        effects += cluster.tick()
    assert [start.role for start in started(effects)] == [Role.COMBINED]
