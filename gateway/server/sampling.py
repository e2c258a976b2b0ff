"""From a request body to `SamplingParams`. What cannot be served yet is refused by name, never ignored. Pure."""

from __future__ import annotations

from typing import Any

from cores.sampling_params import MAX_LOGPROBS, RequestOutputKind, SamplingParams, StructuredOutputs
from gateway.errors import InvalidRequestError
from gateway.sampling_defaults import SamplingDefaults
from gateway.server.schema import ChatCompletionRequest, CompletionRequest, GenerationRequest
from gateway.server.structured import to_structured_outputs
from gateway.server.tools import forced_call

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for plain completions; chat goes on up to the model's length

_SAME_NAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
    "min_tokens", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output",
)  # fmt: skip
_LISTS = ("stop_token_ids", "allowed_token_ids", "bad_words")


# What else to do where a field of vLLM's is refused; a value that asks for nothing may be sent.
_LEAVE_OUT = "leave it out"
_ADVICE = {
    "guided_json": "use structured_outputs.json or response_format",
    "guided_regex": "use structured_outputs.regex",
    "guided_choice": "use structured_outputs.choice",
    "guided_grammar": "use structured_outputs.grammar",
    "guided_json_object": "use structured_outputs.json_object or response_format",
    "logits_processors": "use logit_bias, bad_words or allowed_token_ids",
    "logprob_token_ids": "use logprobs, with up to 20 alternatives, or allowed_token_ids",
    "thinking_token_budget": "use max_tokens, or reasoning_effort where the chat template knows it",
    "return_prompt_text": "use return_token_ids, and /detokenize",
    **dict.fromkeys(("repetition_detection", "watermarking", "vllm_xargs", "web_search_options"), _LEAVE_OUT),
    **dict.fromkeys(
        ("kv_transfer_params", "ec_transfer_params"), "prompts are computed where they are answered; " + _LEAVE_OUT
    ),
    **dict.fromkeys(("mm_processor_kwargs", "media_io_kwargs"), "models here take text only; " + _LEAVE_OUT),
    "include_reasoning": "reasoning is always shown, apart with --reasoning-parser; " + _LEAVE_OUT,
    "stream_interval": "tokens are sent as they come; " + _LEAVE_OUT,
}
_ASKS_NOTHING = {"include_reasoning": True, "stream_interval": 1}  # of the others: false


def to_sampling_params(request: CompletionRequest | ChatCompletionRequest, defaults: SamplingDefaults) -> SamplingParams:
    """`defaults` stand where the request does not say.

    Raises `InvalidRequestError` or `InvalidParameterError` for the first field that cannot be served.
    """
    refuse_unsupported(request)
    values = dict(defaults)
    values |= {name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None}
    values.update({name: tuple(value) for name in _LISTS if (value := getattr(request, name)) is not None})
    if request.stop is not None:
        values["stop"] = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
    if request.logit_bias is not None:
        values["logit_bias"] = _logit_bias(request.logit_bias)
    if (max_tokens := _max_tokens(request)) is not None:
        values["max_tokens"] = max_tokens
    params = SamplingParams(
        **values,
        logprobs=_num_logprobs(request),
        prompt_logprobs=_num_prompt_logprobs(request),
        structured_outputs=_structured_outputs(request),
        output_kind=RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY,
    )
    params.verify()
    return params


def _structured_outputs(request: CompletionRequest | ChatCompletionRequest) -> StructuredOutputs | None:
    """A call that must be made leaves nothing to say that `response_format` could be about."""
    call = forced_call(request) if isinstance(request, ChatCompletionRequest) else None
    if call is not None and request.structured_outputs is not None:
        raise InvalidRequestError("structured_outputs and a tool_choice that forces a call exclude each other", "tool_choice")
    return call or to_structured_outputs(request)


def _max_tokens(request: CompletionRequest | ChatCompletionRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        if is_prompt_alone(request):
            return 1
        return COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    return request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens


def is_prompt_alone(request: CompletionRequest) -> bool:
    """The prompt is to be scored, and nothing said: an engine says one token all the same, which is not shown."""
    return bool(request.echo) and request.max_tokens == 0


def _num_logprobs(request: CompletionRequest | ChatCompletionRequest) -> int | None:
    """How many alternatives beside the chosen token; None: no log-probabilities at all."""
    if isinstance(request, CompletionRequest):
        return request.logprobs
    top = request.top_logprobs
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        raise InvalidRequestError(f"top_logprobs must be between 0 and {MAX_LOGPROBS}, got {top}", "top_logprobs")
    if not request.logprobs:
        if top:
            raise InvalidRequestError(f"top_logprobs ({top}) needs logprobs to be true", "top_logprobs")
        return None
    return top or 0


def _num_prompt_logprobs(request: CompletionRequest | ChatCompletionRequest) -> int | None:
    """For the field of that name, and for the echoed prompt of a completion with log-probabilities."""
    echoed = request.logprobs if isinstance(request, CompletionRequest) and request.echo else None
    wanted = [number for number in (request.prompt_logprobs, echoed) if number is not None]
    return max(wanted, default=None)


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    result = {}
    for key, value in bias.items():
        try:
            result[int(key)] = value
        except ValueError:
            raise InvalidRequestError(f"logit_bias keys must be token ids, got {key!r}", "logit_bias") from None
    return result


def refuse_unsupported(request: GenerationRequest) -> None:
    """Raises `InvalidRequestError` for a field that asks for what is not there yet."""
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("stream_options is only allowed when stream is true", "stream_options")
    most = request.n or 1
    if request.best_of is not None and not 1 <= request.best_of <= most:
        raise InvalidRequestError(
            f"best_of must be between 1 and n ({most}), got {request.best_of}: more than n are not supported", "best_of"
        )
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidRequestError("prompt_logprobs are not available in streams", "prompt_logprobs")
    _refuse_set(request, "truncate_prompt_tokens")
    if request.use_beam_search:
        raise InvalidRequestError("use_beam_search is not supported", "use_beam_search")
    for name, advice in _ADVICE.items():
        value, nothing = getattr(request, name), _ASKS_NOTHING.get(name, False)
        if value is not None and not (type(value) is type(nothing) and value == nothing):
            raise InvalidRequestError(f"{name} is not supported; {advice}", name)
    if isinstance(request, ChatCompletionRequest):
        _refuse_unsupported_chat(request)
    elif isinstance(request, CompletionRequest):
        _refuse_unsupported_completion(request)


def _refuse_unsupported_completion(request: CompletionRequest) -> None:
    for name in ("suffix", "prompt_embeds"):
        _refuse_set(request, name)


def _refuse_unsupported_chat(request: ChatCompletionRequest) -> None:
    if request.function_call not in (None, "none", "auto"):
        _refuse("function_call", request.function_call, "none")
    if request.functions and request.function_call != "none":
        raise InvalidRequestError("functions are not supported yet", "functions")
    if request.modalities not in (None, ["text"]):
        _refuse("modalities", request.modalities, ["text"])
    for name in ("chat_template", "documents", "audio"):
        _refuse_set(request, name)


def _refuse_set(request: GenerationRequest, name: str) -> None:
    if getattr(request, name) is not None:
        raise InvalidRequestError(f"{name} is not supported yet; leave it out", name)


def _refuse(name: str, value: Any, allowed: Any) -> None:
    raise InvalidRequestError(f"{name} {value!r} is not supported yet; allowed: {allowed!r}", name)
