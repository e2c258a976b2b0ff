"""Requests of an exact number of tokens that share nothing but the chat template, so that no prefix cache helps. Pure."""

from __future__ import annotations

import random
from typing import Any

# Each is one token behind a space in every common vocabulary.
SAMPLE_WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand part place case
week company system program question work government number night point home water room mother area money story fact month lot
right study book eye job word business issue side kind head house service friend father power hour game line end member law car
city community name president team minute idea body information back parent face level office door health person art war history
party result change morning reason research girl guy moment air teacher force education
"""
WORDS = SAMPLE_WORDS.split()


def chat_body(rng: random.Random, num_words: int, max_tokens: int) -> dict[str, Any]:
    return _common(max_tokens) | {"messages": [{"role": "user", "content": " ".join(rng.choices(WORDS, k=num_words))}]}


def completion_body(rng: random.Random, token_ids: list[int], num_tokens: int, max_tokens: int) -> dict[str, Any]:
    """A prompt of token ids out of `token_ids`."""
    return _common(max_tokens) | {"prompt": rng.choices(token_ids, k=num_tokens)}


def _common(max_tokens: int) -> dict[str, Any]:
    return {
        "model": "model",
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
