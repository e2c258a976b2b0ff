"""What the model thought of each token of a prompt, against transformers' own logits in float64."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from cores.messages import EngineCoreRequest, PromptLogprobsChunk
from cores.sampling_params import StructuredOutputKind, StructuredOutputs
from cores.testing import make_request
from tests.cores.runner.torch_engine import Engine

PROMPT = [3 + (i * i + 5 * i) % 470 for i in range(70)]
NUM_TOP = 3


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> np.ndarray:
    """[len(PROMPT), vocabulary] float64: row p is about the token behind position p."""
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, attn_implementation="eager")
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT])).logits[0].double()
    return logits.log_softmax(dim=-1).numpy()


class Collected:
    """What an engine said of one request, in the order in which it did."""

    def __init__(self) -> None:
        self.chunks: list[PromptLogprobsChunk] = []
        self.token_ids: list[int] = []


def run(engine: Engine, *requests: EngineCoreRequest) -> dict[int, Collected]:
    collected = {request.handle: Collected() for request in requests}
    for request in requests:
        engine.core.add_request(0, request)
    while engine.core.has_work:
        for outputs in engine.core.step().values():
            tokens = iter(outputs.token_ids)
            for row, handle in enumerate(outputs.handles):
                mine = collected[handle]
                if row in outputs.prompt_logprobs:
                    assert not mine.token_ids, "log-probabilities of the prompt after a token"
                    mine.chunks.append(outputs.prompt_logprobs[row])
                mine.token_ids += [next(tokens) for _ in range(1 if outputs.counts is None else outputs.counts[row])]
        engine.core.check_invariants()
    return collected


def asking(handle: int = 1, prompt: Sequence[int] = PROMPT, num_top: int = NUM_TOP, **params: Any) -> EngineCoreRequest:
    return make_request(handle, list(prompt), prompt_logprobs=num_top, **params)


def check(chunks: list[PromptLogprobsChunk], reference: np.ndarray, prompt: Sequence[int] = PROMPT) -> None:
    position = 1
    for chunk in chunks:
        assert chunk.start == position
        for i, (logprob, rank) in enumerate(zip(chunk.logprobs, chunk.ranks, strict=True)):
            expected, token = reference[position - 1], prompt[position]
            top = slice(i * chunk.num_top, (i + 1) * chunk.num_top)
            assert logprob == pytest.approx(expected[token], abs=2e-4)
            assert rank == 1 + np.count_nonzero(expected > expected[token])
            assert chunk.top_token_ids[top].tolist() == np.argsort(-expected)[: chunk.num_top].tolist()
            assert chunk.top_logprobs[top].tolist() == pytest.approx(np.sort(expected)[::-1][: chunk.num_top], abs=2e-4)
            position += 1
    assert position == len(prompt)


@pytest.mark.parametrize(
    ("settings", "num_chunks"),
    [({}, 1), ({"max_num_batched_tokens": 16}, 5), ({"block_size": 4, "max_num_batched_tokens": 23, "num_kv_blocks": 90}, 3)],
)
def test_they_are_the_model_s_however_the_prompt_is_cut(
    make_engine: Callable[..., Engine], reference: np.ndarray, settings: dict[str, int], num_chunks: int
) -> None:
    collected = run(make_engine(**settings), asking())[1]
    assert len(collected.chunks) == num_chunks
    check(collected.chunks, reference)


def test_a_hot_prefix_is_computed_again_for_them_and_the_tokens_stay_the_same(
    make_engine: Callable[..., Engine], reference: np.ndarray
) -> None:
    engine = make_engine()
    plain = run(engine, make_request(1, PROMPT))[1]
    collected = run(engine, asking(2), make_request(3, PROMPT))
    check(collected[2].chunks, reference)
    assert collected[2].token_ids == collected[3].token_ids == plain.token_ids
    assert engine.core.stats().prefix_cache_hits == 64  # of the one that asked for nothing


def test_in_a_batch_each_gets_as_many_as_it_asked_for(make_engine: Callable[..., Engine], reference: np.ndarray) -> None:
    others = [make_request(i, [5 + i, 6, 7], temperature=1.0) for i in range(10, 14)]
    requests = [others[0], asking(1, num_top=0), *others[1:], asking(2, PROMPT[:20], num_top=20), asking(3, PROMPT[:1])]
    collected = run(make_engine(max_num_batched_tokens=40), *requests)
    check(collected[1].chunks, reference)
    check(collected[2].chunks, reference, PROMPT[:20])
    assert [chunk.num_top for chunk in collected[2].chunks] == [20] * len(collected[2].chunks)
    assert collected[3].chunks == [], "nothing comes before the only token"
    assert all(not collected[i].chunks and len(collected[i].token_ids) == 8 for i in range(10, 14))


def test_a_preempted_request_gives_them_once(make_engine: Callable[..., Engine], reference: np.ndarray) -> None:
    engine = make_engine(num_kv_blocks=12, block_size=8, enable_prefix_caching=False, max_num_batched_tokens=16)
    collected = run(engine, make_request(9, PROMPT[:20], max_tokens=60), asking(1, PROMPT[:60], max_tokens=16))
    assert engine.core.stats().num_preemptions > 0
    check(collected[1].chunks, reference, PROMPT[:60])


def test_only_the_original_prompt_of_a_continued_request_counts(
    make_engine: Callable[..., Engine], reference: np.ndarray
) -> None:
    moved = asking(1, PROMPT[:50], num_original_prompt_tokens=30, max_tokens=30)
    collected = run(make_engine(), moved)[1]
    check(collected.chunks, reference, PROMPT[:30])
    assert len(collected.token_ids) == 10


def test_together_with_a_grammar_that_takes_its_time(make_engine: Callable[..., Engine], reference: np.ndarray) -> None:
    wanted = StructuredOutputs(StructuredOutputKind.REGEX, "[ab]{4}")
    collected = run(make_engine(), asking(1, structured_outputs=wanted, logprobs=1))[1]
    check(collected.chunks, reference)
    assert len(collected.token_ids) >= 1


def test_many_rows_are_worked_through_in_slices(make_engine: Callable[..., Engine]) -> None:
    prompt = [3 + (i * 7 + i * i) % 470 for i in range(300)]
    whole = run(make_engine(), asking(1, prompt))[1].chunks
    pieces = run(make_engine(max_num_batched_tokens=32), asking(1, prompt))[1].chunks
    assert len(whole) == 1
    joined = array("I", [token_id for chunk in pieces for token_id in chunk.top_token_ids])
    assert joined == whole[0].top_token_ids
