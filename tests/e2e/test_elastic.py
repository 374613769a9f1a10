"""Workers that come and go while requests run: real processes, real requests."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from common.config.folders import prepare_run_dir
from common.config.load import save_settings
from common.config.settings import Settings
from common.messages.admin import StatusReport
from common.messages.fields import Role
from common.telemetry.story import read_log_folder
from services.cli.admin import ask_status
from services.cli.explain import explain
from services.cli.explanation import Explanation
from services.cli.supervisor.plan import plan_processes, plan_worker
from services.cli.supervisor.supervisor import Supervisor
from tests.support.answers import Answer, Json
from tests.support.board import Board
from tests.support.held_port import held_port
from tests.support.prompts import Encode
from tests.support.served import client_of, serving
from tests.support.tiny_llama import write_tiny_llama
from tests.support.undisturbed import greedy_bodies, run_quietly

pytestmark = pytest.mark.e2e

CHAT = "/v1/chat/completions"
PATH = "/v1/completions"
START_SECONDS = 120.0


class Cluster:
    """A supervised cluster in this process; made by ``supervised``."""

    def __init__(self, settings: Settings, file: Path) -> None:
        self.settings = settings
        self.board = Board()
        self.lines: list[str] = []
        self.supervisor = Supervisor(settings, plan_processes(settings), file, self._tell)

    def _tell(self, line: str) -> None:
        self.lines.append(line)
        self.board.post()

    async def told(self, part: str) -> None:
        """Wait for a line with this part."""
        async with asyncio.timeout(START_SECONDS):
            while not any(part in line for line in self.lines):
                await self.status()

    async def status(self) -> StatusReport | None:
        """Return the controller's report, if it answers."""
        return await ask_status(self.settings, 1.0)

    async def until_paired(self, *pairs: tuple[str, str]) -> None:
        """Wait until these prefill and decode workers can hand over to each other."""
        async with asyncio.timeout(START_SECONDS):
            while not set(pairs) <= await self._paired():
                continue

    async def until_workers(self, *names: str) -> None:
        """Wait until the cluster's workers are these."""
        async with asyncio.timeout(START_SECONDS):
            while (report := await self.status()) is None or {
                str(worker.id) for worker in report.workers
            } != set(names):
                continue

    async def _paired(self) -> set[tuple[str, str]]:
        report = await self.status()
        return {
            (str(worker.id), str(pair.worker_id))
            for worker in (report.workers if report else ())
            for pair in worker.pairs
            if pair.transport and not pair.reason
        }

    async def ask(self, client: httpx.AsyncClient, number: int) -> tuple[str, str]:
        """Ask question ``number``; return the answer's text and how it ended."""
        body: Json = {
            "model": self.settings.model_name,
            "messages": [{"role": "user", "content": f"{number} " * 150}],
            "temperature": 0,
            "max_tokens": 60,
            "ignore_eos": True,
        }
        response = await client.post(f"{self.settings.url}{CHAT}", json=body)
        answer: Json = response.json()
        assert response.status_code == 200, answer
        choice = answer["choices"][0]
        return choice["message"]["content"], choice["finish_reason"]


@asynccontextmanager
async def supervised(model: Path) -> AsyncIterator[Cluster]:
    """Run one prefill and one decode worker, with room for a third, as long as the block."""
    with tempfile.TemporaryDirectory(prefix="fp-") as folder, held_port() as port:
        settings = Settings(
            port=port,
            model=str(model),
            run_dir=Path(folder) / "run",
            log_dir=Path(folder) / "log",
            kv_bytes=64 * 2**20,
            threads=1,
            roles="manual",
            # Whoever has a prompt cached would get it again: the late worker is to have work.
            policy="round_robin",
            max_workers=3,
        )
        prepare_run_dir(settings.run_dir)
        file = settings.run_dir / "settings.json"
        save_settings(settings, file)
        cluster = Cluster(settings, file)
        async with asyncio.TaskGroup() as tasks:
            run = tasks.create_task(cluster.supervisor.run())
            try:
                await cluster.told("ready after")
                yield cluster
            finally:
                cluster.supervisor.stop()
                assert await run == 0, cluster.lines


async def test_a_worker_added_late_pairs_serves_and_leaves_without_a_lost_request(
    tmp_path: Path, model_folder: Path
) -> None:
    write_tiny_llama(tmp_path / "tiny", model_folder)
    limits = httpx.Limits(max_connections=None)
    async with (
        supervised(tmp_path / "tiny") as cluster,
        httpx.AsyncClient(trust_env=False, timeout=60, limits=limits) as client,
    ):
        alone = [await cluster.ask(client, number) for number in range(6)]
        assert {how for _, how in alone} == {"length"}
        for role, pair, served in (
            (Role.PREFILL, ("prefill-1", "decode-0"), "prefill_started"),
            (Role.DECODE, ("prefill-0", "decode-1"), "handoff_accepted"),
        ):
            late = f"{role}-1"
            assert cluster.supervisor.try_add(plan_worker(late, role, is_elastic=True))
            await cluster.until_paired(("prefill-0", "decode-0"), pair)
            async with asyncio.TaskGroup() as tasks:
                asked = [
                    tasks.create_task(cluster.ask(client, number))
                    for _ in range(3)
                    for number in range(6)
                ]
                await asked[0]
                cluster.supervisor.remove(late)
            assert [task.result() for task in asked] == alone * 3
            await cluster.until_workers("prefill-0", "decode-0")
            events = {
                entry.event
                for entry in read_log_folder(cluster.settings.log_dir)
                if entry.process == late
            }
            assert served in events
            assert not [line for line in cluster.lines if late in line and "again" in line]


NUM_BURST = 24
QUIET_SECONDS = 2.0


@pytest.mark.soak
async def test_a_burst_brings_a_worker_within_the_budget_and_quiet_takes_it_away(
    tmp_path: Path, model_folder: Path
) -> None:
    write_tiny_llama(tmp_path / "tiny", model_folder)
    values = {
        "model": str(tmp_path / "tiny"),
        "max_workers": 3,
        "slow_down": 40.0,  # so that a burst of a tiny model lasts
        "ttft_slo_seconds": 0.5,
    }
    most = 0
    async with serving(values) as served, client_of(served) as client:
        assert "elastic    up to 3 workers" in served.output

        async def ask(number: int, max_tokens: int = 30) -> Answer:
            words = f"{number} " * 300
            messages = [{"role": "user", "content": words}]
            body: Json = {"messages": messages, "temperature": 0, "max_tokens": max_tokens}
            return await client.ask(CHAT, {**body, "ignore_eos": True})

        def is_grown(report: StatusReport) -> bool:
            nonlocal most
            most = max(most, len(report.workers))
            return len(report.workers) == 3

        def is_back(report: StatusReport) -> bool:
            nonlocal most
            most = max(most, len(report.workers))
            return sorted(worker.id for worker in report.workers) == ["decode-0", "prefill-0"]

        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(ask(number)) for number in range(NUM_BURST)]
            report = await served.wait_until("a third worker", is_grown)
        extra = next(w.id for w in report.workers if w.id not in ("prefill-0", "decode-0"))
        assert f"starting {extra} under load" in served.output
        answers = [task.result() for task in asked]
        assert {answer.choices[0].finish_reason for answer in answers} == {"length"}

        quiet = asyncio.get_running_loop().create_task(
            served.wait_until("two workers", is_back, deadline_seconds=100)
        )
        after = []
        while not quiet.done():
            after.append(await ask(len(after) % NUM_BURST, max_tokens=2))
            await asyncio.wait([quiet], timeout=QUIET_SECONDS)
        await quiet
        assert {answer.choices[0].finish_reason for answer in after} == {"length"}
        for answer, whole in zip(after, answers, strict=False):
            assert whole.choices[0].text.startswith(answer.choices[0].text)
        assert f"stopping {extra}: load is low" in served.output
        assert most == 3
        served.interrupt()
        assert await served.ended() == 0


EXTRA = "extra-decode-0"
NUM_LONG, LONG_TOKENS, LONG_LENGTHS = 4, 1000, (40, 130, 70, 100)
BURST_TOKENS = 8
HOT: Json = {"temperature": 1, "top_p": 0.9, "ignore_eos": True, "max_tokens": BURST_TOKENS}
"""Such a draw sorts the vocabulary and costs as much as many greedy ones."""
SLOW_DOWN = 30.0
DECODE_SLA = 900.0
"""Milliseconds: some steps with the greedy streams alone, and a part of one step of the burst."""


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_load_that_falls_stops_the_decode_worker_that_it_brought_and_keeps_its_kv(
    tmp_path: Path, model_folder: Path, encode: Encode
) -> None:
    write_tiny_llama(tmp_path / "tiny", model_folder)
    values: Json = {"model": str(tmp_path / "tiny"), "dtype": "float32"}
    bodies = greedy_bodies(encode, LONG_LENGTHS, LONG_TOKENS, first=300_000)
    async with serving({**values, "combined": True}) as served, client_of(served) as client:
        quiet = await run_quietly(client.ask, bodies)

    values = {**values, "max_workers": 3, "slow_down": SLOW_DOWN, "decode_sla": DECODE_SLA}
    sizes: set[int] = set()
    async with serving(values) as served, client_of(served) as client:

        def names(report: StatusReport) -> list[str]:
            sizes.add(len(report.workers))
            return sorted(str(worker.id) for worker in report.workers)

        async def burst(number: int) -> Answer:
            return await client.ask(PATH, {**HOT, "prompt": f"{number} and", "seed": number})

        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(burst(number)) for number in range(NUM_BURST)]
            await served.wait_until(
                "a second decode worker",
                lambda report: names(report) == ["decode-0", EXTRA, "prefill-0"],
                deadline_seconds=150,
            )
            # They begin while both decode workers are busy, and decode on when the load has gone.
            streams = [
                tasks.create_task(client.ask(PATH, {**request.body, "stream": True}))
                for request in quiet
            ]
            await served.wait_until(
                "two workers",
                lambda report: names(report) == ["decode-0", "prefill-0"],
                deadline_seconds=200,
            )
        assert {task.result().choices[0].finish_reason for task in asked} == {"length"}
        answers = [task.result() for task in streams]
        differences = [one.compare(answer) for one, answer in zip(quiet, answers, strict=True)]
        assert differences == [None] * NUM_LONG
        assert max(sizes) == 3
        assert f"stopping {EXTRA}: load is low" in served.output
        moved = [_moves(explain(served.settings.log_dir, a.request_id)) for a in answers]
        print(f"moved on the way down: {moved}")
        assert any(moved), "no stream decoded on the worker that was stopped"
        assert all(num_bytes > 0 for moves in moved for num_bytes in moves)
        served.interrupt()
        assert await served.ended() == 0


def _moves(found: Explanation) -> list[int]:
    """Return the bytes of each move of a request off the extra worker; it was computed once.

    None where it did not leave because that worker drained: decodes move to shorter batches, too.
    """
    names = [phase.name for phase in found.phases]
    assert names.count("prefill") == 1, names
    assert "resume" not in names, names
    moves = [d for d in found.decisions if d.event == "migration_started"]
    drained = [move for move in moves if move.reason == "drain"]
    assert {dict(move.inputs)["source"] for move in drained} <= {EXTRA}
    assert names.count("migration") == len(moves)
    if not drained:
        return []
    return [p.num_bytes for p in found.phases if p.name == "transfer" and p.worker == EXTRA]
