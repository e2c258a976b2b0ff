"""The scheduler's rules, one story each. `test_scheduler_properties.py` mixes them all."""

from __future__ import annotations

import pytest

from cores.messages import Finished, FinishReason
from cores.request import RequestStatus
from cores.runner.interface import ModelRunnerOutput
from cores.testing import make_request
from tests.cores.scheduler_driver import EOS, STOP_ID, TOKEN, Driver


def test_decodes_come_first_then_prompts_in_chunks() -> None:
    driver = Driver(max_num_batched_tokens=10)
    driver.add(make_request(1, prompt=6))
    assert driver.step() == [(1, 6)]
    driver.add(make_request(2, prompt=25))
    driver.add(make_request(3, prompt=3))
    assert driver.step() == [(1, 1), (2, 9)]
    assert driver.step() == [(1, 1), (2, 9)]
    assert driver.step() == [(1, 1), (2, 7), (3, 2)]
    assert driver.step() == [(1, 1), (2, 1), (3, 1)]


def test_more_sequences_than_budget_still_all_get_their_turn() -> None:
    driver = Driver(max_num_batched_tokens=3, max_num_seqs=10)
    for handle in range(8):
        driver.add(make_request(handle, prompt=2, max_tokens=5))
    driver.run()
    assert driver.scheduler.stats().num_generation_tokens == 40


def test_no_more_sequences_run_than_allowed() -> None:
    driver = Driver(max_num_seqs=2)
    for handle in range(3):
        driver.add(make_request(handle, prompt=4, max_tokens=2))
    assert driver.step() == [(0, 4), (1, 4)]
    load = driver.scheduler.load()
    assert (load.num_running, load.num_waiting, load.num_decodes, load.num_prefill_tokens) == (2, 1, 2, 4)
    driver.step()
    assert driver.step() == [(2, 4)]


def test_fcfs_ignores_priority_and_priority_obeys_it() -> None:
    for policy, expected in (("fcfs", [0, 1, 2]), ("priority", [2, 0, 1])):
        driver = Driver(policy=policy, max_num_seqs=1)
        for handle, priority in enumerate((0, 0, -5)):
            driver.add(make_request(handle, priority=priority, max_tokens=1))
        assert [driver.step()[0][0] for _ in range(3)] == expected


def test_the_head_of_the_queue_is_not_passed_over_by_a_smaller_request() -> None:
    driver = Driver(num_blocks=10)
    driver.add(make_request(1, prompt=20, max_tokens=4))
    driver.step()
    driver.add(make_request(2, prompt=30))
    driver.add(make_request(3, prompt=1))
    assert driver.step() == [(1, 1)]
    assert driver.scheduler.load().num_waiting == 2


def test_when_blocks_run_out_the_latest_gives_way_keeps_its_tokens_and_its_place() -> None:
    driver = Driver(num_blocks=8, max_num_seqs=3)
    first = driver.add(make_request(1, prompt=12, max_tokens=10))  # 3 blocks, grows to 6
    second = driver.add(make_request(2, prompt=12, max_tokens=10))
    driver.step()
    waiting = driver.add(make_request(3, prompt=1, max_tokens=1))  # no room: one spare block per running sequence is kept
    while second.status is RequestStatus.RUNNING:
        driver.step()
    assert (second.status, second.block_ids, second.num_computed_tokens) == (RequestStatus.PREEMPTED, [], 0)
    assert second.num_output_tokens > 0
    load = driver.scheduler.load()
    assert (load.num_waiting, load.num_decodes, load.num_prefill_tokens) == (2, 1, second.num_tokens + 1)
    assert first.status is RequestStatus.RUNNING
    while waiting.status is RequestStatus.WAITING:
        driver.step()
    assert second.status is not RequestStatus.PREEMPTED  # it was before the other in the queue
    driver.run()
    assert (first.num_output_tokens, second.num_output_tokens, waiting.num_output_tokens) == (10, 10, 1)
    assert driver.scheduler.stats().num_preemptions >= 1
    assert driver.scheduler.stats().num_prompt_tokens == 25  # what is computed again is not counted again


def test_with_priorities_the_least_urgent_gives_way() -> None:
    driver = Driver(num_blocks=7, policy="priority")
    relaxed = driver.add(make_request(1, prompt=12, max_tokens=10, priority=5))
    urgent = driver.add(make_request(2, prompt=12, max_tokens=10, priority=0))
    while driver.scheduler.stats().num_preemptions == 0:
        driver.step()
    assert (relaxed.status, urgent.status) == (RequestStatus.PREEMPTED, RequestStatus.RUNNING)
    driver.run()
    assert (relaxed.num_output_tokens, urgent.num_output_tokens) == (10, 10)


def test_an_urgent_request_takes_a_running_one_s_place_when_all_are_taken() -> None:
    driver = Driver(policy="priority", max_num_seqs=2)
    relaxed = [driver.add(make_request(handle, prompt=4, max_tokens=9, priority=5)) for handle in (1, 2)]
    driver.step()
    driver.add(make_request(3, prompt=4, max_tokens=2, priority=0))
    assert driver.step() == [(1, 1), (3, 4)]
    assert relaxed[1].status is RequestStatus.PREEMPTED
    assert relaxed[1].num_output_tokens == 1  # it keeps what it has
    equal = driver.add(make_request(4, prompt=4, max_tokens=2, priority=5))
    driver.step()
    assert driver.step() == [
        (1, 1),
        (2, 1),
    ]  # urgent is done; the victim was before the newcomer, and its first block is cached
    assert equal.status is RequestStatus.WAITING
    driver.run()
    assert [r.num_output_tokens for r in (*relaxed, equal)] == [9, 9, 2]


def test_several_urgent_requests_do_not_wait_for_each_other() -> None:
    driver = Driver(policy="priority", max_num_seqs=3, max_num_batched_tokens=64)
    for handle in (1, 2, 3):
        driver.add(make_request(handle, prompt=4, max_tokens=20, priority=5))
    driver.step()
    for handle in (4, 5):
        driver.add(make_request(handle, prompt=4, max_tokens=2, priority=0))
    assert driver.step() == [(1, 1), (4, 4), (5, 4)]


def test_with_first_come_first_served_nobody_gives_way_to_a_newcomer() -> None:
    driver = Driver(max_num_seqs=1)
    first = driver.add(make_request(1, prompt=4, max_tokens=3, priority=5))
    driver.step()
    driver.add(make_request(2, prompt=4, max_tokens=1, priority=0))
    driver.step()
    driver.step()
    assert first.status is RequestStatus.FINISHED
    assert driver.scheduler.stats().num_preemptions == 0


def test_an_urgent_request_takes_the_blocks_of_those_that_can_wait() -> None:
    driver = Driver(num_blocks=10, policy="priority")
    relaxed = driver.add(make_request(1, prompt=20, max_tokens=12, priority=5))  # 5 blocks, grows to 8
    driver.step()
    urgent = driver.add(make_request(2, prompt=24, max_tokens=2, priority=0))  # 6 blocks
    assert driver.step() == [(2, 24)]
    assert (relaxed.status, urgent.status) == (RequestStatus.PREEMPTED, RequestStatus.RUNNING)
    driver.run()
    assert (relaxed.num_output_tokens, urgent.num_output_tokens) == (12, 2)


def test_no_more_give_way_than_an_urgent_request_needs() -> None:
    driver = Driver(num_blocks=20, policy="priority", max_num_seqs=4)
    relaxed = [driver.add(make_request(handle, prompt=8, max_tokens=9, priority=handle)) for handle in range(1, 5)]
    driver.step()
    driver.add(make_request(9, prompt=8, max_tokens=2, priority=0))
    driver.step()
    assert [r.status for r in relaxed] == [RequestStatus.RUNNING] * 3 + [RequestStatus.PREEMPTED]


def test_an_urgent_prompt_goes_before_the_rest_of_a_long_one() -> None:
    driver = Driver(policy="priority", max_num_batched_tokens=10)
    driver.add(make_request(1, prompt=40, priority=5))
    assert driver.step() == [(1, 10)]
    driver.add(make_request(2, prompt=13, max_tokens=1, priority=0))
    driver.add(make_request(3, prompt=2, max_tokens=1, priority=5))
    assert [driver.step() for _ in range(5)] == [
        [(2, 10)], [(2, 3), (1, 7)], [(1, 10)], [(1, 10)], [(1, 3), (3, 2)],
    ]  # fmt: skip


def test_a_hot_prefix_is_not_computed_again_and_not_counted_as_load() -> None:
    driver = Driver()
    prompt = list(range(3, 35))  # 8 blocks
    driver.add(make_request(1, prompt=prompt, max_tokens=1))
    driver.run()
    hot = driver.add(make_request(2, prompt=prompt, max_tokens=2))
    assert driver.scheduler.load().num_prefill_tokens == 4
    assert driver.step() == [(2, 4)]  # the last block is computed: something must yield the next token
    assert hot.num_cached_tokens == 28
    stats = driver.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits, stats.num_prompt_tokens) == (64, 28, 64)


def test_equal_prompts_that_arrive_together_are_computed_once() -> None:
    driver = Driver(max_num_batched_tokens=40)
    for handle in range(3):  # the children of n = 3
        driver.add(make_request(handle, prompt=[5] * 30))
    assert driver.step() == [(0, 30), (1, 2), (2, 2)]
    long = Driver(max_num_batched_tokens=20)
    for handle in range(2):
        long.add(make_request(handle, prompt=[6] * 30))
    assert [long.step(), long.step()] == [[(0, 20)], [(0, 10), (1, 2)]]


def test_eos_ends_a_request_unless_ignored() -> None:
    driver = Driver()
    driver.choose = lambda request: EOS
    driver.add(make_request(1, ignore_eos=False))
    driver.step()
    (update,) = driver.updates
    assert (update.token_id, update.finished) == (EOS, Finished(FinishReason.STOP, stop_token_id=EOS))
    stubborn = driver.add(make_request(2, ignore_eos=True, max_tokens=5))
    driver.run()
    assert stubborn.num_output_tokens == 5


def test_a_stop_token_ends_a_request_even_with_eos_ignored() -> None:
    driver = Driver()
    driver.choose = lambda request: STOP_ID if request.num_output_tokens == 2 else TOKEN
    request = driver.add(make_request(1, stop_token_ids=(STOP_ID,)))
    driver.run()
    assert request.token_ids[-3:] == [TOKEN, TOKEN, STOP_ID]
    assert driver.updates[0].finished == Finished(FinishReason.STOP, stop_token_id=STOP_ID)


def test_nothing_stops_a_request_before_its_min_tokens() -> None:
    driver = Driver()
    driver.choose = lambda request: EOS
    request = driver.add(make_request(1, ignore_eos=False, min_tokens=4))
    driver.run()
    assert request.num_output_tokens == 4


def test_the_model_length_ends_a_request() -> None:
    driver = Driver(max_model_len=20)
    request = driver.add(make_request(1, prompt=15, max_tokens=None))
    driver.run()
    assert request.num_tokens == 20
    assert driver.updates[0].finished == Finished(FinishReason.LENGTH)


def test_a_continued_request_counts_from_its_original_prompt() -> None:
    driver = Driver()
    driver.choose = lambda request: EOS
    prompt = list(range(3, 13))  # 6 of prompt, 4 generated elsewhere
    message = make_request(1, prompt=prompt, num_original_prompt_tokens=6, max_tokens=7, min_tokens=6, ignore_eos=False)
    request = driver.add(message)
    driver.run()
    assert request.num_output_tokens == 6
    used_up = make_request(2, prompt=prompt, num_original_prompt_tokens=6, max_tokens=4)
    assert driver.refuse(used_up) == Finished(FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("prompt", "num_blocks", "message"),
    [
        ([], 100, "the prompt is empty"),
        ([5] * 200, 100, "a prompt of 200 tokens leaves no room for output: the model takes 200 in all"),
        ([5] * 24, 6, "a prompt of 24 tokens and one of output need 7 KV cache blocks of 4 tokens, there are 6"),
    ],
)
def test_what_can_never_fit_ends_at_once_with_the_numbers(prompt: list[int], num_blocks: int, message: str) -> None:
    driver = Driver(num_blocks=num_blocks)
    assert driver.refuse(make_request(1, prompt=prompt)) == Finished(FinishReason.ERROR, error=message)


def test_the_largest_request_that_fits_gets_all_blocks() -> None:
    driver = Driver(num_blocks=6)
    request = driver.add(make_request(1, prompt=23, max_tokens=100))
    driver.run()
    assert request.num_tokens == 24


def test_abort_works_in_every_state_and_twice() -> None:
    driver = Driver(num_blocks=8, max_num_batched_tokens=12)
    decoding = driver.add(make_request(1, prompt=4))
    driver.step()
    prefilling = driver.add(make_request(2, prompt=16))
    waiting = driver.add(make_request(3, prompt=16))
    driver.step()
    assert [r.status for r in (decoding, prefilling, waiting)] == [RequestStatus.RUNNING] * 2 + [RequestStatus.WAITING]
    for request in (prefilling, waiting, decoding):
        assert driver.scheduler.abort(request.key) is request
        assert driver.scheduler.abort(request.key) is None
        driver.scheduler.check_invariants()
    load = driver.scheduler.load()
    assert (load.num_waiting, load.num_running, load.num_prefill_tokens, load.num_decodes, load.num_kv_blocks_used) == (0,) * 5


def test_a_token_computed_for_a_request_that_was_aborted_meanwhile_is_void() -> None:
    driver = Driver()
    aborted, other = driver.add(make_request(1)), driver.add(make_request(2))
    batch = driver.scheduler.schedule(0.0)
    driver.scheduler.abort(aborted.key)
    (update,) = driver.scheduler.update(batch, ModelRunnerOutput([111, 222]))
    assert (update.request, update.token_id) == (other, 222)
    driver.scheduler.check_invariants()


def test_a_deferred_request_computes_its_last_position_again_and_holds_up_nobody() -> None:
    driver = Driver()
    driver.add(make_request(1, prompt=6, max_tokens=2))
    driver.add(make_request(2, prompt=6, max_tokens=2))
    driver.deferred = frozenset({1})
    assert driver.step() == [(1, 6), (2, 6)]
    assert [u.request.key[1] for u in driver.updates] == [1]
    assert driver.step() == [(1, 1), (2, 1)]
    assert driver.scheduler.load().num_prefill_tokens == 1
    driver.deferred = frozenset()
    assert driver.step() == [(2, 1)]
    assert driver.updates[0].is_first
    assert driver.scheduler.stats().num_prompt_tokens == 12
    driver.run()
    assert driver.scheduler.stats().num_generation_tokens == 4


def test_a_request_whose_grammar_is_at_its_end_stops_whatever_else_is_asked() -> None:
    driver = Driver()
    driver.completed = {0}
    driver.add(make_request(1, max_tokens=1))  # its last token, too: what is complete was not cut off
    driver.step()
    assert driver.updates[0].finished == Finished(FinishReason.STOP)
    driver.add(make_request(2, min_tokens=5))
    driver.step()
    assert (driver.updates[0].token_id, driver.updates[0].finished) == (TOKEN, Finished(FinishReason.STOP))
    driver.choose = lambda request: EOS
    driver.add(make_request(3, ignore_eos=False))
    driver.step()
    assert driver.updates[0].finished == Finished(FinishReason.STOP, stop_token_id=EOS)


def test_prompts_that_owe_log_probabilities_are_computed_whole_and_in_bounded_chunks() -> None:
    driver = Driver(max_num_prompt_logprobs=10)
    prompt = [5] * 24
    driver.add(make_request(1, prompt=prompt, max_tokens=1))
    driver.run()
    owing = driver.add(make_request(2, prompt=prompt, max_tokens=3, prompt_logprobs=0))
    second = driver.add(make_request(3, prompt=prompt, max_tokens=1, prompt_logprobs=0))
    other = driver.add(make_request(4, prompt=prompt, max_tokens=1))
    assert driver.step() == [(2, 10)]
    assert driver.step() == [(2, 10)]
    assert driver.step() == [(2, 4), (3, 6), (4, 4)]
    assert (owing.num_cached_tokens, owing.needs_prompt_logprobs, second.needs_prompt_logprobs) == (0, False, True)
    assert other.num_cached_tokens == 20
    driver.run()


def test_log_probabilities_that_were_given_are_not_owed_again_after_a_preemption() -> None:
    driver = Driver(num_blocks=7)
    driver.add(make_request(1, prompt=12, max_tokens=10))
    owing = driver.add(make_request(2, prompt=12, max_tokens=10, prompt_logprobs=1))
    while driver.scheduler.stats().num_preemptions == 0:
        driver.step()
    assert owing.status is RequestStatus.PREEMPTED
    assert not owing.needs_prompt_logprobs
    driver.run()


def test_an_error_of_one_request_ends_that_request_alone() -> None:
    driver = Driver()
    driver.add(make_request(1, max_tokens=2))
    failing = driver.add(make_request(2, max_tokens=2))
    other = driver.add(make_request(3, max_tokens=2))
    driver.errors = {1: "NaN logits"}
    driver.step()
    assert [u.finished for u in driver.updates] == [None, Finished(FinishReason.ERROR, error="NaN logits"), None]
    assert driver.updates[1].token_id is None
    driver.errors = {}
    driver.run()
    assert (failing.num_output_tokens, other.num_output_tokens) == (0, 2)


def test_the_first_token_is_marked_once_also_after_preemption() -> None:
    driver = Driver(num_blocks=7)
    driver.add(make_request(1, prompt=12, max_tokens=10))
    driver.add(make_request(2, prompt=12, max_tokens=10))
    firsts = []
    while driver.scheduler.has_work:
        driver.step()
        firsts += [u.request.key[1] for u in driver.updates if u.is_first]
    assert driver.scheduler.stats().num_preemptions > 0
    assert firsts == [1, 2]
