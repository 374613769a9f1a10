"""A controller core with builders for what others say to it."""

import itertools
from collections.abc import Callable, Iterable

from common.errors import ErrorCode
from common.ids import Epoch, GatewayId, RequestId, WorkerId
from common.messages.admin import (
    ControllerToCli,
    OrderDrain,
    OrderRole,
    OrderRoles,
    ScalerHello,
)
from common.messages.codec import Envelope, Received
from common.messages.control import (
    CancelRequest,
    DecodeRefused,
    DecodeStarted,
    GatewayHeartbeat,
    GatewayHello,
    Heartbeat,
    KVIndexEvents,
    MigrationFailed,
    PrefillRefused,
    PrefixFound,
    PrefixNotCopied,
    RequestFailed,
    RequestFinished,
    RoleSwitched,
    SubmitRequest,
    WorkerHello,
)
from common.messages.fields import (
    KVCounts,
    Mode,
    PairStatus,
    PeerInfo,
    Role,
    WorkerLoad,
    WorkerRates,
    WorkerTotals,
)
from common.sampling import SamplingParams
from services.controller.core import ControllerCore
from services.controller.effects import (
    Answer,
    CoreEvent,
    Effect,
    FromPeer,
    MessageReceived,
    Note,
    OrderReceived,
    PeerKey,
    Send,
    SendFailed,
    Tick,
    ToPeer,
)
from services.controller.limits import ControllerLimits
from services.controller.standing_orders import NO_ORDERS, KeptOrders

HOST = "here"
MODEL = "0123456789abcdef"
LAYOUT = "fedcba9876543210"


def peer(
    name: str,
    role: Role,
    epoch: int = 1,
    pid: int = 100,
    host: str = HOST,
    dtype: str = "float32",
) -> PeerInfo:
    return PeerInfo(
        worker_id=WorkerId(name),
        epoch=Epoch(epoch),
        role=role,
        pid=pid,
        host=host,
        handoff_endpoint=f"ipc:///tmp/{name}",
        dtype=dtype,
        layout_fingerprint=LAYOUT,
        transports=("shm",),
    )


def worker_hello(
    name: str,
    role: Role,
    epoch: int = 1,
    *,
    pid: int = 100,
    host: str = HOST,
    num_blocks: int = 100,
    model: str = MODEL,
    block_size: int = 64,
    dtype: str = "float32",
    max_num_batched_tokens: int = 16384,
    has_store: bool = False,
) -> WorkerHello:
    return WorkerHello(
        peer=peer(name, role, epoch, pid, host, dtype),
        model_fingerprint=model,
        model_name="toy",
        max_model_len=8192,
        num_blocks=num_blocks,
        block_size=block_size,
        block_bytes=4096,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=64,
        has_store=has_store,
    )


def gateway_hello(
    name: str = "g", epoch: int = 1, *, pid: int = 50, host: str = HOST, model: str = MODEL
) -> GatewayHello:
    return GatewayHello(
        gateway_id=GatewayId(name),
        epoch=Epoch(epoch),
        pid=pid,
        host=host,
        tokens_endpoint=f"ipc:///tmp/{name}.tokens",
        model_fingerprint=model,
        url="http://127.0.0.1:1",
    )


def kv(total: int = 100, referenced: int = 0, in_transfer: int = 0, cached: int = 0) -> KVCounts:
    free = total - referenced - in_transfer - cached
    return KVCounts(
        total=total,
        free=free,
        referenced=referenced,
        cached=cached,
        in_transfer=in_transfer,
        largest_free_run=free,
    )


def rates(
    prefill: float = 0.0,
    step_seconds: float = 0.0,
    decode: float = 0.0,
    read: float = 0.0,
    line: tuple[float, float] = (0.0, 0.0),
) -> WorkerRates:
    return WorkerRates(
        prefill_tokens_per_second=prefill,
        decode_step_seconds=step_seconds,
        decode_tokens_per_second=decode,
        read_tokens_per_second=read,
        decode_base_seconds=line[0],
        decode_seconds_per_sequence=line[1],
    )


NO_RATES = rates()
ALL_ORDERS = 2**31
"""Of a heartbeat that was made when all that was ordered had come."""


def heartbeat(
    counts: KVCounts | None = None,
    *,
    uncomputed_tokens: int = 0,
    num_decoding: int = 0,
    num_steps: int = 0,
    is_draining: bool = False,
    is_quarantined: bool = False,
    pairs: tuple[PairStatus, ...] = (),
    measured: WorkerRates | None = None,
    index_sequence: int = 0,
    read_queue_tokens: int = 0,
    totals: WorkerTotals | None = None,
    num_orders: int = ALL_ORDERS,
) -> Heartbeat:
    load = WorkerLoad(
        num_waiting=0,
        num_prefilling=0,
        num_sending=0,
        num_receiving=0,
        num_decoding=num_decoding,
        uncomputed_tokens=uncomputed_tokens,
        num_steps=num_steps,
        read_queue_tokens=read_queue_tokens,
    )
    return Heartbeat(
        kv=counts or kv(),
        load=load,
        is_draining=is_draining,
        is_quarantined=is_quarantined,
        pairs=pairs,
        mode=Mode.BALANCED,
        rates=measured or NO_RATES,
        index_sequence=index_sequence,
        totals=totals or WorkerTotals(),
        num_orders=num_orders,
    )


def paired(decode: str, transport: str = "shm", reason: str = "", epoch: int = 1) -> PairStatus:
    return PairStatus(
        worker_id=WorkerId(decode), epoch=Epoch(epoch), transport=transport, reason=reason
    )


def submit(
    request_id: str, num_prompt_tokens: int = 64, num_choices: int = 1, max_tokens: int = 16
) -> SubmitRequest:
    params = SamplingParams(seed=1, max_tokens=max_tokens, num_choices=num_choices)
    return SubmitRequest(
        request_id=RequestId(request_id), params=params, num_prompt_tokens=num_prompt_tokens
    )


class Cluster:
    """A core whose time is set by hand; every event is followed by ``validate``.

    The controller runs all the time, so that whatever passes is own time; but ``stand_still``.
    ``unreachable`` peers cannot be sent to, as in the shell.
    """

    def __init__(
        self, limits: ControllerLimits | None = None, kept: KeptOrders = NO_ORDERS
    ) -> None:
        self.now = 1000.0
        self.core = ControllerCore(limits or ControllerLimits(), HOST, self.now, kept)
        self._is_awake = True
        self._ran_until = self.now
        self.unreachable: set[str] = set()
        self._sequence = itertools.count(1)

    def stand_still(self, seconds: float) -> None:
        self._run_on()
        self.now += seconds
        self._is_awake = False

    def _run_on(self) -> None:
        step = self.core.own_time.max_step_seconds
        while self._is_awake and self._ran_until < self.now:
            self._ran_until = min(self.now, self._ran_until + step)
            assert self.core.own_time.take(self._ran_until) < 1e-6
        self._is_awake = True
        self._ran_until = self.now

    def handle(self, event: CoreEvent) -> list[Effect]:
        self._run_on()
        effects = self.core.handle(event, self.now)
        self.core.validate()
        told: list[Effect] = []
        for effect in effects:
            told.append(effect)
            if isinstance(effect, Send) and effect.peer[0] in self.unreachable:
                told.remove(effect)
                told += self.handle(SendFailed(effect))
        return told

    def say(
        self,
        sender: str,
        message: FromPeer,
        *,
        epoch: int = 1,
        payload: tuple[bytes, ...] = (),
        role_generation: int = 0,
    ) -> list[Effect]:
        sequence = next(self._sequence)
        envelope = Envelope(sender, Epoch(epoch), role_generation, sequence, "test")
        return self.handle(MessageReceived(Received(envelope, message, payload)))

    def join(self, name: str, role: Role, epoch: int = 1, **options: object) -> list[Effect]:
        build: Callable[..., WorkerHello] = worker_hello
        return self.say(name, build(name, role, epoch, **options), epoch=epoch)

    def join_gateway(self, name: str = "g", epoch: int = 1) -> list[Effect]:
        return self.say(name, gateway_hello(name, epoch), epoch=epoch)

    def submit(
        self,
        request_id: str,
        num_prompt_tokens: int = 64,
        num_choices: int = 1,
        gateway: str = "g",
        prompt: bytes | None = None,
        max_tokens: int = 16,
    ) -> list[Effect]:
        message = submit(request_id, num_prompt_tokens, num_choices, max_tokens)
        return self.say(gateway, message, payload=(prompt or bytes(4 * num_prompt_tokens),))

    def beat(self, name: str, beat: Heartbeat | None = None, epoch: int = 1) -> list[Effect]:
        return self.say(name, beat or heartbeat(), epoch=epoch)

    def gateway_beat(self, name: str = "g") -> list[Effect]:
        return self.say(name, GatewayHeartbeat(num_streams=0))

    def started(self, worker: str, request_id: str, epoch: int = 1) -> list[Effect]:
        return self.say(worker, DecodeStarted(request_id=RequestId(request_id)), epoch=epoch)

    def finished(
        self, worker: str, request_id: str, *, was_cancelled: bool = False
    ) -> list[Effect]:
        message = RequestFinished(request_id=RequestId(request_id), was_cancelled=was_cancelled)
        return self.say(worker, message)

    def failed(
        self, worker: str, request_id: str, code: ErrorCode = ErrorCode.TRANSFER_FAILED
    ) -> list[Effect]:
        message = RequestFailed(request_id=RequestId(request_id), code=code, message="broken")
        return self.say(worker, message)

    def given_back(
        self, worker: str, request_id: str, code: ErrorCode = ErrorCode.SHUTTING_DOWN
    ) -> list[Effect]:
        message = PrefillRefused(request_id=RequestId(request_id), code=code, message="not now")
        return self.say(worker, message)

    def refused(
        self,
        prefill: str,
        decode: str,
        request_id: str,
        code: ErrorCode = ErrorCode.NO_ROOM,
    ) -> list[Effect]:
        message = DecodeRefused(
            request_id=RequestId(request_id),
            decode_worker=WorkerId(decode),
            code=code,
            message="no",
        )
        return self.say(prefill, message)

    def cancel(
        self, request_id: str, choice: int | None = None, gateway: str = "g"
    ) -> list[Effect]:
        message = CancelRequest(request_id=RequestId(request_id), choice=choice, reason="left")
        return self.say(gateway, message)

    def order(self, order: OrderRole | OrderRoles | OrderDrain | ScalerHello) -> list[Effect]:
        sender = "scaler" if isinstance(order, ScalerHello) else "cli"
        return self.handle(OrderReceived((sender, Epoch(1)), order, f"{type(order).__name__} cli"))

    def switched(self, worker: str, role: Role, generation: int, epoch: int = 1) -> list[Effect]:
        message = RoleSwitched(role=role, role_generation=generation)
        return self.say(worker, message, epoch=epoch)

    def migration_failed(self, worker: str, request_id: str, epoch: int = 1) -> list[Effect]:
        message = MigrationFailed(request_id=RequestId(request_id), message="no room")
        return self.say(worker, message, epoch=epoch)

    def index(
        self,
        worker: str,
        sequence: int,
        added: Iterable[bytes] = (),
        removed: Iterable[bytes] = (),
        *,
        is_snapshot: bool = False,
    ) -> list[Effect]:
        message = KVIndexEvents(sequence=sequence, is_snapshot=is_snapshot)
        return self.say(worker, message, payload=(b"".join(added), b"".join(removed)))

    def found(self, worker: str, request_id: str, num_blocks: int, epoch: int = 1) -> list[Effect]:
        message = PrefixFound(request_id=RequestId(request_id), num_blocks=num_blocks)
        return self.say(worker, message, epoch=epoch)

    def not_copied(self, worker: str, request_id: str, epoch: int = 1) -> list[Effect]:
        message = PrefixNotCopied(request_id=RequestId(request_id), message="it is gone")
        return self.say(worker, message, epoch=epoch)

    def tick(self, *gone_pids: int, after: float = 0.0) -> list[Effect]:
        self.now += after
        return self.handle(Tick(frozenset(gone_pids)))

    def phase(self, request_id: str) -> str:
        record = self.core.book.requests.get(RequestId(request_id))
        return "unknown" if record is None else str(record.phase)


def sent(effects: list[Effect]) -> list[tuple[str, ToPeer]]:
    return [(effect.peer[0], effect.message) for effect in effects if isinstance(effect, Send)]


def sent_names(effects: list[Effect]) -> list[tuple[str, str]]:
    return [(peer, type(message).__name__) for peer, message in sent(effects)]


def only(effects: list[Effect], kind: type[ToPeer]) -> list[tuple[PeerKey, ToPeer]]:
    return [
        (effect.peer, effect.message)
        for effect in effects
        if isinstance(effect, Send) and isinstance(effect.message, kind)
    ]


def answers(effects: list[Effect]) -> list[ControllerToCli]:
    return [effect.message for effect in effects if isinstance(effect, Answer)]


def notes(effects: list[Effect]) -> list[str]:
    return [effect.event for effect in effects if isinstance(effect, Note)]


def pair_cluster(
    num_prefill: int = 1,
    num_decode: int = 1,
    limits: ControllerLimits | None = None,
    **options: object,
) -> Cluster:
    """Return a cluster with a gateway and workers p0.. and d0.., all ready."""
    cluster = Cluster(limits)
    for number in range(num_prefill):
        cluster.join(f"p{number}", Role.PREFILL, pid=100 + number, **options)
    for number in range(num_decode):
        cluster.join(f"d{number}", Role.DECODE, pid=200 + number, **options)
    cluster.join_gateway()
    return cluster
