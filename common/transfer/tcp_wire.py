"""What travels on a data stream of transport ``tcp``. Pure.

::

    decode side                                   prefill side
        | challenge: version, nonce  ------------------>  |   at once after the connect
        | <-----------  hello: version, nonce, proof      |   the pool's secret is known
        | welcome: proof  ------------------------------> |   so it is here
        |                                                 |
        | <-----------  frame: header, extents, bytes     |   any number, one after another
        | receipt: sequence  ---------------------------> |   every byte is in the pool

Secrets never travel here: the pool's secret comes with the pairing and a transfer's token with its
reservation, both on the handoff channel. A proof is an HMAC-SHA256, cut to 16 bytes, over what the
frame says and the nonces of both sides, so that no recorded frame can be used again. The bytes
themselves are neither hidden nor proven here; their checksums go over the handoff channel.

An extent names a block, a page inside of it (4096 bytes each) and a number of pages, which may run
on into the blocks that follow.
"""

import hmac
import secrets
import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from common.errors import RemoteProtocolError
from common.kv.layout import PAGE_BYTES

VERSION = 1
MAGIC = b"FPKV"
NONCE_BYTES = 16
PROOF_BYTES = 16
SECRET_BYTES = 32
GRANT_ID_BYTES = 16
TOKEN_BYTES = GRANT_ID_BYTES + SECRET_BYTES
"""A transfer's token: a name that frames carry, then the key of their proofs."""

WRITE = 1
PROBE = 2
"""Bytes that are read and dropped: for warming a stream and measuring it."""

MAX_EXTENTS = 512
"""In one frame; one system call takes up to 1 024 pieces of memory."""
MAX_PROBE_PAGES = 64 * 1024 * 1024 // PAGE_BYTES
NO_GRANT = bytes(GRANT_ID_BYTES)

_GREETING: Final = struct.Struct(f"<4sHH{NONCE_BYTES}s")
_HEADER: Final = struct.Struct(f"<4sHHQ{GRANT_ID_BYTES}s")
_RECEIPT: Final = struct.Struct("<4sIQ")

CHALLENGE_BYTES = _GREETING.size
HELLO_BYTES = _GREETING.size + PROOF_BYTES
WELCOME_BYTES = PROOF_BYTES
HEADER_BYTES = _HEADER.size + PROOF_BYTES
EXTENT_BYTES = 12
RECEIPT_BYTES = _RECEIPT.size

Extents = NDArray[np.uint32]
"""Rows (block, first page, number of pages)."""


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """What a frame says about itself; ``proof`` covers it together with the extents."""

    kind: int
    num_extents: int
    sequence: int
    grant_id: bytes
    proof: bytes
    signed: bytes

    @property
    def extents_bytes(self) -> int:
        """Length of the extents that follow."""
        return self.num_extents * EXTENT_BYTES


def new_token() -> bytes:
    """Return a fresh transfer token."""
    return secrets.token_bytes(TOKEN_BYTES)


def new_secret() -> bytes:
    """Return a fresh pool secret."""
    return secrets.token_bytes(SECRET_BYTES)


def new_nonce() -> bytes:
    """Return a fresh nonce."""
    return secrets.token_bytes(NONCE_BYTES)


def prove(key: bytes, *parts: bytes) -> bytes:
    """Return the proof that the holder of ``key`` made these parts, in this order."""
    return hmac.digest(key, b"".join(parts), "sha256")[:PROOF_BYTES]


def is_proven(proof: bytes, key: bytes, *parts: bytes) -> bool:
    """Tell in constant time whether ``proof`` is right."""
    return hmac.compare_digest(proof, prove(key, *parts))


# ---- greeting ------------------------------------------------------------------------------------


def pack_challenge(nonce: bytes) -> bytes:
    """Return what the decode side says first."""
    return _GREETING.pack(MAGIC, VERSION, 0, nonce)


def pack_hello(secret: bytes, server_nonce: bytes, nonce: bytes) -> bytes:
    """Return the prefill side's answer to a challenge."""
    return _GREETING.pack(MAGIC, VERSION, 0, nonce) + prove(secret, b"hello", server_nonce, nonce)


def pack_welcome(secret: bytes, server_nonce: bytes, nonce: bytes) -> bytes:
    """Return the decode side's answer to a right hello."""
    return prove(secret, b"welcome", server_nonce, nonce)


def parse_challenge(data: bytes) -> bytes:
    """Return the decode side's nonce; RemoteProtocolError for another protocol or version."""
    magic, version, _, nonce = _GREETING.unpack(data)
    if magic != MAGIC:
        raise RemoteProtocolError("it does not speak the data protocol")
    if version != VERSION:
        raise RemoteProtocolError(
            f"it speaks version {version} of the data protocol, not {VERSION}"
        )
    return bytes(nonce)


def parse_hello(secret: bytes, server_nonce: bytes, data: bytes) -> bytes:
    """Return the prefill side's nonce; RemoteProtocolError when it does not know the secret."""
    nonce = parse_challenge(data[: _GREETING.size])
    if not is_proven(data[_GREETING.size :], secret, b"hello", server_nonce, nonce):
        raise RemoteProtocolError("it does not know the pool's secret")
    return nonce


# ---- frames --------------------------------------------------------------------------------------


def pack_frame(
    kind: int, sequence: int, extents: Extents, token: tuple[bytes, bytes], session: bytes
) -> bytes:
    """Return header and extents of a frame.

    ``token`` is (grant id, key); ``session`` are both nonces, the decode side's first.
    """
    signed = _HEADER.pack(MAGIC, kind, len(extents), sequence, token[0])
    rows = extents.astype("<u4").tobytes()
    return signed + prove(token[1], session, signed, rows) + rows


def parse_header(data: memoryview, expected_sequence: int) -> FrameHeader:
    """Read a frame's header; RemoteProtocolError for one that no peer of ours would send."""
    signed = bytes(data[: _HEADER.size])
    magic, kind, num_extents, sequence, grant_id = _HEADER.unpack(signed)
    if magic != MAGIC or kind not in (WRITE, PROBE):
        raise RemoteProtocolError("its bytes are no frame")
    if not 1 <= num_extents <= (MAX_EXTENTS if kind == WRITE else 1):
        raise RemoteProtocolError(f"a frame of {num_extents} extents")
    if sequence != expected_sequence:
        raise RemoteProtocolError(f"frame {sequence} where {expected_sequence} is due")
    proof = bytes(data[_HEADER.size : HEADER_BYTES])
    return FrameHeader(kind, num_extents, sequence, grant_id, proof, signed)


def parse_extents(data: memoryview) -> Extents:
    """Return the extents as rows, copied."""
    return np.frombuffer(data, dtype="<u4").astype(np.uint32).reshape(-1, 3)


def pack_receipt(sequence: int) -> bytes:
    """Return the word that every byte of a frame is in the pool."""
    return _RECEIPT.pack(MAGIC, 0, sequence)


def check_receipt(data: bytes, sequence: int) -> None:
    """RemoteProtocolError unless this is the receipt of frame ``sequence``."""
    if data != pack_receipt(sequence):
        raise RemoteProtocolError(f"no receipt for frame {sequence}")
