"""How much memory a step takes beside weights and KV cache: found out by running the largest one there can be.

Only a GPU needs it. There the cache gets all that is left, and a step that finds too little is the engine's death.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from cores.request import Request
from cores.runner.interface import ScheduledRequest, SchedulerOutput
from cores.sampling_params import SamplingParams

# Takes the sampler through its most expensive way: every filter, and noise for every token.
COSTLY_SAMPLING = SamplingParams(temperature=1.0, top_k=1000, top_p=0.9, min_p=0.01, seed=0)


def largest_batch(max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int, block_size: int) -> SchedulerOutput:
    """Prompts that use up the step's budget and all sample: as many as may run, or as few as must for their length."""
    num_seqs = max(min(max_num_seqs, max_num_batched_tokens), -(-max_num_batched_tokens // (max_model_len - 1)))
    scheduled, num_blocks_used = [], 0
    for i in range(num_seqs):
        num_tokens = (max_num_batched_tokens * (i + 1)) // num_seqs - (max_num_batched_tokens * i) // num_seqs
        num_blocks = -(-num_tokens // block_size)
        request = Request(
            key=(0, i),
            request_id="largest step",
            token_ids=[0] * num_tokens,
            num_prompt_tokens=num_tokens,
            num_original_prompt_tokens=num_tokens,
            sampling_params=COSTLY_SAMPLING,
            max_total_tokens=num_tokens + 1,
            block_ids=list(range(num_blocks_used, num_blocks_used + num_blocks)),
        )
        num_blocks_used += num_blocks
        scheduled.append(ScheduledRequest(request, num_tokens, samples=True))
    return SchedulerOutput(scheduled, num_decodes=0, num_tokens=max_num_batched_tokens)


def num_blocks_of(batch: SchedulerOutput) -> int:
    return sum(len(scheduled.request.block_ids) for scheduled in batch.scheduled)


def peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """What `step` needed at most at any moment, on a CUDA device."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
