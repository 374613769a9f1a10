"""The first bytes of a stored block: whose it is, and which.

Little-endian, texts padded with zeros::

    0    magic, 8 bytes          | 8    format version, u32   | 12   codec, u32: 0 none, 1 fp8
    16   payload bytes, u64      | 24   model fingerprint, 32 | 56   layout fingerprint, 32
    88   dtype, 16               | 104  tenant, 16            | 120  own hash, 16
    136  hash of the block before, 16; zeros where there is none

``native/include/flowpath/storage/sealed_file.hpp`` says where a file has its checksums. The tenant
is a digest of its salt, which may be a secret.
"""

import hashlib
import struct

from common.errors import ConfigError
from common.kv.prefix_cache import HASH_BYTES
from common.storage.interface import NO_CODEC, StoreIdentity

MAGIC = b"FLOWPKVB"
VERSION = 1
CODECS = {NO_CODEC: 0, "fp8": 1}
NO_HASH = bytes(HASH_BYTES)
_PREFIX = struct.Struct("<8sIIQ32s32s16s16s")
HEADER_BYTES = _PREFIX.size + 2 * HASH_BYTES


class HeaderCodec:
    """Makes the headers of one identity; ConfigError where a field does not fit."""

    def __init__(self, identity: StoreIdentity) -> None:
        texts = {
            "model fingerprint": (identity.model_fingerprint, 32),
            "layout fingerprint": (identity.layout_fingerprint, 32),
            "dtype": (identity.dtype, 16),
        }
        for name, (text, size) in texts.items():
            if not text or not text.isascii() or len(text) > size:
                raise ConfigError(f"a store's {name} has 1 to {size} ASCII characters: {text!r}")
        if identity.codec not in CODECS:
            raise ConfigError(f"there is no store codec {identity.codec!r}")
        self._prefix = _PREFIX.pack(
            MAGIC,
            VERSION,
            CODECS[identity.codec],
            identity.block_bytes,
            identity.model_fingerprint.encode(),
            identity.layout_fingerprint.encode(),
            identity.dtype.encode(),
            hashlib.blake2b(identity.tenant_salt.encode(), digest_size=16).digest(),
        )

    def digest(self) -> bytes:
        """Return 8 bytes that stand for the identity (and the format's version)."""
        return hashlib.blake2b(self._prefix, digest_size=8).digest()

    def pack(self, block_hash: bytes, previous: bytes | None) -> bytes:
        """Return the header of a block; ValueError where a hash is none."""
        before = NO_HASH if previous is None else previous
        if len(block_hash) != HASH_BYTES or len(before) != HASH_BYTES:
            raise ValueError(f"a block's hash has {HASH_BYTES} bytes")
        return self._prefix + block_hash + before
