"""Puts blocks into the folder of a ``file:`` store, and makes room for them.

A batch goes through six steps: leave out what is stored already and what nobody could find; reserve
room under the folder's lock, evicting while there is none; write and sync the files under names of
their own; under the lock, rename each whose parent is still there; sync the folders; index. So
whatever is found is whole and durable, and a crash at any point leaves whole blocks and files that
the next writer removes.
"""

import errno
import os
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass

import flowpath_native

from common.storage.folder import (
    StoreFolder,
    WriterFolder,
    block_path,
    key_of,
    living_writers,
    shard_path,
)
from common.storage.folder_index import FolderIndex
from common.storage.interface import Memory, StoreStats
from common.storage.ledger import Entries, FolderBusyError, Ledger
from common.storage.tally import Tally
from common.storage.tree import Key
from common.storage.troubles import Troubles
from common.storage.write_behind import PendingBlock

LOCK_SECONDS = 5.0
MAX_BATCH = 16
_MAX_EVICTED = 4096
_SPARE_SHARE = 50
"""An eviction frees a fiftieth of the capacity beyond the need, so that most writes need none."""


@dataclass(slots=True)
class _File:
    """A block on its way to the disk; ``path`` is where its bytes are, "" for nowhere."""

    key: Key
    parent: Key | None
    offset: int
    path: str = ""
    is_counted: bool = False


class FolderWriter:
    """One process's. After it was made, one thread uses it."""

    def __init__(
        self,
        folder: StoreFolder,
        index: FolderIndex,
        files: flowpath_native.BlockFiles,
        tally: Tally,
        troubles: Troubles,
        *,
        capacity_bytes: int,
    ) -> None:
        """Enter the folder as a writer and count what it holds; OSError, FolderBusyError."""
        self._folder = folder
        self._index = index
        self._files = files
        self._tally = tally
        self._troubles = troubles
        self._capacity_bytes = capacity_bytes
        self._ledger = Ledger(folder)
        try:
            with self._ledger.locked(LOCK_SECONDS) as entries:
                self._writer = WriterFolder(folder)
                try:
                    self._count(entries)
                except BaseException:
                    self._writer.close()
                    raise
        except BaseException:
            self._ledger.close()
            raise

    def write(
        self, arena: Memory, file_bytes: int, identity: bytes, blocks: Sequence[PendingBlock]
    ) -> None:
        """Write a batch of sealed files; what cannot be written is dropped and counted."""
        files: list[_File] = []
        try:
            files = self._wanted(identity, blocks)
            # A batch that is larger than the capacity is none: it goes in parts.
            step = max(1, self._capacity_bytes // file_bytes)
            for start in range(0, len(files), step):
                if not self._write(arena, file_bytes, files[start : start + step]):
                    break  # without room for these there is none for what follows them
        except FolderBusyError:
            self._troubles.note("folder_busy", folder=str(self._folder.root))
        except OSError as error:
            self._troubles.note("write_failed", folder=str(self._folder.root), reason=str(error))
            self._folder.forget_shards()  # somebody may have removed them
        self._give_up([file for file in files if not file.is_counted])

    def close(self) -> None:
        """Leave the folder; nothing may follow."""
        try:
            with self._ledger.locked(LOCK_SECONDS) as entries:
                entries.reserved.pop(self._writer.name, None)
                self._writer.close()
        except (OSError, FolderBusyError) as error:
            # What is left there is a dead writer's, and somebody will bury it.
            self._troubles.note("left_behind", folder=str(self._folder.root), reason=str(error))
        self._ledger.close()

    def _wanted(self, identity: bytes, blocks: Sequence[PendingBlock]) -> list[_File]:
        """Return what is to be written, and count the rest."""
        files: list[_File] = []
        num_known = num_orphans = 0
        keys: set[Key] = set()
        for block in blocks:
            key = key_of(identity, block.block_hash)
            parent = None if block.previous is None else key_of(identity, block.previous)
            if self._index.find(key, parent):
                num_known += 1
            elif parent is None or parent in keys or self._index.is_known(parent):
                keys.add(key)
                files.append(_File(key, parent, block.offset))
            else:
                num_orphans += 1
        self._tally.add(StoreStats(num_known=num_known, num_dropped_orphans=num_orphans))
        return files

    def _write(self, arena: Memory, file_bytes: int, files: list[_File]) -> bool:
        """Write what there is room for; False where that was not all."""
        num_files = self._reserve(files, file_bytes)
        has_room = num_files == len(files)
        if not has_room:
            self._troubles.note("no_room", folder=str(self._folder.root))
        files = files[:num_files]
        for file in files:
            file.path = self._writer.new_path()
        outcomes = self._files.write(
            [file.path for file in files], arena, [file.offset for file in files], file_bytes
        )
        written = [file for file, outcome in zip(files, outcomes, strict=True) if outcome == 0]
        failed = {outcome for outcome in outcomes if outcome != 0}
        for outcome in failed:
            reason = os.strerror(outcome)
            self._troubles.note("write_failed", folder=str(self._folder.root), reason=reason)
        for file in written:
            self._folder.make_shard(shard_path(file.key))
        is_full = not failed.isdisjoint((errno.ENOSPC, errno.EDQUOT))
        self._enter(
            written, file_bytes, num_lacking_bytes=len(files) * file_bytes if is_full else 0
        )
        return has_room

    def _reserve(self, files: list[_File], file_bytes: int) -> int:
        """Reserve room for the first of the files, and return for how many."""
        num_bytes = len(files) * file_bytes
        with self._ledger.locked(LOCK_SECONDS) as entries:
            bound = self._capacity_bytes - num_bytes
            if not self._writer.is_there():  # somebody emptied the folder
                self._writer.close()
                self._writer = WriterFolder(self._folder)
                entries.stored_bytes = None
            entries.reserved.pop(self._writer.name, None)
            if entries.stored_bytes is None or _total(entries) > bound:
                self._count(entries)
                if _total(entries) > bound:
                    num_spare = self._capacity_bytes // _SPARE_SHARE // file_bytes
                    # What the files hang from must stay, or nobody could find them.
                    kept = self._index.ancestors([file.parent for file in files if file.parent])
                    self._evict(entries, bound, num_spare * file_bytes, kept)
            # Others may write more than there is room for, or a chain be longer than the store.
            room = max(0, self._capacity_bytes - _total(entries)) // file_bytes
            num_files = min(len(files), room)
            if num_files:
                entries.reserved[self._writer.name] = num_files * file_bytes
        return num_files

    def _enter(self, files: list[_File], file_bytes: int, *, num_lacking_bytes: int) -> None:
        """Name the files, unless their parents are gone, and make the names durable."""
        named: list[_File] = []
        with self._ledger.locked(LOCK_SECONDS) as entries:
            entries.reserved.pop(self._writer.name, None)
            if entries.stored_bytes is None:
                self._count(entries)
            keys: set[Key] = set()
            for file in files:
                if self._can_enter(file, keys):
                    self._folder.move(file.path, block_path(file.key, file.parent))
                    file.path = ""
                    entries.stored_bytes = (entries.stored_bytes or 0) + file_bytes
                    keys.add(file.key)
                    named.append(file)
            if num_lacking_bytes:
                # The disk is full: the next blocks shall find what these did not.
                self._count(entries)
                self._evict(entries, _total(entries) - num_lacking_bytes, 0, frozenset())
        for path in dict.fromkeys(shard_path(file.key) for file in named):
            self._folder.sync(path)
        for file in named:
            self._index.add(file.key, file.parent, file_bytes)
            file.is_counted = True
        counts = StoreStats(num_written=len(named), written_bytes=len(named) * file_bytes)
        self._tally.add(counts)

    def _can_enter(self, file: _File, named: set[Key]) -> bool:
        """Tell whether the file is new and its parent there; count it where it is not."""
        if self._folder.stat(block_path(file.key, file.parent)) is not None:
            self._tally.add(StoreStats(num_known=1))  # another writer was faster
        elif file.parent is None or file.parent in named or self._is_there(file.parent):
            return True
        else:
            self._tally.add(StoreStats(num_dropped_orphans=1))
        file.is_counted = True
        self._remove_unnamed(file)
        return False

    def _is_there(self, key: Key) -> bool:
        path = self._index.path_of(key)
        return path is not None and self._folder.stat(path) is not None

    def _count(self, entries: Entries) -> None:
        """Bring entries and index up to date with the folder, under its lock."""
        living = living_writers(self._folder, self._writer.name)
        for name in entries.reserved.keys() - living:
            del entries.reserved[name]
        self._index.refresh()
        entries.stored_bytes = self._index.totals()[1]

    def _evict(
        self, entries: Entries, bound: int, spare_bytes: int, kept: AbstractSet[Key]
    ) -> None:
        """Remove blocks, but none of ``kept``, until all is within ``bound``.

        ``spare_bytes`` more go, where that takes not too long.
        """
        num_evicted = 0
        try:
            while _total(entries) > bound - spare_bytes * (num_evicted < _MAX_EVICTED):
                oldest = self._index.oldest()
                if oldest is None or oldest[0] in kept:
                    break
                key, path = oldest
                self._folder.remove(path)
                self._index.forget(key)
                num_evicted += 1
                entries.stored_bytes = self._index.totals()[1]
        finally:
            self._tally.add(StoreStats(num_evicted=num_evicted))

    def _give_up(self, files: list[_File]) -> None:
        for file in files:
            self._remove_unnamed(file)
        self._tally.add(StoreStats(num_write_errors=len(files)))

    def _remove_unnamed(self, file: _File) -> None:
        if file.path:
            with suppress(OSError):  # whoever counts the folder after our death removes it
                self._folder.remove(file.path)


def _total(entries: Entries) -> int:
    return (entries.stored_bytes or 0) + entries.reserved_bytes
