"""The commands of ``flowpath``."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from common.config.load import LoadedSettings, load_settings
from common.config.settings import Settings
from common.messages.admin import RoleControl
from services.cli import orders
from services.cli.bench import app as bench
from services.cli.check import print_settings
from services.cli.flags import Load, with_settings
from services.cli.supervisor.prepare import claim_port
from services.cli.supervisor.serve import flowpath_version
from services.cli.supervisor.serve import serve as serve_cluster
from services.cli.terminal import ends_by_name, out

app = typer.Typer(
    name="flowpath",
    help="Serves large language models with prefill and decode on separate workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

CHAT_TEMPERATURE = 0.2
"""Small models wander at 1, the API's default."""

Config = Annotated[
    Path | None, typer.Option("--config", help="TOML file of settings (FLOWPATH_CONFIG).")
]
Port = Annotated[str | None, typer.Option("--port", help="HTTP port of the gateway.")]
RunDir = Annotated[str | None, typer.Option("--run-dir", help="Folder of sockets.")]
Worker = Annotated[
    str, typer.Argument(help="Name of a worker, as `flowpath status` shows it.", metavar="WORKER")
]
Wait = Annotated[
    bool, typer.Option("--wait", help="Return when it is done, and tell what is left.")
]
Timeout = Annotated[
    float, typer.Option("--timeout", min=0.1, help="Longest wait.", metavar="SECONDS")
]
WAIT_SECONDS = 300.0
LogDir = Annotated[str | None, typer.Option("--log-dir", help="Folder of log files.")]


@app.callback(invoke_without_command=True)
def root(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.")
    ] = False,
) -> None:
    """Take the flags that stand before a command."""
    if show_version:
        out().print(f"flowpath {flowpath_version()}")
        raise typer.Exit


def _serve(load: Load, check: bool) -> None:
    """Start and supervise every process on this host until Ctrl-C."""
    loaded = load()
    if check:
        print_settings(loaded, has_gateway=True, has_workers=True)
        return
    settings = loaded.settings
    if is_any := settings.port == 0:
        settings = _with_free_port(loaded)
    raise typer.Exit(serve_cluster(settings, is_port_free=is_any))


def _with_free_port(loaded: LoadedSettings) -> Settings:
    """Fix the port, and with it the folders that are named after it."""
    settings = loaded.settings
    values = {
        name: getattr(settings, name)
        for name, source in loaded.sources.items()
        if source != "default"
    }
    values["port"] = claim_port(settings.host, 0)
    return Settings.model_validate(values)


def _one_program(program: str, process_id: str, summary: str) -> None:
    def command(load: Load, check: bool) -> None:
        loaded = load()
        if check:
            print_settings(
                loaded,
                has_gateway=program == "gateway",
                has_workers=program in ("prefill", "decode"),
            )
            return
        from services.cli.program import become  # noqa: PLC0415 - keeps os.exec out of tests

        is_combined = program == "prefill" and loaded.settings.combined
        usual = "combined-0" if is_combined else process_id
        is_named = program != "controller" and loaded.settings.worker_id
        become(program, loaded.settings, loaded.settings.worker_id if is_named else usual)

    command.__doc__ = summary
    command.__name__ = program
    app.command(program)(ends_by_name(with_settings(command)))


app.command("serve")(ends_by_name(with_settings(_serve)))
_one_program("gateway", "gateway-0", "Run one gateway.")
_one_program("controller", "controller", "Run the controller.")
_one_program("prefill", "prefill-0", "Run one prefill worker, with --combined one for both roles.")
_one_program("decode", "decode-0", "Run one decode worker.")


@app.command()
@ends_by_name
def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    port: Port = None,
    run_dir: RunDir = None,
    config: Config = None,
) -> None:
    """Show workers, their KV blocks and gateways, as the controller sees them."""
    from services.cli.status import show_status  # noqa: PLC0415 - each command loads its own

    loaded = load_settings({"port": port, "run_dir": run_dir}, config)
    show_status(loaded.settings, as_json=as_json)


@app.command("switch-role")
@ends_by_name
def switch_role(
    worker: Worker,
    role: Annotated[orders.GivenRole, typer.Argument(help="The role that it takes from now on.")],
    wait: Wait = False,
    timeout: Timeout = WAIT_SECONDS,
    port: Port = None,
    run_dir: RunDir = None,
    config: Config = None,
) -> None:
    """Let a worker take the other role; its running requests go on."""
    settings = load_settings({"port": port, "run_dir": run_dir}, config).settings
    seconds = timeout if wait else None
    asyncio.run(orders.switch_role(settings, worker, role, seconds, _tell))


@app.command()
@ends_by_name
def roles(
    control: Annotated[
        RoleControl,
        typer.Argument(help="auto: load gives the roles. manual: only `flowpath switch-role`."),
    ],
    port: Port = None,
    run_dir: RunDir = None,
    config: Config = None,
) -> None:
    """Let load give the workers their roles, or only the operator."""
    settings = load_settings({"port": port, "run_dir": run_dir}, config).settings
    asyncio.run(orders.set_role_control(settings, control, _tell))


@app.command()
@ends_by_name
def drain(
    worker: Worker,
    undo: Annotated[bool, typer.Option("--undo", help="Let it take work again.")] = False,
    wait: Wait = False,
    timeout: Timeout = WAIT_SECONDS,
    port: Port = None,
    run_dir: RunDir = None,
    config: Config = None,
) -> None:
    """Let a worker take no new work and hand its decodes over; its process stays."""
    settings = load_settings({"port": port, "run_dir": run_dir}, config).settings
    seconds = timeout if wait else None
    asyncio.run(orders.drain(settings, worker, not undo, seconds, _tell))


def _tell(line: str) -> None:
    out().print(line, markup=False)


@app.command()
@ends_by_name
def monitor(  # noqa: PLR0917 - typer gives them by name
    metric: Annotated[str, typer.Option("--metric", help="Its name; an unknown one lists all.")],
    interval: Annotated[
        str, typer.Option("--interval", help="500ms, 1s, 2m: time between lines.")
    ] = "1s",
    count: Annotated[
        int | None, typer.Option("--count", min=1, help="Intervals; for ever by default.")
    ] = None,
    by_layer: Annotated[
        bool, typer.Option("--by-layer", help="Tell it of each layer, where it has layers.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
    port: Port = None,
    run_dir: RunDir = None,
    config: Config = None,
) -> None:
    """Stream one metric of every worker until Ctrl-C."""
    from services.cli.monitor import MonitorOptions, show_monitor  # noqa: PLC0415

    settings = load_settings({"port": port, "run_dir": run_dir}, config).settings
    show_monitor(settings, MonitorOptions(metric, interval, count, by_layer, as_json))


@app.command()
@ends_by_name
def logs(
    request: Annotated[
        str | None, typer.Option("--request", help="Only the story of this request id.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    port: Port = None,
    log_dir: LogDir = None,
    config: Config = None,
) -> None:
    """Show the log files of all processes, merged by time."""
    from services.cli.logs import show_logs  # noqa: PLC0415

    loaded = load_settings({"port": port, "log_dir": log_dir}, config)
    show_logs(loaded.settings.log_dir, request, follow=follow)


@app.command()
@ends_by_name
def explain(
    request: Annotated[
        str, typer.Argument(help="A request's id, or an answer's.", metavar="REQUEST_ID")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    port: Port = None,
    log_dir: LogDir = None,
    config: Config = None,
) -> None:
    """Tell where the time of a request went, and every decision about it, from the log files."""
    from services.cli.explain import show_explanation  # noqa: PLC0415

    loaded = load_settings({"port": port, "log_dir": log_dir}, config)
    show_explanation(loaded.settings.log_dir, request, as_json=as_json)


@app.command()
@ends_by_name
def keygen(
    folder: Annotated[Path, typer.Argument(help="Key folder to make.", metavar="FOLDER")],
) -> None:
    """Make the keys of a host, for a cluster over several hosts."""
    from services.cli.keygen import make_key_folder  # noqa: PLC0415

    make_key_folder(folder)


@app.command()
@ends_by_name
def chat(
    url: Annotated[
        str | None, typer.Option("--url", help="Gateway; by default this host's at --port.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            min=1,
            help="Longest answer in tokens; by default 512, or what the context leaves.",
        ),
    ] = None,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0)] = CHAT_TEMPERATURE,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="OPENAI_API_KEY", show_envvar=True)
    ] = None,
    port: Port = None,
    config: Config = None,
) -> None:
    """Chat with the served model; /exit ends, Ctrl-C stops an answer."""
    from services.cli import chat as terminal_chat  # noqa: PLC0415

    target = url or load_settings({"port": port}, config).settings.url
    terminal_chat.main(target, max_tokens, temperature, system, api_key)


app.add_typer(bench, name="bench")


@bench.command("transfer")
@ends_by_name
def measure_transfers(  # noqa: PLR0917 - typer gives them by name
    shapes: Annotated[
        str,
        typer.Option(
            "--shapes", help="Model shapes: smollm2-135m, llama-8b, llama-70b-tp8; all by default."
        ),
    ] = "",
    tokens: Annotated[str, typer.Option("--tokens", help="Prompt lengths; a few by default.")] = "",
    pools: Annotated[str, typer.Option("--pools", help="fresh, churned; both by default.")] = "",
    transports: Annotated[
        str,
        typer.Option(
            "--transports",
            help="shm, tcp, rdma; on GPUs cuda_ipc, layerwise, gather_buffer; all by default.",
        ),
    ] = "",
    devices: Annotated[
        str,
        typer.Option(
            "--devices", help="GPUs of source and target, such as 0,0 or 0,1, for pools on GPUs."
        ),
    ] = "",
    turns: Annotated[int, typer.Option("--turns", min=1, help="Turns of each; medians count.")] = 9,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", help="Keep the JSON in this file.")
    ] = None,
) -> None:
    """Measure how fast KV moves between two processes, beside this host's limits."""
    from services.cli import bench_transfer  # noqa: PLC0415

    wish = bench_transfer.TransferBench(shapes, tokens, pools, transports, turns, devices)
    bench_transfer.run(wish, as_json=as_json, output=output)


def main() -> None:
    """Run the command line."""
    app()


def monitor_main() -> None:
    """Run ``flowpath monitor`` by its other name, ``dualpath-monitor``."""
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command()(monitor)
    alone()
