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
    KVCounts,
    Name,
    Pairs,
    PeerInfo,
    PromptLength,
    Role,
    Seconds,
    Text,
    WorkerLoad,
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
    for the largest pool of the workers that decode; 0 while there is none.
    """

    is_ready: Flag
    reason: Text
    num_prefill: Count
    num_decode: Count
    num_combined: Count
    max_request_tokens: Count


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
    worker answers with tokens to the gateway, and ``DecodeRefused``, ``DecodeStarted`` (from the
    decode side), ``RequestFinished`` or ``RequestFailed`` to the controller. A repeat of a known
    id is ignored.
    """

    request_id: RequestId
    gateway_id: GatewayId
    tokens_endpoint: Endpoint
    params: SamplingParams
    num_prompt_tokens: PromptLength
    decode: PeerInfo | None


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
    | DecodeRefused
    | DecodeStarted
    | RequestFinished
    | RequestFailed
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
)
ControllerToGateway = (
    GatewayAccepted
    | HelloRefused
    | Fenced
    | HelloRequested
    | ClusterState
    | RequestPlaced
    | RequestRefused
    | RequestFinished
    | RequestFailed
)
