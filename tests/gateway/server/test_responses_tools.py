"""Function calls and reasoning in `POST /v1/responses`: what goes in, what comes out whole and as events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from openai.types.responses import Response

from gateway.server.usage import ReasoningCounter
from gateway.testing import FakeRequest, Script, says

PATH = "/v1/responses"
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
TIME: Any = {"type": "function", "name": "time"}
CALL = '{"name": "weather", "arguments": {"city": "Bern"}}'
TEXT = f"<think>\nHm.\n</think>\n\nI look.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>\nDone."
ITEMS = [
    ("reasoning", "completed", "Hm."),
    ("message", "completed", "I look."),
    ("function_call", "completed", '{"city": "Bern"}'),
    ("function_call", "completed", '{"city": "Bern"}'),
    ("message", "completed", "Done."),
]
DELTAS = {
    "message": "response.output_text.delta",
    "reasoning": "response.reasoning_text.delta",
    "function_call": "response.function_call_arguments.delta",
}


def in_pieces(text: str, size: int, finish_reason: str = "stop") -> Script:
    def script(request: FakeRequest) -> None:
        for at in range(0, len(text), size):
            request.put(text[at : at + size])
        request.put("", finish_reason=finish_reason)

    return script


def shown(items: Sequence[Any]) -> list[tuple[str, str, str]]:
    """(type, status, text) of each."""
    return [
        (item.type, item.status, item.arguments if item.type == "function_call" else item.content[0].text) for item in items
    ]


async def events_of(served: Any, **fields: Any) -> list[Any]:
    async with served.openai() as client:
        return [event async for event in await client.responses.create(model="fake", input="Hi", stream=True, **fields)]


def check_events(events: list[Any]) -> list[Any]:
    """The items, as they were done; checks that each event is about the item that is open, and that deltas join to it."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    items: list[Any] = []
    text, is_open = "", False
    for event in events[2:-1]:
        if event.type == "response.output_item.added":
            assert (is_open, event.output_index, event.item.status) == (False, len(items), "in_progress")
            assert not (event.item.arguments if event.item.type == "function_call" else event.item.content)
            items.append(event.item)
            is_open, text = True, ""
            continue
        assert (is_open, event.output_index) == (True, len(items) - 1)
        if event.type == DELTAS[items[-1].type]:
            text += event.delta
            assert event.item_id == items[-1].id
        elif event.type.endswith("_text.done"):
            assert event.text == text
        elif event.type.endswith("arguments.done"):
            assert (event.arguments, event.name) == (text, items[-1].name)
        elif event.type == "response.output_item.done":
            assert event.item.id == items[-1].id
            assert shown([event.item])[0][2] == text
            items[-1], is_open = event.item, False
        else:
            assert event.type in ("response.content_part.added", "response.content_part.done")
    assert not is_open
    assert len({item.id for item in items}) == len(items)
    assert events[-1].response.output == items
    return items


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_items_come_in_the_order_in_which_they_were_said_whole_and_streamed(serve: Any, size: int) -> None:
    served = await serve(in_pieces(TEXT, size), tool_call_parser="hermes", reasoning_parser="qwen3")
    async with served.openai() as client:
        whole = await client.responses.create(model="fake", input="Hi", tools=[WEATHER])
    assert (shown(whole.output), whole.status, whole.output_text) == (ITEMS, "completed", "I look.Done.")
    assert whole.tools[0].name == "weather"
    Response.model_validate(whole.model_dump())
    items = check_events(await events_of(served, tools=[WEATHER]))
    assert shown(items) == ITEMS
    first, second = (item for item in items if item.type == "function_call")
    assert (first.name, first.call_id[:5], first.call_id != second.call_id) == ("weather", "call_", True)


async def test_openais_client_gathers_a_stream_of_items(serve: Any) -> None:
    served = await serve(in_pieces(TEXT, 3), tool_call_parser="hermes", reasoning_parser="qwen3")
    async with served.openai() as client, client.responses.stream(model="fake", input="Hi", tools=[WEATHER]) as events:
        snapshots = [e.snapshot async for e in events if e.type == "response.function_call_arguments.delta"]
        final = await events.get_final_response()
    assert shown(final.output) == ITEMS
    assert snapshots[-1] == '{"city": "Bern"}'


async def test_what_was_said_and_found_out_goes_back_as_one_turn_of_the_model(serve: Any) -> None:
    text = f"<think>Hm.</think>I look.<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>"
    served = await serve(says(text), tool_call_parser="hermes", reasoning_parser="qwen3")
    async with served.openai() as client:
        first = await client.responses.create(model="fake", input="Hi", tools=[WEATHER])
        calls = [item for item in first.output if item.type == "function_call"]
        results: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"} for call in calls]
        results[1]["output"] = [{"type": "input_text", "text": "sun"}]
        question: Any = {"role": "user", "content": "Hi"}
        include: Any = ["reasoning.encrypted_content"]
        history = [question, *first.output, *results]
        await client.responses.create(model="fake", input=history, tools=[WEATHER], include=include)
    rendered = served.engine.fake_renderer.rendered[1]
    assert rendered["tools"] == [{"type": "function", "function": {k: v for k, v in WEATHER.items() if k != "type"}}]
    function = {"name": "weather", "arguments": {"city": "Bern"}}
    assert rendered["messages"] == [
        question,
        {
            "role": "assistant",
            "reasoning": "Hm.",
            "reasoning_content": "Hm.",
            "content": "I look.",
            "tool_calls": [{"id": call.call_id, "type": "function", "function": function} for call in calls],
        },
        {"role": "tool", "tool_call_id": calls[0].call_id, "content": "rain"},
        {"role": "tool", "tool_call_id": calls[1].call_id, "content": "sun"},
    ]


async def test_turns_and_summaries_are_told_apart(serve: Any) -> None:
    served = await serve()
    call = {"type": "function_call", "call_id": "c", "name": "time", "arguments": ""}
    summary = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "Hm."}]}
    said = {"role": "assistant", "content": "A"}
    status, body, _ = await served.post(PATH, {"input": [call, summary, call, said, said]})
    assert status == 200, body
    first, second, third = served.engine.fake_renderer.rendered[0]["messages"]
    assert (list(first), first["tool_calls"][0]["function"]["arguments"]) == (["role", "tool_calls"], {})
    assert (second["reasoning"], second["content"], len(second["tool_calls"])) == ("Hm.", "A", 1)
    assert third == said


@pytest.mark.parametrize(
    ("effort", "told"),
    [("low", {"reasoning_effort": "low", "a": 1}), ("none", {"reasoning_effort": "none", "enable_thinking": False, "a": 1})],
)
async def test_how_much_to_reason_is_told_to_the_template(serve: Any, effort: str, told: dict[str, Any]) -> None:
    served = await serve()
    own = {"chat_template_kwargs": {"a": 1}}
    _, body, _ = await served.post(PATH, {"input": "Hi", "reasoning": {"effort": effort}, **own})
    assert body["reasoning"]["effort"] == effort
    messages = [{"role": "user", "content": "Hi"}]
    assert (await served.post("/v1/chat/completions", {"messages": messages, "reasoning_effort": effort, **own}))[0] == 200
    assert (await served.post("/tokenize", {"messages": messages, "reasoning_effort": effort, **own}))[0] == 200
    assert [rendered["chat_template_kwargs"] for rendered in served.engine.fake_renderer.rendered] == [told] * 3


async def test_an_answer_that_is_cut_off_in_a_call_or_a_thought_has_an_incomplete_item(serve: Any) -> None:
    for text, items in (
        (TEXT[: TEXT.index("ern")], [*ITEMS[:2], ("function_call", "incomplete", '{"city": "B')]),
        (TEXT[: TEXT.index(".")], [("reasoning", "incomplete", "Hm")]),
        ("", [("message", "incomplete", "")]),
    ):
        served = await serve(in_pieces(text, 4, "length"), tool_call_parser="hermes", reasoning_parser="qwen3")
        async with served.openai() as client:
            whole = await client.responses.create(model="fake", input="Hi", tools=[WEATHER])
        assert (whole.status, shown(whole.output)) == ("incomplete", items)
        events = await events_of(served, tools=[WEATHER])
        assert (events[-1].type, shown(check_events(events))) == ("response.incomplete", items)


@pytest.mark.parametrize(
    ("choice", "said", "names"),
    [
        ("required", '[{"name": "time", "parameters": {}}, {"name": "weather", "parameters": {}}]', ["time", "weather"]),
        ({"type": "function", "name": "weather"}, '{"city": "B"}', ["weather"]),
    ],
)  # fmt: skip
async def test_a_call_that_must_be_made_is_a_grammar_and_needs_no_parser(
    serve: Any, choice: Any, said: str, names: list[str]
) -> None:
    served = await serve(in_pieces(said, 1))
    events = await events_of(served, tools=[TIME, WEATHER], tool_choice=choice, text={"format": {"type": "json_object"}})
    assert [item.name for item in check_events(events)] == names
    assert events[-1].response.tool_choice in (choice, "required") or events[-1].response.tool_choice.name == "weather"
    wanted = served.engine.requests[0].params.structured_outputs
    assert wanted.param == "tool_choice"
    assert "city" in json.dumps(json.loads(wanted.spec))


async def test_a_text_format_is_about_what_comes_behind_the_reasoning(serve: Any) -> None:
    served = await serve(in_pieces("Hm.</think>\n\n{}", 1), reasoning_parser="deepseek_r1")
    items = check_events(await events_of(served, text={"format": {"type": "json_object"}}))
    assert shown(items) == [("reasoning", "completed", "Hm."), ("message", "completed", "{}")]
    wanted = served.engine.requests[0].params.structured_outputs
    assert (wanted.param, wanted.reasoning.end) == ("text.format", "</think>")


async def test_a_call_that_nobody_may_make_is_text_and_one_alone_stays_alone(serve: Any) -> None:
    served = await serve(says(f"<tool_call>{CALL}</tool_call>" * 2), tool_call_parser="hermes")
    (message,) = check_events(await events_of(served, tools=[WEATHER], tool_choice="none"))
    assert message.content[0].text == f"<tool_call>{CALL}</tool_call>" * 2
    (call,) = check_events(await events_of(served, tools=[WEATHER], parallel_tool_calls=False))
    assert (call.type, call.arguments) == ("function_call", '{"city": "Bern"}')


@pytest.mark.parametrize("fields", [{"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]}])
async def test_log_probabilities_of_text_that_is_taken_apart_are_refused(serve: Any, fields: dict[str, Any]) -> None:
    served = await serve(reasoning_parser="qwen3")
    status, body, _ = await served.post(PATH, {"input": "Hi", **fields})
    assert (status, body["error"]["param"]) == (400, next(iter(fields)))


def test_tokens_count_as_reasoning_up_to_the_one_that_ends_it() -> None:
    for end_id, count in ((9, 4), (5, 7), (None, 0)):
        counter = ReasoningCounter(end_id)
        for token_ids in ([1, 2], [], [3, 9, 4], [9, 6]):
            counter.add(token_ids)
        assert counter.num_tokens == count
