"""How one request wants its tokens chosen and when it ends. Validation names the field, the value and what is allowed."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_SEED = 2**63 - 1


class RequestOutputKind(Enum):
    """What each output of a stream holds."""

    CUMULATIVE = "cumulative"  # everything so far
    DELTA = "delta"  # only what is new
    FINAL_ONLY = "final_only"  # one output, at the end


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

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def verify(self) -> None:
        """Raises `InvalidParameterError` for the first field whose value is out of range."""
        for name, low, high in _RANGES:
            _check_range(name, getattr(self, name), low, high)
        if self.top_p <= 0.0:
            raise InvalidParameterError("top_p", f"top_p must be greater than 0 and at most 1, got {self.top_p}")
        if self.repetition_penalty <= 0.0:
            raise InvalidParameterError(
                "repetition_penalty", f"repetition_penalty must be greater than 0, got {self.repetition_penalty}"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameterError(
                "min_tokens", f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}"
            )
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidParameterError("stop", f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}")
        if "" in self.stop:
            raise InvalidParameterError("stop", "stop strings must not be empty")
        for token_id in self.stop_token_ids:
            _check_range("stop_token_ids", token_id, 0, None)
        for token_id, bias in (self.logit_bias or {}).items():
            _check_range("logit_bias", token_id, 0, None)
            _check_range("logit_bias", bias, -100.0, 100.0)


# (field, lowest, highest); None is unbounded. NaN fails every row.
_RANGES: tuple[tuple[str, float | None, float | None], ...] = (
    ("n", 1, MAX_N),
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("top_k", -1, None),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.0, 100.0),
    ("seed", -(2**63), MAX_SEED),
    ("max_tokens", 1, None),
    ("min_tokens", 0, None),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
)


def _check_range(name: str, value: float | None, low: float | None, high: float | None) -> None:
    if value is None:
        return
    if math.isnan(value) or (low is not None and value < low) or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidParameterError(name, f"{name} must be {allowed}, got {value}")


# Only what differs from the default crosses the wire, by name: most requests set three fields.
_DEFAULTS: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(SamplingParams)}


def pack_sampling_params(params: SamplingParams) -> dict[str, Any]:
    """The wire form: a map of the fields that differ from their default. `codec` reads it."""
    packed = {name: value for name, default in _DEFAULTS.items() if (value := getattr(params, name)) != default}
    if "output_kind" in packed:
        packed["output_kind"] = packed["output_kind"].value
    return packed
