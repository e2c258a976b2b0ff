"""The sampler against a slow reference in float64, and on large samples."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cores.request import Request
from cores.runner.sampler import CHUNK, Sampler, TokenMasks, filtered_scores, shape_logits, token_logprobs, top_scores
from cores.sampling_params import SamplingParams
from cores.testing import make_request

VOCAB = 300
EOS = (2, 0)
CPU = torch.device("cpu")


def request(prompt: list[int] | None = None, output: list[int] | None = None, **params: Any) -> Request:
    prompt = prompt or [5, 6, 7]
    continued = make_request(1, prompt + (output or []), num_original_prompt_tokens=len(prompt), **params)
    return Request.from_engine_core_request(0, continued, max_model_len=1000, eos_token_ids=EOS)


def random_logits(seed: int, rows: int = 1, vocab: int = VOCAB) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 3, (rows, vocab)).astype(np.float32))


# --- the slow reference -----------------------------------------------------------------------------------------------------


def reference_probabilities(logits: np.ndarray, p: SamplingParams) -> np.ndarray:
    """Temperature, min-p, top-k and top-p, one after the other, each renormalised."""
    x = logits.astype(np.float64) / p.temperature
    probs = np.exp(x - x.max())
    probs /= probs.sum()
    if p.min_p > 0:
        probs[probs < p.min_p * probs.max()] = 0
    order = np.argsort(-probs)
    if p.top_k > 0:
        probs[order[p.top_k :]] = 0
    probs /= probs.sum()
    if p.top_p < 1:
        mass = 0.0
        for token in order:
            if mass >= p.top_p:
                probs[token] = 0
            mass += probs[token]
    return probs / probs.sum()


def reference_shape(logits: np.ndarray, r: Request) -> np.ndarray:
    p, x = r.sampling_params, logits.astype(np.float64)
    if p.allowed_token_ids is not None:
        x = np.array([value if token in p.allowed_token_ids else -np.inf for token, value in enumerate(x)])
    output = r.token_ids[r.num_original_prompt_tokens :]
    for *before, last in p.bad_words_token_ids:
        if output[len(output) - len(before) :] == before and len(before) <= len(output):
            x[last] = -np.inf
    if len(output) < p.min_tokens:
        for token in (*p.stop_token_ids, *(() if p.ignore_eos else EOS)):
            x[token] = -np.inf
    for token, bias in (p.logit_bias or {}).items():
        x[token] += bias
    for token in set(r.token_ids):
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token in set(output):
        x[token] -= p.presence_penalty + p.frequency_penalty * output.count(token)
    return x


filters = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.1, 0.7, 1.0, 2.5]),
        "top_k": st.sampled_from([0, -1, 1, 2, 40, VOCAB, 10_000]),
        "top_p": st.sampled_from([1.0, 0.999, 0.9, 0.5, 1e-9]),
        "min_p": st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    }
)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.lists(filters, min_size=1, max_size=6), st.integers(0, 1000))
def test_filters_agree_with_the_reference_for_any_mix_of_rows(rows: list[dict[str, Any]], seed: int) -> None:
    params = [SamplingParams(**row) for row in rows]
    logits = random_logits(seed, len(rows))
    got = filtered_scores(logits.clone(), params).double().softmax(dim=-1).numpy()
    for i, p in enumerate(params):
        np.testing.assert_allclose(got[i], reference_probabilities(logits[i].numpy(), p), rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("k", [1, 7, 64])
@pytest.mark.parametrize("num_more", [0, 1, CHUNK - 1])
def test_highest_scores_are_found_among_all_wherever_they_lie(k: int, num_more: int) -> None:
    scores = torch.randn(8, 512 * CHUNK + num_more).round_(decimals=1)  # with many equal ones
    scores[1, -40:] += 20  # all in the last chunks and behind them
    scores[2] = -math.inf
    scores[3, ::CHUNK] = 30
    assert torch.equal(top_scores(scores, k), scores.topk(k, dim=-1).values)


def test_a_nucleus_wider_than_the_first_look_is_found() -> None:
    flat = torch.linspace(0, 0.1, 5000)[None]
    kept = filtered_scores(flat.clone(), [SamplingParams(top_p=0.9)]).isfinite().sum().item()
    assert kept == np.count_nonzero(reference_probabilities(flat[0].numpy(), SamplingParams(top_p=0.9)))
    assert kept > 4000


shapes = st.fixed_dictionaries(
    {
        "presence_penalty": st.sampled_from([0.0, -2.0, 0.7]),
        "frequency_penalty": st.sampled_from([0.0, -1.0, 1.3]),
        "repetition_penalty": st.sampled_from([1.0, 0.5, 1.8]),
        "logit_bias": st.sampled_from([None, {5: 3.0, 17: -100.0}]),
        "allowed_token_ids": st.sampled_from([None, (5, 6, 17, 40, 2)]),
        "min_tokens": st.sampled_from([0, 3, 8]),
        "stop_token_ids": st.sampled_from([(), (40, 41)]),
        "ignore_eos": st.booleans(),
        "bad_words_token_ids": st.sampled_from([(), ((9,), (40, 41)), ((5, 6, 7), (6, 5), (1, 2, 3, 4, 5, 6, 7, 8))]),
    }
)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(shapes, st.lists(st.integers(0, 50), max_size=6), st.integers(0, 1000))
def test_shaping_agrees_with_the_reference(params: dict[str, Any], output: list[int], seed: int) -> None:
    r = request([5, 6, 5, 40], output, **params)
    row = random_logits(seed)[0]
    expected = reference_shape(row.numpy(), r)
    shape_logits(row, r)
    np.testing.assert_allclose(row.numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("output", "banned"),
    [
        ([], [9]),
        ([40], [9, 41]),
        ([41, 40], [9, 41]),
        ([40, 40], [9, 41]),
        ([5, 6], [9, 7]),
        ([6], [9]),  # the prompt ends in 5, but only the output counts
        ([40, 5], [9]),
    ],
)
def test_the_last_token_of_a_bad_word_is_banned_behind_the_others(output: list[int], banned: list[int]) -> None:
    row = torch.zeros(VOCAB)
    shape_logits(row, request([3, 5], output, bad_words_token_ids=((9,), (40, 41), (5, 6, 7))))
    assert sorted(torch.nonzero(row.isinf())[:, 0].tolist()) == sorted(banned)


def test_penalties_of_a_continued_request_count_what_was_generated_before_it_moved() -> None:
    row = torch.zeros(VOCAB)
    shape_logits(row, request([5, 6], [9, 9, 10], presence_penalty=1.0, frequency_penalty=0.5))
    assert [row[i].item() for i in (5, 6, 9, 10)] == [0, 0, -2.0, -1.5]


# --- choosing ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1e-7])
def test_greedy_takes_the_best_token(temperature: float) -> None:
    logits = random_logits(1, rows=5)
    expected = logits.argmax(dim=-1).tolist()
    output = Sampler(VOCAB, CPU).sample(logits, [request(temperature=temperature)] * 5)
    assert output.token_ids == expected
    assert not output.errors


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.5, "top_p": 0.8},
        {"top_k": 5},
        {"min_p": 0.1, "frequency_penalty": 0.8},
    ],
)
def test_draws_follow_the_distribution(params: dict[str, Any]) -> None:
    """Chi-square of 20,000 draws with as many seeds; as many positions would change what the penalties count."""
    num_draws, vocab = 20_000, 12
    logits = random_logits(3, vocab=vocab) / 2
    p = {"temperature": 1.0, "seed": 11} | params
    first = request([5], [3], **p)
    shaped = logits[0].clone()
    shape_logits(shaped, first)
    probs = reference_probabilities(shaped.numpy(), first.sampling_params)
    requests = [request([5], [3], **(p | {"seed": seed})) for seed in range(num_draws)]
    tokens = Sampler(vocab, CPU).sample(logits.repeat(num_draws, 1), requests).token_ids
    assert chi_square(tokens, probs) < limit(np.count_nonzero(probs) - 1)


def test_draws_along_one_seeded_sequence_follow_the_distribution() -> None:
    num_draws, vocab = 900, 8
    logits = random_logits(4, vocab=vocab) / 3
    requests = [request([5], [3] * position, temperature=1.0, seed=5) for position in range(num_draws)]
    tokens = Sampler(vocab, CPU).sample(logits.repeat(num_draws, 1), requests).token_ids
    assert chi_square(tokens, reference_probabilities(logits[0].numpy(), SamplingParams())) < limit(vocab - 1)


def chi_square(tokens: list[int], probs: np.ndarray) -> float:
    counts = np.bincount(tokens, minlength=len(probs))
    assert counts[probs == 0].sum() == 0, "a token outside the filters was drawn"
    expected = probs[probs > 0] * len(tokens)
    return float((((counts[probs > 0] - expected) ** 2) / expected).sum())


def limit(degrees: int) -> float:
    """Wilson and Hilferty's approximation of the chi-square that chance passes once in a million times."""
    return degrees * (1 - 2 / (9 * degrees) + 4.75 * math.sqrt(2 / (9 * degrees))) ** 3


def test_a_row_is_drawn_alike_whatever_is_beside_it() -> None:
    sampler, logits = Sampler(VOCAB, CPU), random_logits(8, rows=6)
    mixed = [
        request(temperature=1.0, seed=1),
        request(temperature=0.8, seed=2, top_p=0.9),
        request(temperature=0.0),
        request(temperature=1.3, seed=3, top_k=10, logprobs=2),
        request(temperature=1.0, seed=4, min_p=0.05, presence_penalty=0.5),
        request(temperature=1.0, seed=1, allowed_token_ids=(7, 8, 9)),
    ]
    together = sampler.sample(logits.clone(), mixed)
    for i, r in enumerate(mixed):
        alone = sampler.sample(logits[i : i + 1].clone(), [r])
        assert alone.token_ids[0] == together.token_ids[i]
        assert alone.logprobs.get(0) == together.logprobs.get(i)


def test_positions_count_from_the_original_prompt() -> None:
    sampler, logits = Sampler(VOCAB, CPU), torch.zeros(4, VOCAB)
    first, other_prompt, second, another_seed = sampler.sample(
        logits,
        [
            request([5], temperature=1.0, seed=1),
            request([6] * 30, temperature=1.0, seed=1),
            request([5], [9], temperature=1.0, seed=1),
            request([5], temperature=1.0, seed=2),
        ],
    ).token_ids
    assert first == other_prompt
    assert len({first, second, another_seed}) == 3


# --- errors of one request ----------------------------------------------------------------------------------------------------


def test_what_is_wrong_with_one_request_fails_that_request_alone() -> None:
    logits = random_logits(9, rows=7)
    logits[1, 17] = float("nan")
    logits[2, 17] = float("inf")
    expected = logits[6].argmax().item()
    requests = [
        request(temperature=1.0),
        request(temperature=1.0),
        request(),
        request(temperature=1.0, logit_bias={VOCAB: 1.0}),
        request(allowed_token_ids=EOS, min_tokens=1, ignore_eos=False),
        request(allowed_token_ids=(-1,), logprobs=1),
        request(),
    ]
    output = Sampler(VOCAB, CPU).sample(logits, requests)
    assert sorted(output.errors) == [1, 2, 3, 4, 5]
    assert "not finite" in output.errors[1]
    assert "not finite" in output.errors[2]
    assert "logit_bias must be at least 0 and below the vocabulary size of 300, got [300]" in output.errors[3]
    assert "leave no token" in output.errors[4]
    assert "allowed_token_ids" in output.errors[5]
    assert output.logprobs == {}
    assert len(output.token_ids) == 7
    assert output.token_ids[6] == expected


def test_nothing_to_sample_is_nothing() -> None:
    assert Sampler(VOCAB, CPU).sample(torch.empty(0, VOCAB), []).token_ids == []


# --- log-probabilities --------------------------------------------------------------------------------------------------------


def test_logprobs_are_the_models_own_before_any_shaping() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.2, 0.3, 0.4]])).repeat(2, 1)
    banned = request(logprobs=2, logit_bias={3: -100.0})
    output = Sampler(4, CPU).sample(logits, [request(), banned])
    assert output.token_ids == [3, 2]
    assert list(output.logprobs) == [1]
    entry = output.logprobs[1]
    assert (entry.rank, entry.top_token_ids) == (2, (3, 2))
    assert [math.exp(x) for x in (entry.logprob, *entry.top_logprobs)] == pytest.approx([0.3, 0.4, 0.3])


@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.integers(0, 1000), st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5), st.integers(0, 20))
def test_log_probabilities_and_ranks_agree_with_the_reference(seed: int, chosen: list[int], num_top: int) -> None:
    logits = random_logits(seed, len(chosen))
    logits[:, 7] = logits[:, 11]  # equals share a rank
    for row, token, entry in zip(
        logits, chosen, token_logprobs(logits, torch.tensor(chosen), [num_top] * len(chosen)), strict=True
    ):
        x = row.numpy().astype(np.float64)
        expected = x - np.log(np.exp(x - x.max()).sum()) - x.max()
        order = np.argsort(-expected, kind="stable")
        assert entry.rank == 1 + np.count_nonzero(x > x[token])
        assert entry.logprob == pytest.approx(expected[token], abs=1e-5)
        assert entry.top_logprobs == pytest.approx(expected[order[:num_top]], abs=1e-5)
        assert len(set(entry.top_token_ids)) == num_top


def test_a_mask_comes_before_everything_else() -> None:
    logits = random_logits(12, rows=4)
    logits[3, 40] = float("nan")
    free, bits = logits[2].argmax().item(), torch.zeros(3, 40, dtype=torch.uint8)
    bits[0, 1], bits[1, 5], bits[2, 2] = 0b0000_0100, 0b1000_0001, 0b1  # tokens 10; 40 and 47; 16
    requests = [
        request(temperature=0.0, logit_bias={50: 100.0}, logprobs=1),
        request(temperature=1.0, allowed_token_ids=(40, 5), seed=3),
        request(temperature=0.0),
        request(temperature=0.0),
    ]
    output = Sampler(VOCAB, CPU).sample(logits, requests, TokenMasks([0, 1, 3], bits))
    assert output.token_ids[:3] == [10, 40, free]
    assert output.logprobs[0].rank > 1, "log-probabilities know no mask"
    assert list(output.errors) == [3]
    assert "not finite" in output.errors[3], "a mask hides no broken logits"


def test_each_row_gets_as_many_alternatives_as_it_asked_for() -> None:
    rows = token_logprobs(random_logits(2, rows=3), torch.tensor([0, 1, 2]), [0, 5, 1])
    assert [len(row.top_token_ids) for row in rows] == [0, 5, 1]
    assert [len(row.top_logprobs) for row in rows] == [0, 5, 1]
    wide = token_logprobs(random_logits(2, vocab=3), torch.tensor([0]), [20])
    assert len(wide[0].top_token_ids) == 3
