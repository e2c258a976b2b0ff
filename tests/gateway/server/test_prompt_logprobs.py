"""Log-probabilities of prompts over HTTP."""

from __future__ import annotations

from array import array
from typing import Any, cast

import pytest

from cores.messages import PromptLogprobsChunk
from gateway.logprobs import PromptLogprobs
from gateway.outputs import Logprob, PositionLogprobs
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


def ends_at_once(request: FakeRequest) -> None:
    """The one token that the model says is the end of its text."""
    with_prompt_logprobs("")(request)
    for index in range(request.params.n):
        chosen = Logprob(0, -0.1, 1, "</s>", b"</s>")
        request.put("y", index, finish_reason="stop", stop_reason=0, logprobs=[PositionLogprobs(chosen, ())])


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_of_an_echoed_prompt_may_be_called_by_their_ids(serve: Any, stream: bool) -> None:
    served = await serve(ends_at_once)
    body = {"prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 0, "return_tokens_as_token_ids": True}
    if stream:
        pieces = [event["choices"][0] for event in (await served.events(COMPLETIONS, body))[0] if event != "[DONE]"]
    else:
        pieces = (await served.post(COMPLETIONS, body))[1]["choices"]
    ids = served.engine.requests[0].prompt_token_ids
    assert [token for piece in pieces for token in piece["logprobs"]["tokens"]] == [f"token_id:{i}" for i in ids]


@pytest.mark.parametrize("stream", [False, True])
async def test_max_tokens_0_with_echo_scores_the_prompt_and_says_nothing(serve: Any, stream: bool) -> None:
    served = await serve(ends_at_once)
    body = {"prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 0, "n": 2}
    if stream:
        events, _ = await served.events(COMPLETIONS, body | {"stream_options": {"include_usage": True}})
        *events, last, done = events
        assert done == "[DONE]"
        pieces, usage = [event["choices"][0] for event in events], last["usage"]
    else:
        _, whole, _ = await served.post(COMPLETIONS, body)
        pieces, usage = whole["choices"], whole["usage"]
    for index in (0, 1):
        own = [piece for piece in pieces if piece["index"] == index]
        assert "".join(piece["text"] for piece in own) == "ab"
        assert [token for piece in own for token in piece["logprobs"]["tokens"]] == ["\x01", "a", "b"]
        assert (own[-1]["finish_reason"], own[-1]["stop_reason"]) == ("length", None)
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 0)
