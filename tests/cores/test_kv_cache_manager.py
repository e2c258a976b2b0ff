"""Which blocks a request holds, and what the prefix cache saves it."""

from __future__ import annotations

from cores.kv_cache_manager import KVCacheManager
from cores.request import Request
from cores.testing import make_request


def request(handle: int, prompt: list[int], cache_salt: str | None = None) -> Request:
    return Request.from_engine_core_request(0, make_request(handle, prompt, cache_salt=cache_salt), 1000)


def compute_all(kv_cache: KVCacheManager, request: Request) -> None:
    request.num_computed_tokens = request.num_tokens
    kv_cache.enter_cache(request, request.num_tokens)


def test_a_request_gets_room_for_all_its_tokens_at_once() -> None:
    kv_cache = KVCacheManager(num_blocks=4, block_size=4)
    first = request(1, [5] * 9)
    assert kv_cache.admit(first)
    assert (len(first.block_ids), first.num_computed_tokens, kv_cache.num_blocks_used) == (3, 0, 3)
    assert not kv_cache.admit(request(2, [6] * 5))
    assert kv_cache.admit(request(3, [6] * 4))
    assert not kv_cache.grow(_with_tokens(first, 4))
    kv_cache.free(first)
    assert kv_cache.num_blocks_used == 1


def _with_tokens(request: Request, count: int) -> Request:
    request.token_ids += [7] * count
    return request


def test_growing_takes_a_block_only_when_the_last_one_is_full() -> None:
    kv_cache = KVCacheManager(num_blocks=2, block_size=4)
    first = request(1, [5] * 3)
    assert kv_cache.admit(first)
    assert kv_cache.grow(_with_tokens(first, 1))
    assert len(first.block_ids) == 1
    assert kv_cache.grow(_with_tokens(first, 1))
    assert len(first.block_ids) == 2
    kv_cache.check_invariants([first])


def test_a_refused_admission_changes_nothing() -> None:
    kv_cache = KVCacheManager(num_blocks=4, block_size=4)
    second = request(2, [6] * 12)
    assert not kv_cache.admit(second, num_spare=2)
    assert (second.block_ids, kv_cache.num_blocks_used) == ([], 0)
    assert kv_cache.admit(second, num_spare=1)


def test_an_equal_prefix_is_found_up_to_the_last_full_block() -> None:
    kv_cache = KVCacheManager(num_blocks=16, block_size=4)
    first, second = request(1, [1] * 8 + [2] * 4), request(2, [1] * 8 + [3] * 4)
    assert kv_cache.admit(first)
    compute_all(kv_cache, first)
    assert kv_cache.admit(second)
    assert second.num_computed_tokens == 8
    assert second.block_ids[:2] == first.block_ids[:2]
    assert second.block_ids[2] not in first.block_ids
    kv_cache.check_invariants([first, second])


def test_a_whole_prompt_in_the_cache_still_leaves_a_token_to_compute() -> None:
    kv_cache = KVCacheManager(num_blocks=16, block_size=4)
    first, second = request(1, [1] * 8), request(2, [1] * 8)
    assert kv_cache.admit(first)
    compute_all(kv_cache, first)
    assert kv_cache.admit(second)
    assert second.num_computed_tokens == 4


def test_only_blocks_that_are_full_can_be_found() -> None:
    kv_cache = KVCacheManager(num_blocks=16, block_size=4)
    first, second = request(1, [1] * 12), request(2, [1] * 12)
    assert kv_cache.admit(first)
    kv_cache.enter_cache(first, 7)
    assert kv_cache.admit(second)
    assert second.num_computed_tokens == 4


def test_freed_prefixes_are_revived_and_evicted_tail_first() -> None:
    kv_cache = KVCacheManager(num_blocks=4, block_size=4)
    first = request(1, [1] * 16)
    assert kv_cache.admit(first)
    compute_all(kv_cache, first)
    kv_cache.free(first)
    other = request(2, [2] * 4)
    assert kv_cache.admit(other)  # takes the block of the last four
    again = request(3, [1] * 15)
    assert not kv_cache.admit(again)  # its first three blocks are there, but none is left for the rest
    kv_cache.free(other)
    assert kv_cache.admit(again)
    assert again.num_computed_tokens == 12
    kv_cache.check_invariants([again])


def test_cached_blocks_that_are_free_count_as_taken_when_revived() -> None:
    kv_cache = KVCacheManager(num_blocks=3, block_size=4)
    first = request(1, [1] * 8)
    assert kv_cache.admit(first)
    compute_all(kv_cache, first)
    kv_cache.free(first)
    assert not kv_cache.admit(request(2, [1] * 8 + [2] * 5))  # needs four, has three
    assert kv_cache.admit(request(3, [1] * 8 + [2] * 4))


def test_salted_prompts_do_not_share() -> None:
    kv_cache = KVCacheManager(num_blocks=16, block_size=4)
    salted, plain, same_salt = request(1, [1] * 9, "a"), request(2, [1] * 9), request(3, [1] * 9, "a")
    for each in (salted, plain, same_salt):
        assert kv_cache.admit(each)
        compute_all(kv_cache, each)
    assert [r.num_cached_blocks for r in (salted, plain, same_salt)] == [2, 2, 2]
    assert same_salt.block_ids[:2] == salted.block_ids[:2]
    assert not set(plain.block_ids) & set(salted.block_ids)


def test_a_reset_forgets_also_what_running_requests_go_on_computing() -> None:
    kv_cache = KVCacheManager(num_blocks=16, block_size=4)
    running = request(1, [1] * 12)
    assert kv_cache.admit(running)
    kv_cache.enter_cache(running, 4)
    kv_cache.reset_prefix_cache()
    compute_all(kv_cache, running)
    later = request(2, [1] * 12)
    assert kv_cache.admit(later)
    assert later.num_computed_tokens == 0
    compute_all(kv_cache, later)  # belongs to the new cache
    last = request(3, [1] * 12)
    assert kv_cache.admit(last)
    assert last.num_computed_tokens == 8
    kv_cache.check_invariants([running, later, last])


def test_without_prefix_caching_nothing_is_found() -> None:
    kv_cache = KVCacheManager(num_blocks=16, block_size=4, enable_prefix_caching=False)
    first, second = request(1, [1] * 9), request(2, [1] * 9)
    assert kv_cache.admit(first)
    compute_all(kv_cache, first)
    assert kv_cache.admit(second)
    assert second.num_computed_tokens == 0
