"""The official client library against the server."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from gateway.errors import EngineDeadError, EngineGenerateError, OverloadedError
from gateway.testing import FakeRequest, says, waits

QUESTION: Any = [{"role": "user", "content": "Hello?"}]
PROMPT_LENGTH = len("<user>Hello?<assistant>")
ANSWER = "Hello, big world"


async def test_models_are_listed_and_found_by_name(serve: Any) -> None:
    served = await serve(served_model_name=("smol", "org/smol"))
    async with served.openai() as client:
        models = [model async for model in await client.models.list()]
        assert [model.id for model in models] == ["smol", "org/smol"]
        assert (await client.models.retrieve("org/smol")).id == "org/smol"
        with pytest.raises(openai.NotFoundError) as error:
            await client.models.retrieve("gpt-9")
        assert error.value.code == "model_not_found"
        assert "'smol', 'org/smol'" in error.value.message


async def test_chat_answers_whole(serve: Any) -> None:
    served = await serve()
    async with served.openai() as client:
        answer = await client.chat.completions.create(model="fake", messages=QUESTION)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", ANSWER, "stop")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (PROMPT_LENGTH, len(ANSWER))
    assert answer.usage.total_tokens == PROMPT_LENGTH + len(ANSWER)
    assert answer.model == "fake"


async def test_streamed_chat_joins_to_the_whole_answer(serve: Any) -> None:
    served = await serve()
    async with served.openai() as client:
        stream = await client.chat.completions.create(
            model="fake", messages=QUESTION, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    with_choice = [chunk for chunk in chunks if chunk.choices]
    assert with_choice[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in with_choice) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in with_choice] == [None, None, None, "stop"]
    assert [chunk.usage for chunk in with_choice] == [None] * 4
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(ANSWER)
    assert len({chunk.id for chunk in chunks}) == 1


async def test_n_choices_stream_apart_and_count_the_prompt_once(serve: Any) -> None:
    def script(request: FakeRequest) -> None:
        for index, text in [(0, "a"), (2, "c"), (0, "A"), (1, "b")]:
            request.put(text, index)
        for index in (2, 0, 1):
            request.put("!", index, finish_reason="length")

    served = await serve(script)
    async with served.openai() as client:
        stream = await client.chat.completions.create(
            model="fake", messages=QUESTION, n=3, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        whole = await client.chat.completions.create(model="fake", messages=QUESTION, n=3)
    texts, reasons = ["", "", ""], [0, 0, 0]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] += choice.finish_reason is not None
    assert texts == ["aA!", "b!", "c!"] == [choice.message.content for choice in whole.choices]
    assert reasons == [1, 1, 1]
    assert chunks[-1].usage == whole.usage
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (PROMPT_LENGTH, 7)


async def test_completions_take_all_four_kinds_of_prompt(serve: Any) -> None:
    served = await serve(says("yes"))
    async with served.openai() as client:
        for prompt, expected_ids in [
            ("ab", [[1, 97, 98]]),
            (["a", "b"], [[1, 97], [1, 98]]),
            ([97, 98], [[97, 98]]),
            ([[97], [98]], [[97], [98]]),
        ]:
            served.engine.requests.clear()
            answer = await client.completions.create(model="fake", prompt=prompt)
            assert [request.prompt_token_ids for request in served.engine.requests] == expected_ids
            assert [choice.text for choice in answer.choices] == ["yes"] * len(expected_ids)
            assert answer.usage.prompt_tokens == sum(map(len, expected_ids))


async def test_streamed_completions_of_several_prompts_keep_their_indexes(serve: Any) -> None:
    def script(request: FakeRequest) -> None:
        for index in range(2):
            request.put(f"{request.prompt_text}{index}", index, finish_reason="stop")

    served = await serve(script)
    async with served.openai() as client:
        stream = await client.completions.create(model="fake", prompt=["x", "y"], n=2, echo=True, stream=True)
        texts = [""] * 4
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["xx0", "xx1", "yy0", "yy1"]


async def test_errors_have_the_clients_own_exception_types(serve: Any) -> None:
    served = await serve(waits)
    async with served.openai() as client:

        async def fails_with(error: Exception) -> openai.APIStatusError:
            served.engine.script = lambda request: request.fail(error)
            with pytest.raises(openai.APIStatusError) as caught:
                await client.chat.completions.create(model="fake", messages=QUESTION, stream=True)
            return caught.value

        assert (await fails_with(EngineGenerateError("bad logits"))).status_code == 500
        overloaded = await fails_with(OverloadedError("full", retry_after_s=2.5))
        assert (overloaded.status_code, overloaded.response.headers["Retry-After"]) == (503, "3")
        dead = await fails_with(EngineDeadError("rank 1 died: out of memory", rank=1))
        assert dead.status_code == 503
        assert "rank 1 died: out of memory" in dead.message
        assert "Retry-After" in dead.response.headers


async def test_an_error_in_a_stream_is_raised_after_the_tokens_before_it(serve: Any) -> None:
    def script(request: FakeRequest) -> None:
        request.put("Hel")
        request.fail(EngineDeadError("rank 0 died"))

    served = await serve(script)
    async with served.openai() as client:
        stream = await client.chat.completions.create(model="fake", messages=QUESTION, stream=True)
        texts = []

        async def read() -> None:
            async for chunk in stream:
                texts.append(chunk.choices[0].delta.content)

        with pytest.raises(openai.APIError, match="rank 0 died"):
            await read()
    assert texts == ["", "Hel"]


async def test_a_key_is_needed_when_one_is_set(serve: Any) -> None:
    served = await serve(api_key=("secret", "other"))
    async with served.openai("wrong") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
    async with served.openai("other") as client:
        assert (await client.models.list()).data


async def test_requests_of_one_key_are_one_tenants(serve: Any) -> None:
    served = await serve(api_key=("secret", "other"))
    for key in ("secret", "other", "secret"):
        async with served.openai(key) as client:
            await client.completions.create(model="fake", prompt="Hello")
    first, second, third = (request.options["tenant"] for request in served.engine.requests)
    assert first == third != second
    assert "secret" not in first


async def test_without_keys_nobody_is_a_tenant(serve: Any) -> None:
    served = await serve()
    async with served.openai("whatever") as client:
        await client.completions.create(model="fake", prompt="Hello")
    assert served.engine.requests[0].options["tenant"] is None


async def test_closing_a_stream_aborts_its_request(serve: Any) -> None:
    served = await serve(waits)
    async with served.openai() as client:
        task = asyncio.ensure_future(client.chat.completions.create(model="fake", messages=QUESTION, stream=True))
        request = await served.engine.next_request()
        request.put("Hel")
        stream = await task
        await anext(aiter(stream))
        await stream.close()
        await asyncio.wait_for(request.ended.wait(), 60)
    assert served.engine.aborted == [request.request_id]
