"""Stored KV by either side: ``python -m benchmarks storage_paths``.

Agents go on where an earlier run left their KV in a store, and every worker reads it over an
emulated link, which is what takes the time. ``basic`` clusters read on prefill workers alone,
``dual`` ones on either side, so what counts is how many links may be used:

======  ====  ====  ====
links   1P1D  2P1D  1P2D
======  ====  ====  ====
basic   1     2     1
dual    2     3     3
======  ====  ====  ====

``oracle`` is dual 1P1D without a limit, ``round_robin`` dual 2P1D whose workers are chosen in turn.
``slow dual`` and ``slow oracle`` have workers that take their steps slowly, and faster links: there
computing takes the time.

Each run starts its own cluster over the same store, so that pools are empty, and replays one round
of each agent: all hits come from the store. A first pass stores the contexts, and nothing is
written later; a second one, without limits, tells which tokens all runs must draw. The job
completion time (JCT) is that of all agents, started together. Medians of the repeats are compared,
within this one run.

The model is tiny, with random weights in float32, and rounds are as late ones of the paper's
agents: ``--append`` tokens, which are computed, behind a long context. Such a model computes in
less time than it takes to load, so workers are told to load always (``store_load``).
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from string import ascii_lowercase

from benchmarks.dummy_model import write_dummy_model
from benchmarks.report import Cell, print_table, write_results
from benchmarks.served_cluster import ROOT, ServedCluster, served

MODEL_SHAPE = "tiny"
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4
"""KV of one token: 2 layers, K and V, 2 heads of 16 numbers in float32."""
BLOCK_TOKENS = 64

APPENDED_TOKENS = 429
"""What every prompt has behind its context: the mean of the paper's set of 64K."""
CONTEXT_BLOCKS = (40, 56)
"""Fewest and most whole blocks of a context."""
GENERATED_TOKENS = 4
POOL_TOKENS = 64 * 4096
"""More than all agents need, so that none waits for room."""
LINK_TOKENS_PER_SECOND = 8000
SLOW_DOWN, SLOW_LINK = 4.0, 12 * LINK_TOKENS_PER_SECOND
RUN_SECONDS = 240.0

MAX_APART, MIN_GAIN, MAX_IMBALANCE, MAX_BESIDE_ORACLE = 0.08, 1.6, 1.2, 1.15


@dataclass(frozen=True, slots=True)
class Layout:
    """One cluster: its workers, who may read, and each worker's link in tokens a second (0: no
    limit)."""

    name: str
    num_prefill: int
    num_decode: int
    store_read: str
    link: int = LINK_TOKENS_PER_SECOND
    policy: str = "dualpath"
    slow_down: float = 1.0
    is_writing: bool = False

    @property
    def num_links(self) -> int:
        """How many workers may read from the store."""
        return self.num_prefill + (self.num_decode if self.store_read == "dual" else 0)

    def options(self, model: Path, store: Path) -> tuple[str, ...]:
        """Return the options of ``flowpath serve``."""
        return (
            *("--model", str(model), "--load-format", "dummy", "--dtype", "float32"),
            *("--prefill", str(self.num_prefill), "--decode", str(self.num_decode)),
            *("--roles", "manual", "--threads", "1", "--policy", self.policy),
            *("--kv-bytes", str(POOL_TOKENS * TOKEN_BYTES), "--block-size", str(BLOCK_TOKENS)),
            *("--segment-min-size", "1MiB", "--slow-down", str(self.slow_down)),
            *("--store", f"file:{store}", "--store-load", "always"),
            *("--store-read", self.store_read),
            "--store-writes" if self.is_writing else "--no-store-writes",
            *("--emulated-store-bandwidth", str(self.link * TOKEN_BYTES)),
        )


LAYOUTS = (
    Layout("basic 1P1D", 1, 1, "prefill"),
    Layout("basic 1P2D", 1, 2, "prefill"),
    Layout("basic 2P1D", 2, 1, "prefill"),
    Layout("dual 1P1D", 1, 1, "dual"),
    Layout("dual 2P1D", 2, 1, "dual"),
    Layout("dual 1P2D", 1, 2, "dual"),
    Layout("round_robin 2P1D", 2, 1, "dual", policy="round_robin"),
    Layout("oracle 1P1D", 1, 1, "dual", link=0),
    Layout("slow dual 1P1D", 1, 1, "dual", link=SLOW_LINK, slow_down=SLOW_DOWN),
    Layout("slow oracle 1P1D", 1, 1, "dual", link=0, slow_down=SLOW_DOWN),
)


@dataclass(frozen=True, slots=True)
class Replay:
    """What one replay measured; ``loaded`` are the tokens that each worker read."""

    jct_seconds: float
    num_failed: int
    num_different: int
    num_prompt_tokens: int
    loaded: dict[str, int]

    @property
    def num_loaded_tokens(self) -> int:
        """Tokens read from the store by all workers."""
        return sum(self.loaded.values())

    def imbalance(self, num_links: int) -> float:
        """Return the busiest link's tokens over the mean of all; 0 where nothing was read."""
        most = max(self.loaded.values(), default=0)
        return most * num_links / self.num_loaded_tokens if most else 0.0


def write_agents(path: Path, num_agents: int, num_appended: int, seed: int = 0) -> None:
    """Write agents of one round as message lists, one character a token.

    Contexts are the same whatever is appended to them.
    """
    source = random.Random(seed)
    lines = []
    for _ in range(num_agents):
        num_tokens = BLOCK_TOKENS * source.randint(*CONTEXT_BLOCKS)
        letters = "".join(source.choices(ascii_lowercase, k=num_tokens))
        messages = [
            {"role": "system", "content": letters},
            {"role": "user", "content": "y" * num_appended},
            {"role": "assistant", "content": "x" * GENERATED_TOKENS},
        ]
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines) + "\n")


def replay(cluster: ServedCluster, trace: Path, num_agents: int, *options: str) -> Replay:
    """Replay the agents with ``flowpath bench agents``. RuntimeError when that cannot run."""
    with tempfile.TemporaryDirectory(prefix="fp-") as root:
        path = Path(root) / "result.json"
        command = [
            *(sys.executable, "-m", "services.cli", "bench", "agents", "--url", cluster.url),
            *("--trace", str(trace), "--format", "messages", "--chars-per-token", "1"),
            *("--agents", str(num_agents), "--vocab-size", "1024", "--phases"),
            *("--timeout", str(RUN_SECONDS), "--json", str(path), *options),
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if not path.exists():
            raise RuntimeError(f"bench agents failed\n{done.stdout[-3000:]}\n{done.stderr[-2000:]}")
        told = json.loads(path.read_text())
    for example in told["failure_examples"]:
        print(f"  failed: {example}", flush=True)
    return Replay(
        jct_seconds=float(told["seconds"]),
        num_failed=int(told["num_agents"]) - int(told["num_finished"]),
        num_different=len(told.get("reference", {}).get("differences", [])),
        num_prompt_tokens=int(told["num_prompt_tokens"]),
        loaded={worker: int(of["num_tokens"]) for worker, of in told["loaded"].items()},
    )


def measure(num_agents: int, num_appended: int, repeats: int) -> dict[str, list[Replay]]:
    """Fill a store, and give each layout the agents in turn, ``repeats`` times."""
    found: dict[str, list[Replay]] = {layout.name: [] for layout in LAYOUTS}
    with tempfile.TemporaryDirectory(prefix="fp-") as root:
        folder = Path(root)
        model, store, trace = folder / "model", folder / "store", folder / "agents.jsonl"
        contexts, outputs = folder / "contexts.jsonl", folder / "outputs.jsonl"
        write_dummy_model(model, MODEL_SHAPE)
        write_agents(contexts, num_agents, 1)
        write_agents(trace, num_agents, num_appended)
        warm = Layout("warm", 1, 1, "dual", link=0, is_writing=True)
        with served(warm.name, warm.options(model, store)) as cluster:
            filled = replay(cluster, contexts, num_agents)
        again = Layout("again", 1, 1, "dual", link=0)
        with served(again.name, again.options(model, store)) as cluster:
            replay(cluster, trace, num_agents, "--outputs", str(outputs))
        print(f"  store filled in {filled.jct_seconds:.1f} s", flush=True)
        for turn in range(repeats):
            for layout in LAYOUTS:
                options = layout.options(model, store)
                with served(layout.name, options) as cluster:
                    taken = replay(cluster, trace, num_agents, "--reference", str(outputs))
                found[layout.name].append(taken)
                share = taken.num_loaded_tokens / max(1, taken.num_prompt_tokens)
                print(
                    f"  turn {turn + 1}/{repeats} {layout.name}: JCT {taken.jct_seconds:.2f} s, "
                    f"{100 * share:.0f} % from the store, links max/avg "
                    f"{taken.imbalance(layout.num_links):.2f}, {taken.num_different} differ",
                    flush=True,
                )
    return found


def _rows(found: dict[str, list[Replay]]) -> list[dict[str, Cell]]:
    return [
        {
            "layout": layout.name,
            "links": layout.num_links,
            "JCT s": median(r.jct_seconds for r in found[layout.name]),
            "JCT min": min(r.jct_seconds for r in found[layout.name]),
            "JCT max": max(r.jct_seconds for r in found[layout.name]),
            "max/avg": median(r.imbalance(layout.num_links) for r in found[layout.name]),
            "from store": median(
                r.num_loaded_tokens / max(1, r.num_prompt_tokens) for r in found[layout.name]
            ),
            "failed": sum(r.num_failed for r in found[layout.name]),
            "differ": sum(r.num_different for r in found[layout.name]),
        }
        for layout in LAYOUTS
    ]


def _comparisons(rows: Sequence[dict[str, Cell]]) -> list[dict[str, Cell]]:
    of = {str(row["layout"]): row for row in rows}

    def jct(name: str) -> float:
        return float(of[name]["JCT s"])

    def compared(first: str, second: str) -> tuple[str, float]:
        return f"JCT {first} / {second}", jct(first) / jct(second)

    alike = (
        ("dual 1P1D", "basic 2P1D"),
        ("dual 2P1D", "dual 1P2D"),
        ("basic 1P1D", "basic 1P2D"),
    )
    made = [
        (*compared(*pair), f"1 +- {MAX_APART}", abs(compared(*pair)[1] - 1) <= MAX_APART)
        for pair in alike
    ]
    gain = compared("basic 1P1D", "dual 1P1D")
    made.append((*gain, f">= {MIN_GAIN}", gain[1] >= MIN_GAIN))
    beside = compared("slow dual 1P1D", "slow oracle 1P1D")
    made.append((*beside, f"<= {MAX_BESIDE_ORACLE}", beside[1] <= MAX_BESIDE_ORACLE))
    for name in ("dual 1P1D", "dual 2P1D", "dual 1P2D"):
        apart = float(of[name]["max/avg"])
        made.append((f"links max/avg, {name}", apart, f"<= {MAX_IMBALANCE}", apart <= 1.2))
    turns = float(of["round_robin 2P1D"]["max/avg"])
    made.append(("links max/avg, round_robin 2P1D", turns, "beside", True))
    return [
        {"compared": what, "ratio": ratio, "target": target, "is_met": is_met}
        for what, ratio, target, is_met in made
    ]


def main(argv: list[str]) -> int:
    """Replay on every layout and compare; 0 when every target is met."""
    parser = argparse.ArgumentParser(prog="benchmarks storage_paths")
    parser.add_argument("--agents", type=int, default=40)
    parser.add_argument("--append", type=int, default=APPENDED_TOKENS, help="tokens, at least 1")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--short", action="store_true", help="fewer agents, once")
    arguments = parser.parse_args(argv)
    num_agents, repeats = arguments.agents, arguments.repeats
    if arguments.short:
        num_agents, repeats = min(num_agents, 12), 1
    rows = _rows(measure(num_agents, arguments.append, repeats))
    comparisons = _comparisons(rows)
    print_table(rows)
    print_table(comparisons)
    is_sound = all(row["failed"] == 0 and row["differ"] == 0 for row in rows)
    if not is_sound:
        print("a round failed or drew other tokens than the first pass")
    kept = write_results("storage_paths", argv, [*rows, *comparisons])
    print(f"kept in benchmarks/results/{kept.name}")
    return 0 if is_sound and all(row["is_met"] for row in comparisons) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
