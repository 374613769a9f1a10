"""Which requests of the cluster serve the choices of one submission. Pure.

At first it is one request for all. When that loses its worker, what its choices have so far is put
behind the prompt, and they go on in new requests, each with its own tokens; as long as no choice
has any, one request does for all of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from common.ids import RequestId
from common.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Attempt:
    """One request of the cluster: its prompt as it is sent, and the choices that it draws.

    ``num_resumes`` is how many requests lost their workers before it came to these choices.
    """

    request_id: RequestId
    prompt: Sequence[int]
    params: SamplingParams
    num_resumes: int = 0

    @property
    def choices(self) -> range:
        """The submission's choices that it serves."""
        return self.params.choices


class Attempts:
    """The attempts of a submission that are under way."""

    def __init__(
        self, request_id: RequestId, prompt: Sequence[int], params: SamplingParams
    ) -> None:
        self.first = Attempt(request_id, prompt, params)
        self._live = {request_id: self.first}
        self._num_made = 1

    @property
    def live(self) -> tuple[Attempt, ...]:
        """Those that have not ended."""
        return tuple(self._live.values())

    def serving(self, choice: int) -> Attempt | None:
        """Return the attempt that draws a choice."""
        return next((attempt for attempt in self.live if choice in attempt.choices), None)

    def find(self, request_id: RequestId) -> Attempt | None:
        """Return an attempt that is under way; None when it is not."""
        return self._live.get(request_id)

    def end(self, request_id: RequestId) -> Attempt | None:
        """Note that an attempt is over; None for one that was not under way."""
        return self._live.pop(request_id, None)

    def go_on(
        self,
        choices: Sequence[int],
        emitted_of: Callable[[int], list[int]],
        num_resumes: int,
    ) -> tuple[Attempt, ...]:
        """Make the attempts that go on with these choices of one that has ended."""
        emitted = {choice: emitted_of(choice) for choice in choices}
        is_run = list(choices) == list(range(choices[0], choices[0] + len(choices)))
        groups = [choices] if is_run and not any(emitted.values()) else [[c] for c in choices]
        made = tuple(
            self._make(group[0], len(group), emitted[group[0]], num_resumes) for group in groups
        )
        self._live.update({attempt.request_id: attempt for attempt in made})
        return made

    def _make(self, choice: int, count: int, emitted: list[int], num_resumes: int) -> Attempt:
        first = self.first
        request_id = RequestId(f"{first.request_id}~{self._num_made}")
        self._num_made += 1
        params = replace(
            first.params, first_choice=choice, num_choices=count, num_drawn=len(emitted)
        )
        return Attempt(request_id, [*first.prompt, *emitted], params, num_resumes)
