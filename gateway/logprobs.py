"""Log-probabilities as the engine sends them, to what readers get.

A token's `text` is its own bytes decoded by themselves. Bytes that are no whole character are written `\\xe6`, as OpenAI does:
texts of different tokens then differ, and none holds U+FFFD unless the token means it. `bytes_` is always exact.
"""

from __future__ import annotations

from cores.messages import TokenLogprobs
from gateway.outputs import Logprob, PositionLogprobs
from gateway.tokenizer import Tokenizer


def position_logprobs(tokenizer: Tokenizer, token_id: int, entry: TokenLogprobs) -> PositionLogprobs:
    """What is known of one generated token."""
    return PositionLogprobs(
        chosen=_logprob(tokenizer, token_id, entry.logprob, entry.rank),
        top=tuple(
            _logprob(tokenizer, top_id, logprob, rank)
            for rank, (top_id, logprob) in enumerate(zip(entry.top_token_ids, entry.top_logprobs, strict=True), start=1)
        ),
    )


def _logprob(tokenizer: Tokenizer, token_id: int, logprob: float, rank: int) -> Logprob:
    data = tokenizer.token_bytes(token_id)
    return Logprob(token_id, logprob, rank, data.decode(errors="backslashreplace"), data)
