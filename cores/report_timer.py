"""When one front end is due for a sign of life or for news of the load. Knows no clock."""

from __future__ import annotations

from typing import Literal

from cores.messages import HEARTBEAT_INTERVAL_S, LOAD_REPORT_INTERVAL_S, RankLoad

View = tuple[int, RankLoad]  # (highest command applied, load): what a report says


class ReportTimer:
    """Outputs carry the load too, so a front end that gets some every step needs heartbeats only."""

    def __init__(self, now: float) -> None:
        self._told: View | None = None
        self._told_s = now
        self._heartbeat_s = now - HEARTBEAT_INTERVAL_S  # the first is due at once

    def on_told(self, view: View, now: float) -> None:
        """Some message with this view went out."""
        self._told = view
        self._told_s = now

    def due(self, view: View, now: float) -> Literal["heartbeat", "load"] | None:
        """What to send now, booked as sent."""
        kind: Literal["heartbeat", "load"]
        if now >= self._heartbeat_s + HEARTBEAT_INTERVAL_S:
            self._heartbeat_s = now
            kind = "heartbeat"
        elif view != self._told and now >= self._told_s + LOAD_REPORT_INTERVAL_S:
            kind = "load"
        else:
            return None
        self.on_told(view, now)
        return kind

    def next_due_s(self, view: View) -> float:
        """When `due` will have something to say, if nothing else happens."""
        next_heartbeat_s = self._heartbeat_s + HEARTBEAT_INTERVAL_S
        if view == self._told:
            return next_heartbeat_s
        return min(next_heartbeat_s, self._told_s + LOAD_REPORT_INTERVAL_S)
