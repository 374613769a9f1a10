"""Workers die in the middle of streams, which go on elsewhere as if nothing had been."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Container, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from time import monotonic

import pytest
import pytest_asyncio

from common.messages.admin import StatusReport, WorkerStatus
from common.telemetry.story import LogEntry, read_log_folder
from tests.support.answers import Answer, ChoiceAnswer, Json
from tests.support.cluster import Cluster, ClusterOptions, running_cluster
from tests.support.open_stream import OpenStream
from tests.support.prompts import Encode
from tests.support.undisturbed import greedy_bodies, run_quietly

pytestmark = [pytest.mark.chaos, pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

PATH = "/v1/completions"
NUM_STREAMS = 8
NUM_KILLS = 1
BUSY_SECONDS = 5.0
"""What other processes of the machine may add to a gap; no wait for a silent worker is so short."""
NUM_SOAK_KILLS = 20
LENGTHS = {"decode": (9, 40, 77, 150), "prefill": (100, 160, 240, 120)}
"""Prompt lengths in tokens: long ones, where a prefill worker is to be met at work."""
MAX_TOKENS = 24
IS_BUSY: dict[str, Callable[[WorkerStatus], bool]] = {
    "decode": lambda worker: worker.load is not None and worker.load.num_decoding > 1,
    "prefill": lambda worker: worker.load is not None and worker.load.uncomputed_tokens > 0,
}


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill in the middle of streams; times in seconds."""

    victim: str
    num_resumed: int
    known_after: float
    recompute: float
    """The longest that a resumed prompt took until it was computed again, its queue included."""
    longest_gap: float
    """About the moment at which a stream went on elsewhere."""
    num_ties: int

    @property
    def bound(self) -> float:
        """The longest gap that is allowed where nothing else takes the machine's time."""
        return self.known_after + 1.5 * self.recompute

    def __str__(self) -> str:
        return (
            f"{self.victim}: {self.num_resumed} resumed, longest gap {self.longest_gap:.2f} s; "
            f"known after {self.known_after:.2f} s, recomputing took {self.recompute:.2f} s: "
            f"{self.known_after:.2f} + 1.5 x {self.recompute:.2f} = {self.bound:.2f} s; "
            f"{self.num_ties} ties"
        )


class Killer:
    """Kills workers of one role under streams, each time under prompts that nobody has cached."""

    def __init__(self, cluster: Cluster, encode: Encode, role: str) -> None:
        self._cluster = cluster
        self._encode = encode
        self._role = role
        self._firsts = count(100_000 + 1_000_000 * list(LENGTHS).index(role), 10_000)

    def bodies(self) -> list[Json]:
        """Return new prompts."""
        lengths = LENGTHS[self._role]
        return greedy_bodies(self._encode, lengths, MAX_TOKENS, first=next(self._firsts))

    async def kill_one(self) -> Kill:
        """Kill a busy worker under streams, and check that each ends like its quiet run."""
        bodies = self.bodies()
        streams = [OpenStream(self._cluster) for _ in range(NUM_STREAMS)]
        async with asyncio.TaskGroup() as group:
            running = [
                group.create_task(stream.run(PATH, bodies[place % len(bodies)]))
                for place, stream in enumerate(streams)
            ]
            report = await self._cluster.wait_until("a worker to kill", self._has_victim)
            victim = self._victims(report)[0].id
            killed_at, since = datetime.now(UTC), monotonic()
            await self._cluster.kill(victim)
        await self._cluster.restart(victim)
        answers = [task.result() for task in running]
        log = read_log_folder(self._cluster.log_dir)
        resumed = _resumed_after(log, killed_at)
        gaps = [
            stream.gap_at(since + resumed[answer.request_id], since)
            for stream, answer in zip(streams, answers, strict=True)
            if answer.request_id in resumed
        ]
        return Kill(
            victim,
            len(gaps),
            max(resumed.values(), default=0.0),
            max((_recompute_seconds(entry) for entry in log if _ended(entry, resumed)), default=0),
            max(gaps, default=0.0),
            await self._num_ties(bodies, answers),
        )

    async def _num_ties(self, bodies: Sequence[Json], answers: Sequence[Answer]) -> int:
        """Check that answers are those of quiet runs, and count those that parted at a tie."""
        quiet = await run_quietly(self._cluster.ask, bodies)
        pairs = [(quiet[place % len(quiet)], answer) for place, answer in enumerate(answers)]
        differences = [one.compare(answer) for one, answer in pairs]
        assert list(filter(None, differences)) == []
        return sum(one.is_tied(answer) for one, answer in pairs)

    def _has_victim(self, report: StatusReport) -> bool:
        return bool(self._victims(report))

    def _victims(self, report: StatusReport) -> list[WorkerStatus]:
        own = [worker for worker in report.workers if worker.id.startswith(self._role)]
        return [worker for worker in own if IS_BUSY[self._role](worker)]


def _resumed_after(log: Sequence[LogEntry], killed_at: datetime) -> dict[str, float]:
    """Return when each request went on elsewhere for the first time, in seconds after the kill."""
    resumed: dict[str, float] = {}
    for entry in log:
        seconds = (datetime.fromisoformat(entry.ts) - killed_at).total_seconds()
        if entry.event == "request_resumed" and seconds > 0:
            resumed.setdefault(str(entry.fact("request_id")), seconds)
    return resumed


def _ended(entry: LogEntry, requests: Container[str]) -> bool:
    return entry.event == "request_finished" and str(entry.fact("request_id")) in requests


def _recompute_seconds(finished: LogEntry) -> float:
    """Return how long a resumed request waited for its prompt to be computed, and was computed."""
    phases = json.loads(str(finished.fact("phases") or "[]"))
    names = [phase["name"] for phase in phases]
    again = phases[names.index("resume") :] if "resume" in names else []
    parts = [p["seconds"] for p in again if p["name"] in ("queue", "prefix", "prefill")]
    return float(sum(parts))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def twins(model_folder: Path) -> AsyncIterator[Cluster]:
    """Two workers of each role."""
    options = ClusterOptions(model_folder, num_prefill=2, num_decode=2)
    async with running_cluster(options) as cluster:
        yield cluster


async def _kill_some(
    cluster: Cluster, encode: Encode, role: str, num_kills: int, margin: float = 0.0
) -> None:
    killer = Killer(cluster, encode, role)
    kills = [await killer.kill_one() for _ in range(num_kills)]
    print(*kills, sep="\n")
    assert sum(kill.num_resumed for kill in kills) >= num_kills, "the kills met too few streams"
    assert [str(kill) for kill in kills if kill.longest_gap > kill.bound + margin] == []
    for name, counts in (await cluster.wait_idle()).items():
        assert (counts.referenced, counts.in_transfer) == (0, 0), name


@pytest.mark.parametrize("role", LENGTHS)
async def test_streams_of_killed_workers_end_as_if_nothing_had_been(
    twins: Cluster, encode: Encode, role: str
) -> None:
    await _kill_some(twins, encode, role, NUM_KILLS, BUSY_SECONDS)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("role", LENGTHS)
async def test_streams_of_20_killed_workers_end_as_if_nothing_had_been(
    twins: Cluster, encode: Encode, role: str
) -> None:
    await _kill_some(twins, encode, role, NUM_SOAK_KILLS)


# No draws from the whole vocabulary: in its tail, noise in the last bit may draw the neighbour.
REQUESTS: dict[str, Json] = {
    "choices with seeds": {"n": 3, "temperature": 1, "seed": 5, "top_p": 0.9, "logprobs": 2},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 1.0, "repetition_penalty": 1.2},
    "min_p and top_k": {"temperature": 0.9, "seed": 11, "top_k": 20, "min_p": 0.02},
    "echo": {"echo": True},
    "a stop string": {"stop": ["\n\n\n"], "min_tokens": 30},
}
PLAIN: Json = {
    "prompt": "Once upon a time, in a village by the sea,",
    "max_tokens": 48,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}


def _is_decoding(report: StatusReport) -> bool:
    num_decoding = [w.load.num_decoding for w in report.workers if w.load and w.id == "decode-0"]
    return num_decoding[:1] >= [len(REQUESTS)]


async def test_every_kind_of_request_goes_on_as_it_was_on_the_worker_that_is_left(
    model_folder: Path,
) -> None:
    async with running_cluster(ClusterOptions(model_folder)) as cluster:
        bodies = [{**PLAIN, **fields} for fields in REQUESTS.values()]
        quiet = [await cluster.ask(PATH, body) for body in bodies]
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(cluster.ask(PATH, body)) for body in bodies]
            await cluster.wait_until("all decode", _is_decoding)
            await cluster.kill("decode-0")
            cluster.start("decode-0")
        await cluster.wait_ready()
        for name, before, task in zip(REQUESTS, quiet, asked, strict=True):
            after = task.result()
            assert [_told(choice) for choice in after.choices] == [
                _told(choice) for choice in before.choices
            ], name
            assert after.usage is not None
            assert before.usage is not None
            assert after.usage.num_prompt_tokens == before.usage.num_prompt_tokens, name
            assert after.usage.num_completion_tokens == before.usage.num_completion_tokens, name
        resumed = [e for e in read_log_folder(cluster.log_dir) if e.event == "request_resumed"]
        assert len(resumed) >= len(REQUESTS)
        await cluster.wait_idle()


def _told(choice: ChoiceAnswer) -> tuple[object, ...]:
    logprobs = [pytest.approx(logprob, abs=1e-3) for logprob in choice.logprobs]
    return choice.text, choice.token_ids, choice.finish_reason, logprobs
