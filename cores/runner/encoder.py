"""The runner of encoders: every token sees all others, and a prompt becomes one vector. No KV cache, no tokens out.

A step's prompts run as a few padded batches of similar length through transformers' own model: an encoder has nothing to keep,
and padding costs less than half of a batch.
"""

from __future__ import annotations

import logging

import torch

from cores.config import DEFAULT_BLOCK_SIZE, ConfigError, EngineConfig
from cores.loader import LoadedModel, device_name, load_encoder
from cores.pooling_params import PoolingParams
from cores.request import Request
from cores.runner.interface import ModelInfo, ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from cores.runner.pooling import make_vectors, pool
from cores.runner.pooling_kind import PoolingKind
from cores.runner.torch_operations import TorchOperations
from cores.runner.weights import Weights
from cores.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

MIN_BATCH_LEN = 16  # shorter prompts are padded together


class EncoderModelRunner(TorchOperations):
    """A `ModelRunner`. Keeps nothing of a request."""

    def __init__(self, config: EngineConfig, kind: PoolingKind, num_threads: int | None = None) -> None:
        self._config = config
        self._kind = kind
        self._num_threads = num_threads
        self._model: tuple[LoadedModel, Weights] | None = None

    def load(self) -> ModelInfo:
        if self._config.enable_lora:
            raise ConfigError("--enable-lora needs a model that generates text")
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        loaded = load_encoder(self._config, self._kind)
        self._model = loaded, Weights(loaded, self._config.model)
        self._try_one_step()
        logger.info("loaded %s: encoder, %s on %s", self._config.model, loaded.dtype, device_name(loaded.device))
        # Blocks of a cache that does not exist: the scheduler may hand out as many as a step's prompts can ask for.
        block_size = self._config.block_size or DEFAULT_BLOCK_SIZE
        num_blocks = -(-self._config.max_num_batched_tokens // block_size) + 2 * self._config.max_num_seqs
        return ModelInfo(
            device=device_name(loaded.device),
            max_model_len=loaded.max_model_len,
            vocab_size=loaded.vocab_size,
            eos_token_ids=(),
            num_kv_blocks=num_blocks,
            block_size=block_size,
            supported_tasks=("embed",),
            needs_whole_prompts=True,
            embedding_size=self._kind.size,
            embedding_dimensions=self._kind.dimensions,
        )

    @torch.inference_mode()
    def execute(self, batch: SchedulerOutput) -> ModelRunnerOutput:
        assert self._model is not None, "execute before load"
        loaded, _ = self._model
        requests = [scheduled.request for scheduled in batch.scheduled]
        pooled = torch.empty(len(requests), self._kind.size, dtype=torch.float32, device=loaded.device)
        for rows in _by_length([request.num_tokens for request in requests]):
            pooled[rows] = self._encode(loaded, [requests[row].token_ids for row in rows])
        return make_vectors(pooled, requests, self._kind.normalize)

    def _encode(self, loaded: LoadedModel, prompts: list[list[int]]) -> torch.Tensor:
        """[prompts, size] float32."""
        longest = max(map(len, prompts))
        padding = loaded.padding_token_id
        input_ids = torch.tensor([p + [padding] * (longest - len(p)) for p in prompts], device=loaded.device)
        lengths = torch.tensor([len(p) for p in prompts], device=loaded.device)
        attention_mask = (torch.arange(longest, device=loaded.device) < lengths[:, None]).long()
        output = loaded.model(input_ids=input_ids, attention_mask=attention_mask)
        return pool(output.last_hidden_state, lengths, self._kind.how)

    def _try_one_step(self) -> None:
        """Refuses a model that cannot be called like this, and warms the rest up."""
        request = Request(
            key=(0, 0),
            request_id="trial step",
            token_ids=[0, 1],
            num_prompt_tokens=2,
            num_original_prompt_tokens=2,
            sampling_params=SamplingParams(),
            max_total_tokens=3,
            pooling_params=PoolingParams(),
        )
        try:
            self.execute(SchedulerOutput([ScheduledRequest(request, 2, samples=True)], num_decodes=0, num_tokens=2))
        except (TypeError, RuntimeError, IndexError, AttributeError) as error:
            raise ConfigError(f"model is not supported: its trial step failed: {error}") from error

    def shutdown(self) -> None:
        self._model = None

    # --- operations ---

    @property
    def _weights(self) -> Weights:
        assert self._model is not None, "not loaded"
        return self._model[1]

    def _release_cache(self) -> None:
        """There is none."""

    def _restore_cache(self) -> None:
        """There is none."""

    # --- adapters: refused at load ---

    def load_lora(self, path: str) -> str:
        raise AssertionError("an adapter without --enable-lora")

    def drop_lora(self, lora_id: str) -> None:
        raise AssertionError("an adapter without --enable-lora")

    def pin_loras(self, lora_ids: frozenset[str]) -> None:
        assert not lora_ids, "an adapter without --enable-lora"


def _by_length(lengths: list[int]) -> list[list[int]]:
    """Rows in groups whose lengths round up to the same power of two: less than half of a padded batch is padding."""
    groups: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        groups.setdefault(max(MIN_BATCH_LEN, 1 << (length - 1).bit_length()), []).append(row)
    return list(groups.values())
