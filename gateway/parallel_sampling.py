"""One request that asks for several sequences (`n` > 1): what each child is asked for, and when the parent is done."""

from __future__ import annotations

import dataclasses

from cores.sampling_params import MAX_SEED, RequestOutputKind, SamplingParams
from gateway.outputs import CompletionOutput

_SEED_STRIDE = 0x9E3779B97F4A7C15  # odd: its multiples by different indexes differ modulo 2^63


class ParentRequest:
    """The children of one request. They are admitted and aborted as one unit, but run and finish one by one."""

    def __init__(self, request_id: str, params: SamplingParams) -> None:
        assert params.n > 1
        assert params.seed is not None, "the input processor draws one"
        self.request_id = request_id
        self.n = params.n
        self._params = params
        self._finished: dict[int, CompletionOutput] = {}

    def child_params(self, index: int) -> SamplingParams:
        """What child `index` is asked for. Child 0 has the parent's seed: the first choice is what `n` = 1 would give."""
        params = dataclasses.replace(self._params, n=1, seed=child_seed(self._params.seed or 0, index))
        if index > 0 and params.output_kind is RequestOutputKind.FINAL_ONLY:
            # They are the same for all, and each engine that owes them computes the whole prompt. A stream needs them from
            # whoever speaks first.
            params = dataclasses.replace(params, prompt_logprobs=None)
        return params

    def record(self, completion: CompletionOutput) -> list[CompletionOutput] | None:
        """Keeps the end of one child. All of them, by index, once the last one has ended; None before."""
        assert completion.finished
        assert completion.index not in self._finished
        self._finished[completion.index] = completion
        if len(self._finished) < self.n:
            return None
        return [self._finished[index] for index in sorted(self._finished)]


def child_seed(seed: int, index: int) -> int:
    """Distinct for every index, the same in every run."""
    return seed if index == 0 else (seed + index * _SEED_STRIDE) & MAX_SEED
