"""How one request wants its tokens chosen and when it ends. Validation names the field, the value and what is allowed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from typing import Any

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024  # it goes to an engine once for each of n sequences
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 64
MAX_SEED = 2**63 - 1
# Fields that an engine must be able to serve if they are set: the others it may ignore, as one without logits does.
OPTIONAL_FEATURES = ("logprobs", "prompt_logprobs", "structured_outputs")


class RequestOutputKind(Enum):
    """What each output of a stream holds."""

    CUMULATIVE = "cumulative"  # everything so far
    DELTA = "delta"  # only what is new
    FINAL_ONLY = "final_only"  # one output, at the end


class StructuredOutputKind(Enum):
    """In which language `StructuredOutputs.spec` is written."""

    JSON = "json"  # a JSON schema
    REGEX = "regex"  # matches the whole output
    CHOICE = "choice"  # a JSON list of strings, one of which is the output
    GRAMMAR = "grammar"  # Lark, or llama.cpp's GBNF


# In characters. What a compiler takes grows with the square of a grammar's length in the worst case: at this size a mask of the
# worst grammar we found takes 0.4 s, and real ones are a tenth as long.
MAX_SPEC_CHARS = {
    StructuredOutputKind.JSON: 128 * 1024,
    StructuredOutputKind.REGEX: 32 * 1024,
    StructuredOutputKind.CHOICE: 128 * 1024,
    StructuredOutputKind.GRAMMAR: 32 * 1024,
}
MAX_MARKER_CHARS = 64


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Free text in front of what an output must look like, and the markers around it, each of them one token or several."""

    start: str
    end: str
    is_open: bool  # the output is reasoning from its beginning; otherwise only if it begins with `start`


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """What the output must look like. An engine chooses only tokens that can lead there, and ends where nothing can follow."""

    kind: StructuredOutputKind
    spec: str
    param: str = "structured_outputs"  # the request's field that asked for it: errors name it
    reasoning: Reasoning | None = None  # what may stand, or has to end, in front of it


class InvalidParameterError(ValueError):
    """A request field with a value that cannot be served. `param` is the field's public name."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters, named as in vLLM. `temperature` 0 is greedy; `top_k` 0 or -1 is off."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None  # drawn by the front end when the request has none, so that a continued request repeats itself
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = None  # None: up to the model length
    min_tokens: int = 0
    logprobs: int | None = None  # how many alternatives beside the chosen token
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputs | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()  # `bad_words` as tokens, made by the front end: engines know no text

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def first_missing(self, features: Collection[str]) -> str | None:
        """The field that asks for something of `OPTIONAL_FEATURES` that an engine with these `features` does not have."""
        for name in OPTIONAL_FEATURES:
            if name not in features and getattr(self, name) is not None:
                return self.structured_outputs.param if self.structured_outputs and name == "structured_outputs" else name
        return None

    def verify(self) -> None:
        """Raises `InvalidParameterError` for the first field whose value is of another type or out of range."""
        for name, (is_allowed, allowed) in _TYPES.items():
            if not is_allowed(value := getattr(self, name)):
                raise InvalidParameterError(name, f"{name} must be {allowed}, got {value!r:.80}")
        for name, low, high in _RANGES:
            _check_range(name, getattr(self, name), low, high)
        for name, highest in _ABOVE_ZERO:
            if not 0.0 < (number := getattr(self, name)) <= highest:
                raise InvalidParameterError(name, f"{name} must be above 0 and at most {highest}, got {number}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameterError(
                "min_tokens", f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}"
            )
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidParameterError("stop", f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}")
        if "" in self.stop:
            raise InvalidParameterError("stop", "stop strings must not be empty")
        _check_length("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        _check_length("logit_bias", self.logit_bias or (), MAX_LOGIT_BIAS)
        _check_bad_words(self.bad_words)
        _check_token_ids("stop_token_ids", self.stop_token_ids)
        _check_token_ids("logit_bias", self.logit_bias or ())
        for bias in (self.logit_bias or {}).values():
            _check_range("logit_bias", bias, -100.0, 100.0)
        if self.structured_outputs is not None:
            _check_spec(self.structured_outputs)


def is_int(value: object) -> bool:
    return type(value) is int  # True is none


def is_text(value: object) -> bool:
    """A string that can be sent: half of a surrogate pair cannot."""
    return type(value) is str and (value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value))


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _is_flag(value: object) -> bool:
    return type(value) is bool


def _is_list(is_item: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, tuple | list) and all(map(is_item, value))


def _is_bias(value: object) -> bool:
    return isinstance(value, dict) and all(map(is_int, value)) and all(map(_is_number, value.values()))


def _or_none(is_allowed: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or is_allowed(value)


# What engines could not read would be dropped there as no frame of ours, and its sender would wait for ever. JSON bodies are
# checked before; this is for programs that fill in the fields themselves.
_TYPES: dict[str, tuple[Callable[[object], bool], str]] = {
    **dict.fromkeys(("n", "top_k", "min_tokens"), (is_int, "an integer")),
    **dict.fromkeys(("seed", "max_tokens", "logprobs", "prompt_logprobs"), (_or_none(is_int), "an integer or None")),
    **dict.fromkeys(
        ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
        (_is_number, "a number"),
    ),
    **dict.fromkeys(("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"), (_is_flag, "True or False")),
    **dict.fromkeys(("stop", "bad_words"), (_is_list(is_text), "a sequence of strings that are valid Unicode")),
    "stop_token_ids": (_is_list(is_int), "a sequence of integers"),
    "allowed_token_ids": (_or_none(_is_list(is_int)), "a sequence of integers or None"),
    "logit_bias": (_or_none(_is_bias), "a map from integers to numbers, or None"),
}

# (field, lowest, highest); None is unbounded. NaN fails every row.
_RANGES: tuple[tuple[str, float | None, float | None], ...] = (
    ("n", 1, MAX_N),
    ("temperature", 0.0, 100.0),
    ("top_k", -1, 2**31 - 1),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("seed", -(2**63), MAX_SEED),
    ("max_tokens", 1, None),
    ("min_tokens", 0, None),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
)

_ABOVE_ZERO = (("top_p", 1.0), ("repetition_penalty", 100.0))  # (field, highest)


def _check_range(name: str, value: float | None, low: float | None, high: float | None) -> None:
    if value is None:
        return
    if math.isnan(value) or (low is not None and value < low) or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidParameterError(name, f"{name} must be {allowed}, got {value}")


def _check_token_ids(name: str, token_ids: Collection[int]) -> None:
    if token_ids and (least := min(token_ids)) < 0:
        raise InvalidParameterError(name, f"{name}: token ids must be at least 0, got {least}")


def _check_length(name: str, values: Collection[object], max_length: int) -> None:
    if len(values) > max_length:
        raise InvalidParameterError(name, f"{name} takes at most {max_length} entries, got {len(values)}")


def _check_bad_words(words: tuple[str, ...]) -> None:
    if len(words) > MAX_BAD_WORDS:
        raise InvalidParameterError("bad_words", f"bad_words takes at most {MAX_BAD_WORDS} words, got {len(words)}")
    for word in words:
        if not 0 < len(word) <= MAX_BAD_WORD_CHARS:
            raise InvalidParameterError(
                "bad_words", f"bad_words: each must have between 1 and {MAX_BAD_WORD_CHARS} characters, got {len(word)}"
            )


def _check_spec(wanted: StructuredOutputs) -> None:
    allowed, length = MAX_SPEC_CHARS[wanted.kind], len(wanted.spec)
    if not 0 < length <= allowed:
        raise InvalidParameterError(
            wanted.param, f"{wanted.param}: a {wanted.kind.value} must have between 1 and {allowed} characters, got {length}"
        )
    if wanted.reasoning is not None:
        for marker in (wanted.reasoning.start, wanted.reasoning.end):
            if not (is_text(marker) and 0 < len(marker) <= MAX_MARKER_CHARS):
                raise InvalidParameterError(
                    wanted.param,
                    f"{wanted.param}: markers of reasoning have 1 to {MAX_MARKER_CHARS} characters, got {marker!r:.80}",
                )


# Only what differs from the default crosses the wire, by name: most requests set three fields.
_DEFAULTS: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(SamplingParams)}


def pack_sampling_params(params: SamplingParams) -> dict[str, Any]:
    """The wire form: a map of the fields that differ from their default. `codec` reads it."""
    packed = {name: value for name, default in _DEFAULTS.items() if (value := getattr(params, name)) != default}
    if "output_kind" in packed:
        packed["output_kind"] = packed["output_kind"].value
    if "structured_outputs" in packed:
        wanted: StructuredOutputs = packed["structured_outputs"]
        reasoning = wanted.reasoning
        packed["structured_outputs"] = [wanted.kind.value, wanted.spec, wanted.param]
        if reasoning is not None:
            packed["structured_outputs"].append([reasoning.start, reasoning.end, reasoning.is_open])
    return packed
