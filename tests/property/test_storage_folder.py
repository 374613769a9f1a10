"""One store, or two, over one folder, beside what was ever offered to them.

Whatever they do by turns: a block that is read has its own bytes, the folder is within its bound,
and no block is without the one before it, unless somebody deleted that.
"""

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from common.storage.file_store import FileStore
from tests.support.stored_blocks import (
    FILE_BYTES,
    chain,
    files_of,
    folder_bytes,
    open_file_store,
    read_chain,
    store_chain,
)

NUM_BLOCKS = 7
MEMORY = Path("/dev/shm")

sides = st.integers(0, 1)
names = st.sampled_from("abc")
lengths = st.integers(1, 5)


class FolderMachine(RuleBasedStateMachine):
    num_stores = 2

    def __init__(self) -> None:
        super().__init__()
        # In memory where there is such a place: every write is synced.
        self.folder = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
        self.stores = [self.opened() for _ in range(self.num_stores)]
        self.deleted: set[str] = set()

    def opened(self) -> FileStore:
        return open_file_store(self.folder, NUM_BLOCKS, num_queued=8)

    @rule(side=sides, name=names, length=lengths)
    def write(self, side: int, name: str, length: int) -> None:
        store = self.stores[side % self.num_stores]
        # A store may take a block for stored that others removed, until it reads it.
        for _ in range(2):
            store_chain(store, chain(name, length))
            hits = read_chain(store, chain(name, length))
        assert hits[0], "a first block found no room"

    @rule(side=sides, name=names, length=lengths)
    def read(self, side: int, name: str, length: int) -> None:
        store = self.stores[side % self.num_stores]
        hits = read_chain(store, chain(name, length))
        num_found = [*hits, False].index(False)
        assert store.longest_prefix(chain(name, length)) == num_found

    @rule(side=sides)
    def restart(self, side: int) -> None:
        side %= self.num_stores
        self.stores[side].close()
        self.stores[side] = self.opened()
        stats = self.stores[side].stats()
        assert (stats.num_blocks, stats.stored_bytes) == (
            len(files_of(self.folder)),
            folder_bytes(self.folder),
        )

    @rule(number=st.integers(0, 6))
    def somebody_deletes(self, number: int) -> None:
        files = files_of(self.folder)
        if number < len(files):
            files[number].unlink()
            self.deleted.add(files[number].name[:32])

    @invariant()
    def the_bound_holds(self) -> None:
        assert folder_bytes(self.folder) <= NUM_BLOCKS * FILE_BYTES

    @invariant()
    def no_block_lacks_its_parent(self) -> None:
        stored = {path.name[:32]: path.name[33:] for path in files_of(self.folder)}
        for own, before in stored.items():
            assert before in stored or before == "0" * 32 or before in self.deleted, own
        self.deleted -= stored.keys()

    def teardown(self) -> None:
        for store in self.stores:
            store.close()
        shutil.rmtree(self.folder)


class AloneMachine(FolderMachine):
    num_stores = 1


few = settings(max_examples=30, stateful_step_count=25, deadline=None, derandomize=True)

TestAlone = AloneMachine.TestCase
TestAlone.settings = few

TestFolder = FolderMachine.TestCase
TestFolder.settings = few
