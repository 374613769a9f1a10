"""How results are shown and kept."""

import json
import os
import platform
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

RESULTS = Path(__file__).parent / "results"

Cell = str | int | float | bool


def machine_class() -> dict[str, Cell]:
    """Describe the kind of machine, without its name."""
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    gpus: dict[str, Cell] = {}
    if (tool := shutil.which("nvidia-smi")) is not None:
        query = (tool, "--query-gpu=name", "--format=csv,noheader")
        told = subprocess.run(query, capture_output=True, text=True, check=False).stdout
        names = Counter(told.split("\n")[:-1])
        gpus = {"gpus": ", ".join(f"{count} x {name}" for name, count in names.items())}
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        **gpus,
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 1024**3),
        "python": platform.python_version(),
    }


def write_results(
    benchmark: str, argv: Sequence[str], rows: Sequence[dict[str, Cell]], *, name: str | None = None
) -> Path:
    """Keep rows as ``results/NAME-DATE.json`` (name: the benchmark's) and return the file.

    Of absolute paths in the command only the last name is kept: the others are the machine's.
    """
    date = datetime.now(UTC).date().isoformat()
    path = RESULTS / f"{name or benchmark}-{date}.json"
    RESULTS.mkdir(exist_ok=True)
    document = {
        "date": date,
        "command": " ".join(["python", "-m", f"benchmarks.{benchmark}", *map(_shown, argv)]),
        "machine": machine_class(),
        "rows": list(rows),
    }
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return path


def _shown(argument: str) -> str:
    option, equals, value = argument.rpartition("=")
    return f"{option}{equals}{Path(value).name}" if value.startswith("/") else argument


def print_table(rows: Sequence[dict[str, Cell]]) -> None:
    """Print rows of the same columns, aligned."""
    columns = list(rows[0])
    lines = [columns, *([_text(row[column]) for column in columns] for row in rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))


def _text(cell: Cell) -> str:
    if isinstance(cell, bool):
        return "yes" if cell else "NO"
    return f"{cell:.3g}" if isinstance(cell, float) else str(cell)
