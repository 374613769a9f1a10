"""The folder of a ``file:`` store, shared by every process and host that mounts it.

::

    DIR/ledger                            bytes stored and reserved; its lock is the folder's lock
    DIR/writers/<writer>/lock             held by a living process that writes
    DIR/writers/<writer>/<number>         blocks that are being written
    DIR/<identity>/<hh>/<hash>-<before>   stored blocks, in a folder by their hash's first byte

``identity`` stands for model, layout, dtype and tenant (``header.py``), ``before`` for the block
before, zeros where there is none. A listing of names is all that an index needs. Everything else in
the folder is left alone.
"""

import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from common.errors import ConfigError
from common.storage.header import NO_HASH
from common.storage.tree import Key

DIGEST_BYTES = 8
WRITERS = "writers"
_IDENTITY = re.compile(r"[0-9a-f]{16}")
_SHARD = re.compile(r"[0-9a-f]{2}")
_BLOCK = re.compile(r"([0-9a-f]{32})-([0-9a-f]{32})")


SHARD_KEY_BYTES = DIGEST_BYTES + 1
"""Keys that begin with the same bytes lie in the same folder."""


def key_of(identity: bytes, block_hash: bytes) -> Key:
    """Return a block's key in the tree of all identities."""
    return identity + block_hash


def block_path(key: Key, parent: Key | None) -> str:
    """Return where a block lies, relative to the folder."""
    block_hash = key[DIGEST_BYTES:].hex()
    before = NO_HASH if parent is None else parent[DIGEST_BYTES:]
    return f"{shard_path(key)}/{block_hash}-{before.hex()}"


def shard_path(key: Key) -> str:
    """Return the folder that a block lies in."""
    return f"{key[:DIGEST_BYTES].hex()}/{key[DIGEST_BYTES:SHARD_KEY_BYTES].hex()}"


def parse_block(shard: str, name: str) -> tuple[Key, Key | None] | None:
    """Return key and parent's key of a file in a shard's folder; None where it is none of ours."""
    match = _BLOCK.fullmatch(name)
    if match is None or not match[1].startswith(shard[-2:]):
        return None
    identity = bytes.fromhex(shard[: 2 * DIGEST_BYTES])
    before = bytes.fromhex(match[2])
    parent = None if before == NO_HASH else key_of(identity, before)
    return key_of(identity, bytes.fromhex(match[1])), parent


class StoreFolder:
    """The open folder; every name is relative to it. Methods raise OSError unless they say more."""

    def __init__(self, root: Path) -> None:
        """Open the folder, and make it where it is missing; ConfigError when that fails."""
        try:
            root.mkdir(parents=True, exist_ok=True)
            self.fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"cannot use the store's folder {root}: {error.strerror}") from error
        self.root = root
        self._shards: set[str] = set()

    def close(self) -> None:
        """Let go of the folder; a second call does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def shards(self) -> Iterator[str]:
        """Yield the folders that may hold blocks."""
        for identity in self._folders(".", _IDENTITY):
            for shard in self._folders(identity, _SHARD):
                yield f"{identity}/{shard}"

    def _folders(self, path: str, pattern: re.Pattern[str]) -> list[str]:
        try:
            with os.scandir(self.root / path) as entries:
                return [
                    entry.name
                    for entry in entries
                    if pattern.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
                ]
        except FileNotFoundError:  # somebody removed it
            return []

    def names(self, path: str) -> list[str]:
        """Return what lies in a folder; nothing where it is missing."""
        with suppress(FileNotFoundError), os.scandir(self.root / path) as entries:
            return [entry.name for entry in entries]
        return []

    def stat(self, path: str) -> os.stat_result | None:
        """Return what is known of a file; None where it is missing."""
        with suppress(FileNotFoundError):
            return os.stat(path, dir_fd=self.fd, follow_symlinks=False)
        return None

    def regular_stat(self, path: str) -> os.stat_result | None:
        """Return what is known of a file; None where it is missing or something else."""
        found = self.stat(path)
        return found if found is not None and stat.S_ISREG(found.st_mode) else None

    def make_shard(self, path: str) -> None:
        """Make a shard's folder durable, where it was not yet known to be there."""
        if path in self._shards:
            return
        identity = path.split("/", maxsplit=1)[0]
        for folder, parent in ((identity, "."), (path, identity)):
            with suppress(FileExistsError):
                os.mkdir(folder, dir_fd=self.fd)
                self.sync(parent)
        self._shards.add(path)

    def forget_shards(self) -> None:
        """Look again, the next time, which folders are there."""
        self._shards.clear()

    def sync(self, path: str) -> None:
        """Make a folder's names durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.fd)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def move(self, source: str, target: str) -> None:
        """Give a file its final name."""
        os.rename(source, target, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def remove(self, path: str) -> bool:
        """Remove a file; False where it is gone already."""
        with suppress(FileNotFoundError):
            os.unlink(path, dir_fd=self.fd)
            return True
        return False

    def set_time(self, path: str, used_ns: int) -> None:
        """Let every process know when a block was used; nothing happens where that is forbidden."""
        with suppress(OSError):
            os.utime(path, ns=(used_ns, used_ns), dir_fd=self.fd, follow_symlinks=False)


class WriterFolder:
    """A process's own folder for blocks that are being written, and the sign that it lives."""

    def __init__(self, folder: StoreFolder) -> None:
        """Make it, under the folder's lock so that nobody takes it for a dead one's. OSError."""
        self._folder = folder
        self.name = secrets.token_hex(8)
        self._path = f"{WRITERS}/{self.name}"
        with suppress(FileExistsError):
            os.mkdir(WRITERS, dir_fd=folder.fd)
        os.mkdir(self._path, dir_fd=folder.fd)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._lock_fd = os.open(f"{self._path}/lock", flags, 0o640, dir_fd=folder.fd)
        with suppress(OSError):  # a file system without locks: nobody can tell who lives
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._num_files = 0

    def is_there(self) -> bool:
        """Tell whether nobody removed the folder meanwhile. OSError."""
        return self._folder.stat(f"{self._path}/lock") is not None

    def new_path(self) -> str:
        """Return a name for a block to be written, never used before."""
        self._num_files += 1
        return f"{self._path}/{self._num_files}"

    def close(self) -> None:
        """Remove the folder; a second call does nothing."""
        if self._lock_fd < 0:
            return
        with suppress(OSError):  # what is left counts as a dead writer's
            _remove_writer(self._folder, self.name)
        os.close(self._lock_fd)
        self._lock_fd = -1


def living_writers(folder: StoreFolder, own: str) -> set[str]:
    """Return the names of all writers that live, after removing what dead ones left behind.

    The caller holds the folder's lock. Where that cannot be told, a writer counts as living.
    """
    return {name for name in folder.names(WRITERS) if name == own or not _bury(folder, name)}


def _bury(folder: StoreFolder, name: str) -> bool:
    """Remove a dead writer's folder; False where it lives or may live."""
    try:
        fd = os.open(f"{WRITERS}/{name}/lock", os.O_RDWR | os.O_CLOEXEC, dir_fd=folder.fd)
    except FileNotFoundError:
        fd = -1  # it died while it made or removed its folder, both under the folder's lock
    except OSError:
        return False
    try:
        if fd >= 0:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove_writer(folder, name)
    except OSError:
        return False
    finally:
        if fd >= 0:
            os.close(fd)
    return True


def _remove_writer(folder: StoreFolder, name: str) -> None:
    path = f"{WRITERS}/{name}"
    # The lock goes last: until then the folder is one that somebody can bury.
    for file in sorted(folder.names(path), key=lambda file: file == "lock"):
        folder.remove(f"{path}/{file}")
    os.rmdir(path, dir_fd=folder.fd)
