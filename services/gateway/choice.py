"""One choice as it grows: tokens in, text and counts out."""

from dataclasses import dataclass

from common.sampling import FinishReason, SampledToken, SamplingParams
from services.gateway.backend import TokenDelta
from services.gateway.detokenizer import Detokenizer, TokenBytes
from services.gateway.stopper import Stopper


@dataclass(frozen=True, slots=True)
class ChoicePiece:
    """What one delta adds to a choice.

    ``text`` may leave now. ``tokens`` are those that count: after a stop string nothing does.
    ``text_offsets`` says, per token, how many characters of the choice stood before it.
    ``is_stopped_early`` means that a stop string matched: the cluster must be told.
    """

    text: str
    tokens: tuple[SampledToken, ...]
    text_offsets: tuple[int, ...]
    finish_reason: FinishReason | None
    is_stopped_early: bool = False


class ChoiceAssembler:
    """Detokenizes one choice, watches its stop strings, counts its tokens."""

    def __init__(
        self, token_bytes: TokenBytes, params: SamplingParams, stops: tuple[str, ...]
    ) -> None:
        self._detokenizer = Detokenizer(token_bytes)
        self._stopper = Stopper(stops)
        self._params = params
        self._text_chars = 0
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the choice has its finish reason."""
        return self.finish_reason is not None

    def feed(self, delta: TokenDelta) -> ChoicePiece:
        """Take the choice's next delta; call no more once finished."""
        texts: list[str] = []
        offsets: list[int] = []
        last = len(delta.tokens) - 1
        for index, token in enumerate(delta.tokens):
            is_last = index == last and delta.finish_reason is not None
            self.num_tokens += 1
            offsets.append(self._text_chars)
            if is_last and self._ends_choice(token, delta.finish_reason):
                continue
            if self._take(self._detokenizer.feed(token.token_id), texts):
                self.finish_reason = FinishReason.STOP
                tokens = delta.tokens[: index + 1]
                return ChoicePiece(
                    "".join(texts), tokens, tuple(offsets), FinishReason.STOP, not is_last
                )
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            if self._take(self._detokenizer.flush(), texts):
                self.finish_reason = FinishReason.STOP
            else:
                texts.append(self._stopper.flush())
        return ChoicePiece("".join(texts), delta.tokens, tuple(offsets), self.finish_reason)

    def _take(self, text: str, texts: list[str]) -> bool:
        """Pass text through the stop strings; return whether one matched."""
        self._text_chars += len(text)
        if self.num_tokens < self._params.min_tokens:
            texts.append(text)
            return False
        step = self._stopper.feed(text)
        texts.append(step.text)
        return step.is_matched

    def _ends_choice(self, token: SampledToken, finish_reason: FinishReason | None) -> bool:
        """Whether the last token is the one that stopped the choice: it has no text."""
        return finish_reason is FinishReason.STOP and (
            token.token_id in self._params.stop_token_ids
            or token.token_id in self._params.eos_token_ids
        )
