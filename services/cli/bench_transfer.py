"""``flowpath bench transfer``: how fast KV moves between two processes, in host or GPU memory.

The measuring runs in a process of its own, because it needs what this program starts without.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from common.errors import ConfigError
from services.cli.result_file import result_file
from services.cli.terminal import grid, out

MODULE = "common.transfer.bench"
CUDA_MODULE = "common.transfer.bench_cuda"
Row = dict[str, str | int | float]

_COLUMNS = (
    ("shape", "shape", "{}"),
    ("tokens", "tokens", "{}"),
    ("pool", "pool", "{}"),
    ("transport", "transport", "{}"),
    ("num_bytes", "MiB", "{:.1f}"),
    ("num_calls", "calls", "{}"),
    ("milliseconds", "ms", "{:.2f}"),
    ("gigabytes_per_second", "GB/s", "{:.2f}"),
    ("limit_gigabytes_per_second", "limit GB/s", "{:.2f}"),
    ("share_of_limit", "share", "{:.2f}"),
    ("limit", "limit", "{}"),
)


@dataclass(frozen=True, slots=True)
class TransferBench:
    """What to measure; empty fields take the measuring module's defaults. Lists have commas.

    With ``devices``, the GPUs of source and target, the pools are in GPU memory.
    """

    shapes: str = ""
    tokens: str = ""
    pools: str = ""
    transports: str = ""
    turns: int = 0
    devices: str = ""

    @property
    def module(self) -> str:
        """The measuring module."""
        return CUDA_MODULE if self.devices else MODULE

    def arguments(self) -> list[str]:
        """Return the measuring module's arguments."""
        values = {
            "--shapes": self.shapes,
            "--tokens": self.tokens,
            "--pools": self.pools,
            "--transports": self.transports,
            "--turns": str(self.turns or ""),
            "--devices": self.devices,
        }
        return [part for name, value in values.items() if value for part in (name, value)]


def run(bench: TransferBench, *, as_json: bool, output: Path | None) -> None:
    """Measure, show progress on the error output and a table or JSON on the output.

    ``output`` keeps the JSON in a file as well. ConfigError when the wishes cannot be measured, or
    the file cannot be written.
    """
    with result_file(output) as keep:
        rows = _measure(bench)
        text = json.dumps({"rows": rows}, indent=2)
        keep(text + "\n")
    if as_json:
        out().print(text, markup=False)
    else:
        out().print(_table(rows))


def _measure(bench: TransferBench) -> list[Row]:
    progress = Console(file=sys.stderr, highlight=False, emoji=False, soft_wrap=True)
    rows: list[Row] = []
    for line in _lines(bench):
        if "error" in line:
            raise ConfigError(str(line["error"]))
        if "doing" in line:
            progress.print(str(line["doing"]), markup=False)
        else:
            rows.append(line["row"])
    return rows


def _lines(bench: TransferBench) -> Iterator[dict[str, Row]]:
    with subprocess.Popen(  # noqa: S603 - this interpreter and a module of ours
        [sys.executable, "-m", bench.module, *bench.arguments()],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None, "it was asked for"
        for line in process.stdout:
            yield json.loads(line)
    if process.returncode not in (0, 2):  # 2 has told its reason
        raise ConfigError(f"measuring ended with exit code {process.returncode}")


def _table(rows: list[Row]) -> Table:
    table = grid()
    for _, title, form in _COLUMNS:
        table.add_column(title, justify="left" if form == "{}" and title != "calls" else "right")
    for row in rows:
        shown = row | {"num_bytes": float(row["num_bytes"]) / 2**20}
        table.add_row(*(form.format(shown[name]) for name, _, form in _COLUMNS))
    return table
