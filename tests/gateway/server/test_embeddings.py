"""`POST /v1/embeddings`, as OpenAI's clients call it."""

from __future__ import annotations

import base64
from array import array
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from gateway.errors import OverloadedError
from tests.gateway.conftest import Served


@pytest.fixture
async def embedder(serve: Any) -> Served:
    served: Served = await serve()
    served.engine.embeds(4, (2, 4))
    return served


@pytest.fixture
async def client(embedder: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=embedder.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_openais_client_gets_its_vectors_in_order(client: openai.AsyncOpenAI) -> None:
    # It asks for base64 unless told otherwise, and decodes it.
    answer = await client.embeddings.create(model="fake", input=["Hi", "Hello"])
    assert [item.index for item in answer.data] == [0, 1]
    assert [item.embedding for item in answer.data] == [[3.0, 4.0, 5.0, 6.0], [6.0, 7.0, 8.0, 9.0]]
    assert (answer.object, answer.model) == ("list", "fake")
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (9, 9)


@pytest.mark.parametrize(
    ("given", "lengths"),
    [
        ("Hi", [3]),
        (["Hi"], [3]),
        ([72, 105], [2]),
        ([[72, 105], [72]], [2, 1]),
    ],
    ids=["text", "texts", "token ids", "lists of token ids"],
)
async def test_an_input_is_one_prompt_or_several_as_text_or_ids(embedder: Served, given: Any, lengths: list[int]) -> None:
    status, body, response = await embedder.post("/v1/embeddings", {"input": given})
    assert status == 200
    assert [item["embedding"][0] for item in body["data"]] == lengths
    assert body["usage"] == {"prompt_tokens": sum(lengths), "total_tokens": sum(lengths)}
    assert response.headers["X-Gateway-Rank"] == "0"


async def test_base64_holds_the_same_numbers_as_float(embedder: Served) -> None:
    _, floats, _ = await embedder.post("/v1/embeddings", {"input": "Hi", "encoding_format": "float"})
    _, packed, _ = await embedder.post("/v1/embeddings", {"input": "Hi", "encoding_format": "base64"})
    numbers = array("f", base64.b64decode(packed["data"][0]["embedding"]))
    assert numbers.tolist() == floats["data"][0]["embedding"]


async def test_a_vector_can_be_cut_to_a_size_that_the_model_knows(embedder: Served) -> None:
    _, body, _ = await embedder.post("/v1/embeddings", {"input": "Hi", "dimensions": 2})
    assert body["data"][0]["embedding"] == [3.0, 4.0]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({}, "input", "input is required"),
        ({"input": []}, "input", "got an empty list"),
        ({"input": ["Hi", 5]}, "input", "got a mixed list"),
        ({"input": [[5], []]}, "input", r"input[1] must not be empty"),
        ({"input": ["Hi", "x" * 1000]}, "input", "input[1]: the prompt has 1001 tokens"),
        ({"input": "x" * 1000}, "input", "input: the prompt has 1001 tokens"),
        ({"input": ["x"] * 2049}, "input", "at most 2048 inputs are allowed, got 2049"),
        ({"input": [-1]}, "input", "input: prompt: token ids must be integers from 0"),
        ({"input": "Hi", "dimensions": 3}, "dimensions", "one of 2, 4"),
        ({"input": "Hi", "dimensions": 0}, "dimensions", "got 0"),
        ({"input": "Hi", "encoding_format": "int8"}, "encoding_format", "float, base64"),
        ({"input": "Hi", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "not supported"),
        ({"input": "Hi", "model": "other"}, "model", "not served here"),
    ],
)
async def test_what_is_wrong_is_named(embedder: Served, fields: dict[str, Any], param: str, words: str) -> None:
    status, body, _ = await embedder.post("/v1/embeddings", fields)
    assert (status, body["error"]["param"]) == (404 if param == "model" else 400, param)
    assert words in body["error"]["message"]


async def test_each_kind_of_model_says_what_it_is_for(serve: Any, embedder: Served) -> None:
    writer = await serve()
    status, body, _ = await writer.post("/v1/embeddings", {"input": "Hi"})
    assert (status, body["error"]["message"]) == (400, "model 'fake' generates text and makes no embeddings")
    for path, fields in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        status, body, _ = await embedder.post(path, fields)
        assert (status, body["error"]["message"]) == (
            400,
            "model 'fake' makes embeddings (/v1/embeddings) and generates no text",
        )


async def test_a_full_server_says_so(embedder: Served) -> None:
    embedder.engine.overload = OverloadedError("the server is full")
    status, body, response = await embedder.post("/v1/embeddings", {"input": ["Hi", "Hello"]})
    assert (status, body["error"]["code"]) == (503, "overloaded")
    assert "Retry-After" in response.headers
