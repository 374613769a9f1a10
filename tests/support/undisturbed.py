"""Requests that run beside trouble and must not feel it: each equals its own quiet run."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tests.support.answers import Answer, ChoiceAnswer, Json
from tests.support.prompts import Encode, exact_prompt

Ask = Callable[[str, Json], Awaitable[Answer]]

TIE = 1e-3
"""Two logprobs so close may be drawn in either order."""


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """One greedy request and the answer of its quiet run."""

    body: Json
    quiet: ChoiceAnswer

    async def ask_again(self, ask: Ask, *, is_stream: bool) -> str | None:
        """Ask once more, and say how the answer differs from the quiet one."""
        return self.compare(await ask("/v1/completions", {**self.body, "stream": is_stream}))

    def compare(self, answer: Answer) -> str | None:
        """Say how an answer differs from the quiet one.

        Where the two best logprobs were a tie, what follows is not compared.
        """
        choice = answer.choices[0]
        if (choice.token_ids, choice.finish_reason) == (
            self.quiet.token_ids,
            self.quiet.finish_reason,
        ):
            return None
        place = self._parting(choice)
        if place is None:
            return f"{answer.request_id}: {len(choice.token_ids)} tokens, {choice.finish_reason}"
        if self._is_tie(place):
            return None
        token, wanted = choice.token_ids[place], self.quiet.token_ids[place]
        return f"{answer.request_id}: token {place} is {token}, not {wanted}"

    def is_tied(self, answer: Answer) -> bool:
        """Whether an answer took the other way where the two best logprobs were a tie."""
        place = self._parting(answer.choices[0])
        return place is not None and self._is_tie(place)

    def _parting(self, choice: ChoiceAnswer) -> int | None:
        """Return the place of the first token that differs."""
        pairs = zip(choice.token_ids, self.quiet.token_ids, strict=False)
        return next((place for place, (one, other) in enumerate(pairs) if one != other), None)

    def _is_tie(self, place: int) -> bool:
        best = sorted(self.quiet.top_logprobs[place].values(), reverse=True)
        return len(best) > 1 and best[0] - best[1] < TIE


def greedy_bodies(
    encode: Encode, lengths: Sequence[int], max_tokens: int, *, first: int
) -> list[Json]:
    """Return one request per prompt length; ``first`` keeps prompts of several callers apart."""
    return [
        {
            "prompt": exact_prompt(f"quiet {place}", length, first=first + 1000 * place).token_ids(
                encode
            ),
            "max_tokens": max_tokens,
            "temperature": 0,
            "logprobs": 2,
            "return_token_ids": True,
            "ignore_eos": True,
        }
        for place, length in enumerate(lengths)
    ]


async def run_quietly(ask: Ask, bodies: Sequence[Json]) -> list[Undisturbed]:
    """Ask for one after the other, with nothing else running."""
    found = []
    for body in bodies:
        answer = await ask("/v1/completions", body)
        found.append(Undisturbed(body, answer.choices[0]))
    return found
