"""``flowpath monitor``: one metric of every worker, line by line, interval by interval."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from common.config.settings import Settings
from common.errors import ConfigError
from common.messages.admin import StatusReport
from services.cli.admin import need_status
from services.cli.monitored import BY_LAYER_NOTE, Meter, Metric, Reading, find_metric
from services.cli.terminal import out

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m)?")
_UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, None: 1.0}
SHORTEST_SECONDS = 0.1
MANY = 1e7
"""From here on a number is shortened."""

Ask = Callable[[], Awaitable[StatusReport]]
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class MonitorOptions:
    """What to stream; ``count`` intervals, or for ever."""

    metric: str
    interval: str = "1s"
    count: int | None = None
    by_layer: bool = False
    as_json: bool = False


def show_monitor(settings: Settings, options: MonitorOptions) -> None:
    """Stream until told to stop. ConfigError for what cannot be, or without a controller."""
    metric = find_metric(options.metric, by_layer=options.by_layer)
    seconds = parse_duration(options.interval)

    async def ask() -> StatusReport:
        return await need_status(settings)

    try:
        asyncio.run(monitor(ask, metric, options, seconds, _tell))
    except KeyboardInterrupt:
        return


async def monitor(
    ask: Ask, metric: Metric, options: MonitorOptions, seconds: float, tell: Tell
) -> None:
    """Ask every ``seconds`` and tell one line a worker; a metric of spans begins one later."""
    meter, told = Meter(metric), 0
    if not options.as_json:
        tell(f"# {metric.name}: {metric.meaning}")
        if options.by_layer:
            tell(f"# by layer: {BY_LAYER_NOTE}")
    loop = asyncio.get_running_loop()
    due = loop.time()
    if metric.has_beginning:
        meter.take(await ask())
        due += seconds
    while options.count is None or told < options.count:
        await asyncio.sleep(max(0.0, due - loop.time()))
        due = max(due + seconds, loop.time())
        at = datetime.now(UTC)
        for reading in meter.take(await ask()):
            line = _line(at, metric, reading, has_layers=options.by_layer)
            tell(_json(at, metric, reading) if options.as_json else line)
        told += 1


def parse_duration(text: str) -> float:
    """Return the seconds of 500ms, 1s, 2m or a bare number of seconds."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"--interval {text}: say 500ms, 1s or 2m")
    seconds = float(match[1]) * _UNIT_SECONDS[match[2]]
    if seconds < SHORTEST_SECONDS:
        raise ConfigError(f"--interval {text}: the shortest is {SHORTEST_SECONDS:g} s")
    return seconds


def _line(at: datetime, metric: Metric, reading: Reading, *, has_layers: bool) -> str:
    layers = "  all layers" if has_layers else ""
    value = "-" if reading.value is None else _number(metric, reading.value)
    who = "all" if reading.worker_id is None else reading.worker_id
    return f"{at:%H:%M:%S}  {who:<12}  {reading.role:<8}{layers}  {value}"


def _number(metric: Metric, value: float) -> str:
    if not metric.unit:
        return f"{value:.3f}"
    return f"{value:.0f} {metric.unit}" if value < MANY else f"{value:.3e} {metric.unit}"


def _json(at: datetime, metric: Metric, reading: Reading) -> str:
    return json.dumps(
        {
            "at": at.isoformat(timespec="milliseconds"),
            "worker": reading.worker_id,
            "role": reading.role,
            "metric": metric.name,
            "value": reading.value,
        }
    )


def _tell(line: str) -> None:
    out().print(line, markup=False)
