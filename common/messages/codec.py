"""Bytes of a message: one MessagePack header frame, then raw frames for big payloads.

The header frame is an array: protocol version, sender, epoch, role generation, sequence number,
cause, tag (the message's class name), body (a map of its fields). Decoding has explicit limits and
builds only types of the conversation's union.
"""

from dataclasses import dataclass
from types import UnionType
from typing import Any, Generic, TypeVar, get_args

import msgpack
from pydantic import TypeAdapter, ValidationError

from common.errors import RemoteProtocolError
from common.ids import Epoch

PROTOCOL_VERSION = 1
MAX_HEADER_BYTES = 8 * 1024 * 1024
MAX_PAYLOAD_BYTES = 64 * 1024 * 1024
MAX_FRAMES = 4
MAX_COUNT = 2**53
"""Bound of epoch, role generation and sequence number: what a ``Count`` field may hold."""
MAX_SENDER_CHARS = 200

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class Envelope:
    """What stands around every message. ``cause`` names the request or event behind it."""

    sender: str
    epoch: Epoch
    role_generation: int
    sequence: int
    cause: str


@dataclass(frozen=True, slots=True)
class Received(Generic[M]):
    """One decoded message with its envelope and raw payload frames."""

    envelope: Envelope
    message: M
    payload: tuple[bytes, ...]


class Codec(Generic[M]):
    """Encodes and decodes the messages of one direction of one conversation."""

    def __init__(self, union: UnionType | type) -> None:
        types: tuple[type, ...] = get_args(union) or (union,)  # a lone class is its own union
        self._adapters: dict[str, TypeAdapter[Any]] = {t.__name__: TypeAdapter(t) for t in types}

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags that this codec knows."""
        return tuple(self._adapters)

    def encode(
        self, envelope: Envelope, message: M, payload: tuple[bytes, ...] = ()
    ) -> list[bytes]:
        """Return the frames of a message.

        Raises KeyError for a message that does not belong to this conversation: a bug of ours.
        """
        tag = type(message).__name__
        body = self._adapters[tag].dump_python(message)
        header = [
            PROTOCOL_VERSION,
            envelope.sender,
            envelope.epoch,
            envelope.role_generation,
            envelope.sequence,
            envelope.cause,
            tag,
            body,
        ]
        return [msgpack.packb(header, use_bin_type=True), *payload]

    def decode(self, frames: list[bytes]) -> Received[M]:
        """Rebuild a message from its frames.

        Raises RemoteProtocolError, which says what is wrong, for anything but a well-formed
        message of this conversation.
        """
        if not 1 <= len(frames) <= MAX_FRAMES:
            raise RemoteProtocolError(f"{len(frames)} frames; 1 to {MAX_FRAMES} expected")
        if sum(len(frame) for frame in frames[1:]) > MAX_PAYLOAD_BYTES:
            raise RemoteProtocolError(f"payload over {MAX_PAYLOAD_BYTES} bytes")
        version, sender, epoch, generation, sequence, cause, tag, body = _unpack_header(frames[0])
        if type(version) is not int or version != PROTOCOL_VERSION:
            raise RemoteProtocolError(
                f"protocol version {version!r:.40} of {sender!r:.80}; ours is {PROTOCOL_VERSION}"
            )
        if not (isinstance(sender, str) and isinstance(cause, str)):
            raise RemoteProtocolError("sender or cause is not a string")
        if not 1 <= len(sender) <= MAX_SENDER_CHARS:
            raise RemoteProtocolError(
                f"sender of {len(sender)} characters; 1 to {MAX_SENDER_CHARS} expected"
            )
        for name, value in (("epoch", epoch), ("generation", generation), ("sequence", sequence)):
            is_count = isinstance(value, int) and not isinstance(value, bool)
            if not is_count or not 0 <= value <= MAX_COUNT:
                raise RemoteProtocolError(f"{name} of {sender!r} is not a count: {value!r:.40}")
        adapter = self._adapters.get(tag) if isinstance(tag, str) else None
        if adapter is None:
            raise RemoteProtocolError(f"unknown message {tag!r:.60} from {sender!r}")
        if not isinstance(body, dict):
            raise RemoteProtocolError(f"body of {tag} from {sender!r} is not a map")
        try:
            message = adapter.validate_python(body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise RemoteProtocolError(
                f"{tag} from {sender!r}: {where:.120}: {first['msg']:.200}"
            ) from error
        envelope = Envelope(sender, Epoch(epoch), generation, sequence, cause)
        return Received(envelope, message, tuple(frames[1:]))


def _map_of(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:  # Any: validated afterwards
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a map names a field twice")
    return fields


def _unpack_header(frame: bytes) -> list[Any]:  # Any: the header's elements are checked one by one
    if len(frame) > MAX_HEADER_BYTES:
        raise RemoteProtocolError(f"header of {len(frame)} bytes is over {MAX_HEADER_BYTES}")
    try:
        header = msgpack.unpackb(
            frame,
            raw=False,
            use_list=False,
            strict_map_key=False,
            object_pairs_hook=_map_of,
            max_str_len=65536,
            max_bin_len=MAX_HEADER_BYTES,
            max_array_len=1_000_000,
            max_map_len=200_000,
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise RemoteProtocolError(f"header is not MessagePack: {error}") from error
    if not isinstance(header, tuple) or len(header) != 8:
        raise RemoteProtocolError("header is not an array of 8")
    return list(header)
