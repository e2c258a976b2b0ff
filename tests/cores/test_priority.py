"""Who gives way to whom. `test_scheduler.py` has the same from outside."""

from __future__ import annotations

from cores.kv_cache_manager import KVCacheManager
from cores.priority import Room, who_gives_way
from cores.request import Request
from cores.testing import make_request

BLOCK_SIZE = 4


class Place:
    """An engine's queues, and what is left of its room."""

    def __init__(self, num_blocks: int = 100, max_num_seqs: int = 10, max_loras: int = 0) -> None:
        self.kv_cache = KVCacheManager(num_blocks, BLOCK_SIZE)
        self.max_num_seqs, self.max_loras = max_num_seqs, max_loras
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._num_requests = 0

    def request(self, priority: int, num_blocks: int = 1, lora: str | None = None) -> Request:
        self._num_requests += 1
        message = make_request(self._num_requests, num_blocks * BLOCK_SIZE)
        request = Request.from_engine_core_request(0, message, 1000, lora_id=lora)
        request.queue_key = (priority, self._num_requests)
        return request

    def run(self, priority: int, num_blocks: int = 1, lora: str | None = None) -> Request:
        request = self.request(priority, num_blocks, lora)
        assert self.kv_cache.admit(request)
        self.running.append(request)
        return request

    def wait(self, priority: int, num_blocks: int = 1, lora: str | None = None) -> None:
        self.waiting.append(self.request(priority, num_blocks, lora))

    def victims(self, budget: int = 1000) -> list[Request]:
        room = Room(
            kv_cache=self.kv_cache,
            num_places=self.max_num_seqs - len(self.running),
            num_running=len(self.running),
            num_blocks=self.kv_cache.num_blocks_free,
            max_loras=self.max_loras,
        )
        room.loras.update(r.lora_id for r in self.running if r.lora_id is not None)
        key = lambda request: request.queue_key  # noqa: E731
        return who_gives_way(sorted(self.waiting, key=key), sorted(self.running, key=key), room, budget)


def test_nobody_gives_way_while_there_is_room_or_to_an_equal() -> None:
    place = Place(max_num_seqs=2)
    place.run(5)
    place.wait(0)
    assert place.victims() == []
    place.run(5)
    place.waiting.clear()
    place.wait(5)
    assert place.victims() == []


def test_the_least_urgent_and_latest_give_way_one_for_each_place() -> None:
    place = Place(max_num_seqs=3)
    place.run(1)
    middle, last = place.run(5), place.run(5)
    place.wait(0)
    assert place.victims() == [last]
    place.wait(0)
    assert place.victims() == [last, middle]
    place.wait(2)
    assert place.victims() == [last, middle]  # nobody is left who is less urgent than 2


def test_no_more_give_way_than_the_next_step_can_begin() -> None:
    place = Place(max_num_seqs=2)
    place.run(5)
    last = place.run(5)
    for _ in range(2):
        place.wait(0, num_blocks=3)
    assert place.victims(budget=12) == [last]
    assert len(place.victims(budget=13)) == 2


def test_blocks_are_taken_from_as_many_as_needed() -> None:
    place = Place(num_blocks=12)
    runners = [place.run(5, num_blocks=3) for _ in range(4)]
    place.wait(0, num_blocks=5)
    assert place.victims() == runners[1:]  # 9 blocks: 5, and one to spare for each that is left


def test_nobody_is_preempted_if_that_is_not_enough() -> None:
    place = Place(num_blocks=12)
    place.run(0, num_blocks=9)
    place.run(5, num_blocks=2)
    place.wait(1, num_blocks=5)
    place.wait(2)  # would fit, but does not pass the one before it
    assert place.victims() == []


def test_blocks_that_others_hold_too_do_not_become_free() -> None:
    place = Place(num_blocks=6)
    first = place.run(0, num_blocks=4)
    place.kv_cache.enter_cache(first, 16)
    twin = place.request(5, num_blocks=5)
    twin.token_ids = first.token_ids + [7] * 4
    assert place.kv_cache.admit(twin)
    place.running.append(twin)
    place.wait(1, num_blocks=2)
    assert place.victims() == []


def test_a_slot_is_taken_where_that_helps_and_one_without_is_passed_over() -> None:
    place = Place(max_loras=2)
    place.run(0, lora="a")
    relaxed = place.run(5, lora="b")
    place.wait(1, lora="c")
    assert place.victims() == [relaxed]
    place.running.remove(relaxed)
    place.run(0, lora="b")
    other = place.run(5)
    place.max_num_seqs = 3
    place.wait(2)
    assert place.victims() == [other]  # for the second: no slot can be had for the first
