"""``flowpath bench agents`` against a gateway whose cluster is scripted."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
import typer
from typer.testing import CliRunner

from common.errors import ErrorCode, RequestError
from common.sampling import SampledToken, SamplingParams
from services.cli.bench import app as bench_app
from services.cli.bench_agents_replay import Arrivals, Replayer, ReplayOptions
from services.cli.bench_agents_report import StopRule, Verdict
from services.cli.bench_serve_client import Target
from services.cli.traces.generator import SHAPES, ShapeName, generate
from services.gateway.fake_backend import FakeBackend
from tests.support.fake_backend import MODEL_NAME, served, served_model

SHAPE = SHAPES[ShapeName.K32].scaled_to(512, turns=5)
VOCABULARY = 300
OPTIONS = ReplayOptions(MODEL_NAME, VOCABULARY, timeout_seconds=30)


def drawn(prompt: Sequence[int], place: int, salt: int = 0) -> int:
    return (sum(prompt) + 7 * place + salt) % (VOCABULARY - 100) + 100


def backend_for(folder, salt: int = 0, max_model_len: int = 512) -> FakeBackend:
    def script(prompt: Sequence[int], params: SamplingParams, _: int) -> list[SampledToken]:
        return [SampledToken(drawn(prompt, n, salt)) for n in range(params.max_tokens)]

    return FakeBackend(replace(served_model(folder), max_model_len=max_model_len), script)


def replayer(port: int, told: list) -> Replayer:
    return Replayer(Target(f"http://127.0.0.1:{port}"), OPTIONS, told.append)


async def bench(port: int, *arguments: str) -> tuple[int, str]:
    root = typer.Typer()
    root.add_typer(bench_app, name="bench")
    given = ["bench", "agents", "--url", f"http://127.0.0.1:{port}", "--vocab-size", "300"]
    result = await asyncio.to_thread(CliRunner().invoke, root, [*given, *arguments])
    return result.exit_code, result.output


async def test_each_prompt_is_all_that_was_before_and_what_is_appended(tiny_folder):
    backend = backend_for(tiny_folder)
    agents, told = generate(SHAPE, 3, 0), []
    async with served(backend) as port:
        runs = await replayer(port, told).replay_together(agents)
    expected = []
    for agent in agents:
        context: list[int] = []
        for turn in agent.rounds:
            context += [t for part in turn.parts for t in part.token_ids(VOCABULARY)]
            expected.append(tuple(context))
            context += [drawn(context, n) for n in range(turn.num_generated_tokens)]
    assert sorted(backend.prompts) == sorted(expected)
    assert all(run.is_finished for run in runs)
    assert len(told) == len(expected)
    for run, agent in zip(runs, agents, strict=True):
        for record, turn in zip(run.records, agent.rounds, strict=True):
            assert len(record.token_at) == record.num_tokens == turn.num_generated_tokens
        ended = [record.ended_at for record in run.records]
        sent = [record.sent_at for record in run.records]
        assert all(after >= before for before, after in zip(ended, sent[1:], strict=False))


async def test_an_overloaded_run_stops_and_ends_its_agents_between_rounds(tiny_folder):
    rule = StopRule(max_ttft_seconds=0.0, window_seconds=60.0)
    arrivals = Arrivals(rate=40.0, seconds=60.0, seed=0, rule=rule)
    agents = generate(SHAPE, 400, 0)
    async with served(backend_for(tiny_folder)) as port:
        runs, verdict = await replayer(port, []).replay_arriving(agents, arrivals)
    assert verdict is Verdict.OVERLOADED
    assert 0 < len(runs) < 400
    assert all(run.is_finished or run.is_stopped for run in runs)
    assert all(record.failure is None for run in runs for record in run.records)


async def test_no_agent_starts_after_the_time_of_arrivals(tiny_folder):
    agents = generate(SHAPE, 400, 0)
    async with served(backend_for(tiny_folder)) as port:
        runs, verdict = await replayer(port, []).replay_arriving(
            agents, Arrivals(rate=100.0, seconds=0.05, seed=1)
        )
    assert verdict is None
    assert 0 < len(runs) < 20
    assert all(run.is_finished for run in runs)


async def test_the_command_keeps_numbers_and_compares_tokens_with_a_reference(
    tiny_folder, tmp_path
):
    load = ("--agents", "2", "--turns", "5", "--phases", "--json", str(tmp_path / "run.json"))
    outputs = str(tmp_path / "outputs.jsonl")
    async with served(backend_for(tiny_folder)) as port:
        code, told = await bench(port, *load, "--outputs", outputs)
        assert code == 0, told
        code, told = await bench(port, *load, "--reference", outputs)
        assert code == 0, told
        assert "rounds drew the reference's tokens" in told
    document = json.loads((tmp_path / "run.json").read_text())
    assert document["num_finished"] == document["num_agents"] == 2
    assert document["jct_seconds"] > 0
    assert document["options"]["mode"] == "offline"
    assert document["statistics"]["total"] <= 512
    assert document["reference"]["differences"] == []
    assert document["reference"]["num_rounds"] == document["num_rounds"]
    async with served(backend_for(tiny_folder, salt=1)) as port:
        code, told = await bench(port, *load, "--reference", outputs)
    assert code == 1
    assert "agent 0 differs from round 1, token 1" in told


async def test_a_trace_is_replayed_within_the_context_and_its_bad_lines_are_told(
    tiny_folder, tmp_path
):
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 600, "output_length": 40, "hash_ids": [1, 2]},
        {"timestamp": 9, "input_length": 700, "output_length": 20, "hash_ids": [1, 3]},
        {"timestamp": 9, "input_length": 5000, "output_length": 20, "hash_ids": list(range(10))},
        {"timestamp": 9, "input_length": 600, "output_length": 0, "hash_ids": [1, 2]},
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    backend = backend_for(tiny_folder)
    async with served(backend) as port:
        code, told = await bench(
            port, "--trace", str(trace), "--agents", "2", "--scale", "0.5", "--rate", "50"
        )
    assert code == 0, told
    assert [len(prompt) for prompt in backend.prompts[:1]] == [300]
    assert sorted(len(prompt) for prompt in backend.prompts) == [64, 300, 350, 365, 415]
    assert "1 lines of the trace passed over:\ntrace.jsonl:4: output_length is not" in told
    assert "1 agents of the trace do not fit the context" in told


async def test_a_failed_round_is_named_and_ends_with_1(tiny_folder, tmp_path):
    backend = backend_for(tiny_folder)
    backend.behaviour.refusal = RequestError(ErrorCode.QUEUE_FULL, "too much to do")
    async with served(backend) as port:
        code, told = await bench(port, "--agents", "1", "--turns", "5")
    assert code == 1
    assert "failed: agent 0 (0 agent 0), round 1 of" in told
    assert "http_429: too much to do" in told


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--context", "4096"), "a context of 4096 tokens: the model has 512"),
        (("--turns", "400"), "400 turns in a context of 512 tokens leave"),
        (("--trace", "/nosuch"), "cannot read /nosuch"),
        (("--reference", "/nosuch"), "cannot read /nosuch"),
        (("--json", "/nosuch/run.json"), "cannot write /nosuch/run.json"),
    ],
)
async def test_what_cannot_be_done_is_refused_with_2(tiny_folder, arguments, reason):
    backend = backend_for(tiny_folder)
    async with served(backend) as port:
        code, told = await bench(port, *arguments)
    assert code == 2
    assert reason in told
    assert backend.prompts == []
