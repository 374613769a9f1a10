"""What a checked request asks of the cluster."""

from dataclasses import dataclass

from common.ids import RequestId
from common.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """One prompt: a request of its own in the cluster, with ``params.num_choices`` choices.

    ``field`` is how refusals name it: ``messages``, ``prompt``, ``prompt[1]``. ``echo`` is the text
    that stands before every choice's own; empty unless it is asked for.
    """

    request_id: RequestId
    field: str
    token_ids: tuple[int, ...]
    params: SamplingParams
    echo: str = ""


@dataclass(frozen=True, slots=True)
class CompletionPlan:
    """A checked request: nothing in it can be refused any more but by the cluster.

    Choices are numbered prompt by prompt: choice ``c`` of prompt ``p`` is ``p * n + c``.
    """

    prompts: tuple[PromptPlan, ...]
    stops: tuple[str, ...]
    is_stream: bool
    has_usage_chunk: bool
    has_token_ids: bool
    has_phases: bool = False

    @property
    def num_choices_per_prompt(self) -> int:
        """``n``, the same for every prompt."""
        return self.prompts[0].params.num_choices

    @property
    def num_choices(self) -> int:
        """Choices of all prompts."""
        return len(self.prompts) * self.num_choices_per_prompt

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def has_logprobs(self) -> bool:
        """Whether log probabilities are asked for."""
        return self.prompts[0].params.num_logprobs is not None

    @property
    def shows_tokens(self) -> bool:
        """Whether tokens without text are news too: logprobs or token ids are asked for."""
        return self.has_logprobs or self.has_token_ids

    def prompt_of(self, choice: int) -> PromptPlan:
        """Return the prompt that ``choice`` continues."""
        return self.prompts[choice // self.num_choices_per_prompt]
