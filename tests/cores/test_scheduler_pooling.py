"""How the scheduler serves requests that want a vector of their prompt and no token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cores.messages import EngineCoreRequest, Finished, FinishReason
from cores.pooling_params import PoolingParams
from cores.testing import make_request
from tests.cores.scheduler_driver import Driver


def embed(handle: int, prompt: Any) -> EngineCoreRequest:
    return replace(make_request(handle, prompt), pooling_params=PoolingParams())


def test_a_request_for_a_vector_ends_with_its_prompt_and_has_no_token() -> None:
    driver = Driver(max_num_batched_tokens=8)
    driver.add(embed(1, 12))
    assert driver.step() == [(1, 8)]
    assert driver.updates == []
    driver.vectors = {0: b"vector"}
    assert driver.step() == [(1, 4)]
    (update,) = driver.updates
    assert (update.token_id, update.vector, update.is_first) == (None, b"vector", True)
    assert update.finished == Finished(FinishReason.STOP)
    assert not driver.scheduler.has_work
    stats = driver.scheduler.stats()
    assert (stats.num_prompt_tokens, stats.num_generation_tokens) == (12, 0)


def test_a_request_for_a_vector_may_fail_alone() -> None:
    driver = Driver()
    driver.add(embed(1, 3))
    driver.add(embed(2, 3))
    driver.errors, driver.vectors = {0: "not finite"}, {1: b"vector"}
    driver.step()
    assert [(u.finished.reason, u.vector) for u in driver.updates if u.finished] == [
        (FinishReason.ERROR, None),
        (FinishReason.STOP, b"vector"),
    ]


def test_a_prompt_for_a_vector_may_be_as_long_as_the_model_takes() -> None:
    driver = Driver(max_model_len=20, num_blocks=5)
    driver.vectors = {0: b"vector"}
    driver.add(embed(1, 20))
    driver.run()
    assert driver.refuse(embed(2, 21)).error == "a prompt of 21 tokens is too long: the model takes 20 in all"


def test_whole_prompts_wait_for_a_step_that_has_room_and_are_not_passed_over() -> None:
    driver = Driver(max_num_batched_tokens=10, max_model_len=10, whole_prompts=True)
    driver.vectors = dict.fromkeys(range(3), b"vector")
    for handle, length in ((1, 6), (2, 5), (3, 1), (4, 10)):
        driver.add(embed(handle, length))
    assert driver.step() == [(1, 6)]  # 3 would have fitted, but it came after 2
    assert driver.step() == [(2, 5), (3, 1)]
    assert driver.step() == [(4, 10)]
    assert not driver.scheduler.has_work


def test_what_the_cache_has_of_a_waiting_request_is_no_load() -> None:
    """Else a queue of chats that are nearly all cached would repel the next turn of one."""
    driver, chat = Driver(max_num_seqs=1), list(range(3, 12))
    driver.add(make_request(1, prompt=chat, max_tokens=1))
    driver.step()
    driver.add(make_request(2, prompt=5, max_tokens=9))
    driver.step()
    waiting = driver.add(make_request(3, prompt=[*chat, 20, 21], max_tokens=1))
    load = driver.scheduler.load()
    assert (load.num_waiting, load.num_prefill_tokens) == (1, 3)
    driver.scheduler.reset_prefix_cache()  # what was expected will not be there
    driver.run()
    assert waiting.num_cached_tokens == 0
    assert driver.scheduler.load().num_prefill_tokens == 0
