"""How prompts and decodes share a step in each mode, and who waits for whom."""

from common.ids import RequestId
from common.messages.fields import Mode
from common.scheduler.effects import PrefillStarted, RoomForPrefix
from common.scheduler.modes import Triggers
from common.scheduler.steps import StepPlan
from tests.support.scheduler_bench import Bench, new_request


def prompt(length: int, kind: int = 0) -> list[int]:
    return [1000 * kind + place for place in range(length)]


def planned(bench: Bench) -> StepPlan:
    plan, _ = bench.plan()
    assert plan is not None
    return plan


def mode_of(bench: Bench) -> Mode:
    return bench.scheduler.mode


def kinds(plan: StepPlan) -> tuple[int, int]:
    """Tokens of decodes and of prompts."""
    num_decodes = sum(row.is_decode for row in plan.rows)
    return num_decodes, plan.num_tokens - num_decodes


def decoding(num_decodes: int, *, budget: int = 20, max_seqs: int = 32) -> Bench:
    """A bench with this many decodes and nothing else."""
    bench = Bench(num_blocks=400, budget=budget, max_seqs=max_seqs)
    for number in range(num_decodes):
        bench.add(new_request(f"d{number}", prompt(3, number), max_tokens=200))
        bench.step()
    return bench


def owners(plan: StepPlan) -> list[str]:
    return [row.sequence.owner for row in plan.rows if row.is_decode]


def test_prompts_that_lead_get_four_fifths_and_decodes_wait_in_turn() -> None:
    bench = decoding(6)
    bench.add(new_request("p", prompt(100, 50)))
    bench.scheduler.direct(Mode.PREFILL_LED, 10)
    served = []
    for _ in range(4):
        plan = planned(bench)
        assert kinds(plan) == (4, 16)
        served.append(owners(plan))
        bench.finish(plan)
    assert served == [
        ["d0/0", "d1/0", "d2/0", "d3/0"],
        ["d0/0", "d1/0", "d4/0", "d5/0"],
        ["d2/0", "d3/0", "d4/0", "d5/0"],
        ["d0/0", "d1/0", "d2/0", "d3/0"],
    ]


def test_decodes_take_what_prompts_that_lead_leave() -> None:
    bench = decoding(12)
    bench.add(new_request("p", prompt(10, 50)))
    bench.scheduler.direct(Mode.PREFILL_LED, 10)
    assert kinds(planned(bench)) == (10, 10)


def test_decodes_have_the_whole_step_when_the_prompts_that_lead_find_no_room() -> None:
    bench = Bench(num_blocks=12, budget=8, max_seqs=12)
    bench.add(new_request("a", prompt(3), num_choices=8, max_tokens=8))
    bench.step()
    bench.add(new_request("p", prompt(30, 50)))
    bench.scheduler.direct(Mode.PREFILL_LED, 10)
    assert kinds(planned(bench)) == (8, 0)


def test_prompts_that_lead_take_no_more_sequences_than_a_worker_may_have() -> None:
    bench = decoding(8, max_seqs=8)
    bench.add(new_request("p", prompt(4, 50)))
    bench.add(new_request("away", prompt(4, 51)), is_remote=True)
    bench.scheduler.direct(Mode.PREFILL_LED, 10)
    plan = planned(bench)
    assert kinds(plan) == (8, 0), "four decodes that wait their turn are sequences too"
    bench.finish(plan)
    bench.cancel("d0")
    assert kinds(planned(bench)) == (6, 8), "one that stays, and one that goes elsewhere"


def test_a_balanced_worker_serves_every_decode_before_any_prompt() -> None:
    bench = decoding(6)
    bench.add(new_request("p", prompt(100, 50)))
    assert mode_of(bench) is Mode.BALANCED
    assert kinds(planned(bench)) == (6, 12)


def led_by_decodes(seconds: float) -> Bench:
    """A bench whose decode steps take 20 ms and 16 prompt tokens ``seconds`` more."""
    bench = decoding(2, budget=64)
    bench.add(new_request("p", prompt(16, 50), max_tokens=1))
    bench.scheduler.note_step(0.02, planned_and_finished(decoding(2)))
    bench.scheduler.note_step(0.02 + seconds, planned_and_finished(bench))
    bench.scheduler.direct(Mode.DECODE_LED, 100)
    bench.add(new_request("q", prompt(100, 60)))
    return bench


def planned_and_finished(bench: Bench) -> StepPlan:
    plan = planned(bench)
    bench.finish(plan)
    return plan


def test_a_prompt_beside_decodes_that_lead_gets_a_chunk_of_the_slas_length() -> None:
    """50 ms at 1 ms a token: 50 tokens, twelve whole blocks of four."""
    assert kinds(planned(led_by_decodes(seconds=0.016))) == (2, 48)


def test_a_prompt_beside_decodes_that_lead_gets_a_chunk_that_is_worth_it_at_least() -> None:
    """An eighth of the budget of 64, once what the slow step before it took is made good."""
    bench = led_by_decodes(seconds=1.6)
    given: list[int] = []
    for _ in range(40):
        plan = planned_and_finished(bench)
        given.append(kinds(plan)[1])
        bench.scheduler.note_step(0.02, plan)
    assert next(tokens for tokens in given if tokens) == 8


def test_prompts_alone_are_not_bounded_by_decodes_that_led() -> None:
    bench = led_by_decodes(seconds=1.6)
    bench.cancel("d0")
    bench.cancel("d1")
    assert kinds(planned(bench)) == (0, 64)


def test_prompts_beside_decodes_that_lead_are_not_bounded_while_no_rate_is_known() -> None:
    bench = decoding(2, budget=64)
    bench.add(new_request("p", prompt(100, 50)))
    bench.scheduler.direct(Mode.DECODE_LED, 100)
    assert kinds(planned(bench)) == (2, 60)


def test_waiting_prompts_let_prefill_lead() -> None:
    bench = Bench(num_blocks=400, budget=20)
    for number in range(9):
        bench.add(new_request(f"p{number}", prompt(40, number)))
    assert mode_of(bench) is Mode.BALANCED
    planned(bench)
    assert mode_of(bench) is Mode.PREFILL_LED


def test_slow_tokens_let_decode_lead_while_anything_decodes() -> None:
    bench = decoding(1)
    for _ in range(2):
        bench.scheduler.note_step(0.2, planned_and_finished(bench))
    planned_and_finished(bench)
    assert mode_of(bench) is Mode.DECODE_LED
    for _ in range(8):
        planned_and_finished(bench)
    bench.cancel("d0")
    bench.add(new_request("p", prompt(4, 50)))
    planned_and_finished(bench)
    assert mode_of(bench) is Mode.BALANCED, "no token is late where none is awaited"


def test_thresholds_are_the_workers_own() -> None:
    bench = Bench(num_blocks=400, budget=20, triggers=Triggers(prefill_threshold=1))
    for number in range(2):
        bench.add(new_request(f"p{number}", prompt(40, number)))
    planned(bench)
    assert mode_of(bench) is Mode.PREFILL_LED


# ---- prompts that wait for a prefix --------------------------------------------------------------


def test_a_prompt_that_waits_for_a_prefix_is_passed_by() -> None:
    bench = Bench(budget=32)
    bench.scheduler.add(new_request("a", prompt(8)), is_remote=False, num_awaited_tokens=4)
    bench.add(new_request("b", prompt(8, 1)))
    plan, effects = bench.plan()
    assert effects == [PrefillStarted(RequestId("b"), 0)]
    assert plan is not None
    bench.finish(plan)
    load = bench.scheduler.load(num_sending=0, num_receiving=0)
    assert (load.num_waiting, load.uncomputed_tokens) == (1, 8 - 4)
    bench.run()
    assert ("a", 0) not in bench.streams


def test_a_prompt_whose_prefix_arrived_takes_its_place_in_the_order_of_arrival() -> None:
    bench = Bench(budget=8)
    bench.add(new_request("x", prompt(8, 9), max_tokens=1))
    for name, kind in (("a", 1), ("b", 2)):
        bench.scheduler.add(
            new_request(name, prompt(8, kind), max_tokens=1), is_remote=False, num_awaited_tokens=4
        )
    bench.add(new_request("c", prompt(8, 3), max_tokens=1))
    for name in ("b", "a", "a", "c", "unknown"):
        bench.scheduler.prefix_arrived(RequestId(name))
    bench.run()
    assert list(bench.reports) == ["x", "a", "b", "c"]


def test_a_prefix_that_arrived_is_found() -> None:
    bench = Bench(budget=32)
    bench.scheduler.add(new_request("a", prompt(12)), is_remote=False, num_awaited_tokens=8)
    bench.add(new_request("donor", prompt(12), max_tokens=1))
    bench.run()
    bench.scheduler.prefix_arrived(RequestId("a"))
    plan, effects = bench.plan()
    assert effects[0] == PrefillStarted(RequestId("a"), 8)
    assert plan is not None
    bench.finish(plan)
    bench.run()
    assert bench.violations == []


def uncomputed(bench: Bench) -> int:
    return bench.scheduler.load(num_sending=0, num_receiving=0).uncomputed_tokens


def test_tokens_that_come_from_elsewhere_do_not_count_as_work() -> None:
    bench = Bench(budget=32)
    bench.scheduler.add(new_request("a", prompt(12)), is_remote=False, num_awaited_tokens=8)
    bench.scheduler.add(new_request("all", prompt(8, 1)), is_remote=False, num_awaited_tokens=8)
    assert uncomputed(bench) == 4 + 1
    bench.add(new_request("donor", prompt(12), max_tokens=1))
    bench.run()
    bench.scheduler.prefix_arrived(RequestId("a"))
    assert uncomputed(bench) == 4 + 1, "it waits for its turn, and what came is cached"
    bench.scheduler.prefix_arrived(RequestId("all"))
    assert uncomputed(bench) == 4 + 8, "nothing came, so all of it is computed"


def test_a_cached_prefix_of_a_prompt_that_waits_does_not_count_as_work() -> None:
    bench = Bench(budget=32)
    bench.add(new_request("donor", prompt(12), max_tokens=1))
    bench.run()
    bench.add(new_request("a", prompt(20)))
    assert uncomputed(bench) == 20 - 12
    bench.blocks.clear_cache()
    plan, _ = bench.plan()
    assert plan is not None
    assert uncomputed(bench) == 20, "it was admitted without what had been cached"
    bench.finish(plan)
    assert uncomputed(bench) == 0


def without_room(bench: Bench, name: str, kind: int) -> None:
    """Add a prompt of 40 tokens whose prefix of 20 found no room."""
    bench.scheduler.add(
        new_request(name, prompt(40, kind), max_tokens=1), is_remote=False, num_awaited_tokens=20
    )
    bench.scheduler.prefix_has_no_room(RequestId(name))


def test_a_prefix_without_room_is_loaded_when_there_is_some_before_later_prompts() -> None:
    bench = Bench(num_blocks=12, budget=64)
    bench.add(new_request("x", prompt(30, 9), max_tokens=1))
    running, _ = bench.plan()
    assert running is not None
    without_room(bench, "a", 1)
    bench.add(new_request("b", prompt(4, 2), max_tokens=1))
    assert bench.plan() == (None, []), "there is no room, and b came later"
    assert uncomputed(bench) == 30 + 20 + 4
    bench.finish(running)
    plan, effects = bench.plan()
    assert (plan, effects) == (None, [RoomForPrefix(RequestId("a"))])
    bench.scheduler.prefix_arrived(RequestId("a"))
    bench.run()
    assert list(bench.reports) == ["x", "a", "b"]
    assert bench.violations == []


def test_a_prefix_that_still_found_no_room_is_asked_for_no_more() -> None:
    bench = Bench(num_blocks=12, budget=64)
    without_room(bench, "a", 1)
    assert bench.plan() == (None, [RoomForPrefix(RequestId("a"))])
    bench.scheduler.prefix_arrived(RequestId("a"))
    _, effects = bench.plan()
    assert effects == [PrefillStarted(RequestId("a"), 0)]


def test_who_waits_for_room_for_its_prefix_is_cancelled_or_given_back_at_once() -> None:
    bench = Bench(num_blocks=12, budget=64)
    without_room(bench, "a", 1)
    without_room(bench, "b", 2)
    bench.cancel("a")
    assert bench.scheduler.withdraw(RequestId("b"))
    bench.scheduler.prefix_has_no_room(RequestId("a"))
    assert bench.plan() == (None, [])
    assert bench.scheduler.request_ids() == ()


def test_a_prompt_that_waits_for_a_prefix_is_cancelled_at_once() -> None:
    bench = Bench()
    bench.scheduler.add(new_request("a", prompt(8)), is_remote=False, num_awaited_tokens=4)
    bench.cancel("a")
    bench.scheduler.prefix_arrived(RequestId("a"))
    assert bench.plan() == (None, [])
    assert bench.scheduler.request_ids() == ()
