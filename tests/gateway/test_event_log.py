"""Events have one number, whoever asks."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from gateway.event_log import MAX_EVENTS, REQUESTS, EventLog, SharedEventLog, make_event_log


def rows(log: EventLog, now: float = 10.0) -> list[tuple[int, str, int | None, float, str]]:
    return [(e.seq, e.kind, e.rank, e.age_s, e.text) for e in log.events(now)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def test_what_all_front_ends_saw_is_one_event_and_what_each_did_is_each_ones(path: Path) -> None:
    one, other = SharedEventLog(path), SharedEventLog(path)
    one.add("ready", 0, "epoch 1 is ready", 1.0, 1)
    other.add("ready", 0, "epoch 1 is ready", 1.1, 1)
    other.add("note", 1, "of the other", 5.1)
    one.add("note", 1, "of the one", 5.2)
    expected = [
        (1, "ready", 0, 9.0, "epoch 1 is ready"),
        (3, "note", 1, 4.9, "of the other"),
        (4, "note", 1, 4.8, "of the one"),
    ]
    assert rows(one) == rows(other) == expected


def test_a_death_tells_the_requests_of_all_front_ends_and_not_of_the_first_to_see_it(path: Path) -> None:
    one, other, late = SharedEventLog(path), SharedEventLog(path), SharedEventLog(path)
    cause = f"it said {REQUESTS}"

    def note_death(log: SharedEventLog, num_requests: int) -> None:
        log.add("death", 1, f"epoch 1 died with {REQUESTS} in flight: {cause}", 5.0, 1, num_requests=num_requests)

    note_death(other, 0)
    assert rows(one) == [(1, "death", 1, 5.0, f"epoch 1 died with 0 requests in flight: {cause}")]
    note_death(one, 1)
    assert rows(one) == rows(other) == [(1, "death", 1, 5.0, f"epoch 1 died with 1 request in flight: {cause}")]
    note_death(late, 2)
    expected = [(1, "death", 1, 5.0, f"epoch 1 died with 3 requests in flight: {cause}")]
    assert rows(one) == rows(other) == rows(late) == rows(SharedEventLog(path)) == expected


def test_the_second_time_of_the_same_in_one_life_is_another_event(path: Path) -> None:
    one, other = SharedEventLog(path), SharedEventLog(path)
    for log in (one, other):
        log.add("drain", 0, "epoch 1 gets no new requests", 1.0, 1, 1)
    for log in (other, one):
        log.add("drain", 0, "epoch 1 gets no new requests", 2.0, 1, 3)
    assert [(seq, age_s) for seq, _, _, age_s, _ in rows(one)] == [(1, 9.0), (3, 8.0)]


def test_numbers_are_kept_over_reads_and_a_restart(path: Path) -> None:
    first = SharedEventLog(path)
    first.add("ready", 0, "up", 1.0, 1)
    before = rows(first)
    successor = SharedEventLog(path)
    successor.add("death", 0, "gone", 2.0, 1)
    assert rows(successor)[:1] == before
    assert rows(first) == rows(successor) == rows(first)


def test_a_line_that_is_half_there_is_read_when_it_is_whole(path: Path) -> None:
    log = SharedEventLog(path)
    assert log.events(1.0) == ()
    log.add("ready", 0, "up", 1.0, 1)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:20])
    assert len(log.events(1.0)) == 1
    path.write_bytes(whole + whole.replace(b'"rank":0', b'"rank":1'))
    assert [row[:3] for row in rows(log)] == [(1, "ready", 0), (2, "ready", 1)]


def test_a_broken_line_costs_no_other(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.write_bytes(b'{"at_s": 1\n')
    log = SharedEventLog(path)
    log.add("ready", 0, "up", 1.0, 1)
    assert [row[0] for row in rows(log)] == [2]
    assert rows(log) == rows(log)
    assert len(caplog.records) == 1


def test_a_disk_that_takes_nothing_is_told_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = SharedEventLog(tmp_path / "gone" / "events.jsonl")
    log.add("death", 0, "epoch 1 died", 1.0, 1)
    assert log.events(1.0) == ()
    assert "epoch 1 died" in caplog.text


def test_only_the_newest_are_kept(path: Path) -> None:
    for log in (SharedEventLog(path), EventLog()):
        for i in range(MAX_EVENTS + 5):
            log.add("move", i, "", float(i))
        assert [event.seq for event in log.events(1e3)] == list(range(6, MAX_EVENTS + 6))


def _add_many(path: str, rank: int) -> None:
    log = make_event_log(path)
    for i in range(200):
        log.add("move", rank, "x" * 200, float(i))


def test_lines_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    processes = [multiprocessing.get_context("fork").Process(target=_add_many, args=(str(tmp_path), rank)) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert len(lines) == 600
    assert len({len(line) for line in lines}) <= 6  # each as it was written: times have one to three digits
    assert len(make_event_log(str(tmp_path)).events(0.0)) == MAX_EVENTS
