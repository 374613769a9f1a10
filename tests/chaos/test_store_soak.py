"""Minutes of load on a store that is far too small, while files are harmed and workers killed."""

import asyncio
import fcntl
import os
import random
from collections import Counter
from contextlib import suppress
from pathlib import Path
from time import monotonic

import pytest

from common.telemetry.story import read_log_folder
from tests.chaos.test_kills import BLOCK_BYTES, SETTINGS
from tests.support.kills import Killer, Load
from tests.support.prompts import Encode
from tests.support.served import client_of, serving
from tests.support.stored_blocks import PAGE_BYTES, files_of, folder_bytes
from tests.support.undisturbed import greedy_bodies, run_quietly

pytestmark = [pytest.mark.chaos, pytest.mark.e2e, pytest.mark.soak, pytest.mark.timeout(1800)]

SOAK_SECONDS = float(os.environ.get("FLOWPATH_TEST_SOAK_SECONDS", "600"))
NUM_STORED_BLOCKS = 150
CAPACITY = NUM_STORED_BLOCKS * (BLOCK_BYTES + PAGE_BYTES)
LENGTHS = tuple(range(20, 420, 20))
"""Their blocks are more than the pools' and the store's together."""
MAX_TOKENS = 16
NUM_LANES = 4
LOOK_SECONDS = 0.05
HARM_SECONDS = 0.7
KILL_SECONDS = 45.0
SEED = 11


def _locked_bytes(folder: Path) -> int:
    """Return the folder's bytes at one moment: nothing is named or evicted while they are added."""
    with (folder / "ledger").open("rb") as ledger:
        fcntl.flock(ledger, fcntl.LOCK_EX)
        return folder_bytes(folder)


class Harm:
    """Flips bytes of stored blocks, cuts and deletes them."""

    def __init__(self, folder: Path) -> None:
        self.done: Counter[str] = Counter()
        self._folder = folder
        self._random = random.Random(SEED)

    def do_one(self) -> None:
        """Harm one file, if there is one; the store may evict it meanwhile."""
        files = files_of(self._folder)
        if not files:
            return
        path = self._random.choice(files)
        kind = self._random.choice(("flip", "cut", "delete"))
        with suppress(FileNotFoundError):
            if kind == "delete":
                path.unlink()
            elif kind == "cut":
                os.truncate(path, self._random.randrange(path.stat().st_size))
            else:
                with path.open("r+b") as file:
                    file.seek(self._random.randrange(max(1, path.stat().st_size)))
                    byte = file.read(1)
                    file.seek(-len(byte), os.SEEK_CUR)
                    file.write(bytes(b ^ 1 for b in byte))
            self.done[kind] += 1


async def test_a_small_store_keeps_its_bound_and_no_answer_is_wrong(
    model_folder: Path, encode: Encode, tmp_path: Path
) -> None:
    folder = tmp_path / "store"
    url = f"file:{folder}?capacity={CAPACITY}"
    settings = {**SETTINGS, "model": str(model_folder), "store": url, "store_load": "always"}
    harm, largest, num_looks = Harm(folder), 0, 0
    async with serving(settings) as served, client_of(served) as client:
        bodies = greedy_bodies(encode, LENGTHS, MAX_TOKENS, first=90_000)
        quiet = await run_quietly(client.ask, bodies)
        load, killer = Load(client, quiet), Killer(served)
        over_at = monotonic() + SOAK_SECONDS

        async def watch() -> None:
            nonlocal largest, num_looks
            while not load.is_over:
                largest = max(largest, await asyncio.to_thread(_locked_bytes, folder))
                num_looks += 1
                await asyncio.sleep(LOOK_SECONDS)

        async def disturb() -> None:
            while not load.is_over:
                await asyncio.to_thread(harm.do_one)
                await asyncio.sleep(HARM_SECONDS)

        async with asyncio.TaskGroup() as group:
            for place in range(NUM_LANES):
                group.create_task(load.lane(place))
            group.create_task(watch())
            group.create_task(disturb())
            while monotonic() < over_at:
                await asyncio.sleep(min(KILL_SECONDS, max(0.0, over_at - monotonic())))
                await killer.kill_one()
                await load.completes_one()
            load.is_over = True
        entries = read_log_folder(served.settings.log_dir)
    loads = [e for e in entries if e.event == "prefix_loaded" and e.fact("num_tokens")]
    damaged = [e for e in entries if e.fact("kind") == "damaged"]
    print(
        f"{SOAK_SECONDS:g} s: {load.num_completed} answers, {len(loads)} loads, "
        f"{killer.num_kills} kills, harm {dict(harm.done)}, told of {len(damaged)} times; "
        f"at most {largest / CAPACITY:.3f} of the bound in {num_looks} looks"
    )
    assert load.wrong == []
    assert load.failures == []
    assert largest <= CAPACITY
    assert largest > CAPACITY // 2, "the store was hardly used"
    assert len(loads) > SOAK_SECONDS / 10, "almost nothing was loaded"
    assert min(harm.done[kind] for kind in ("flip", "cut", "delete")) > 0
    assert damaged, "no harm met a read"
