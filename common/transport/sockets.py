"""A DEALER that connects to one binder, and a ROUTER that many peers connect to.

Each socket has one owner task. Sends never wait: a full queue is an answer (see channels.py).
Receives drain what has arrived, a bounded number at a time, and poll again after at most
``REPOLL_SECONDS``, so that a missed edge of the descriptor cannot stall a conversation.
"""

import asyncio
import itertools
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

from common.errors import ConfigError, RemoteProtocolError
from common.ids import Epoch
from common.messages.codec import Codec, Envelope, Received
from common.transport.channels import Channel
from common.transport.security import (
    Guard,
    Keys,
    secure_binder,
    secure_connector,
    shown_key,
    split_key,
    with_key,
)

REPOLL_SECONDS = 0.1
MAX_BURST = 64
RECONNECT_MIN_MILLISECONDS = 20
RECONNECT_MAX_MILLISECONDS = 500
MAX_IPC_PATH_BYTES = 107
PING_MILLISECONDS = 1000
MAX_SILENCE_MILLISECONDS = 4000
"""On TCP a peer that answers no ping so long is connected to anew: the kernel alone would notice a
cut link after many minutes, and use a mended one again only after as long as it was cut."""
MAX_CONNECT_MILLISECONDS = 2000
TELL_AGAIN_SECONDS = 5.0
"""How often a connection that keeps failing is told of."""
REFUSED_AGAIN_SECONDS = 1.0
"""After how long a binder that did not let our key in is asked again: it may have been given it."""

Out = TypeVar("Out")
In = TypeVar("In")

log = structlog.get_logger()

HANDSHAKE_FAILURES = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it does not let our key in: add our node.key to its allowed/",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it does not hold the key that the endpoint names",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it closed the connection: its key may be another one "
    "than the endpoint names",
}
_REFUSED = zmq.Event.HANDSHAKE_FAILED_AUTH
_WATCHED = sum(HANDSHAKE_FAILURES) + zmq.EVENT_HANDSHAKE_SUCCEEDED  # a set of flags


class Identity:
    """Who we are in envelopes: name, epoch and role generation, and the running number."""

    def __init__(self, name: str, epoch: Epoch) -> None:
        self.name = name
        self.epoch = epoch
        self.role_generation = 0
        self._sequence = itertools.count(1)

    def envelope(self, cause: str) -> Envelope:
        """Return the envelope of the next message."""
        return Envelope(self.name, self.epoch, self.role_generation, next(self._sequence), cause)


class Context:
    """The sockets of one process; ``keys`` secure those on TCP, which are refused without."""

    def __init__(self, keys: Keys | None = None) -> None:
        self.zmq: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.keys = keys
        self._guard = Guard(self.zmq, keys) if keys is not None else None
        self.wires: weakref.WeakSet[_Wire] = weakref.WeakSet()

    def destroy(self, linger: int) -> None:
        """Close every socket within ``linger`` milliseconds.

        Also those that an error left open: an event loop must not watch a descriptor that is gone.
        """
        for wire in list(self.wires):
            wire.close(linger / 1000)
        if self._guard is not None:
            self._guard.close()
        self.zmq.destroy(linger=linger)


def new_context(keys: Keys | None = None) -> Context:
    """Return a context for one process; end it with ``context.destroy(linger=0)``."""
    return Context(keys)


def _keys_for(context: Context, endpoint: str) -> Keys:
    if context.keys is None:
        raise ConfigError(
            f"{endpoint.partition('?')[0]}: TCP between processes needs keys; make them with "
            "`flowpath keygen FOLDER` and set FLOWPATH_KEYS to the folder"
        )
    return context.keys


def check_endpoint(endpoint: str) -> None:
    """Refuse an ``ipc://`` path that the kernel would cut. Raises ConfigError with what to do."""
    path = endpoint.removeprefix("ipc://")
    if endpoint.startswith("ipc://") and len(path.encode()) > MAX_IPC_PATH_BYTES:
        raise ConfigError(
            f"the socket path {path} is longer than {MAX_IPC_PATH_BYTES} bytes; "
            "set FLOWPATH_RUN_DIR to a shorter folder"
        )


def check_bindable(endpoint: str) -> None:
    """Bind a TCP endpoint and let it go again. ConfigError when that is not possible."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as probe:
        try:
            probe.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"cannot bind to {endpoint}: {error}; cluster_host must be an address of this host"
            ) from error


class _Wire:
    """A zmq socket in an asyncio loop, used by one loop only.

    The socket's descriptor is edge-triggered and a send may swallow an edge that announced a
    receive; so every send looks for waiting messages itself.
    """

    def __init__(self, context: Context, kind: int, channel: Channel) -> None:
        self.socket: zmq.Socket[bytes] = context.zmq.socket(kind)
        self._monitor: zmq.Socket[bytes] | None = None
        self.refusal: str | None = None
        self.num_connects = 0
        self._address = ""
        self._refused_at: float | None = None
        self._keys_told: dict[str, str] = {}
        self._tell_again_at = 0.0
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, channel.high_water_mark)
        self.socket.setsockopt(zmq.RCVHWM, channel.high_water_mark)
        self.socket.setsockopt(zmq.MAXMSGSIZE, channel.max_message_bytes)
        self.socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MIN_MILLISECONDS)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MILLISECONDS)
        self._readable = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._fd = int(self.socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._readable.set)
        context.wires.add(self)

    def try_send(self, frames: list[bytes]) -> bool:
        if self.socket.closed:
            return False
        self._tend()
        try:
            self.socket.send_multipart(frames, flags=zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        finally:
            # A send that was refused has swallowed the edge just as well.
            if int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self._readable.set()
        return True

    async def drain(self) -> list[list[bytes]]:
        """Wait for messages and return up to ``MAX_BURST``; an empty list says closed."""
        await asyncio.sleep(0)
        while not self.socket.closed:
            self._readable.clear()
            burst: list[list[bytes]] = []
            while len(burst) < MAX_BURST:
                try:
                    burst.append(self.socket.recv_multipart(flags=zmq.NOBLOCK))
                except zmq.Again:
                    break
            if burst:
                return burst
            try:
                async with asyncio.timeout(REPOLL_SECONDS):
                    await self._readable.wait()
            except TimeoutError:
                self._tend()
        return []

    def connect(self, address: str) -> None:
        """Begin to connect; zmq.ZMQError where that cannot be. Once more after a refusal."""
        self.socket.connect(address)
        self._address = address
        self.num_connects += 1

    def end_when_silent(self) -> None:
        """Give up, from now on, connections whose other end is not heard from any more."""
        self.socket.setsockopt(zmq.HEARTBEAT_IVL, PING_MILLISECONDS)
        self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, MAX_SILENCE_MILLISECONDS)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, MAX_SILENCE_MILLISECONDS)
        self.socket.setsockopt(zmq.CONNECT_TIMEOUT, MAX_CONNECT_MILLISECONDS)

    def watch_handshakes(self, our_key: bytes, its_key: bytes) -> None:
        """Log, from now on, why a secured connection does not come about, and with which keys."""
        self._keys_told = {"our_key": shown_key(our_key), "its_key": shown_key(its_key)}
        self._monitor = self.socket.get_monitor_socket(_WATCHED)

    def _tend(self) -> None:
        """See to a secured connection: tell why it does not come about, and connect again.

        libzmq connects again by itself but where the binder refused our key. What was queued for
        such a connection is lost.
        """
        if self._monitor is None or self.socket.closed:
            return
        self._read_monitor(self._monitor)
        now = self._loop.time()
        if self._refused_at is not None and now - self._refused_at >= REFUSED_AGAIN_SECONDS:
            self._refused_at = None
            with suppress(zmq.ZMQError):  # there is nothing left to disconnect
                self.socket.disconnect(self._address)
            self.connect(self._address)

    def _read_monitor(self, monitor: "zmq.Socket[bytes]") -> None:
        while monitor.poll(0):
            event = recv_monitor_message(monitor)
            what = zmq.Event(event["event"])
            self._refused_at = self._loop.time() if what is _REFUSED else None
            reason = self.refusal = HANDSHAKE_FAILURES.get(what)
            if reason is not None and self._loop.time() >= self._tell_again_at:
                self._tell_again_at = self._loop.time() + TELL_AGAIN_SECONDS
                endpoint = event["endpoint"].decode()
                log.error("handshake_refused", endpoint=endpoint, reason=reason, **self._keys_told)

    def close(self, linger_seconds: float = 0.0) -> None:
        if not self.socket.closed:
            self._loop.remove_reader(self._fd)
            if self._monitor is not None:
                self.socket.disable_monitor()
                self._monitor.close(linger=0)
            self.socket.close(linger=int(linger_seconds * 1000))
            self._readable.set()


class DealerLink(Generic[Out, In]):
    """The connecting side of a channel; speaks with exactly one binder.

    ConfigError for an endpoint that cannot be connected to as it stands; nobody need be there yet.
    """

    def __init__(
        self,
        context: Context,
        channel: Channel,
        endpoint: str,
        identity: Identity,
        outgoing: Codec[Out],
        incoming: Codec[In],
    ) -> None:
        check_endpoint(endpoint)
        address, key = split_key(endpoint)
        keys = _keys_for(context, endpoint) if key is not None else None
        self.endpoint = endpoint
        self.last_sequence = 0
        self._identity = identity
        self._outgoing = outgoing
        self._incoming = incoming
        self._channel = channel
        self._wire = _Wire(context, zmq.DEALER, channel)
        # A routing id of our own choosing; the epoch in it keeps a restarted process apart from
        # the connection of its dead predecessor.
        self._wire.socket.setsockopt(zmq.ROUTING_ID, routing_id(identity.name, identity.epoch))
        if key is not None and keys is not None:
            secure_connector(self._wire.socket, keys, key)
            self._wire.end_when_silent()
            self._wire.watch_handshakes(keys.public, key)
        try:
            self._wire.connect(address)
        except zmq.ZMQError as error:
            self._wire.close()
            raise ConfigError(f"cannot connect {channel.name} to {address}: {error}") from error

    @classmethod
    def to_peer(
        cls,
        context: Context,
        channel: Channel,
        endpoint: str,
        identity: Identity,
        outgoing: Codec[Out],
        incoming: Codec[In],
    ) -> "DealerLink[Out, In]":
        """Connect to an endpoint that another process told.

        One that cannot be used is logged, and is that process's fault alone: the link is closed
        from the start, takes no message and yields none.
        """
        try:
            return cls(context, channel, endpoint, identity, outgoing, incoming)
        except ConfigError as error:
            log.error("endpoint_unusable", channel=channel.name, reason=str(error))
        unusable = cls(context, channel, "inproc://nowhere", identity, outgoing, incoming)
        unusable.endpoint = endpoint
        unusable.close()
        return unusable

    def try_send(self, message: Out, cause: str, payload: tuple[bytes, ...] = ()) -> bool:
        """Queue a message; return False, with nothing queued, when the queue is full.

        ``last_sequence`` is the message's number from then on.
        """
        envelope = self._identity.envelope(cause)
        self.last_sequence = envelope.sequence
        frames = self._outgoing.encode(envelope, message, payload)
        return self._wire.try_send(frames)

    async def received(self) -> AsyncIterator[Received[In]]:
        """Yield messages until the socket is closed; malformed ones are logged and dropped."""
        while burst := await self._wire.drain():
            for frames in burst:
                try:
                    received = self._incoming.decode(frames)
                except RemoteProtocolError as error:
                    log.warning("message_refused", channel=self._channel.name, reason=str(error))
                    continue
                yield received

    @property
    def refusal(self) -> str | None:
        """Why the binder's last handshake with us failed; None when it did not, on TCP alone."""
        return self._wire.refusal

    @property
    def num_connects(self) -> int:
        """How often it began to connect: again after our key was refused.

        What was sent before the last time and not answered may be lost.
        """
        return self._wire.num_connects

    def close(self, linger_seconds: float = 0.0) -> None:
        """Close; messages still queued are sent within ``linger_seconds`` or dropped."""
        self._wire.close(linger_seconds)


class RouterHub(Generic[Out, In]):
    """The binding side of a channel; speaks with every peer that connected.

    A peer is addressed by its routing id, which is taken from what it last sent: a message goes to
    a peer only after one came from it.
    """

    def __init__(
        self,
        context: Context,
        channel: Channel,
        endpoint: str,
        identity: Identity,
        outgoing: Codec[Out],
        incoming: Codec[In],
    ) -> None:
        check_endpoint(endpoint)
        is_tcp = endpoint.startswith("tcp://")
        keys = _keys_for(context, endpoint) if is_tcp else None
        self._identity = identity
        self._outgoing = outgoing
        self._incoming = incoming
        self._channel = channel
        self._wire = _Wire(context, zmq.ROUTER, channel)
        self._wire.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._wire.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if keys is not None:
            secure_binder(self._wire.socket, keys)
            self._wire.end_when_silent()
        try:
            self._wire.socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._wire.close()
            raise ConfigError(f"cannot bind {channel.name} to {endpoint}: {error}") from error
        bound = self._wire.socket.get_string(zmq.LAST_ENDPOINT)
        self.endpoint = with_key(bound, keys.public) if keys is not None else bound

    def try_send(
        self, peer: tuple[str, Epoch], message: Out, cause: str, payload: tuple[bytes, ...] = ()
    ) -> bool:
        """Queue a message for one incarnation of a peer.

        Returns False, with nothing queued, when its queue is full or it is not connected.
        """
        frames = self._outgoing.encode(self._identity.envelope(cause), message, payload)
        return self._wire.try_send([routing_id(*peer), *frames])

    async def received(
        self, on_refused: Callable[[bytes, RemoteProtocolError], None] | None = None
    ) -> AsyncIterator[Received[In]]:
        """Yield messages until the socket is closed.

        A malformed message is logged, reported to ``on_refused`` with the sender's routing id,
        and dropped; so is one whose envelope names another sender than its connection does.
        """
        while burst := await self._wire.drain():
            for frames in burst:
                peer, *rest = frames
                try:
                    received = self._incoming.decode(rest)
                    _check_sender(peer, received.envelope)
                except RemoteProtocolError as error:
                    log.warning("message_refused", channel=self._channel.name, reason=str(error))
                    if on_refused is not None:
                        on_refused(peer, error)
                    continue
                yield received

    def close(self) -> None:
        """Close at once and remove the socket file."""
        endpoint = self.endpoint
        self._wire.close()
        if endpoint.startswith("ipc://"):
            Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)


def routing_id(name: str, epoch: Epoch) -> bytes:
    """Return the routing id of one incarnation of a process."""
    return f"{name}#{epoch:x}".encode()[:255]


def _check_sender(peer: bytes, envelope: Envelope) -> None:
    claimed = routing_id(envelope.sender, envelope.epoch)
    if claimed != peer:
        raise RemoteProtocolError(f"{peer!r:.80} claims to be {claimed!r:.80}")
