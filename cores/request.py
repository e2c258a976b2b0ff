"""One sequence inside an engine core: its tokens, how far they are computed, and which KV blocks hold them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from cores.block_hash import BlockHash, root_hash
from cores.messages import EngineCoreRequest
from cores.pooling_params import PoolingParams
from cores.sampling_params import SamplingParams

RequestKey = tuple[int, int]  # (front end index, handle)


class RequestStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waits again, keeps its tokens, recomputes them
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """Mutable, owned by the scheduler; a runner only reads it, but for `runner_state`.

    `token_ids` = prompt + output. The cache holds K/V of the first `num_computed_tokens` of them. In steady decode exactly one
    token, the last sampled, is not computed yet.
    """

    key: RequestKey
    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int  # of the prompt as sent; a continued request's includes tokens delivered earlier
    num_original_prompt_tokens: int
    sampling_params: SamplingParams
    max_total_tokens: int  # original prompt + max_tokens, capped by the model length
    priority: int = 0
    arrival_time_s: float = 0.0
    root_hash: BlockHash = b""
    lora_id: str | None = None
    pooling_params: PoolingParams | None = None  # set: it ends with its prompt, as a vector

    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_expected_tokens: int = 0  # until it is admitted: what the prefix cache had of it when it came
    num_cached_tokens: int = 0  # of the first admission: prompt tokens found in the prefix cache
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[BlockHash] = field(default_factory=list)  # of the full blocks, as far as they were needed
    num_cached_blocks: int = 0  # so many of its blocks, from the first, others can find in the prefix cache
    cache_generation: int = 0  # of the prefix cache at admission
    received_s: float = 0.0  # the engine's clock
    first_scheduled_s: float | None = None
    has_sampled: bool = False  # its first token from this engine is out
    order: int = 0  # arrival number in this engine; preemption keeps it
    queue_key: tuple[int, int] = (0, 0)  # place in every queue: (priority, order); the later one gives way
    # EOS unless ignored, and `stop_token_ids`: masked until min_tokens, then they end it.
    stop_ids: frozenset[int] = frozenset()
    num_passed_over: int = 0  # requests that were admitted before it because their adapters had a slot, and its own did not
    # Log-probabilities of its prompt are still owed: until then what the prefix cache has must be computed all the same.
    needs_prompt_logprobs: bool = False
    runner_state: object = None  # the runner's own notes on this request; they end with it

    @classmethod
    def from_engine_core_request(
        cls,
        client: int,
        request: EngineCoreRequest,
        max_model_len: int,
        eos_token_ids: tuple[int, ...] = (),
        lora_id: str | None = None,
    ) -> Request:
        """`lora_id` is that of the adapter which the request names."""
        params = request.sampling_params
        budget = params.max_tokens if params.max_tokens is not None else max_model_len
        return cls(
            key=(client, request.handle),
            request_id=request.request_id,
            token_ids=list(request.prompt_token_ids),
            num_prompt_tokens=len(request.prompt_token_ids),
            num_original_prompt_tokens=request.num_original_prompt_tokens,
            sampling_params=params,
            max_total_tokens=(
                min(request.num_original_prompt_tokens + budget, max_model_len)
                if request.pooling_params is None
                else len(request.prompt_token_ids) + 1  # a prompt may be as long as the model takes: nothing follows it
            ),
            priority=request.priority,
            arrival_time_s=request.arrival_time_s,
            root_hash=root_hash(lora_id, request.cache_salt),
            lora_id=lora_id,
            needs_prompt_logprobs=params.prompt_logprobs is not None and request.num_original_prompt_tokens > 1,
            pooling_params=request.pooling_params,
            stop_ids=frozenset(params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *eos_token_ids)),
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_tokens_to_compute(self) -> int:
        return len(self.token_ids) - max(self.num_computed_tokens, self.num_expected_tokens)

    @property
    def num_tokens_to_come(self) -> int:
        """At least: a prompt that leaves no room for one token is no use, unless none is wanted."""
        return 1 if self.pooling_params is None else 0

    @property
    def num_output_tokens(self) -> int:
        """Generated so far, counted from the original prompt: also what was generated elsewhere."""
        return len(self.token_ids) - self.num_original_prompt_tokens

    @property
    def is_decoding(self) -> bool:
        """The prompt is computed and one sampled token waits for its turn."""
        return self.num_computed_tokens >= self.num_prompt_tokens and self.num_tokens - self.num_computed_tokens == 1
