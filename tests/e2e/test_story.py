"""One request id rebuilds the story of a request from the log files alone."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic

import pytest
import pytest_asyncio

from common.telemetry.story import LogEntry, request_story
from services.cli.explain import explain
from tests.support.answers import Json, events_of
from tests.support.cluster import REPOSITORY, Cluster, ClusterOptions, running_cluster
from tests.support.prompts import Encode, exact_prompt

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

TEXT = "/v1/completions"
PHASES = {"place", "queue", "prefill", "transfer", "decode_wait", "decode"}
KV_BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 4
LONG_ANSWER: Json = {"prompt": "Once", "max_tokens": 400, "temperature": 0, "ignore_eos": True}

TO_DECODE = (
    "gateway-0 request_received",
    "controller request_placed",
    "prefill-0 request_received",
    "prefill-0 prefill_started",
    "prefill-0 handoff_begun",
    "decode-0 reserved",
    "decode-0 handoff_accepted",
)
"""What every request goes through until it decodes."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def fragile(model_folder: Path) -> AsyncIterator[Cluster]:
    """A cluster whose workers may be killed; nobody takes over what they did."""
    options = ClusterOptions(
        model_folder, settings={"max_queue": 1, "max_resumes": 0, "roles": "manual"}
    )
    async with running_cluster(options) as cluster:
        yield cluster


def _steps(story: Sequence[LogEntry]) -> list[str]:
    return [f"{entry.process} {entry.event}" for entry in story]


def _assert_in_order(story: Sequence[LogEntry], wanted: Sequence[str]) -> None:
    """Check an order that causes give; what two processes log at once has none."""
    steps = _steps(story)
    place = 0
    for step in wanted:
        assert step in steps[place:], f"no {step!r} after {steps[:place]} in {steps}"
        place = steps.index(step, place) + 1


def _entry(story: Sequence[LogEntry], step: str) -> LogEntry:
    return story[_steps(story).index(step)]


async def _stream_until(cluster: Cluster, num_tokens: int) -> str:
    """Begin a long stream, disconnect after some tokens, and return the request's id."""
    async with cluster.stream(TEXT, LONG_ANSWER) as response:
        num_seen = 0
        async for _ in events_of(response):
            num_seen += 1
            if num_seen >= num_tokens:
                break
    return str(response.headers["x-request-id"])


async def test_the_story_of_a_request_that_finishes(split: Cluster, encode: Encode) -> None:
    prompt = exact_prompt("", 300, first=9000).token_ids(encode)
    answer = await split.ask(TEXT, {"prompt": prompt, "max_tokens": 6, "temperature": 0})
    await split.wait_idle()
    story = request_story(split.log_dir, answer.request_id)
    _assert_in_order(
        story,
        [*TO_DECODE, "decode-0 request_ended", "controller request_ended"],
    )
    _assert_in_order(story, ["prefill-0 prefill_finished", "prefill-0 handoff_ended"])
    _assert_in_order(story, ["decode-0 handoff_accepted", "gateway-0 request_finished"])
    placed = _entry(story, "controller request_placed")
    assert (placed.fact("prefill"), placed.fact("decode")) == ("prefill-0", "decode-0")
    assert (placed.fact("policy"), placed.fact("reason")) == ("flowkv", "least expected time")
    assert placed.fact("cause")
    handoff = _entry(story, "prefill-0 handoff_ended")
    assert handoff.fact("outcome") == "HandedOver"
    assert handoff.fact("num_bytes") > 0  # type: ignore[operator]  # facts are plain values
    assert handoff.fact("transfer_id") == _entry(story, "decode-0 reserved").fact("transfer_id")
    assert _entry(story, "decode-0 request_ended").fact("was_cancelled") is False
    assert _entry(story, "gateway-0 request_finished").fact("num_completion_tokens") == 6
    assert all(entry.level == "info" for entry in story), _steps(story)


async def test_the_story_of_a_request_whose_client_leaves(split: Cluster) -> None:
    request_id = await _stream_until(split, 5)
    await split.wait_idle()
    story = request_story(split.log_dir, request_id)
    _assert_in_order(
        story,
        [
            *TO_DECODE,
            "gateway-0 cancelling",
            "decode-0 cancel_received",
            "decode-0 request_ended",
            "controller request_ended",
        ],
    )
    assert "gateway-0 request_cancelled" in _steps(story)
    told = "client left or request failed"
    assert _entry(story, "gateway-0 cancelling").fact("reason") == told
    assert _entry(story, "decode-0 cancel_received").fact("reason") == told
    assert _entry(story, "decode-0 request_ended").fact("was_cancelled") is True


async def test_the_story_of_a_request_whose_prefix_was_cached(
    split: Cluster, encode: Encode
) -> None:
    prompt = exact_prompt("", 200, first=9500).token_ids(encode)
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0}
    await split.ask(TEXT, body)
    answer = await split.ask(TEXT, body)
    await split.wait_idle()
    story = request_story(split.log_dir, answer.request_id)
    assert _entry(story, "prefill-0 prefill_started").fact("num_cached_tokens") == 192
    assert _entry(story, "decode-0 reserved").fact("num_cached_blocks") == 3


async def test_the_phases_of_a_request_are_told_in_its_usage_and_explained(
    split: Cluster, encode: Encode
) -> None:
    prompt = exact_prompt("", 300, first=9700).token_ids(encode)
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    whole = await _phases_of(split, {**body, "x_phases": True})
    assert set(whole.phases) == PHASES
    assert whole.phases["prefill"]["num_tokens"] == 300
    transfer = whole.phases["transfer"]
    assert transfer["num_bytes"] >= 300 * KV_BYTES_PER_TOKEN
    assert transfer["num_calls"] >= 1
    assert transfer["gigabytes_per_second"] > 0
    num_decoded = whole.phases["decode"]["num_tokens"]
    assert num_decoded == 5, "the first token is the prefill's"
    assert sum(phase["seconds"] for phase in whole.phases.values()) < 2 * whole.seconds

    await split.wait_idle()
    found = explain(split.log_dir, whole.request_id)
    assert [asdict(row) for row in found.phases] == list(whole.phases.values())
    spans = {span.name: span for span in found.spans}
    assert set(spans) == PHASES
    assert all(span.end is not None for span in found.spans)
    assert spans["prefill"].start >= spans["place"].start
    placed = next(d for d in found.decisions if d.event == "request_placed")
    assert placed.reason
    assert dict(placed.inputs)["policy"] == "flowkv"
    command = ("explain", whole.request_id, "--log-dir", str(split.log_dir))
    printed = await _flowpath(*command)
    for word in ("prefill", "decode", "request_placed", placed.reason):
        assert word in printed
    as_json = await _flowpath(
        "explain", whole.request_id, "--log-dir", str(split.log_dir), "--json"
    )
    assert json.loads(as_json)["phases"] == list(whole.phases.values())


@dataclass(frozen=True, slots=True)
class _Told:
    """A request with the phases that its usage told, by their names."""

    request_id: str
    seconds: float
    phases: dict[str, Json]


async def _phases_of(cluster: Cluster, body: Json) -> _Told:
    began = monotonic()
    response = await cluster.client.post(TEXT, json={"model": cluster.model_name, **body})
    seconds = monotonic() - began
    phases = response.json()["usage"]["x_phases"]
    assert len({phase["name"] for phase in phases}) == len(phases), phases
    request_id = response.headers["x-request-id"]
    return _Told(request_id, seconds, {phase["name"]: phase for phase in phases})


async def _flowpath(*arguments: str) -> str:
    """Run a command line and return what it prints."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli", *arguments),
        cwd=REPOSITORY,
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        printed, _ = await process.communicate()
    assert process.returncode == 0
    return printed.decode()


async def test_the_stories_of_a_killed_and_of_a_refused_request(fragile: Cluster) -> None:
    async with fragile.stream(TEXT, LONG_ANSWER) as response:
        events = events_of(response)
        for _ in range(4):  # the first token is the prefill side's, the others the decode side's
            await anext(events)
        fragile.signal("decode-0", signal.SIGKILL)
        *_, last = [event async for event in events]
    assert last["error"]["code"] == "worker_died"
    killed_id = response.headers["x-request-id"]
    await fragile.wait_until("the dead worker is known", lambda report: len(report.workers) == 1)

    refused = await fragile.client.post(
        TEXT, json={"model": fragile.model_name, "prompt": "Hello", "max_tokens": 2}
    )
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "no_worker"
    assert int(refused.headers["retry-after"]) >= 1

    killed = request_story(fragile.log_dir, killed_id)
    _assert_in_order(
        killed,
        [*TO_DECODE, "controller request_failed", "controller request_ended"],
    )
    _assert_in_order(killed, ["gateway-0 stream_failed", "gateway-0 request_failed"])
    failed = _entry(killed, "controller request_failed")
    assert failed.fact("code") == "worker_died"
    assert "decode-0 died" in str(failed.fact("message"))
    assert failed.fact("cause")
    assert _entry(killed, "gateway-0 request_failed").fact("code") == "worker_died"

    story = request_story(fragile.log_dir, refused.headers["x-request-id"])
    _assert_in_order(story, ["gateway-0 request_received", "controller request_refused"])
    refusal = _entry(story, "controller request_refused")
    assert refusal.fact("code") == "no_worker"
    assert "decode" in str(refusal.fact("reason"))
    assert {entry.process for entry in story} == {"gateway-0", "controller"}
    assert explain(fragile.log_dir, killed_id).outcome == "failed: worker_died"
    assert explain(fragile.log_dir, refused.headers["x-request-id"]).outcome.startswith("refused")

    await fragile.restart("decode-0")
    answer = await fragile.ask(TEXT, {"prompt": "Hello", "max_tokens": 2, "temperature": 0})
    assert answer.choices[0].finish_reason == "length"
    await fragile.wait_idle()
