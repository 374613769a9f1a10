import itertools

from hypothesis import example, given
from hypothesis import strategies as st

from services.gateway.stopper import Stopper

STOPS = st.lists(st.text(alphabet="ab가", min_size=1, max_size=5), max_size=4)
TEXT = st.text(alphabet="ab가", max_size=30)


def whole_text_reference(text: str, stops: list[str]) -> tuple[str, bool]:
    """The first position where some stop string is complete, the longest of those there."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


def cut(text: str, borders: list[int]) -> list[str]:
    places = sorted({border % (len(text) + 1) for border in borders} | {0, len(text)})
    return [text[start:end] for start, end in itertools.pairwise(places)]


@given(TEXT, STOPS, st.lists(st.integers(0, 100)))
@example("aab", ["ab", "aab"], [1, 2])
@example("abaabab", ["abab"], [3])
def test_any_cut_of_the_text_gives_the_result_of_the_whole(text, stops, borders):
    stopper = Stopper(tuple(stops))
    emitted, is_matched = "", False
    for piece in cut(text, borders):
        step = stopper.feed(piece)
        emitted += step.text
        if step.is_matched:
            is_matched = True
            break
    if not is_matched:
        emitted += stopper.flush()
    assert (emitted, is_matched) == whole_text_reference(text, stops)


@given(TEXT, STOPS)
def test_only_what_may_become_a_match_is_held_back(text, stops):
    stopper = Stopper(tuple(stops))
    emitted = ""
    for position, char in enumerate(text, start=1):
        step = stopper.feed(char)
        emitted += step.text
        if step.is_matched:
            return
        held = text[len(emitted) : position]
        prefixes = {stop[:length] for stop in stops for length in range(len(stop))}
        longest = max((p for p in prefixes if text[:position].endswith(p)), key=len, default="")
        assert held == longest


def test_nothing_is_held_without_stop_strings():
    stopper = Stopper(())
    assert stopper.feed("abc").text == "abc"
    assert stopper.flush() == ""


def test_a_false_start_is_released_with_the_character_that_disproves_it():
    stopper = Stopper(("</s>",))
    assert stopper.feed("a</").text == "a"
    assert stopper.feed("b").text == "</b"
