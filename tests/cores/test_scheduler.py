"""The scheduler's rules, one story each. `test_scheduler_properties.py` mixes them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cores.kv_cache_manager import KVCacheManager
from cores.messages import EngineCoreRequest, Finished, FinishReason
from cores.pooling_params import PoolingParams
from cores.request import Request, RequestStatus
from cores.runner.interface import ModelRunnerOutput
from cores.scheduler import MAX_LOOK_AHEAD, MAX_PASSED_OVER, RequestUpdate, Scheduler, SchedulerConfig
from cores.testing import make_request

EOS, STOP_ID, TOKEN = 2, 77, 9


class Driver:
    """A scheduler with its steps: each sampled token is what `choose` says."""

    def __init__(self, *, num_blocks: int = 100, block_size: int = 4, max_model_len: int = 200, **config: Any) -> None:
        kv_cache = KVCacheManager(num_blocks, block_size)
        self.scheduler = Scheduler(SchedulerConfig(max_model_len=max_model_len, **config), kv_cache)
        self.choose: Callable[[Request], int] = lambda request: TOKEN
        self.errors: dict[int, str] = {}
        self.deferred: frozenset[int] = frozenset()
        self.completed: set[int] = set()
        self.vectors: dict[int, bytes] = {}
        self.now = 0.0

    def add(self, message: EngineCoreRequest) -> Request:
        request = Request.from_engine_core_request(0, message, self.scheduler.max_model_len, (EOS,), message.lora_id)
        assert self.scheduler.add_request(request, self.now) is None
        return request

    def refuse(self, message: EngineCoreRequest) -> Finished:
        request = Request.from_engine_core_request(0, message, self.scheduler.max_model_len, (EOS,))
        finished = self.scheduler.add_request(request, self.now)
        assert finished is not None
        assert not self.scheduler.has_work
        return finished

    def step(self) -> list[tuple[int, int]]:
        """(handle, tokens computed) of the batch, in order."""
        batch = self.scheduler.schedule(self.now)
        sampling = [s.request for s in batch.scheduled if s.samples]
        described = [(s.request.key[1], s.num_tokens) for s in batch.scheduled]
        output = ModelRunnerOutput(
            [self.choose(r) for r in sampling],
            errors=self.errors,
            vectors=self.vectors,
            deferred=self.deferred,
            completed=self.completed,
        )
        self.updates: list[RequestUpdate] = self.scheduler.update(batch, output)
        self.scheduler.check_invariants()
        self.now += 1.0
        return described

    def run(self) -> None:
        while self.scheduler.has_work:
            self.step()


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


# --- LoRA adapters --------------------------------------------------------------------------------------------------------


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


# --- requests for a vector --------------------------------------------------------------------------------------------


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
