"""Where a text that comes in pieces ends."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.stop_strings import StopStringMatcher

# Two letters: stop strings overlap, contain and begin each other.
SHORT_TEXT = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple)


def first_stop(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """By trying every character: (start, stop string)."""
    for end in range(1, len(text) + 1):
        completed = [stop for stop in stops if text[:end].endswith(stop)]
        if completed:
            longest = max(completed, key=len)
            return end - len(longest), longest
    return None


def held_suffix(text: str, stops: tuple[str, ...]) -> str:
    suffixes = [text[i:] for i in range(len(text))]
    return next((s for s in suffixes if any(stop.startswith(s) and stop != s for stop in stops)), "")


@settings(max_examples=500)
@given(st.lists(st.text("ab", max_size=4), max_size=8), STOPS, st.booleans())
def test_pieces_end_where_the_whole_text_would(pieces: list[str], stops: tuple[str, ...], include: bool) -> None:
    matcher = StopStringMatcher(stops, include)
    released, stopped = "", None
    for piece in pieces:
        text, stopped = matcher.feed(piece)
        released += text
        if stopped is not None:
            break
    text = "".join(pieces)
    expected = first_stop(text, stops)
    if expected is None:
        assert stopped is None
        assert released == text.removesuffix(held_suffix(text, stops))
        assert released + matcher.take_held() == text
    else:
        start, stop = expected
        assert (released, stopped) == (text[: start + len(stop) if include else start], stop)
        assert matcher.held == ""


@settings(max_examples=500)
@given(SHORT_TEXT, STOPS)
def test_only_a_suffix_that_could_begin_a_stop_string_is_held_back(text: str, stops: tuple[str, ...]) -> None:
    matcher = StopStringMatcher(stops, False)
    released, _ = matcher.feed(text, armed=False)
    assert matcher.held == held_suffix(text, stops)
    assert released + matcher.held == text


@pytest.mark.parametrize(("include", "expected"), [(False, "x"), (True, "xab")])
def test_a_stop_string_that_begins_while_not_armed_ends_the_text_once_armed(include: bool, expected: str) -> None:
    matcher = StopStringMatcher(("ab",), include)
    assert matcher.feed("ab", armed=False) == ("ab", None)
    assert matcher.feed("xa", armed=False) == ("x", None)
    assert matcher.feed("b") == (expected.removeprefix("x"), "ab")


def test_of_two_that_may_begin_the_earlier_is_held_back() -> None:
    matcher = StopStringMatcher(("abc", "bd"), False)
    assert matcher.feed("xab") == ("x", None)
    assert matcher.held == "ab"


def test_of_two_completed_by_one_character_the_longer_counts() -> None:
    assert StopStringMatcher(("b", "ab"), False).feed("xab") == ("x", "ab")


def test_the_first_to_be_completed_ends_the_text_even_inside_a_longer_one() -> None:
    assert StopStringMatcher(("abc", "b"), False).feed("abc") == ("a", "b")
