"""Workers whose engine has two steps in flight: the same tokens, and nothing left behind."""

from dataclasses import replace
from pathlib import Path

import pytest

from common.messages.control import DecodeStarted, RequestFinished
from common.messages.fields import Role
from common.sampling import SamplingParams
from tests.support.running_worker import WorkerOptions
from tests.support.worker_harness import expected, harness

AHEAD = WorkerOptions(max_in_flight=2)
SCARCE = WorkerOptions(max_in_flight=2, num_blocks=12, growth_tokens=0)
GREEDY = SamplingParams(seed=1, max_tokens=20, temperature=0)
HOT = SamplingParams(seed=7, max_tokens=12, temperature=1, num_choices=3)
PENAL = SamplingParams(seed=3, max_tokens=9, temperature=1, presence_penalty=0.5)
PROMPT = tuple(range(100, 161))


@pytest.mark.parametrize("params", [GREEDY, HOT, PENAL], ids=["greedy", "hot", "penalties"])
async def test_a_worker_of_both_roles_draws_what_it_would_one_step_at_a_time(
    tmp_path: Path, params: SamplingParams
) -> None:
    async with harness(tmp_path) as cluster:
        worker = await cluster.start_worker("combined", Role.COMBINED, AHEAD)
        cluster.place("r", PROMPT, params, prefill="combined", decode=None)
        stream = await cluster.answer("r", params.num_choices)
        for choice in range(params.num_choices):
            assert stream.token_ids(choice) == expected(PROMPT, params, choice)
        await cluster.heard("combined", RequestFinished, "r")
        await worker.idle()


async def test_a_handed_over_request_goes_on_with_the_same_tokens(tmp_path: Path) -> None:
    async with harness(tmp_path) as cluster:
        prefill, decode = await cluster.pair(prefill=AHEAD, decode=AHEAD)
        for name in ("r", "s"):
            cluster.place(name, PROMPT, HOT)
        for name in ("r", "s"):
            stream = await cluster.answer(name, 3)
            assert [stream.token_ids(choice) for choice in range(3)] == [
                expected(PROMPT, HOT, choice) for choice in range(3)
            ]
            await cluster.heard("decode", DecodeStarted, name)
            await cluster.heard("decode", RequestFinished, name)
        await prefill.idle()
        await decode.idle()


async def test_decodes_that_crowd_each_other_out_lose_nothing(tmp_path: Path) -> None:
    """Prompts of several kinds in a pool that holds the longest of them alone."""
    long = SamplingParams(seed=1, max_tokens=60, temperature=0)
    prompts = {f"r{kind}": tuple(range(100 * kind, 100 * kind + 20)) for kind in range(1, 5)}
    async with harness(tmp_path) as cluster:
        worker = await cluster.start_worker("combined", Role.COMBINED, SCARCE)
        for name, prompt in prompts.items():
            cluster.place(name, prompt, long, prefill="combined", decode=None)
        for name, prompt in prompts.items():
            assert (await cluster.answer(name)).token_ids(0) == expected(prompt, long)
        await worker.idle()


@pytest.mark.parametrize("options", [WorkerOptions(), AHEAD], ids=["one by one", "ahead"])
@pytest.mark.parametrize("choice", [0, 2])
async def test_a_choice_goes_on_elsewhere_after_the_tokens_it_has(
    tmp_path: Path, choice: int, options: WorkerOptions
) -> None:
    whole = expected(PROMPT, HOT, choice)
    async with harness(tmp_path) as cluster:
        await cluster.pair(prefill=options, decode=options)
        for num_drawn in (1, 5, HOT.max_tokens - 1):
            name = f"r{num_drawn}"
            prompt = (*PROMPT, *whole[:num_drawn])
            rest = replace(HOT, num_choices=1, first_choice=choice, num_drawn=num_drawn)
            cluster.place(name, prompt, rest)
            stream = await cluster.answer(name)
            rest_of = dict(enumerate(whole[num_drawn:], start=num_drawn))
            assert stream.tokens == {choice: rest_of}
