"""``flowpath bench agents``: replays agents against a running server and measures them."""

import asyncio
import json
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from services.cli.bench_agents_outputs import (
    Comparison,
    compare,
    outputs_of,
    outputs_text,
    read_outputs,
)
from services.cli.bench_agents_replay import Arrivals, Replayer, ReplayOptions
from services.cli.bench_agents_report import AgentRun, AgentsSummary, Verdict, summarize_agents
from services.cli.bench_serve import EXIT_INCOMPLETE, progress
from services.cli.bench_serve_client import Target
from services.cli.bench_serve_report import Slo
from services.cli.result_file import result_file
from services.cli.terminal import out
from services.cli.traces.source import Agents, AgentSource, agents_of
from services.cli.traces.trajectory import Statistics, statistics_of

MAX_DIFFERENCES_TOLD = 5


@dataclass(frozen=True, slots=True)
class AgentsBench:
    """Which agents are replayed where, and how it is told.

    ``model`` empty asks the server. Without ``arrivals`` all agents start together (offline).
    ``outputs`` is a file for the tokens that were drawn, ``reference`` one of an earlier run.
    """

    url: str
    source: AgentSource
    slo: Slo
    vocab_size: int
    timeout_seconds: float
    arrivals: Arrivals | None = None
    model: str = ""
    api_key: str | None = None
    has_phases: bool = False
    outputs: Path | None = None
    reference: Path | None = None
    json_file: Path | None = None


@dataclass(frozen=True, slots=True)
class _Replay:
    model: str
    agents: Agents
    statistics: Statistics
    runs: tuple[AgentRun, ...]
    verdict: Verdict | None


def main(bench: AgentsBench) -> int:
    """Replay, print the table, write the files; return the exit code.

    1 when a round is missing or, with a reference, a token differs. ConfigError when the server
    does not answer at all, there are no agents, or a file cannot be read or written.
    """
    with ExitStack() as stack:
        keep = stack.enter_context(result_file(bench.json_file))
        keep_outputs = stack.enter_context(result_file(bench.outputs))
        reference = None if bench.reference is None else read_outputs(bench.reference)
        replay = asyncio.run(_replay(bench))
        summary = summarize_agents(replay.runs, bench.slo)
        outputs = outputs_of(replay.runs)
        comparison = None if reference is None else compare(outputs, reference)
        _tell(bench, replay, summary, comparison)
        keep(json.dumps(_document(bench, replay, summary, comparison), indent=2) + "\n")
        if bench.outputs is not None:
            keep_outputs(outputs_text(outputs))
    is_equal = comparison is None or comparison.is_equal
    return 0 if summary.is_whole and is_equal else EXIT_INCOMPLETE


async def _replay(bench: AgentsBench) -> _Replay:
    target = Target(bench.url, bench.api_key)
    card = await target.model_card()
    agents = agents_of(bench.source, card.max_model_len)
    options = ReplayOptions(
        model=bench.model or card.name,
        vocab_size=bench.vocab_size,
        timeout_seconds=bench.timeout_seconds,
        seed=bench.source.seed,
        has_phases=bench.has_phases,
    )
    num_rounds = sum(len(agent.rounds) for agent in agents.trajectories)
    async with progress("offline" if bench.arrivals is None else "online", num_rounds) as step:
        replayer = Replayer(target, options, lambda _: step())
        verdict = None
        if bench.arrivals is None:
            runs = await replayer.replay_together(agents.trajectories)
        else:
            runs, verdict = await replayer.replay_arriving(agents.trajectories, bench.arrivals)
    statistics = statistics_of(agents.trajectories)
    return _Replay(options.model, agents, statistics, tuple(runs), verdict)


def _tell(
    bench: AgentsBench, replay: _Replay, summary: AgentsSummary, comparison: Comparison | None
) -> None:
    console = out()
    console.print(_table(bench, replay, summary))
    for example in summary.failure_examples:
        console.print(escape(f"  failed: {example}"))
    bad = replay.agents.bad_lines
    if bad.count:
        console.print(escape(f"{bad.count} lines of the trace passed over:\n{bad.told()}"))
    if replay.agents.num_too_long:
        console.print(f"{replay.agents.num_too_long} agents of the trace do not fit the context")
    if comparison is None:
        return
    if comparison.num_rounds == 0:
        console.print("no round to compare with the reference")
    elif comparison.is_equal:
        console.print(f"{comparison.num_rounds} rounds drew the reference's tokens")
    for difference in comparison.differences[:MAX_DIFFERENCES_TOLD]:
        console.print(difference.told())
    if len(comparison.differences) > MAX_DIFFERENCES_TOLD:
        console.print(f"{len(comparison.differences)} agents differ from the reference")


def _document(
    bench: AgentsBench, replay: _Replay, summary: AgentsSummary, comparison: Comparison | None
) -> dict[str, object]:
    source = bench.source
    options: dict[str, object] = {
        "url": bench.url,
        "model": replay.model,
        "mode": "offline" if bench.arrivals is None else "online",
        "num_agents": source.num_agents,
        "seed": source.seed,
        "context": source.context,
        "max_rounds": source.max_rounds,
        "slo_ttft_ms": bench.slo.ttft_ms,
        "slo_tpot_ms": bench.slo.tpot_ms,
    }
    if source.trace is None:
        options.update(shape=str(source.shape), turns=source.turns)
    else:
        options.update(
            trace=source.trace.name, trace_format=str(source.trace_format), scale=source.scale
        )
    if bench.arrivals is not None:
        options.update(rate=bench.arrivals.rate, seconds=bench.arrivals.seconds)
    document: dict[str, object] = {
        "options": options,
        "statistics": asdict(replay.statistics),
        "num_bad_lines": replay.agents.bad_lines.count,
        "bad_lines": list(replay.agents.bad_lines.examples),
        "num_too_long": replay.agents.num_too_long,
        "verdict": None if replay.verdict is None else str(replay.verdict),
        **summary.document(),
    }
    if comparison is not None:
        document["reference"] = {
            "num_rounds": comparison.num_rounds,
            "differences": [asdict(difference) for difference in comparison.differences],
        }
    return document


def _table(bench: AgentsBench, replay: _Replay, summary: AgentsSummary) -> Table:
    found = replay.statistics
    mode = "together" if bench.arrivals is None else f"{bench.arrivals.rate:g}/s"
    title = (
        f"{escape(replay.model)} at {escape(bench.url)}: {summary.num_agents} agents {mode}, on "
        f"average {found.turns:.1f} turns of {found.append:.0f} tokens appended and "
        f"{found.gen:.0f} generated, {found.total:.0f} in all"
    )
    table = Table(title=title, title_justify="left")
    for column in ("", "p50", "p90", "p99", "mean"):
        table.add_column(column, justify="right" if column else "left")
    for name, values in summary.latencies_ms.items():
        cells = (
            [f"{values[share]:.2f}" for share in ("p50", "p90", "p99", "mean")] if values else []
        )
        table.add_row(f"{name} (ms)", *(cells or ["-"] * 4))
    table.add_section()
    table.add_row("agents finished", f"{summary.num_finished} of {summary.num_agents}")
    table.add_row("rounds complete", f"{summary.num_complete} of {summary.num_rounds}")
    seconds = "-" if summary.jct_seconds is None else f"{summary.jct_seconds:.2f}"
    table.add_row("JCT (s)", seconds)
    if replay.verdict is not None:
        table.add_row("ended by rule", str(replay.verdict))
    prompts = max(1, summary.num_prompt_tokens)
    table.add_row("cached prompt tokens", f"{100 * summary.num_cached_tokens / prompts:.1f} %")
    for name, share in summary.slo_shares.items():
        table.add_row(f"{name} within SLO", f"{100 * share:.1f} %")
    for worker, loaded in summary.loaded.items():
        table.add_row(f"loaded by {escape(worker)} (MB)", f"{loaded.num_bytes / 1e6:.1f}")
    for kind, count in summary.failures.items():
        table.add_row(f"failed: {kind}", str(count))
    return table
