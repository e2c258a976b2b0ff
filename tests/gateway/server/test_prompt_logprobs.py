"""Log-probabilities of prompts over HTTP."""

from __future__ import annotations

from array import array
from typing import Any, cast

import pytest

from cores.messages import PromptLogprobsChunk
from gateway.logprobs import PromptLogprobs
from gateway.testing import FakeRequest, FakeTokenizer, Script, says

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def with_prompt_logprobs(text: str) -> Script:
    def script(request: FakeRequest) -> None:
        num_top, ids = request.params.prompt_logprobs, request.prompt_token_ids
        if num_top is not None:
            n = len(ids) - 1
            known = PromptLogprobs(cast(Any, FakeTokenizer()), ids, num_top)
            top = array("I", [ord("x")] * n * num_top)
            known.add(
                PromptLogprobsChunk(
                    1, num_top, array("f", [-1.5] * n), array("I", [4] * n), top, array("f", [-0.5] * n * num_top)
                )
            )
            request.prompt_logprobs = known
        says(text)(request)

    return script


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, {"messages": [{"role": "user", "content": "Hi"}]}), (COMPLETIONS, {"prompt": "Hi"})]
)
async def test_they_are_shown_where_vllm_shows_them(serve: Any, path: str, body: dict[str, Any]) -> None:
    served = await serve(with_prompt_logprobs("yes"))
    status, answer, _ = await served.post(path, body | {"prompt_logprobs": 1})
    assert status == 200
    shown = answer["prompt_logprobs"] if path == CHAT else answer["choices"][0]["prompt_logprobs"]
    assert shown[0] is None
    last = served.engine.requests[0].prompt_token_ids[-1]
    assert shown[-1] == {
        str(last): {"logprob": -1.5, "rank": 4, "decoded_token": chr(last)},
        str(ord("x")): {"logprob": -0.5, "rank": 1, "decoded_token": "x"},
    }
    assert len(shown) == len(served.engine.requests[0].prompt_token_ids)


async def test_an_echo_with_log_probabilities_is_the_same_streamed_and_whole(serve: Any) -> None:
    served = await serve(with_prompt_logprobs("y"))
    body = {"prompt": ["ab", "cd"], "echo": True, "logprobs": 1, "max_tokens": 1}
    _, whole, _ = await served.post(COMPLETIONS, body)
    events, _ = await served.events(COMPLETIONS, body)
    assert [request.params.prompt_logprobs for request in served.engine.requests] == [1] * 4
    for index, prompt in enumerate(("ab", "cd")):
        choice = whole["choices"][index]
        opening = next(e["choices"][0] for e in events if e != "[DONE]" and e["choices"][0]["index"] == index)
        assert (opening["text"], choice["text"]) == (prompt, prompt + "y")
        assert opening["logprobs"]["tokens"] == ["\x01", *prompt]
        assert opening["logprobs"]["token_logprobs"] == [None, -1.5, -1.5]
        assert opening["logprobs"]["top_logprobs"] == [None, *({"x": -0.5, char: -1.5} for char in prompt)]
