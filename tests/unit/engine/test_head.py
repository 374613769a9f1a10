"""The logits of 16-bit weights are right where it matters: at their best."""

import torch

from common.engine.head import NUM_EXACT, LogitsHead


def test_the_best_logits_of_16_bit_weights_are_those_of_float32() -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(4096, 64, generator=generator).bfloat16()
    hidden = torch.randn(5, 64, generator=generator).bfloat16()
    exact = hidden.double() @ weight.double().T
    logits = LogitsHead(weight)(hidden)
    assert logits.dtype == torch.float32
    best = exact.topk(NUM_EXACT // 2, dim=1).indices
    assert torch.allclose(logits.gather(1, best).double(), exact.gather(1, best), atol=1e-4)
    assert torch.equal(logits.argmax(dim=1), exact.argmax(dim=1))


def test_two_tokens_that_16_bits_cannot_tell_apart_are_told_apart() -> None:
    weight = torch.zeros(50, 8, dtype=torch.bfloat16)
    weight[7], weight[3] = 2.0, 2.0
    weight[7, 0] = 2.0 + 2**-6  # beside logits of 16: less than bfloat16 can show
    hidden = torch.ones(1, 8, dtype=torch.bfloat16)
    assert int(LogitsHead(weight)(hidden).argmax()) == 7


def test_float32_weights_give_the_plain_product_and_no_rows_give_none() -> None:
    weight = torch.randn(50, 8)
    hidden = torch.randn(3, 8)
    assert torch.allclose(LogitsHead(weight)(hidden), hidden @ weight.T, atol=1e-5)
    assert LogitsHead(weight.bfloat16())(hidden[:0].bfloat16()).shape == (0, 50)
