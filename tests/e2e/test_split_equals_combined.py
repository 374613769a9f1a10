"""Separate prefill and decode answer exactly as one combined worker does, streamed or not."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from tests.support.answers import Answer, ChoiceAnswer, Json, events_of
from tests.support.cluster import Cluster
from tests.support.prompts import Encode, exact_prompt

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

TIE = 1e-3
LOGPROB_TOLERANCE = 1e-3
MAX_TIES = 3
MAX_FLIPPED_SAMPLES = 1
"""A draw whose uniform number falls between two sums of probabilities may go either way."""

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
PARIS = "The capital of France is"
"""Greedily answered with `` Paris.\\n\\nThe answer is:``, in eight tokens of that cut."""
PARIS_TOKENS = (" Paris", ".", "\n", "\n", "The", " answer", " is", ":")
STORY = "Once upon a time there was a small boat that"
CHAT_MESSAGES = [
    {"role": "system", "content": "You answer in one short sentence."},
    {"role": "user", "content": "Which animals live in the sea?"},
]
SHORT_QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
EMOJI = "🎉🎂🎈🎁 🎉🎂🎈🎁 🎉🎂🎈🎁 🎉🎂"
JAPANESE = "山の上の小さな図書館には、毎朝一人の老人が来て"
KOREAN = "가을이 되면 산길은 단풍으로 물들고 사람들은"
EOS = 2
SAMPLED: Json = {"temperature": 0.8, "seed": 7}
WILD: Json = {"temperature": 1.2, "top_p": 0.9, "top_k": 40, "min_p": 0.02}


@dataclass(frozen=True, slots=True)
class Case:
    """One request. Each shows its tokens, and logprobs unless it says otherwise."""

    name: str
    path: str
    body: Json

    @property
    def is_sampled(self) -> bool:
        return bool(self.body["temperature"])


def _text(name: str, prompt: str | list[int] = PARIS, /, **fields: object) -> Case:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 2}
    return Case(name, TEXT, {**body, "return_token_ids": True, **fields})


def _chat(name: str, /, **fields: object) -> Case:
    body = {"messages": CHAT_MESSAGES, "max_tokens": 12, "temperature": 0}
    shown = {"logprobs": True, "top_logprobs": 3, "return_token_ids": True}
    return Case(name, CHAT, {**body, **shown, **fields})


def _cases(encode: Encode) -> list[Case]:
    borders = [
        _text(
            f"prompt of {length} tokens",
            exact_prompt("", length, first=2000 + length).token_ids(encode),
            **({} if length % 2 else {**SAMPLED, "seed": length}),
        )
        for length in (1, 63, 64, 65, 127, 128, 129, 256, 257, 600)
    ]
    first_token = encode(" Paris")[0]
    return [
        *borders,
        _text("greedy"),
        _text("greedy, nothing shown", logprobs=None, return_token_ids=False),
        _text("token ids", encode(STORY)),
        _text("no alternatives", STORY, logprobs=0),
        _text("many alternatives", STORY, logprobs=20),
        _text("one token", max_tokens=1),
        _text("two tokens", max_tokens=2),
        _text("long answer", STORY, max_tokens=40),
        _text("temperature 0.8", STORY, **SAMPLED),
        _text("temperature 1.2 and every filter", STORY, **WILD, seed=11),
        _text("top_p alone", STORY, temperature=1.0, top_p=0.5, seed=-3),
        _text("top_k alone", STORY, temperature=1.0, top_k=5, seed=2**62),
        _text("min_p alone", STORY, temperature=1.2, min_p=0.2, seed=0),
        _text("repetition penalty", STORY, repetition_penalty=1.3, max_tokens=20),
        _text("presence penalty", STORY, presence_penalty=1.5, max_tokens=20),
        _text("frequency penalty", "tick tock " * 12, frequency_penalty=1.2, max_tokens=20),
        _text("all penalties, sampled", STORY, **SAMPLED, repetition_penalty=1.1, max_tokens=20),
        _text("a banned first token", logit_bias={str(first_token): -100}),
        _text("a forced token", logit_bias={str(first_token): 100}, max_tokens=4),
        _text("stop string", stop="answer"),
        _text("stop string across tokens", stop="is.\n\nThe a"),
        _text("stop string in the first token", stop=" Par"),
        _text("several stop strings", stop=["nowhere", "\n\n", "Paris.\n"]),
        _text("stop string that never comes", stop=["answer is not", "::"]),
        _text("stop token", stop_token_ids=[first_token]),
        _text("end at the first token", logit_bias={str(EOS): 100}),
        _text("end after min_tokens", logit_bias={str(EOS): 100}, min_tokens=4),
        _text("end ignored", logit_bias={str(EOS): 100}, ignore_eos=True, max_tokens=5),
        _text("stop string after min_tokens", stop=".", min_tokens=3),
        _text("two choices", STORY, n=2, **SAMPLED),
        _text("three choices of one token", STORY, n=3, **SAMPLED, max_tokens=1),
        _text("four choices", STORY, n=4, **WILD, seed=5, max_tokens=12),
        _text("four choices that stop", STORY, n=4, **SAMPLED, stop=[" the", ","], max_tokens=16),
        _text("emoji", EMOJI, max_tokens=20),
        _text("Japanese", JAPANESE, max_tokens=20),
        _text("Korean, sampled", KOREAN, **SAMPLED, max_tokens=20),
        _text("Korean, stopped", KOREAN, stop=["은", "이", "다"], max_tokens=20),
        _chat("chat"),
        _chat("chat, sampled", **SAMPLED, max_tokens=20),
        _chat("chat, two choices", **WILD, seed=9, n=2),
        _chat("chat, 20 alternatives", top_logprobs=20, max_tokens=4),
        _chat("chat to its end", messages=SHORT_QUESTION, max_tokens=60),
        _chat("chat, nothing shown", logprobs=False, top_logprobs=None, return_token_ids=False),
    ]


@dataclass(frozen=True, slots=True)
class Pair:
    """One case's answer, not streamed and streamed."""

    whole: Answer
    streamed: Answer


async def _ask(cluster: Cluster, case: Case, *, is_stream: bool) -> Answer:
    if not is_stream:
        return await cluster.ask(case.path, case.body)
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    return await cluster.ask(case.path, {**case.body, **stream})


async def _ask_all(cluster: Cluster, cases: list[Case]) -> dict[str, Pair]:
    """Ask for everything at once: all kinds of requests share the engine's steps."""
    async with asyncio.TaskGroup() as group:
        tasks = {
            (case.name, is_stream): group.create_task(_ask(cluster, case, is_stream=is_stream))
            for case in cases
            for is_stream in (False, True)
        }
    return {
        case.name: Pair(tasks[case.name, False].result(), tasks[case.name, True].result())
        for case in cases
    }


class Comparison:
    """Compares answers of one case, and gathers what is wrong and what is noise."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.ties: list[str] = []
        self.flipped: set[str] = set()

    def check(self, case: Case, what: str, left: Answer, right: Answer) -> None:
        """Compare two answers; how much came from the cache depends on what ran beside."""
        told = f"{case.name}, {what}"
        if len(left.choices) != len(right.choices):
            self.wrong.append(f"{told}: {len(left.choices)} choices and {len(right.choices)}")
            return
        is_noise = False
        for place, (ours, theirs) in enumerate(zip(left.choices, right.choices, strict=True)):
            is_noise |= self._check_choice(case, f"{told}, choice {place}", ours, theirs)
        assert left.usage is not None
        assert right.usage is not None
        if not is_noise and (
            replace(left.usage, num_cached_tokens=0) != replace(right.usage, num_cached_tokens=0)
        ):
            self.wrong.append(f"{told}: {left.usage} and {right.usage}")

    def _check_choice(self, case: Case, told: str, left: ChoiceAnswer, right: ChoiceAnswer) -> bool:
        """Return whether the two parted where noise may part them."""
        num_same = _num_same(left.token_ids, right.token_ids)
        for place in range(min(num_same, len(left.logprobs))):
            if not _are_close(left, right, place):
                self.wrong.append(f"{told}: logprobs of token {place} differ")
                return False
        if left.token_ids != right.token_ids and num_same < len(left.token_ids):
            if case.is_sampled:
                self.flipped.add(case.name)
                return True
            best = sorted(left.top_logprobs[num_same].values())[-2:]
            if len(best) == 2 and best[1] - best[0] < TIE:
                self.ties.append(f"{told} at token {num_same}")
                return True
        ours = (left.token_ids, left.text, left.finish_reason)
        theirs = (right.token_ids, right.text, right.finish_reason)
        if ours != theirs:
            self.wrong.append(f"{told}: {ours} and {theirs}")
        return False


def _num_same(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    pairs = zip(left, right, strict=False)
    differing = (place for place, (ours, theirs) in enumerate(pairs) if ours != theirs)
    return next(differing, min(len(left), len(right)))


def _are_close(left: ChoiceAnswer, right: ChoiceAnswer, place: int) -> bool:
    """Whether the drawn token and the alternatives have the same logprobs.

    Alternatives are compared by rank too: near its end the list may differ by a tie.
    """
    ours, theirs = left.top_logprobs[place], right.top_logprobs[place]
    pairs = [
        (left.logprobs[place], right.logprobs[place]),
        *((ours[token], theirs[token]) for token in ours.keys() & theirs.keys()),
        *zip(sorted(ours.values()), sorted(theirs.values()), strict=False),
    ]
    is_close = all(abs(one - other) <= LOGPROB_TOLERANCE for one, other in pairs)
    return is_close and len(ours) == len(theirs)


async def test_a_mixed_batch_is_answered_alike_in_every_way(
    split: Cluster, combined: Cluster, encode: Encode, note: Callable[[str], None]
) -> None:
    cases = _cases(encode)
    of_split = await _ask_all(split, cases)
    of_combined = await _ask_all(combined, cases)
    compared = Comparison()
    for case in cases:
        ours, theirs = of_split[case.name], of_combined[case.name]
        compared.check(case, "split and combined", ours.whole, theirs.whole)
        compared.check(case, "split and combined, streamed", ours.streamed, theirs.streamed)
        compared.check(case, "streamed and not, split", ours.streamed, ours.whole)
        compared.check(case, "streamed and not, combined", theirs.streamed, theirs.whole)
    note(
        f"split equals combined: {len(cases)} cases, {len(compared.ties)} ties "
        f"{compared.ties or ''}, {len(compared.flipped)} flipped {compared.flipped or ''}"
    )
    assert not compared.wrong, "\n".join(compared.wrong)
    assert len(compared.ties) <= MAX_TIES
    assert len(compared.flipped) <= MAX_FLIPPED_SAMPLES
    for pairs in (of_split, of_combined):
        _check_meaning({name: pair.whole for name, pair in pairs.items()})
    await split.wait_idle()
    await combined.wait_idle()


def _check_meaning(answers: dict[str, Answer]) -> None:
    """Check against what the requests mean: equal answers could be equally wrong."""

    def only(name: str) -> tuple[str, str | None, int]:
        choice = answers[name].choices[0]
        return choice.text, choice.finish_reason, len(choice.token_ids)

    whole = "".join(PARIS_TOKENS)
    assert only("greedy") == (whole, "length", 8)
    assert only("one token") == (" Paris", "length", 1)
    assert only("stop string") == (" Paris.\n\nThe ", "stop", 6)
    assert only("stop string across tokens") == (" Par", "stop", 6)
    assert only("stop string in the first token") == ("", "stop", 1)
    assert only("several stop strings") == (" ", "stop", 3)
    assert only("stop string that never comes") == (whole, "length", 8)
    assert only("stop token") == ("", "stop", 1)
    assert only("end at the first token") == ("", "stop", 1)
    assert only("stop string after min_tokens") == (whole, "length", 8)
    assert only("a forced token") == (" Paris" * 4, "length", 4)
    assert not only("a banned first token")[0].startswith(" Paris")
    assert answers["end after min_tokens"].choices[0].token_ids[-1] == EOS
    assert only("end after min_tokens")[1:] == ("stop", 5)
    assert only("end ignored")[1:] == ("length", 5)
    assert answers["end ignored"].choices[0].token_ids == (EOS,) * 5
    assert only("chat to its end")[1] == "stop"
    for name, count in (("two choices", 2), ("four choices", 4), ("chat, two choices", 2)):
        texts = {choice.text for choice in answers[name].choices}
        assert len(texts) == count, f"{name}: the choices are not drawn independently"
    counted = answers["three choices of one token"].usage
    assert counted is not None
    assert counted.num_completion_tokens == 3
    for name in ("Japanese", "emoji"):
        assert any(ord(char) > 0x2000 for char in answers[name].choices[0].text), name
    num_alternatives = len(answers["chat, 20 alternatives"].choices[0].top_logprobs[0])
    assert num_alternatives == 20


async def test_a_prompt_sent_again_is_answered_from_the_cache_alike(
    split: Cluster, combined: Cluster, encode: Encode
) -> None:
    compared = Comparison()
    lengths = (63, 64, 65, 128, 129, 300)
    cases = [
        _text(
            f"{length} tokens",
            exact_prompt("", length, first=5000 + 100 * place).token_ids(encode),
            **({} if place % 2 else SAMPLED),
        )
        for place, length in enumerate(lengths)
    ]

    async def ask_twice(cluster: Cluster) -> list[list[Answer]]:
        return [
            await asyncio.gather(*(_ask(cluster, case, is_stream=is_again) for case in cases))
            for is_again in (False, True)
        ]

    answers = [one for cluster in (split, combined) for one in await ask_twice(cluster)]
    rows = zip(lengths, cases, *answers, strict=True)
    for length, case, first, again, first_combined, again_combined in rows:
        compared.check(case, "split and combined", first, first_combined)
        compared.check(case, "again, split and combined", again, again_combined)
        compared.check(case, "first and again", first, again)
        usages = [answer.usage for answer in (first, first_combined, again, again_combined)]
        cached = [usage and usage.num_cached_tokens for usage in usages]
        # At least the last token is computed, so that something can be drawn after it.
        assert cached == [0, 0, *[(length - 1) // 64 * 64] * 2], (length, cached)
    assert not compared.wrong, "\n".join(compared.wrong)
    assert len(compared.flipped) <= MAX_FLIPPED_SAMPLES


async def test_a_seed_repeats_its_draws_and_another_one_does_not(split: Cluster) -> None:
    async def text(**fields: object) -> str:
        body = {"prompt": STORY, "max_tokens": 12, "temperature": 1.0, **fields}
        return (await split.ask(TEXT, body)).choices[0].text

    first, again, other, unseeded = await asyncio.gather(
        text(seed=1), text(seed=1), text(seed=2), text()
    )
    assert first == again
    assert len({first, other, unseeded}) == 3


async def test_a_streamed_text_is_whole_characters_at_every_moment(split: Cluster) -> None:
    body = {"prompt": JAPANESE, "max_tokens": 24, "temperature": 0}
    whole = await split.ask(TEXT, body)
    texts: list[str] = []
    async with split.stream(TEXT, body) as response:
        async for event in events_of(response):
            texts += [entry["text"] for entry in event["choices"]]
    assert "".join(texts) == whole.choices[0].text
    assert not any("\ufffd" in text for text in texts[:-1])
