"""An engine with two layers of K and V in a ring computes what the one with all of them does."""

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from common.engine.cuda.model import CudaModel
from common.engine.interface import StepRow
from common.engine.layerwise.cpu import LayerwiseCpuEngine
from common.engine.layerwise.cuda import LayerwiseCudaEngine
from common.engine.layerwise.stream import NUM_SLOTS, Span, SpanKind
from common.sampling import SampledToken
from tests.support.cuda_runs import PooledCudaEngine
from tests.support.engine_runs import PooledEngine, pool_view, row
from tests.support.tiny_models import save_tiny_model

NUM_LAYERS = 6
NUM_PLACES = 8
DEADLINE_SECONDS = 30.0


@pytest.fixture(scope="module", params=["llama", "qwen3", "mistral-window"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("m")
    save_tiny_model(request.param, path, num_hidden_layers=NUM_LAYERS)
    return path


class Both:
    """Both engines over pools of their own, in which the same blocks are given out."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.whole: PooledEngine | PooledCudaEngine
        self.spans: list[Span] = []
        # Torch's products depend on how many rows are computed at once.
        self.noise = 0.0 if kind == "cpu" else 1e-4
        if kind == "cpu":
            self.whole = PooledEngine(folder)
            self.pool = self.whole.pool.clone()
            self.ring: LayerwiseCpuEngine | LayerwiseCudaEngine = LayerwiseCpuEngine(
                *(folder, self.whole.layout, self.pool),
                num_places=NUM_PLACES,
                tell=self.spans.append,
            )
            return
        self.whole = PooledCudaEngine(folder)
        self.pool = self.whole.pool.clone()
        self.ring = LayerwiseCudaEngine(
            CudaModel.load(self.whole.config, "float32", torch.device("cpu")),
            *(self.whole.layout, memoryview(self.pool.numpy())),
            num_places=NUM_PLACES,
            max_num_batched_tokens=256,
            max_num_seqs=8,
            tell_span=self.spans.append,
        )

    def execute(self, *rows: StepRow) -> list[tuple[SampledToken, ...]]:
        """Compute a step with both; the tokens are the same, and K and V of all rows."""
        expected = self.whole.execute(*rows)
        drawn = self.ring.execute(rows)
        if self.noise:
            assert_near(drawn, expected, self.noise)
        else:
            assert drawn == expected
        for each in rows:
            end = each.start + len(each.token_ids)
            found, wanted = (stored(pool, self, each, end) for pool in (self.pool, self.whole.pool))
            assert torch.allclose(found, wanted, rtol=0, atol=self.noise)
        return expected


def assert_near(
    found: list[tuple[SampledToken, ...]], expected: list[tuple[SampledToken, ...]], noise: float
) -> None:
    for tokens_found, tokens_expected in zip(found, expected, strict=True):
        for token, other in zip(tokens_found, tokens_expected, strict=True):
            assert token.token_id == other.token_id
            assert token.logprob == pytest.approx(other.logprob, abs=noise)


def stored(pool: torch.Tensor, both: Both, row: StepRow, num_tokens: int) -> torch.Tensor:
    """Return K and V of a row's first tokens, (layers, planes, tokens, kv_heads, head_dim)."""
    view = pool_view(pool, both.whole.layout)[list(row.block_table)]
    return view.permute(1, 2, 0, 3, 4, 5).flatten(2, 3)[:, :, :num_tokens]


@pytest.fixture(params=["cpu", "the one for GPUs"])
def both(request: pytest.FixtureRequest, folder: Path) -> Iterator[Both]:
    made = Both(folder, request.param)
    with closing(made.ring):
        yield made


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(3, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_a_prompt_in_chunks_and_what_follows_it(both: Both) -> None:
    prompt = tokens(100, 1)
    blocks = both.whole.blocks_for(110)
    for start, end in ((0, 48), (48, 77)):
        both.execute(StepRow(prompt[start:end], start, blocks))
    ((last,),) = both.execute(row(prompt[77:], 77, blocks))
    for at in range(100, 106):
        ((last,),) = both.execute(row([last.token_id], at, blocks))


def test_a_step_that_does_not_fit_the_ring_at_once(both: Both) -> None:
    first, second, third = (both.whole.blocks_for(70) for _ in range(3))
    both.execute(row(tokens(64, 2), 0, first), row(tokens(70, 3), 0, second))
    both.execute(
        row(tokens(6, 4), 64, first), row(tokens(30, 5), 0, third), row(tokens(1, 6), 69, second)
    )
    assert both.ring.peak_places <= NUM_PLACES


def test_rows_share_the_blocks_of_a_prefix(both: Both) -> None:
    prefix = both.whole.blocks_for(64)
    both.execute(row(tokens(64, 7), 0, prefix))
    tails = [[*prefix, *both.whole.blocks_for(20)] for _ in range(2)]
    both.execute(*(row(tokens(20, 8 + at), 64, table) for at, table in enumerate(tails)))


def test_the_device_holds_two_layers_of_a_prompt(both: Both) -> None:
    blocks = both.whole.blocks_for(128)
    both.execute(row(tokens(128, 9), 0, blocks))
    whole_bytes = both.ring.peak_places * both.whole.layout.payload_bytes
    assert both.ring.peak_places == len(blocks) == NUM_PLACES
    assert both.ring.ring_bytes <= 3 / NUM_LAYERS * whole_bytes


def test_moves_keep_to_their_order(both: Both) -> None:
    blocks = both.whole.blocks_for(100)
    both.execute(row(tokens(60, 1), 0, blocks))
    both.spans.clear()
    both.execute(row(tokens(40, 2), 60, blocks))
    spans = {(span.kind, span.layer): span for span in both.spans}
    assert len(spans) == 3 * NUM_LAYERS
    layer_bytes = both.whole.layout.payload_bytes // NUM_LAYERS
    for layer in range(NUM_LAYERS):
        load, compute, store = (spans[kind, layer] for kind in SpanKind)
        assert load.end <= compute.begin
        assert compute.end <= store.begin
        assert load.num_bytes == 4 * layer_bytes
        assert store.num_bytes == 4 * layer_bytes  # the fourth block gets its last tokens
        if layer >= NUM_SLOTS:
            assert spans[SpanKind.STORE, layer - NUM_SLOTS].end <= load.begin


def test_a_layer_comes_and_one_goes_while_another_is_computed(folder: Path) -> None:
    """Every layer's computation waits for its neighbours' moves: without overlap it would hang."""
    told: dict[tuple[SpanKind, int], threading.Event] = {
        (kind, layer): threading.Event() for kind in SpanKind for layer in range(NUM_LAYERS)
    }
    whole = PooledEngine(folder)

    def tell(span: Span) -> None:
        told[span.kind, span.layer].set()
        if span.kind is SpanKind.COMPUTE:  # told by the engine itself, while it holds the layer
            for kind, layer in ((SpanKind.LOAD, span.layer + 1), (SpanKind.STORE, span.layer - 1)):
                if 0 <= layer < NUM_LAYERS:
                    assert told[kind, layer].wait(DEADLINE_SECONDS), f"{kind} of {layer}"

    engine = LayerwiseCpuEngine(folder, whole.layout, whole.pool, num_places=NUM_PLACES, tell=tell)
    with closing(engine):
        engine.execute([row(tokens(100, 3), 0, whole.blocks_for(100))])
    assert all(event.is_set() for event in told.values())


@pytest.mark.parametrize("kind", [SpanKind.LOAD, SpanKind.STORE])
def test_a_layer_that_cannot_be_moved_fails_the_step_and_not_the_next(
    folder: Path, kind: SpanKind
) -> None:
    whole = PooledEngine(folder)
    is_broken = True

    def tell(span: Span) -> None:
        if is_broken and (span.kind, span.layer) == (kind, 3):
            raise OSError("no such memory")

    engine = LayerwiseCpuEngine(folder, whole.layout, whole.pool, num_places=8, tell=tell)
    step = row(tokens(60, 4), 0, whole.blocks_for(60))
    with closing(engine):
        with pytest.raises((RuntimeError, OSError)):
            engine.execute([step])
        is_broken = False
        assert engine.execute([step]) == whole.execute(step)


def test_what_does_not_fit_is_refused(both: Both) -> None:
    blocks = both.whole.blocks_for(16 * (NUM_PLACES + 1))
    with pytest.raises(ValueError, match=r"row 0 needs 9 blocks of the ring, which has 8"):
        both.ring.launch([row(tokens(16 * NUM_PLACES + 1, 5), 0, blocks)])
