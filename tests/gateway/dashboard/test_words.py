"""Numbers and pictures of fixed width."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from gateway.dashboard import words
from gateway.dashboard.words import ASCII, UNICODE


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59.9, "59s"), (60, "1m 0s"), (754, "12m 34s"), (7500, "2h 5m"), (356_400, "4d 3h")]
)
def test_durations_have_two_units(seconds: float, text: str) -> None:
    assert words.duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (9999, "9999"), (10_000, "10.0k"), (123_456, "123k"), (999_600, "1.0M"), (4_500_000, "4.5M"), (10**18, "1e+18")],
)
def test_counts_are_short(number: int, text: str) -> None:
    assert words.count(number) == text


@given(st.floats(min_value=0, max_value=1e15))
def test_every_number_keeps_its_width(number: float) -> None:
    assert len(words.count(number)) <= 5
    assert len(words.per_second(number)) <= 5
    assert len(words.percent(number)) <= 4
    for glyphs in (UNICODE, ASCII):
        assert len(words.short_time(min(number, 8e12), glyphs)) <= 6
        assert len(words.step_time(min(number, 8e10), glyphs)) <= 6
        assert len(words.bar(number, 10, glyphs)) <= 10


@given(st.floats(min_value=0, max_value=1e12))
def test_a_scale_holds_what_it_is_for_and_is_a_round_number(largest: float) -> None:
    scale = words.round_scale(largest, 10)
    assert scale >= largest
    assert f"{scale:e}"[0] in "125"
    assert scale <= max(10, 2.6 * largest)


def test_a_bar_shows_whatever_there_is() -> None:
    assert words.bar(0.0, 5, UNICODE) == ""
    assert words.bar(1e-9, 5, UNICODE) == "▏"
    assert words.bar(0.5, 5, UNICODE) == "██▌"
    assert words.bar(2.0, 5, UNICODE) == "█████"
    assert words.bar(0.5, 4, ASCII) == "##"


def test_a_sparkline_leaves_out_what_is_not_known() -> None:
    assert words.sparkline([None, 0.0, 50.0, 100.0, 200.0], 100.0, UNICODE) == " ▁▅██"
    assert words.sparkline([0.0, 1.0], 0.0, UNICODE) == "▁▁"


def test_a_clipped_text_says_so_and_wide_characters_count_twice() -> None:
    assert words.clip("abcdef", 4, UNICODE) == "abc…"
    assert words.clip("模型模型", 5, UNICODE) == "模型…"
    assert words.clip("abc", 3, UNICODE) == "abc"
    assert words.clip("abc", 0, UNICODE) == ""


@given(st.text(alphabet="ab 模", max_size=60), st.integers(2, 30))
def test_wrapped_lines_fit_and_lose_nothing_but_blanks_between_them(text: str, width: int) -> None:
    lines = words.wrapped(text, width, 100, UNICODE)
    assert max(map(cell_len, lines)) <= width
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


def test_text_is_broken_at_blanks_and_cut_off_when_there_are_too_many_lines() -> None:
    assert words.wrapped("one two three four", 9, 3, UNICODE) == ["one two", "three", "four"]
    assert words.wrapped("one two three four", 9, 2, UNICODE) == ["one two", "three fo…"]
    assert words.wrapped("1234567 x/y/z/long", 9, 9, UNICODE) == ["1234567", "x/y/z/lon", "g"]
    assert words.wrapped("", 9, 3, UNICODE) == [""]
