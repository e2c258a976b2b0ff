"""How fast an engine is, from the times of its steps: moving averages. Pure.

A step with prompt tokens takes what a step without takes, and so much more for each of them. Tokens over seconds of such steps
would say more about how full they were than about the engine: ten tokens in a step of their own look a hundred times as dear as
a thousand. So the time of a step without prompt tokens is taken off first, and what is left is fitted to the tokens by least
squares, in which long prompts weigh more. While that is little beside the rest it is noise, and the rate stays unmeasured.
"""

from __future__ import annotations

EWMA_WEIGHT = 0.1  # of the newest step: half of what is remembered is younger than 7 steps
MIN_SHARE = 0.5  # of the time for prompt tokens, beside that of a step without, for a rate that means something


class StepTimes:
    def __init__(self, decodes: bool = True) -> None:
        """An engine that never `decodes` has no steps without prompt tokens: all of a step's time is for these."""
        self.step_ms = 0.0
        self._decodes = decodes
        # Of steps without prompt tokens.
        self._decode_s = 0.0
        self._decode_tokens = 0.0
        # Of steps with p prompt tokens that took y seconds: the averages of p, p·p and p·y.
        self._p = 0.0
        self._pp = 0.0
        self._py = 0.0

    def add(self, step_s: float, num_prefill_tokens: int, num_decodes: int = 0) -> None:
        self.step_ms += _weight(self.step_ms) * (step_s * 1e3 - self.step_ms)
        if num_prefill_tokens:
            p, weight = num_prefill_tokens, _weight(self._pp)
            self._p += weight * (p - self._p)
            self._pp += weight * (p * p - self._pp)
            self._py += weight * (p * step_s - self._py)
        else:
            weight = _weight(self._decode_s)
            self._decode_s += weight * (step_s - self._decode_s)
            self._decode_tokens += weight * (num_decodes - self._decode_tokens)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Of prompt tokens alone, whatever else was in their steps. 0.0 until there is something to tell."""
        if not self._decodes:
            return self._pp / self._py if self._py else 0.0
        others = self._decode_s * self._p
        prompts = self._py - others
        if not others or prompts < MIN_SHARE * others:
            return 0.0
        return self._pp / prompts

    @property
    def decode_tokens_per_s(self) -> float:
        """Of all sequences together, in steps without prompt tokens."""
        return self._decode_tokens / self._decode_s if self._decode_s else 0.0


def _weight(average: float) -> float:
    """The first value is the average."""
    return EWMA_WEIGHT if average else 1.0
