"""Chats over real engine processes: the balancer follows what the engines themselves say that they have cached."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter

import pytest

from balancer.prefix_index import PrefixIndex
from cores.sampling_params import SamplingParams
from gateway import AsyncLLM
from gateway.config import BalancerConfig, FaultConfig
from gateway.outputs import RequestOutput
from tests.integration.llm_harness import FINAL_ONLY, Start, collect, frozen, params, until

POLICY = BalancerConfig(load_balancing_policy="prefix_affinity")
ANSWER = params(20, output_kind=FINAL_ONLY)
BLOCK = 16


def index_of(llm: AsyncLLM) -> PrefixIndex:
    index = llm.core_client.ledger.prefix_index
    assert index is not None
    return index


class Chat:
    """What was said so far, by both, and who answered."""

    def __init__(self, llm: AsyncLLM, seed: int, num_tokens: int = 400) -> None:
        self._llm = llm
        self._rng = random.Random(seed)
        self.tokens = self._say(num_tokens)
        self.ranks: list[int | None] = []
        self.num_cached: list[int] = []

    def _say(self, num_tokens: int) -> list[int]:
        return [self._rng.randrange(3, 90) for _ in range(num_tokens)]

    async def turn(self, sampling: SamplingParams = ANSWER, cache_salt: str | None = None) -> RequestOutput:
        outputs = [
            output async for output in self._llm.generate(list(self.tokens), sampling, "chat", cache_salt=cache_salt)
        ]  # fmt: skip
        (output,) = outputs
        self.ranks.append(output.rank)
        self.num_cached.append(output.stats.num_cached_tokens)
        self.tokens += [*output.outputs[0].token_ids, *self._say(10)]
        return output


async def test_chats_stay_where_their_history_is_and_spread_over_all_ranks(start: Start) -> None:
    llm = await start(3, balancer=POLICY)
    chats = [Chat(llm, seed) for seed in range(9)]
    for turn in range(4):
        before = [len(chat.tokens) for chat in chats]
        turns = [asyncio.create_task(chat.turn()) for chat in chats]
        if not turn:
            with frozen(llm):  # at the first turn all choose by what was booked, and not by who is done already
                await until(lambda: llm.output_processor.num_unfinished == len(chats), "all have chosen")
        await asyncio.gather(*turns)
        if turn:
            for chat, num_tokens in zip(chats, before, strict=True):
                assert chat.num_cached[-1] >= (num_tokens - 10) // BLOCK * BLOCK - BLOCK
    assert all(len(set(chat.ranks)) == 1 for chat in chats)
    assert set(Counter(chat.ranks[0] for chat in chats).values()) == {3}


async def test_after_a_restart_a_chat_goes_on_and_settles_again(start: Start) -> None:
    llm = await start(2, balancer=POLICY, fault_tolerance=FaultConfig(engine_restarts=3))
    chat = Chat(llm, 1)
    await chat.turn()
    await chat.turn()
    home = chat.ranks[-1]
    assert home is not None
    pid = llm.status().ranks[home].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await until(lambda: (llm.status().ranks[home].epoch, llm.status().ranks[home].state) == (2, "ready"), "it is back")
    await chat.turn()
    assert chat.num_cached[-1] == 0  # whatever rank it was: the cache that had it is gone
    await chat.turn()
    assert chat.ranks[-1] == chat.ranks[-2]
    assert chat.num_cached[-1] >= 400
    (lost,) = [rank_id for rank_id in index_of(llm).stored_blocks() if rank_id.rank == home]
    assert lost.epoch == 2
    index_of(llm).check_invariants()


@pytest.mark.parametrize("operation", ["reset_prefix_cache", "sleep"])
async def test_nobody_counts_on_a_cache_that_was_dropped(start: Start, operation: str) -> None:
    llm = await start(2, balancer=POLICY)
    chat = Chat(llm, 1)
    await chat.turn()
    await until(lambda: index_of(llm).num_blocks > 0, "the rank has told what it stored")
    await llm.call_utility_by_rank(operation)
    await until(lambda: index_of(llm).num_blocks == 0, "the rank has told that it is gone")
    if operation == "sleep":
        await llm.call_utility_by_rank("wake_up")
    await until(lambda: llm.status().state == "ready", "it is ready")
    await chat.turn()
    assert chat.num_cached[-1] == 0
    await chat.turn()
    assert chat.num_cached[-1] >= 400


async def test_sequences_of_one_request_and_bursts_of_one_prompt_meet(start: Start) -> None:
    llm = await start(3, balancer=POLICY)
    prompt = list(range(3, 80)) * 8
    (final,) = await collect(llm, prompt, params(5, n=4, temperature=1.0, output_kind=FINAL_ONLY))
    assert len(final.outputs) == 4
    assert sorted(rank.requests_total for rank in llm.status().ranks) == [0, 0, 4]
    other = list(range(80, 3, -1)) * 8
    burst = await asyncio.gather(*(collect(llm, other, params(5, output_kind=FINAL_ONLY), str(i)) for i in range(6)))
    assert len({outputs[0].rank for outputs in burst}) == 1
    assert sum(outputs[0].stats.num_cached_tokens == 0 for outputs in burst) == 1


async def test_equal_prompts_with_different_salts_share_nothing(start: Start) -> None:
    llm = await start(2, balancer=POLICY)
    chat = Chat(llm, 1)
    await chat.turn(cache_salt="a")
    del chat.tokens[400:]
    await chat.turn(cache_salt="b")
    del chat.tokens[400:]
    await chat.turn(cache_salt="a")
    assert chat.num_cached == [0, 0, 384]
    assert chat.ranks[2] == chat.ranks[0]
