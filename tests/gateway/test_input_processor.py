"""What is refused, in which words, and what is filled in."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from cores.pooling_params import PoolingParams
from cores.sampling_params import SamplingParams, StructuredOutputKind, StructuredOutputs
from cores.testing import make_tiny_tokenizer
from gateway.engine_client import ModelConfig
from gateway.errors import InvalidRequestError
from gateway.input_processor import InputProcessor, ProcessedInput
from gateway.renderer import Renderer
from gateway.tokenizer import Tokenizer

TOKENIZER = Tokenizer(make_tiny_tokenizer())
VOCAB_SIZE = TOKENIZER.vocab_size
MAX_MODEL_LEN = 20


def make_processor(seed: int = 0) -> InputProcessor:
    model = ModelConfig("tiny", "tiny", MAX_MODEL_LEN, VOCAB_SIZE, (2,), created=0)
    return InputProcessor(model, Renderer(TOKENIZER, None), random.Random(seed))


async def process(prompt: Any = (5, 6, 7), **params: Any) -> ProcessedInput:
    return await make_processor().process(prompt, SamplingParams(**params))


async def refusal(prompt: Any = (5, 6, 7), **params: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        await process(prompt, **params)
    return caught.value


async def test_text_is_tokenized_and_kept() -> None:
    processed = await process("the way", max_tokens=5)
    assert (processed.prompt_text, processed.prompt_token_ids) == ("the way", TOKENIZER.encode("the way", True))
    assert processed.sampling_params.max_tokens == 5


async def test_token_ids_are_taken_as_they_are() -> None:
    ids = [5, 6, VOCAB_SIZE - 1]
    processed = await process(ids)
    assert (processed.prompt_text, processed.prompt_token_ids) == (None, ids)
    assert processed.prompt_token_ids is not ids


async def test_without_max_tokens_the_rest_of_the_context_is_for_the_output() -> None:
    assert (await process([5] * 3)).sampling_params.max_tokens == MAX_MODEL_LEN - 3
    assert (await process([5] * (MAX_MODEL_LEN - 1))).sampling_params.max_tokens == 1


async def test_a_seed_is_drawn_once_and_only_when_there_is_none() -> None:
    params = SamplingParams()
    seeds = [(await make_processor(seed=4).process([5], params)).sampling_params.seed for _ in range(2)]
    assert seeds[0] is not None
    assert seeds[0] == seeds[1]
    assert 0 <= seeds[0] < 2**63
    assert params.seed is None, "the caller's parameters were changed"
    assert (await process(seed=7)).sampling_params.seed == 7


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt must not be empty"),
        ([], "the prompt must not be empty"),
        ([5] * 20, "the prompt has 20 tokens, but the model's context length is 20 tokens"),
        ("!" * 21, "the prompt has 21 tokens, but the model's context length is 20 tokens"),
        ("!" * 10_000, "the prompt has 10000 characters, of which at most 260 can fit"),
        ([5, VOCAB_SIZE], f"prompt: token ids must be integers from 0 to {VOCAB_SIZE - 1}, got {VOCAB_SIZE}"),
        ([-1], f"prompt: token ids must be integers from 0 to {VOCAB_SIZE - 1}, got -1"),
        ([5, "6"], f"prompt: token ids must be integers from 0 to {VOCAB_SIZE - 1}, got '6'"),
        ([True], f"prompt: token ids must be integers from 0 to {VOCAB_SIZE - 1}, got True"),
    ],
)
async def test_prompts_that_are_refused(prompt: Any, message: str) -> None:
    error = await refusal(prompt)
    assert re.match(re.escape(message), str(error)), str(error)
    assert (error.status, error.param) == (400, "prompt")


@pytest.mark.parametrize(
    ("params", "param", "message"),
    [
        ({"temperature": -1.0}, "temperature", "temperature must be between 0.0 and 100.0, got -1.0"),
        ({"max_tokens": 18}, "max_tokens", "context length is 20 tokens, but 21 were asked for: 3 in the prompt and 18"),
        ({"min_tokens": 18}, "min_tokens", "min_tokens must be at most 17, what the context length leaves"),
        ({"stop_token_ids": (VOCAB_SIZE,)}, "stop_token_ids", f"got {VOCAB_SIZE}"),
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias", f"got {VOCAB_SIZE}"),
        ({"allowed_token_ids": (1, VOCAB_SIZE)}, "allowed_token_ids", f"got {VOCAB_SIZE}"),
        ({"allowed_token_ids": ()}, "allowed_token_ids", "must not be empty"),
        ({"bad_words": ("",)}, "bad_words", "each must have between 1 and 64 characters, got 0"),
    ],
)
async def test_parameters_that_are_refused(params: dict[str, Any], param: str, message: str) -> None:
    error = await refusal(**params)
    assert message in str(error)
    assert error.param == param


async def test_a_context_that_the_kv_cache_bounds_says_so() -> None:
    model = ModelConfig("tiny", "tiny", MAX_MODEL_LEN, VOCAB_SIZE, (2,), created=0, num_kv_tokens=MAX_MODEL_LEN)
    processor = InputProcessor(model, Renderer(TOKENIZER, None), random.Random(0))
    why = r"context length is 20 tokens \(all that the KV cache holds\)"
    with pytest.raises(InvalidRequestError, match=f"the prompt has 20 tokens, but the model's {why}, at least one"):
        await processor.process([5] * 20, SamplingParams())
    with pytest.raises(InvalidRequestError, match=f"{why}, but 25 were asked for"):
        await processor.process([5] * 15, SamplingParams(max_tokens=10))


async def test_bad_words_are_spelled_at_the_start_of_a_text_and_behind_a_space() -> None:
    params = (await process(bad_words=("Paris", " way", "  "))).sampling_params
    spellings = [TOKENIZER.encode(text, False) for text in ("Paris", " Paris", "way", " way", "  ", "   ")]
    assert params.bad_words_token_ids == tuple(map(tuple, spellings))
    assert len(params.bad_words_token_ids[1]) == 1, "a word of the vocabulary"
    assert (await process(bad_words=("way", " way"))).sampling_params.bad_words_token_ids == tuple(map(tuple, spellings[2:4]))


async def test_a_grammar_is_checked_once_everything_else_is_right() -> None:
    checked = []

    async def check(wanted: StructuredOutputs) -> None:
        checked.append(wanted)

    model = ModelConfig("tiny", "tiny", MAX_MODEL_LEN, VOCAB_SIZE, (2,), created=0)
    processor = InputProcessor(model, Renderer(TOKENIZER, None), random.Random(0), check_grammar=check)
    wanted = StructuredOutputs(StructuredOutputKind.REGEX, "a+")
    with pytest.raises(InvalidRequestError):
        await processor.process([5] * 20, SamplingParams(structured_outputs=wanted))
    assert checked == []
    await processor.process([5], SamplingParams(structured_outputs=wanted))
    await processor.process([5], SamplingParams())
    assert checked == [wanted]


async def test_a_context_that_is_too_long_has_openais_code() -> None:
    assert (await refusal([5] * 20)).code == "context_length_exceeded"
    assert (await refusal(max_tokens=18)).code == "context_length_exceeded"


async def test_bad_parameters_are_refused_before_the_prompt_is_tokenized() -> None:
    assert (await refusal("\ud800", temperature=-1.0)).param == "temperature"


# --- prompts that become vectors --------------------------------------------------------------------------------------


def make_embedding_processor(dimensions: tuple[int, ...] = ()) -> InputProcessor:
    model = ModelConfig(
        "tiny", "tiny", MAX_MODEL_LEN, VOCAB_SIZE, (2,), created=0, supported_tasks=("embed",), embedding_size=32,
        embedding_dimensions=dimensions,
    )  # fmt: skip
    return InputProcessor(model, Renderer(TOKENIZER, None), random.Random(0))


async def test_a_prompt_for_a_vector_may_fill_the_context() -> None:
    processor = make_embedding_processor()
    assert len((await processor.process_pooling([5] * MAX_MODEL_LEN, PoolingParams())).prompt_token_ids) == MAX_MODEL_LEN
    with pytest.raises(InvalidRequestError, match=r"has 21 tokens, but the model's context length is 20 tokens$"):
        await processor.process_pooling([5] * (MAX_MODEL_LEN + 1), PoolingParams())


@pytest.mark.parametrize(
    ("supported", "wanted", "message"),
    [
        ((), 32, None),
        ((), 8, "dimensions must be one of 32 with this model, got 8"),
        ((8, 16), 16, None),
        ((8, 16), 12, "dimensions must be one of 8, 16 with this model, got 12"),
        (tuple(range(1, 33)), 12, None),
        (tuple(range(1, 33)), 33, "dimensions must be from 1 to 32 with this model, got 33"),
    ],
)
async def test_vectors_are_cut_only_where_the_model_was_trained_for_it(
    supported: tuple[int, ...], wanted: int, message: str | None
) -> None:
    processing = make_embedding_processor(supported).process_pooling([5], PoolingParams(dimensions=wanted))
    if message is None:
        await processing
    else:
        with pytest.raises(InvalidRequestError, match=message) as caught:
            await processing
        assert caught.value.param == "dimensions"
