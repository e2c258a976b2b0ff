"""A model runner that computes nothing: it takes the time that a cost model says and returns tokens that a hash chooses.

Rules
-----
* Token p of a sequence is a hash of (seed, adapter, all token ids before p), so it is the same whether the sequence runs alone
  or in a batch, in one piece or after a preemption, here or continued on another rank. Greedy requests have the seed 0.
* Only ids whose text is printable ASCII are chosen: never a special token, never EOS. A request ends by its length, by a
  stop string or by one of its own `stop_token_ids`; `ignore_eos` makes no difference.
* A step takes what the formula says, counted from the end of the one before if it goes on with the same sequences: what the
  engine core itself does is in that time. Else a busy machine would make every step of the modelled one longer.
* Needs MODEL's config.json and tokenizer.json, no weights; so any `--max-model-len` goes.
* With `--runner pooling`, or the directory of an embedding model, a prompt becomes a unit vector that the same hash seeds.
* Any directory is an adapter. Which one it is depends on its path, and on its adapter_config.json if it has one.
"""

from __future__ import annotations

import cProfile
import dataclasses
import hashlib
import math
import os
import random
import signal
import time
from array import array
from collections.abc import Callable, Collection
from pathlib import Path

from cores.config import DEFAULT_BLOCK_SIZE, ConfigError, EngineConfig, SimulatedConfig
from cores.lora import LoraNotFoundError
from cores.messages import RankId, TokenLogprobs
from cores.request import Request
from cores.runner.faults import FaultScript, StepFault
from cores.runner.interface import ModelInfo, ModelRunnerOutput, SchedulerOutput
from cores.runner.model_dir import read_model_dir
from cores.runner.pooling_kind import PoolingKind, read_pooling_kind

NUM_KV_TOKENS_PER_SEQ = 4096
MAX_OWN_SHARE = 0.25  # of a step, for what the engine core itself does: a core that is slower than that shows


class SimulatedFaultError(RuntimeError):
    """The script says that this step fails."""


class SimulatedModelRunner:
    """`sleep` takes the seconds that a step still has to last: `time.sleep`, which lets other threads run, or a test's own."""

    def __init__(
        self,
        config: EngineConfig,
        rank_id: RankId,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises `ConfigError` for a fault script outside its grammar."""
        self._config = config
        self._cost = config.simulated
        self._rank_id = rank_id
        self._sleep = sleep
        self._clock = clock
        self._end_s = -math.inf  # of the last step
        self._faults = FaultScript.parse(config.simulated.fault, rank_id)
        self._step = 0
        self._choices: list[int] = []  # token ids to choose from
        self._pooling: PoolingKind | None = None
        self._awake = {"weights", "kv_cache"}
        self._profile: cProfile.Profile | None = None

    def load(self) -> ModelInfo:
        self._suffer(self._faults.steps.get(0))
        model = read_model_dir(self._config.model)
        self._choices = model.printable_token_ids
        max_model_len = self._config.max_model_len or model.max_model_len
        block_size = self._config.block_size or DEFAULT_BLOCK_SIZE
        self._pooling = pooling = read_pooling_kind(self._config.model, self._config.runner)
        return ModelInfo(
            device="cpu",
            max_model_len=max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            num_kv_blocks=num_kv_blocks(self._config, max_model_len, block_size),
            block_size=block_size,
            features=("logprobs",),
            supported_tasks=("generate",) if pooling is None else ("embed",),
            embedding_size=0 if pooling is None else pooling.size,
            embedding_dimensions=() if pooling is None else pooling.dimensions,
        )

    def execute(self, batch: SchedulerOutput) -> ModelRunnerOutput:
        assert len(self._awake) == 2, f"a step with only {self._awake} awake"
        begin_s = self._clock()
        self._step += 1
        self._suffer(self._faults.steps.get(self._step))
        sampling = [scheduled.request for scheduled in batch.scheduled if scheduled.samples]
        output = ModelRunnerOutput([self._next_token(request) for request in sampling])
        for i, request in enumerate(sampling):
            if request.sampling_params.logprobs is not None and not self._loses_logprobs(request):
                output.logprobs[i] = _certain(output.token_ids[i], request.sampling_params.logprobs)
            if request.pooling_params is not None:
                output.vectors[i] = self._vector(request)
        if self._faults.failing_tokens:
            output.errors = self._failures(sampling)
        self._wait_for_end(begin_s, step_cost_s(self._cost, batch), goes_on=batch.num_decodes > 0)
        return output

    def _wait_for_end(self, begin_s: float, cost_s: float, *, goes_on: bool) -> None:
        if goes_on and 0.0 <= begin_s - self._end_s <= MAX_OWN_SHARE * cost_s:
            begin_s = self._end_s
        self._end_s = begin_s + cost_s
        self._sleep(max(0.0, self._end_s - self._clock()))

    def load_lora(self, path: str) -> str:
        directory = Path(path)
        if not directory.is_dir():
            raise LoraNotFoundError(f"adapter directory {path!r} does not exist")
        config = directory / "adapter_config.json"
        content = config.read_bytes() if config.is_file() else b""
        return hashlib.blake2b(path.encode() + b"\0" + content, digest_size=16).hexdigest()

    def drop_lora(self, lora_id: str) -> None:
        """Holds nothing."""

    def pin_loras(self, lora_ids: frozenset[str]) -> None:
        """Has no slots."""

    def shutdown(self) -> None:
        """Holds nothing."""

    # --- operations: there is no memory to give back, but a step while asleep is noticed -------------------------------

    def sleep(self, level: int) -> None:
        self._awake.clear()

    def wake_up(self, tags: Collection[str]) -> None:
        self._awake |= set(tags)

    def prepare_weights(self, directory: str) -> None:
        """A directory is as good as another, if it is one of a model with this vocabulary."""
        vocab_size = read_model_dir(directory).vocab_size
        if vocab_size != (own := read_model_dir(self._config.model).vocab_size):
            raise ConfigError(f"weights in {directory!r} do not fit: a vocabulary of {vocab_size}, not {own}")

    def commit_weights(self) -> None:
        """No token depends on them."""

    def discard_weights(self) -> None:
        """None are kept."""

    def start_profile(self) -> None:
        """Of Python: what an engine core costs beside its model."""
        self._profile = cProfile.Profile()
        self._profile.enable()

    def stop_profile(self, stem: Path) -> Path:
        assert self._profile is not None, "no profile was started"
        self._profile.disable()
        path = stem.with_suffix(".prof")
        self._profile.dump_stats(path)
        self._profile = None
        return path

    def set_step_ms(self, step_ms: float) -> None:
        """Another speed from the next step on, by `collective_rpc`. A test that arranges something while requests run begins
        with steps so long that none can end before, and makes them short once it is arranged."""
        if not 0 <= step_ms < math.inf:
            raise ValueError(f"step_ms must be a number of at least 0, got {step_ms!r}")
        self._cost = dataclasses.replace(self._cost, step_ms=step_ms)

    # --- tokens and faults --------------------------------------------------------------------------------------------

    def _next_token(self, request: Request) -> int:
        """The hash of everything before runs along with the request: each token is hashed once, and read at each step."""
        return self._choices[self._hash(request) % len(self._choices)]

    def _vector(self, request: Request) -> bytes:
        assert self._pooling is not None
        assert request.pooling_params is not None
        rng = random.Random(self._hash(request))
        numbers = [rng.gauss(0.0, 1.0) for _ in range(request.pooling_params.dimensions or self._pooling.size)]
        length = math.hypot(*numbers)
        return array("f", [number / length for number in numbers]).tobytes()

    def _hash(self, request: Request) -> int:
        state = request.runner_state
        if not isinstance(state, _RunningHash):
            params = request.sampling_params
            state = request.runner_state = _RunningHash(0 if params.is_greedy else params.seed or 0, request.lora_id or "")
        return state.read(request.token_ids)

    def _failures(self, sampling: list[Request]) -> dict[int, str]:
        return {
            i: f"simulated fault at token {request.num_output_tokens + 1}"
            for i, request in enumerate(sampling)
            if self._faults.failing_tokens.hits(request.num_output_tokens + 1, request.sampling_params.seed)
        }

    def _loses_logprobs(self, request: Request) -> bool:
        return self._faults.tokens_without_logprobs.hits(request.num_output_tokens + 1, request.sampling_params.seed)

    def _suffer(self, fault: StepFault | None) -> None:
        if fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "raise":
            raise SimulatedFaultError(f"simulated fault at step {self._step} of {self._rank_id}")
        while fault == "stall":
            self._sleep(3600.0)


class _RunningHash:
    """BLAKE2b of a seed, an adapter and the tokens so far, extended as they come."""

    __slots__ = ("_hash", "_num_tokens")

    def __init__(self, seed: int, lora_id: str) -> None:
        self._hash = hashlib.blake2b(seed.to_bytes(8, "little", signed=True) + lora_id.encode(), digest_size=8)
        self._num_tokens = 0

    def read(self, token_ids: list[int]) -> int:
        """The hash after all of `token_ids`, which begin with those seen before."""
        self._hash.update(array("I", token_ids[self._num_tokens :]).tobytes())
        self._num_tokens = len(token_ids)
        return int.from_bytes(self._hash.digest(), "little")


def _certain(token_id: int, num_top: int) -> TokenLogprobs:
    """A hash leaves no choice: the token has probability 1, and there are no others."""
    return TokenLogprobs(0.0, 1, (token_id,)[:num_top], (0.0,)[:num_top])


def step_cost_s(cost: SimulatedConfig, batch: SchedulerOutput) -> float:
    """How long one step takes on the modelled machine."""
    num_context_tokens = 0
    if cost.ctx_ns:
        num_context_tokens = sum(s.request.num_computed_tokens + s.num_tokens for s in batch.scheduled)
    return cost.step_s(batch.num_tokens - batch.num_decodes, len(batch.scheduled), num_context_tokens)


def num_kv_blocks(config: EngineConfig, max_model_len: int, block_size: int = DEFAULT_BLOCK_SIZE) -> int:
    """`--num-kv-blocks`, or room for `max_num_seqs` sequences of 4,096 tokens (or the model length), and one of full length."""
    if config.num_kv_blocks is not None:
        num_tokens = config.num_kv_blocks * block_size
        # As with a real model: the scheduler lowers the model's own length to what fits, but not one that was asked for.
        if config.max_model_len is not None and num_tokens < config.max_model_len:
            raise ConfigError(
                f"--num-kv-blocks {config.num_kv_blocks} of {block_size} tokens hold no sequence of"
                f" --max-model-len {config.max_model_len} tokens"
            )
        return config.num_kv_blocks
    if config.kv_cache_memory_bytes is not None:
        raise ConfigError(
            "--kv-cache-memory-bytes says nothing to the simulated engine, which has no KV cache; use --num-kv-blocks"
        )
    num_tokens = max(config.max_num_seqs * min(max_model_len, NUM_KV_TOKENS_PER_SEQ), max_model_len)
    return -(-num_tokens // block_size)
