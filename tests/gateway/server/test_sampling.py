"""From bodies to `SamplingParams`."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from cores.sampling_params import RequestOutputKind, SamplingParams
from gateway.server.sampling import to_sampling_params
from gateway.server.schema import BodyDecoder, ChatCompletionRequest, CompletionRequest

chat_decoder, completion_decoder = BodyDecoder(ChatCompletionRequest), BodyDecoder(CompletionRequest)


def chat_params(**fields: Any) -> SamplingParams:
    return to_sampling_params(chat_decoder.decode(json.dumps({"messages": [], **fields}).encode()), {})


def completion_params(**fields: Any) -> SamplingParams:
    return to_sampling_params(completion_decoder.decode(json.dumps({"prompt": "", **fields}).encode()), {})


def test_defaults_are_openais() -> None:
    assert chat_params() == SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)
    assert completion_params() == SamplingParams(max_tokens=16, output_kind=RequestOutputKind.FINAL_ONLY)
    assert chat_params(stream=True).output_kind is RequestOutputKind.DELTA


def test_the_models_defaults_stand_where_a_request_does_not_say() -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "max_tokens": 99}
    chat = chat_decoder.decode(b'{"messages": [], "top_k": null}')
    told = chat_decoder.decode(b'{"messages": [], "temperature": 1, "top_k": -1, "max_tokens": 5}')
    plain = completion_decoder.decode(b'{"prompt": ""}')
    assert [
        (params.temperature, params.top_k, params.max_tokens)
        for params in (to_sampling_params(request, defaults) for request in (chat, told, plain))
    ] == [(0.6, 20, 99), (1.0, -1, 5), (0.6, 20, 16)]


def test_every_sampling_field_arrives() -> None:
    fields = {
        "n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "presence_penalty": 1.5, "frequency_penalty": -1.0,
        "repetition_penalty": 1.1, "seed": 7, "min_tokens": 3, "max_tokens": 9, "ignore_eos": True,
        "skip_special_tokens": False, "include_stop_str_in_output": True,
    }  # fmt: skip
    for make in (chat_params, completion_params):
        params = make(
            **fields, stop=["a", "b"], stop_token_ids=[5], logit_bias={"3": -1}, allowed_token_ids=[1], bad_words=["x"]
        )
        assert {name: getattr(params, name) for name in fields} == fields
        assert (params.stop, params.stop_token_ids, params.logit_bias) == (("a", "b"), (5,), {3: -1.0})
        assert (params.allowed_token_ids, params.bad_words) == ((1,), ("x",))
    assert chat_params(stop="end").stop == ("end",)


def test_max_completion_tokens_beats_max_tokens() -> None:
    assert chat_params(max_tokens=5, max_completion_tokens=6).max_tokens == 6
    assert chat_params(max_tokens=5).max_tokens == 5
    assert completion_params(max_tokens=5).max_tokens == 5


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 4}, 4)],
)
def test_chat_logprobs_count_alternatives_beside_the_chosen_token(fields: dict[str, Any], expected: int | None) -> None:
    assert chat_params(**fields).logprobs == expected


def test_completion_logprobs_are_a_number() -> None:
    assert completion_params(logprobs=0).logprobs == 0
    assert completion_params(logprobs=5).logprobs == 5


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
    ],
)
async def test_every_route_samples_with_the_models_defaults(serve: Any, path: str, body: dict[str, Any]) -> None:
    served = await serve()
    served.engine.model_config = replace(served.engine.model_config, sampling_defaults={"temperature": 0.25, "top_k": 7})
    status, _, _ = await served.post(path, {**body, "temperature": 0.5})
    params = served.engine.requests[0].params
    assert (status, params.temperature, params.top_k) == (200, 0.5, 7)
