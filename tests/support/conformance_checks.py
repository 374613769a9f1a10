"""What must hold of the answer to a conformance case, and of every answer. Nothing is asserted."""

from collections.abc import Iterator, Sequence

from tests.support.answers import Answer, ChoiceAnswer, Json
from tests.support.conformance import Case, Expected


def refusal_problems(case: Case, status: int, answer: Json) -> list[str]:
    """Return how a refusal differs from its case."""
    error = answer.get("error", {})
    param = error.get("param")
    got = (status, error.get("code"), param)
    wanted = (case.expected.status, case.expected.code, case.expected.param)
    # A path may go deeper than the table says: stream_options.include_obfuscation.
    is_named = isinstance(param, str) and param.startswith(str(case.expected.param))
    if got[:2] == wanted[:2] and is_named and set(error) == {"message", "type", "param", "code"}:
        return []
    return [f"{case}: {got}, not {wanted}: {answer}"]


def problems(case: Case, body: Json, answer: Answer) -> list[str]:
    """Return what is wrong with the answer to ``body``, which is ``case``'s."""
    return [f"{case}: {found}" for found in _problems(case, body, answer)]


def prompts_of(body: Json) -> Sequence[object]:
    """Return the prompts of a body; a chat is one."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return prompt
    return [prompt]


def _problems(case: Case, body: Json, answer: Answer) -> Iterator[str]:
    n = body.get("n") or 1
    prompts = prompts_of(body)
    if len(answer.choices) != n * len(prompts):
        yield f"{len(answer.choices)} choices, not {n} for each of {len(prompts)} prompts"
        return
    for index, choice in enumerate(answer.choices):
        for found in _choice_problems(case.expected, body, choice, prompts[index // n]):
            yield f"choice {index}: {found}"
    has_ids = bool(body.get("return_token_ids"))
    num_tokens = sum(len(choice.token_ids) for choice in answer.choices)
    if answer.usage is None:
        yield "no usage"
    elif has_ids and answer.usage.num_completion_tokens != num_tokens:
        yield f"usage counts {answer.usage.num_completion_tokens} tokens, there are {num_tokens}"


def _choice_problems(
    expected: Expected, body: Json, choice: ChoiceAnswer, prompt: object
) -> Iterator[str]:
    text = choice.text
    if body.get("echo"):
        if isinstance(prompt, str) and not text.startswith(prompt):
            yield f"{text!r} does not begin with {prompt!r}"
        text = text[len(prompt) :] if isinstance(prompt, str) else ""
    if choice.finish_reason not in ("stop", "length"):
        yield f"finish reason {choice.finish_reason}"
    wanted_tokens = expected.num_tokens
    if body.get("return_token_ids"):
        limit = body.get("max_tokens") or body.get("max_completion_tokens") or 16
        if choice.finish_reason == "length" and len(choice.token_ids) != limit:
            yield f"ended by length after {len(choice.token_ids)} of {limit} tokens"
        if len(choice.token_ids) > limit:
            yield f"{len(choice.token_ids)} tokens, more than {limit}"
        if wanted_tokens is not None and len(choice.token_ids) != wanted_tokens:
            yield f"{len(choice.token_ids)} tokens, not {wanted_tokens}"
    if expected.text is not None and text != expected.text:
        yield f"text {text!r}, not {expected.text!r}"
    if expected.finish_reason is not None and choice.finish_reason != expected.finish_reason:
        yield f"finish reason {choice.finish_reason}, not {expected.finish_reason}"
    stops = body.get("stop") or []
    for stop in [stops] if isinstance(stops, str) else stops:
        if stop in text and not body.get("min_tokens"):
            yield f"stop string {stop!r} is in {text!r}"
    yield from _logprob_problems(body, choice)


def _logprob_problems(body: Json, choice: ChoiceAnswer) -> Iterator[str]:
    is_chat = "messages" in body
    asked = body.get("logprobs")
    if asked is None or asked is False:
        if choice.logprobs or choice.top_logprobs:
            yield "logprobs that nobody asked for"
        return
    if not len(choice.token_ids) == len(choice.logprobs) == len(choice.top_logprobs):
        yield f"{len(choice.logprobs)} logprobs of {len(choice.token_ids)} tokens"
    count = (body.get("top_logprobs") or 0) if is_chat else asked
    # /v1/completions puts the drawn token among the best ones, where it is not one of them.
    most = count if is_chat else count + 1
    for logprob, top in zip(choice.logprobs, choice.top_logprobs, strict=True):
        if not count <= len(top) <= most:
            yield f"{len(top)} alternatives, {count} asked for"
        if logprob > 0 or any(value > 0 for value in top.values()):
            yield "a logprob above 0"
