"""What answers are made of: the shapes of the two completion APIs, and whole (not streamed) answers. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.logprobs import PromptLogprobs
from gateway.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from gateway.server.chat_message import AnswerForm
from gateway.server.usage import UsageCounter

LOWEST_LOGPROB = -9999.0  # JSON has no minus infinity


@dataclass(frozen=True, slots=True)
class Answer:
    """What all parts of one answer share."""

    id: str
    model: str
    created: int  # Unix time
    prompt_token_ids: Sequence[Sequence[int]]  # by prompt
    n: int = 1  # sequences per prompt
    echo: tuple[str, ...] = ()  # what each prompt's sequences begin with; empty: nothing
    role: str = "assistant"
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    # How many alternatives of each prompt token are shown: in front of the output's (with `echo`), and by themselves.
    echo_logprobs: int | None = None
    prompt_logprobs: int | None = None
    tokens_as_ids: bool = False  # log-probabilities call a token by its id
    form: AnswerForm | None = None  # of text that is more than content

    @property
    def num_choices(self) -> int:
        return self.n * len(self.prompt_token_ids)

    def prefix_of(self, index: int) -> str:
        return self.echo[index // self.n] if self.echo else ""

    def new_usage(self) -> UsageCounter:
        return UsageCounter(sum(map(len, self.prompt_token_ids)), self.n)


@dataclass(frozen=True, slots=True)
class ApiShape:
    """How one of the APIs wraps text: the JSON around a streamed piece, and the choice of a whole answer."""

    whole_object: str
    chunk_object: str
    before_piece: str
    after_piece: str
    has_roles: bool
    whole_text: Callable[[str, str], dict[str, Any]]  # (role, text) -> fields of a choice
    # (positions, offset of the first one's text, `tokens_as_ids`)
    logprobs: Callable[[Sequence[PositionLogprobs], int, bool], dict[str, Any]]


def whole_answer(shape: ApiShape, answer: Answer, outputs: Sequence[RequestOutput]) -> bytes:
    """The answer to a request that was not streamed, from the final output of each prompt."""
    usage = answer.new_usage()
    for output in outputs:
        usage.add(output)
    choices = [_whole_choice(shape, answer, completion, output) for output in outputs for completion in output.outputs]
    document = {
        "id": answer.id,
        "object": shape.whole_object,
        "created": answer.created,
        "model": answer.model,
        "choices": sorted(choices, key=lambda choice: choice["index"]),
        "usage": usage.to_document(),
    }
    if answer.return_token_ids and shape.has_roles:
        document["prompt_token_ids"] = answer.prompt_token_ids[0]
    if answer.prompt_logprobs is not None and shape.has_roles:
        document["prompt_logprobs"] = prompt_logprobs(outputs[0].prompt_logprobs, answer.prompt_logprobs)
    return msgspec.json.encode(document)


def _whole_choice(shape: ApiShape, answer: Answer, completion: CompletionOutput, output: RequestOutput) -> dict[str, Any]:
    prefix = answer.prefix_of(completion.index)
    positions = completion.logprobs
    finish_reason = completion.finish_reason
    if answer.form is None:
        said = shape.whole_text(answer.role, prefix + completion.text)
    else:
        message, finish_reason = answer.form.whole_message(prefix, completion.text, finish_reason)
        said = {"message": {"role": answer.role, **message}}
    choice = {
        "index": completion.index,
        **said,
        "logprobs": None if positions is None else shape.logprobs(positions, len(prefix), answer.tokens_as_ids),
        "finish_reason": finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if answer.return_token_ids:
        choice["token_ids"] = completion.token_ids
        if not shape.has_roles:
            choice["prompt_token_ids"] = answer.prompt_token_ids[completion.index // answer.n]
    if answer.echo_logprobs is not None and choice["logprobs"] is not None and output.prompt_logprobs is not None:
        echoed = echoed_logprobs(output.prompt_logprobs, answer.echo_logprobs, as_ids=answer.tokens_as_ids)
        choice["logprobs"] = {name: column + choice["logprobs"][name] for name, column in echoed.items()}
    if answer.prompt_logprobs is not None and not shape.has_roles:
        choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs, answer.prompt_logprobs)
    return choice


def chat_logprobs(positions: Sequence[PositionLogprobs], _offset: int, as_ids: bool) -> dict[str, Any]:
    content = [
        {
            **_chat_logprob(position.chosen, as_ids),
            "top_logprobs": [_chat_logprob(candidate, as_ids) for candidate in position.top],
        }
        for position in positions
    ]
    return {"content": content}


def _chat_logprob(candidate: Logprob, as_ids: bool) -> dict[str, Any]:
    return {
        "token": _name(candidate, as_ids),
        "logprob": _finite(candidate.logprob),
        "bytes": list(candidate.bytes_),
    }


def _name(candidate: Logprob, as_ids: bool) -> str:
    return _id_name(candidate.token_id) if as_ids else candidate.text


def _id_name(token_id: int) -> str:
    return f"token_id:{token_id}"


def completion_logprobs(positions: Sequence[PositionLogprobs], offset: int, as_ids: bool) -> dict[str, Any]:
    """OpenAI's columns. `top_logprobs` has the chosen token beside the most likely ones."""
    offsets, top = [], []
    for position in positions:
        offsets.append(offset)
        offset += len(position.chosen.text)
        candidates = (*position.top, position.chosen)
        top.append({_name(candidate, as_ids): _finite(candidate.logprob) for candidate in candidates})
    return {
        "tokens": [_name(position.chosen, as_ids) for position in positions],
        "token_logprobs": [_finite(position.chosen.logprob) for position in positions],
        "top_logprobs": top,
        "text_offset": offsets,
    }


def echoed_logprobs(known: PromptLogprobs, num_top: int, *, as_ids: bool) -> dict[str, Any]:
    """The same of a prompt that stands in front of its output. Its first token has no log-probability."""
    positions = [PositionLogprobs(position.chosen, position.top[:num_top]) for position in known[1:] if position is not None]
    columns = completion_logprobs(positions, len(known.first_text), as_ids)
    name = _id_name(known.first_token_id) if as_ids else known.first_text
    first = {"tokens": [name], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}
    return {key: first[key] + column for key, column in columns.items()}


def prompt_logprobs(known: PromptLogprobs | None, num_top: int) -> list[dict[str, Any] | None] | None:
    """vLLM's: for each token of the prompt its candidates by token id, the actual one first. None of the first token."""
    if known is None:
        return None
    return [None if position is None else _candidates((position.chosen, *position.top[:num_top])) for position in known]


def _candidates(candidates: Sequence[Logprob]) -> dict[str, Any]:
    return {str(c.token_id): {"logprob": _finite(c.logprob), "rank": c.rank, "decoded_token": c.text} for c in candidates}


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


CHAT = ApiShape(
    whole_object="chat.completion",
    chunk_object="chat.completion.chunk",
    before_piece='"delta":{"content":',
    after_piece="}",
    has_roles=True,
    whole_text=lambda role, text: {"message": {"role": role, "content": text}},
    logprobs=chat_logprobs,
)
COMPLETION = ApiShape(
    whole_object="text_completion",
    chunk_object="text_completion",
    before_piece='"text":',
    after_piece="",
    has_roles=False,
    whole_text=lambda _role, text: {"text": text},
    logprobs=completion_logprobs,
)
