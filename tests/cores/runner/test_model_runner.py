"""The torch engine computes what transformers computes, however a batch is cut, cached or preempted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from cores.testing import make_request

NUM_TOKENS = 24
PROMPT_LENGTHS = (1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 48, 64, 65, 100, 150, 200, 16, 299)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Of mixed length around block boundaries; some begin alike."""
    common = [3 + i * 37 % 400 for i in range(48)]
    own = [[3 + (n * 7919 + i * i + 13 * i) % 470 for i in range(n)] for n in PROMPT_LENGTHS]
    return own + [common + [100 + i] * (i + 1) for i in range(4)]


@pytest.fixture(scope="session")
def expected(prompts: list[list[int]], generate: Callable[[Sequence[int]], list[int]]) -> list[list[int]]:
    outputs = [generate(prompt) for prompt in prompts]
    lengths = [len(output) for output in outputs]
    assert max(lengths) == NUM_TOKENS
    assert min(lengths) < NUM_TOKENS, "at least one must end with EOS"
    assert len({token for output in outputs for token in output}) > 100, "a model that repeats itself tests nothing"
    return outputs


def greedy(prompts: list[list[int]]) -> list[Any]:
    return [make_request(i, prompt, max_tokens=NUM_TOKENS, ignore_eos=False) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="whole prompts"),
        pytest.param({"max_num_batched_tokens": 64}, id="chunked prefill"),
        pytest.param({"max_num_batched_tokens": 23, "block_size": 4, "num_kv_blocks": 1024}, id="tiny chunks and blocks"),
        pytest.param({"max_num_seqs": 1}, id="one at a time"),
    ],
)
@pytest.mark.parametrize("caching", [True, False], ids=["prefix cache", "no prefix cache"])
def test_greedy_output_equals_transformers_generate(
    make_engine: Callable[..., Any],
    prompts: list[list[int]],
    expected: list[list[int]],
    settings: dict[str, int],
    caching: bool,
) -> None:
    engine = make_engine(enable_prefix_caching=caching, **settings)
    assert list(engine.run(greedy(prompts)).values()) == expected


def test_a_hot_prefix_cache_changes_no_token(
    make_engine: Callable[..., Any], prompts: list[list[int]], expected: list[list[int]]
) -> None:
    engine = make_engine(max_num_batched_tokens=64)
    assert list(engine.run(greedy(prompts)).values()) == expected
    cold_hits = engine.core.stats().prefix_cache_hits
    assert list(engine.run(greedy(prompts)).values()) == expected
    assert engine.core.stats().prefix_cache_hits > cold_hits + sum(PROMPT_LENGTHS) // 2


def test_preemption_changes_no_token(
    make_engine: Callable[..., Any], prompts: list[list[int]], expected: list[list[int]]
) -> None:
    short = [i for i, prompt in enumerate(prompts) if len(prompt) < 60]
    # Every prompt fits at once, but not with its output.
    engine = make_engine(num_kv_blocks=52, block_size=8, enable_prefix_caching=False, max_num_batched_tokens=512)
    tokens = engine.run(greedy([prompts[i] for i in short]))
    assert engine.core.stats().num_preemptions > 0
    assert list(tokens.values()) == [expected[i] for i in short]


def test_steps_without_a_sample_return_no_tokens(make_engine: Callable[..., Any]) -> None:
    engine = make_engine(max_num_batched_tokens=16)
    engine.core.add_request(0, make_request(1, 40, max_tokens=1))
    assert [len(engine.core.step()) for _ in range(3)] == [0, 0, 1]


SAMPLED: dict[str, Any] = {"temperature": 1.2, "top_k": 50, "top_p": 0.95, "seed": 7, "max_tokens": 40}
PENALISED = SAMPLED | {"frequency_penalty": 0.5, "presence_penalty": 0.3, "repetition_penalty": 1.1, "min_tokens": 30}


# Each of these looks at what was generated: before its min_tokens no stop token comes, and no word of two tokens is completed.
FORBIDDEN = SAMPLED | {
    "bad_words_token_ids": (*((i, j) for i in range(3, 483, 5) for j in range(3, 483, 7)), (11,)),
    "stop_token_ids": tuple(range(100, 484)),
    "min_tokens": 39,
    "logit_bias": {50: 4.0, 51: -100.0},
}


@pytest.mark.parametrize("params", [SAMPLED, PENALISED, FORBIDDEN], ids=["sampled", "with penalties", "with bad words"])
def test_a_seeded_request_repeats_itself_in_a_batch_and_when_continued_elsewhere(
    make_engine: Callable[..., Any], params: dict[str, Any]
) -> None:
    prompt = [3 + i * 29 % 470 for i in range(50)]
    alone = make_engine().run([make_request(1, prompt, **params)])[1]
    assert len(alone) == 40

    others = [make_request(i, 5 * i, temperature=1.0, max_tokens=20 + i) for i in range(2, 33)]
    batched = make_engine(max_num_batched_tokens=128).run([*others, make_request(1, prompt, **params)])[1]
    assert batched == alone

    moved = make_request(9, prompt + alone[:20], num_original_prompt_tokens=len(prompt), **params)
    assert make_engine().run([moved])[9] == alone[20:]


def test_another_seed_is_another_text(make_engine: Callable[..., Any]) -> None:
    engine = make_engine()
    tokens = engine.run([make_request(i, [5, 6, 7], temperature=1.0, seed=i, max_tokens=12) for i in range(4)])
    assert len({tuple(t) for t in tokens.values()}) == 4


def test_load_reports_what_the_model_is(make_engine: Callable[..., Any]) -> None:
    info = make_engine().info
    assert (info.device, info.max_model_len, info.eos_token_ids, info.num_kv_blocks) == ("cpu", 2048, (2, 0), 256)
    assert info.vocab_size == 484
