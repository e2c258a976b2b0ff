"""Stream events as bytes: hot path and slow path must say the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput, RequestStats
from gateway.server.answers import CHAT, COMPLETION, Answer, ApiShape, whole_answer
from gateway.server.sse import StreamEncoder


def make_answer(**fields: Any) -> Answer:
    return Answer(**{"id": "id-1", "model": 'a "model"', "created": 7, "prompt_token_ids": ((5, 6, 7),), **fields})


def make_output(*completions: CompletionOutput, cached: int = 0) -> RequestOutput:
    stats = RequestStats(arrival_s=0.0, num_cached_tokens=cached)
    finished = any(completion.finish_reason for completion in completions)
    return RequestOutput("id-1", None, [5, 6, 7], list(completions), finished, stats)


def events_of(data: bytes) -> list[Any]:
    lines = data.decode().split("\n\n")
    assert lines.pop() == ""
    return [line[6:] if line == "data: [DONE]" else json.loads(line.removeprefix("data: ")) for line in lines]


def text_of(shape: ApiShape, event: Any) -> str:
    (choice,) = event["choices"]
    return choice["delta"].get("content", "") if shape is CHAT else choice["text"]


texts = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.mark.parametrize("shape", [CHAT, COMPLETION])
@given(pieces=st.lists(texts, min_size=1), last=texts)
def test_pieces_joined_are_the_whole_answer(shape: ApiShape, pieces: list[str], last: str) -> None:
    answer = make_answer(include_usage=True)
    encoder = StreamEncoder(shape, answer)
    outputs = [make_output(CompletionOutput(0, piece, [1])) for piece in pieces]
    outputs.append(make_output(CompletionOutput(0, last, [1, 2], finish_reason="stop"), cached=2))
    events = events_of(encoder.open() + b"".join(encoder.encode(output) for output in outputs) + encoder.close())
    assert events.pop() == "[DONE]"
    usage = events.pop()
    streamed = "".join(text_of(shape, event) for event in events)

    final = CompletionOutput(0, "".join(pieces) + last, [1] * (len(pieces) + 2), finish_reason="stop")
    whole = json.loads(whole_answer(shape, answer, [make_output(final, cached=2)]))
    choice = whole["choices"][0]
    assert streamed == (choice["message"]["content"] if shape is CHAT else choice["text"])
    assert usage["usage"] == whole["usage"]
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert all(event["model"] == 'a "model"' and event["id"] == "id-1" and event["created"] == 7 for event in events)


@pytest.mark.parametrize("shape", [CHAT, COMPLETION])
def test_a_prebuilt_chunk_has_the_fields_of_one_that_is_not(shape: ApiShape) -> None:
    plain = StreamEncoder(shape, make_answer()).encode(make_output(CompletionOutput(0, "é\n", [1])))
    full = StreamEncoder(shape, make_answer(return_token_ids=True)).encode(make_output(CompletionOutput(0, "é\n", [1])))
    (plain_event,), (full_event,) = events_of(plain), events_of(full)
    assert full_event["choices"][0].pop("token_ids") == [1]
    assert plain_event == full_event


def test_an_output_without_text_makes_no_chunk_unless_it_ends_something() -> None:
    encoder = StreamEncoder(CHAT, make_answer())
    assert encoder.encode(make_output(CompletionOutput(0, "", [1]))) == b""
    (event,) = events_of(encoder.encode(make_output(CompletionOutput(0, "", [2], finish_reason="stop", stop_reason=9))))
    assert event["choices"][0]["finish_reason"] == "stop"
    assert event["choices"][0]["stop_reason"] == 9
    assert encoder.is_finished


def test_a_stream_that_lacks_a_finish_reason_cannot_be_closed() -> None:
    encoder = StreamEncoder(CHAT, make_answer(n=2))
    encoder.encode(make_output(CompletionOutput(1, "x", [1], finish_reason="stop")))
    assert not encoder.is_finished
    with pytest.raises(RuntimeError, match="1 choices"):
        encoder.close()


def test_opening_chunks_have_roles_echo_and_prompt_ids_in_their_apis_places() -> None:
    chat = events_of(StreamEncoder(CHAT, make_answer(n=2, return_token_ids=True)).open())
    assert [event["choices"][0]["index"] for event in chat] == [0, 1]
    assert chat[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chat[0]["prompt_token_ids"] == [5, 6, 7]
    answer = make_answer(prompt_token_ids=((1,), (2, 3)), echo=("one", "two"), return_token_ids=True)
    plain = events_of(StreamEncoder(COMPLETION, answer).open())
    assert [event["choices"][0]["text"] for event in plain] == ["one", "two"]
    assert [event["choices"][0]["prompt_token_ids"] for event in plain] == [[1], [2, 3]]
    assert StreamEncoder(COMPLETION, make_answer()).open() == b""


def position(text: str, logprob: float, *others: tuple[str, float]) -> PositionLogprobs:
    top = tuple(Logprob(i, value, i + 1, name, name.encode()) for i, (name, value) in enumerate(others))
    return PositionLogprobs(Logprob(9, logprob, 1, text, text.encode()), top)


def test_chat_logprobs_have_bytes_and_alternatives_and_no_infinity() -> None:
    completion = CompletionOutput(0, "é", [9], [position("é", -0.5, ("é", -0.5), ("e", float("-inf")))])
    (event,) = events_of(StreamEncoder(CHAT, make_answer()).encode(make_output(completion)))
    (token,) = event["choices"][0]["logprobs"]["content"]
    assert (token["token"], token["logprob"], token["bytes"]) == ("é", -0.5, [0xC3, 0xA9])
    assert [(t["token"], t["logprob"]) for t in token["top_logprobs"]] == [("é", -0.5), ("e", -9999.0)]


def test_tokens_may_be_called_by_their_ids() -> None:
    completion = CompletionOutput(0, "é", [9], [position("é", -0.5, ("e", -0.5))], "length")
    answer = make_answer(tokens_as_ids=True)
    (chat,) = events_of(StreamEncoder(CHAT, answer).encode(make_output(completion)))
    (token,) = chat["choices"][0]["logprobs"]["content"]
    assert (token["token"], token["bytes"], token["top_logprobs"][0]["token"]) == ("token_id:9", [0xC3, 0xA9], "token_id:0")
    whole = json.loads(whole_answer(COMPLETION, answer, [make_output(completion)]))["choices"][0]["logprobs"]
    assert (whole["tokens"], whole["top_logprobs"]) == (["token_id:9"], [{"token_id:0": -0.5, "token_id:9": -0.5}])


def test_streamed_text_offsets_go_on_from_chunk_to_chunk_and_equal_the_whole_ones() -> None:
    positions = [position("ab", -1.0), position("c", -2.0, ("d", -0.1)), position("ef", -3.0)]
    answer = make_answer(echo=("echo",))
    encoder = StreamEncoder(COMPLETION, answer)
    events = events_of(
        encoder.encode(make_output(CompletionOutput(0, "abc", [1, 2], positions[:2])))
        + encoder.encode(make_output(CompletionOutput(0, "ef", [3], positions[2:], "length")))
    )
    streamed = [event["choices"][0]["logprobs"] for event in events]
    whole = json.loads(
        whole_answer(COMPLETION, answer, [make_output(CompletionOutput(0, "abcef", [1, 2, 3], positions, "length"))])
    )["choices"][0]["logprobs"]
    assert streamed[0]["text_offset"] + streamed[1]["text_offset"] == whole["text_offset"] == [4, 6, 7]
    assert streamed[0]["tokens"] + streamed[1]["tokens"] == whole["tokens"] == ["ab", "c", "ef"]
    assert whole["top_logprobs"][1] == {"d": -0.1, "c": -2.0}
    assert whole["token_logprobs"] == [-1.0, -2.0, -3.0]
