"""Log-probabilities of prompts: what the model thought of each token that it was given. Pure."""

from __future__ import annotations

from array import array

import torch

from cores.messages import PromptLogprobsChunk
from cores.runner.input_batch import PromptSpan
from cores.runner.interface import SchedulerOutput
from cores.runner.sampler import logprob_columns

# In float32, with their softmax beside them, the logits of a whole step would take a multiple of what they do.
ROWS_AT_ONCE = 64


def prompt_logprobs(logits: torch.Tensor, spans: list[PromptSpan], batch: SchedulerOutput) -> dict[int, PromptLogprobsChunk]:
    """`logits` [rows, vocabulary] of all `spans`, one after the other. By index in `batch.scheduled`."""
    chunks, row = {}, 0
    for span in spans:
        request = batch.scheduled[span.index].request
        # The logits at a position are about the token behind it.
        token_ids = request.token_ids[span.start + 1 : span.start + 1 + span.length]
        num_top = min(request.sampling_params.prompt_logprobs or 0, logits.shape[-1])
        chunks[span.index] = _chunk(logits[row : row + span.length], token_ids, span.start + 1, num_top)
        row += span.length
    return chunks


def _chunk(logits: torch.Tensor, token_ids: list[int], start: int, num_top: int) -> PromptLogprobsChunk:
    chunk = PromptLogprobsChunk(start, num_top, array("f"), array("I"), array("I"), array("f"))
    for first in range(0, len(token_ids), ROWS_AT_ONCE):
        rows = logits[first : first + ROWS_AT_ONCE].float()
        wanted = torch.tensor(token_ids[first : first + ROWS_AT_ONCE], device=logits.device)
        logprobs, ranks, top_ids, top_logprobs = logprob_columns(rows, wanted, num_top)
        chunk.logprobs.frombytes(_bytes(logprobs))
        chunk.ranks.frombytes(_bytes(ranks.to(torch.int32)))
        chunk.top_token_ids.frombytes(_bytes(top_ids.to(torch.int32)))
        chunk.top_logprobs.frombytes(_bytes(top_logprobs))
    return chunk


def _bytes(column: torch.Tensor) -> bytes:
    return column.cpu().contiguous().numpy().tobytes()
