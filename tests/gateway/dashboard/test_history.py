"""The last minute."""

from __future__ import annotations

import itertools

from gateway.dashboard.history import WINDOW_S, Counter, Series


def make_series(values: dict[float, float]) -> Series:
    series = Series()
    for at_s, value in values.items():
        series.note(value, at_s)
        series.check_invariants()
    return series


def test_a_second_is_the_mean_of_its_readings() -> None:
    series = make_series({10.0: 4.0, 10.3: 8.0, 10.9: 9.0, 11.0: 1.0})
    assert series.buckets(WINDOW_S, 11.0)[-2:] == [7.0, 1.0]


def test_seconds_without_a_reading_are_not_known() -> None:
    series = make_series({10.0: 4.0, 13.0: 8.0})
    assert series.buckets(WINDOW_S, 13.0)[-5:] == [None, 4.0, None, None, 8.0]


def test_what_is_older_than_a_minute_is_gone() -> None:
    series = make_series({0.0: 1.0, 59.0: 2.0, 60.0: 3.0, 1000.0: 4.0})
    assert series.buckets(WINDOW_S, 1000.0) == [None] * 59 + [4.0]
    assert series.largest == 4.0


def test_a_picture_stands_still_or_moves_by_whole_cells() -> None:
    series = make_series({float(second): float(second % 7) for second in range(100)})
    for width in (6, 12, 20, 60):
        frames = [series.buckets(width, 99 + tenth / 10) for tenth in range(30)]
        for before, after in itertools.pairwise(frames):
            assert after in (before, [*before[1:], None])


def test_a_rate_is_the_growth_over_the_window_and_a_new_start_of_the_server_is_none() -> None:
    counter = Counter()
    assert counter.per_s(10) is None
    for second in range(21):
        counter.note(100 + 5 * second, float(second))
    assert counter.per_s(10) == 5.0
    assert counter.growth == 100
    counter.note(3, 21.0)
    assert counter.per_s(10) is None
    assert counter.growth == 0
    counter.note(9, 81.0)  # the next look after a minute
    assert counter.per_s(10) == 0.1


def test_an_empty_history_draws_nothing() -> None:
    assert Series().buckets(6, 10.0) == [None] * 6
    assert Series().largest == 0.0
    assert Counter().growth == 0.0
