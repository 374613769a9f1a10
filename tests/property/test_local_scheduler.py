"""The local scheduler under random requests, ends, handoffs, modes and moves on tiny pools."""

import random
from collections.abc import Callable
from contextlib import suppress

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.errors import ErrorCode, LocalProtocolError
from common.ids import RequestId
from common.kv.blocks import Hold
from common.messages.fields import Mode
from common.messages.handoff import FirstToken
from common.sampling import SampledToken
from common.scheduler.attention_cost import Chunk
from common.scheduler.effects import Effect, RequestBroke, RequestEnded, StopHandoff
from common.scheduler.migration import Migration
from common.scheduler.request import RequestPhase
from common.scheduler.steps import StepPlan
from tests.support.scheduler_bench import EOS, Bench, new_request

MAX_STEPS_TO_END = 400


def drawn(request_id: RequestId, choice: int, index: int) -> int:
    """End some sequences early; the same sequence always gets the same tokens."""
    return (
        EOS if (int(request_id[1:]) + 3 * choice + index) % 7 == 0 else 2000 + 100 * choice + index
    )


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(2, 10),
        block_size=st.sampled_from([4, 8]),
        budget=st.integers(8, 24),
        max_seqs=st.integers(1, 6),
        growth=st.integers(0, 9),
        num_slots=st.integers(0, 12),
        quota_seconds=st.sampled_from([0.0, 0.0, 0.001, 0.012, 0.03]),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        budget: int,
        max_seqs: int,
        growth: int,
        num_slots: int,
        quota_seconds: float,
    ) -> None:
        self.bench = Bench(
            num_blocks=num_blocks,
            block_size=block_size,
            budget=budget,
            max_seqs=max_seqs,
            growth=growth,
            num_slots=num_slots,
            token_of=drawn,
            is_keeping=True,
            quota_seconds=quota_seconds,
        )
        self.scheduler = self.bench.scheduler
        self.plans: list[StepPlan] = []
        self.num_names = 0
        self.names: list[str] = []
        self.remote: set[str] = set()
        self.open: set[str] = set()
        self.handed_over: set[str] = set()
        self.reserved: dict[str, list[int]] = {}
        self.awaiting: set[str] = set()
        self.migrations: dict[str, Migration] = {}
        self.on_the_way: dict[str, Migration] = {}

    # ---- what comes in ---------------------------------------------------------------------------

    @rule(
        length=st.integers(1, 40),
        kind=st.integers(0, 2),
        num_choices=st.integers(1, 3),
        max_tokens=st.integers(1, 12),
        is_remote=st.booleans(),
        num_awaited=st.sampled_from([0, 4, 40]),
    )
    def add(
        self,
        length: int,
        kind: int,
        num_choices: int,
        max_tokens: int,
        is_remote: bool,
        num_awaited: int,
    ) -> None:
        name = self.new_name()
        self.names.append(name)
        request = new_request(
            name, self.prompt(length, kind), num_choices=num_choices, max_tokens=max_tokens
        )
        if is_remote and max_tokens > 1:
            self.remote.add(name)
        if num_awaited:
            self.awaiting.add(name)
        self.bench.take(
            self.scheduler.add(
                request, is_remote=name in self.remote, num_awaited_tokens=num_awaited
            )
        )

    @precondition(lambda self: self.awaiting)
    @rule(which=st.integers(0, 9))
    def prefix_arrives(self, which: int) -> None:
        name = sorted(self.awaiting)[which % len(self.awaiting)]
        self.awaiting.discard(name)
        self.scheduler.prefix_arrived(RequestId(name))

    @precondition(lambda self: self.scheduler.can_reserve() and len(self.reserved) < 3)
    @rule(length=st.integers(1, 40), kind=st.integers(0, 2))
    def reserve(self, length: int, kind: int) -> None:
        """A prefill side elsewhere asks for room."""
        name = self.new_name()
        prompt = self.prompt(length, kind)
        acquired = self.bench.blocks.acquire(
            f"tr-{name}", prompt, hold=Hold.TRANSFER, max_cached_tokens=len(prompt)
        )
        if acquired is not None:
            self.reserved[name] = prompt

    @precondition(lambda self: self.reserved)
    @rule(which=st.integers(0, 9), fate=st.sampled_from(["arrives", "arrives", "is aborted"]))
    def end_reservation(self, which: int, fate: str) -> None:
        name = sorted(self.reserved)[which % len(self.reserved)]
        prompt = self.reserved.pop(name)
        if fate == "is aborted":
            self.bench.blocks.release(f"tr-{name}")
            return
        self.names.append(name)
        choices = range(1 + which % 3)
        firsts = [
            FirstToken(
                choice=choice, token=SampledToken(token_id=drawn(RequestId(name), choice, 0))
            )
            for choice in choices
        ]
        request = new_request(name, prompt, num_choices=len(choices), max_tokens=2 + which)
        self.bench.take_over(request, firsts, owner=f"tr-{name}")

    def new_name(self) -> str:
        self.num_names += 1
        return f"r{self.num_names}"

    def prompt(self, length: int, kind: int) -> list[int]:
        """Prompts of one kind share their beginnings."""
        return [kind * 1000 + place for place in range(length)]

    # ---- steps -----------------------------------------------------------------------------------

    @precondition(lambda self: len(self.plans) < 2)
    @rule()
    def plan_a_step(self) -> None:
        num_sure = self.num_sure_tokens()
        modes = {self.scheduler.mode}
        plan, effects = self.bench.plan()
        modes.add(self.scheduler.mode)
        has_quota = self.scheduler._quota.allowance() is not None
        if plan is not None:
            self.plans.append(plan)
            if has_quota:
                self.look_at_the_quota(plan)
        if num_sure is not None and Mode.DECODE_LED not in modes and not has_quota:
            self.look_for_idle_room(plan, num_sure)
        self.follow(effects)

    def look_at_the_quota(self, plan: StepPlan) -> None:
        """Prompts take no longer than they may, as predicted, but for one block of the first."""
        chunks = [Chunk(row.start, row.num_tokens) for row in plan.rows if not row.is_decode]
        seconds = sum(map(self.scheduler._quota.cost.seconds, chunks))
        is_least = len(chunks) == 1 and chunks[0].num_tokens <= self.bench.block_size
        most = self.scheduler._limits.quota_seconds * (1 + 1e-9)
        assert seconds <= most or is_least, f"{chunks} take {seconds} s, not {most}"

    def num_sure_tokens(self) -> int | None:
        """Tokens that sequences with blocks can compute now; None where a decode lacks a block."""
        decode, prefill = self.scheduler._decode, self.scheduler._prefill
        ready = [s for s in decode.running if s.can_decode]
        if any(s.next_length > len(s.block_table) * self.bench.block_size for s in ready):
            return None
        rest = [
            s.length - s.num_computed - s.num_planned for s in prefill.running if s.pending is None
        ]
        return len(ready) + sum(rest)

    def look_for_idle_room(self, plan: StepPlan | None, num_sure: int) -> None:
        """A step is as large as it may be, but for the end of a block that a chunk leaves free."""
        num_tokens = 0 if plan is None else plan.num_tokens
        num_rows = 0 if plan is None else len(plan.rows)
        num_usable = self.bench.budget - self.bench.block_size + 1
        if num_rows == self.bench.max_seqs or num_tokens >= num_usable:
            return
        assert num_tokens >= num_sure, f"{num_tokens} tokens planned of {num_sure} that could be"
        decode, prefill = self.scheduler._decode, self.scheduler._prefill
        is_waiting = bool(decode.waiting or prefill.waiting) and not decode.swapped
        assert not is_waiting or prefill._found_no_room, "prompts wait though there is room"

    @rule(
        mode=st.sampled_from([None, *Mode]),
        num_steps=st.integers(0, 30),
    )
    def direct(self, mode: Mode | None, num_steps: int) -> None:
        self.scheduler.direct(mode, num_steps)

    @precondition(lambda self: self.plans)
    @rule(failing=st.sampled_from([None] * 9 + [0, 1]))
    def finish_the_step(self, failing: int | None) -> None:
        plan = self.plans.pop(0)
        self.scheduler.note_step(0.002 * plan.num_tokens + 0.001 * len(plan.rows), plan)
        self.follow(self.bench.finish(plan, [] if failing is None else [failing]))

    # ---- handoffs --------------------------------------------------------------------------------

    def openable(self) -> list[str]:
        phases = (RequestPhase.PREFILLING, RequestPhase.SENDING)
        return [
            name
            for name in sorted(self.remote - self.open)
            if (request := self.scheduler.find(RequestId(name))) is not None
            and request.phase in phases
        ]

    @precondition(lambda self: self.openable())
    @rule(which=st.integers(0, 9))
    def open_a_handoff(self, which: int) -> None:
        names = self.openable()
        name = names[which % len(names)]
        self.scheduler.open_handoff(RequestId(name))
        self.open.add(name)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 9), is_good=st.booleans())
    def close_a_handoff(self, which: int, is_good: bool) -> None:
        name = sorted(self.open)[which % len(self.open)]
        request = self.scheduler.find(RequestId(name))
        assert request is not None, "an open handoff keeps its request"
        phases = (RequestPhase.SENDING, RequestPhase.FROZEN)
        was_accepted = is_good and request.phase in phases
        migration = self.migrations.pop(name, None)
        self.open.discard(name)
        if was_accepted:
            self.handed_over.add(name)
        if was_accepted and migration is not None:
            self.on_the_way[name] = migration
        self.bench.close_handoff(name, was_accepted=was_accepted)
        if not was_accepted and migration is not None:
            self.bench.take(self.scheduler.thaw(RequestId(name)))

    def freezable(self) -> list[RequestId]:
        return [
            request_id
            for request_id in self.scheduler.request_ids()
            if (request := self.scheduler.find(request_id)) is not None
            and request.phase is RequestPhase.DECODING
            and len(request.live_choices) == 1
        ]

    @precondition(lambda self: self.freezable())
    @rule(which=st.integers(0, 9))
    def freeze(self, which: int) -> None:
        request_ids = self.freezable()
        request_id = request_ids[which % len(request_ids)]
        # A preempted one cannot be.
        with suppress(LocalProtocolError):
            self.bench.take(self.scheduler.freeze(request_id))

    def still(self) -> list[str]:
        """Frozen requests that no step has and no handoff reads."""
        return [
            name
            for name in dict.fromkeys(self.bench.frozen)
            if name not in self.open
            and (request := self.scheduler.find(RequestId(name))) is not None
            and request.phase is RequestPhase.FROZEN
            and not request.live_sequence.is_in_step
        ]

    @precondition(lambda self: self.still())
    @rule(which=st.integers(0, 9), is_moved=st.booleans())
    def end_a_freeze(self, which: int, is_moved: bool) -> None:
        """A handoff begins, or the decode goes on."""
        names = self.still()
        name = names[which % len(names)]
        if not is_moved:
            self.bench.take(self.scheduler.thaw(RequestId(name)))
            return
        self.migrations[name] = self.scheduler.migration_of(RequestId(name))
        self.bench.moved.add(name)
        self.scheduler.open_handoff(RequestId(name))
        self.open.add(name)

    @precondition(lambda self: self.on_the_way and self.scheduler.can_reserve())
    @rule(which=st.integers(0, 9))
    def come_back(self, which: int) -> None:
        """Another worker moves a decode here that was moved there."""
        name = sorted(self.on_the_way)[which % len(self.on_the_way)]
        if self.bench.move_in(name, self.on_the_way[name]) is not None:
            del self.on_the_way[name]
            self.handed_over.discard(name)

    @precondition(lambda self: self.openable())
    @rule(which=st.integers(0, 9))
    def place_here(self, which: int) -> None:
        names = self.openable()
        name = names[which % len(names)]
        self.remote.discard(name)
        self.bench.take(self.scheduler.place_locally(RequestId(name)))

    def follow(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, StopHandoff):
                assert effect.request_id in self.open, "only an open handoff is stopped"

    def withdrawable(self) -> list[str]:
        return [
            name
            for name in self.names
            if (request := self.scheduler.find(RequestId(name))) is not None
            and request.phase is RequestPhase.WAITING
        ]

    @precondition(lambda self: self.names)
    @rule(which=st.integers(0, 99))
    def give_back(self, which: int) -> None:
        """Another worker gets a request that has not begun."""
        name = self.names[which % len(self.names)]
        can_be = name in self.withdrawable()
        assert self.scheduler.withdraw(RequestId(name)) is can_be
        if can_be:
            self.names.remove(name)
            self.awaiting.discard(name)
            self.remote.discard(name)

    # ---- ends ------------------------------------------------------------------------------------

    @precondition(lambda self: self.names)
    @rule(which=st.integers(0, 99), choice=st.sampled_from([None, None, 0, 1, 2]))
    def cancel(self, which: int, choice: int | None) -> None:
        self.follow(self.bench.cancel(self.names[which % len(self.names)], choice) or [])

    @precondition(lambda self: self.names)
    @rule(which=st.integers(0, 99))
    def fail(self, which: int) -> None:
        name = RequestId(self.names[which % len(self.names)])
        self.follow(self.bench.take(self.scheduler.fail(name, ErrorCode.INTERNAL, "no gateway")))

    # ---- what holds ------------------------------------------------------------------------------

    @invariant()
    def nothing_is_violated(self) -> None:
        assert self.bench.violations == []
        self.scheduler.validate()
        self.bench.blocks.validate()
        for name, reports in self.bench.reports.items():
            assert len(reports) == 1, f"{name} was told {reports}"
            assert name not in self.handed_over, f"{name} ends elsewhere"

    def let_all_go_on(self) -> None:
        """Others do what they owe: handoffs end, and what was reserved or moved arrives."""
        while self.open:
            self.close_a_handoff(0, is_good=True)
        while self.openable():
            self.place_here(0)
        while self.reserved:
            self.end_reservation(0, "arrives")
        while self.awaiting:
            self.prefix_arrives(0)
        for request_id in self.scheduler.request_ids():
            self.bench.take(self.scheduler.thaw(request_id))
        if self.on_the_way and self.scheduler.can_reserve():
            self.come_back(0)

    def teardown(self) -> None:
        """Without anything new, all ends in a bounded number of steps and nothing is held."""
        for _ in range(MAX_STEPS_TO_END):
            if len(self.plans) > 1 or (self.plans and not self.scheduler.request_ids()):
                self.finish_the_step(None)
            self.let_all_go_on()
            self.nothing_is_violated()
            if not self.scheduler.request_ids() and not self.on_the_way:
                break
            num_open = len(self.plans)
            self.plan_a_step()
            if len(self.plans) == num_open and self.plans:
                self.finish_the_step(None)
        assert self.scheduler.request_ids() == (), "requests hang"
        assert self.on_the_way == {}, "moved requests find no room"
        self.scheduler.publish()
        self.bench.keep()
        self.bench.let_go()
        counts = self.bench.blocks.counts()
        assert (counts.referenced, counts.in_transfer) == (0, 0)
        self.scheduler.validate()
        assert self.scheduler._held._swap.num_used == 0
        for name in self.names:
            if name not in self.handed_over:
                (report,) = self.bench.reports.get(name, [None])
                assert isinstance(report, RequestEnded | RequestBroke), f"{name} was told {report}"


SchedulerMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, derandomize=True
)
TestLocalScheduler = SchedulerMachine.TestCase

NUM_WALKS = 1500
"""Random walks come further than Hypothesis in the same time, but cannot shrink what they find."""


def steps_of(machine: SchedulerMachine, rng: random.Random) -> list[Callable[[], None]]:
    """What may happen next."""
    steps: list[Callable[[], None]] = []
    if len(machine.plans) < 2:
        steps += [machine.plan_a_step] * (6 if not machine.plans else 4)
    if machine.plans:
        steps += [lambda: machine.finish_the_step(0 if rng.random() < 0.03 else None)] * 6
    if len(machine.scheduler.request_ids()) < 8:
        steps += [
            lambda: machine.add(
                rng.randrange(1, 41),
                rng.randrange(3),
                rng.randrange(1, 4),
                rng.randrange(1, 13),
                rng.random() < 0.4,
                rng.choice([0, 0, 0, 0, 0, 4, 40]),
            )
        ] * 2
    if machine.reserved:
        fate = rng.choice(["arrives", "arrives", "is aborted"])
        steps += [lambda: machine.end_reservation(rng.randrange(10), fate)]
    if machine.openable():
        steps += [lambda: machine.open_a_handoff(rng.randrange(10))] * 2
        steps += [lambda: machine.place_here(rng.randrange(10))]
    if machine.open:
        steps += [lambda: machine.close_a_handoff(rng.randrange(10), rng.random() < 0.6)]
    if machine.names and rng.random() < 0.3:
        steps += [lambda: machine.cancel(rng.randrange(100), rng.choice([None, 0, 1, 2]))]
        if rng.random() < 0.2:
            steps += [lambda: machine.fail(rng.randrange(100))]
        if rng.random() < 0.2:
            steps += [lambda: machine.give_back(rng.randrange(100))]
    return steps


def moves_of(machine: SchedulerMachine, rng: random.Random) -> list[Callable[[], None]]:
    """What may happen beside: directives, prefixes, and decodes that move."""
    steps: list[Callable[[], None]] = []
    if rng.random() < 0.1:
        mode = rng.choice([None, *Mode])
        steps += [lambda: machine.direct(mode, rng.randrange(12))]
    if machine.awaiting:
        steps += [lambda: machine.prefix_arrives(rng.randrange(10))]
    if machine.freezable():
        steps += [lambda: machine.freeze(rng.randrange(10))]
    if machine.still():
        steps += [lambda: machine.end_a_freeze(rng.randrange(10), rng.random() < 0.7)]
    if machine.on_the_way and machine.scheduler.can_reserve():
        steps += [lambda: machine.come_back(rng.randrange(10))]
    if machine.scheduler.can_reserve() and len(machine.reserved) < 3:
        steps += [lambda: machine.reserve(rng.randrange(1, 41), rng.randrange(3))]
    return steps


def test_random_walks_of_the_scheduler_end_without_a_leak() -> None:
    rng = random.Random(11)
    for _ in range(NUM_WALKS):
        machine = SchedulerMachine()
        machine.start(
            rng.randrange(2, 11),
            rng.choice([4, 8]),
            rng.randrange(8, 25),
            rng.randrange(1, 7),
            rng.randrange(10),
            rng.choice([0, rng.randrange(12), 40]),
            rng.choice([0.0, 0.0, 0.001, 0.012, 0.03]),
        )
        for _ in range(rng.randrange(10, 80)):
            rng.choice(steps_of(machine, rng) + moves_of(machine, rng))()
            machine.nothing_is_violated()
        machine.teardown()
