"""The last things that happened to the ranks, for `/status`. Every event has one number, whoever asks and whenever.

The front ends of one endpoint share a log: a file to which each appends what it sees. An event's `seq` is the number of its
line, so it never changes, grows in the order in which events became known, and outlives the front end that wrote it. Appending
needs no lock that a stopped process could keep: the kernel puts whole lines one behind the other.

What all front ends see is one event, the first one's line. Where it counts requests, each adds those of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cores.words import counted
from gateway.status import Event

logger = logging.getLogger(__name__)

MAX_EVENTS = 200
REQUESTS = "{requests}"  # in a text: how many, all front ends together


@dataclass(frozen=True, slots=True)
class Entry:
    """`at_s` is CLOCK_MONOTONIC, the same for all processes of a machine."""

    at_s: float
    kind: str
    rank: int | None
    text: str
    epoch: int | None = None
    occurrence: int = 0  # tells those of one kind in one life apart: equal for all front ends that see the same
    num_requests: int = 0  # of whoever wrote it

    @property
    def key(self) -> tuple[str, int | None, int, int] | None:
        """Equal where several front ends tell of one event. None: of what only one can tell."""
        return None if self.epoch is None else (self.kind, self.rank, self.epoch, self.occurrence)

    def told(self) -> str:
        before, mark, after = self.text.partition(REQUESTS)  # the first: a cause of death may hold anything
        return before + counted(self.num_requests, "request") + after if mark else before


class EventLog:
    """Of a front end that is alone."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}  # by number, the latest
        self._seq = 0
        self._known: dict[tuple[str, int | None, int, int], int] = {}  # the number of each that all front ends see

    def add(
        self,
        kind: str,
        rank: int | None,
        text: str,
        now: float,
        epoch: int | None = None,
        occurrence: int = 0,
        num_requests: int = 0,
    ) -> None:
        """With an `epoch` it is an event of that life of the rank, which all front ends see and which counts once."""
        self._append(Entry(now, kind, rank, text, epoch, occurrence, num_requests))

    def _append(self, entry: Entry) -> None:
        self._take(entry)

    def _take(self, entry: Entry | None) -> None:
        """The next one of the log; None for one that cannot be read."""
        self._seq += 1
        if entry is None:
            return
        if entry.key is not None:
            first = self._known.setdefault(entry.key, self._seq)
            if first != self._seq:
                self._add_requests(first, entry.num_requests)
                return
        self._entries[self._seq] = entry
        if len(self._entries) > MAX_EVENTS:
            del self._entries[next(iter(self._entries))]

    def _add_requests(self, seq: int, number: int) -> None:
        if (known := self._entries.get(seq)) is not None:
            self._entries[seq] = dataclasses.replace(known, num_requests=known.num_requests + number)

    def events(self, now: float) -> tuple[Event, ...]:
        """By number."""
        return tuple(
            Event(seq=seq, age_s=round(max(0.0, now - e.at_s), 3), kind=e.kind, rank=e.rank, text=e.told(), epoch=e.epoch)
            for seq, e in self._entries.items()
        )


class SharedEventLog(EventLog):
    """Of the front ends that have the same file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._offset = 0
        self._decoder = msgspec.json.Decoder(Entry)

    def _append(self, entry: Entry) -> None:
        line = msgspec.json.encode(entry) + b"\n"
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(fd, line)  # one call: lines of several processes never mix
            finally:
                os.close(fd)
        except OSError as error:  # a full disk must not cost a rank its restart
            logger.error("an event cannot be shown: %s: %s", error, entry.text)

    def events(self, now: float) -> tuple[Event, ...]:
        with contextlib.suppress(FileNotFoundError):  # nothing has happened yet
            self._read_on()
        return super().events(now)

    def _read_on(self) -> None:
        """What has been appended since the last look. A line that is half there is left for the next one."""
        if os.stat(self._path).st_size == self._offset:
            return
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            lines = file.read().split(b"\n")[:-1]
        for line in lines:
            self._offset += len(line) + 1
            self._take(self._parse(line))

    def _parse(self, line: bytes) -> Entry | None:
        try:
            return self._decoder.decode(line)
        except msgspec.MsgspecError as error:  # a disk that was full in the middle of it
            logger.warning("an event cannot be read: %s", error)
            return None


def make_event_log(shared_directory: str | None) -> EventLog:
    return EventLog() if shared_directory is None else SharedEventLog(Path(shared_directory) / "events.jsonl")
