"""What every model runner must do, as tests. Subclass `RunnerContract`, give it `model` and `make_runner`.

The batch, its cuts, the cache, preemption and the rank are others' affairs: no token may depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cores.config import ConfigError, EngineConfig
from cores.engine_core import EngineCore
from cores.messages import EngineCoreRequest, FinishReason, RankId, SchedulerStats, UtilityCall
from cores.runner.interface import ModelInfo, ModelRunner
from cores.testing import ManualClock, make_request

MAX_TOKENS = 12
COMMON = [5 + i * 7 % 60 for i in range(24)]
PROMPTS: list[list[int]] = [
    [7],
    [8, 9, 10],
    [11 + i % 50 for i in range(15)],
    [12 + i % 50 for i in range(16)],
    [*COMMON, 70],
    [*COMMON, 71, 72],
    COMMON + [80 + i for i in range(30)],
]


class Engine:
    """An engine core over the runner under test, driven by hand."""

    def __init__(self, runner: ModelRunner, config: EngineConfig) -> None:
        self.info: ModelInfo = runner.load()
        self.core = EngineCore(RankId(0, 1), config, self.info, runner, ManualClock())

    def run(self, requests: Sequence[EngineCoreRequest]) -> list[list[int]]:
        """All at once, to their ends: the tokens of each."""
        tokens: dict[int, list[int]] = {request.handle: [] for request in requests}
        for request in requests:
            self.core.add_request(0, request)
        while self.core.has_work:
            for outputs in self.core.step().values():
                assert outputs.counts is None, "every row has a token"
                for handle, token_id in zip(outputs.handles, outputs.token_ids, strict=True):
                    tokens[handle].append(token_id)
                assert all(f.reason is not FinishReason.ERROR for f in outputs.finished.values())
            self.core.check_invariants()
        return list(tokens.values())

    def call(self, method: str, *args: Any) -> Any:
        """A utility, to its answer. Raises `AssertionError` with its error."""
        result = self.core.call_utility(UtilityCall(1, 1, method, args))
        while result is None:
            self.core.step()
            result = next((late for _, late in self.core.take_late_results()), None)
        assert result.error is None, result.error
        return result.value

    @property
    def stats(self) -> SchedulerStats:
        return self.core.stats()


def mixed(prompts: Sequence[list[int]] = PROMPTS) -> list[EngineCoreRequest]:
    """Every other one greedy, the rest sampled."""
    return [
        make_request(i, prompt, max_tokens=MAX_TOKENS, temperature=float(i % 2), seed=1000 + i)
        for i, prompt in enumerate(prompts)
    ]


class RunnerContract:
    @pytest.fixture
    def model(self) -> Path:
        raise NotImplementedError("the model directory to test with")

    @pytest.fixture
    def make_runner(self) -> Callable[[EngineConfig], ModelRunner]:
        raise NotImplementedError("a function that makes a runner, not yet loaded")

    @pytest.fixture
    def make_engine(self, model: Path, make_runner: Callable[[EngineConfig], ModelRunner]) -> Callable[..., Engine]:
        def make(**settings: Any) -> Engine:
            config = EngineConfig(
                **{"model": str(model), "num_kv_blocks": 256, "max_model_len": 256, "block_size": 8} | settings
            )
            return Engine(make_runner(config), config)

        return make

    @pytest.fixture
    def alone(self, make_engine: Callable[..., Engine]) -> list[list[int]]:
        """The tokens of each of `mixed()`, on an engine that never has more than one request or a warm cache."""
        engine = make_engine(enable_prefix_caching=False)
        return [engine.run([request])[0] for request in mixed()]

    def test_the_model_info_is_plausible(self, make_engine: Callable[..., Engine]) -> None:
        info = make_engine().info
        assert (info.max_model_len, info.num_kv_blocks) == (256, 256)
        assert info.vocab_size > 100
        assert info.device
        assert all(0 <= token_id < info.vocab_size for token_id in info.eos_token_ids)

    def test_a_model_length_asked_for_must_fit_the_cache(self, make_engine: Callable[..., Engine]) -> None:
        with pytest.raises(ConfigError, match=r"--num-kv-blocks 9 .* 80 tokens"):
            make_engine(num_kv_blocks=9, block_size=8, max_model_len=80)
        assert make_engine(num_kv_blocks=9, block_size=8, max_model_len=None).core.max_model_len == 72

    def test_tokens_are_of_the_vocabulary_and_not_all_the_same(
        self, make_engine: Callable[..., Engine], alone: list[list[int]]
    ) -> None:
        vocab_size = make_engine().info.vocab_size
        assert all(0 <= token_id < vocab_size for tokens in alone for token_id in tokens)
        assert [len(tokens) for tokens in alone] == [MAX_TOKENS] * len(PROMPTS)
        assert len({tuple(tokens) for tokens in alone}) == len(PROMPTS)

    @pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 5}, {"max_num_seqs": 2, "block_size": 4}])
    def test_a_batch_and_its_cuts_change_no_token(
        self, make_engine: Callable[..., Engine], alone: list[list[int]], settings: dict[str, int]
    ) -> None:
        assert make_engine(**settings).run(mixed()) == alone

    def test_a_warm_prefix_cache_changes_no_token(self, make_engine: Callable[..., Engine], alone: list[list[int]]) -> None:
        engine = make_engine()
        engine.run(mixed())
        cold_hits = engine.stats.prefix_cache_hits
        assert engine.run(mixed()) == alone
        assert engine.stats.prefix_cache_hits > cold_hits + 3 * len(COMMON) // 2

    def test_equal_prompts_in_one_batch_share_their_blocks_and_change_no_token(
        self, make_engine: Callable[..., Engine], alone: list[list[int]]
    ) -> None:
        engine = make_engine()
        prompt, seed = PROMPTS[5], 1005
        requests = [make_request(i, prompt, max_tokens=MAX_TOKENS, temperature=1.0, seed=seed) for i in range(3)]
        assert engine.run(requests) == [alone[5]] * 3
        assert engine.stats.prefix_cache_hits == 2 * len(COMMON)

    def test_preemption_changes_no_token(self, make_engine: Callable[..., Engine], alone: list[list[int]]) -> None:
        engine = make_engine(num_kv_blocks=18, block_size=4, max_model_len=72, enable_prefix_caching=False)
        assert engine.run(mixed()) == alone
        assert engine.stats.num_preemptions > 0

    def test_a_request_continued_elsewhere_goes_on_as_it_would_have(
        self, make_engine: Callable[..., Engine], alone: list[list[int]]
    ) -> None:
        elsewhere = make_engine()
        for i, (prompt, tokens) in enumerate(zip(PROMPTS, alone, strict=True)):
            num_delivered = 1 + i % (MAX_TOKENS - 1)
            request = make_request(
                i, prompt + tokens[:num_delivered], num_original_prompt_tokens=len(prompt), max_tokens=MAX_TOKENS,
                temperature=float(i % 2), seed=1000 + i,
            )  # fmt: skip
            assert elsewhere.run([request]) == [tokens[num_delivered:]]

    @pytest.mark.parametrize("level", [1, 2])
    def test_sleep_changes_no_token(self, make_engine: Callable[..., Engine], alone: list[list[int]], level: int) -> None:
        engine = make_engine()
        assert engine.run(mixed()) == alone
        engine.call("sleep", level)
        engine.call("wake_up", ["weights"])
        engine.call("wake_up")
        assert engine.run(mixed()) == alone

    def test_weights_from_nowhere_are_refused_and_change_no_token(
        self, make_engine: Callable[..., Engine], alone: list[list[int]], tmp_path: Path
    ) -> None:
        engine = make_engine()
        with pytest.raises(AssertionError, match="nowhere"):
            engine.call("update_weights", str(tmp_path / "nowhere"), 1)
        assert engine.run(mixed()) == alone

    def test_its_own_weights_again_change_no_token(
        self, make_engine: Callable[..., Engine], alone: list[list[int]], model: Path
    ) -> None:
        engine = make_engine()
        assert engine.run(mixed()) == alone
        engine.call("update_weights", str(model), 1)
        assert engine.run(mixed()) == alone

    def test_a_profile_is_a_file(self, make_engine: Callable[..., Engine], tmp_path: Path) -> None:
        engine = make_engine(profile_dir=str(tmp_path))
        engine.call("start_profile")
        engine.run([make_request(1, [7, 8], max_tokens=2)])
        path = Path(engine.call("stop_profile"))
        assert path.parent == tmp_path
        assert path.stat().st_size > 0

    def test_the_seed_decides_sampled_tokens_and_no_greedy_one(self, make_engine: Callable[..., Engine]) -> None:
        engine = make_engine()
        sampled = engine.run([make_request(i, [7, 8], temperature=1.0, seed=i % 2) for i in range(4)])
        assert sampled[:2] == sampled[2:]
        assert sampled[0] != sampled[1]
        greedy = engine.run([make_request(i, [7, 8], seed=i) for i in range(2)])
        assert greedy[0] == greedy[1]

    def test_a_key_used_again_carries_nothing_over(self, make_engine: Callable[..., Engine], alone: list[list[int]]) -> None:
        engine = make_engine()
        for request, tokens in zip(mixed(), alone, strict=True):
            same_key = make_request(
                1, list(request.prompt_token_ids), max_tokens=MAX_TOKENS, temperature=request.sampling_params.temperature,
                seed=request.sampling_params.seed,
            )  # fmt: skip
            assert engine.run([same_key]) == [tokens]
