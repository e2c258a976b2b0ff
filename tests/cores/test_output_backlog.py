"""What waits for a front end that does not read."""

from __future__ import annotations

from cores.output_backlog import OVERFLOW_STEP_BYTES, OutputBacklog


def take_all(sent: list[bytes], limit: int = 10**9) -> object:
    def send(frame: bytes) -> bool:
        if len(sent) >= limit:
            return False
        sent.append(frame)
        return True

    return send


def test_frames_leave_in_order_and_none_is_lost_when_the_socket_is_full() -> None:
    backlog, sent = OutputBacklog(), list[bytes]()
    for i in range(5):
        assert not backlog.put(bytes([i]) * 10)
    backlog.flush(take_all(sent, limit=2))  # type: ignore[arg-type]
    assert (len(sent), backlog.num_bytes, backlog.is_empty) == (2, 30, False)
    backlog.check_invariants()
    backlog.flush(take_all(sent))  # type: ignore[arg-type]
    assert sent == [bytes([i]) * 10 for i in range(5)]
    assert (backlog.num_bytes, backlog.is_empty) == (0, True)
    backlog.check_invariants()


def test_it_alarms_once_when_it_passes_its_bound() -> None:
    backlog = OutputBacklog(max_bytes=25)
    assert [backlog.put(bytes(10)) for _ in range(5)] == [False, False, True, False, False]


def test_it_alarms_again_when_more_keeps_coming_and_after_it_was_empty() -> None:
    backlog = OutputBacklog(max_bytes=25)
    assert backlog.put(bytes(26))
    assert backlog.put(bytes(OVERFLOW_STEP_BYTES + 1))
    assert not backlog.put(b"x")
    backlog.flush(lambda frame: True)
    assert backlog.put(bytes(26))
    backlog.check_invariants()
