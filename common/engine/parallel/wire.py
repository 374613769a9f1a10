"""Messages on the stream between rank 0 and another rank.

A message is its frames (see ``common.messages.codec``) behind their sizes::

    | number of frames, u32 | bytes of each frame, u64 ... | frame | frame | ... |

Both ends are our own processes and the socket has no name, so that nobody else can write to it.
"""

import socket
import struct
import threading
from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from common.engine.parallel.messages import ArraySpec
from common.errors import RemoteProtocolError
from common.ids import Epoch
from common.messages.codec import MAX_FRAMES, Codec, Envelope

OutT = TypeVar("OutT")
InT = TypeVar("InT")

Array = NDArray[np.generic]

ALIGNMENT = 8
MAX_FRAME_BYTES = 2**30


class Ended(Exception):  # noqa: N818 - an outcome, not an error
    """The other side has closed the stream or died."""


class Wire(Generic[OutT, InT]):
    """One end of the stream; sends ``OutT`` and receives ``InT``.

    Any thread may send, and one receives. OSError for a socket that fails (TimeoutError after
    the socket's timeout), RemoteProtocolError for what is no message.
    """

    def __init__(
        self, stream: socket.socket, outgoing: Codec[OutT], incoming: Codec[InT], sender: str
    ) -> None:
        self._stream = stream
        self._outgoing = outgoing
        self._incoming = incoming
        self._sender = sender
        self._num_sent = 0
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._stream.fileno()

    def send(self, message: OutT, payload: bytes | None = None) -> None:
        """Write one message."""
        with self._sending:
            envelope = Envelope(self._sender, Epoch(0), 0, self._num_sent, "")
            self._num_sent += 1
            frames = self._outgoing.encode(envelope, message, () if payload is None else (payload,))
            sizes = struct.pack(f"<I{len(frames)}Q", len(frames), *map(len, frames))
            self._stream.sendall(b"".join((sizes, *frames)))

    def receive(self) -> tuple[InT, memoryview]:
        """Wait for one message; return it and its payload, writable memory of its own.

        Ended when the other side is gone.
        """
        (count,) = struct.unpack("<I", self._read(4))
        if not 1 <= count <= MAX_FRAMES:
            raise RemoteProtocolError(f"{count} frames; 1 to {MAX_FRAMES} expected")
        sizes = struct.unpack(f"<{count}Q", self._read(8 * count))
        if max(sizes) > MAX_FRAME_BYTES:
            raise RemoteProtocolError(f"a frame of {max(sizes)} bytes; at most {MAX_FRAME_BYTES}")
        header, *rest = [self._read(size) for size in sizes]
        message = self._incoming.decode([bytes(header)]).message
        return message, rest[0] if rest else memoryview(b"")

    def close(self) -> None:
        """Close the socket; the other side gets ``Ended``."""
        self._stream.close()

    def _read(self, size: int) -> memoryview:
        memory = memoryview(bytearray(size))
        filled = 0
        while filled < size:
            count = self._stream.recv_into(memory[filled:])
            if count == 0:
                raise Ended
            filled += count
        return memory


def pack_arrays(arrays: Sequence[Array | None]) -> tuple[tuple[ArraySpec, ...], bytes]:
    """Return what stands in the message and its payload."""
    specs: list[ArraySpec] = []
    parts: list[bytes] = []
    for array in arrays:
        if array is None:
            specs.append(ArraySpec(dtype="", shape=()))
            continue
        specs.append(ArraySpec(dtype=array.dtype.name, shape=array.shape))
        parts.append(array.tobytes())
        parts.append(bytes(-array.nbytes % ALIGNMENT))
    return tuple(specs), b"".join(parts)


def unpack_arrays(specs: Sequence[ArraySpec], payload: memoryview) -> list[Array | None]:
    """Undo ``pack_arrays``; the arrays are views of the payload.

    RemoteProtocolError where the payload is shorter.
    """
    arrays: list[Array | None] = []
    at = 0
    for spec in specs:
        if not spec.dtype:
            arrays.append(None)
            continue
        dtype = np.dtype(spec.dtype)
        count = int(np.prod(spec.shape, dtype=np.int64))
        end = at + count * dtype.itemsize
        if end > len(payload):
            raise RemoteProtocolError(f"{len(payload)} bytes are fewer than a step's arrays have")
        arrays.append(np.frombuffer(payload[at:end], dtype).reshape(spec.shape))
        at = end + -end % ALIGNMENT
    return arrays
