"""An engine asked for ten times what its KV cache holds, for minutes of its own time, while requests come and leave at random.

Virtual time: the simulated runner takes what its cost model says from a clock that only it moves, so five minutes are seconds.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from cores.config import EngineConfig, SimulatedConfig
from cores.engine_core import EngineCore
from cores.messages import EngineCoreOutputs, EngineCoreRequest, FinishReason, RankId
from cores.runner.simulated import SimulatedModelRunner
from cores.testing import ManualClock, make_request, make_tiny_model_dir

NUM_KV_BLOCKS, BLOCK_SIZE = 128, 16
OVERCOMMIT = 10
NUM_CLIENTS = 2
STEP_MS = 40.0
STEMS = [[10 + stem + i % 50 for i in range(200)] for stem in range(6)]  # prompts share prefixes
Key = tuple[int, int]
Policy = Literal["fcfs", "priority"]


def make_core(model: Path, clock: ManualClock, policy: Policy = "fcfs", num_kv_blocks: int = NUM_KV_BLOCKS) -> EngineCore:
    config = EngineConfig(
        model=str(model), engine="simulated", simulated=SimulatedConfig(step_ms=STEP_MS, prefill_us=50, seq_us=100),
        num_kv_blocks=num_kv_blocks, block_size=BLOCK_SIZE, max_num_seqs=32, max_num_batched_tokens=256,
        scheduling_policy=policy,
    )  # fmt: skip
    runner = SimulatedModelRunner(config, RankId(0, 1), sleep=clock.sleep, clock=clock)
    return EngineCore(RankId(0, 1), config, runner.load(), runner, clock)


@dataclass
class Soak:
    """The users of one engine, and their books."""

    core: EngineCore
    clock: ManualClock
    rng: random.Random
    requests: dict[Key, EngineCoreRequest] = field(default_factory=dict)
    tokens: dict[Key, list[int]] = field(default_factory=dict)
    ends: dict[Key, FinishReason] = field(default_factory=dict)
    aborted: set[Key] = field(default_factory=set)
    leaves_at_s: dict[Key, float] = field(default_factory=dict)  # of those who will not wait for their end
    wanted_tokens: int = 0  # KV tokens of all that are in the engine, if they ran at once
    highest_overcommit: float = 0.0

    def run(self, duration_s: float) -> None:
        next_arrival_s = self.clock.now
        while self.clock.now < duration_s or self.core.has_work:
            while self.clock.now < duration_s and (self.is_short_of_work or next_arrival_s <= self.clock.now):
                self.arrive()
                next_arrival_s = self.clock.now + self.rng.expovariate(4.0)
            self.leave()
            for client, outputs in self.core.step().items():
                self.book(client, outputs)
            if self.core.step_count % 64 == 0:
                self.core.check_invariants()

    @property
    def is_short_of_work(self) -> bool:
        return self.wanted_tokens < OVERCOMMIT * NUM_KV_BLOCKS * BLOCK_SIZE

    def arrive(self) -> None:
        rng, handle = self.rng, len(self.requests)
        stem = rng.choice(STEMS)
        prompt = stem[: rng.choice([0, 40, 120, 200])] + [rng.randrange(10, 200) for _ in range(rng.randrange(1, 60))]
        request = make_request(
            handle, prompt, temperature=rng.choice([0.0, 1.0]), max_tokens=rng.choice([1, 20, 100, 300]),
            priority=rng.randrange(3),
        )  # fmt: skip
        key = (handle % NUM_CLIENTS, handle)
        self.requests[key], self.tokens[key] = request, []
        self.wanted_tokens += length(request)
        self.highest_overcommit = max(self.highest_overcommit, self.wanted_tokens / (NUM_KV_BLOCKS * BLOCK_SIZE))
        if rng.random() < 0.3:
            self.leaves_at_s[key] = self.clock.now + rng.expovariate(0.2)
        self.core.add_request(key[0], request)

    def leave(self) -> None:
        for key in [key for key, at_s in self.leaves_at_s.items() if at_s <= self.clock.now]:
            del self.leaves_at_s[key]
            if key not in self.ends:
                self.core.abort_requests(key[0], [key[1]])
                self.aborted.add(key)
                self.wanted_tokens -= length(self.requests[key])

    def book(self, client: int, outputs: EngineCoreOutputs) -> None:
        tokens = iter(outputs.token_ids)
        counts = outputs.counts or array("I", [1]) * len(outputs.handles)
        for row, (handle, count) in enumerate(zip(outputs.handles, counts, strict=True)):
            key = (client, handle)
            assert key not in self.ends, "an output after the end"
            assert key not in self.aborted, "an output after the abort"
            self.tokens[key] += [next(tokens) for _ in range(count)]
            if row in outputs.finished:
                self.ends[key] = outputs.finished[row].reason
                self.wanted_tokens -= length(self.requests[key])

    def check(self) -> None:
        """Nobody is lost, nobody is short of a token, and nothing is left behind."""
        assert self.highest_overcommit >= OVERCOMMIT
        assert self.ends.keys() | self.aborted == self.requests.keys()
        assert not self.ends.keys() & self.aborted
        for key, reason in self.ends.items():
            assert reason is FinishReason.LENGTH
            assert len(self.tokens[key]) == self.requests[key].sampling_params.max_tokens
        load = self.core.load()
        assert (load.num_waiting, load.num_running, load.num_prefill_tokens, load.num_decodes, load.num_kv_blocks_used) == (
            0,
        ) * 5
        self.core.check_invariants()


def length(request: EngineCoreRequest) -> int:
    return len(request.prompt_token_ids) + (request.sampling_params.max_tokens or 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model_dir(tmp_path_factory.mktemp("tiny"))


def soak(model: Path, duration_s: float, policy: Policy) -> Soak:
    clock = ManualClock()
    soak = Soak(make_core(model, clock, policy), clock, random.Random(7))
    soak.run(duration_s)
    soak.check()
    return soak


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_ten_times_too_much_work_loses_no_request_no_token_and_no_block(model: Path, policy: Policy) -> None:
    done = soak(model, 30.0, policy)
    assert len(done.requests) > 100
    assert len(done.aborted) > 20
    assert done.core.stats().num_preemptions > 20
    check_some_against_an_idle_engine(model, done)


def check_some_against_an_idle_engine(model: Path, done: Soak) -> None:
    for key in random.Random(1).sample(sorted(done.ends), 20):
        clock = ManualClock()
        alone = Soak(make_core(model, clock, num_kv_blocks=1000), clock, random.Random(0))
        alone.requests[key], alone.tokens[key] = done.requests[key], []
        alone.core.add_request(key[0], done.requests[key])
        alone.run(0.0)
        assert alone.tokens[key] == done.tokens[key]


def test_five_minutes_of_it(model: Path) -> None:
    done = soak(model, 300.0, "fcfs")
    assert done.clock.now >= 300.0
    assert len(done.requests) > 1000
