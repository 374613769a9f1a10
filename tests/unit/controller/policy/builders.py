"""Workers and requests as policies see them, with values that say nothing."""

from collections.abc import Mapping

from common.ids import Epoch, WorkerId
from common.messages.fields import Role
from common.scheduler.decode_cost import DecodeCost
from services.controller.policy.views import Incarnation, Pairing, RequestView, WorkerView

P, D, C = Role.PREFILL, Role.DECODE, Role.COMBINED
WORKS, UNKNOWN, BROKEN = Pairing.WORKS, Pairing.UNKNOWN, Pairing.BROKEN


def key(name: str) -> Incarnation:
    return (WorkerId(name), Epoch(1))


def worker(
    name: str,
    role: Role,
    uncomputed: int = 0,
    used: int = 0,
    total: int = 1000,
    *,
    pairings: Mapping[str, Pairing] | None = None,
    links: Mapping[str, float] | None = None,
    prefill_rate: float = 1000.0,
    step: float = 0.01,
    decode_rate: float = 100.0,
    line: tuple[float, ...] = (),
    devices: tuple[str, ...] = (),
    decoding: int = 0,
    may_prefill: bool = False,
    may_decode: bool = False,
    can_take_prompt: bool = True,
    is_draining: bool = False,
    has_heartbeat: bool = True,
) -> WorkerView:
    return WorkerView(
        WorkerId(name),
        Epoch(1),
        role,
        uncomputed,
        total,
        used,
        {key(other): pairing for other, pairing in (pairings or {}).items()},
        may_prefill=may_prefill,
        may_decode=may_decode,
        can_take_prompt=can_take_prompt,
        is_draining=is_draining,
        has_heartbeat=has_heartbeat,
        num_decoding=decoding,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        block_bytes=1_000_000,
        prefill_rate=prefill_rate,
        decode_step_seconds=step,
        decode_rate=decode_rate,
        decode_cost=DecodeCost(*line),
        devices=frozenset(devices),
        link_rates={key(other): rate for other, rate in (links or {}).items()},
    )


def request(tokens: int = 1024, **hits: int) -> RequestView:
    """A request of one choice; hits by worker name."""
    return RequestView(
        num_prompt_tokens=tokens,
        num_blocks=tokens // 64 + 1,
        block_size=64,
        hits={key(name): count for name, count in hits.items()},
    )
