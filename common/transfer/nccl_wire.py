"""What travels on the stream beside transport ``nccl``: who sends how much, and where to. Pure.

::

    decode side                                   prefill side
        | greeting as on a stream of ``tcp``  <-------->  |
        |                                                 |
        | <---------------  join: name of a communicator  |
        | go  ----------------------------------------->  |   both join it
        | done  --------------------------------------->  |   the decode side has joined
        |                                                 |
        | <--------------------  write or probe: extents  |   any number, one after another
        | go  ----------------------------------------->  |   they are granted
        | <=================  the bytes, from GPU to GPU  |
        | done  --------------------------------------->  |   every byte is in the pool

``refused`` in place of ``go`` leaves everything as it was. Proofs are those of ``tcp``: a join and
a probe are proven with the pool's secret, a write with the token of its transfer. Extents are those
of ``tcp`` as well. Both sides cut them into the same pieces and groups.
"""

import struct
from collections.abc import Sequence
from typing import Final

from common.errors import RemoteProtocolError
from common.transfer.nccl_driver import UNIQUE_ID_BYTES, Piece
from common.transfer.tcp_wire import (
    EXTENT_BYTES,
    GRANT_ID_BYTES,
    PROOF_BYTES,
    FrameHeader,
    prove,
)

MAGIC = b"FPNC"

JOIN = 1
WRITE = 2
PROBE = 3
"""Bytes that are received into scratch memory: for connecting and measuring."""

GO = 1
DONE = 2
REFUSED = 3

MAX_EXTENTS = 16_384
"""In one frame."""
MAX_PROBES = 16
MAX_PROBE_BYTES = 64 * 1024 * 1024
"""Of each extent of a probe."""
MAX_PIECE_BYTES = 512 * 1024 * 1024
"""A piece is the least progress that is seen, so a slow link must move one within the stall."""
GROUP_BYTES = 32 * 1024 * 1024
"""A group is closed with so many bytes: large pieces are fastest one by one, small ones grouped."""
MAX_GROUP_PIECES = 256

_HEADER: Final = struct.Struct(f"<4sHHQ{GRANT_ID_BYTES}s")
_ANSWER: Final = struct.Struct("<4sIQ")
HEADER_BYTES = _HEADER.size + PROOF_BYTES
ANSWER_BYTES = _ANSWER.size


def pack_frame(
    kind: int, sequence: int, payload: bytes, token: tuple[bytes, bytes], session: bytes
) -> bytes:
    """Return a frame: the unique id of a join, or extents as ``tcp`` packs them.

    ``token`` is (grant id, key); ``session`` are both nonces, the decode side's first.
    """
    num_extents = 0 if kind == JOIN else len(payload) // EXTENT_BYTES
    signed = _HEADER.pack(MAGIC, kind, num_extents, sequence, token[0])
    return signed + prove(token[1], session, signed, payload) + payload


def parse_header(data: memoryview, expected_sequence: int) -> FrameHeader:
    """Read a frame's header; RemoteProtocolError for one that no peer of ours would send."""
    signed = bytes(data[: _HEADER.size])
    magic, kind, num_extents, sequence, grant_id = _HEADER.unpack(signed)
    bounds = {JOIN: (0, 0), WRITE: (1, MAX_EXTENTS), PROBE: (1, MAX_PROBES)}
    if magic != MAGIC or kind not in bounds:
        raise RemoteProtocolError("its bytes are no frame")
    least, most = bounds[kind]
    if not least <= num_extents <= most:
        raise RemoteProtocolError(f"a frame of {num_extents} extents")
    if sequence != expected_sequence:
        raise RemoteProtocolError(f"frame {sequence} where {expected_sequence} is due")
    proof = bytes(data[_HEADER.size : HEADER_BYTES])
    return FrameHeader(kind, num_extents, sequence, grant_id, proof, signed)


def payload_bytes(header: FrameHeader) -> int:
    """Return how many bytes follow a header."""
    return UNIQUE_ID_BYTES if header.kind == JOIN else header.extents_bytes


def pack_answer(code: int, sequence: int) -> bytes:
    """Return the decode side's word on a frame."""
    return _ANSWER.pack(MAGIC, code, sequence)


def parse_answer(data: bytes, sequence: int) -> int:
    """Return the code of the answer to that frame; RemoteProtocolError for anything else."""
    magic, code, answered = _ANSWER.unpack(data)
    if magic != MAGIC or answered != sequence or code not in (GO, DONE, REFUSED):
        raise RemoteProtocolError(f"no answer to frame {sequence}")
    return int(code)


def to_groups(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Cut pieces into groups, each for one call, by their lengths alone."""
    groups: list[list[Piece]] = []
    open_bytes = GROUP_BYTES
    for start, length in pieces:
        for offset in range(0, length, MAX_PIECE_BYTES):
            num_bytes = min(MAX_PIECE_BYTES, length - offset)
            if open_bytes >= GROUP_BYTES or len(groups[-1]) == MAX_GROUP_PIECES:
                groups.append([])
                open_bytes = 0
            groups[-1].append((start + offset, num_bytes))
            open_bytes += num_bytes
    return groups
