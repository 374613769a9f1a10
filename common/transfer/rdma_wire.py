"""What travels on the stream beside transport ``rdma``: who may read what, and where to. Pure.

::

    decode side                                   prefill side
        | greeting as on a stream of ``tcp``  <-------->  |
        |                                                 |
        | <--------------  join: how our pool can be read |   once
        | done  --------------------------------------->  |   the decode side has taken it
        |                                                 |
        | <------  write or probe: runs, block to block   |   any number, one after another
        | ==================>  reads them                 |   if they are granted
        | moved  -------------------------------------->  |   now and then, while bytes move
        | done  --------------------------------------->  |   every byte is in the pool

``refused`` in place of ``done`` leaves everything as it was. Proofs are those of ``tcp``: a join
and a probe are proven with the pool's secret, a write with the token of its transfer.
"""

import struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from common.errors import RemoteProtocolError
from common.transfer.rdma_agent import MemoryKind, SourcePool
from common.transfer.tcp_wire import GRANT_ID_BYTES, PROOF_BYTES, FrameHeader, prove

MAGIC = b"FPRD"

JOIN = 1
WRITE = 2
PROBE = 3
"""Bytes that are read into scratch memory: for connecting and measuring."""

DONE = 1
MOVED = 2
REFUSED = 3

MAX_RUNS = 16_384
"""In one frame."""
MAX_METADATA_BYTES = 48 * 1024
"""Some hundred bytes for each adapter of the host."""
MAX_PROBE_BYTES = 256 * 1024 * 1024
RUN_BYTES = 12

Runs = NDArray[np.uint32]
"""Rows (source block, target block, number of blocks); of a probe one row (0, 0, pages)."""

_HEADER: Final = struct.Struct(f"<4sHHQ{GRANT_ID_BYTES}s")
_ANSWER: Final = struct.Struct("<4sIQ")
_SOURCE: Final = struct.Struct("<HHIQ")
_KINDS: Final = tuple(MemoryKind)
HEADER_BYTES = _HEADER.size + PROOF_BYTES
ANSWER_BYTES = _ANSWER.size
MAX_PAYLOAD_BYTES = max(MAX_RUNS * RUN_BYTES, _SOURCE.size + MAX_METADATA_BYTES)


# ---- frames --------------------------------------------------------------------------------------


def pack_frame(
    kind: int, sequence: int, payload: bytes, token: tuple[bytes, bytes], session: bytes
) -> bytes:
    """Return a frame: the source of a join, or runs.

    ``token`` is (grant id, key); ``session`` are both nonces, the decode side's first.
    """
    count = len(payload) if kind == JOIN else len(payload) // RUN_BYTES
    signed = _HEADER.pack(MAGIC, kind, count, sequence, token[0])
    return signed + prove(token[1], session, signed, payload) + payload


def parse_header(data: memoryview, expected_sequence: int) -> FrameHeader:
    """Read a frame's header; RemoteProtocolError for one that no peer of ours would send."""
    signed = bytes(data[: _HEADER.size])
    magic, kind, count, sequence, grant_id = _HEADER.unpack(signed)
    bounds = {
        JOIN: (_SOURCE.size + 1, _SOURCE.size + MAX_METADATA_BYTES),
        WRITE: (1, MAX_RUNS),
        PROBE: (1, 1),
    }
    if magic != MAGIC or kind not in bounds:
        raise RemoteProtocolError("its bytes are no frame")
    least, most = bounds[kind]
    if not least <= count <= most:
        raise RemoteProtocolError(f"a frame of kind {kind} and size {count}")
    if sequence != expected_sequence:
        raise RemoteProtocolError(f"frame {sequence} where {expected_sequence} is due")
    proof = bytes(data[_HEADER.size : HEADER_BYTES])
    return FrameHeader(kind, count, sequence, grant_id, proof, signed)


def payload_bytes(header: FrameHeader) -> int:
    """Return how many bytes follow a header."""
    return header.num_extents if header.kind == JOIN else header.num_extents * RUN_BYTES


def pack_runs(runs: NDArray[np.int32]) -> bytes:
    """Return runs as a frame's payload."""
    return runs.astype("<u4").tobytes()


def parse_runs(payload: bytes, num_sources: int, num_targets: int) -> Runs:
    """Return a write's runs; RemoteProtocolError for one that is outside of either pool."""
    runs = np.frombuffer(payload, dtype="<u4").astype(np.uint32).reshape(-1, 3)
    lengths = runs[:, 2].astype(np.int64)
    for name, column, bound in (("source", 0, num_sources), ("target", 1, num_targets)):
        if not (lengths > 0).all() or int((runs[:, column] + lengths).max()) > bound:
            raise RemoteProtocolError(f"a run outside of the {bound} {name} blocks")
    return runs


# ---- join ----------------------------------------------------------------------------------------


def pack_source(source: SourcePool) -> bytes:
    """Return the payload of a join."""
    fixed = _SOURCE.pack(
        _KINDS.index(source.kind), source.device, source.num_blocks, source.address
    )
    return fixed + source.metadata


def parse_source(payload: bytes) -> SourcePool:
    """Return a join's payload; RemoteProtocolError for memory of an unknown kind."""
    kind, device, num_blocks, address = _SOURCE.unpack_from(payload)
    if kind >= len(_KINDS):
        raise RemoteProtocolError(f"memory of kind {kind}")
    return SourcePool(_KINDS[kind], device, address, num_blocks, payload[_SOURCE.size :])


# ---- answers -------------------------------------------------------------------------------------


def pack_answer(code: int, sequence: int) -> bytes:
    """Return the decode side's word on a frame."""
    return _ANSWER.pack(MAGIC, code, sequence)


def parse_answer(data: bytes, sequence: int) -> int:
    """Return the code of the answer to that frame; RemoteProtocolError for anything else."""
    magic, code, answered = _ANSWER.unpack(data)
    if magic != MAGIC or answered != sequence or code not in (DONE, MOVED, REFUSED):
        raise RemoteProtocolError(f"no answer to frame {sequence}")
    return int(code)
