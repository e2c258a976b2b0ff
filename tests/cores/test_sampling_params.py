"""Values out of range are refused with the field, the value and what is allowed."""

from __future__ import annotations

import math
from typing import Any

import pytest

from cores.sampling_params import InvalidParameterError, SamplingParams, pack_sampling_params


@pytest.mark.parametrize(
    ("values", "param", "message"),
    [
        ({"temperature": -0.1}, "temperature", "temperature must be between 0.0 and 100.0, got -0.1"),
        ({"temperature": math.nan}, "temperature", "temperature must be between 0.0 and 100.0, got nan"),
        ({"top_p": 0.0}, "top_p", "top_p must be above 0 and at most 1.0, got 0.0"),
        ({"top_p": 1.1}, "top_p", "top_p must be above 0 and at most 1.0, got 1.1"),
        ({"top_k": -2}, "top_k", f"top_k must be between -1 and {2**31 - 1}, got -2"),
        ({"n": 0}, "n", "n must be between 1 and 128, got 0"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1, got 0"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens", "min_tokens must be at most max_tokens (3), got 4"),
        ({"repetition_penalty": 0.0}, "repetition_penalty", "repetition_penalty must be above 0 and at most 100.0, got 0.0"),
        ({"logprobs": 21}, "logprobs", "logprobs must be between 0 and 20, got 21"),
        ({"stop": ("a", "")}, "stop", "stop strings must not be empty"),
        ({"stop": ("a",) * 65}, "stop", "stop takes at most 64 strings, got 65"),
        ({"stop_token_ids": (3, -1)}, "stop_token_ids", "stop_token_ids: token ids must be at least 0, got -1"),
        ({"logit_bias": {1: 101.0}}, "logit_bias", "logit_bias must be between -100.0 and 100.0, got 101.0"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias", "logit_bias: token ids must be at least 0, got -1"),
        ({"seed": 2**63}, "seed", f"seed must be between {-(2**63)} and {2**63 - 1}, got {2**63}"),
    ],
)
def test_out_of_range(values: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        SamplingParams(**values).verify()
    assert (caught.value.param, str(caught.value)) == (param, message)


@pytest.mark.parametrize(
    ("values", "allowed"),
    [
        ({"n": 1.5}, "an integer, got 1.5"),
        ({"max_tokens": "3"}, "an integer or None, got '3'"),
        ({"logprobs": True}, "an integer or None, got True"),
        ({"seed": "a"}, "an integer or None, got 'a'"),
        ({"temperature": "hot"}, "a number, got 'hot'"),
        ({"ignore_eos": 1}, "True or False, got 1"),
        ({"stop": "x"}, "a sequence of strings that are valid Unicode, got 'x'"),
        ({"stop": (1,)}, "a sequence of strings that are valid Unicode, got (1,)"),
        ({"stop": ("\ud800",)}, "a sequence of strings that are valid Unicode, got ('\\ud800',)"),
        ({"stop_token_ids": 5}, "a sequence of integers, got 5"),
        ({"allowed_token_ids": ["a"]}, "a sequence of integers or None, got ['a']"),
        ({"logit_bias": [1]}, "a map from integers to numbers, or None, got [1]"),
        ({"logit_bias": {"1": 1.0}}, "a map from integers to numbers, or None, got {'1': 1.0}"),
    ],
)
def test_what_an_engine_could_not_read_is_refused_by_name(values: dict[str, Any], allowed: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        SamplingParams(**values).verify()
    (name,) = values
    assert (caught.value.param, str(caught.value)) == (name, f"{name} must be {allowed}")


@pytest.mark.parametrize(
    "values", [{}, {"temperature": 0.0}, {"top_p": 1.0, "top_k": -1}, {"max_tokens": 1, "min_tokens": 1}, {"seed": -(2**63)}]
)
def test_the_edges_are_allowed(values: dict[str, Any]) -> None:
    SamplingParams(**values).verify()


def test_defaults_take_no_room_on_the_wire() -> None:
    assert pack_sampling_params(SamplingParams()) == {}
    assert pack_sampling_params(SamplingParams(temperature=0.5)) == {"temperature": 0.5}


def test_temperature_zero_is_greedy() -> None:
    assert SamplingParams(temperature=0.0).is_greedy
    assert not SamplingParams(temperature=0.01).is_greedy
