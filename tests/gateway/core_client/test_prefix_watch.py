"""How a client with `prefix_affinity` follows the caches of its ranks, and how one with late binding waits for room."""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from balancer.prefix_index import PrefixIndex
from cores.messages import AddRequest, CacheEvents, LoadReport, RankId, RankLoad, WatchCache
from cores.testing import make_request
from gateway.config import BalancerConfig
from gateway.core_client.base import EngineDied
from gateway.errors import InvalidRequestError
from tests.gateway.core_client.fake_group import FakeGroup

ZERO, ONE = RankId(0, 1), RankId(1, 1)


@pytest.fixture
async def group(request: pytest.FixtureRequest) -> AsyncIterator[FakeGroup]:
    with tempfile.TemporaryDirectory(prefix="gw-", dir="/tmp") as directory:  # a Unix socket's path must be short
        group = FakeGroup(Path(directory), balancer=request.param)
        await group.start()
        yield group
        group.client.ledger.check_invariants()
        await group.close()


prefix_affinity = pytest.mark.parametrize("group", [BalancerConfig(load_balancing_policy="prefix_affinity")], indirect=True)
late = pytest.mark.parametrize("group", [BalancerConfig(load_balancing_policy="least_tokens", dispatch="late")], indirect=True)


def index_of(group: FakeGroup) -> PrefixIndex:
    index = group.client.ledger.prefix_index
    assert index is not None
    return index


def cache_events(rank_id: RankId, seq: int, *stored: int, is_snapshot: bool = False) -> CacheEvents:
    return CacheEvents(rank_id, seq, is_snapshot, array("Q", stored), array("Q"))


@prefix_affinity
async def test_every_rank_is_watched_and_asked_again_after_a_gap(group: FakeGroup) -> None:
    for engine in group.engines.values():
        assert isinstance(await engine.command(), WatchCache)
    engine = group.engines[1]
    await engine.say(cache_events(ONE, 0, 5, is_snapshot=True))
    await group.until(lambda: index_of(group).longest_prefixes([5]) == {ONE: 1})
    await engine.say(cache_events(ONE, 2, 6))
    assert isinstance(await engine.command(), WatchCache)
    assert index_of(group).num_blocks == 0
    await engine.say(cache_events(ONE, 0, 5, 6, is_snapshot=True))
    await group.until(lambda: index_of(group).longest_prefixes([5, 6]) == {ONE: 2})


@prefix_affinity
async def test_restarted_rank_is_watched_from_its_first_word(group: FakeGroup) -> None:
    await group.engines[1].say(cache_events(ONE, 0, 5, is_snapshot=True))
    await group.until(lambda: index_of(group).num_blocks)
    engine = await group.begin_life(RankId(1, 2))
    assert isinstance(await engine.command(), WatchCache)
    died = await group.received()
    assert isinstance(died, EngineDied)
    group.client.on_engine_died(died)
    assert index_of(group).num_blocks == 0


@prefix_affinity
async def test_prompt_is_known_by_its_blocks_adapter_and_salt(group: FakeGroup) -> None:
    def keys(prompt: int = 150, **fields: object) -> tuple[int, ...]:
        block_keys, tokens_per_key = group.client.prefix_of(make_request(1, prompt, **fields))
        assert tokens_per_key == 64
        return tuple(block_keys)

    assert len(keys(150)) == len(keys(129)) == 2
    assert len(keys(128)) == 1
    assert len({keys(), keys(cache_salt="a"), keys(cache_salt="b"), keys(lora_name="x", lora_id="1")}) == 4


@late
async def test_request_is_sent_when_a_report_says_that_there_is_room(group: FakeGroup) -> None:
    full = 2 * 64  # two steps of the fake engines
    bound: list[tuple[int, RankId]] = []
    group.client.on_bound = lambda handle, rank_id: bound.append((handle, rank_id))
    for rank in (0, 1):
        _, rank_id = group.add_request(full, pinned_rank=rank)
        assert rank_id == RankId(rank, 1)
    bound.clear()
    waiting, nobody = group.add_request(10)
    assert (nobody, len(group.client.queued_handles)) == (None, 1)
    assert group.client.num_unreported_tokens == 2 * full + 10
    commands = [await group.engines[1].command()]
    assert isinstance(commands[0], AddRequest)
    await group.engines[1].say(LoadReport(ONE, 1, commands[0].seq, RankLoad(num_running=1, num_decodes=1)))
    sent = await group.engines[1].command()
    assert isinstance(sent, AddRequest)
    assert sent.request.handle == waiting
    assert (bound, len(group.client.queued_handles)) == ([(waiting, ONE)], 0)


@late
async def test_aborted_in_the_queue_it_is_sent_to_nobody(group: FakeGroup) -> None:
    for rank in (0, 1):
        group.add_request(128, pinned_rank=rank)
    handle, _ = group.add_request(10)
    group.client.abort_requests([handle])
    assert len(group.client.queued_handles) == 0
    assert group.client.ledger.num_in_flight == 2
    with pytest.raises(InvalidRequestError, match="data_parallel_rank"):
        group.add_request(10, pinned_rank=9)
    assert len(group.client.queued_handles) == 0
