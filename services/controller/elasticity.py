"""What load makes of roles and of the number of workers: looked at once a round.

A round takes a heartbeat's time. It brings the scenario up to date, lets the planners decide, and
carries out what they say: help and its directives, switches, and orders to scalers.
"""

from dataclasses import dataclass

from common.ids import WorkerId
from common.messages.admin import RoleControl, ScalerHello, StartWorker, StopWorker
from common.messages.control import Directive
from common.messages.fields import Role, WorkerState
from services.controller.effects import Answer, Effect, Fact, Note, PeerKey, Send
from services.controller.limits import ControllerLimits
from services.controller.members import Members, WorkerRecord
from services.controller.policy.estimates import prefill_score, shared_decode_score
from services.controller.policy.roles import Help, RolePlanner, Switch, Unhelp
from services.controller.policy.scaling import Fleet, Grow, ScalingPlanner, Shrink
from services.controller.policy.scenario import ScenarioMachine
from services.controller.policy.views import Incarnation, WorkerView
from services.controller.request_book import RequestBook
from services.controller.request_machine import DECODED
from services.controller.roles import Roles

SCALER_SECONDS = 5.0
"""A scaler that is silent for so long is not counted on any more."""
STOP_AGAIN_SECONDS = 1.0
QUIET_SECONDS = 2.0
"""So long after the last request, and with no prompt to compute, prefill workers may decode."""
ADDED_PREFIX = "extra-"
"""How the names of workers begin that were asked for under load: they may be stopped again."""


@dataclass(slots=True)
class Scaler:
    """A scaler and what its last hello said."""

    hello: ScalerHello
    last_seen: float


class Elasticity:
    """Follows the scenario and carries the planners' decisions out."""

    def __init__(
        self, members: Members, book: RequestBook, roles: Roles, limits: ControllerLimits
    ) -> None:
        self._members = members
        self._book = book
        self._roles = roles
        self._limits = limits
        self._machine = ScenarioMachine()
        self._role_planner = RolePlanner(members.objectives)
        self._scaling_planner = ScalingPlanner(members.objectives)
        self._scalers: dict[PeerKey, Scaler] = {}
        self._stopped_at: dict[PeerKey, float] = {}
        self._retiring: set[PeerKey] = set()

    @property
    def scenario(self) -> str:
        """What the cluster's load is taken for."""
        return self._machine.scenario

    def scaler_hello(
        self, sender: PeerKey, hello: ScalerHello, cause: str, now: float
    ) -> list[Effect]:
        """Note what a scaler can do."""
        is_new = sender not in self._scalers
        self._scalers[sender] = Scaler(hello, now)
        if not is_new:
            return []
        facts: tuple[Fact, ...] = (
            ("scaler", sender[0]),
            ("backend", hello.backend),
            ("host", hello.host),
            ("max_workers", hello.max_workers),
        )
        return [Note("scaler_joined", cause, facts=facts)]

    def end_help(self, cause: str) -> list[Effect]:
        """Take all help back: the operator gives the roles from now on."""
        return self._carry_out(self._role_planner.withdraw(), cause, now=0.0)

    @property
    def helps_in_quiet(self) -> bool:
        """Whether some worker helps to decode only while no requests come."""
        return self._role_planner.helps_in_quiet

    def end_quiet(self, cause: str, now: float) -> list[Effect]:
        """A request has come: those that help to decode only while none does are to end it."""
        return self._carry_out(self._role_planner.end_quiet(), cause, now)

    def take_round(self, cause: str, now: float) -> list[Effect]:
        """Look at the load and decide."""
        ready = [w.view() for w in self._members.ready_workers()]
        effects = self._observe(ready, cause)
        if self._roles.control is RoleControl.AUTO:
            actions = self._role_planner.plan(
                self._machine.scenario,
                self._machine.pressure,
                ready,
                now,
                is_quiet=self._is_quiet(ready, now),
            )
            effects += self._carry_out(actions, cause, now)
        return [*effects, *self._scale(cause, now), *self._retire(cause, now)]

    # ---- scenario and roles ----------------------------------------------------------------

    def _observe(self, ready: list[WorkerView], cause: str) -> list[Effect]:
        objectives = self._members.objectives
        before = self._machine.scenario
        prefills = [w for w in ready if w.role is not Role.DECODE]
        queued = self._book.num_queued_tokens()
        share = queued / max(1, len(prefills))
        self._machine.observe(
            [prefill_score(w, share, objectives) for w in prefills if w.is_measured],
            [
                shared_decode_score(w, objectives)
                for w in ready
                if w.role is not Role.PREFILL and w.is_measured
            ],
        )
        if self._machine.scenario is before:
            return []
        pressure = self._machine.pressure
        facts: tuple[Fact, ...] = (
            ("before", before),
            ("scenario", self._machine.scenario),
            ("prefill_score", round(pressure.prefill, 3) if pressure else None),
            ("decode_score", round(pressure.decode, 3) if pressure else None),
            ("queued_tokens", queued),
            ("num_workers", len(ready)),
        )
        return [Note("scenario_changed", cause, facts=facts)]

    def _is_quiet(self, ready: list[WorkerView], now: float) -> bool:
        is_idle = not self._book.queued and not any(w.uncomputed_tokens for w in ready)
        return is_idle and now - self._book.last_submitted_at >= QUIET_SECONDS

    def _carry_out(
        self, actions: list[Help | Unhelp | Switch] | list[Unhelp], cause: str, now: float
    ) -> list[Effect]:
        effects: list[Effect] = []
        for action in actions:
            worker = self._members.workers.get(action.worker)
            if worker is None:
                continue
            match action:
                case Help():
                    effects += self._help(worker, action, cause)
                case Unhelp(reason=reason):
                    worker.help = None
                    effects += [
                        Note("help_ended", cause, facts=_facts(worker, reason)),
                        Send(worker.key, Directive(mode=None, num_steps=0), cause),
                    ]
                case Switch(role=role, reason=reason):
                    effects += self._roles.order(worker, role, reason, cause, now)
        return effects

    def _help(self, worker: WorkerRecord, action: Help, cause: str) -> list[Effect]:
        directive = Directive(mode=action.mode, num_steps=action.num_steps)
        effects: list[Effect] = [Send(worker.key, directive, cause)]
        if worker.help is not action.role:
            worker.help = action.role
            facts = (*_facts(worker, action.reason), ("helps", action.role), ("mode", action.mode))
            effects.insert(0, Note("help_granted", cause, facts=facts))
        return effects

    # ---- scaling ---------------------------------------------------------------------------

    def _scale(self, cause: str, now: float) -> list[Effect]:
        for key, scaler in list(self._scalers.items()):
            if now - scaler.last_seen > SCALER_SECONDS:
                del self._scalers[key]
        hellos = [scaler.hello for scaler in self._scalers.values()]
        budget = sum(hello.max_workers for hello in hellos)
        if not budget:
            return []
        running = [name for hello in hellos for name in hello.running]
        added = frozenset(name for name in running if name.startswith(ADDED_PREFIX))
        self._adopt(added)
        live = [w for w in self._members.workers.values() if w.state in _LIVE]
        drained = frozenset(
            worker.peer.worker_id
            for worker in live
            if worker.is_drain_ordered and worker.key not in self._retiring
        )
        change = self._scaling_planner.plan(
            self._machine.scenario,
            self._machine.pressure,
            [worker.view() for worker in live],
            Fleet(budget, len(running), added, drained & added),
            now,
        )
        match change:
            case Grow(role, reason):
                return self._grow(role, reason, cause)
            case Shrink(worker, reason):
                return self._shrink(worker, reason, cause, now)
            case None:
                return []

    def _adopt(self, added: frozenset[WorkerId]) -> None:
        """Let added workers go on to retire that drain on the order of an earlier controller."""
        for key, worker in self._members.workers.items():
            is_ours = worker.is_draining and not worker.is_drain_ordered
            if is_ours and worker.peer.worker_id in added:
                worker.is_drain_ordered = True
                self._retiring.add(key)

    def _grow(self, role: Role, reason: str, cause: str) -> list[Effect]:
        """Ask a scaler with room for one more worker; where all are combined it is one, too."""
        if any(worker.role is Role.COMBINED for worker in self._members.workers.values()):
            role = Role.COMBINED
        for key, scaler in self._scalers.items():
            if len(scaler.hello.running) >= scaler.hello.max_workers:
                continue
            name = self._free_name(role)
            facts: tuple[Fact, ...] = (
                ("worker", name),
                ("role", role),
                ("scaler", key[0]),
                ("reason", reason),
            )
            return [
                *self._roles.end_orders(name, "it is a new worker", cause),
                Note("worker_asked_for", cause, facts=facts),
                Answer(key, StartWorker(worker_id=name, role=role), cause),
            ]
        return []

    def _free_name(self, role: Role) -> WorkerId:
        taken = {key[0] for key in self._members.workers}
        taken.update(name for s in self._scalers.values() for name in s.hello.running)
        number = 0
        while (name := f"{ADDED_PREFIX}{role}-{number}") in taken:
            number += 1
        return WorkerId(name)

    def _shrink(self, key: Incarnation, reason: str, cause: str, now: float) -> list[Effect]:
        worker = self._members.workers[key]
        self._retiring.add(worker.key)
        return [
            Note("worker_retires", cause, facts=_facts(worker, reason)),
            *self._roles.set_draining(worker, cause, now, on=True),
        ]

    def _retire(self, cause: str, now: float) -> list[Effect]:
        """Let scalers stop the workers that were drained for good and are empty."""
        effects: list[Effect] = []
        for key in list(self._retiring):
            worker = self._members.workers.get(key)
            if worker is None or not worker.is_drain_ordered:  # gone, or the operator wants it
                self._retiring.discard(key)
                self._stopped_at.pop(key, None)
                continue
            is_told = now - self._stopped_at.get(key, -STOP_AGAIN_SECONDS) < STOP_AGAIN_SECONDS
            if is_told or not self._is_empty(worker):
                continue
            for scaler_key, scaler in self._scalers.items():
                if key[0] in scaler.hello.running:
                    is_repeat = key in self._stopped_at
                    self._stopped_at[key] = now
                    stop = StopWorker(worker_id=worker.peer.worker_id)
                    effects.append(Answer(scaler_key, stop, cause))
                    if not is_repeat:
                        facts = _facts(worker, "it is empty")
                        effects.append(Note("worker_stopped", cause, facts=facts))
        return effects

    def _is_empty(self, worker: WorkerRecord) -> bool:
        load = worker.load
        if load is None or not worker.is_draining:
            return False
        work = (
            load.num_waiting,
            load.num_prefilling,
            load.num_sending,
            load.num_receiving,
            load.num_decoding,
            load.num_swapped,
        )
        return not any(work) and not any(
            record.side_of(worker.key) in ("decode", "target")
            or (record.prefill == worker.key and record.phase not in DECODED)
            for record in self._book.requests.values()
        )


_LIVE = (WorkerState.READY, WorkerState.DRAINING)


def _facts(worker: WorkerRecord, reason: str) -> tuple[Fact, ...]:
    return (("worker", worker.key[0]), ("role", worker.role), ("reason", reason))
