"""From a Hugging Face style directory to a model on a device, or a `ConfigError` that says why not. Knows no requests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from cores.config import DEFAULT_BLOCK_SIZE, ConfigError, EngineConfig
from cores.runner.attention import ATTENTION_NAME
from cores.runner.model_dir import read_eos_token_ids
from cores.runner.packed_layers import can_pack, pack_linears
from cores.runner.paged_kv_cache import KVCacheShape
from cores.runner.pooling_kind import PoolingKind, num_positions
from cores.runner.varlen_attention import BLOCK_SIZE_MULTIPLE, can_use_varlen

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: Any  # a transformers model, in evaluation mode
    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    cache_shape: KVCacheShape | None = None  # None: it keeps nothing of what it has read
    padding_token_id: int = 0

    @property
    def kv_cache_shape(self) -> KVCacheShape:
        assert self.cache_shape is not None, "an encoder has no KV cache"
        return self.cache_shape


def load_model(config: EngineConfig, *, generates: bool = True) -> LoadedModel:
    """A causal language model, or what of it makes hidden states. Raises `ConfigError` for what cannot be served."""
    path = _model_dir(config.model)
    model_config = _read_config(path)
    max_model_len = resolve_max_model_len(config.max_model_len, model_config)
    check_supported(model_config, max_model_len, generates=generates)
    device, dtype = resolve_device(config.device), resolve_dtype(config.dtype, model_config)
    check_weights_fit(path, model_config, dtype, device)
    auto_class = AutoModelForCausalLM if generates else AutoModel
    model = _load_weights(path, model_config, dtype, device, auto_class, ATTENTION_NAME)
    if not model._supports_attention_backend:
        raise ConfigError(f"model is not supported: {type(model).__name__} does not let its attention be replaced")
    if can_pack(device, dtype):
        pack_linears(model)
    return LoadedModel(
        model=model,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        vocab_size=model_config.vocab_size,
        eos_token_ids=read_eos_token_ids(path, model_config.to_dict()),
        cache_shape=_cache_shape(model_config, config.block_size, dtype, device),
    )


def load_encoder(config: EngineConfig, kind: PoolingKind) -> LoadedModel:
    """An encoder, which computes a prompt in one step. Raises `ConfigError` for what cannot be served."""
    path = _model_dir(config.model)
    model_config = _read_config(path)
    max_model_len = resolve_encoder_len(config, model_config, kind)
    device, dtype = resolve_device(config.device), resolve_dtype(config.dtype, model_config)
    check_weights_fit(path, model_config, dtype, device)
    return LoadedModel(
        model=_load_weights(path, model_config, dtype, device, AutoModel, None),
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        vocab_size=model_config.vocab_size,
        eos_token_ids=(),
        padding_token_id=model_config.pad_token_id or 0,
    )


def _load_weights(
    path: Path, model_config: Any, dtype: torch.dtype, device: torch.device, auto_class: Any, attention: str | None
) -> Any:
    transformers_logging.disable_progress_bar()  # stderr belongs to logging
    try:
        model, info = auto_class.from_pretrained(
            path,
            config=model_config,
            dtype=dtype,
            attn_implementation=attention,
            device_map={"": device} if device.type == "cuda" else None,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        raise ConfigError(f"model {str(path)!r} cannot be loaded: {error}") from error
    if missing := needed_keys(info["missing_keys"]):  # transformers fills them with random numbers
        raise ConfigError(f"model {str(path)!r} lacks weights: {', '.join(missing[:3])} …")
    return model.eval().requires_grad_(False)


def needed_keys(names: Iterable[str]) -> list[str]:
    """Without those of a classifier's pooler, which older encoders have, many files lack, and we do not use."""
    return sorted(name for name in names if not name.startswith("pooler."))


def _model_dir(name: str) -> Path:
    path = Path(name)
    if not name or not (path / "config.json").is_file():
        raise ConfigError(f"model directory {name!r} has no config.json")
    if not any(path.glob("*.safetensors")):
        raise ConfigError(f"model directory {name!r} has no weights (*.safetensors)")
    return path


def _read_config(path: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise ConfigError(f"{str(path / 'config.json')!r} cannot be used: {error}") from error


# --- what we can serve --------------------------------------------------------------------------------------------------


def _is_no_causal_lm(config: Any, max_model_len: int) -> bool:
    return not all(name.endswith(("ForCausalLM", "LMHeadModel")) for name in config.architectures or ["ForCausalLM"])


def _has_other_layers(config: Any, max_model_len: int) -> bool:
    return not set(getattr(config, "layer_types", None) or ()) <= {"full_attention", "sliding_attention"}


def _has_short_window(config: Any, max_model_len: int) -> bool:
    window: int | None = getattr(config, "sliding_window", None)
    # A window that no sequence outgrows is full attention. Qwen2 writes a window down and switches it off.
    return window is not None and window < max_model_len and getattr(config, "use_sliding_window", True)


def _has_rope_that_depends_on_the_batch(config: Any, max_model_len: int) -> bool:
    """These recompute all frequencies when any sequence of the batch outgrows the original length."""
    rope = getattr(config, "rope_parameters", None) or {}
    for entry in [rope] if "rope_type" in rope else rope.values():  # one for all layers, or one per type of layer
        kind = str(entry.get("rope_type", "default"))
        original = entry.get("original_max_position_embeddings") or config.max_position_embeddings
        if ("dynamic" in kind or kind == "longrope") and max_model_len > original:
            return True
    return False


Check = Callable[[Any, int], bool]

# What a model's configuration may ask for that we do not compute. Whatever does not show there, the runner's trial step finds.
UNSUPPORTED: tuple[tuple[str, Check], ...] = (
    ("an encoder-decoder model", lambda config, _: bool(config.is_encoder_decoder)),
    ("not a causal language model", _is_no_causal_lm),
    ("layers other than softmax attention (linear attention, state space, chunked)", _has_other_layers),
    ("a sliding window shorter than --max-model-len", _has_short_window),
    ("chunked attention", lambda config, _: bool(getattr(config, "attention_chunk_size", None))),
    ("soft-capping of attention logits", lambda config, _: bool(getattr(config, "attn_logit_softcapping", None))),
    ("latent attention (MLA)", lambda config, _: bool(getattr(config, "kv_lora_rank", None))),
    ("ALiBi position biases", lambda config, _: bool(getattr(config, "alibi", False))),
    ("dynamic or long RoPE beyond the original length: lower --max-model-len", _has_rope_that_depends_on_the_batch),
)


def check_supported(config: Any, max_model_len: int, *, generates: bool = True) -> None:
    """Raises `ConfigError` that names what we cannot compute."""
    for what, asks_for in UNSUPPORTED:
        if asks_for is _is_no_causal_lm and not generates:
            continue
        if asks_for(config, max_model_len):
            raise ConfigError(f"model is not supported: {config.model_type} has or is {what}")


# --- settings that the model or the machine decides -----------------------------------------------------------------------


def resolve_max_model_len(wanted: int | None, config: Any) -> int:
    own = getattr(config, "max_position_embeddings", None)
    if wanted is None:
        if not own:
            raise ConfigError("the model states no longest length: --max-model-len is needed")
        return int(own)
    if own and wanted > own:
        raise ConfigError(f"--max-model-len must be at most the model's own {own}, got {wanted}")
    return wanted


def resolve_encoder_len(config: EngineConfig, model_config: Any, kind: PoolingKind) -> int:
    """The makers' recommendation is a default, the model's positions and the step's budget are limits."""
    own, budget, wanted = num_positions(model_config.to_dict()), config.max_num_batched_tokens, config.max_model_len
    limit = budget if own is None else min(own, budget)
    if wanted is None:
        return min(limit, kind.max_model_len or limit)
    if wanted > limit:
        because = (
            "--max-num-batched-tokens, since an encoder computes a prompt in one step" if limit == budget else "the model's own"
        )
        raise ConfigError(f"--max-model-len must be at most {limit}, {because}, got {wanted}")
    return wanted


def resolve_device(wanted: str) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        raise ConfigError("--device cuda: this process sees no CUDA device")
    return torch.device("cuda", 0) if has_cuda and wanted != "cpu" else torch.device("cpu")


def resolve_dtype(wanted: str, config: Any) -> torch.dtype:
    own: torch.dtype = config.dtype or torch.float32
    return own if wanted == "auto" else {d: getattr(torch, d) for d in ("float32", "bfloat16", "float16")}[wanted]


def device_name(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else f"{device} {torch.cuda.get_device_name(device)}"


def free_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = int(psutil.virtual_memory().available)
    limit = cgroup_free_bytes()
    return free if limit is None else min(free, limit)


def gpu_share_bytes(device: torch.device, utilization: float | None) -> int | None:
    """What is left of this process's share of a GPU, or None where none was given. Raises `ConfigError` for a CPU.

    What other processes have there is not counted: two ranks with 0.45 each share a GPU.
    """
    if utilization is None:
        return None
    if device.type != "cuda":
        raise ConfigError(f"--gpu-memory-utilization is for GPUs, but the model is on {device}; use --kv-cache-memory-bytes")
    return int(torch.cuda.mem_get_info(device)[1] * utilization) - torch.cuda.memory_reserved(device)


def cgroup_free_bytes(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What a container's limit leaves (cgroup v2), or None: the machine's figures do not know of it."""
    try:
        limit, used = (root / "memory.max").read_text().strip(), (root / "memory.current").read_text().strip()
        # Clean file pages count as used but are given back on demand: model files that were just read, above all.
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    return None if limit == "max" else int(limit) - int(used) + int(stat.get("inactive_file", 0))


def weight_bytes(path: Path, config: Any, dtype: torch.dtype) -> int:
    """What a directory's weights take as numbers of that type."""
    stored = config.dtype or dtype
    on_disk = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    return int(on_disk * dtype.itemsize // stored.itemsize)


def check_weights_fit(path: Path, config: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Before the load: a machine that runs out of memory later says less."""
    needed, free = weight_bytes(path, config, dtype), free_memory_bytes(device)
    if needed > free:
        raise ConfigError(f"the weights need {needed >> 20} MiB as {dtype}, but only {free >> 20} MiB are free on {device}")


def _cache_shape(config: Any, block_size: int | None, dtype: torch.dtype, device: torch.device) -> KVCacheShape:
    num_heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    own_size = BLOCK_SIZE_MULTIPLE if can_use_varlen(device, dtype, head_dim) else DEFAULT_BLOCK_SIZE
    return KVCacheShape(
        num_layers=config.num_hidden_layers,
        block_size=block_size or own_size,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=head_dim,
        dtype=dtype,
    )
