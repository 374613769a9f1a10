from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.controller.policy.loading import Path, StoreRead, choose_path
from services.controller.policy.views import Pairing, Placement, RequestView, WorkerView
from tests.unit.controller.policy.builders import BROKEN, WORKS, C, D, P, key, request, worker

PREFILL = replace(worker("p", P), has_store=True, read_rate=10_000.0)
DECODE = replace(worker("d", D), has_store=True, read_rate=10_000.0)
HOLDER = worker("h", P, links={"p": 1e9})


def stored(num_blocks: int, tokens: int = 1024, **hits: int) -> RequestView:
    return replace(request(tokens, **hits), num_stored_blocks=num_blocks)


def queued(view: WorkerView, tokens: int) -> WorkerView:
    return replace(view, read_queue_tokens=tokens)


def copied(num_blocks: int) -> Placement:
    return Placement(PREFILL, DECODE, copy_from=HOLDER.key, num_copy_blocks=num_blocks)


def test_what_is_not_stored_is_computed_or_copied_as_the_policy_says() -> None:
    assert choose_path(Placement(PREFILL, DECODE), request()).path is Path.COMPUTE
    found = choose_path(copied(8), request(h=8), holder=HOLDER)
    assert (found.path, found.num_blocks, found.inputs) == (Path.COPY, 8, ())
    gone = choose_path(copied(8), request(h=8))
    assert (gone.path, gone.num_blocks) == (Path.COMPUTE, 0)


def test_the_side_with_the_shorter_queue_of_reads_reads_and_of_equal_ones_the_prefill_side() -> (
    None
):
    equal = choose_path(Placement(queued(PREFILL, 64), queued(DECODE, 64)), stored(8))
    assert (equal.path, equal.num_blocks) == (Path.PREFILL_READ, 8)
    other = choose_path(Placement(queued(PREFILL, 65), queued(DECODE, 64)), stored(8))
    assert (other.path, other.num_blocks) == (Path.DECODE_READ, 8)
    assert other.reason == "d reads: its read queue is shorter"
    told = dict(other.inputs)
    assert (told["num_stored_blocks"], told["prefill_read_queue"], told["decode_read_queue"]) == (
        8,
        65,
        64,
    )


def test_only_what_the_reading_side_has_not_cached_is_read() -> None:
    assert choose_path(Placement(PREFILL, DECODE), stored(8, p=3, d=5)).num_read_tokens == 5 * 64
    by_decode = choose_path(Placement(PREFILL, DECODE), stored(8, p=3, d=5), "decode")
    assert by_decode.num_read_tokens == 3 * 64
    more = choose_path(Placement(PREFILL, DECODE), stored(8, p=3, d=9), "decode")
    assert (more.path, more.num_read_tokens) == (Path.DECODE_READ, 0)


@pytest.mark.parametrize(
    ("store_read", "path"), [("prefill", Path.PREFILL_READ), ("decode", Path.DECODE_READ)]
)
def test_the_setting_names_the_side_however_long_its_queue(
    store_read: StoreRead, path: Path
) -> None:
    sides = Placement(queued(PREFILL, 500), queued(DECODE, 500))
    assert choose_path(sides, stored(8), store_read).path is path
    blind = Placement(replace(PREFILL, has_store=False), replace(DECODE, has_store=False))
    found = choose_path(blind, stored(8), store_read)
    assert (found.path, found.reason) == (
        Path.COMPUTE,
        "neither side may read from the store",
    )


def test_a_side_without_a_store_leaves_it_to_the_other_one() -> None:
    blind = Placement(replace(PREFILL, has_store=False), queued(DECODE, 500))
    assert choose_path(blind, stored(8)).path is Path.DECODE_READ
    blind = Placement(queued(PREFILL, 500), replace(DECODE, has_store=False))
    assert choose_path(blind, stored(8)).path is Path.PREFILL_READ


def test_a_decode_side_that_cannot_write_into_the_prefill_side_s_pool_does_not_read() -> None:
    broken = replace(DECODE, pairings={key("p"): BROKEN})
    assert choose_path(Placement(queued(PREFILL, 99), broken), stored(8)).path is Path.PREFILL_READ
    assert choose_path(Placement(PREFILL, broken), stored(8), "decode").path is Path.COMPUTE


@pytest.mark.parametrize("store_read", ["dual", "prefill", "decode"])
def test_a_worker_that_does_both_reads_for_itself(store_read: StoreRead) -> None:
    both = replace(PREFILL, role=C)
    assert choose_path(Placement(both, both), stored(8), store_read).path is Path.PREFILL_READ


def test_loading_must_take_less_than_nine_tenths_of_computing() -> None:
    # 512 tokens are computed in 0.512 s; 0.9 of it are 0.4608 s = 4608 tokens of reading.
    assert choose_path(Placement(queued(PREFILL, 4095), DECODE), stored(8), "prefill").path is (
        Path.PREFILL_READ
    )
    late = choose_path(Placement(queued(PREFILL, 4097), DECODE), stored(8), "prefill")
    assert (late.path, late.reason) == (Path.COMPUTE, "computing takes no longer than loading")


def test_with_always_nothing_is_computed_that_the_store_has() -> None:
    late = Placement(queued(PREFILL, 10**6), queued(DECODE, 10**6))
    found = choose_path(late, stored(8), store_load="always")
    assert (found.path, found.num_blocks) == (Path.PREFILL_READ, 8)
    found = choose_path(copied(8), stored(8, h=8), "dual", HOLDER, "always")
    assert (found.path, found.num_blocks) == (Path.PREFILL_READ, 8)
    assert choose_path(late, stored(8, p=8), store_load="always").path is Path.COMPUTE


def test_what_was_never_measured_is_tried() -> None:
    unread = replace(queued(PREFILL, 10**6), read_rate=0.0)
    assert choose_path(Placement(unread, DECODE), stored(8), "prefill").path is Path.PREFILL_READ
    uncomputed = replace(queued(PREFILL, 10**6), prefill_rate=0.0)
    found = choose_path(Placement(uncomputed, DECODE), stored(8), "prefill")
    assert found.path is Path.PREFILL_READ


def test_the_link_to_the_prefill_side_counts_for_what_the_decode_side_reads() -> None:
    slow = replace(DECODE, link_rates={key("p"): 1e7})  # 8 blocks of 1 MB take 0.8 s
    assert choose_path(Placement(PREFILL, slow), stored(8), "decode").path is Path.COMPUTE
    fast = replace(DECODE, link_rates={key("p"): 1e8})
    assert choose_path(Placement(PREFILL, fast), stored(8), "decode").path is Path.DECODE_READ


def test_of_a_copy_and_the_store_the_way_that_has_the_prompt_sooner_is_taken() -> None:
    # The copy of 8 blocks takes 8 ms, reading them 51 ms.
    short = choose_path(copied(8), stored(8, h=8), holder=HOLDER)
    assert (short.path, short.num_blocks, short.num_read_tokens) == (Path.COPY, 8, 0)
    assert "h" in short.reason
    longer = choose_path(copied(8), stored(12, h=8), holder=HOLDER)
    assert (longer.path, longer.num_blocks) == (Path.PREFILL_READ, 12)


def test_without_a_rate_of_reads_the_way_that_leaves_less_to_compute_is_taken() -> None:
    unread = Placement(
        replace(PREFILL, read_rate=0.0), DECODE, copy_from=HOLDER.key, num_copy_blocks=8
    )
    assert choose_path(unread, stored(8, h=8), holder=HOLDER).path is Path.COPY
    assert choose_path(unread, stored(9, h=8), holder=HOLDER).path is Path.PREFILL_READ


# ---- against a search over all ways --------------------------------------------------------------

RATE = st.sampled_from([0.0, 500.0, 1000.0, 4000.0, 20_000.0])
QUEUE = st.sampled_from([0, 64, 100, 1000, 5000])
LINK = st.sampled_from([0.0, 1e7, 1e8, 1e9])
CACHED = st.sampled_from([0, 0, 1, 5, 9])
STORED = st.sampled_from([0, 4, 8, 12, 15])
COPIED = st.sampled_from([0, 0, 2, 8, 15])
MOSTLY = st.sampled_from([True, True, True, False])


@st.composite
def sides(draw: st.DrawFn) -> tuple[WorkerView, WorkerView, WorkerView]:
    """Draw a prefill side, a decode side (perhaps the same) and a holder (perhaps one of them)."""
    prefill, decode = (
        replace(
            worker(name, role, prefill_rate=draw(RATE), links={"p": draw(LINK)}),
            has_store=draw(MOSTLY),
            read_rate=draw(RATE),
            read_queue_tokens=draw(QUEUE),
            pairings={key("p"): WORKS if draw(MOSTLY) else BROKEN},
        )
        for name, role in (("p", P), ("d", D))
    )
    if draw(st.integers(0, 3)) == 0:
        decode = prefill
    holder = draw(st.sampled_from([prefill, decode, worker("h", P, links={"p": draw(LINK)})]))
    return prefill, decode, holder


def computed_at(view: WorkerView, tokens: int, blocks: int) -> float:
    return max(1, tokens - 64 * blocks) / (view.prefill_rate or 1000.0)


def readers(
    prefill: WorkerView, decode: WorkerView, store_read: StoreRead
) -> list[tuple[WorkerView, Path]]:
    ways = []
    if prefill.has_store and (store_read != "decode" or prefill == decode):
        ways.append((prefill, Path.PREFILL_READ))
    can_hand = decode.pairings[key("p")] is not Pairing.BROKEN
    if decode.has_store and can_hand and store_read != "prefill" and prefill != decode:
        ways.append((decode, Path.DECODE_READ))
    return ways


@settings(max_examples=600, deadline=None, derandomize=True)
@given(
    three=sides(),
    blocks=st.tuples(STORED, COPIED, CACHED, CACHED, CACHED),
    store_read=st.sampled_from(["dual", "prefill", "decode"]),
)
def test_the_path_is_the_one_that_a_search_over_all_finds(
    three: tuple[WorkerView, WorkerView, WorkerView],
    blocks: tuple[int, int, int, int, int],
    store_read: StoreRead,
) -> None:
    prefill, decode, holder = three
    num_stored, num_copied, in_prefill, in_decode, in_holder = blocks
    num_copied = max(num_copied, in_prefill) if num_copied else 0
    asked = stored(num_stored, 1024, p=in_prefill, d=in_decode, h=in_holder)
    placement = Placement(prefill, decode, copy_from=holder.key, num_copy_blocks=num_copied)
    found = choose_path(placement, asked, store_read, holder)

    may_copy = num_copied > 0 and holder.key != prefill.key
    expected, expected_blocks = (Path.COPY, num_copied) if may_copy else (Path.COMPUTE, 0)
    ways = readers(prefill, decode, store_read)
    if ways and num_stored > in_prefill:
        view, path = min(ways, key=lambda way: way[0].read_queue_tokens)
        hits = in_prefill if view == prefill else in_decode
        read = 64 * max(0, num_stored - hits)
        saved_tokens = 64 * (num_stored - in_prefill)
        seconds = 0.0
        if view.read_rate:
            seconds = (read + view.read_queue_tokens) / view.read_rate
            link = view.link_rates[key("p")] if path is Path.DECODE_READ else 0.0
            seconds += 1e6 * (num_stored - in_prefill) / link if link else 0.0
        is_worth = not prefill.prefill_rate or seconds < 0.9 * saved_tokens / prefill.prefill_rate
        if is_worth and may_copy and view.read_rate:
            link = holder.link_rates[key("p")] or 1e9
            copy = 1e6 * (num_copied - in_prefill) / link
            with_copy = copy + computed_at(prefill, 1024, num_copied)
            is_worth = seconds + computed_at(prefill, 1024, num_stored) < with_copy
        elif is_worth and may_copy:
            is_worth = num_stored > num_copied
        if is_worth:
            expected, expected_blocks = path, num_stored
            assert found.num_read_tokens == read
    assert (found.path, found.num_blocks) == (expected, expected_blocks)
