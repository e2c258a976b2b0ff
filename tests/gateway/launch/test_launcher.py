"""Bounds of the launcher beside those of the processes that it ends."""

from __future__ import annotations

from gateway import stat_loggers
from gateway.launch.front_end_process import DRAIN_MARGIN_S
from gateway.server import app

SLACK_S = 3.0  # of a busy machine


def test_a_front_end_with_a_slow_reader_and_a_slow_stat_logger_ends_by_itself_before_it_is_killed() -> None:
    assert app.STOP_TIMEOUT_S + stat_loggers.CLOSE_TIMEOUT_S + SLACK_S <= DRAIN_MARGIN_S
