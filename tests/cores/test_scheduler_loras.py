"""How the scheduler shares a few adapter slots among requests for many adapters."""

from __future__ import annotations

from cores.request import RequestStatus
from cores.scheduler import MAX_LOOK_AHEAD, MAX_PASSED_OVER
from cores.testing import make_request
from tests.cores.scheduler_driver import Driver


def test_a_request_whose_adapter_has_no_slot_holds_nobody_else_up() -> None:
    driver = Driver(max_loras=1)
    for handle, lora_id in enumerate(["a", "b", None, "a", "b"]):
        driver.add(make_request(handle, prompt=4, max_tokens=3, lora_id=lora_id))
    assert driver.step() == [(0, 4), (2, 4), (3, 4)]
    assert driver.step() == driver.step() == [(0, 1), (2, 1), (3, 1)]
    assert driver.step() == [(1, 4), (4, 4)]


def test_different_adapters_share_a_step_up_to_their_number() -> None:
    driver = Driver(max_loras=2)
    for handle, lora_id in enumerate("abcab"):
        driver.add(make_request(handle, prompt=4, max_tokens=2, lora_id=lora_id))
    assert [handle for handle, _ in driver.step()] == [0, 1, 3, 4]


def test_no_stream_of_requests_for_one_adapter_starves_another() -> None:
    driver = Driver(max_loras=1, max_num_seqs=4, num_blocks=200)
    waiting = None
    for handle in range(MAX_PASSED_OVER + 60):  # one a step, each running for three: there is always one when the next comes
        driver.add(make_request(handle, prompt=4, max_tokens=3, lora_id="popular"))
        if handle == 3:
            waiting = driver.add(make_request(1000, prompt=4, max_tokens=1, lora_id="rare"))
        driver.step()
    assert waiting is not None
    assert waiting.status is RequestStatus.FINISHED
    assert waiting.num_passed_over == MAX_PASSED_OVER
    driver.run()


def test_only_the_adapter_that_leaves_first_is_closed_for_one_that_waits() -> None:
    driver = Driver(max_loras=2, num_blocks=1000, max_num_seqs=100)
    driver.add(make_request(1, prompt=4, max_tokens=100, lora_id="long"))
    driver.add(make_request(2, prompt=4, max_tokens=100, lora_id="long"))
    driver.add(make_request(3, prompt=4, max_tokens=2 * MAX_PASSED_OVER, lora_id="short"))
    rare = driver.add(make_request(4, prompt=4, max_tokens=3, lora_id="rare"))
    for handle in range(10, 10 + MAX_PASSED_OVER):
        driver.add(make_request(handle, prompt=4, max_tokens=1, lora_id="long"))
    driver.step()
    assert rare.num_passed_over == MAX_PASSED_OVER
    closed = driver.add(make_request(5, prompt=4, max_tokens=1, lora_id="short"))
    driver.add(make_request(6, prompt=4, max_tokens=1, lora_id="long"))
    driver.add(make_request(7, prompt=4, max_tokens=1))
    assert {6, 7} <= {handle for handle, _ in driver.step()}
    assert closed.status is rare.status is RequestStatus.WAITING
    while rare.status is RequestStatus.WAITING:
        driver.step()
    assert closed.status is RequestStatus.WAITING
    driver.run()


def test_a_long_queue_for_other_adapters_is_looked_at_in_part_only() -> None:
    driver = Driver(max_loras=1)
    driver.add(make_request(1, prompt=4, max_tokens=5, lora_id="a"))
    driver.step()
    for handle in range(10, 10 + MAX_LOOK_AHEAD):
        driver.add(make_request(handle, prompt=4, max_tokens=1, lora_id="b"))
    far = driver.add(make_request(2, prompt=4, max_tokens=1))
    driver.step()
    assert far.status is RequestStatus.WAITING
    driver.run()
