"""Frames of the board at fixed widths."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from gateway.dashboard.feed import Reading
from gateway.dashboard.view import count, duration, render
from gateway.status import BalancerStatus, Event, FrontEndStatus, RankStatus, StatusSnapshot, Totals


def make_status(**fields: Any) -> StatusSnapshot:
    usual: dict[str, Any] = {
        "version": "0.1.0", "mode": "DPLBAsyncMPClient", "model": "smollm2", "uptime_s": 754.0, "state": "degraded",
        "front_ends": (FrontEndStatus(index=0, pid=4242, in_flight=12, event_loop_lag_ms=0.4),),
        "ranks": (
            RankStatus(rank=0, epoch=1, state="ready", running=12, waiting=3, kv_cache_usage=0.42, generation_tokens_per_s=164,
                       step_ms=18.2, signal_age_ms=4),
            RankStatus(rank=1, epoch=2, state="dead", signal_age_ms=4200, restarts=1, last_death_s_ago=12.0,
                       death_cause="killed by signal 9\nTraceback (most recent call last)"),
        ),
        "totals": Totals(requests=17, aborted=1, failed=3, prompt_tokens=90_000, generation_tokens=800),
        "balancer": BalancerStatus(policy="least_tokens", dispatch="early", signal_age_ms=4),
        "events": (Event(seq=1, age_s=90, kind="ready", rank=1, text="up"),
                   Event(seq=2, age_s=12, kind="death", rank=1, text="gone")),
    }  # fmt: skip
    return StatusSnapshot(**(usual | fields))


def frame(width: int, *readings: Reading, ascii_only: bool = False, color: bool = False) -> str:
    console = Console(
        width=width, file=StringIO(), force_terminal=color, color_system="standard" if color else None, legacy_windows=False
    )
    console.print(render(readings or [Reading("http://h:8000", make_status())], width, ascii_only=ascii_only))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_a_frame_of_eighty_columns_shows_the_essentials() -> None:
    lines = [line.rstrip() for line in frame(80).splitlines()]
    assert lines == [
        "degraded · gateway 0.1.0 · smollm2 · DPLBAsyncMPClient · up 12m 34s · http://h:…",
        "",
        "rank  state        wait    run  kv cache           tok/s     step   signal",
        "──────────────────────────────────────────────────────────────────────────",
        "0     ready           3     12  ████░░░░░░  42%      164   18.2ms      4ms",
        "1     dead            0      0  ░░░░░░░░░░   0%        0        –       4s",
        "",
        "front end 0 · pid 4242 · 12 in flight · 0 queued · loop lag 0.4 ms",
        "17 requests · 1 aborted · 3 failed · 0 rejected · 0 moved · 90.0k tokens in · 8…",
        "policy least_tokens · dispatch early · oldest signal 4ms",
        "    12s ago  death    rank 1 gone",
        " 1m 30s ago  ready    rank 1 up",
    ]


@pytest.mark.parametrize("width", [40, 60, 79, 80, 100, 120, 160, 200, 300])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_no_line_is_wider_than_the_console(width: int, ascii_only: bool) -> None:
    readings = [Reading(f"http://h:{i}", make_status()) for i in range(3)] + [Reading("http://h:3", error="no")]
    text = frame(width, *readings, ascii_only=ascii_only)
    assert max(map(len, text.splitlines())) <= width
    # One line per heading, row, front end, total, policy and event: nothing wraps.
    assert len(text.splitlines()) == 4 + (4 + 6) + 3 + 1 + 1 + 6


def test_a_wide_frame_adds_columns_and_a_death_has_its_cause_on_one_line() -> None:
    assert "12s ago: killed by sig" in frame(120)
    for title in ("queued tok", "booked tok", "hits", "in tok/s", "requests", "restarts", "last death", "device", "pid"):
        assert title in frame(200)
    assert "Traceback" not in frame(200)


def test_states_are_words_in_colour() -> None:
    text = frame(100, color=True)
    assert "\x1b[32mready" in text
    assert "\x1b[1;31mdead" in text
    assert "\x1b" not in frame(100)


def test_ascii_frames_hold_only_ascii() -> None:
    text = frame(100, ascii_only=True)
    assert text.isascii() or {char for char in text if not char.isascii()} == {"…"}
    assert "####......  42%" in text


def test_an_unreachable_endpoint_says_why_beside_those_that_answer() -> None:
    text = frame(100, Reading("http://h:1", error="Connection refused"), Reading("http://h:2", make_status()))
    lines = text.splitlines()
    assert lines[0].rstrip() == "0/ unreachable · http://h:1 · Connection refused"
    assert lines[1].startswith("1/ degraded")
    assert [line.split()[0] for line in lines if line.startswith(("1/0", "1/1"))] == ["1/0", "1/1"]


def test_a_long_reason_is_shown_in_full() -> None:
    text = frame(40, Reading("http://h:1", error="refused " * 20))
    assert text.count("refused") == 20
    assert max(map(len, text.splitlines())) <= 40


def test_nothing_but_an_unreachable_endpoint_is_a_frame_too() -> None:
    assert frame(100, Reading("http://h:1", error="no answer within 5 s")).rstrip() == (
        "unreachable · http://h:1 · no answer within 5 s"
    )


def test_totals_of_several_endpoints_add_up_and_events_are_the_newest_of_all() -> None:
    old, new = (make_status(events=(Event(seq=1, age_s=age, kind="move", rank=None, text=f"{age}"),)) for age in (50, 5))
    lines = [line.strip() for line in frame(120, Reading("http://h:1", old), Reading("http://h:2", new)).splitlines()]
    assert any(line.startswith("34 requests · 2 aborted · 6 failed") for line in lines)
    assert lines[-2:] == ["5s ago  move     5", "50s ago  move     50"]


def test_a_starting_endpoint_without_ranks_has_no_empty_table() -> None:
    text = frame(80, Reading("http://h:1", make_status(state="starting", ranks=(), events=(), balancer=None)))
    assert "rank" not in text
    assert text.startswith("starting")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59.9, "59s"), (60, "1m 0s"), (754, "12m 34s"), (7500, "2h 5m"), (356_400, "4d 3h")]
)
def test_durations_have_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (9999, "9999"), (10_000, "10.0k"), (123_456, "123k"), (999_600, "1.0M"), (4_500_000, "4.5M"), (10**18, "1e+18")],
)
def test_counts_fit_in_five_characters(number: int, text: str) -> None:
    assert count(number) == text
    assert len(count(number)) <= 5
