"""The torch runner: any causal language model of transformers, continuously batched over a paged KV cache.

Knows how to compute one step. Which requests are in it and which blocks they own is the scheduler's business, and how a token
is chosen from logits the sampler's.

The OpenMP trap: processes that share cores must start with `OMP_NUM_THREADS` = cores / processes and `OMP_WAIT_POLICY=passive`
in their environment. Both are read when torch is imported, so the launcher sets them. `num_threads` here can only lower the
number of threads, not stop idle ones from spinning, and two spinning engines on two cores turn a step of 55 ms into seconds.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, replace
from functools import partial

import torch

from cores.config import ConfigError, EngineConfig
from cores.loader import LoadedModel, device_name, free_memory_bytes, gpu_share_bytes, load_model
from cores.request import Request
from cores.runner.attention import MakeAttentionStep
from cores.runner.cpu_kernels import CpuKernels, load_cpu_kernels
from cores.runner.cpu_memory import keep_freed_memory
from cores.runner.grammar import Grammars
from cores.runner.input_batch import build_input_batch
from cores.runner.interface import ModelInfo, ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from cores.runner.lean_decoder import LeanDecoder
from cores.runner.lora import LoraModel
from cores.runner.memory_profile import largest_batch, num_blocks_of, peak_bytes
from cores.runner.padded_attention import make_padded_attention
from cores.runner.paged_kv_cache import PagedKVCache, choose_num_kv_blocks
from cores.runner.pooling import make_vectors
from cores.runner.pooling_kind import PoolingKind
from cores.runner.prompt_logprobs import prompt_logprobs
from cores.runner.sampler import Sampler
from cores.runner.torch_operations import TorchOperations
from cores.runner.varlen_attention import BLOCK_SIZE_MULTIPLE, can_use_varlen, find_kernel, make_varlen_attention
from cores.runner.weights import Weights
from cores.sampling_params import OPTIONAL_FEATURES, SamplingParams
from cores.structured_outputs import GrammarError, load_grammar_tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What `load` makes."""

    loaded: LoadedModel
    weights: Weights
    num_kv_blocks: int
    cache: PagedKVCache | None  # None: it sleeps
    sampler: Sampler
    loras: LoraModel | None
    lean: LeanDecoder | None  # None: the model computes by itself
    grammars: Grammars
    make_attention: MakeAttentionStep


class TorchModelRunner(TorchOperations):
    """A `ModelRunner`. Keeps nothing of a request between steps but its K and V, and its grammar if it has one."""

    def __init__(self, config: EngineConfig, num_threads: int | None = None, pooling: PoolingKind | None = None) -> None:
        """With `pooling`, a prompt's last token becomes a vector and no token is generated."""
        self._config = config
        self._pooling = pooling
        self._num_threads = num_threads
        self._parts: _Parts | None = None

    def load(self) -> ModelInfo:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        loaded = load_model(self._config, generates=self._pooling is None)
        if loaded.device.type == "cpu":
            keep_freed_memory()
        loras = self._make_loras(loaded)
        with torch.inference_mode():
            sampler = Sampler(loaded.vocab_size, loaded.device)
            grammars, features = self._load_grammars(loaded)
        weights = Weights(loaded, self._config.model)
        kernels = load_cpu_kernels() if loaded.device.type == "cpu" and loaded.dtype is torch.bfloat16 else None
        lean = LeanDecoder(loaded.model, kernels) if self._can_be_lean(loaded) else None
        make_attention = _choose_attention(loaded, kernels)
        self._parts = _Parts(loaded, weights, 0, None, sampler, loras, lean, grammars, make_attention)
        with contextlib.nullcontext() if loras is None else loras.watched():
            self._try_one_step(self._make_cache(1))
        num_kv_blocks = self._choose_num_kv_blocks(loaded)
        self._make_cache(num_kv_blocks)
        logger.info(
            "loaded %s: %s on %s, %d KV blocks of %d tokens (%d MiB)",
            self._config.model,
            loaded.dtype,
            device_name(loaded.device),
            num_kv_blocks,
            loaded.kv_cache_shape.block_size,
            num_kv_blocks * loaded.kv_cache_shape.block_bytes >> 20,
        )
        return ModelInfo(
            device=device_name(loaded.device),
            max_model_len=loaded.max_model_len,
            vocab_size=loaded.vocab_size,
            eos_token_ids=loaded.eos_token_ids,
            num_kv_blocks=num_kv_blocks,
            block_size=loaded.kv_cache_shape.block_size,
            features=features,
            supported_tasks=("generate",) if self._pooling is None else ("embed",),
            embedding_size=0 if self._pooling is None else self._pooling.size,
            embedding_dimensions=() if self._pooling is None else self._pooling.dimensions,
        )

    def _can_be_lean(self, loaded: LoadedModel) -> bool:
        """Adapters are applied in the model's own modules, and vectors come from them."""
        return self._pooling is None and not self._config.enable_lora and LeanDecoder.can_compute(loaded.model)

    def _choose_num_kv_blocks(self, loaded: LoadedModel) -> int:
        is_cuda = loaded.device.type == "cuda"
        step_bytes = self._largest_step_bytes(loaded) if is_cuda else 0
        return choose_num_kv_blocks(
            loaded.kv_cache_shape,
            free_bytes=free_memory_bytes(loaded.device),
            is_cuda=is_cuda,
            max_model_len=loaded.max_model_len,
            must_hold_model_len=self._config.max_model_len is not None,
            max_num_seqs=self._config.max_num_seqs,
            num_kv_blocks=self._config.num_kv_blocks,
            kv_cache_memory_bytes=self._config.kv_cache_memory_bytes,
            gpu_share_bytes=gpu_share_bytes(loaded.device, self._config.gpu_memory_utilization),
            step_bytes=step_bytes,
        )

    def _largest_step_bytes(self, loaded: LoadedModel) -> int:
        config, shape = self._config, loaded.kv_cache_shape
        batch = largest_batch(config.max_num_batched_tokens, config.max_num_seqs, loaded.max_model_len, shape.block_size)
        self._make_cache(num_blocks_of(batch))
        num_bytes = peak_bytes(lambda: self.execute(batch), loaded.device)
        self._parts = replace(self._loaded_parts, cache=None)
        torch.cuda.empty_cache()  # what the step has used is free again, and is counted so
        return num_bytes

    def _make_cache(self, num_blocks: int) -> PagedKVCache:
        parts = self._loaded_parts
        with torch.inference_mode():
            cache = PagedKVCache(parts.loaded.kv_cache_shape, num_blocks, parts.loaded.device)
        self._parts = replace(parts, num_kv_blocks=num_blocks, cache=cache)
        return cache

    def _load_grammars(self, loaded: LoadedModel) -> tuple[Grammars, tuple[str, ...]]:
        """And what of `OPTIONAL_FEATURES` this engine has: not every tokenizer can be used with grammars."""
        if self._pooling is not None:
            return Grammars(None, "this model generates no text"), ()
        try:
            tokenizer = load_grammar_tokenizer(self._config.model, loaded.vocab_size, loaded.eos_token_ids)
        except GrammarError as error:
            logger.warning("no structured output: %s", error)
            return Grammars(None, str(error)), tuple(f for f in OPTIONAL_FEATURES if f != "structured_outputs")
        return Grammars(tokenizer), OPTIONAL_FEATURES

    @torch.inference_mode()
    def execute(self, batch: SchedulerOutput) -> ModelRunnerOutput:
        parts = self._loaded_parts
        loaded, cache, sampler, loras = parts.loaded, parts.cache, parts.sampler, parts.loras
        assert cache is not None, "a step while the KV cache sleeps"
        step_grammars = parts.grammars.begin(batch)  # works beside the model
        inputs = build_input_batch(batch, cache, parts.make_attention, loaded.device)
        sampling = [s.request for s in batch.scheduled if s.samples]
        if parts.lean is not None:
            logits = parts.lean.logits(inputs.input_ids, inputs.position_ids, inputs.attention, inputs.logits_rows)
        else:
            # The last layer's matrix is the largest: only where logits are wanted.
            head = {"logits_to_keep": inputs.logits_rows} if self._pooling is None else {}
            with contextlib.nullcontext() if loras is None else loras.applied(batch):
                output = loaded.model(
                    input_ids=inputs.input_ids,
                    position_ids=inputs.position_ids,
                    use_cache=False,
                    attention_step=inputs.attention,
                    **head,
                )
            if self._pooling is not None:
                hidden = output.last_hidden_state[0].index_select(0, inputs.logits_rows)
                return make_vectors(hidden.float(), sampling, self._pooling.normalize)
            logits = output.logits[0]
        # In float32 from here on: bfloat16 has too few digits for sums over a vocabulary, and a slow argmax.
        sampled = sampler.sample(logits[: inputs.num_sampled].float(), sampling, step_grammars.collect())
        sampled.prompt_logprobs = prompt_logprobs(logits[inputs.num_sampled :], inputs.prompt_spans, batch)
        step_grammars.advance(sampled)
        return sampled

    def load_lora(self, path: str) -> str:
        return self._loras.load(path)

    def drop_lora(self, lora_id: str) -> None:
        self._loras.drop(lora_id)

    def pin_loras(self, lora_ids: frozenset[str]) -> None:
        self._loras.slots.pinned = lora_ids

    @property
    def _loras(self) -> LoraModel:
        loras = self._loaded_parts.loras
        assert loras is not None, "an adapter without --enable-lora"
        return loras

    def _make_loras(self, loaded: LoadedModel) -> LoraModel | None:
        if not self._config.enable_lora:
            return None
        if self._pooling is not None:
            raise ConfigError("--enable-lora needs a model that generates text")
        return LoraModel(
            loaded.model,
            max_loras=self._config.max_loras,
            max_rank=self._config.max_lora_rank,
            dtype=loaded.dtype,
            device=loaded.device,
        )

    def shutdown(self) -> None:
        if self._parts is not None:
            self._parts.grammars.close()
        self._parts = None

    @property
    def _loaded_parts(self) -> _Parts:
        assert self._parts is not None, "not loaded"
        return self._parts

    # --- operations ---------------------------------------------------------------------------------------------------

    @property
    def _weights(self) -> Weights:
        return self._loaded_parts.weights

    def _release_cache(self) -> None:
        self._parts = replace(self._loaded_parts, cache=None)

    def _restore_cache(self) -> None:
        parts = self._loaded_parts
        if parts.cache is None:
            self._make_cache(parts.num_kv_blocks)

    def _try_one_step(self, cache: PagedKVCache) -> None:
        """Refuses a model whose layers do not all compute the attention that we provide, and warms the rest up."""
        request = Request(
            key=(0, 0),
            request_id="trial step",
            token_ids=[0],
            num_prompt_tokens=1,
            num_original_prompt_tokens=1,
            sampling_params=SamplingParams(temperature=0.0),
            max_total_tokens=2,
            block_ids=[0],
        )
        try:
            self.execute(SchedulerOutput([ScheduledRequest(request, 1, samples=True)], num_decodes=0, num_tokens=1))
        except (TypeError, RuntimeError, IndexError) as error:
            raise ConfigError(f"model is not supported: its trial step failed: {error}") from error
        if silent := cache.unwritten_layers(0, 0):
            raise ConfigError(f"model is not supported: layers {silent} do not use softmax attention")


def _choose_attention(loaded: LoadedModel, kernels: CpuKernels | None) -> MakeAttentionStep:
    shape, kernel = loaded.kv_cache_shape, find_kernel()
    if kernel is not None and can_use_varlen(loaded.device, loaded.dtype, shape.head_dim):
        if shape.block_size % BLOCK_SIZE_MULTIPLE == 0:
            return partial(make_varlen_attention, kernel=kernel)
        logger.warning(
            "--block-size %d is no multiple of %d: attention cannot read K and V in place and takes a slower way",
            shape.block_size,
            BLOCK_SIZE_MULTIPLE,
        )
    if kernels is not None and not kernels.can_attend(head_dim=shape.head_dim, block_size=shape.block_size):
        kernels = None
    return partial(make_padded_attention, dtype=loaded.dtype, kernels=kernels)
