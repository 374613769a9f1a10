"""A local scheduler over a real block manager, with an engine that only remembers.

The engine stores in each slot of the pool what K and V of that position depend on: the hash of all
tokens up to it. Before a row is computed it looks at every earlier slot of the row's block table,
so that a wrong share, a missing copy, or a block taken away too early is noticed. Host slots are
lists of the same kind.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from common.ids import GatewayId, RequestId
from common.kv.blocks import BlockManager, Hold
from common.messages.handoff import FirstToken
from common.messages.tokens import TokenDelta
from common.sampling import FinishReason, SampledToken, SamplingParams
from common.scheduler.effects import (
    CopyBlocks,
    DecodeFrozen,
    Effect,
    EmitTokens,
    PromptComputed,
    RequestBroke,
    RequestEnded,
    SwapIn,
    SwapOut,
)
from common.scheduler.local import DEFAULT_TRIGGERS, LocalScheduler
from common.scheduler.migration import Migration
from common.scheduler.modes import Triggers
from common.scheduler.request import NewRequest
from common.scheduler.steps import (
    PlannedRow,
    RowFailed,
    RowResult,
    SchedulerLimits,
    StepPlan,
)
from common.scheduler.swap import SwapSpace

FIRST = (FirstToken(choice=0, token=SampledToken(token_id=2000)),)
GATEWAY = GatewayId("gateway-0")
EOS = 1000
STOP = 1001

TokenOf = Callable[[RequestId, int, int], int]
"""(request, choice, index of the output token) → token id."""


def token_of(request_id: RequestId, choice: int, index: int) -> int:
    """Draw a token that tells where it belongs and ends nothing."""
    return 2000 + 100 * choice + index


def tokens_of(delta: TokenDelta) -> list[int]:
    """Return the ids that a delta carries."""
    return [token.token_id for token in delta.tokens]


def new_request(name: str, prompt: Sequence[int], **params: object) -> NewRequest:
    """A request of the bench's gateway; ``params`` are sampling parameters."""
    chosen = {"seed": 1, "max_tokens": 4, "eos_token_ids": (EOS,), "stop_token_ids": (STOP,)}
    sampling = SamplingParams(**{**chosen, **params})  # type: ignore[arg-type]  # by name
    return NewRequest(RequestId(name), GATEWAY, "ipc:///tokens", sampling, tuple(prompt))


@dataclass
class Stream:
    """What one gateway has received of one choice."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class Bench:
    """Takes effects in as a worker does, and keeps what was told of each request."""

    def __init__(
        self,
        *,
        num_blocks: int = 16,
        block_size: int = 4,
        budget: int = 16,
        max_seqs: int = 8,
        growth: int = 0,
        num_slots: int = 0,
        triggers: Triggers = DEFAULT_TRIGGERS,
        token_of: TokenOf = token_of,
        is_keeping: bool = False,
        quota_seconds: float = 0.0,
    ) -> None:
        self.block_size = block_size
        self.budget = budget
        self.max_seqs = max_seqs
        self.blocks = BlockManager(num_blocks, block_size, 0, "model")
        self.scheduler = LocalScheduler(
            self.blocks,
            SchedulerLimits(budget, max_seqs, block_size, growth, quota_seconds),
            SwapSpace(num_slots),
            triggers,
            is_keeping=is_keeping,
        )
        self.kept: dict[bytes, list[int]] = {}
        """What was in each block that the scheduler told of, by its hash."""
        self._holders: list[str] = []
        self.host: list[list[int]] = [[0] * block_size for _ in range(num_slots)]
        self.frozen: list[str] = []
        self.moved: set[str] = set()
        self.token_of = token_of
        self.pool: list[list[int]] = [[0] * block_size for _ in range(num_blocks)]
        self.streams: dict[tuple[str, int], Stream] = {}
        self.reports: dict[str, list[Effect]] = {}
        self.computed: dict[str, PromptComputed] = {}
        self.violations: list[str] = []

    # ---- effects ---------------------------------------------------------------------------------

    def take(self, effects: Iterable[Effect]) -> list[Effect]:
        """Carry effects out in order and return them."""
        taken = list(effects)
        for effect in taken:
            match effect:
                case EmitTokens(gateway_id, delta):
                    self._received(gateway_id, delta)
                case CopyBlocks(pairs):
                    for source, target in pairs:
                        self.pool[target] = list(self.pool[source])
                case SwapOut(_, _, pairs):
                    for block, slot in pairs:
                        self.host[slot] = list(self.pool[block])
                case SwapIn(_, _, pairs):
                    for block, slot in pairs:
                        self.pool[block] = list(self.host[slot])
                case DecodeFrozen(request_id):
                    self.frozen.append(request_id)
                case PromptComputed(request_id):
                    self.computed[request_id] = effect
                case RequestEnded(request_id) | RequestBroke(request_id):
                    self.reports.setdefault(request_id, []).append(effect)
                case _:
                    pass
        return taken

    def _received(self, gateway_id: GatewayId, delta: TokenDelta) -> None:
        stream = self.streams.setdefault((delta.request_id, delta.choice), Stream())
        name = f"{delta.request_id}/{delta.choice}"
        if gateway_id != GATEWAY:
            self.violations.append(f"{name} went to {gateway_id}")
        num_repeated = len(stream.tokens) - delta.index
        tokens = tokens_of(delta)
        if num_repeated and delta.request_id not in self.moved:
            self.violations.append(f"{name}: index {delta.index} after {len(stream.tokens)}")
        if num_repeated < 0 or stream.tokens[delta.index :] != tokens[:num_repeated]:
            self.violations.append(f"{name}: {tokens} at {delta.index} after {stream.tokens}")
        if stream.finish_reason is not None:
            self.violations.append(f"{name} goes on after {stream.finish_reason}")
        stream.tokens += tokens[num_repeated:]
        stream.finish_reason = delta.finish_reason

    def tokens(self, name: str, choice: int = 0) -> list[int]:
        """Return the tokens that the gateway has of one choice."""
        return self.streams[name, choice].tokens

    def reason(self, name: str, choice: int = 0) -> FinishReason | None:
        """Return why the choice ended, as the gateway knows it."""
        return self.streams[name, choice].finish_reason

    # ---- requests --------------------------------------------------------------------------------

    def add(self, request: NewRequest, *, is_remote: bool = False) -> list[Effect]:
        """Take a request in."""
        return self.take(self.scheduler.add(request, is_remote=is_remote))

    def take_over(
        self, request: NewRequest, first_tokens: Sequence[FirstToken], owner: str = "tr-1"
    ) -> list[Effect]:
        """Take a request over whose KV arrived in the blocks of ``owner``, held already."""
        self.fill(owner, request.prompt)
        return self.take(self.scheduler.add_decoding(request, owner, first_tokens, 0))

    def move_out(self, name: str) -> Migration:
        """Hand a frozen request over to another worker, which accepts it at once."""
        request_id = RequestId(name)
        migration = self.scheduler.migration_of(request_id)
        self.moved.add(name)
        self.scheduler.open_handoff(request_id)
        self.close_handoff(name, was_accepted=True)
        return migration

    def move_in(self, name: str, migration: Migration) -> list[Effect] | None:
        """Take over what another worker decoded; None where there is no room.

        The two have one gateway, so ``streams`` must be those of the other one's bench.
        """
        owner = f"in-{name}"
        acquired = self.blocks.acquire(
            owner, migration.tokens, hold=Hold.TRANSFER, max_cached_tokens=len(migration.tokens)
        )
        if acquired is None:
            return None
        self.moved.add(name)
        request = NewRequest(
            RequestId(name), GATEWAY, "ipc:///tokens", migration.params, migration.tokens
        )
        return self.take_over(request, [migration.first_token], owner)

    def fill(self, owner: str, tokens: Sequence[int]) -> None:
        """Write the K and V of these tokens into an owner's blocks, as a handoff does."""
        table = self.blocks.block_ids(owner)
        for position in range(len(tokens)):
            self._write(table, position, hash(tuple(tokens[: position + 1])))

    def cancel(self, name: str, choice: int | None = None) -> list[Effect] | None:
        """Cancel a request or one choice of it."""
        effects = self.scheduler.cancel(RequestId(name), choice)
        return effects if effects is None else self.take(effects)

    def close_handoff(self, name: str, *, was_accepted: bool) -> list[Effect]:
        """End the handoff of a request."""
        return self.take(self.scheduler.close_handoff(RequestId(name), was_accepted=was_accepted))

    # ---- steps -----------------------------------------------------------------------------------

    def plan(self) -> tuple[StepPlan | None, list[Effect]]:
        """Plan a step and look at its bounds."""
        self.let_go()
        plan, effects = self.scheduler.plan()
        self.take(effects)
        self.scheduler.publish()
        self.keep()
        self.scheduler.validate()
        if plan is not None:
            self._look_at(plan)
        return plan, effects

    def keep(self) -> None:
        """Look into the blocks that were computed; they are held until the next step."""
        for held in self.scheduler.take_computed():
            self._holders.append(held.owner)
            for block, digest in zip(held.block_ids, held.hashes, strict=True):
                if self.kept.setdefault(digest, list(self.pool[block])) != self.pool[block]:
                    self.violations.append(f"block {block} is not what its hash says")

    def let_go(self) -> None:
        """Let go of the blocks that were held to be kept."""
        for owner in self._holders:
            self.blocks.release(owner)
        self._holders.clear()

    def finish(self, plan: StepPlan, failing: Iterable[int] = ()) -> list[Effect]:
        """Compute a planned step; rows at the places in ``failing`` break."""
        broken = set(failing)
        results = [
            RowFailed("the row broke") if place in broken else self._compute(row)
            for place, row in enumerate(plan.rows)
        ]
        effects = self.take(self.scheduler.finish_step(plan, results))
        self.scheduler.validate()
        return effects

    def step(self) -> list[Effect]:
        """Plan and compute one step; all its effects in order."""
        plan, effects = self.plan()
        return effects if plan is None else [*effects, *self.finish(plan)]

    def step_until(self, is_reached: Callable[[list[Effect]], bool]) -> list[Effect]:
        """Step until a step's effects satisfy; LookupError when 200 steps do not."""
        for _ in range(200):
            effects = self.step()
            if is_reached(effects):
                return effects
        raise LookupError("200 steps did not get there")

    def run(self, max_steps: int = 500, *, num_ahead: int = 0) -> int:
        """Step until there is nothing to do; return the number of steps.

        ``num_ahead`` steps are planned before the oldest is computed.
        """
        open_steps: list[StepPlan] = []
        for number in range(max_steps):
            plan, effects = self.plan()
            self.blocks.validate()
            if plan is not None:
                open_steps.append(plan)
            elif not effects and not open_steps:
                return number
            if open_steps and (plan is None or len(open_steps) > num_ahead):
                self.finish(open_steps.pop(0))
                self.blocks.validate()
        self.violations.append(f"still busy after {max_steps} steps")
        return max_steps

    def _look_at(self, plan: StepPlan) -> None:
        sequences = [row.sequence for row in plan.rows]
        if plan.num_tokens > self.budget:
            self.violations.append(f"{plan.num_tokens} tokens in a step of {self.budget}")
        if len(plan.rows) > self.max_seqs:
            self.violations.append(f"{len(plan.rows)} rows in a step of {self.max_seqs}")
        if len(set(map(id, sequences))) != len(sequences):
            self.violations.append("a sequence is in a step twice")
        for row in plan.rows:
            end = row.start + row.num_tokens
            sequence = row.sequence
            num_earlier = sequence.num_planned - row.num_tokens
            if row.num_tokens < 1 or row.start != sequence.num_computed + num_earlier:
                self.violations.append(f"row {row.start}+{row.num_tokens} is out of place")
            length = sequence.length + (0 if row.pending is None else 1)
            if row.is_last != (end == length):
                self.violations.append(f"row to {end} of {length} misses its end")
            if not row.is_last and end % self.block_size and row.num_tokens >= self.block_size:
                self.violations.append(f"a chunk ends at {end}, inside a block")
            if end > len(row.sequence.block_table) * self.block_size:
                self.violations.append(f"row to {end} is beyond its blocks")

    def _compute(self, row: PlannedRow) -> RowResult:
        sequence = row.sequence
        end = row.start + row.num_tokens
        tokens = sequence.tokens(0, end)
        # A step that was planned ahead computes nonsense for a sequence that has ended meanwhile.
        for position in range(row.start if sequence.finish_reason is None else 0):
            block = sequence.block_table[position // self.block_size]
            if self.pool[block][position % self.block_size] != hash(tuple(tokens[: position + 1])):
                self.violations.append(f"{sequence.owner} reads a wrong slot at {position}")
        for position in range(row.start, end):
            self._write(sequence.block_table, position, hash(tuple(tokens[: position + 1])))
        if not row.is_last:
            return ()
        request = sequence.request
        choices = [sequence.choice] if request.has_drawn else request.new.params.choices
        index = request.new.params.num_drawn + len(sequence.outputs)
        return tuple(
            SampledToken(token_id=self.token_of(request.request_id, choice, index))
            for choice in choices
        )

    def _write(self, table: Sequence[int], position: int, value: int) -> None:
        self.pool[table[position // self.block_size]][position % self.block_size] = value
