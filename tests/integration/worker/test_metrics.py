"""Real workers move every one of their metrics; what moves each is said by its test."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from common.errors import ErrorCode
from common.messages.control import DecodeRefused, PrefillRefused, RequestFinished
from common.messages.fields import Role
from common.models.config import ModelConfig
from common.models.flops import step_flops
from common.sampling import SamplingParams
from common.telemetry.metrics import WorkerMetrics
from tests.support.running_worker import LAYOUT, RunningWorker, WorkerOptions
from tests.support.tiny_models import save_tiny_model
from tests.support.worker_harness import Harness, harness

PROMPT = tuple(range(100, 161))
GREEDY = SamplingParams(seed=1, max_tokens=6, temperature=0)
NUM_BLOCKS = WorkerOptions().num_blocks


def value(worker: RunningWorker, sample: str, **labels: str) -> float:
    """Return a sample's value; 0 for one that nothing has labelled yet."""
    return worker.hybrid.metrics.registry.get_sample_value(f"flowpath_{sample}", labels) or 0.0


async def run(cluster: Harness, request: str, prompt: tuple[int, ...] = PROMPT) -> None:
    cluster.place(request, prompt, GREEDY)
    await cluster.answer(request)
    await cluster.heard("decode", RequestFinished, request)


async def test_a_handoff_moves_transfers_and_times_on_both_sides(tmp_path: Path) -> None:
    async with harness(tmp_path) as cluster:
        prefill, decode = await cluster.pair()
        await run(cluster, "r")
        await prefill.idle()
        num_blocks = -(-len(PROMPT) // LAYOUT.block_size)
        assert value(prefill, "transfers_total") == 1
        assert value(prefill, "transfer_bytes_total") == num_blocks * LAYOUT.block_bytes
        assert value(prefill, "transfer_calls_count") == 1
        assert 1 <= value(prefill, "transfer_calls_sum") <= num_blocks
        assert value(prefill, "transfer_seconds_sum") > 0
        assert value(decode, "handoff_seconds_count") == 1
        assert value(decode, "handoff_seconds_sum") > 0
        assert value(prefill, "handoff_seconds_count") == value(decode, "transfers_total") == 0


async def test_steps_tokens_and_the_time_in_the_queue_are_counted(tmp_path: Path) -> None:
    async with harness(tmp_path) as cluster:
        prefill, decode = await cluster.pair()
        await run(cluster, "r")
        assert value(prefill, "engine_step_tokens_sum") == len(PROMPT)
        assert value(prefill, "engine_step_tokens_count") == 2  # chunks of 32
        assert value(decode, "engine_step_tokens_sum") == GREEDY.max_tokens - 1
        assert value(decode, "engine_step_seconds_count") == GREEDY.max_tokens - 1
        assert value(decode, "engine_step_seconds_sum") > 0
        assert value(decode, "engine_step_host_seconds_count") == GREEDY.max_tokens - 1
        assert value(decode, "engine_step_host_seconds_sum") > 0
        assert value(prefill, "request_queue_time_seconds_count") == 1
        assert value(prefill, "request_queue_time_seconds_sum") > 0


async def test_what_a_quota_of_compute_predicts_is_compared_with_what_steps_take(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path) as cluster:
        prefill, _ = await cluster.pair(prefill=WorkerOptions(quota_seconds=1e-6))
        await run(cluster, "r")
        prefill.hybrid.heartbeat()
        # The first chunk of 32 tokens is learnt from, then a block is computed at a time.
        assert value(prefill, "engine_step_tokens_count") == 1 + -(-(len(PROMPT) - 32) // 8)
        assert value(prefill, "compute_quota_error_ratio") > 0


async def test_operations_and_attention_of_the_steps_that_ran_are_counted_on_both_sides(
    tmp_path: Path,
) -> None:
    save_tiny_model("llama", tmp_path / "model")
    model = ModelConfig.load(tmp_path / "model")
    options = WorkerOptions(model=model)
    async with harness(tmp_path) as cluster:
        prefill, decode = await cluster.pair(prefill=options, decode=options)
        await run(cluster, "r")
        chunks = [_Row(0, 32, is_last=False), _Row(32, len(PROMPT) - 32, is_last=True)]
        assert value(prefill, "model_flops_total") == step_flops(model, chunks)
        decodes = [
            _Row(start, 1, is_last=True)
            for start in range(len(PROMPT), len(PROMPT) + GREEDY.max_tokens - 1)
        ]
        assert value(decode, "model_flops_total") == step_flops(model, decodes)
        assert value(prefill, "attention_seconds_total") > 0
        assert value(decode, "attention_seconds_total") == 0
        totals = prefill.hybrid.heartbeat().totals
        assert totals.model_flops == step_flops(model, chunks)
        assert totals.attention_seconds == value(prefill, "attention_seconds_total")


@dataclass(frozen=True, slots=True)
class _Row:
    start: int
    num_tokens: int
    is_last: bool


async def test_a_repeated_prompt_hits_the_prefix_cache(tmp_path: Path) -> None:
    async with harness(tmp_path) as cluster:
        prefill, _ = await cluster.pair()
        await run(cluster, "first")
        assert value(prefill, "prefix_cache_queries_tokens_total") == len(PROMPT)
        assert value(prefill, "prefix_cache_hits_tokens_total") == 0
        await run(cluster, "second")
        assert value(prefill, "prefix_cache_queries_tokens_total") == 2 * len(PROMPT)
        whole = len(PROMPT) // LAYOUT.block_size * LAYOUT.block_size
        assert value(prefill, "prefix_cache_hits_tokens_total") == whole


async def test_heartbeats_set_the_gauges_of_requests_and_blocks(tmp_path: Path) -> None:
    async with harness(tmp_path) as cluster:
        worker = await cluster.start_worker("combined", Role.COMBINED)
        worker.steps.hold()
        for request in ("a", "b"):
            cluster.place(request, PROMPT, GREEDY, prefill="combined", decode=None)
        await worker.steps.arrived(1)
        await cluster.board.wait_for(
            "both are told of", lambda: _num_told(cluster, "combined") == 2
        )
        told = cluster.heartbeats["combined"][-1]
        load = told.load
        assert value(worker, "num_requests_running") == load.num_prefilling + load.num_decoding > 0
        assert value(worker, "num_requests_waiting") == load.num_waiting
        owners = ("free", "referenced", "cached", "in_transfer")
        blocks = {owner: value(worker, "kv_blocks", owner=owner) for owner in owners}
        assert sum(blocks.values()) == NUM_BLOCKS
        assert blocks["referenced"] > 0
        assert value(worker, "kv_usage_ratio") == blocks["referenced"] / NUM_BLOCKS
        worker.steps.open()
        await cluster.answer("a")
        await cluster.answer("b")
        await worker.idle()
        await cluster.board.wait_for("nothing runs", lambda: _num_told(cluster, "combined") == 0)
        assert value(worker, "num_requests_running") == value(worker, "kv_usage_ratio") == 0
        assert value(worker, "kv_blocks", owner="cached") > 0


def _num_told(cluster: Harness, worker: str) -> int:
    load = cluster.heartbeats[worker][-1].load
    return load.num_waiting + load.num_prefilling + load.num_decoding


async def test_open_handoffs_stand_in_the_gauges_of_both_directions(tmp_path: Path) -> None:
    async with harness(tmp_path) as cluster:
        prefill, decode = await cluster.pair()
        prefill.writes.hold()
        cluster.place("r", PROMPT, GREEDY)
        await cluster.board.wait_for(
            "both sides tell of it",
            lambda: (
                cluster.heartbeats["prefill"][-1].load.num_sending == 1
                and cluster.heartbeats["decode"][-1].load.num_receiving == 1
            ),
        )
        assert value(prefill, "num_requests_transferring", direction="sending") == 1
        assert value(decode, "num_requests_transferring", direction="receiving") == 1
        prefill.writes.open()
        await cluster.answer("r")


async def test_a_refused_reservation_is_a_failure_with_its_reason(tmp_path: Path) -> None:
    async with harness(tmp_path) as cluster:
        await cluster.start_worker("tiny", Role.DECODE, WorkerOptions(num_blocks=4))
        prefill, _ = await cluster.pair()
        cluster.place("r", PROMPT, GREEDY, decode="tiny")
        await cluster.heard("prefill", DecodeRefused, "r")
        reason = f"refused_{ErrorCode.NO_ROOM}"
        assert value(prefill, "transfer_failures_total", reason=reason) == 1
        assert value(prefill, "transfers_total") == 0
        cluster.place_decode("r", "decode")
        await cluster.answer("r")


async def test_a_pool_that_is_too_small_moves_preemptions(tmp_path: Path) -> None:
    params = SamplingParams(seed=1, max_tokens=60, temperature=0)
    async with harness(tmp_path) as cluster:
        _, decode = await cluster.pair(decode=WorkerOptions(num_blocks=24))
        requests = [f"r{place}" for place in range(4)]
        for place, request in enumerate(requests):
            cluster.place(request, tuple(range(place, place + 20)), params)
        for request in requests:
            await cluster.answer(request)
        assert value(decode, "preemptions_total") > 0
        assert value(decode, "kv_fragmentation_ratio") >= 0


async def test_refusals_and_failures_are_counted_by_reason(tmp_path: Path) -> None:
    async with harness(tmp_path) as cluster:
        worker = await cluster.start_worker("combined", Role.COMBINED)
        worker.steps.hold()
        cluster.place("old", PROMPT, GREEDY, prefill="combined", decode=None)
        await worker.steps.arrived(1)
        assert await worker.hybrid.drain(0.0) is False
        cluster.place("new", PROMPT, GREEDY, prefill="combined", decode=None)
        await cluster.heard("combined", PrefillRefused, "new")
        worker.hybrid.abandon(ErrorCode.SHUTTING_DOWN, "over")
        await cluster.failure("old")
        reason = str(ErrorCode.SHUTTING_DOWN)
        assert value(worker, "requests_refused_total", reason=reason) == 1
        assert value(worker, "requests_failed_total", reason=reason) == 1
        worker.steps.open()
        await worker.idle()


@pytest.mark.parametrize(
    ("owners", "largest_free_run", "usage", "fragmentation"),
    [
        ({"free": 6, "referenced": 2, "cached": 1, "in_transfer": 1}, 3, 0.3, 0.5),
        ({"free": 0, "referenced": 9, "cached": 1, "in_transfer": 0}, 0, 0.9, 0.0),
        ({"free": 0, "referenced": 0, "cached": 0, "in_transfer": 0}, 0, 0.0, 0.0),
    ],
    ids=["half fragmented", "nothing free", "no pool"],
)
def test_usage_and_fragmentation_are_shares(owners, largest_free_run, usage, fragmentation) -> None:
    metrics = WorkerMetrics()
    metrics.set_kv(owners, largest_free_run)
    registry: CollectorRegistry = metrics.registry
    assert registry.get_sample_value("flowpath_kv_usage_ratio") == pytest.approx(usage)
    found = registry.get_sample_value("flowpath_kv_fragmentation_ratio")
    assert found == pytest.approx(fragmentation)
