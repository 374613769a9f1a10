"""The last matrix product: from hidden states to float32 logits over the vocabulary."""

import torch

from common.engine.linear import Linear

NUM_EXACT = 16
"""Best logits of each row that are computed once more, in float32."""


class LogitsHead:
    """The vocabulary's weights, (vocabulary, hidden).

    A product of 16-bit numbers has 16-bit results, in which logits of size 16 stand an eighth apart
    in bfloat16, and the best two are often the same number. So the best of each row are computed
    once more with float32 results, and a greedy choice is the model's own.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self._linear = Linear(weight)
        self._weight = weight if weight.dtype != torch.float32 else None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits, (rows, vocabulary), of (rows, hidden)."""
        logits = self._linear(hidden).float()
        if self._weight is None or not len(hidden):
            return logits
        best = logits.topk(min(NUM_EXACT, logits.shape[1]), dim=1, sorted=False).indices
        candidates = self._weight[best].float()
        exact = torch.bmm(candidates, hidden.float().unsqueeze(2)).squeeze(2)
        return logits.scatter_(1, best, exact)
