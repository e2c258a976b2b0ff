"""The request bodies: OpenAI's fields, vLLM's extra ones, and errors that name the field, its value and what is allowed.

`null` means "the default" everywhere, as in OpenAI's API. Unknown fields are ignored, and named in the debug log. Knows the
shape of a request only: whether a value can be served is decided in `sampling`, `prompts` and the engine client.
"""

from __future__ import annotations

import logging
import re
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta, Struct

from gateway.errors import InvalidRequestError

logger = logging.getLogger(__name__)

# Wire integers have 64 bits at most, token ids 32: nothing larger may reach an engine.
Int = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(Struct, frozen=True):
    """OpenAI's wrapping of a schema. `name` and `description` are for models that are told of them; `strict` is always true."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True):
    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputsFields(Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's: one of the first five, and how JSON may be spaced."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    # Accepted for vLLM's clients: there is one backend, which never guesses.
    disable_fallback: bool | None = None


class SamplingRequest(Struct, kw_only=True, frozen=True):
    """What every request for text may have, under the same name on each route."""

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Int | None = None
    skip_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    priority: Int | None = None
    cache_salt: str | None = None
    structured_outputs: StructuredOutputsFields | None = None


class RefusedFields(SamplingRequest, kw_only=True, frozen=True):
    """Those of vLLM that are known only so that they can be refused with advice: see `sampling`."""

    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json_object: Any = None
    logits_processors: Any = None
    logprob_token_ids: Any = None
    thinking_token_budget: Any = None
    repetition_detection: Any = None
    watermarking: Any = None
    return_prompt_text: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    vllm_xargs: Any = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None
    web_search_options: Any = None
    include_reasoning: Any = None
    stream_interval: Any = None


class GenerationRequest(RefusedFields, kw_only=True, frozen=True):
    """What chat and plain completions have in common."""

    stream_options: StreamOptions | None = None
    n: Int | None = None
    best_of: Int | None = None
    max_tokens: Int | None = None
    prompt_logprobs: Int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    # Known, and refused with a clear error where they ask for something: see `sampling`.
    use_beam_search: bool | None = None
    truncate_prompt_tokens: Int | None = None


class CompletionRequest(GenerationRequest, kw_only=True, frozen=True):
    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: Int | None = None
    suffix: str | None = None
    prompt_embeds: Any = None


class ChatCompletionRequest(GenerationRequest, kw_only=True, frozen=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    chat_template: str | None = None
    documents: list[dict[str, Any]] | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None


class TokenizeRequest(Struct, kw_only=True, frozen=True):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    tools: list[dict[str, Any]] | None = None


class DetokenizeRequest(Struct, kw_only=True, frozen=True):
    tokens: list[TokenId]
    model: str | None = None


class LoadLoraAdapterRequest(Struct, kw_only=True, frozen=True):
    lora_name: str
    lora_path: str
    load_inplace: bool | None = None


class UnloadLoraAdapterRequest(Struct, kw_only=True, frozen=True):
    lora_name: str


class EmbeddingRequest(Struct, kw_only=True, frozen=True):
    input: str | list[Any]
    model: str | None = None
    encoding_format: str | None = None
    dimensions: Positive | None = None
    user: str | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    priority: Int | None = None
    truncate_prompt_tokens: Int | None = None


T = TypeVar("T", bound=Struct)


class BodyDecoder(Generic[T]):
    """JSON bytes to one of the structs above. Raises `InvalidRequestError`."""

    def __init__(self, request_type: type[T]) -> None:
        self._decoder = msgspec.json.Decoder(request_type)
        self._known = frozenset(field.encode_name for field in msgspec.structs.fields(request_type))

    def decode(self, body: bytes) -> T:
        try:
            request = self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise _explain(error, parse_json(body)) from None
        except (msgspec.DecodeError, RecursionError) as error:
            raise _no_json(error) from None
        if logger.isEnabledFor(logging.DEBUG):
            unknown = sorted(msgspec.json.decode(body, type=dict[str, msgspec.Raw]).keys() - self._known)
            if unknown:
                logger.debug("ignored unknown fields: %s", ", ".join(unknown))
        return request


def parse_json(body: bytes) -> Any:
    """Any JSON value. Raises `InvalidRequestError`."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _no_json(error) from None


def _no_json(error: Exception) -> InvalidRequestError:
    why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
    return InvalidRequestError(f"the body is not valid JSON: {why}", code="invalid_json")


_AT_PATH = re.compile(r"^(?P<what>.*) - at `\$(?P<path>.*)`$", re.DOTALL)
_EXPECTED = re.compile(r"^Expected (?P<allowed>.*?)(?:, got `(?P<kind>[^`]*)`)?$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>.*)`$")
_STEP = re.compile(r"\.(?P<key>[^.\[]+)|\[(?P<index>\d+)\]")
MAX_SHOWN_VALUE = 80  # characters


def _explain(error: msgspec.ValidationError, document: Any) -> InvalidRequestError:
    """msgspec says what it expected and where; we add the value that stands there."""
    located = _AT_PATH.match(str(error))
    what, path = (located["what"], located["path"].lstrip(".")) if located else (str(error), "")
    param = re.split(r"[.\[]", path, maxsplit=1)[0] or None
    if missing := _MISSING.match(what):
        name = f"{path}.{missing['name']}" if path else missing["name"]
        return InvalidRequestError(f"{name} is required", param or missing["name"])
    expected = _EXPECTED.match(what)
    allowed = expected["allowed"].replace("`", "").replace(" | null", "") if expected else what
    subject = path or "the body"
    if expected is None:  # "Number out of range" and the like
        return InvalidRequestError(f"{subject}: {what}", param)
    return InvalidRequestError(f"{subject} must be {allowed}, got {_shown_value(document, path)}", param)


def _shown_value(value: Any, path: str) -> str:
    """The JSON that stands at `path`, shortened."""
    for step in _STEP.finditer(f".{path}" if path else ""):
        if step["key"] is not None and isinstance(value, dict) and step["key"] in value:
            value = value[step["key"]]
        elif step["index"] is not None and isinstance(value, list):
            value = value[int(step["index"])]
        else:
            break  # msgspec writes `[...]` for a key of a map: show the whole map
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= MAX_SHOWN_VALUE else text[: MAX_SHOWN_VALUE - 1] + "…"
