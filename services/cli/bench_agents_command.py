"""The command line of ``flowpath bench agents``."""

from pathlib import Path
from typing import Annotated

import typer

from common.config.load import load_settings
from common.errors import ConfigError
from services.cli.terminal import ends_by_name
from services.cli.traces.generator import ShapeName
from services.cli.traces.message_lists import CHARS_PER_TOKEN
from services.cli.traces.source import AgentSource, TraceFormat
from services.cli.traces.trajectory import FIRST_TOKEN_ID

DEFAULT_SECONDS = 3600.0


@ends_by_name
def agents(  # noqa: PLR0917 - typer gives them by name
    url: Annotated[
        str | None,
        typer.Option("--url", help="Any server that takes and tells token ids; default: this."),
    ] = None,
    model: Annotated[str, typer.Option("--model", help="Default: the first it serves.")] = "",
    num_agents: Annotated[int, typer.Option("--agents", min=1, help="Agents replayed.")] = 16,
    shape: Annotated[
        ShapeName, typer.Option("--shape", help="Made agents: statistics of DualPath's table.")
    ] = ShapeName.K32,
    context: Annotated[
        int, typer.Option("--context", min=0, help="Longest context; 0 is the model's.")
    ] = 0,
    turns: Annotated[
        float, typer.Option("--turns", min=0, help="Made agents: mean turns; 0 is the shape's.")
    ] = 0.0,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Replay the agents of this file instead.")
    ] = None,
    trace_format: Annotated[
        TraceFormat, typer.Option("--format", help="The trace's format.")
    ] = TraceFormat.MOONCAKE,
    scale: Annotated[
        float, typer.Option("--scale", min=1e-6, help="Trace: factor of all lengths.")
    ] = 1.0,
    chars_per_token: Annotated[
        float, typer.Option("--chars-per-token", min=0.1, help="Trace of messages.")
    ] = CHARS_PER_TOKEN,
    max_rounds: Annotated[
        int, typer.Option("--max-rounds", min=0, help="Cut agents behind so many; 0 cuts none.")
    ] = 0,
    rate: Annotated[
        float | None,
        typer.Option("--rate", min=1e-6, help="Online: agents/s, Poisson. Else all together."),
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.1, help="Online: later no agent starts.")
    ] = DEFAULT_SECONDS,
    stop: Annotated[
        bool, typer.Option("--stop/--no-stop", help="Online: end when overloaded or steady.")
    ] = True,
    seed: Annotated[
        int,
        typer.Option(
            "--seed", min=0, help="Of the trajectories; the same ones are found cached again."
        ),
    ] = 0,
    vocab_size: Annotated[
        int, typer.Option("--vocab-size", min=FIRST_TOKEN_ID + 1, help="Bound of token ids.")
    ] = 4096,
    slo_ttft_ms: Annotated[float, typer.Option("--slo-ttft-ms", min=0.0)] = 4000.0,
    slo_tpot_ms: Annotated[float, typer.Option("--slo-tpot-ms", min=0.0)] = 50.0,
    timeout: Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds a round.")] = 600.0,
    phases: Annotated[
        bool, typer.Option("--phases", help="Ask a FlowPath server which worker loaded KV.")
    ] = False,
    outputs: Annotated[
        Path | None, typer.Option("--outputs", help="Write the drawn tokens to this file.")
    ] = None,
    reference: Annotated[
        Path | None, typer.Option("--reference", help="Compare with the tokens of this file.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="OPENAI_API_KEY", show_envvar=True)
    ] = None,
    port: Annotated[
        str | None, typer.Option("--port", help="This host's gateway, where no --url is given.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all numbers to this file.")
    ] = None,
) -> None:
    """Replay agents, each its rounds back-to-back: JCT, TTFT, TTST and TPOT.

    Ends with exit code 1 when a round is missing or differs from the reference.
    """
    from services.cli import bench_agents  # noqa: PLC0415 - each command loads its own
    from services.cli.bench_agents_replay import Arrivals  # noqa: PLC0415
    from services.cli.bench_agents_report import StopRule  # noqa: PLC0415
    from services.cli.bench_serve_report import Slo  # noqa: PLC0415

    if url is None:
        url = load_settings({"port": port}).settings.url
    if outputs is not None and outputs == reference:
        raise ConfigError("--outputs would write over --reference")
    rule = StopRule(max_ttft_seconds=slo_ttft_ms / 1e3) if stop else None
    source = AgentSource(
        num_agents=num_agents,
        seed=seed,
        context=context,
        max_rounds=max_rounds,
        shape=shape,
        turns=turns,
        trace=trace,
        trace_format=trace_format,
        scale=scale,
        chars_per_token=chars_per_token,
    )
    bench = bench_agents.AgentsBench(
        url=url,
        source=source,
        slo=Slo(slo_ttft_ms, slo_tpot_ms),
        vocab_size=vocab_size,
        timeout_seconds=timeout,
        arrivals=None if rate is None else Arrivals(rate, seconds, seed, rule),
        model=model,
        api_key=api_key,
        has_phases=phases,
        outputs=outputs,
        reference=reference,
        json_file=json_file,
    )
    raise typer.Exit(bench_agents.main(bench))
