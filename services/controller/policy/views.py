"""What policies see: workers, a request, and the placement that they choose.

``ClusterView`` is the cluster in the form that a policy reads: the caller keeps one, calls
``update`` with a worker's fresh view whenever something changed (a heartbeat, a placement, help,
a role), and ``remove`` when the worker is gone. Placing a request then costs a few array
operations, whatever the number of workers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from common.ids import Epoch, WorkerId
from common.messages.fields import Role
from common.scheduler.decode_cost import DecodeCost


class Pairing(IntEnum):
    """Whether a prefill worker can hand over to a decode worker; the best is the least."""

    WORKS = 0
    UNKNOWN = 1
    BROKEN = 2


Incarnation = tuple[WorkerId, Epoch]


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as policies see it; blocks and tokens include what was just assigned to it.

    ``may_prefill`` and ``may_decode`` are help: what it may do beside its role. Only a worker with
    ``can_take_prompt`` gets a prompt now; the others have enough to compute. ``pairings`` are its
    pairs as the prefill side, unknown where absent, and ``link_rates`` their bytes per second as
    measured. Rates and times are 0 while not measured. ``has_heartbeat`` tells whether its load is
    known at all.
    """

    worker_id: WorkerId
    epoch: Epoch
    role: Role
    uncomputed_tokens: int
    total_blocks: int
    used_blocks: int
    pairings: Mapping[Incarnation, Pairing] = field(default_factory=dict)
    may_prefill: bool = False
    may_decode: bool = False
    can_take_prompt: bool = True
    is_draining: bool = False
    has_heartbeat: bool = True
    num_decoding: int = 0
    num_decode_tokens: int = 0
    """Tokens that its decodes attend to."""
    num_unfinished: int = 0
    """Requests whose decode runs here or was placed here."""
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    block_bytes: int = 0
    prefill_rate: float = 0.0
    """Prompt tokens per second."""
    decode_step_seconds: float = 0.0
    decode_rate: float = 0.0
    """Drawn tokens per second, over all sequences."""
    decode_cost: DecodeCost = field(default_factory=DecodeCost)
    link_rates: Mapping[Incarnation, float] = field(default_factory=dict)
    devices: frozenset[str] = frozenset()
    """The GPUs that it computes on; others may compute there as well."""
    host: str = ""
    """Where it runs; the workers of a host share its link to the store."""
    has_store: bool = False
    """Whether it can load blocks from the store."""
    read_queue_tokens: int = 0
    """Tokens whose KV it reads from the store, or is to read, those just assigned included."""
    read_rate: float = 0.0
    """Tokens per second that it reads from the store."""

    @property
    def key(self) -> Incarnation:
        """Its incarnation."""
        return (self.worker_id, self.epoch)

    def pairing_with(self, decode: "WorkerView") -> Pairing:
        """How the pair with a decode worker stands."""
        return self.pairings.get((decode.worker_id, decode.epoch), Pairing.UNKNOWN)

    @property
    def used_share(self) -> float:
        """Share of the pool that requests and transfers hold."""
        return self.used_blocks / self.total_blocks if self.total_blocks else 1.0

    @property
    def can_prefill(self) -> bool:
        """Whether its role or its help computes prompts."""
        return self.may_prefill or self.role is not Role.DECODE

    @property
    def can_decode(self) -> bool:
        """Whether its role or its help decodes; a combined worker does so for itself alone."""
        return self.may_decode or self.role is not Role.PREFILL

    @property
    def is_measured(self) -> bool:
        """Whether decisions may be built on it: its load is known, and its role's rate with it.

        Who has nothing to do needs no rate: its score is that of an idle worker, at any speed.
        """
        computes = self.prefill_rate > 0 or not self.uncomputed_tokens
        decodes = self.decode_step_seconds > 0 or not self.num_decoding
        is_known = {Role.PREFILL: computes, Role.DECODE: decodes}.get(self.role)
        return self.has_heartbeat and (computes and decodes if is_known is None else is_known)

    def can_hold(self, num_blocks: int) -> bool:
        """Whether the empty pool would be large enough."""
        return self.total_blocks >= num_blocks

    def has_room(self, num_blocks: int) -> bool:
        """Whether the pool has room now; cached blocks give way."""
        return self.total_blocks - self.used_blocks >= num_blocks


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request as policies see it.

    ``num_blocks`` are those without which no worker can serve it (``num_blocks_needed``).
    ``hits`` are the leading blocks of its prompt that each worker has cached; absent is 0.
    ``num_stored_blocks`` are those that the store has, as far as loading them can help.
    """

    num_prompt_tokens: int
    num_blocks: int
    block_size: int
    num_choices: int = 1
    num_left: int = 0
    hits: Mapping[Incarnation, int] = field(default_factory=dict)
    num_stored_blocks: int = 0

    @property
    def num_prompt_blocks(self) -> int:
        """Blocks of the prompt, the last one perhaps not full."""
        return -(-self.num_prompt_tokens // self.block_size)

    def num_uncached(self, num_hit_blocks: int) -> int:
        """Prompt tokens to compute with so many blocks cached: at least the last one."""
        return max(1, self.num_prompt_tokens - num_hit_blocks * self.block_size)

    @property
    def max_hit_blocks(self) -> int:
        """Whole blocks that spare a worker computing; its last token is always computed."""
        return (self.num_prompt_tokens - 1) // self.block_size


@dataclass(frozen=True, slots=True)
class Placement:
    """The chosen sides; where nothing is to move both are the same.

    ``reason`` and ``inputs`` are for the log. ``estimate_seconds`` is the expected time to first
    token, 0 where the policy makes none. ``copy_from`` holds ``num_copy_blocks`` of the prompt's
    first blocks, and copying them to ``prefill`` is cheaper than computing what is missing there.
    """

    prefill: WorkerView
    decode: WorkerView
    reason: str = ""
    estimate_seconds: float = 0.0
    copy_from: Incarnation | None = None
    num_copy_blocks: int = 0
    inputs: tuple[tuple[str, int | float | str | bool], ...] = ()
