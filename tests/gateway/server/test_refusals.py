"""Every value that cannot be served is a 400 that names the field; nothing is silently ignored."""

from __future__ import annotations

import re
from typing import Any

import pytest

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CHAT_BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello?"}]}
COMPLETION_BODY: dict[str, Any] = {"prompt": "Hello"}

BOTH = [
    ({"n": 0}, "n", "between 1 and 128"),
    ({"n": 129}, "n", "129"),
    ({"n": True}, "n", "n must be int, got true"),
    ({"temperature": -0.1}, "temperature", "-0.1"),
    ({"temperature": "hot"}, "temperature", 'temperature must be float, got "hot"'),
    ({"top_p": 0}, "top_p", "above 0 and at most 1.0, got 0.0"),
    ({"top_p": -1}, "top_p", "above 0 and at most 1.0, got -1.0"),
    ({"top_p": 1.1}, "top_p", "above 0 and at most 1.0, got 1.1"),
    ({"top_k": -2}, "top_k", "-2"),
    ({"min_p": 2}, "min_p", "between 0.0 and 1.0"),
    ({"presence_penalty": 3}, "presence_penalty", "between -2.0 and 2.0"),
    ({"frequency_penalty": -3}, "frequency_penalty", "-3"),
    ({"repetition_penalty": 0}, "repetition_penalty", "above 0 and at most 100.0, got 0.0"),
    ({"repetition_penalty": 101}, "repetition_penalty", "above 0 and at most 100.0, got 101.0"),
    ({"seed": 2**64}, "seed", str(2**64)),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": 2**40}, "max_tokens", str(2**40)),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "at most max_tokens (4)"),
    ({"stop": [1]}, "stop", "stop[0] must be str, got 1"),
    ({"stop": [""]}, "stop", "empty"),
    ({"stop": ["x"] * 65}, "stop", "65"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "-1"),
    ({"stop_token_ids": [1] * 1025}, "stop_token_ids", "at most 1024 entries, got 1025"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "at most 1024 entries, got 1025"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "'a'"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "101"),
    ({"logit_bias": {"-5": 1}}, "logit_bias", "token ids must be at least 0, got -5"),
    ({"logit_bias": {"5": "x"}}, "logit_bias", '{"5":"x"}'),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "between 0 and 20, got 21"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "not available in streams"),
    ({"bad_words": [""]}, "bad_words", "between 1 and 64 characters, got 0"),
    ({"bad_words": ["x"] * 129}, "bad_words", "at most 128 words, got 129"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one of json, json_object, regex, choice, grammar, got none"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "exactly one of .* got json, regex"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs", "a regex must have between 1 and 32768 characters, got 0"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs", "structured_outputs.json is not a JSON schema"),
    ({"structured_outputs": {"json": "[]"}}, "structured_outputs", "structured_outputs.json is not a JSON schema"),
    ({"structured_outputs": {"choice": "a"}}, "structured_outputs", 'structured_outputs.choice must be array, got "a"'),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "unknown field `structural_tag`"),
    ({"response_format": {"type": "xml"}}, "response_format", "one of text, json_object, json_schema, got 'xml'"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "response_format.json_schema is required"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format", "schema is required"),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "structured_outputs", "response_format and structured_outputs exclude each other",
    ),
    ({"response_format": {}}, "response_format", "response_format.type is required"),
    ({"best_of": 3, "n": 2}, "best_of", "between 1 and n (2), got 3"),
    ({"best_of": 0}, "best_of", "between 1 and n (1), got 0"),
    ({"use_beam_search": True}, "use_beam_search", "not supported"),
    ({"truncate_prompt_tokens": 4}, "truncate_prompt_tokens", "not supported yet"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream is true"),
    ({"guided_json": {"type": "object"}}, "guided_json", "use structured_outputs.json"),
    ({"guided_regex": "a+"}, "guided_regex", "use structured_outputs.regex"),
    ({"logits_processors": ["x"]}, "logits_processors", "use logit_bias"),
    ({"thinking_token_budget": 0}, "thinking_token_budget", "use max_tokens"),
    ({"kv_transfer_params": {}}, "kv_transfer_params", "leave it out"),
    ({"vllm_xargs": {"a": 1}}, "vllm_xargs", "leave it out"),
    ({"include_reasoning": False}, "include_reasoning", "always shown"),
    ({"stream_interval": 5}, "stream_interval", "as they come"),
    ({"stream": "yes"}, "stream", '"yes"'),
    ({"model": 7}, "model", "7"),
]  # fmt: skip
ONLY_CHAT = [
    ({"messages": None}, "messages", "null"),
    ({"messages": []}, "messages", "must not be empty"),
    ({"messages": ["hi"]}, "messages", 'messages[0] must be object, got "hi"'),
    ({"messages": CHAT_BODY["messages"] * 16_385}, "messages", "at most 16384 messages, got 16385"),
    ({"messages": [{"content": "hi"}]}, "messages", "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages", "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages", "messages[0].content[0]: image input is not supported",
    ),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens must be int >= 1, got 0"),
    ({"logprobs": 3}, "logprobs", "logprobs must be bool, got 3"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "between 0 and 20, got 21"),
    ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    ({"tools": [{"type": "function"}]}, "tools", "tools[0] must be {'type': 'function'"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools", "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]}, "tools", "function.parameters"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "--tool-call-parser (hermes, llama3_json"),
    ({"tool_choice": "required"}, "tool_choice", "'required' needs tools"),
    ({"tool_choice": "always"}, "tool_choice", "got 'always'"),
    ({"tool_choice": {"type": "function"}}, "tool_choice", "tool_choice must be none, auto, required"),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "names the function 'g'; tools has none"),
    (
        {
            "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required",
            "structured_outputs": {"regex": "a"},
        },
        "tool_choice", "exclude each other",
    ),
    ({"functions": [{"name": "f"}]}, "functions", "not supported yet"),
    ({"modalities": ["text", "audio"]}, "modalities", "audio"),
    ({"chat_template": "{{ x }}"}, "chat_template", "not supported yet"),
    (
        {"add_generation_prompt": True, "continue_final_message": True},
        "continue_final_message", "exclude each other",
    ),
]  # fmt: skip
ONLY_COMPLETIONS = [
    ({"prompt": None}, "prompt", "null"),
    ({"prompt": []}, "prompt", "an empty list"),
    ({"prompt": [[1], "a"]}, "prompt", "a mixed list"),
    ({"prompt": [[1], []]}, "prompt", "prompt[1] must not be empty"),
    ({"prompt": [-1]}, "prompt", "prompt[0] must be"),
    ({"prompt": ["a"] * 2049}, "prompt", "make 2049 sequences; at most 2048 are allowed"),
    ({"prompt": ["a"] * 17, "n": 128}, "prompt", "17 prompts with n = 128 make 2176 sequences"),
    ({"prompt": [1.5]}, "prompt", "prompt[0]"),
    ({"prompt": {"a": 1}}, "prompt", "prompt must be str | array"),
    ({"logprobs": 21}, "logprobs", "between 0 and 20"),
    ({"logprobs": True}, "logprobs", "true"),
    ({"suffix": "x"}, "suffix", "not supported yet"),
]


@pytest.mark.parametrize(
    ("path", "fields", "param", "part"),
    [(CHAT, *row) for row in BOTH + ONLY_CHAT] + [(COMPLETIONS, *row) for row in BOTH + ONLY_COMPLETIONS],
)
async def test_a_bad_value_is_refused_by_name(serve: Any, path: str, fields: dict[str, Any], param: str, part: str) -> None:
    served = await serve()
    status, body, _ = await served.post(path, {**(CHAT_BODY if path == CHAT else COMPLETION_BODY), **fields})
    error = body["error"]
    assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert re.search(part if ".*" in part else re.escape(part), error["message"])
    assert served.engine.requests == []


@pytest.mark.parametrize(("path", "field"), [(CHAT, "messages"), (COMPLETIONS, "prompt")])
async def test_a_missing_field_is_named(serve: Any, path: str, field: str) -> None:
    served = await serve()
    status, body, _ = await served.post(path, {})
    assert (status, body["error"]["param"], body["error"]["message"]) == (400, field, f"{field} is required")


async def test_an_unknown_model_is_404_and_lists_what_is_served(serve: Any) -> None:
    served = await serve(served_model_name=("smol",))
    for path, body in [(CHAT, CHAT_BODY), (COMPLETIONS, COMPLETION_BODY), ("/tokenize", COMPLETION_BODY)]:
        status, answer, _ = await served.post(path, {**body, "model": "gpt-9"})
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (404, "model_not_found", "model")
        assert "'smol'" in answer["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"unknown_field": 1, "user": "u", "metadata": {}, "store": True},
        {"tools": [], "tool_choice": "auto"},
        {"tools": [{"type": "function"}], "tool_choice": "none"},
        {"response_format": {"type": "text"}, "modalities": ["text"], "best_of": 1},
        dict.fromkeys(("n", "stop", "temperature", "max_tokens", "tools", "logprobs", "stream", "seed")),
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
        {"messages": [{"role": "assistant", "content": None}, {"role": "user", "content": ""}]},
    ],
)
async def test_what_openai_takes_is_taken(serve: Any, fields: dict[str, Any]) -> None:
    served = await serve()
    status, body, _ = await served.post(CHAT, {**CHAT_BODY, **fields})
    assert status == 200, body


@pytest.mark.parametrize(("path", "body"), [(CHAT, CHAT_BODY), (COMPLETIONS, COMPLETION_BODY)])
async def test_fields_of_vllms_and_openais_clients_that_ask_for_nothing_are_taken(
    serve: Any, path: str, body: dict[str, Any]
) -> None:
    served = await serve()
    nothing = {
        "include_reasoning": True, "stream_interval": 1, "watermarking": False, "guided_json": None, "user": "u",
        "metadata": {"a": "b"}, "service_tier": "auto", "length_penalty": 1.0, "spaces_between_special_tokens": True,
        "truncate_prompt_tokens": None, "use_beam_search": False, "store": False,
    }  # fmt: skip
    status, _, _ = await served.post(path, {**body, **nothing})
    assert status == 200
