"""The last minute of every number that is drawn over time. Knows no documents and no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

WINDOW_S = 60


def _mean(values: list[float | None]) -> float | None:
    """Of those that are known."""
    known = [value for value in values if value is not None] if None in values else values
    return sum(known) / len(known) if known else None  # type: ignore[arg-type]  # there is no None in it


class Series:
    """A number over the last minute, as the mean of each second. Seconds of which nothing is known are None."""

    def __init__(self) -> None:
        self._values: deque[float | None] = deque(maxlen=WINDOW_S)
        self._second = 0  # of the last value
        self._num_readings = 0  # in that second

    def note(self, value: float, now: float) -> None:
        second = int(now)
        if self._values and second <= self._second:
            last = self._values[-1]
            assert last is not None
            self._num_readings += 1
            self._values[-1] = last + (value - last) / self._num_readings
            return
        if self._values:
            self._values.extend([None] * min(WINDOW_S, second - self._second - 1))
        self._values.append(value)
        self._second, self._num_readings = second, 1

    def buckets(self, width: int, now: float) -> list[float | None]:
        """The last minute in `width` parts, a divisor of 60, oldest first. The parts lie on fixed seconds: from one frame to
        the next a picture made of them stands still or moves by whole cells."""
        size = WINDOW_S // width
        start = self._second - len(self._values) + 1  # second of the first value
        first = (int(now) // size - width + 1) * size - start
        values = list(self._values)
        return [_mean(values[max(0, i) : max(0, i + size)]) for i in range(first, first + WINDOW_S, size)]

    @property
    def largest(self) -> float:
        return max((value for value in self._values if value is not None), default=0.0)

    def check_invariants(self) -> None:
        assert len(self._values) <= WINDOW_S
        assert not self._values or self._values[-1] is not None


class Counter:
    """A number that only grows, unless its server starts anew."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, float]] = deque()  # time and value, of the last minute

    def note(self, value: float, now: float) -> None:
        if self._readings and value < self._readings[-1][1]:
            self._readings.clear()
        self._readings.append((now, value))
        while self._readings[0][0] < now - WINDOW_S:
            self._readings.popleft()

    def per_s(self, window_s: float) -> float | None:
        """Growth over about the last `window_s`; None while there is one reading only, which cannot tell."""
        if len(self._readings) < 2:
            return None
        end_s, end = self._readings[-1]
        start_s, start = next(r for r in self._readings if r[0] >= end_s - window_s)
        if start_s == end_s:  # readings are further apart than that
            start_s, start = self._readings[-2]
        return (end - start) / (end_s - start_s) if end_s > start_s else 0.0

    @property
    def growth(self) -> float:
        """In the last minute."""
        return self._readings[-1][1] - self._readings[0][1] if self._readings else 0.0


class History:
    """Series and counters by key, made when they are first heard of."""

    def __init__(self) -> None:
        self.series: dict[Hashable, Series] = {}
        self.counters: dict[Hashable, Counter] = {}

    def note(self, key: Hashable, value: float, now: float) -> None:
        series = self.series.get(key)
        if series is None:
            series = self.series[key] = Series()
        series.note(value, now)

    def note_counter(self, key: Hashable, value: float, now: float) -> None:
        self.counters.setdefault(key, Counter()).note(value, now)

    def buckets(self, key: Hashable, width: int, now: float) -> list[float | None]:
        series = self.series.get(key)
        return [None] * width if series is None else series.buckets(width, now)

    def largest(self, key: Hashable) -> float:
        series = self.series.get(key)
        return 0.0 if series is None else series.largest
