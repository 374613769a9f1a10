"""Raw frames: token ids and block ids as int32, checksums as uint64, all little-endian."""

from collections.abc import Sequence

import numpy as np

from common.errors import RemoteProtocolError

MAX_TOKEN_ID = 2**31 - 1
"""Bound of token ids on the wire, which it excludes; the engine knows its vocabulary."""


def pack_ids(ids: Sequence[int]) -> bytes:
    """Return ids as little-endian int32."""
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(payload: tuple[bytes, ...], count: int, bound: int) -> list[int]:
    """Read the one frame of ``count`` ids in ``0 .. bound - 1``.

    Raises RemoteProtocolError for anything else.
    """
    ids = _one_frame(payload, count, "<i4")
    if count and not (int(ids.min()) >= 0 and int(ids.max()) < bound):
        raise RemoteProtocolError(f"an id is outside 0 .. {bound - 1}")
    found: list[int] = ids.tolist()
    return found


def unpack_prompt(payload: tuple[bytes, ...], count: int, num_drawn: int) -> list[int]:
    """Read a prompt of ``count`` token ids, of which the last ``num_drawn`` are outputs.

    Raises RemoteProtocolError for anything else, and where nothing is left of the prompt itself.
    """
    if num_drawn >= count:
        raise RemoteProtocolError(f"{num_drawn} of a prompt's {count} tokens are outputs")
    return unpack_ids(payload, count, MAX_TOKEN_ID)


def pack_checksums(checksums: Sequence[int]) -> bytes:
    """Return checksums as little-endian uint64."""
    return np.asarray(checksums, dtype="<u8").tobytes()


def unpack_checksums(payload: tuple[bytes, ...], count: int) -> tuple[int, ...]:
    """Read the one frame of ``count`` checksums. Raises RemoteProtocolError for anything else."""
    return tuple(int(c) for c in _one_frame(payload, count, "<u8").tolist())


def _one_frame(
    payload: tuple[bytes, ...], count: int, dtype: str
) -> "np.ndarray[tuple[int], np.dtype[np.generic]]":
    expected = count * np.dtype(dtype).itemsize
    if len(payload) != 1 or len(payload[0]) != expected:
        sizes = [len(frame) for frame in payload]
        raise RemoteProtocolError(f"payload of {sizes} bytes; one frame of {expected} expected")
    return np.frombuffer(payload[0], dtype=dtype)
