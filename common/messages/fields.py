"""Bounded field types of messages; a value outside its bound is the peer's error."""

from dataclasses import field
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from common.ids import Epoch, WorkerId

STRUCT = ConfigDict(extra="forbid")
"""Unknown fields are refused, never dropped."""

MAX_PROMPT_TOKENS = 4 * 1024 * 1024
MAX_BLOCKS = 2**31 - 1

Count = Annotated[int, Field(strict=True, ge=0, le=2**53)]
Flag = Annotated[bool, Field(strict=True)]
EpochNumber = Annotated[Epoch, Field(strict=True, ge=0, le=2**53)]
Seconds = Annotated[float, Field(strict=True, ge=0.0, le=1e9)]
Flops = Annotated[float, Field(strict=True, ge=0.0, le=1e27)]
Rate = Annotated[float, Field(strict=True, ge=0.0, le=1e15, allow_inf_nan=False)]
Name = Annotated[str, Field(strict=True, min_length=1, max_length=256)]
Text = Annotated[str, Field(strict=True, max_length=4096)]
Endpoint = Annotated[str, Field(strict=True, pattern=r"^(ipc|tcp|inproc)://", max_length=512)]
Fingerprint = Annotated[str, Field(strict=True, pattern=r"^[0-9a-f]{16}\z")]
ChoiceIndex = Annotated[int, Field(strict=True, ge=0, lt=128)]
PromptLength = Annotated[int, Field(strict=True, ge=1, le=MAX_PROMPT_TOKENS)]


class Role(StrEnum):
    """What a worker serves; state, not a class of process."""

    PREFILL = "prefill"
    DECODE = "decode"
    COMBINED = "combined"


class Mode(StrEnum):
    """Which half of a hybrid worker leads a step (papers: FlowKV, hybrid scheduler)."""

    PREFILL_LED = "prefill_led"
    DECODE_LED = "decode_led"
    BALANCED = "balanced"


class WorkerState(StrEnum):
    """How the cluster sees a worker."""

    READY = "ready"
    SUSPECT = "suspect"
    DRAINING = "draining"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class KVCounts:
    """Blocks of one pool by owner: total = free + referenced + cached + in_transfer.

    Reserved blocks and blocks that drain after an abort count as ``in_transfer``.
    """

    total: Count
    free: Count
    referenced: Count
    cached: Count
    in_transfer: Count
    largest_free_run: Count
    """Longest run of adjacent free blocks; fragmentation is 1 - largest_free_run / free."""


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class WorkerLoad:
    """What a worker has to do, counted at one moment."""

    num_waiting: Count
    num_prefilling: Count
    num_sending: Count
    num_receiving: Count
    num_decoding: Count
    num_decode_tokens: Count = 0
    """Tokens that the decoding sequences attend to, over all of them."""
    num_swapped: Count = 0
    """Sequences whose KV lies in host memory until there is room again."""
    uncomputed_tokens: Count
    """Prompt tokens of waiting and running requests that are still to be computed: not those that
    are cached, or are to be copied or loaded."""
    num_steps: Count
    """Engine steps since the start: the sign of progress that health reads."""
    read_queue_tokens: Count = 0
    """Tokens whose KV is being, or waits to be, read from the store."""


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class WorkerRates:
    """How fast a worker was of late, as it measured; 0 where nothing was measured yet."""

    prefill_tokens_per_second: Rate
    """Prompt tokens computed per second of steps that compute prompts, or hold them back so that
    decodes keep within their SLA."""
    decode_step_seconds: Seconds
    """EWMA (0.3) of the time between two tokens of a decoding sequence, in steps that only decode;
    in all steps before the first of these. What prompts add can be computed elsewhere."""
    decode_tokens_per_second: Rate
    """Tokens drawn per second of steps that decode, over all sequences."""
    decode_base_seconds: Seconds = 0.0
    decode_seconds_per_sequence: Seconds = 0.0
    decode_seconds_per_token: Seconds = 0.0
    """A step that only decodes takes the first, the second for each of its sequences, and the third
    for each token that these attend to."""
    read_tokens_per_second: Rate = 0.0
    """Tokens whose KV came from the store, per second of reading."""


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class WorkerTotals:
    """What a worker counted since it began: the difference of two tells of the span between them.

    ``at_seconds`` is when they were counted, on a clock of the worker's own.
    """

    at_seconds: Seconds = 0.0
    step_seconds: Seconds = 0.0
    """Time in engine steps; steps in flight at the same time count once."""
    prefix_query_tokens: Count = 0
    prefix_hit_tokens: Count = 0
    """Prompt tokens whose KV was cached when their prefill began, loaded ones among them."""
    read_seconds: Seconds = 0.0
    """Time in which a read from the store was under way."""
    attention_seconds: Seconds = 0.0
    """Estimated time of attention over prompts."""
    model_flops: Flops = 0.0
    """Floating-point operations of the model in the steps that ran."""
    prefetch_used_blocks: Count = 0
    prefetch_wasted_blocks: Count = 0
    """Blocks prefetched into the host tier, by whether a read found them there in time."""


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class PeerInfo:
    """How to reach a worker's handoff channel. ``transports`` are its data paths, best first.

    ``dtype`` is in ``layout_fingerprint`` too; here people can read it.
    """

    worker_id: Annotated[WorkerId, Field(min_length=1, max_length=128)]
    epoch: EpochNumber
    role: Role
    pid: Count
    host: Name
    handoff_endpoint: Endpoint
    dtype: Name
    layout_fingerprint: Fingerprint
    transports: Annotated[tuple[Name, ...], Field(max_length=16)]


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class PairStatus:
    """One decode worker as a prefill worker sees it.

    ``transport`` is how KV moves there, empty while they are not paired. ``reason`` says why
    nothing should be sent there for now; both are empty while the pairing has just begun.
    """

    worker_id: Annotated[WorkerId, Field(min_length=1, max_length=128)]
    epoch: EpochNumber
    transport: Text
    reason: Text
    bytes_per_second: Rate = 0.0
    """The link's rate as measured at pairing; 0 while not known."""


Pairs = Annotated[tuple[PairStatus, ...], Field(max_length=4096)]


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class WorkerIncarnation:
    """One life of a worker."""

    worker_id: Annotated[WorkerId, Field(min_length=1, max_length=128)]
    epoch: EpochNumber


MAX_INCARNATIONS = 4096
Incarnations = Annotated[tuple[WorkerIncarnation, ...], Field(max_length=MAX_INCARNATIONS)]


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class PoolHandle:
    """How a peer on the same host maps a KV pool: an anonymous memory file of its owner.

    The file lives as long as somebody maps it, so a killed worker leaves nothing behind. ``nonce``
    stands at ``num_bytes`` in the file and proves that ``pid`` and ``fd`` were not reused.
    """

    kind: Literal["memfd"]
    pid: Count
    fd: Count
    num_blocks: Count
    block_bytes: Count
    num_bytes: Count
    nonce: Annotated[bytes, Field(strict=True, min_length=16, max_length=16)]


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class CudaPoolHandle:
    """How a peer on the same host opens a KV pool in a GPU's memory: by CUDA IPC.

    ``ipc_handle`` names the owner's allocation, whose blocks begin at ``offset``. The peer must see
    the GPU with this UUID.
    """

    kind: Literal["cuda"]
    pid: Count
    device_uuid: Annotated[str, Field(strict=True, min_length=1, max_length=96)]
    ipc_handle: Annotated[bytes, Field(strict=True, min_length=64, max_length=64)]
    offset: Annotated[int, Field(strict=True, ge=0, lt=4096)]
    num_blocks: Count
    block_bytes: Count
    num_bytes: Count


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class TcpPoolHandle:
    """How a peer anywhere writes a KV pool: the owner's data listener.

    ``secret`` opens streams to it and travels on the handoff channel alone.
    """

    kind: Literal["tcp"]
    host: Name
    port: Annotated[int, Field(strict=True, ge=1, le=65535)]
    secret: Annotated[bytes, Field(strict=True, min_length=32, max_length=32)] = field(repr=False)
    num_blocks: Count
    block_bytes: Count
    num_bytes: Count


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class NcclPoolHandle:
    """How a peer with a GPU of its own writes a KV pool on a GPU anywhere, over NCCL.

    The listener is the one to which the peer says what it sends; the bytes go from GPU to GPU.
    ``secret`` opens streams to it and travels on the handoff channel alone.
    """

    kind: Literal["nccl"]
    host: Name
    port: Annotated[int, Field(strict=True, ge=1, le=65535)]
    secret: Annotated[bytes, Field(strict=True, min_length=32, max_length=32)] = field(repr=False)
    device_uuid: Annotated[str, Field(strict=True, min_length=1, max_length=96)]
    num_blocks: Count
    block_bytes: Count
    num_bytes: Count


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class RdmaPoolHandle:
    """How a peer anywhere has a KV pool written by its owner, who reads the peer's memory.

    The listener is the one to which the peer says what may be read. ``secret`` opens streams to it
    and travels on the handoff channel alone.
    """

    kind: Literal["rdma"]
    host: Name
    port: Annotated[int, Field(strict=True, ge=1, le=65535)]
    secret: Annotated[bytes, Field(strict=True, min_length=32, max_length=32)] = field(repr=False)
    num_blocks: Count
    block_bytes: Count
    num_bytes: Count


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class RanksPoolHandle:
    """How a peer on the same host opens the KV pools of all tensor-parallel ranks of a worker.

    ``ranks`` are in order, each with its own KV heads; block i is block i of every rank's pool.
    ``block_bytes`` is a block's size in all ranks together.
    """

    kind: Literal["ranks"]
    ranks: Annotated[
        tuple[Annotated[PoolHandle | CudaPoolHandle, Field(discriminator="kind")], ...],
        Field(min_length=1, max_length=64),
    ]
    num_blocks: Count
    block_bytes: Count
    num_bytes: Count


ExportedPool = Annotated[
    PoolHandle | CudaPoolHandle | RanksPoolHandle | RdmaPoolHandle | NcclPoolHandle | TcpPoolHandle,
    Field(discriminator="kind"),
]
"""A pool as its owner offers it to a paired peer."""


class PhaseName(StrEnum):
    """What a request's time went into."""

    QUEUE = "queue"
    PREFIX = "prefix"
    LOAD = "load"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    DECODE_WAIT = "decode_wait"
    DECODE = "decode"
    MIGRATION = "migration"
    PLACE = "place"
    RESUME = "resume"


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class PhaseRecord:
    """One phase of one request on one worker: seconds, and what was moved or computed in it.

    Two are the gateway's own: ``place`` until the controller has taken the request in, ``resume``
    from the news that its worker was lost to the next token. ``queue`` is the wait in the
    controller and in the worker's queue together; ``transfer`` the time in writes of KV;
    ``decode_wait`` from the prefill's end to the decode side's first step.
    """

    name: PhaseName
    worker: Name
    seconds: Seconds
    num_tokens: Count = 0
    num_bytes: Count = 0
    num_calls: Count = 0


Phases = Annotated[tuple[PhaseRecord, ...], Field(max_length=64)]
