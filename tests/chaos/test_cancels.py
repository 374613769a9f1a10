"""Clients that leave at every phase, beside others that must not feel it."""

import asyncio
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from time import monotonic

import pytest

from common.telemetry.story import LogEntry, read_log_folder
from tests.support.cluster import Cluster, ClusterOptions, running_cluster
from tests.support.disturbers import LONG_TOKENS, PATH, Disturbers, run_lanes
from tests.support.prompts import Encode
from tests.support.undisturbed import Undisturbed, greedy_bodies, run_quietly

pytestmark = [pytest.mark.chaos, pytest.mark.e2e]

NUM_LONG, NUM_SOAK_LONG = 8, 36
NUM_CROWDED, MAX_CROWDED = 66, 264
"""So many clients come at least, and in the soak the most at once; as long as no cancel has met one
of the phases, as many come again, up to the most."""
PHASES = {"waiting", "prefilling", "sending", "decoding"}
NUM_CROWDED_LANES = 14
"""Clients at a time: their prompts are more than the pools hold, so most of them queue."""
NUM_LONG_LANES = 2
NUM_QUIET_LANES = 2
BLOCK_SIZE = 16
NUM_BLOCKS = 40
TOKEN_BYTES = 30 * 2 * 3 * 64 * 4
QUIET_LENGTHS = (9, 40, 77, 150)

OPTIONS = {
    "max_num_batched_tokens": 32,  # prompts take many steps: cancels meet chunks in flight
    "max_num_seqs": 32,
}


async def _repeat(cluster: Cluster, quiet: list[Undisturbed], is_over: asyncio.Event) -> list[str]:
    """Ask for the undisturbed ones until the disturbers are through; return what differs."""
    wrong: list[str | None] = []
    while not is_over.is_set() or len(wrong) < len(quiet):
        request = quiet[len(wrong) % len(quiet)]
        wrong.append(await request.ask_again(cluster.ask, is_stream=len(wrong) % 2 == 0))
    return [difference for difference in wrong if difference is not None]


def phases_of_cancels(entries: Iterable[LogEntry]) -> Counter[str]:
    """Count in which phase each cancelled request met its first cancel on a worker."""
    phases: dict[object, str] = {}
    cancelled: dict[object, str] = {}
    steps = {
        ("prefill-0", "request_received"): "waiting",
        ("prefill-0", "prefill_started"): "prefilling",
        ("prefill-0", "prefill_finished"): "sending",
        ("decode-0", "handoff_accepted"): "decoding",
    }
    for entry in entries:
        request = entry.fact("request_id")
        phases[request] = steps.get((entry.process, entry.event), phases.get(request, "unknown"))
        if entry.event == "cancel_received" and entry.fact("choice") is None:
            cancelled.setdefault(request, phases[request])
    return Counter(cancelled.values())


async def test_cancels_at_every_phase_leak_nothing_and_disturb_nobody(
    model_folder: Path, encode: Encode
) -> None:
    await _cancel(model_folder, encode, NUM_CROWDED, NUM_LONG)


@pytest.mark.soak
async def test_300_cancels_at_every_phase_leak_nothing_and_disturb_nobody(
    model_folder: Path, encode: Encode
) -> None:
    await _cancel(model_folder, encode, MAX_CROWDED, NUM_SOAK_LONG)


async def _cancel(model_folder: Path, encode: Encode, num_crowded: int, num_long: int) -> None:
    options = ClusterOptions(
        model_folder,
        kv_bytes=NUM_BLOCKS * BLOCK_SIZE * TOKEN_BYTES,
        block_size=BLOCK_SIZE,
        settings=OPTIONS,
    )
    async with running_cluster(options) as cluster:
        quiet = await run_quietly(
            cluster.ask, greedy_bodies(encode, QUIET_LENGTHS, 12, first=50_000)
        )
        disturbers = Disturbers(cluster, encode)
        started = monotonic()
        await cluster.ask(PATH, greedy_bodies(encode, (LONG_TOKENS,), 1, first=90_000)[0])
        await run_lanes(disturbers.long(num_long, monotonic() - started), NUM_LONG_LANES)
        is_over = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            beside = [
                group.create_task(_repeat(cluster, quiet[lane::NUM_QUIET_LANES], is_over))
                for lane in range(NUM_QUIET_LANES)
            ]
            for first in range(0, MAX_CROWDED, num_crowded):
                jobs = disturbers.crowded(range(first, first + num_crowded))
                await run_lanes(jobs, NUM_CROWDED_LANES)
                num_come = num_long + first + num_crowded
                if set(phases_of_cancels(read_log_folder(cluster.log_dir))) >= PHASES:
                    break
            is_over.set()

        assert [task.result() for task in beside] == [[]] * NUM_QUIET_LANES
        assert disturbers.ends.total() == num_come
        for name, counts in (await cluster.wait_idle()).items():
            assert (counts.referenced, counts.in_transfer) == (0, 0), name
            assert counts.total == NUM_BLOCKS == counts.free + counts.cached, name
        entries = read_log_folder(cluster.log_dir)
        phases = phases_of_cancels(entries)
        assert set(phases) >= PHASES, phases
        assert any(entry.event == "reserve_refused" for entry in entries)
        assert [entry for entry in entries if entry.level in ("error", "critical")] == []
