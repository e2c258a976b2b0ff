"""Who is in the group and how its ranks are. Pure: events and `now` come in, what to publish goes out as a value.

It only informs. Serving, health and routing never wait for it; a reader tells by a row's age what it is worth.
"""

from __future__ import annotations

from dataclasses import dataclass

from cores.messages import GroupLoads, MemberReport, RankId, RankLoad

MIN_PUBLISH_INTERVAL_S = 0.05
MAX_PUBLISH_INTERVAL_S = 1.0
MEMBER_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class Publish:
    """Send these loads to these members."""

    loads: GroupLoads
    members: tuple[str, ...]


@dataclass(slots=True)
class _Member:
    report: MemberReport
    reported_at: float


class CoordinatorState:
    """The latest report of each member. Every event is followed by `on_timer`, also when more input is waiting."""

    def __init__(self, now: float) -> None:
        self._members: dict[str, _Member] = {}  # in the order of their last reports, oldest first
        self._has_changed = False
        self._published_at = now
        self._seq = 0

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(self._members)

    def on_report(self, report: MemberReport, now: float) -> None:
        previous = self._members.pop(report.member, None)
        self._members[report.member] = _Member(report, now)
        self._has_changed = self._has_changed or previous is None or previous.report != report

    def of_another_size(self, report: MemberReport) -> MemberReport | None:
        """The last word of a member that was told another size of the group."""
        sizes = (other.report for other in self._members.values() if other.report.group_size)
        return next((other for other in sizes if report.group_size and other.group_size != report.group_size), None)

    def on_left(self, member: str) -> None:
        """It says goodbye; one that cannot expires."""
        if self._members.pop(member, None) is not None:
            self._has_changed = True

    def on_timer(self, now: float) -> Publish | None:
        """What is due. Changes that come faster than they may be published are published together."""
        self._expire(now)
        if not self._members or now < self._due_at():
            return None
        self._has_changed = False
        self._published_at = now
        self._seq += 1
        return Publish(GroupLoads(self._seq, self._rows(now)), self.members)

    def wait_s(self, now: float) -> float:
        """How long until `on_timer` may have something to do, if nothing else happens."""
        if not self._members:
            return MAX_PUBLISH_INTERVAL_S
        oldest = next(iter(self._members.values()))
        return max(0.0, min(self._due_at(), oldest.reported_at + MEMBER_TIMEOUT_S) - now)

    def _due_at(self) -> float:
        return self._published_at + (MIN_PUBLISH_INTERVAL_S if self._has_changed else MAX_PUBLISH_INTERVAL_S)

    def _expire(self, now: float) -> None:
        silent = [name for name, member in self._members.items() if now - member.reported_at >= MEMBER_TIMEOUT_S]
        for name in silent:
            self.on_left(name)

    def _rows(self, now: float) -> tuple[tuple[RankId, str, RankLoad, str, float], ...]:
        """One row per life of a rank. Front ends of one endpoint all report it: the newest word counts."""
        rows = {}
        for member in self._members.values():
            for rank_id, state, load in member.report.ranks:
                rows[rank_id] = (rank_id, state, load, member.report.url, now - member.reported_at)
        return tuple(rows[rank_id] for rank_id in sorted(rows))

    def check_invariants(self) -> None:
        stamps = [member.reported_at for member in self._members.values()]
        assert stamps == sorted(stamps)
        assert all(name == member.report.member for name, member in self._members.items())
