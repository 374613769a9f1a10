"""Both handoff machines against each other, over every order of events that a link allows."""

import random
from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from common.handoff.events import (
    BlocksComputed,
    CancelRequested,
    HandedOver,
    PeerLost,
    PrefillFinished,
)
from common.handoff.receiver import ReceiverPhase
from common.handoff.sender import MAX_UNANSWERED_RENEWALS
from common.messages.handoff import AbortReason, FirstToken
from common.sampling import SampledToken
from tests.support.handoff_link import LEASE, HandoffPair

FIRST_TOKENS = (FirstToken(choice=0, token=SampledToken(token_id=7)),)
REASONS = (AbortReason.CANCELLED, AbortReason.SHUTTING_DOWN)


class HandoffPairMachine(RuleBasedStateMachine):
    """Ordinary steps, and a few troubles that come when that many steps have gone by."""

    @initialize(
        num_blocks=st.integers(1, 4),
        num_cached=st.sampled_from([0, 0, 1, 4]),
        trouble_at=st.lists(st.integers(0, 20), max_size=4),
    )
    def start(self, num_blocks: int, num_cached: int, trouble_at: list[int]) -> None:
        self.pair = HandoffPair(num_blocks, min(num_cached, num_blocks))
        self.num_computed = 0
        self.is_finished = False
        self.num_steps = 0
        self.trouble_at = sorted(trouble_at)

    # ---- the prefill -----------------------------------------------------------------------------

    @precondition(lambda self: self.pair.sender is not None and not self.is_finished)
    @rule(is_last=st.sampled_from([False, False, True]))
    def compute(self, is_last: bool) -> None:
        self.num_steps += 1
        if is_last:
            self.finish_the_prefill()
            return
        self.num_computed = min(self.num_computed + 1, self.pair.num_blocks - 1)
        self.pair.to_sender(BlocksComputed(self.num_computed))

    def finish_the_prefill(self) -> None:
        self.is_finished = True
        self.pair.to_sender(PrefillFinished(FIRST_TOKENS, 0, 1.0))

    @precondition(lambda self: self.pair.write is not None)
    @rule(outcome=st.sampled_from(["right"] * 6 + ["damaged"] * 3 + ["fails"]))
    def end_the_write(self, outcome: str) -> None:
        self.num_steps += 1
        self.pair.end_write(fails=outcome == "fails", damages=outcome == "damaged")

    @precondition(lambda self: self.pair.verify is not None)
    @rule()
    def end_the_verification(self) -> None:
        self.num_steps += 1
        self.pair.end_verify()

    # ---- the link --------------------------------------------------------------------------------

    @precondition(lambda self: self.pair.up)
    @rule(
        has_room=st.sampled_from([True] * 9 + [False]),
        repeats=st.sampled_from([False, False, True]),
    )
    def deliver_up(self, has_room: bool, repeats: bool) -> None:
        self.num_steps += 1
        # Commits alone name no attempt: no transport repeats them and no machine does.
        if repeats and self.pair.up[0].kind != "commit":
            self.pair.up.appendleft(self.pair.up[0])
            self.pair.deliver_up(has_room=has_room)
        self.pair.deliver_up(has_room=has_room)

    @precondition(lambda self: self.pair.down)
    @rule(repeats=st.sampled_from([False, False, True]))
    def deliver_down(self, repeats: bool) -> None:
        self.num_steps += 1
        if repeats and self.pair.down[0].kind != "commit refused":
            self.pair.down.appendleft(self.pair.down[0])
            self.pair.deliver_down()
        self.pair.deliver_down()

    @precondition(lambda self: not any(message.kind == "renew" for message in self.pair.up))
    @rule()
    def renew_leases(self) -> None:
        self.num_steps += 1
        self.pair.renew_leases()

    @rule(step=st.integers(1, 2))
    def wait(self, step: int) -> None:
        self.pair.now += step
        self.pair.tick()

    # ---- trouble ---------------------------------------------------------------------------------

    @precondition(lambda self: self.trouble_at and self.num_steps >= self.trouble_at[0])
    @rule(which=st.integers(0, 99), amount=st.integers(0, 5))
    def trouble(self, which: int, amount: int) -> None:
        self.trouble_at.pop(0)
        troubles = self.possible_troubles()
        troubles[which % len(troubles)](amount)

    def possible_troubles(self) -> list[Callable[[int], None]]:
        pair = self.pair
        troubles: list[Callable[[int], None]] = [self.lease_runs_out]
        troubles += [self.lose_what_goes_up] * bool(pair.up)
        troubles += [self.lose_what_goes_down] * bool(pair.down)
        troubles += [self.cancel_at_the_prefill_side] * (2 * (pair.sender is not None))
        troubles += [self.cancel_at_the_decode_side] * (2 * (pair.receiver is not None))
        if pair.is_prefill_alive and pair.is_decode_alive:
            troubles += [self.the_prefill_side_dies, self.the_decode_side_dies]
        return troubles

    def lease_runs_out(self, amount: int) -> None:
        self.pair.now += LEASE + 1
        self.pair.tick()

    def lose_what_goes_up(self, amount: int) -> None:
        for _ in range(min(amount + 1, len(self.pair.up))):
            self.pair.up.pop()

    def lose_what_goes_down(self, amount: int) -> None:
        for _ in range(min(amount + 1, len(self.pair.down))):
            self.pair.down.pop()

    def cancel_at_the_prefill_side(self, amount: int) -> None:
        self.pair.to_sender(CancelRequested(REASONS[amount % 2]))

    def cancel_at_the_decode_side(self, amount: int) -> None:
        assert self.pair.receiver is not None
        reason = REASONS[amount % 2]
        is_owned = self.pair.receiver.phase is ReceiverPhase.ACCEPTED
        if not (is_owned and reason is AbortReason.CANCELLED):
            self.pair.to_receiver(CancelRequested(reason))

    def the_prefill_side_dies(self, amount: int) -> None:
        self.pair.kill_prefill()
        for _ in range(min(amount, len(self.pair.up))):
            self.pair.up.pop()

    def the_decode_side_dies(self, amount: int) -> None:
        self.pair.kill_decode()
        for _ in range(min(amount, len(self.pair.down))):
            self.pair.down.pop()

    @precondition(lambda self: not (self.pair.is_prefill_alive and self.pair.is_decode_alive))
    @rule()
    def the_death_is_noticed(self) -> None:
        pair = self.pair
        if not pair.is_prefill_alive and pair.is_prefill_paired:
            pair.is_prefill_paired = False
            if pair.receiver is not None:
                pair.to_receiver(PeerLost("died"))
        if not pair.is_decode_alive and pair.sender is not None:
            pair.to_sender(PeerLost("died"))

    # ---- what holds ------------------------------------------------------------------------------

    @invariant()
    def nothing_is_violated(self) -> None:
        pair = self.pair
        assert pair.violations == []
        assert pair.num_decodes <= 1
        for machine in (pair.sender, pair.receiver):
            if machine is not None:
                machine.validate()
        holds = pair.receiver is not None and pair.receiver.phase is not ReceiverPhase.ACCEPTED
        assert holds == (pair.memory.owner == "transfer")

    def teardown(self) -> None:
        """Once nothing new happens, everything ends, and every block has one owner or none."""
        pair = self.pair
        is_both_alive = pair.is_prefill_alive and pair.is_decode_alive
        if not is_both_alive:
            self.the_death_is_noticed()
        if pair.sender is not None and not self.is_finished:
            self.finish_the_prefill()
        for _ in range(4 * MAX_UNANSWERED_RENEWALS):
            self.settle()
            self.nothing_is_violated()
            if pair.sender is None and pair.receiver is None and not pair.up and not pair.down:
                break
            pair.renew_leases()
            pair.now += LEASE // 4
            pair.tick()
        assert pair.sender is None, f"the prefill side hangs in {pair.sender.phase}"
        assert pair.receiver is None, f"the decode side hangs in {pair.receiver.phase}"
        assert pair.write is None
        assert pair.verify is None
        assert pair.memory.owner == ("decode" if self.decodes_here() else "free")
        if isinstance(pair.outcomes.get("sender"), HandedOver):
            assert pair.num_decodes == 1, "handed over to nobody"
        if pair.num_decodes:
            assert pair.memory.content == pair.source or not pair.is_decode_alive

    def decodes_here(self) -> bool:
        return self.pair.num_decodes == 1 and self.pair.is_decode_alive

    def settle(self) -> None:
        """Let everything under way arrive and end well."""
        pair = self.pair
        while pair.up or pair.down or pair.write or pair.verify:
            if pair.write is not None:
                pair.end_write(fails=False, damages=False)
            elif pair.verify is not None:
                pair.end_verify()
            elif pair.up:
                pair.deliver_up(has_room=True)
            else:
                pair.deliver_down()


HandoffPairMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, derandomize=True
)
TestHandoffPair = HandoffPairMachine.TestCase


NUM_WALKS = 6000
"""Random walks come further than Hypothesis in the same time, but cannot shrink what they find."""


def steps_of(machine: HandoffPairMachine, rng: random.Random) -> list[Callable[[], None]]:
    """What may happen next."""
    pair = machine.pair
    steps: list[Callable[[], None]] = [lambda: machine.wait(1)]
    if pair.sender is not None and not machine.is_finished:
        steps += [lambda: machine.compute(rng.random() < 0.4)] * 2
    if pair.write is not None:
        steps += [lambda: machine.end_the_write(rng.choice(["right", "right", "damaged", "fails"]))]
    if pair.verify is not None:
        steps += [machine.end_the_verification]
    if pair.up:
        steps += [lambda: machine.deliver_up(rng.random() < 0.9, rng.random() < 0.3)] * 3
    if pair.down:
        steps += [lambda: machine.deliver_down(rng.random() < 0.3)] * 3
    if not any(message.kind == "renew" for message in pair.up):
        steps += [machine.renew_leases]
    if machine.trouble_at and machine.num_steps >= machine.trouble_at[0]:
        steps += [lambda: machine.trouble(rng.randrange(100), rng.randrange(6))] * 6
    if not (pair.is_prefill_alive and pair.is_decode_alive):
        steps += [machine.the_death_is_noticed]
    return steps


def test_random_walks_of_the_pair_end_without_a_leak() -> None:
    rng = random.Random(4)
    handed_over = 0
    for _ in range(NUM_WALKS):
        machine = HandoffPairMachine()
        machine.start(
            rng.randrange(1, 5),
            rng.choice([0, 0, 1, 4]),
            [rng.randrange(24) for _ in range(rng.randrange(4))],
        )
        for _ in range(rng.randrange(10, 60)):
            rng.choice(steps_of(machine, rng))()
            machine.nothing_is_violated()
        machine.teardown()
        handed_over += isinstance(machine.pair.outcomes.get("sender"), HandedOver)
    assert NUM_WALKS // 10 < handed_over < NUM_WALKS * 9 // 10, (
        "walks are neither all fine nor hopeless"
    )
