"""``flowpath bench serve`` against servers that answer well, badly, and not at all."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import typer
from typer.testing import CliRunner

from services.cli.bench import app as bench_app
from services.cli.bench_serve_client import RequestRecord
from services.cli.bench_serve_load import FIRST_TOKEN_ID, Arrival, PromptKind, Workload
from services.cli.bench_serve_report import Slo, quantiles, summarize
from tests.support.held_port import held_port

Reply = Callable[[int, dict], list[bytes]]
"""(number of the completion, its body) to the parts that are written; then the connection ends."""

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-request-id: req-%d\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(**fields) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def whole(number: int, body: dict, *, num_tokens: int | None = None) -> list[bytes]:
    """Stream a complete answer in chunks that cut events in the middle."""
    count = body["max_tokens"] if num_tokens is None else num_tokens
    events = b"".join(event(choices=[{"text": f" w{place}"}]) for place in range(count))
    events += event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": count})
    events += b"data: [DONE]\n\n"
    parts = [events[start : start + 50] for start in range(0, len(events), 50)]
    head = HEAD % number + b"transfer-encoding: chunked\r\n\r\n"
    return [head, *(chunk(part) for part in parts), b"0\r\n\r\n"]


class FakeServer:
    """An OpenAI-compatible server of scripted replies; remembers what it was asked."""

    def __init__(self, reply: Reply) -> None:
        self.bodies: list[dict] = []
        self.paths: list[str] = []
        self.headers: list[str] = []
        self.num_open = self.max_open = 0
        self.port = 0
        self._reply = reply

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, _ = head.split(" ", 2)
        if method == "GET":
            body = json.dumps({"data": [{"id": "fake-model"}]}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        else:
            lines = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:-2])
            asked = json.loads(await reader.readexactly(int(lines["content-length"])))
            number = len(self.bodies)
            self.bodies.append(asked)
            self.paths.append(path)
            self.headers.append(head)
            self.num_open += 1
            self.max_open = max(self.max_open, self.num_open)
            for part in self._reply(number, asked):
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
            self.num_open -= 1
        writer.close()

    def run(self, ready: threading.Event) -> None:
        async def serve() -> None:
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            self.port = server.sockets[0].getsockname()[1]
            self._loop = asyncio.get_running_loop()
            self._stop = asyncio.Event()
            ready.set()
            await self._stop.wait()
            server.close()

        asyncio.run(serve())

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)


@contextmanager
def running(reply: Reply) -> Iterator[FakeServer]:
    server = FakeServer(reply)
    ready = threading.Event()
    thread = threading.Thread(target=server.run, args=(ready,))
    thread.start()
    try:
        assert ready.wait(10)
        yield server
    finally:
        server.stop()
        thread.join(10)


def bench(server: FakeServer, *arguments: str) -> tuple[int, str]:
    given = ["serve", "--url", f"http://127.0.0.1:{server.port}/v1", *arguments]
    result = CliRunner().invoke(_with_sibling(), given)
    return result.exit_code, result.output


def _with_sibling() -> typer.Typer:
    root = typer.Typer()
    root.add_typer(bench_app)

    @root.command()
    def other() -> None:
        """typer runs a lone command without its name."""

    return root


def test_a_closed_loop_measures_every_request_but_the_warm_up(tmp_path):
    file = tmp_path / "run.json"
    with running(whole) as server:
        code, told = bench(
            server,
            *("--requests", "12", "--warmup", "3", "--concurrency", "2", "--json", str(file)),
            *("--input-tokens", "9", "--output-tokens", "5", "--slo-ttft-ms", "60000"),
        )
    assert code == 0, told
    document = json.loads(file.read_text())
    assert len(server.bodies) == 15
    assert server.max_open <= 4
    assert document["num_complete"] == document["num_good"] == 12
    assert document["num_output_tokens"] == 60
    assert document["num_prompt_tokens"] == 84
    assert {name: values["count"] for name, values in document["latencies_ms"].items()} == {
        "TTFT": 12,
        "TPOT": 12,
        "ITL": 48,
        "first ITL": 12,
        "E2E": 12,
    }
    assert document["options"]["model"] == "fake-model"
    assert "12 of 12" in told
    assert all(body["ignore_eos"] and len(body["prompt"]) == 9 for body in server.bodies)
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 15


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (lambda _, body: whole(0, body)[:-3], "cut"),
        (lambda _, body: whole(0, body, num_tokens=2), "short"),
        (lambda *_: [HEAD % 1 + b"\r\n" + event(error={"message": "lost"})], "stream_error"),
        (lambda *_: [HEAD % 1 + b"\r\ndata: {nonsense\n\n"], "malformed"),
        (lambda *_: [HEAD % 1 + b"\r\ndata: 5\n\n"], "malformed"),
        (lambda *_: [], "cut"),
        (
            lambda *_: [
                b"HTTP/1.1 429 Too Many\r\ncontent-length: 34\r\n\r\n",
                b'{"error":{"message":"queue full"}}',
            ],
            "http_429",
        ),
    ],
    ids=["cut", "short", "error event", "malformed", "no object", "closed", "429"],
)
def test_a_missing_completion_is_told_by_kind_and_ends_with_1(tmp_path, reply, kind):
    def second_fails(number: int, body: dict) -> list[bytes]:
        return reply(number, body) if number == 1 else whole(number, body)

    file = tmp_path / "run.json"
    with running(second_fails) as server:
        code, told = bench(
            server,
            *("--requests", "4", "--warmup", "0", "--concurrency", "1", "--output-tokens", "6"),
            *("--json", str(file)),
        )
    document = json.loads(file.read_text())
    assert code == 1, told
    assert document["num_complete"] == 3
    assert document["failures"] == {kind: 1}
    assert f"failed: {kind}" in told


def test_a_server_that_is_not_there_is_refused_with_2():
    gone = FakeServer(whole)
    with held_port() as port:
        gone.port = port
        assert bench(gone)[0] == 2


def test_a_file_that_cannot_be_written_is_refused_before_the_first_request(tmp_path):
    with running(whole) as server:
        code, _ = bench(server, "--json", str(tmp_path / "nosuch" / "run.json"))
    assert (code, server.paths) == (2, [])


def test_two_loads_at_once_are_refused():
    code, _ = bench(FakeServer(whole), "--rate", "3", "--burst", "4")
    assert code == 2


def test_the_key_the_model_and_a_chat_are_sent():
    with running(whole) as server:
        code, told = bench(
            server,
            *("--requests", "2", "--warmup", "0", "--prompt", "chat", "--no-ignore-eos"),
            *("--model", "named", "--api-key", "sk-1", "--burst", "2", "--burst-seconds", "0"),
        )
    assert code == 0, told
    assert set(server.paths) == {"/v1/chat/completions"}
    assert all(body["model"] == "named" and "ignore_eos" not in body for body in server.bodies)
    assert all(body["messages"][0]["content"] for body in server.bodies)
    assert all("Authorization: Bearer sk-1" in head for head in server.headers)


def test_the_times_of_handoffs_come_from_the_log_files_of_these_requests(tmp_path):
    lines = [
        {"event": "handoff_accepted", "request_id": "req-1", "seconds_since_prefill": 0.004},
        {"event": "handoff_accepted", "request_id": "req-77", "seconds_since_prefill": 9.0},
    ]
    head = {"ts": "2026-01-01T00:00:00+00:00", "process": "decode-0", "pid": 1, "level": "info"}
    text = "".join(json.dumps({**head, **line}) + "\n" for line in lines)
    (tmp_path / "decode-0.jsonl").write_text(text)
    file = tmp_path / "run.json"
    with running(whole) as server:
        bench(
            server,
            *("--requests", "2", "--warmup", "0", "--log-dir", str(tmp_path), "--json", str(file)),
        )
    handoff = json.loads(file.read_text())["latencies_ms"]["handoff"]
    assert (handoff["count"], handoff["p50"]) == (1, pytest.approx(4.0))


# ---- what is asked, and when -------------------------------------------------------------------


def workload(**changes) -> Workload:
    fields = {
        "num_requests": 2000,
        "input_tokens": 16,
        "output_tokens": 4,
        "prompt_kind": PromptKind.IDS,
        "arrival": Arrival.POISSON,
    }
    return Workload(**{**fields, **changes})


def test_the_same_seed_asks_the_same_and_another_does_not():
    one, same, other = workload(seed=1), workload(seed=1), workload(seed=2)
    assert one.body("m", 5) == same.body("m", 5) != other.body("m", 5)
    assert list(one.start_seconds()) == list(same.start_seconds()) != list(other.start_seconds())
    assert one.body("m", 5)["prompt"] != one.body("m", 6)["prompt"]
    ids = [token for n in range(100) for token in one.body("m", n)["prompt"]]
    assert min(ids) >= FIRST_TOKEN_ID
    assert max(ids) < one.vocab_size


def test_poisson_arrivals_keep_their_rate_and_bursts_their_size():
    starts = list(workload(rate=50.0).start_seconds())
    assert starts == sorted(starts)
    assert starts[-1] == pytest.approx(2000 / 50.0, rel=0.1)
    gaps = [after - before for before, after in pairwise(starts)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.15), "gaps of Poisson arrivals are exponential"
    bursts = workload(num_requests=7, arrival=Arrival.BURST, burst=3, burst_seconds=0.5)
    assert list(bursts.start_seconds()) == [0.0, 0.0, 0.0, 0.5, 0.5, 0.5, 1.0]


# ---- numbers -----------------------------------------------------------------------------------


def record(index: int, ttft: float, step: float, tokens: int = 5, **fields) -> RequestRecord:
    times = [10.0 + ttft + step * place for place in range(tokens)]
    return RequestRecord(
        index,
        sent_at=10.0,
        token_at=times,
        ended_at=times[-1],
        num_prompt_tokens=3,
        num_tokens=tokens,
        **fields,
    )


def test_latencies_rates_and_goodput_are_those_of_complete_requests():
    records = [
        record(0, ttft=0.1, step=0.02),
        record(1, ttft=0.3, step=0.01, num_cached_tokens=2),
        record(2, ttft=0.1, step=0.5),
        record(3, ttft=9.0, step=9.0, failure="timeout", detail="after 9 s"),
    ]
    summary = summarize(records, 5, Slo(ttft_ms=200, tpot_ms=100), [0.002, 0.004])
    assert (summary.num_complete, summary.num_good) == (3, 1)
    assert summary.failures == {"timeout": 1, "not_sent": 1}
    assert not summary.is_whole
    assert summary.seconds == pytest.approx(45.0)
    assert (summary.num_prompt_tokens, summary.num_cached_tokens) == (9, 2)
    assert summary.throughput()["output_tokens_per_second"] == pytest.approx(15 / 45)
    assert summary.throughput()["goodput_requests_per_second"] == pytest.approx(1 / 45)
    assert summary.latencies_ms["TTFT"]["p50"] == pytest.approx(100)
    assert summary.latencies_ms["TPOT"]["p50"] == pytest.approx(20)
    assert summary.latencies_ms["ITL"]["count"] == 12
    assert summary.latencies_ms["E2E"]["p99"] == pytest.approx(2064.8)
    assert summary.latencies_ms["handoff"]["mean"] == pytest.approx(3.0)


def test_quantiles_are_interpolated_and_of_nothing_there_are_none():
    found = quantiles([4.0, 1.0, 3.0, 2.0, 5.0])
    assert found == {"p50": 3.0, "p90": 4.6, "p99": 4.96, "mean": 3.0, "count": 5}
    assert quantiles([]) is None
