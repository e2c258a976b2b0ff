"""Token counts of one HTTP request, as they are delivered. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.outputs import RequestOutput
from gateway.server.schema import StreamOptions


def shows_usage(options: StreamOptions | None, *, is_forced: bool) -> tuple[bool, bool]:
    """Whether a stream has it at its end, and in every chunk."""
    if is_forced or options is None:
        return is_forced, is_forced
    return bool(options.include_usage), bool(options.continuous_usage_stats)


class UsageCounter:
    """Prompt tokens count once per prompt, completion tokens of all its `n` sequences. Beyond OpenAI's schema, `num_moves` says
    how often sequences went on at another rank, if any did."""

    def __init__(self, num_prompt_tokens: int, n: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._n = n
        self._cached_by_prompt: dict[int, int] = {}
        self._moves_by_prompt: dict[int, int] = {}
        self.num_completion_tokens = 0

    def add(self, output: RequestOutput) -> None:
        for completion in output.outputs:
            self.num_completion_tokens += len(completion.token_ids)
        if output.stats.num_cached_tokens and output.outputs:
            self._cached_by_prompt[output.outputs[0].index // self._n] = output.stats.num_cached_tokens
        if output.stats.num_moves and output.outputs:
            self._moves_by_prompt[output.outputs[0].index // self._n] = output.stats.num_moves

    def to_document(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self._num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached_by_prompt.values())},
        }
        if self._moves_by_prompt:
            document["num_moves"] = sum(self._moves_by_prompt.values())
        return document


class ReasoningCounter:
    """How many tokens of an answer that reasons do so: up to the token that ends it, or all. None can be told where no single
    token ends it."""

    def __init__(self, end_id: int | None) -> None:
        self._end_id = end_id
        self._is_over = end_id is None
        self.num_tokens = 0

    def add(self, token_ids: Sequence[int]) -> None:
        if self._is_over:
            return
        self._is_over = self._end_id in token_ids
        self.num_tokens += token_ids.index(self._end_id) + 1 if self._is_over else len(token_ids)
