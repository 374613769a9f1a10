"""The commands of ``flowpath bench``."""

from pathlib import Path
from typing import Annotated

import typer

from common.config.load import load_settings
from common.errors import ConfigError
from services.cli.bench_agents_command import agents
from services.cli.bench_serve_load import FIRST_TOKEN_ID, Arrival, PromptKind, Workload
from services.cli.bench_serve_report import Slo
from services.cli.terminal import ends_by_name

app = typer.Typer(help="Measure this host and this cluster.", no_args_is_help=True)
app.command("agents")(agents)


@app.command()
@ends_by_name
def serve(  # noqa: PLR0917 - typer gives them by name
    url: Annotated[
        str | None,
        typer.Option("--url", help="Any OpenAI-compatible server; by default this host's."),
    ] = None,
    model: Annotated[str, typer.Option("--model", help="Default: the first it serves.")] = "",
    requests: Annotated[int, typer.Option("--requests", min=1, help="Requests measured.")] = 100,
    warmup: Annotated[
        int, typer.Option("--warmup", min=0, help="Requests before, not counted.")
    ] = 4,
    input_tokens: Annotated[int, typer.Option("--input-tokens", min=1)] = 128,
    output_tokens: Annotated[int, typer.Option("--output-tokens", min=1)] = 64,
    prompt: Annotated[
        PromptKind,
        typer.Option("--prompt", help="Token ids (exact length), words, or words as a chat."),
    ] = PromptKind.IDS,
    vocab_size: Annotated[
        int, typer.Option("--vocab-size", min=FIRST_TOKEN_ID + 1, help="Bound of token ids.")
    ] = 4096,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", min=1, help="Closed loop: requests kept open.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", min=1e-6, help="Poisson arrivals: requests/s.")
    ] = None,
    burst: Annotated[
        int | None, typer.Option("--burst", min=1, help="Bursts: requests sent at once.")
    ] = None,
    burst_seconds: Annotated[
        float, typer.Option("--burst-seconds", min=0.0, help="Time between bursts.")
    ] = 1.0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos/--no-ignore-eos", help="Always draw all output tokens.")
    ] = True,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0)] = 0.0,
    seed: Annotated[
        int,
        typer.Option("--seed", min=0, help="Of the prompts; the same ones are found cached again."),
    ] = 0,
    slo_ttft_ms: Annotated[float | None, typer.Option("--slo-ttft-ms", min=0.0)] = None,
    slo_tpot_ms: Annotated[float | None, typer.Option("--slo-tpot-ms", min=0.0)] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.1, help="Seconds a request.")
    ] = 600.0,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="OPENAI_API_KEY", show_envvar=True)
    ] = None,
    port: Annotated[
        str | None, typer.Option("--port", help="This host's gateway, where no --url is given.")
    ] = None,
    log_dir: Annotated[
        Path | None,
        typer.Option("--log-dir", help="The server's log files, for the times of handoffs."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all numbers to this file.")
    ] = None,
) -> None:
    """Load a server with random prompts and print latencies, throughput and failures.

    Ends with exit code 1 when a completion is missing. The load is a closed loop of 4 unless
    --rate, --burst or --concurrency says otherwise.
    """
    from services.cli import bench_serve  # noqa: PLC0415 - each command loads its own

    if sum(given is not None for given in (concurrency, rate, burst)) > 1:
        raise ConfigError("--concurrency, --rate and --burst are different loads: give one")
    arrival = Arrival.CLOSED
    if rate is not None:
        arrival = Arrival.POISSON
    elif burst is not None:
        arrival = Arrival.BURST
    if url is None:
        settings = load_settings({"port": port}).settings
        url, log_dir = settings.url, log_dir or settings.log_dir
    workload = Workload(
        num_requests=requests,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        prompt_kind=prompt,
        arrival=arrival,
        seed=seed,
        rate=rate or 1.0,
        burst=burst or 1,
        burst_seconds=burst_seconds,
        concurrency=concurrency or 4,
        vocab_size=vocab_size,
        is_ignoring_eos=ignore_eos,
        temperature=temperature,
    )
    options = bench_serve.BenchOptions(
        url=url,
        workload=workload,
        slo=Slo(slo_ttft_ms, slo_tpot_ms),
        num_warmup=warmup,
        timeout_seconds=timeout,
        model=model,
        api_key=api_key,
        log_dir=log_dir,
        json_file=json_file,
    )
    raise typer.Exit(bench_serve.main(options))
