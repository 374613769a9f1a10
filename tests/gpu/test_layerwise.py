"""The engine with two layers on the GPU and its pool on the host, beside the ordinary one."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from common.engine.cuda.model import CudaModel
from common.engine.interface import StepRow
from common.engine.layerwise.cuda import LayerwiseCudaEngine
from common.engine.layerwise.stream import NUM_SLOTS, Span, SpanKind
from common.kv.pool import KVPool
from common.sampling import SampledToken
from tests.support.cuda_runs import PooledCudaEngine
from tests.support.engine_runs import row
from tests.support.gpus import why_too_few
from tests.support.tiny_models import save_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(why_too_few(1) is not None, reason=str(why_too_few(1))),
    # FlashInfer and torch warn about each other.
    pytest.mark.filterwarnings("default"),
]

NUM_LAYERS = 6
NUM_BLOCKS = 64
NUM_PLACES = 8
SHAPE = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}


class Both:
    """Both engines, in whose pools the same blocks are given out."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self.whole = PooledCudaEngine(
            folder, device="cuda:0", dtype=dtype, num_blocks=NUM_BLOCKS, use_graphs=False
        )
        layout = self.whole.layout
        self.pool = KVPool(NUM_BLOCKS, layout.block_bytes)
        self.spans: list[Span] = []
        self.ring = LayerwiseCudaEngine(
            CudaModel.load(self.whole.config, dtype, torch.device("cuda:0")),
            *(layout, self.pool.buffer),
            num_places=NUM_PLACES,
            max_num_batched_tokens=256,
            max_num_seqs=8,
            tell_span=self.spans.append,
        )

    def execute(self, *rows: StepRow) -> list[tuple[SampledToken, ...]]:
        """Compute a step with both; the tokens are the same, and K and V of all rows' blocks."""
        expected = self.whole.execute(*rows)
        drawn = self.ring.execute(rows)
        tokens = [[token.token_id for token in found] for found in drawn]
        assert tokens == [[token.token_id for token in found] for found in expected]
        size = self.whole.layout.block_bytes
        on_host = torch.frombuffer(self.pool.buffer, dtype=torch.uint8).view(-1, size)
        on_gpu = self.whole.pool.view(-1, size).cpu()
        for each in rows:
            # Whole blocks: behind a sequence's last token either pool has what it had.
            whole = list(each.block_table)[: (each.start + len(each.token_ids)) // 16]
            assert torch.equal(on_host[whole], on_gpu[whole])
        return expected


@pytest.fixture(
    # FlashInfer's kernels for windows would be compiled for minutes.
    params=[("llama", "float32"), ("llama", "bfloat16"), ("mistral-window", "float32")],
    ids="-".join,
)
def both(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Both]:
    model, dtype = request.param
    save_tiny_model(model, tmp_path, num_hidden_layers=NUM_LAYERS, spread=0.05, **SHAPE)
    made = Both(tmp_path, dtype)
    with closing(made.ring):
        yield made


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(3, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_chunks_and_decodes_equal_those_in_the_pool(both: Both) -> None:
    table = both.whole.blocks_for(110)
    for turn in range(20):  # an order that is not kept shows now and then
        prompt = tokens(100, turn)
        for start, end in ((0, 48), (48, 80)):
            both.execute(StepRow(prompt[start:end], start, table))
        ((last,),) = both.execute(row(prompt[80:], 80, table))
        for at in range(100, 104):
            ((last,),) = both.execute(row([last.token_id], at, table))


def test_a_step_that_does_not_fit_the_ring_at_once(both: Both) -> None:
    first, second = (both.whole.blocks_for(70) for _ in range(2))
    both.execute(row(tokens(64, 2), 0, first), row(tokens(64, 3), 0, second))
    both.execute(row(tokens(6, 4), 64, first), StepRow(tokens(6, 5), 64, second))
    assert both.ring.peak_places <= NUM_PLACES


def test_moves_keep_to_their_order_by_the_devices_clock(both: Both) -> None:
    blocks = both.whole.blocks_for(100)
    both.execute(row(tokens(60, 1), 0, blocks))
    both.spans.clear()
    both.execute(row(tokens(40, 2), 60, blocks))
    spans = {(span.kind, span.layer): span for span in both.spans}
    assert len(spans) == 3 * NUM_LAYERS
    for layer in range(NUM_LAYERS):
        load, compute, store = (spans[kind, layer] for kind in SpanKind)
        assert load.end <= compute.begin
        assert compute.end <= store.begin
        if layer >= NUM_SLOTS:
            assert spans[SpanKind.STORE, layer - NUM_SLOTS].end <= load.begin
