"""Heartbeats every half second, news of the load within fifty milliseconds, and nothing more than that."""

from __future__ import annotations

from cores.messages import RankLoad
from cores.report_timer import ReportTimer

IDLE, BUSY, BUSIER = (1, RankLoad()), (1, RankLoad(num_running=1)), (1, RankLoad(num_running=2))


def test_the_first_heartbeat_is_due_at_once_and_then_every_half_second() -> None:
    timer = ReportTimer(now=10.0)
    assert timer.due(IDLE, 10.0) == "heartbeat"
    assert timer.next_due_s(IDLE) == 10.5
    assert timer.due(IDLE, 10.49) is None
    assert timer.due(IDLE, 10.5) == "heartbeat"


def test_a_changed_load_is_told_once_fifty_milliseconds_after_the_last_news() -> None:
    timer = ReportTimer(now=0.0)
    assert timer.due(IDLE, 0.0) == "heartbeat"
    assert timer.due(BUSY, 0.03) is None
    assert timer.next_due_s(BUSY) == 0.05
    assert timer.due(BUSY, 0.05) == "load"
    assert timer.due(BUSY, 0.2) is None
    assert timer.due(BUSIER, 0.2) == "load"


def test_a_new_command_applied_is_news_although_the_load_is_the_same() -> None:
    timer = ReportTimer(now=0.0)
    timer.due(IDLE, 0.0)
    assert timer.due((2, IDLE[1]), 0.06) == "load"


def test_outputs_stand_for_load_reports_but_not_for_heartbeats() -> None:
    timer = ReportTimer(now=0.0)
    timer.due(IDLE, 0.0)
    for tick in range(1, 49):
        timer.on_told((tick, RankLoad()), tick * 0.01)
        assert timer.due((tick, RankLoad()), tick * 0.01) is None
    assert timer.due((49, RankLoad()), 0.5) == "heartbeat"


def test_a_load_that_changes_all_the_time_is_told_twenty_times_a_second() -> None:
    timer = ReportTimer(now=0.0)
    timer.due(IDLE, 0.0)
    due = [timer.due((1, RankLoad(num_waiting=ms)), ms / 1000) for ms in range(1, 1001)]
    assert due.count("heartbeat") == 2
    assert due.count("load") == 18
