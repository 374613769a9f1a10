"""The ``openai`` client against a split cluster, as a user's program calls it."""

from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletionMessageParam

from tests.support.cluster import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "You answer briefly."},
    {"role": "user", "content": "Name three colours."},
]
MAX_TOKENS = 12


@pytest_asyncio.fixture(loop_scope="session")
async def client(split: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{split.url}/v1", api_key="none", max_retries=0, timeout=120
    ) as made:
        yield made


async def test_the_served_model_is_listed(client: openai.AsyncOpenAI, split: Cluster) -> None:
    models = await client.models.list()
    assert [model.id for model in models.data] == [split.model_name]
    assert (await client.models.retrieve(split.model_name)).owned_by == "flowpath"


async def test_a_chat_and_its_stream_say_the_same(
    client: openai.AsyncOpenAI, split: Cluster
) -> None:
    whole = await client.chat.completions.create(
        model=split.model_name, messages=MESSAGES, max_tokens=MAX_TOKENS, temperature=0
    )
    assert whole.object == "chat.completion"
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == MAX_TOKENS
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + MAX_TOKENS

    parts, finish_reasons, usages = [], [], []
    async for chunk in await client.chat.completions.create(
        model=split.model_name,
        messages=MESSAGES,
        max_tokens=MAX_TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ):
        assert chunk.object == "chat.completion.chunk"
        for choice in chunk.choices:
            parts.append(choice.delta.content or "")
            finish_reasons.append(choice.finish_reason)
        if chunk.usage is not None:
            usages.append(chunk.usage)
    assert "".join(parts) == whole.choices[0].message.content
    assert finish_reasons[-1] == whole.choices[0].finish_reason == "length"
    assert len(parts) > 3, "it came at once, not as a stream"
    (usage,) = usages
    assert usage.completion_tokens == MAX_TOKENS
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    assert usage.prompt_tokens_details is not None


async def test_a_completion_and_its_stream_say_the_same(
    client: openai.AsyncOpenAI, split: Cluster
) -> None:
    prompt = "The three primary colours are"
    whole = await client.completions.create(
        model=split.model_name, prompt=prompt, max_tokens=MAX_TOKENS, temperature=0
    )
    assert whole.object == "text_completion"
    stream = await client.completions.create(
        model=split.model_name, prompt=prompt, max_tokens=MAX_TOKENS, temperature=0, stream=True
    )
    texts = [choice.text async for chunk in stream for choice in chunk.choices]
    assert "".join(texts) == whole.choices[0].text
    assert len(texts) > 3, "it came at once, not as a stream"


async def test_logprobs_come_with_their_alternatives(
    client: openai.AsyncOpenAI, split: Cluster
) -> None:
    chat = await client.chat.completions.create(
        model=split.model_name,
        messages=MESSAGES,
        max_tokens=4,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 4
    for token in logprobs.content:
        assert len(token.top_logprobs) == 3
        best = max(token.top_logprobs, key=lambda top: top.logprob)
        assert (token.token, token.logprob) == (best.token, best.logprob)  # greedy
        assert token.logprob <= 0
    assert "".join(token.token for token in logprobs.content) == chat.choices[0].message.content

    text = await client.completions.create(
        model=split.model_name, prompt="One, two,", max_tokens=3, temperature=0, logprobs=2
    )
    found = text.choices[0].logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.token_logprobs is not None
    assert found.top_logprobs is not None
    assert [len(part) for part in (found.tokens, found.token_logprobs)] == [3, 3]
    assert all(len(top) == 2 for top in found.top_logprobs)


async def test_choices_are_drawn_apart_and_again_by_their_seed(
    client: openai.AsyncOpenAI, split: Cluster
) -> None:
    async def texts() -> list[str | None]:
        answer = await client.chat.completions.create(
            model=split.model_name, messages=MESSAGES, max_tokens=MAX_TOKENS, n=3, seed=11
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert answer.usage is not None
        assert answer.usage.completion_tokens <= 3 * MAX_TOKENS
        return [choice.message.content for choice in answer.choices]

    first = await texts()
    assert len(set(first)) > 1
    assert await texts() == first


async def test_a_stop_string_ends_the_answer_before_it(
    client: openai.AsyncOpenAI, split: Cluster
) -> None:
    async def complete(stop: list[str] | None) -> tuple[str, str]:
        answer = await client.completions.create(
            model=split.model_name,
            prompt="Count: one, two, three, four,",
            max_tokens=20,
            temperature=0,
            stop=stop,
        )
        return answer.choices[0].text, answer.choices[0].finish_reason

    free, _ = await complete(None)
    assert free.count(",") >= 2
    second_comma = free.index(",", free.index(",") + 1)
    word = free[free.index(",") + 1 : second_comma + 1]
    assert await complete([word]) == (free[: free.index(word)], "stop")


async def test_errors_are_the_client_s_own_exceptions(
    client: openai.AsyncOpenAI, split: Cluster
) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.chat.completions.create(model="gpt-none", messages=MESSAGES)
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")

    with pytest.raises(openai.BadRequestError) as negative:
        await client.chat.completions.create(
            model=split.model_name, messages=MESSAGES, temperature=-1
        )
    assert negative.value.param == "temperature"

    with pytest.raises(openai.BadRequestError) as long:
        await client.completions.create(model=split.model_name, prompt=[1] * 9000)
    assert long.value.code == "context_length_exceeded"

    with pytest.raises(openai.APIStatusError) as large:
        await client.completions.create(model=split.model_name, prompt="a" * 2**21)
    assert (large.value.status_code, large.value.code) == (413, "body_too_large")


async def test_a_stream_that_is_closed_early_is_cancelled(
    client: openai.AsyncOpenAI, split: Cluster
) -> None:
    stream = await client.chat.completions.create(
        model=split.model_name,
        messages=MESSAGES,
        max_tokens=2000,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    async with stream:
        async for _ in stream:
            break
    await split.wait_idle(10.0)
