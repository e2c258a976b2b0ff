"""One request of a trace on its way through the simulation, as its client sees it, and as an engine's scheduler gets it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from balancer.simulation.trace import TraceRequest
from cores.block_hash import BlockHash, BlockKey, landmark_stride, to_keys
from cores.request import Request
from cores.sampling_params import SamplingParams

_SAMPLING_PARAMS = SamplingParams()


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """Mutable: ranks write down when its tokens came."""

    handle: int
    front_end: int
    trace: TraceRequest
    block_hashes: list[BlockHash]  # of all full blocks, output included; empty: no prefix cache
    num_prompt_blocks: int  # so many of them are the prompt's
    num_output_tokens: int = 0  # delivered so far
    num_cached_tokens: int = 0  # of its first admission
    num_moves: int = 0
    rank: int | None = None  # that has it, or had it last
    first_token_s: float | None = None
    last_token_s: float | None = None  # known where its tokens stopped to flow, and at its end
    stalls_s: list[float] = field(default_factory=list)  # gaps between tokens that a preemption or a move made
    num_ends: int = 0
    error: str | None = None
    has_left: bool = False  # its client has; what still comes for it is dropped

    @property
    def key(self) -> tuple[int, int]:
        return (self.front_end, self.handle)

    @property
    def arrival_s(self) -> float:
        return self.trace.arrival_s

    @property
    def ttft_s(self) -> float:
        """Once it has its first token."""
        assert self.first_token_s is not None
        return self.first_token_s - self.arrival_s

    @property
    def prompt_hashes(self) -> list[BlockHash]:
        """Of the prompt alone, which is all that a front end can know of them."""
        return self.block_hashes[: self.num_prompt_blocks]

    @property
    def num_prompt_tokens(self) -> int:
        """To be computed by the next rank: the prompt, and what has been delivered behind it."""
        return self.trace.num_prompt_tokens + self.num_output_tokens

    def landmarks(self, block_size: int) -> Sequence[BlockKey]:
        """Of what a cache may spare the next rank: one token at least is always computed."""
        stride = landmark_stride(block_size)
        num_landmarks = (self.num_prompt_tokens - 1) // (stride * block_size)
        return to_keys(self.block_hashes[stride - 1 : num_landmarks * stride : stride])

    def on_prompt_done(self, now: float, request: Request) -> None:
        """An engine has computed all that `request` began with, and one token more."""
        if self.first_token_s is None:
            self.first_token_s = now
            self.num_cached_tokens = request.num_cached_tokens
        elif self.last_token_s is not None:
            self.stalls_s.append(now - self.last_token_s)

    def on_end(self, now: float, error: str | None = None) -> None:
        self.num_ends += 1
        self.last_token_s = now
        self.error = error

    def on_departure(self, now: float) -> None:
        self.has_left = True
        self.on_end(now, "the client left")

    def for_scheduler(self) -> Request:
        """As it arrives at an engine. Only the number of its tokens matters there, so each takes one byte and not eight."""
        return Request(
            key=self.key,
            request_id=str(self.handle),
            token_ids=cast("list[int]", bytearray(self.num_prompt_tokens)),
            num_prompt_tokens=self.num_prompt_tokens,
            num_original_prompt_tokens=self.trace.num_prompt_tokens,
            sampling_params=_SAMPLING_PARAMS,
            max_total_tokens=self.trace.num_prompt_tokens + self.trace.num_output_tokens,
            block_hashes=self.block_hashes,  # complete: the scheduler computes none
            runner_state=self,
        )


def make_block_hashes(trace: TraceRequest, handle: int, block_size: int, hash_id_tokens: int) -> list[BlockHash]:
    """Hashes of all blocks that the request will ever fill: of its prompt as the trace shares them, of its output its own.

    A prompt block of `block_size` lies within one entry of `hash_ids`, or spans several whole ones.
    """
    hashes = []
    num_shared = trace.num_prompt_tokens // block_size
    for index in range((trace.num_prompt_tokens + trace.num_output_tokens) // block_size):
        last_token = (index + 1) * block_size - 1
        if index < num_shared and last_token // hash_id_tokens < len(trace.hash_ids):
            # Ids are chained: the last one of a block stands for all before it. Blocks within one id are told apart by place.
            name = f"{trace.hash_ids[last_token // hash_id_tokens]}:{index}"
        else:
            name = f"{handle}/{index}"
        hashes.append(hashlib.blake2b(name.encode(), digest_size=16).digest())
    return hashes
