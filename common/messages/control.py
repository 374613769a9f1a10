"""The control conversation: workers and gateways (DEALER) with the controller (ROUTER)."""

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from common.errors import ErrorCode
from common.ids import GatewayId, RequestId, WorkerId
from common.messages.fields import (
    STRUCT,
    ChoiceIndex,
    Count,
    Endpoint,
    EpochNumber,
    Fingerprint,
    Flag,
    Incarnations,
    KVCounts,
    Mode,
    Name,
    Pairs,
    PeerInfo,
    PromptLength,
    Role,
    Seconds,
    Text,
    WorkerLoad,
    WorkerRates,
    WorkerTotals,
)
from common.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class WorkerHello:
    """Worker → controller, first message and after every fence.

    The controller answers ``WorkerAccepted`` or ``HelloRefused``. A repeat with the same epoch is
    safe and is answered again; another epoch of the same process, or of one that has ended or is
    silent, replaces the old incarnation, whose requests fail.
    """

    peer: PeerInfo
    model_fingerprint: Fingerprint
    model_name: Name
    max_model_len: Count
    num_blocks: Count
    block_size: Count
    block_bytes: Count
    max_num_batched_tokens: Count
    max_num_seqs: Count
    has_store: Flag = False
    """Whether it can load blocks from the cluster's store."""
    devices: Annotated[tuple[Name, ...], Field(max_length=64)] = ()
    """UUIDs of the GPUs that it computes on; none for the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class WorkerAccepted:
    """Controller → worker: registered. The worker takes the role and starts its heartbeats.

    ``peers`` are all other live workers. A repeat is safe.
    """

    role: Role
    role_generation: Count
    heartbeat_seconds: Seconds
    peers: Annotated[tuple[PeerInfo, ...], Field(max_length=4096)]


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class HelloRefused:
    """Controller → worker or gateway: not registered, with both values of the field at fault.

    The process logs the reason and exits with an error; trying again unchanged is useless. But
    where ``retry_seconds`` is set, it says hello for so long after its first refusal: the name is
    another process's, which may have ended without a word.
    """

    field: Name
    expected: Text
    actual: Text
    message: Text
    retry_seconds: Seconds


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class Heartbeat:
    """Worker → controller, every ``heartbeat_seconds``. A missing series means death.

    ``pairs`` tells of every decode worker that a prefill worker is, or should be, paired with: the
    controller places nothing on a pair that does not work. Repeats are safe: the newest counts.
    """

    kv: KVCounts
    load: WorkerLoad
    is_draining: Flag
    is_quarantined: Flag
    pairs: Pairs
    mode: Mode
    rates: WorkerRates
    index_sequence: Count
    """Number of the last batch of ``KVIndexEvents`` that was sent; the controller finds gaps."""
    num_orders: Count
    """How many ``PlaceRequest`` and ``CopyPrefix`` have come since the last ``WorkerAccepted``.

    What those ask for is in ``load``, as far as it is not done; later ones are still under way."""
    totals: WorkerTotals = WorkerTotals()


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class KVIndexEvents:
    """Worker → controller: which prefix blocks became findable or were forgotten since the last.

    Two raw frames: hashes added and hashes removed, 16 bytes each (``KVIndexEvents`` of one worker
    are numbered from 1 by ``sequence``; a snapshot replaces all that was told before). No answer,
    but ``KVIndexRequested`` where one is missing.
    """

    sequence: Count
    is_snapshot: Flag


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class KVIndexRequested:
    """Controller → worker: events are missing; send a snapshot. A repeat is safe."""


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class SwitchRole:
    """Controller → worker: take this role from now on. Answered by ``RoleSwitched``.

    Running requests go on where they are. An order whose ``role_generation`` is not above the
    worker's own is stale and ignored, but answered with what holds.
    """

    role: Role
    role_generation: Count


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class RoleSwitched:
    """Worker → controller: this role and generation hold here; pool and prefix cache were kept."""

    role: Role
    role_generation: Count


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class Directive:
    """Controller → worker: which half leads the next ``num_steps`` steps that have both.

    After them, and with ``mode`` None at once, the worker's own triggers decide again. The newest
    counts.
    """

    mode: Mode | None
    num_steps: Count


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class SetDraining:
    """Controller → worker: take no new work, or take it again. Heartbeats tell. Idempotent.

    What waits there and has not begun is given back (``PrefillRefused``), if this controller placed
    it.
    """

    is_draining: Flag


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class MigrateDecode:
    """Controller → decode worker: hand this running decode to another one, with its KV.

    The other's ``DecodeStarted`` tells of success; ``MigrationFailed`` that it goes on here.
    """

    request_id: RequestId
    decode: PeerInfo


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class MigrationFailed:
    """Decode worker → controller: the request is still here, or it was not here to be moved."""

    request_id: RequestId
    message: Text


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class CopyPrefix:
    """Controller → a worker that holds a prefix: write its blocks into the pool of ``target``.

    One raw frame: the prefix's token ids, int32 little-endian, whole blocks. The target takes what
    it lacks, and computes what does not come in time: no answer. Ahead of need the id is no
    request's, and nobody waits.
    """

    request_id: RequestId
    target: PeerInfo
    num_tokens: PromptLength
    num_stored_tokens: Count = 0
    """Leading tokens that the store has: the holder loads what it lacks of them first."""


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class PrefixNotCopied:
    """Worker → controller: of a ``CopyPrefix`` nothing will come; the target is told."""

    request_id: RequestId
    message: Text


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class PrefixUnavailable:
    """Controller → prefill worker: the prefix that this request waits for will not come.

    The worker computes it. Ignored when the request does not wait. A repeat is safe.
    """

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class LookUpPrefix:
    """Controller → a worker with a store: how much of this prompt is stored?

    One raw frame: the hash chain of its whole blocks, 16 bytes each. Answered by ``PrefixFound``; a
    repeat is safe. The controller waits for a moment only, and goes on as if nothing were stored.
    """

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class PrefixFound:
    """Worker → controller: so many leading blocks of the prompt are stored, at this moment."""

    request_id: RequestId
    num_blocks: Count


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class HeartbeatAnswered:
    """Controller → worker or gateway, answer to each heartbeat: the controller lives."""

    sequence: Count


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class Fenced:
    """Controller → worker or gateway: this incarnation was declared dead or was replaced.

    The receiver cancels all its requests, takes a new epoch and says hello again. A repeat for an
    epoch that is already gone is ignored.
    """

    epoch: EpochNumber
    message: Text


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class HelloRequested:
    """Controller → worker or gateway: this controller was started anew and does not know you.

    The receiver says hello again with the same epoch; its requests go on undisturbed. Sent, once
    a second at most, when an incarnation speaks that is unknown but was not declared dead; a
    repeat is safe.
    """

    epoch: EpochNumber


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class Goodbye:
    """Worker or gateway → controller: leaving in order, nothing is running. No answer."""

    reason: Text


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class PeerJoined:
    """Controller → every other worker: a worker registered; pair with it where roles need it."""

    peer: PeerInfo


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class PeerLeft:
    """Controller → every other worker: a worker died or left.

    The receiver ends all handoffs with that epoch and frees what they hold. A repeat is safe.
    """

    worker_id: WorkerId
    epoch: EpochNumber
    reason: Text


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class GatewayHello:
    """Gateway → controller, first message and after every fence.

    Answered by ``GatewayAccepted`` or ``HelloRefused``. A repeat with the same epoch is safe.
    """

    gateway_id: GatewayId
    epoch: EpochNumber
    pid: Count
    host: Name
    tokens_endpoint: Endpoint
    model_fingerprint: Fingerprint
    url: Text


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class GatewayAccepted:
    """Controller → gateway: registered; heartbeats start."""

    heartbeat_seconds: Seconds


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class GatewayHeartbeat:
    """Gateway → controller, every ``heartbeat_seconds``; answered by ``ClusterState``."""

    num_streams: Count
    is_draining: Flag = False


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class ClusterState:
    """Controller → gateway: whether requests can be served now, and if not why.

    ``max_request_tokens`` is how many tokens prompt and output of one choice may have together,
    for the largest pool of the workers that decode; 0 while there is none. ``workers`` are those
    that live, whatever their state. ``has_all_workers`` says that no other one lives: the
    controller has been up for long enough that all have said hello. Then requests of an earlier
    controller whose worker is not among them are lost.
    """

    is_ready: Flag
    reason: Text
    num_prefill: Count
    num_decode: Count
    num_combined: Count
    max_request_tokens: Count
    workers: Incarnations = ()
    has_all_workers: Flag = False


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class SubmitRequest:
    """Gateway → controller: place this request. One raw frame: prompt ids, int32 little-endian.

    Answered by ``RequestPlaced`` or ``RequestRefused``; later perhaps ``RequestFailed``. A repeat
    of a known id is refused.
    """

    request_id: RequestId
    params: SamplingParams
    num_prompt_tokens: PromptLength


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class RequestQueued:
    """Controller → gateway: taken in; it is placed as soon as a worker is to have it."""

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class RequestPlaced:
    """Controller → gateway: workers were chosen. Sent again when a request is placed again."""

    request_id: RequestId
    prefill_worker: WorkerId
    decode_worker: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class RequestRefused:
    """Controller → gateway: not taken in; nothing is held for it anywhere."""

    request_id: RequestId
    code: ErrorCode
    message: Text
    retry_after_seconds: Seconds | None = None


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class RequestFailed:
    """Controller → gateway, or worker → controller: the request ended with an error.

    From the controller: no more tokens come. From a worker: it has freed what the request held
    there; the controller cancels the rest and tells the gateway. A repeat is safe.
    """

    request_id: RequestId
    code: ErrorCode
    message: Text


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class CancelRequest:
    """Gateway → controller: the client left, or (``choice`` set) one choice is complete.

    The controller passes it on as ``Cancel``, for an id without a record to every worker: an
    earlier controller may have placed it. Idempotent.
    """

    request_id: RequestId
    choice: ChoiceIndex | None
    reason: Text


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class Cancel:
    """Controller → worker: end this request, or one choice of it, and free what it holds.

    Wins over every other outcome that has not been reported yet. Idempotent; an unknown id is
    ignored.
    """

    request_id: RequestId
    choice: ChoiceIndex | None
    reason: Text


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class PlaceRequest:
    """Controller → worker: prefill this request. One raw frame: prompt ids, int32 little-endian.

    ``decode`` names the worker that decodes; None means this one does both and nothing moves. The
    worker answers with tokens to the gateway, and ``PrefillRefused``, ``DecodeRefused``,
    ``DecodeStarted`` (from the decode side), ``RequestFinished`` or ``RequestFailed`` to the
    controller. A repeat of a known id is ignored.
    """

    request_id: RequestId
    gateway_id: GatewayId
    tokens_endpoint: Endpoint
    params: SamplingParams
    num_prompt_tokens: PromptLength
    decode: PeerInfo | None
    queued_seconds: Seconds = 0.0
    """How long it waited in the controller."""
    num_prefix_tokens: Count = 0
    """How much of the prompt another worker was told to copy here; wait for it a while."""
    num_stored_tokens: Count = 0
    """How much of the prompt to load from the store before the rest is computed."""


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class PlaceDecode:
    """Controller → prefill worker, after ``DecodeRefused``: try this decode worker.

    ``decode`` may name the receiver itself. Ignored when the request is no longer waiting for a
    decode side.
    """

    request_id: RequestId
    decode: PeerInfo


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class PlacementUnknown:
    """Controller → prefill worker, answer to ``DecodeRefused`` for a request without a record.

    An earlier controller placed it, and nobody will place its decode: the worker fails it by name
    and tells its gateway. Ignored when the request is not waiting for a decode side.
    """

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class PrefillRefused:
    """Worker → controller: it does not take a request in, or gives it back before it has begun.

    Nothing was computed and nobody else was told. The controller places the request elsewhere or,
    where nobody can have it, tells the gateway. A repeat is safe.
    """

    request_id: RequestId
    code: ErrorCode
    message: Text


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class DecodeRefused:
    """Prefill worker → controller: the decode side has no room, or cannot be paired with.

    The controller places the decode again; the prefill goes on meanwhile and is kept. Sent again
    to a controller that was started anew, which answers ``PlacementUnknown``.
    """

    request_id: RequestId
    decode_worker: WorkerId
    code: ErrorCode
    message: Text


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class DecodeStarted:
    """Decode worker → controller: the handoff was accepted; the prefill side is out of it."""

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class RequestFinished:
    """Worker → controller, and on to the gateway: every choice ended (or was cancelled).

    The worker has let all blocks go. The gateway's last tokens may still be on their way to it;
    what has not come after a while is lost. A repeat is safe.
    """

    request_id: RequestId
    was_cancelled: Flag


WorkerToController = (
    WorkerHello
    | Heartbeat
    | Goodbye
    | PrefillRefused
    | DecodeRefused
    | DecodeStarted
    | RequestFinished
    | RequestFailed
    | KVIndexEvents
    | RoleSwitched
    | MigrationFailed
    | PrefixNotCopied
    | PrefixFound
)
GatewayToController = GatewayHello | GatewayHeartbeat | Goodbye | SubmitRequest | CancelRequest
ControllerToWorker = (
    WorkerAccepted
    | HelloRefused
    | HeartbeatAnswered
    | Fenced
    | HelloRequested
    | PeerJoined
    | PeerLeft
    | PlaceRequest
    | PlaceDecode
    | PlacementUnknown
    | Cancel
    | SwitchRole
    | Directive
    | SetDraining
    | MigrateDecode
    | CopyPrefix
    | KVIndexRequested
    | PrefixUnavailable
    | LookUpPrefix
)
ControllerToGateway = (
    GatewayAccepted
    | HelloRefused
    | Fenced
    | HelloRequested
    | ClusterState
    | RequestQueued
    | RequestPlaced
    | RequestRefused
    | RequestFinished
    | RequestFailed
)
