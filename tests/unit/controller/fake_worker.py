"""A worker of the honest cluster: it keeps the protocol and acts when a rule lets it."""

from collections import deque
from dataclasses import dataclass, field

from common.errors import ErrorCode
from common.ids import RequestId
from common.messages.control import (
    Cancel,
    CopyPrefix,
    Fenced,
    LookUpPrefix,
    MigrateDecode,
    MigrationFailed,
    PeerLeft,
    PlaceDecode,
    PlaceRequest,
    PrefillRefused,
    PrefixUnavailable,
    RequestFinished,
    RoleSwitched,
    SetDraining,
    SwitchRole,
    WorkerAccepted,
)
from common.messages.fields import Role
from services.controller.effects import FromPeer, ToPeer


@dataclass
class FakeWorker:
    """A worker that keeps the protocol. ``prefilling`` maps to the decode side, None is itself.

    ``asked`` are look-ups to answer, ``copying`` the targets of prefixes to load and to write;
    ``awaiting`` are requests whose prefix has not come, ``arrived`` those whose prefix has, and of
    those in ``begun`` it has computed something.
    """

    name: str
    pid: int
    epoch: int
    role: Role
    generation: int = 1
    is_draining: bool = False
    num_orders: int = 0
    prefilling: dict[RequestId, str | None] = field(default_factory=dict)
    refused: set[RequestId] = field(default_factory=set)
    decoding: set[RequestId] = field(default_factory=set)
    moving: dict[RequestId, str] = field(default_factory=dict)
    asked: deque[RequestId] = field(default_factory=deque)
    copying: dict[RequestId, str] = field(default_factory=dict)
    awaiting: set[RequestId] = field(default_factory=set)
    arrived: set[RequestId] = field(default_factory=set)
    begun: set[RequestId] = field(default_factory=set)
    inbox: deque[ToPeer] = field(default_factory=deque)
    outbox: deque[FromPeer] = field(default_factory=deque)

    @property
    def has_work(self) -> bool:
        """Whether it holds anything of a request."""
        return bool(self.prefilling or self.refused or self.decoding or self.moving)

    def obey(self, message: ToPeer) -> None:  # noqa: C901, PLR0912 - one case per order
        say = self.outbox.append
        if isinstance(message, PlaceRequest | CopyPrefix):
            self.num_orders += 1
        match message:
            case WorkerAccepted():
                self.num_orders = 0
            case PlaceRequest(request_id=request_id, decode=decode, num_prefix_tokens=awaited):
                if self.is_draining:
                    self.refuse(request_id)
                else:
                    self.begun.discard(request_id)
                    self.prefilling[request_id] = decode.worker_id if decode else None
                    if awaited and request_id not in self.arrived:
                        self.awaiting.add(request_id)
            case LookUpPrefix(request_id=request_id):
                self.asked.append(request_id)
            case CopyPrefix(request_id=request_id, target=target):
                self.copying[request_id] = target.worker_id
            case PrefixUnavailable(request_id=request_id):
                self.awaiting.discard(request_id)
            case PlaceDecode(request_id=request_id, decode=decode):
                if request_id in self.refused:
                    self.refused.discard(request_id)
                    self.begun.add(request_id)
                    is_own = decode.worker_id == self.name
                    self.prefilling[request_id] = None if is_own else decode.worker_id
            case Cancel(request_id=request_id, choice=None):
                if self.drop(request_id):
                    say(RequestFinished(request_id=request_id, was_cancelled=True))
            case SwitchRole(role=role, role_generation=generation):
                if generation > self.generation:
                    self.role, self.generation = role, generation
                say(RoleSwitched(role=self.role, role_generation=self.generation))
            case SetDraining(is_draining=is_draining):
                self.is_draining = is_draining
                for request_id in [r for r in self.prefilling if r not in self.begun]:
                    if is_draining:
                        self.drop(request_id)
                        self.refuse(request_id)
            case MigrateDecode(request_id=request_id, decode=decode):
                if request_id in self.decoding:
                    self.moving[request_id] = decode.worker_id
                else:
                    say(MigrationFailed(request_id=request_id, message="it is not here"))
            case PeerLeft(worker_id=name):
                for request_id in [r for r, to in self.moving.items() if to == name]:
                    del self.moving[request_id]
                    say(MigrationFailed(request_id=request_id, message="the peer is gone"))
            case Fenced():
                raise AssertionError("only the dead are fenced, and they hear nothing")
            case _:
                return

    def refuse(self, request_id: RequestId) -> None:
        code = ErrorCode.SHUTTING_DOWN
        self.outbox.append(PrefillRefused(request_id=request_id, code=code, message="it drains"))

    def drop(self, request_id: RequestId) -> bool:
        held = request_id in self.prefilling or request_id in self.decoding
        held |= request_id in self.refused
        self.prefilling.pop(request_id, None)
        self.moving.pop(request_id, None)
        self.awaiting.discard(request_id)
        self.refused.discard(request_id)
        self.decoding.discard(request_id)
        return held
