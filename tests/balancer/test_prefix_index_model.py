"""The index beside real caches, whose events are late, repeated or lost, while requests come, go and die."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from balancer.prefix_index import PrefixIndex
from cores.block_hash import ROOT, prefix_keys, to_keys
from cores.cache_watch import CacheWatch
from cores.kv_cache_manager import KVCacheManager
from cores.messages import CacheEvents, RankId
from cores.request import Request
from cores.sampling_params import SamplingParams

BLOCK_SIZE = 2
NUM_BLOCKS = 12
LANDMARK = 4  # every second block
FRONT_END = 0

prompts = st.lists(st.integers(1, 2), min_size=3, max_size=16)  # few tokens: prefixes are often equal


@dataclass
class Engine:
    """A cache and its requests, without a scheduler."""

    rank_id: RankId
    cache: KVCacheManager = field(init=False)
    watch: CacheWatch = field(init=False)
    held: dict[int, Request] = field(default_factory=dict)
    sent: list[CacheEvents] = field(default_factory=list)  # on their way
    heard: list[CacheEvents] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cache = KVCacheManager(NUM_BLOCKS, BLOCK_SIZE, landmark_tokens=LANDMARK)
        self.watch = CacheWatch(self.rank_id, self.cache.record_changes, self.cache.cached_landmarks)
        self.watch.watch(FRONT_END)
        self.flush()

    def flush(self) -> None:
        self.sent += self.watch.take_events().values()


class IndexMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.index = PrefixIndex()
        self.engines: dict[int, Engine] = {}
        self.booked: dict[int, tuple[RankId, list[int]]] = {}
        self.last_handle = 0
        for rank in range(2):
            self.begin_life(rank, 1)

    def begin_life(self, rank: int, epoch: int) -> None:
        self.engines[rank] = Engine(RankId(rank, epoch))
        self.index.add_rank(RankId(rank, epoch), NUM_BLOCKS)

    @rule(rank=st.integers(0, 1), prompt=prompts, is_admitted=st.booleans())
    def request_is_sent(self, rank: int, prompt: list[int], is_admitted: bool) -> None:
        self.last_handle += 1
        handle, engine = self.last_handle, self.engines[rank]
        self.index.book(handle, engine.rank_id, prefix_keys(prompt, BLOCK_SIZE, landmark_tokens=LANDMARK))
        self.booked[handle] = (engine.rank_id, prompt)
        request = Request((FRONT_END, handle), "r", list(prompt), len(prompt), len(prompt), SamplingParams(), 100)
        request.root_hash = ROOT
        if is_admitted and engine.cache.admit(request):
            engine.held[handle] = request
            engine.cache.enter_cache(request, len(prompt))
        engine.flush()

    @precondition(lambda self: self.booked)
    @rule(data=st.data(), engine_knows=st.booleans())
    def request_ends(self, data: st.DataObject, engine_knows: bool) -> None:
        handle = data.draw(st.sampled_from(sorted(self.booked)))
        rank_id, _ = self.booked.pop(handle)
        self.index.release(handle)
        engine = self.engines[rank_id.rank]
        if engine_knows and handle in engine.held:
            engine.cache.free(engine.held.pop(handle))
            engine.flush()

    @rule(rank=st.integers(0, 1))
    def cache_is_reset(self, rank: int) -> None:
        self.engines[rank].cache.reset_prefix_cache()
        self.engines[rank].flush()

    @rule(rank=st.integers(0, 1))
    def engine_dies(self, rank: int) -> None:
        old = self.engines[rank]
        self.index.remove_rank(old.rank_id)
        self.booked = {handle: booked for handle, booked in self.booked.items() if booked[0] != old.rank_id}
        for late in old.sent:
            assert self.index.on_events(late)
        self.begin_life(rank, old.rank_id.epoch + 1)

    @rule(rank=st.integers(0, 1))
    def events_arrive(self, rank: int) -> None:
        engine = self.engines[rank]
        while engine.sent:
            events = engine.sent.pop(0)
            engine.heard.append(events)
            if not self.index.on_events(events):
                engine.watch.watch(FRONT_END)
                engine.flush()

    @rule(rank=st.integers(0, 1), data=st.data())
    def events_arrive_again(self, rank: int, data: st.DataObject) -> None:
        changes = [events for events in self.engines[rank].heard if not events.is_snapshot]
        if changes and not any(events.is_snapshot for events in self.engines[rank].sent):
            again = data.draw(st.sampled_from(changes))
            if again.seq < self.engines[rank].heard[-1].seq:
                assert self.index.on_events(again)

    @rule(rank=st.integers(0, 1))
    def events_are_lost(self, rank: int) -> None:
        engine = self.engines[rank]
        if engine.sent and not engine.sent[0].is_snapshot:
            del engine.sent[0]

    @rule(prompt=prompts)
    def longest_prefix_ends_before_the_first_block_that_is_not_there(self, prompt: list[int]) -> None:
        keys = prefix_keys(prompt, BLOCK_SIZE, landmark_tokens=LANDMARK)
        holders = [self.index.longest_prefixes([key]) for key in keys]
        found = self.index.longest_prefixes(keys, LANDMARK)
        for rank_id in (engine.rank_id for engine in self.engines.values()):
            num_held = len(list(takewhile(lambda there, rank_id=rank_id: rank_id in there, holders)))
            assert found.get(rank_id, 0) == LANDMARK * num_held
            assert (rank_id in found) == (num_held > 0)

    @invariant()
    def what_is_under_way_is_bounded_by_what_there_is(self) -> None:
        self.index.check_invariants()
        assert self.index.booked_handles <= self.booked.keys()

    def teardown(self) -> None:
        """When all is said and all have ended, the index is what the caches have."""
        for handle in list(self.booked):
            self.index.release(handle)
        for engine in self.engines.values():
            self.events_arrive(engine.rank_id.rank)
            engine.watch.watch(FRONT_END)  # what was lost at the very end shows with the next events
            engine.flush()
            self.events_arrive(engine.rank_id.rank)
        self.index.check_invariants()
        stored = {rank_id.rank: blocks for rank_id, blocks in self.index.stored_blocks().items()}
        assert stored == {rank: set(to_keys(engine.cache.cached_landmarks())) for rank, engine in self.engines.items()}


IndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
TestIndexModel = IndexMachine.TestCase


def test_landmarks_of_a_prompt_are_those_of_a_cache_that_has_it() -> None:
    """What both sides compute apart must agree, or every guess is wrong."""
    prompt = list(range(100, 700))
    cache = KVCacheManager(100, 16)
    request = Request((0, 1), "r", list(prompt), len(prompt), len(prompt), SamplingParams(), 1000, root_hash=ROOT)
    assert cache.admit(request)
    cache.enter_cache(request, len(prompt))
    assert list(prefix_keys(prompt, 16)) == list(to_keys(cache.cached_landmarks()))
    assert len(prefix_keys(prompt, 16)) == 600 // 64


def test_last_token_of_a_prompt_is_computed_whatever_the_cache_has() -> None:
    prompt = list(range(129))
    assert len(prefix_keys(prompt[:128], 16)) == 1
    assert len(prefix_keys(prompt, 16)) == 2
    assert prefix_keys([], 16) == prefix_keys([1], 16) == ()
    assert len(prefix_keys(prompt, 128)) == 1  # blocks longer than from one landmark to the next are all landmarks
