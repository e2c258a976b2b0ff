"""Which running requests give way to more urgent ones that wait. Pure: decides, and changes nothing but its own sums.

A waiting request takes a place among `max_num_seqs`, KV blocks and perhaps a LoRA slot. It may take them from requests with a
worse priority, from the last on, and only if that is enough: nobody is preempted for one that cannot begin all the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from cores.kv_cache_manager import KVCacheManager
from cores.request import Request


@dataclass(slots=True)
class Room:
    """What is free, and what would be."""

    kv_cache: KVCacheManager
    num_places: int
    num_running: int  # each wants one block to be left over for it soon
    num_blocks: int
    max_loras: int
    pinned_loras: frozenset[str] = frozenset()
    loras: Counter[str] = field(default_factory=Counter)  # running requests by adapter

    def copy(self) -> Room:
        return replace(self, loras=Counter(self.loras))

    def holds(self, request: Request) -> bool:
        num_blocks = self.kv_cache.num_blocks_to_admit(request) + self.num_running
        return self.num_places > 0 and num_blocks <= self.num_blocks and self.has_slot(request)

    def has_slot(self, request: Request) -> bool:
        lora_id = request.lora_id
        if lora_id is None or self.loras[lora_id]:
            return True
        return len({i for i, count in self.loras.items() if count} | self.pinned_loras | {lora_id}) <= self.max_loras

    def give(self, request: Request) -> None:
        self._move(request, 1, self.kv_cache.num_blocks_to_admit(request))

    def take_back(self, request: Request) -> None:
        self._move(request, -1, -self.kv_cache.num_blocks_held_alone(request))

    def _move(self, request: Request, sign: int, num_blocks: int) -> None:
        self.num_places -= sign
        self.num_running += sign
        self.num_blocks -= num_blocks
        if request.lora_id is not None:
            self.loras[request.lora_id] += sign


def who_gives_way(waiting: Iterable[Request], running: Iterable[Request], room: Room, budget: int) -> list[Request]:
    """Both in the order of their queues. `budget`: tokens of prompts that the next step can begin; more need no place yet."""
    victims: list[Request] = []
    kept = list(running)
    for request in waiting:
        if budget <= 0 or not kept or not _is_worse(kept[-1], request):
            break
        num_kept, tried = len(kept), room.copy()
        while not tried.holds(request) and num_kept and _is_worse(kept[num_kept - 1], request):
            num_kept -= 1
            tried.take_back(kept[num_kept])
        if not tried.holds(request):
            if tried.has_slot(request):
                break  # those behind it do not pass it
            continue
        victims += kept[num_kept:]
        del kept[num_kept:]
        tried.give(request)
        room = tried
        budget -= request.num_tokens
    return victims


def _is_worse(request: Request, other: Request) -> bool:
    return request.queue_key[0] > other.queue_key[0]
