"""Workers that keep the protocol, links that delay, and everything that can happen to them.

Hypothesis drives a core and a model of its cluster: each message waits in its link, in order, until
a rule delivers it. Whatever happens, every request ends for its gateway exactly once, and in the
end nobody holds anything. Workers answer for their store soon, late or never; and one that waits
for a prefix does so until it comes or the controller tells that it will not.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.errors import ErrorCode
from common.ids import Epoch, RequestId, WorkerId
from common.messages.admin import OrderDrain, OrderRole, RoleControl
from common.messages.control import (
    CancelRequest,
    DecodeRefused,
    DecodeStarted,
    GatewayHeartbeat,
    Goodbye,
    MigrationFailed,
    PrefixFound,
    PrefixNotCopied,
    RequestFailed,
    RequestFinished,
    RequestRefused,
)
from common.messages.fields import Role
from services.controller.effects import Effect, Send, ToPeer
from services.controller.limits import ControllerLimits
from services.controller.look_ups import LOOK_UP_SECONDS
from services.controller.request_machine import RequestPhase
from services.controller.request_record import CANCEL_REPORT_SECONDS
from tests.unit.controller.cluster import Cluster, heartbeat, rates, worker_hello
from tests.unit.controller.fake_worker import FakeWorker

NAMES = ("w0", "w1", "w2", "w3")
START_ROLES = (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)
BUDGET = 512


class HonestCluster(RuleBasedStateMachine):
    """The core, its workers and one gateway."""

    policy = "flowkv"

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster(
            ControllerLimits(role_control=RoleControl.AUTO, policy=self.policy, max_queue=8)
        )
        self.workers: dict[str, FakeWorker] = {}
        self.ended: dict[str, int] = {}
        self.cancelled: set[str] = set()
        self.num_submitted = 0
        self.num_epochs = 0
        self.take(self.cluster.join_gateway())
        for name, role in zip(NAMES, START_ROLES, strict=True):
            self.start(name, role)

    # ---- the model ---------------------------------------------------------------------------

    def start(self, name: str, role: Role) -> None:
        self.num_epochs += 1
        worker = FakeWorker(name, 100 + self.num_epochs, self.num_epochs, role)
        self.workers[name] = worker
        hello = worker_hello(
            name,
            role,
            worker.epoch,
            pid=worker.pid,
            max_num_batched_tokens=BUDGET,
            has_store=name != NAMES[-1],
        )
        self.take(self.cluster.say(name, hello, epoch=worker.epoch, role_generation=1))

    def take(self, effects: list[Effect]) -> None:
        """Put what was sent into the links; what is for an incarnation that is gone is lost."""
        for effect in effects:
            if not isinstance(effect, Send):
                continue
            name, epoch = effect.peer
            if name == "g":
                self.note(effect.message)
            elif name in self.workers and self.workers[name].epoch == epoch:
                self.workers[name].inbox.append(effect.message)

    def note(self, message: ToPeer) -> None:
        if isinstance(message, RequestFinished | RequestFailed | RequestRefused):
            self.ended[message.request_id] += 1

    def say_next(self, worker: FakeWorker) -> None:
        message = worker.outbox.popleft()
        generation = worker.generation
        self.take(
            self.cluster.say(worker.name, message, epoch=worker.epoch, role_generation=generation)
        )

    def beat(self, worker: FakeWorker) -> None:
        tokens = 600 * len(worker.prefilling)
        measured = rates(prefill=1000.0, step_seconds=0.02, decode=50.0, read=4000.0)
        worker.outbox.append(
            heartbeat(
                uncomputed_tokens=tokens,
                num_decoding=len(worker.decoding),
                is_draining=worker.is_draining,
                measured=measured,
                read_queue_tokens=512 * len(worker.copying),
                num_orders=worker.num_orders,
            )
        )

    # ---- what happens ------------------------------------------------------------------------

    @rule(tokens=st.sampled_from([64, 600, 3000]))
    def submit(self, tokens: int) -> None:
        name = f"r{self.num_submitted}"
        self.num_submitted += 1
        self.ended[name] = 0
        self.take(self.cluster.submit(name, tokens))

    @rule(tokens=st.sampled_from([64, 600]), count=st.integers(1, 3), is_there=st.booleans())
    def serve(self, tokens: int, count: int, is_there: bool) -> None:
        """Submit requests and let them decode."""
        for _ in range(count):
            self.submit(tokens)
        for _ in range(2):
            self.run(3, has_room=True, is_there=is_there)

    @precondition(lambda self: self.num_submitted)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, self.num_submitted - 1))
        self.cancelled.add(f"r{number}")
        message = CancelRequest(request_id=RequestId(f"r{number}"), choice=None, reason="left")
        self.take(self.cluster.say("g", message))

    @rule(name=st.sampled_from(NAMES), count=st.integers(1, 5))
    def deliver(self, name: str, count: int) -> None:
        worker = self.workers.get(name)
        for _ in range(count):
            if worker and worker.inbox:
                worker.obey(worker.inbox.popleft())

    @rule(name=st.sampled_from(NAMES), count=st.integers(1, 5))
    def report(self, name: str, count: int) -> None:
        worker = self.workers.get(name)
        for _ in range(count):
            if worker and worker.outbox:
                self.say_next(worker)

    @rule(name=st.sampled_from(NAMES), has_room=st.booleans())
    def prefill(self, name: str, has_room: bool) -> None:
        worker = self.workers.get(name)
        if worker is None:
            return
        able = (r for r in worker.prefilling if r not in worker.awaiting)
        if (request_id := next(able, None)) is None:
            return
        decode = worker.prefilling[request_id]
        if decode is None:
            del worker.prefilling[request_id]
            worker.decoding.add(request_id)
            worker.outbox.append(DecodeStarted(request_id=request_id))
            return
        target = self.workers.get(decode)
        del worker.prefilling[request_id]
        if target is not None and has_room and not target.is_draining:
            target.decoding.add(request_id)
            target.outbox.append(DecodeStarted(request_id=request_id))
            return
        worker.refused.add(request_id)
        worker.outbox.append(
            DecodeRefused(
                request_id=request_id,
                decode_worker=WorkerId(decode),
                code=ErrorCode.NO_ROOM,
                message="no room",
            )
        )

    @rule(
        name=st.sampled_from(NAMES),
        num_blocks=st.sampled_from([0, 2, 8, 8]),
        is_answered=st.sampled_from([True, True, False]),
    )
    def look_up(self, name: str, num_blocks: int, is_answered: bool) -> None:
        worker = self.workers.get(name)
        if worker is None or not worker.asked:
            return
        request_id = worker.asked.popleft()
        if is_answered:
            worker.outbox.append(PrefixFound(request_id=request_id, num_blocks=num_blocks))

    @rule(name=st.sampled_from(NAMES), is_there=st.booleans())
    def copy(self, name: str, is_there: bool) -> None:
        """Write a prefix into its target's pool, or say that nothing comes."""
        worker = self.workers.get(name)
        if worker is None or not worker.copying:
            return
        request_id, to = next(iter(worker.copying.items()))
        del worker.copying[request_id]
        target = self.workers.get(to)
        if target is not None and is_there:
            target.arrived.add(request_id)
            target.awaiting.discard(request_id)
        else:
            worker.outbox.append(PrefixNotCopied(request_id=request_id, message="it is gone"))

    @rule(name=st.sampled_from(NAMES))
    def finish(self, name: str) -> None:
        worker = self.workers.get(name)
        if worker is None or not worker.decoding:
            return
        request_id = min(worker.decoding)
        worker.drop(request_id)
        worker.outbox.append(RequestFinished(request_id=request_id, was_cancelled=False))

    @rule(name=st.sampled_from(NAMES), has_room=st.booleans())
    def move(self, name: str, has_room: bool) -> None:
        worker = self.workers.get(name)
        if worker is None or not worker.moving:
            return
        request_id, to = next(iter(worker.moving.items()))
        del worker.moving[request_id]
        target = self.workers.get(to)
        if target is None or not has_room or target.is_draining:
            worker.outbox.append(MigrationFailed(request_id=request_id, message="no room"))
            return
        worker.decoding.discard(request_id)
        target.decoding.add(request_id)
        target.outbox.append(DecodeStarted(request_id=request_id))

    @rule(num_prefilled=st.integers(0, 3), has_room=st.booleans(), is_there=st.booleans())
    def run(self, num_prefilled: int, has_room: bool, is_there: bool) -> None:
        """Let all links deliver and every worker prefill a little."""
        for name in NAMES:
            self.deliver(name, 100)
            self.look_up(name, 8, is_answered=True)
            self.copy(name, is_there=is_there)
            for _ in range(num_prefilled):
                self.prefill(name, has_room)
            self.report(name, 100)

    @rule(
        name=st.sampled_from(NAMES),
        role=st.sampled_from([Role.PREFILL, Role.DECODE]),
        how=st.sampled_from(["kill", "kill unseen", "restart", "leave"]),
    )
    def end(self, name: str, role: Role, how: str) -> None:
        match how:
            case "restart":
                self.restart(name, role)
            case "leave":
                self.leave(name)
            case _:
                self.kill(name, is_known=how == "kill")

    def kill(self, name: str, *, is_known: bool) -> None:
        worker = self.workers.pop(name, None)
        if worker is not None and is_known:
            self.take(self.cluster.tick(worker.pid))

    def restart(self, name: str, role: Role) -> None:
        self.workers.pop(name, None)
        known = self.cluster.core.members.worker_named(name)
        if known is not None:
            self.take(self.cluster.tick(known.peer.pid))
        self.start(name, role)

    def leave(self, name: str) -> None:
        worker = self.workers.get(name)
        if worker is None or worker.decoding or worker.prefilling or worker.refused:
            return
        while worker.outbox:
            self.say_next(worker)
        if worker.inbox:
            return
        del self.workers[name]
        self.take(self.cluster.say(name, Goodbye(reason="stopped"), epoch=worker.epoch))

    @rule(name=st.sampled_from(NAMES), role=st.sampled_from([Role.PREFILL, Role.DECODE]))
    def order_role(self, name: str, role: Role) -> None:
        self.take(self.cluster.order(OrderRole(worker_id=WorkerId(name), role=role)))

    @rule(name=st.sampled_from(NAMES))
    def drain_and_wait(self, name: str) -> None:
        """Begin to move what the worker decodes."""
        self.order_drain(name, on=True)
        self.deliver(name, 100)
        self.wait(0.2)

    @rule(name=st.sampled_from(NAMES), on=st.booleans())
    def order_drain(self, name: str, on: bool) -> None:
        self.take(self.cluster.order(OrderDrain(worker_id=WorkerId(name), is_draining=on)))

    @rule(seconds=st.sampled_from([0.02, 0.2, 1.0]))
    def wait(self, seconds: float) -> None:
        self.cluster.now += seconds
        for worker in self.workers.values():
            self.beat(worker)
            while worker.outbox:
                self.say_next(worker)
        self.take(self.cluster.say("g", GatewayHeartbeat(num_streams=0)))
        gone = [
            known.peer.pid
            for known in self.cluster.core.members.workers.values()
            if self.is_gone(known.peer.worker_id, known.peer.epoch)
        ]
        self.take(self.cluster.tick(*gone))
        late = [
            record.request_id
            for record in self.cluster.core.book.requests.values()
            if record.phase is RequestPhase.LOOKING_UP
            and self.cluster.now - record.asked_at >= LOOK_UP_SECONDS
        ]
        assert not late, f"still waiting for the store: {late}"

    def is_gone(self, name: str, epoch: Epoch) -> bool:
        return name not in self.workers or self.workers[name].epoch != epoch

    # ---- what must hold ----------------------------------------------------------------------

    @invariant()
    def no_request_ends_twice(self) -> None:
        twice = {name: count for name, count in self.ended.items() if count > 1}
        assert not twice, twice

    def teardown(self) -> None:
        """Let everything run to its end: then each request has ended, and nobody holds any."""
        for name in NAMES:
            if name not in self.workers:
                self.restart(name, START_ROLES[NAMES.index(name)])
        for worker in self.workers.values():
            worker.is_draining = False
        for _ in range(400):
            for name in NAMES:
                self.order_drain(name, on=False)
                self.deliver(name, 100)
                self.look_up(name, 0, is_answered=True)
                self.copy(name, is_there=False)
                self.prefill(name, has_room=True)
                self.move(name, has_room=True)
                self.finish(name)
            self.wait(0.1)
            if not self.cluster.core.book.requests and not any(
                worker.has_work for worker in self.workers.values()
            ):
                break
        assert CANCEL_REPORT_SECONDS < 400 * 0.1, "time enough for records that nobody reports"
        left = {str(r.request_id): str(r.phase) for r in self.cluster.core.book.requests.values()}
        assert not left, left
        assert not any(worker.has_work for worker in self.workers.values()), self.workers
        for name, count in self.ended.items():
            assert count == 1 or name in self.cancelled, f"{name} has not ended"


class HonestDualPathCluster(HonestCluster):
    """The same under DualPath's scheduling."""

    policy = "dualpath"


TestHonestCluster = HonestCluster.TestCase
TestHonestCluster.settings = settings(
    max_examples=80, stateful_step_count=60, deadline=None, derandomize=True
)
TestHonestDualPathCluster = HonestDualPathCluster.TestCase
TestHonestDualPathCluster.settings = settings(
    max_examples=30, stateful_step_count=60, deadline=None, derandomize=True
)
