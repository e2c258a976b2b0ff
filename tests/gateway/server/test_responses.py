"""`POST /v1/responses`: what its body means, what its answers and events say, and what is refused."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from cores.sampling_params import StructuredOutputKind
from gateway.errors import EngineDeadError, EngineGenerateError, InvalidRequestError, OverloadedError
from gateway.outputs import Logprob, PositionLogprobs
from gateway.testing import FakeRequest, waits

PATH = "/v1/responses"
ANSWER = "Hello, big world"
EVENTS_BEFORE = ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
EVENTS_AFTER = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def events_of(data: bytes) -> list[tuple[str, Any]]:
    """(name, data) of each event."""
    blocks = data.decode().split("\n\n")
    assert blocks.pop() == "", "the last event has no end"
    events = []
    for block in blocks:
        name, payload = block.split("\n")
        events.append((name.removeprefix("event: "), json.loads(payload.removeprefix("data: "))))
    assert [name for name, _ in events] == [event["type"] for _, event in events]
    assert [event["sequence_number"] for _, event in events] == list(range(len(events)))
    return events


async def stream(served: Any, **fields: Any) -> list[tuple[str, Any]]:
    async with served.http.post(served.url + PATH, json={"input": "Hello?", "stream": True, **fields}) as response:
        assert response.content_type == "text/event-stream"
        return events_of(await response.read())


def logprob(text: str) -> Logprob:
    return Logprob(ord(text), -0.5, 1, text, text.encode())


# --- what is asked of the engine --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"input": "Hi"}, "<user>Hi<assistant>"),
        ({"input": "Hi", "instructions": "Be kind"}, "<system>Be kind<user>Hi<assistant>"),
        ({"input": [{"role": "user", "content": "Hi"}]}, "<user>Hi<assistant>"),
        ({"input": [{"role": "developer", "content": "D"}, {"role": "user", "content": "Hi"}]}, "<system>D<user>Hi<assistant>"),
        (
            {"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]}]},
            "<user>a\nb<assistant>",
        ),
    ],
)
async def test_input_and_instructions_are_the_messages_of_a_chat(serve: Any, fields: dict[str, Any], prompt: str) -> None:
    served = await serve()
    status, body, _ = await served.post(PATH, fields)
    assert status == 200, body
    assert served.engine.requests[0].prompt_text == prompt


async def test_the_output_of_one_response_is_input_of_the_next(serve: Any) -> None:
    served = await serve()
    async with served.openai() as client:
        first = await client.responses.create(input="Hi")
        history: Any = [{"role": "user", "content": "Hi"}, *first.output, {"role": "user", "content": "And?"}]
        await client.responses.create(input=history)
    assert served.engine.requests[1].prompt_text == f"<user>Hi<assistant>{ANSWER}<user>And?<assistant>"


async def test_sampling_fields_reach_the_engine(serve: Any) -> None:
    served = await serve()
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3, "stop": ["x"], "repetition_penalty": 1.5}
    status, body, _ = await served.post(
        PATH, {"input": "Hi", "max_output_tokens": 4, "min_tokens": 2, "priority": 5, "cache_salt": "s", **fields}
    )
    assert status == 200, body
    (request,) = served.engine.requests
    assert {name: getattr(request.params, name) for name in fields} == {**fields, "stop": ("x",)}
    assert (request.params.max_tokens, request.params.min_tokens) == (4, 2)
    assert (request.options["priority"], request.options["cache_salt"]) == (5, "s")


@pytest.mark.parametrize(
    ("text_format", "spec"),
    [
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "name": "thing", "schema": SCHEMA, "strict": True}, SCHEMA),
    ],
)
async def test_a_text_format_is_what_the_output_must_look_like(
    serve: Any, text_format: dict[str, Any], spec: dict[str, Any]
) -> None:
    served = await serve()
    status, body, _ = await served.post(PATH, {"input": "Hi", "text": {"format": text_format}})
    assert status == 200, body
    wanted = served.engine.requests[0].params.structured_outputs
    assert (wanted.kind, json.loads(wanted.spec), wanted.param) == (StructuredOutputKind.JSON, spec, "text.format")
    assert body["text"]["format"] == text_format


# --- whole answers ----------------------------------------------------------------------------------------------------


async def test_a_whole_response_is_openais_object(serve: Any) -> None:
    served = await serve()
    given = {"metadata": {"a": "b"}, "user": "me", "instructions": "Be kind", "temperature": 0.5, "parallel_tool_calls": False}
    status, body, response = await served.post(PATH, {"input": "Hello?", **given}, **{"X-Request-Id": "id-7"})
    assert (status, response.headers["X-Request-Id"], response.headers["X-Gateway-Rank"]) == (200, "id-7", "0")
    Response.model_validate(body, strict=False)
    assert {name: body[name] for name in given} == given
    assert (body["id"], body["object"], body["status"], body["model"]) == ("resp_id-7", "response", "completed", "fake")
    assert (body["error"], body["incomplete_details"], body["store"], body["tools"]) == (None, None, False, [])
    assert body["completed_at"] >= body["created_at"]
    part = {"type": "output_text", "text": ANSWER, "annotations": [], "logprobs": []}
    message = {"type": "message", "id": "msg_id-7", "status": "completed", "role": "assistant", "content": [part]}
    assert body["output"] == [message]
    num_prompt_tokens = len("<system>Be kind<user>Hello?<assistant>")
    assert body["usage"] == {
        "input_tokens": num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": len(ANSWER),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt_tokens + len(ANSWER),
    }


async def test_an_answer_that_max_output_tokens_ends_is_incomplete(serve: Any) -> None:
    served = await serve()
    _, body, _ = await served.post(PATH, {"input": "Hi", "max_output_tokens": 5})
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (body["output"][0]["status"], body["output"][0]["content"][0]["text"]) == ("incomplete", "Hello")
    assert (body["max_output_tokens"], body["completed_at"]) == (5, None)
    Response.model_validate(body)


async def test_an_aborted_answer_has_failed_and_keeps_what_was_said(serve: Any) -> None:
    served = await serve(lambda request: request.put("Hel", finish_reason="abort"))
    _, body, _ = await served.post(PATH, {"input": "Hi"})
    assert (body["status"], body["error"]["code"]) == ("failed", "server_error")
    assert body["output"][0]["content"][0]["text"] == "Hel"
    assert (await stream(served))[-1][0] == "response.failed"
    Response.model_validate(body)


@pytest.mark.parametrize("fields", [{"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]}])
async def test_logprobs_are_shown_where_asked_for(serve: Any, fields: dict[str, Any]) -> None:
    def script(request: FakeRequest) -> None:
        request.put("a", logprobs=[PositionLogprobs(logprob("a"), (logprob("b"),))])
        request.put("c", logprobs=[PositionLogprobs(logprob("c"), ())], finish_reason="stop")

    served = await serve(script)
    _, body, _ = await served.post(PATH, {"input": "Hi", **fields})
    Response.model_validate(body)
    shown = body["output"][0]["content"][0]["logprobs"]
    assert [entry["token"] for entry in shown] == ["a", "c"]
    assert shown[0]["top_logprobs"] == [{"token": "b", "logprob": -0.5, "bytes": [98]}]
    assert served.engine.requests[0].params.logprobs == fields.get("top_logprobs", 0)
    events = await stream(served, **fields)
    assert [e["logprobs"] for name, e in events if name == "response.output_text.delta"] == [shown[:1], shown[1:]]
    assert [e["logprobs"] for name, e in events if name == "response.output_text.done"] == [shown]


# --- streams ----------------------------------------------------------------------------------------------------------


async def test_a_stream_has_openais_events_in_order_and_ends_with_the_whole_response(serve: Any) -> None:
    served = await serve()
    events = await stream(served)
    deltas = [event for name, event in events if name == "response.output_text.delta"]
    names = [name for name, _ in events]
    assert names == EVENTS_BEFORE + ["response.output_text.delta"] * len(deltas) + EVENTS_AFTER + ["response.completed"]
    assert [event["delta"] for event in deltas] == ["Hello,", " big", " world"]
    by_name = dict(events)
    assert by_name["response.output_text.done"]["text"] == ANSWER
    assert by_name["response.created"]["response"]["status"] == "in_progress"
    assert (by_name["response.created"]["response"]["output"], by_name["response.created"]["response"]["usage"]) == ([], None)
    final = events[-1][1]["response"]
    assert final["output"] == [by_name["response.output_item.done"]["item"]]
    assert final["output"][0]["content"] == [by_name["response.content_part.done"]["part"]]
    _, whole, _ = await served.post(PATH, {"input": "Hello?"})
    changing = {"id", "created_at", "completed_at", "output"}
    assert {k: v for k, v in final.items() if k not in changing} == {k: v for k, v in whole.items() if k not in changing}


async def test_a_stream_that_max_output_tokens_ends_is_incomplete(serve: Any) -> None:
    served = await serve()
    name, event = (await stream(served, max_output_tokens=5))[-1]
    assert (name, event["response"]["status"]) == ("response.incomplete", "incomplete")
    assert event["response"]["usage"]["output_tokens"] == 5


async def test_an_error_in_a_stream_is_a_failed_response_and_an_error_event(serve: Any) -> None:
    def script(request: FakeRequest) -> None:
        request.put("Hel")
        request.fail(EngineDeadError("rank 0 died"))

    served = await serve(script)
    events = await stream(served)
    assert [name for name, _ in events] == [*EVENTS_BEFORE, "response.output_text.delta", "response.failed", "error"]
    failed, error = events[-2][1]["response"], events[-1][1]
    assert (failed["status"], failed["error"]) == ("failed", {"code": "server_error", "message": "rank 0 died"})
    assert failed["output"][0]["content"][0]["text"] == "Hel"
    assert (error["code"], error["message"], error["param"]) == ("engine_dead", "rank 0 died", None)
    assert error["error"] == {"message": "rank 0 died", "type": "engine_error", "param": None, "code": "engine_dead"}


@pytest.mark.parametrize(("error", "status"), [(EngineGenerateError("bad"), 500), (OverloadedError("full"), 503)])
async def test_an_error_before_the_first_output_is_an_ordinary_answer(serve: Any, error: Any, status: int) -> None:
    served = await serve(lambda request: request.fail(error))
    for streamed in (False, True):
        got, body, _ = await served.post(PATH, {"input": "Hi", "stream": streamed})
        assert (got, body["error"]["message"]) == (status, str(error))


async def test_closing_a_stream_aborts_its_request_and_load_counts_it_until_then(serve: Any) -> None:
    served = await serve(waits)
    async with served.openai() as client:
        task = asyncio.ensure_future(client.responses.create(input="Hi", stream=True))
        request = await served.engine.next_request()
        assert served.state.server_load() == 1
        request.put("Hel")
        events = await task
        await anext(aiter(events))
        await events.close()
        await asyncio.wait_for(request.ended.wait(), 60)
    assert served.engine.aborted == [request.request_id]


async def test_headers_mean_what_they_mean_in_chat(serve: Any) -> None:
    served = await serve(api_key=("secret",))
    headers = {"X-data-parallel-rank": "1", "X-Session-Id": "s", "X-Request-Timeout-Ms": "1500"}
    assert (await served.post(PATH, {"input": "Hi"}, **headers))[0] == 401
    assert (await served.post(PATH, {"input": "Hi"}, Authorization="Bearer secret", **headers))[0] == 200
    options = served.engine.requests[0].options
    assert (options["data_parallel_rank"], options["session_id"], options["timeout_s"]) == (1, "s", 1.5)


# --- the official client ----------------------------------------------------------------------------------------------


class Thing(BaseModel):
    a: int


async def test_openais_client_creates_streams_and_parses(serve: Any) -> None:
    def script(request: FakeRequest) -> None:
        request.put('{"a":')
        request.put(" 5}", finish_reason="stop")

    served = await serve(script)
    async with served.openai() as client:
        assert (await client.responses.create(input="Hi")).output_text == '{"a": 5}'
        async with client.responses.stream(model="fake", input="Hi", text_format=Thing) as events:
            snapshots = [event.snapshot async for event in events if event.type == "response.output_text.delta"]
            final = await events.get_final_response()
        parsed = await client.responses.parse(model="fake", input="Hi", text_format=Thing)
    assert snapshots == ['{"a":', '{"a": 5}']
    assert final.output_parsed == parsed.output_parsed == Thing(a=5)


async def test_openais_client_raises_the_error_of_a_stream(serve: Any) -> None:
    def script(request: FakeRequest) -> None:
        request.put("Hel")
        request.fail(EngineDeadError("rank 0 died"))

    served = await serve(script)
    kinds = []

    async def read() -> None:
        async with served.openai() as client:
            async for event in await client.responses.create(input="Hi", stream=True):
                kinds.append(event.type)

    with pytest.raises(openai.APIError, match="rank 0 died"):
        await read()
    assert kinds[-1] == "response.failed"


# --- refusals ---------------------------------------------------------------------------------------------------------


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize(
    ("fields", "param", "part"),
    [
        ({"input": None}, "input", "null"),
        ({"input": 5}, "input", "input must be str | array, got 5"),
        ({"input": []}, "input", "input must not be empty"),
        ({"input": ["x"]}, "input", 'input[0] must be object, got "x"'),
        ({"input": user("x") * 16_384}, "input", "less than 16384 items, got 16384"),
        ({"input": [{"type": "web_search_call"}]}, "input", "'function_call' or 'function_call_output', got 'web_search_call'"),
        ({"input": [{"type": 5}]}, "input", "input[0].type must be 'message', 'reasoning', "),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input", "input[0].call_id is required"),
        ({"input": [{"type": "function_call_output", "call_id": "x"}]}, "input", "input[0].output is required"),
        ({"input": [{"type": "function_call", "call_id": "x", "name": 5, "arguments": ""}]}, "input", "name must be text"),
        ({"input": [{"type": "function_call", "call_id": "x", "name": "f", "arguments": "{"}]}, "input", "must be JSON"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input", "cannot be read here"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input", "no item that says anything"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input", "user, assistant, system, developer, got 'tool'"),
        ({"input": [{"role": ["user"], "content": "x"}]}, "input", "input[0].role must be one of"),
        ({"input": [{"role": "user"}]}, "input", "input[0].content is required"),
        ({"input": [{"role": "user", "content": 5}]}, "input", "input[0].content must be text or a list of parts, got 5"),
        ({"input": user({"type": "input_image", "image_url": "x"})}, "input", "input[0].content[0]: image input is not"),
        ({"input": user({"type": "input_file", "file_id": "x"})}, "input", "input[0].content[0]: file input is not"),
        ({"input": user({"type": "input_audio"})}, "input", "input[0].content[0]: audio input is not supported"),
        ({"input": user({"type": "input_text", "text": 5})}, "input", "input[0].content[0].text must be text, got 5"),
        ({"instructions": ["x"]}, "instructions", "instructions must be str"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be int >= 1, got 0"),
        ({"max_output_tokens": 4, "min_tokens": 5}, "min_tokens", "at most max_output_tokens (4)"),
        ({"temperature": -1}, "temperature", "-1"),
        ({"top_p": 2}, "top_p", "2"),
        ({"top_k": -2}, "top_k", "-2"),
        ({"top_logprobs": 21}, "top_logprobs", "between 0 and 20, got 21"),
        ({"include": ["file_search_call.results"]}, "include", "allowed: 'message.output_text.logprobs'"),
        ({"stream": "yes"}, "stream", '"yes"'),
        ({"metadata": {"a": 1}}, "metadata", "must be str, got"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", "one of text, json_object, json_schema, got 'xml'"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", "text.format.schema is required"),
        ({"text": {"format": {}}}, "text", "text.format.type is required"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "'low'"),
        (
            {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
            "structured_outputs", "text.format and structured_outputs exclude each other",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools", "need a server that was started with --tool-call-parser"),
        ({"tools": [{"type": "web_search"}]}, "tools", "got 'web_search': there are no built-in tools here"),
        ({"tools": [{"name": "f"}]}, "tools", "tools[0].type must be 'function', got none"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools", "tools[0].name must be text of 1 to 256 characters"),
        ({"tools": [{"type": "function", "name": "f", "parameters": 5}]}, "tools", "tools[0].parameters must be a JSON"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": "any"}, "tool_choice", "allowed: 'none', 'auto', 'required', {'type': 'function', 'name': …}"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", "'web_search' is not supported"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "names the function 'f'; tools has none"),
        ({"truncation": "auto"}, "truncation", "allowed: 'disabled'"),
        ({"background": True}, "background", "responses are not kept"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "responses are not kept"),
        ({"conversation": {"id": "c"}}, "conversation", "responses are not kept"),
        ({"prompt": {"id": "p"}}, "prompt", "there are no stored prompts"),
        ({"reasoning": {"effort": "a lot"}}, "reasoning.effort", "reasoning.effort must be one of none, minimal, low, medium"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary", "'auto' is not supported"),
    ],
)  # fmt: skip
async def test_a_bad_value_is_refused_by_name(serve: Any, fields: dict[str, Any], param: str, part: str) -> None:
    served = await serve()
    status, body, _ = await served.post(PATH, {"input": "Hi", **fields})
    error = body["error"]
    assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error"), error
    assert re.search(re.escape(part), error["message"])
    assert served.engine.requests == []


async def test_what_is_missing_unknown_or_starting_is_told_as_everywhere(serve: Any) -> None:
    served = await serve()
    assert (await served.post(PATH, {}))[1]["error"]["message"] == "input is required"
    assert (await served.post(PATH, {"input": "Hi", "model": "gpt-9"}))[0] == 404
    assert (await (await serve(ready=False)).post(PATH, {"input": "Hi"}))[0] == 503


async def test_errors_of_the_chat_request_behind_it_name_our_fields(serve: Any) -> None:
    error = InvalidRequestError("99 tokens are too many (max_tokens)", "max_tokens", code="context_length_exceeded")
    served = await serve(lambda request: request.fail(error))
    _, body, _ = await served.post(PATH, {"input": "Hi"})
    assert body["error"]["param"] == "max_output_tokens"
    assert body["error"]["code"] == "context_length_exceeded"
    assert body["error"]["message"] == "99 tokens are too many (max_output_tokens)"


@pytest.mark.parametrize(
    "fields",
    [
        {"unknown_field": 1, "store": True, "service_tier": "flex", "user": "u", "truncation": "disabled"},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "background": False, "include": []},
        {"text": {"format": {"type": "text"}}, "reasoning": {}, "max_tool_calls": 3},
        dict.fromkeys(("stream", "text", "tools", "temperature", "instructions", "metadata", "store", "reasoning")),
    ],
)
async def test_what_openai_takes_is_taken(serve: Any, fields: dict[str, Any]) -> None:
    served = await serve()
    status, body, _ = await served.post(PATH, {"input": "Hi", **fields})
    assert status == 200, body
    assert (body["store"], body["service_tier"]) == (False, "default")
