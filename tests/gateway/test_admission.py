"""Admission: all or nothing, over several front ends, with an honest Retry-After."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gateway.admission import Admission, DrainRate, OneFrontEnd, SharedSlots, Usage
from gateway.config import AdmissionConfig
from gateway.errors import OverloadedError

LIMITS = AdmissionConfig(max_num_queued_requests=10, max_num_queued_tokens=1000)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[SharedSlots]]:
    with ExitStack() as stack:
        slots = [SharedSlots(tmp_path / "slots", index, 2) for index in range(2)]
        for slot in slots:
            stack.callback(slot.close)
        yield slots


def test_n_sequences_take_n_places_or_none() -> None:
    admission = Admission(LIMITS, OneFrontEnd())
    admission.admit(Usage(8, 0), Usage(2, 10), now=0.0)
    with pytest.raises(OverloadedError, match="9 requests of at most 10 are in flight, 2 more came"):
        admission.admit(Usage(9, 0), Usage(2, 10), now=0.0)
    assert admission.num_rejected == 1


def test_prompt_tokens_are_limited_too_and_requests_are_looked_at_first() -> None:
    admission = Admission(LIMITS, OneFrontEnd())
    with pytest.raises(OverloadedError, match="prompt tokens"):
        admission.admit(Usage(1, 900), Usage(1, 101), now=0.0)
    with pytest.raises(OverloadedError, match="requests"):
        admission.admit(Usage(10, 900), Usage(1, 101), now=0.0)


def test_a_limit_of_zero_refuses_everything_and_none_nothing() -> None:
    with pytest.raises(OverloadedError):
        Admission(AdmissionConfig(max_num_queued_requests=0), OneFrontEnd()).admit(Usage(), Usage(1, 1), now=0.0)
    Admission(AdmissionConfig(), OneFrontEnd()).admit(Usage(10**6, 10**9), Usage(1, 1), now=0.0)


def test_asking_counts_no_rejection() -> None:
    admission = Admission(LIMITS, OneFrontEnd())
    assert admission.refusal(Usage(10, 0), Usage(1, 0), now=0.0) is not None
    assert admission.num_rejected == 0


def test_two_front_ends_share_one_limit(pair: list[SharedSlots]) -> None:
    first, second = (Admission(LIMITS, slots) for slots in pair)
    first.admit(Usage(), Usage(6, 0), now=0.0)
    second.admit(Usage(), Usage(4, 0), now=0.0)
    with pytest.raises(OverloadedError, match="10 requests"):
        first.admit(Usage(6, 0), Usage(1, 0), now=0.0)
    second.refresh(Usage(1, 0))
    first.admit(Usage(6, 0), Usage(3, 0), now=0.0)


def test_tokens_that_all_front_ends_hear_of_count_once(pair: list[SharedSlots]) -> None:
    first, second = (Admission(LIMITS, slots) for slots in pair)
    first.admit(Usage(), Usage(1, 300), now=0.0, reported_tokens=400)
    second.admit(Usage(), Usage(1, 300), now=0.0, reported_tokens=400)
    with pytest.raises(OverloadedError, match="1000 prompt tokens of at most 1000"):
        second.admit(Usage(1, 300), Usage(1, 1), now=0.0, reported_tokens=400)
    second.admit(Usage(1, 0), Usage(1, 100), now=0.0, reported_tokens=600)  # its first is in the ranks' reports now


def test_a_restarted_front_end_begins_with_an_empty_slot(pair: list[SharedSlots], tmp_path: Path) -> None:
    pair[1].set(Usage(7, 70))
    assert pair[0].others() == Usage(7, 70)
    SharedSlots(tmp_path / "slots", 1, 2).close()
    assert pair[0].others() == Usage()


def test_a_lock_held_by_a_stopped_process_does_not_stop_this_one(pair: list[SharedSlots]) -> None:
    with pair[0].locked():
        Admission(LIMITS, pair[1]).admit(Usage(), Usage(1, 0), now=0.0)


def test_retry_after_follows_the_measured_drain_rate() -> None:
    rate = DrainRate()
    assert rate.seconds_for(5, now=0.0) == 1.0
    for second in range(10):
        rate.on_ended(2, now=float(second))
    assert rate.seconds_for(10, now=9.0) == 5.0
    assert rate.seconds_for(10_000, now=9.0) == 60.0
    assert rate.seconds_for(10, now=100.0) == 1.0


def test_retry_after_does_not_take_tokens_for_sequences() -> None:
    admission = Admission(LIMITS, OneFrontEnd())
    for second in range(5):
        admission.drain_rate.on_ended(1, now=float(second))
    refusal = admission.refusal(Usage(4, 900), Usage(2, 800), now=4.0)
    assert refusal is not None
    assert refusal.retry_after_s == 2.0
