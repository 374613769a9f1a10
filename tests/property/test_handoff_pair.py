"""Both handoff machines against each other, over every order of events that a link allows."""

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
reasons = st.sampled_from([AbortReason.CANCELLED, AbortReason.SHUTTING_DOWN])


class HandoffPairMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 4), data=st.data())
    def start(self, num_blocks: int, data: st.DataObject) -> None:
        self.pair = HandoffPair(num_blocks, data.draw(st.integers(0, num_blocks)))
        self.num_computed = 0
        self.is_finished = False

    # ---- the prefill -----------------------------------------------------------------------------

    @precondition(lambda self: self.pair.sender is not None and not self.is_finished)
    @rule()
    def compute_a_block(self) -> None:
        assert self.pair.sender is not None
        self.num_computed = min(self.num_computed + 1, self.pair.num_blocks - 1)
        self.pair.to_sender(BlocksComputed(self.num_computed))

    @precondition(lambda self: self.pair.sender is not None and not self.is_finished)
    @rule()
    def finish_the_prefill(self) -> None:
        self.is_finished = True
        self.pair.to_sender(PrefillFinished(FIRST_TOKENS, 0, 1.0))

    @precondition(lambda self: self.pair.write is not None)
    @rule(
        fails=st.sampled_from([False] * 7 + [True]), damages=st.sampled_from([False, False, True])
    )
    def end_the_write(self, fails: bool, damages: bool) -> None:
        self.pair.end_write(fails=fails, damages=damages)

    @precondition(lambda self: self.pair.verify is not None)
    @rule()
    def end_the_verification(self) -> None:
        self.pair.end_verify()

    # ---- the link --------------------------------------------------------------------------------

    @precondition(lambda self: self.pair.up)
    @rule(
        has_room=st.sampled_from([True, True, True, False]),
        repeats=st.sampled_from([False, False, True]),
    )
    def deliver_up(self, has_room: bool, repeats: bool) -> None:
        # Commits alone name no attempt: no transport repeats them and no machine does.
        if repeats and self.pair.up[0].kind != "commit":
            self.pair.up.appendleft(self.pair.up[0])
            self.pair.deliver_up(has_room=has_room)
        self.pair.deliver_up(has_room=has_room)

    @precondition(lambda self: self.pair.down)
    @rule(repeats=st.sampled_from([False, False, True]))
    def deliver_down(self, repeats: bool) -> None:
        if repeats and self.pair.down[0].kind != "commit refused":
            self.pair.down.appendleft(self.pair.down[0])
            self.pair.deliver_down()
        self.pair.deliver_down()

    @precondition(lambda self: self.pair.up)
    @rule(data=st.data())
    def lose_what_goes_up(self, data: st.DataObject) -> None:
        for _ in range(data.draw(st.integers(1, len(self.pair.up)))):
            self.pair.up.pop()

    @precondition(lambda self: self.pair.down)
    @rule(data=st.data())
    def lose_what_goes_down(self, data: st.DataObject) -> None:
        for _ in range(data.draw(st.integers(1, len(self.pair.down)))):
            self.pair.down.pop()

    # ---- time ------------------------------------------------------------------------------------

    @rule()
    def renew_leases(self) -> None:
        self.pair.renew_leases()

    @rule(step=st.sampled_from([1, 2, LEASE + 1]))
    def wait(self, step: int) -> None:
        self.pair.now += step
        self.pair.tick()

    # ---- ends ------------------------------------------------------------------------------------

    @precondition(lambda self: self.pair.sender is not None)
    @rule(reason=reasons)
    def cancel_at_the_prefill_side(self, reason: AbortReason) -> None:
        self.pair.to_sender(CancelRequested(reason))

    @precondition(lambda self: self.pair.receiver is not None)
    @rule(reason=reasons)
    def cancel_at_the_decode_side(self, reason: AbortReason) -> None:
        assert self.pair.receiver is not None
        is_owned = self.pair.receiver.phase is ReceiverPhase.ACCEPTED
        if not (is_owned and reason is AbortReason.CANCELLED):
            self.pair.to_receiver(CancelRequested(reason))

    @precondition(lambda self: self.pair.is_prefill_alive and self.pair.is_decode_alive)
    @rule(lost=st.integers(0, 3))
    def the_prefill_side_dies(self, lost: int) -> None:
        self.pair.kill_prefill()
        for _ in range(min(lost, len(self.pair.up))):
            self.pair.up.pop()

    @precondition(lambda self: self.pair.is_prefill_alive and self.pair.is_decode_alive)
    @rule(lost=st.integers(0, 3))
    def the_decode_side_dies(self, lost: int) -> None:
        self.pair.kill_decode()
        for _ in range(min(lost, len(self.pair.down))):
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
    max_examples=400, stateful_step_count=40, deadline=None, derandomize=True
)
TestHandoffPair = HandoffPairMachine.TestCase
