"""Writes the pages that the code itself can say; ``--check`` fails when one is stale.

``python -m docs.generate`` from the repository's root.
"""

import argparse
import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from common.config.load import flag_of, variable_of
from common.config.settings import GROUPS, Settings
from common.config.sizes import format_size
from common.config.value_types import is_size
from common.handoff.machine import Ignored, Illegal, Legal, PeerFault, Table, Verdict
from common.handoff.migration import MIGRATION_TABLE
from common.handoff.receiver import RECEIVER_TABLE
from common.handoff.sender import SENDER_TABLE
from common.messages import admin, control, fields, handoff, tokens
from common.messages.codec import (
    MAX_FRAMES,
    MAX_HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    PROTOCOL_VERSION,
)
from common.sampling import SampledToken, SamplingParams
from common.telemetry.metrics import ControllerMetrics, WorkerMetrics, registered_metrics
from common.transport.channels import CHANNELS
from services.controller.policy.scenario import SCENARIO_TABLE, Scenario
from services.controller.request_machine import REQUEST_TABLE
from services.gateway.metrics import GatewayMetrics

FOLDER = Path(__file__).parent
NOTICE = "<!-- Written by `python -m docs.generate`; edit the code, not this page. -->"

Hint = Any  # Any: what a field is annotated with has no common type

PROTOCOL_INTRO = (
    f"Protocol version {PROTOCOL_VERSION}. A message is 1 to {MAX_FRAMES} ZeroMQ frames. The "
    "first is a MessagePack array: protocol version, sender, epoch, role generation, sequence"
    " number, cause, tag (the message's name), body (a map of its fields), of at most "
    f"{format_size(MAX_HEADER_BYTES)}. The others are raw payloads of at most "
    f"{format_size(MAX_PAYLOAD_BYTES)} together. A message that is not of its conversation, "
    "has an unknown field or a value out of bounds is refused and logged."
)
SETTINGS_INTRO = (
    "A flag goes before an environment variable, that before the TOML file named by "
    "`--config` or `FLOWPATH_CONFIG`, that before the default. `flowpath serve --check` "
    "prints what is in effect and where each value comes from. A file's keys are the names "
    "below; an unknown one is refused. A size is bytes, or a number with `KB`, `MB`, `GB` "
    "(decimal) or `KiB`, `MiB`, `GiB` (binary)."
)
METRICS_INTRO = (
    "Prometheus' text format. A gateway serves its metrics at `/metrics` of the HTTP port; several "
    "gateways share that port, and a scrape reaches any of them. With "
    "`FLOWPATH_METRICS_PORT_BASE` set, every process serves its own metrics on a loopback port: "
    "the controller on the base, then the gateways, prefill workers and decode workers in the "
    "order of their numbers. By default no process listens for scrapes. A histogram has the "
    "samples `_bucket`, `_sum` and `_count`; times are in seconds."
)
MACHINES_INTRO = (
    "Each cell of a table is decided: the phases an event may lead to; *ignored*, with the "
    "reason; **peer's fault**, which the peer's message is dropped and logged for; or "
    "**illegal**, a bug of ours that changes nothing and carries the story that led to it."
)


@dataclass(frozen=True, slots=True)
class Machine:
    """One state machine: its title, where it stands, its theory, its table and first phase."""

    title: str
    path: str
    table: Table
    first: str


MACHINES = (
    Machine(
        "A request in the controller",
        "services/controller/request_machine.py",
        REQUEST_TABLE,
        "unknown",
    ),
    Machine(
        "The cluster's load",
        "services/controller/policy/scenario.py",
        SCENARIO_TABLE,
        Scenario.NORMAL,
    ),
    Machine("A handoff's prefill side", "common/handoff/sender.py", SENDER_TABLE, "reserving"),
    Machine("A handoff's decode side", "common/handoff/receiver.py", RECEIVER_TABLE, "reserved"),
    Machine(
        "A decode that leaves its worker",
        "common/handoff/migration.py",
        MIGRATION_TABLE,
        "freezing",
    ),
)

CONVERSATIONS: tuple[tuple[str, ModuleType, tuple[str, ...]], ...] = (
    (
        "Control",
        control,
        (
            "WorkerToController",
            "GatewayToController",
            "ControllerToWorker",
            "ControllerToGateway",
        ),
    ),
    ("Handoff", handoff, ("PrefillToDecode", "DecodeToPrefill")),
    ("Tokens", tokens, ("WorkerToGateway",)),
    ("Admin", admin, ("CliToController", "ControllerToCli")),
)
PARTS = (
    fields.KVCounts,
    fields.WorkerLoad,
    fields.WorkerRates,
    fields.PeerInfo,
    fields.PairStatus,
    fields.PoolHandle,
    fields.CudaPoolHandle,
    fields.NcclPoolHandle,
    fields.TcpPoolHandle,
    SamplingParams,
    SampledToken,
    handoff.FirstToken,
    tokens.TokenDelta,
    fields.PhaseRecord,
    admin.WorkerStatus,
    admin.GatewayStatus,
)


def protocol_page() -> str:
    """Every channel and message."""
    lines = [
        "# The protocol",
        "",
        NOTICE,
        "",
        PROTOCOL_INTRO,
        "",
        "## Channels",
        "",
        *_row("channel", "connects", "binds", "queue bound", "largest message", "when full", "for"),
        *_row(*["---"] * 7),
    ]
    for channel in CHANNELS:
        lines += _row(
            channel.name,
            channel.connects,
            channel.binds,
            f"{channel.high_water_mark} messages",
            format_size(channel.max_message_bytes),
            f"`{channel.when_full}`",
            channel.meaning,
        )
    for title, module, unions in CONVERSATIONS:
        lines += ["", f"## {title}", "", _text(module)]
        for name in unions:
            members = _members(getattr(module, name))
            lines += ["", f"### {_words(name)}"]
            for message in members:
                lines += ["", *_struct(message, "####")]
    lines += ["", "## Parts of messages"]
    for part in PARTS:
        lines += ["", *_struct(part, "###")]
    return "\n".join(lines) + "\n"


def settings_page() -> str:
    """Every setting."""
    lines = [
        "# Settings",
        "",
        NOTICE,
        "",
        SETTINGS_INTRO,
    ]
    for group in GROUPS:
        lines += ["", f"## {_title(group)}", "", _text(group).partition("\n")[0], ""]
        lines += _row("setting", "flag", "variable", "default", "meaning")
        lines += _row(*["---"] * 5)
        for name, field in group.model_fields.items():
            lines += _row(
                f"`{name}`",
                f"`{flag_of(name)}`",
                f"`{variable_of(name)}`",
                _default(name),
                field.description or "",
            )
    return "\n".join(lines) + "\n"


def machines_page() -> str:
    """Every state machine: theory, picture and table."""
    lines = [
        "# State machines",
        "",
        NOTICE,
        "",
        MACHINES_INTRO,
    ]
    for machine in MACHINES:
        module = inspect.getmodule(_phase_type(machine.table))
        lines += ["", f"## {machine.title}", "", f"`{machine.path}`"]
        lines += ["", _text(module) if module else "", "", "```mermaid", "stateDiagram-v2"]
        lines += [f"    [*] --> {machine.first}", *_arrows(machine.table), "```", ""]
        lines += [*_row("phase", "event", "verdict"), *_row(*["---"] * 3)]
        for (phase, event), verdict in machine.table.items():
            lines += _row(f"`{phase}`", f"`{event}`", _verdict(phase, verdict))
    return "\n".join(lines) + "\n"


def metrics_page() -> str:
    """Every metric of every program."""
    lines = ["# Metrics", "", NOTICE, "", METRICS_INTRO]
    for title, registry in (
        ("Gateway", GatewayMetrics().registry),
        ("Worker", WorkerMetrics().registry),
        ("Controller", ControllerMetrics().registry),
    ):
        lines += ["", f"## {title}", "", *_row("metric", "type", "labels", "meaning")]
        lines += _row("---", "---", "---", "---")
        for metric in registered_metrics(registry):
            labels = ", ".join(f"`{label}`" for label in metric.labels)
            lines += _row(f"`{metric.name}`", metric.kind, labels, metric.meaning)
    return "\n".join(lines) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "protocol.md": protocol_page,
    "metrics.md": metrics_page,
    "settings.md": settings_page,
    "state-machines.md": machines_page,
}


def stale_pages(folder: Path = FOLDER) -> list[str]:
    """Return the names of the pages that do not say what the code says."""
    return [
        name
        for name, write in PAGES.items()
        if not (folder / name).exists() or (folder / name).read_text() != write()
    ]


def main(argv: list[str] | None = None) -> int:
    """Write the pages, or check them; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m docs.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when stale")
    if parser.parse_args(argv).check:
        stale = stale_pages()
        for name in stale:
            print(f"docs/{name} is stale: run `python -m docs.generate`")
        return 1 if stale else 0
    for name, write in PAGES.items():
        (FOLDER / name).write_text(write())
    return 0


def _row(*cells: str) -> Iterator[str]:
    yield "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _text(thing: object) -> str:
    return inspect.cleandoc(getattr(thing, "__doc__", None) or "")


def _title(group: type) -> str:
    return group.__name__.removesuffix("Settings")


def _words(name: str) -> str:
    sender, _, receiver = name.partition("To")
    return f"{sender} → {receiver}"


def _members(union: Hint) -> tuple[type, ...]:
    return get_args(union) or (union,)


def _struct(struct: type, mark: str) -> Iterator[str]:
    yield f"{mark} {struct.__name__}"
    yield ""
    yield _text(struct)
    found = dataclasses.fields(struct)
    if not found:
        return
    yield ""
    yield from _row("field", "type")
    yield from _row("---", "---")
    hints = inspect.get_annotations(struct)
    for field in found:
        yield from _row(f"`{field.name}`", f"`{_type(hints[field.name])}`")


def _type(hint: Hint) -> str:
    origin: object = get_origin(hint)
    arguments = get_args(hint)
    if hint is NoneType:
        return "None"
    if origin is Annotated:
        base = _type(arguments[0])
        bounds = [text for text in map(_bounds, arguments[1:]) if text]
        return f"{base} ({', '.join(bounds)})" if bounds else base
    if origin in (Union, UnionType):
        return " | ".join(_type(argument) for argument in arguments)
    if origin is tuple:
        return f"list of {_type(arguments[0])}" if len(arguments) == 2 else "list"
    if origin is dict:
        return f"map of {_type(arguments[0])} to {_type(arguments[1])}"
    if arguments:
        return " | ".join(repr(argument) for argument in arguments)
    return str(getattr(hint, "__name__", hint))


def _bounds(info: Hint) -> str:
    texts = []
    for part in getattr(info, "metadata", ()):
        for name, mark in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
            if (bound := getattr(part, name, None)) is not None:
                texts.append(f"{mark} {bound}")
        if (most := getattr(part, "max_length", None)) is not None:
            texts.append(f"length ≤ {most}")
        if (pattern := getattr(part, "pattern", None)) is not None:
            texts.append(f"matches {pattern}")
    return ", ".join(texts)


def _default(name: str) -> str:
    field = Settings.model_fields[name]
    if field.default_factory is not None:
        return "see its meaning"
    if is_size(field):
        return f"`{format_size(field.default)}`"
    if isinstance(field.default, bool):
        return f"`{str(field.default).lower()}`"
    return f"`{field.default}`" if str(field.default) else "empty"


def _phase_type(table: Table) -> type:
    return type(next(iter(table))[0])


def _arrows(table: Table) -> Iterator[str]:
    arrows: dict[tuple[str, str], list[str]] = {}
    for (phase, event), verdict in table.items():
        if isinstance(verdict, Legal):
            for target in verdict.to:
                if target != phase:
                    arrows.setdefault((str(phase), str(target)), []).append(event)
    for (source, goal), events in arrows.items():
        yield f"    {source} --> {goal}: {', '.join(events)}"


def _verdict(phase: StrEnum, verdict: Verdict) -> str:
    match verdict:
        case Legal(to):
            names = ("stays" if target == phase else f"→ `{target}`" for target in to)
            return ", ".join(names)
        case Ignored(reason):
            return f"*ignored*: {reason}"
        case PeerFault(reason):
            return f"**peer's fault**: {reason}"
        case Illegal(reason):
            return f"**illegal**: {reason}"


if __name__ == "__main__":
    sys.exit(main())
